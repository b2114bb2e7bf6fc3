"""A compressor checkpoint that has changed since it was written is never loaded."""

import json
import random
import shutil

import pytest
from methods import dynakv_model, tiny_model

import dynakv
from dynakv.checkpoint import load_compressors
from dynakv.checkpoint_files import CONFIG, SHA256, WEIGHTS, read_config
from lowrank_kv.utils.errors import UserError

FLIPS = 300


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    model = tiny_model()
    dynakv_model(model, 0.4)
    directory = tmp_path_factory.mktemp("saved") / "compressor"
    dynakv.save_compressor(model, directory, summary={"alpha": 3.5, "heldout": {"text ü": {"loss": 1.25}}})
    return directory


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def places(content: bytes) -> list[int]:
    """Bits of the first and last bytes, and of others at random."""
    draw = random.Random(0)
    ends = [*range(0, 80, 3), *range(8 * len(content) - 40, 8 * len(content) - 8, 3)]
    return ends + [draw.randrange(8 * (len(content) - 1)) for _ in range(FLIPS - len(ends))]


def refusal(model, directory) -> str | None:
    """Why a checkpoint cannot be attached; None where it can."""
    try:
        dynakv.detach(dynakv.attach(model, directory))
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG])
@pytest.mark.filterwarnings("ignore:.*was made on")
def test_every_flipped_bit_is_found_and_the_file_is_named(saved, name, tmp_path):
    model = tiny_model()
    shutil.copytree(saved, tmp_path / "copy")
    content = (saved / name).read_bytes()
    before = set(model.state_dict())
    for bit in places(content):
        (tmp_path / "copy" / name).write_bytes(flipped(content, bit))
        error = refusal(model, tmp_path / "copy")
        if error is None:
            assert name == CONFIG, f"bit {bit} of {name} was not found"
            entries = json.loads((tmp_path / "copy" / CONFIG).read_text())
            assert entries == json.loads(content), f"bit {bit} of {name} changed what it says"  # white space
        else:
            assert f"copy/{name}" in error
        assert set(model.state_dict()) == before


def test_a_server_that_needs_no_model_looks_at_the_checksum_too(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "copy")
    content = (saved / WEIGHTS).read_bytes()
    assert load_compressors(tmp_path / "copy")
    (tmp_path / "copy" / WEIGHTS).write_bytes(flipped(content, 8 * len(content) - 20))
    with pytest.raises(UserError, match=f"copy/{WEIGHTS} is damaged: its SHA-256"):
        load_compressors(tmp_path / "copy")


@pytest.mark.parametrize("share", [0, 0.001, 0.5, 0.99])
@pytest.mark.parametrize("name", [WEIGHTS, CONFIG])
def test_a_file_that_was_cut_is_found(saved, name, share, tmp_path):
    shutil.copytree(saved, tmp_path / "copy")
    content = (saved / name).read_bytes()
    (tmp_path / "copy" / name).write_bytes(content[: int(share * len(content))])
    with pytest.raises(UserError, match=rf"{name}"):
        dynakv.attach(tiny_model(), tmp_path / "copy")


def test_settings_that_were_edited_are_found_and_the_remedy_is_named(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "copy")
    entries = json.loads((saved / CONFIG).read_text())
    entries["compressor"]["threshold"] = 0.3
    (tmp_path / "copy" / CONFIG).write_text(json.dumps(entries))
    with pytest.raises(UserError, match=r"config.json is damaged or was changed by hand.*dynakv.attach\(model, dir"):
        dynakv.attach(tiny_model(), tmp_path / "copy")


def test_a_checkpoint_of_before_there_were_hashes_loads_with_a_warning(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "copy")
    entries = json.loads((saved / CONFIG).read_text())
    del entries[SHA256]
    (tmp_path / "copy" / CONFIG).write_text(json.dumps(entries))
    with pytest.warns(UserWarning, match="has no `sha256`.*save_compressor"):
        model = dynakv.attach(tiny_model(), tmp_path / "copy")
    dynakv.save_compressor(model, tmp_path / "again")
    assert json.loads((tmp_path / "again" / CONFIG).read_text())[SHA256].keys() == {WEIGHTS, CONFIG}


@pytest.mark.parametrize("rates", [{2: 0.1, 10: 0.2}, {"2": 0.1, "10": 0.2}, {0.5: 1, 1e-5: 2}, {None: 1, True: 2}])
def test_a_summary_with_keys_of_any_kind_is_found_undamaged(tmp_path, rates):
    model = tiny_model()
    dynakv_model(model, 0.4)
    dynakv.save_compressor(model, tmp_path / "it", summary={"rates": rates})
    assert refusal(tiny_model(), tmp_path / "it") is None
    assert read_config(tmp_path / "it").summary == json.loads(json.dumps({"rates": rates}))
