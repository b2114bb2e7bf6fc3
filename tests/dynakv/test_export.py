"""An exported compressor is the trained one in fewer bytes, for all that loads a checkpoint."""

import pytest
import torch
from methods import dynakv_model, planned_model, tiny_model
from safetensors.torch import load_file

import dynakv
from dynakv.checkpoint import load_compressors, save_again, tensors_of
from dynakv.checkpoint_files import WEIGHTS, read_config, write_files
from dynakv.packed_projections import CODES, SCALE
from lowrank_kv.utils.errors import UserError
from lowrank_kv_cli import export as command
from lowrank_kv_cli import generate

KINDS = {
    "gates": lambda model: dynakv_model(model, 0.4),
    "plan": lambda model: planned_model(model, 0.4),
    "plan of classes": lambda model: planned_model(model, 0.4, token_classes=2),
    "nested": lambda model: dynakv_model(model, 1, rank_policy="nested"),
    "soft threshold": lambda model: dynakv_model(model, 1, rank_policy="soft_threshold"),
}


@pytest.fixture(params=KINDS)
def saved(request, tmp_path):
    """A checkpoint of each kind of ranks, with a card beside it."""
    model = tiny_model()
    KINDS[request.param](model)
    dynakv.save_compressor(model, tmp_path / "trained", summary={"steps": 3})
    (tmp_path / "trained/README.md").write_text("a card")
    return tmp_path / "trained"


@pytest.fixture
def exported(saved, tmp_path):
    dynakv.export_compressor(saved, tmp_path / "exported")
    return tmp_path / "exported"


def test_what_is_exported_rebuilds_as_exactly_and_takes_fewer_bytes(saved, exported):
    assert (exported / WEIGHTS).stat().st_size < 0.7 * (saved / WEIGHTS).stat().st_size
    assert (exported / "README.md").read_text() == "a card"
    assert read_config(exported).summary == {"steps": 3}
    before, after = load_compressors(saved), load_compressors(exported)
    rounded = False
    for index, layer in after.items():
        for side in ("key", "value"):
            mine, theirs = getattr(layer, side), getattr(before[index], side)
            basis_CC, inverse_CC = mine.projection.fixed_matrices(torch.float64, torch.device("cpu"))
            trained_CC, _ = theirs.projection.fixed_matrices(torch.float64, torch.device("cpu"))
            # Half a step of each column, where rows are of one size.
            row_C = trained_CC.square().mean(dim=1, keepdim=True).sqrt()
            step_C = (trained_CC / row_C).abs().amax(dim=0) / 127
            assert ((basis_CC - trained_CC).abs() <= 0.501 * step_C * row_C).all()
            torch.testing.assert_close(basis_CC @ inverse_CC, torch.eye(len(basis_CC)).double(), atol=1e-5, rtol=0)
            rounded |= not torch.equal(basis_CC, trained_CC)
            for name, tensor in theirs.gate.state_dict().items():
                assert torch.equal(mine.gate.state_dict()[name], tensor)
    assert rounded


def test_a_file_without_scales_of_rows_is_one_of_an_older_version(exported):
    state, config = load_file(exported / WEIGHTS), read_config(exported)
    expected = load_compressors(exported)
    for name in [name for name in state if name.endswith(CODES)]:
        place = name.removesuffix(CODES)
        state[place + SCALE] = state[place + SCALE][1].clone()
    write_files(exported, state, config)
    for index, layer in load_compressors(exported).items():
        found_CC, _ = layer.key.projection.fixed_matrices(torch.float64, torch.device("cpu"))
        code_CC, scale_C = (state[f"layers.{index}.key{each}"].double() for each in (CODES, SCALE))
        torch.testing.assert_close(found_CC, code_CC * scale_C, rtol=1e-6, atol=0)
        newer_CC, _ = expected[index].key.projection.fixed_matrices(torch.float64, torch.device("cpu"))
        assert not torch.equal(newer_CC, found_CC)


def test_numbers_of_many_sizes_are_rounded_alike(tmp_path):
    """As those of several layers in one row are: an entry of small size is one of a large number."""
    model = tiny_model()
    planned_model(model, 0.4)
    projection = dynakv.compressors(model)[0].key.projection
    size_C = torch.logspace(-2, 2, len(projection.start))
    with torch.no_grad():
        projection.weight.zero_()
        projection.start.div_(size_C[:, None])
        projection.start_inverse.mul_(size_C)
    dynakv.save_compressor(model, tmp_path / "trained")
    dynakv.export_compressor(tmp_path / "trained", tmp_path / "out")
    basis_CC, _ = load_compressors(tmp_path / "out")[0].key.projection.fixed_matrices(
        torch.float64, torch.device("cpu")
    )
    error_C = (basis_CC - projection.start.double()).norm(dim=1) / projection.start.double().norm(dim=1)
    assert error_C.max() < 0.02


def test_it_generates_as_the_same_numbers_in_a_plain_checkpoint(exported, tmp_path):
    ids = torch.randint(1, 97, (2, 24), generator=torch.Generator().manual_seed(0))
    dynakv.save_compressor(dynakv.attach(tiny_model(), exported), tmp_path / "plain")
    assert not any(name.endswith(CODES) for name in load_file(tmp_path / "plain" / WEIGHTS))
    found = []
    for directory in (exported, tmp_path / "plain"):
        model = dynakv.attach(tiny_model(), directory)
        made = model.generate(ids, max_new_tokens=6, do_sample=False, return_dict_in_generate=True, output_logits=True)
        found.append((torch.stack(made.logits), made.past_key_values.rate))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_training_goes_on_from_it(saved, exported):
    model = tiny_model()
    dynakv.add_compressors(model, read_config(saved).compressor)
    dynakv.use_dynakv_cache(model)
    dynakv.initialize_from_checkpoint(model, exported)
    expected, found = tensors_of(load_compressors(exported)), tensors_of(dynakv.compressors(model))
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    ids = torch.arange(1, 20)[None]
    loss = model.train()(ids, labels=ids).loss
    assert torch.isfinite(loss)
    loss.backward()
    assert all(each.projection.weight.grad.count_nonzero() for each in dynakv.token_compressors(model))


def test_what_is_measured_later_leaves_it_as_small(saved, exported):
    before, summary = load_file(exported / WEIGHTS), read_config(exported).summary
    save_again(dynakv.attach(tiny_model(), exported), exported, {**summary, "measured": 1})
    after = load_file(exported / WEIGHTS)
    assert after.keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
    assert read_config(exported).summary == {**summary, "measured": 1}


def test_the_command_says_how_many_bytes_it_took(saved, tmp_path, capsys):
    command.main(["--checkpoint", str(saved), "--output", str(tmp_path / "out")])
    before, after = ((each / WEIGHTS).stat().st_size for each in (saved, tmp_path / "out"))
    assert capsys.readouterr().out == f"{tmp_path / 'out'}: {after:,} bytes of {before:,}\n"


@pytest.mark.parametrize(
    ("base_model", "name"),
    [
        ("{here}/models/tiny", "tiny"),  # is there
        ("/elsewhere/models/tiny", "tiny"),
        ("../models/tiny", "tiny"),
        ("~/models/tiny", "tiny"),
        ("org/tiny", "org/tiny"),
    ],
)
def test_a_shared_compressor_names_its_model_without_the_trainer_s_path(base_model, name, tmp_path, capsys):
    (tmp_path / "models/tiny").mkdir(parents=True)
    model = tiny_model()
    dynakv_model(model, 0.4)
    model.config._name_or_path = base_model.format(here=tmp_path)
    dynakv.save_compressor(model, tmp_path / "trained")
    arguments = ["--checkpoint", str(tmp_path / "trained"), "--output", str(tmp_path / "out")]
    command.main(arguments)
    assert read_config(tmp_path / "out").base_model == name
    command.main([*arguments, "--base-model", "org/other"])
    assert read_config(tmp_path / "out").base_model == "org/other"
    with pytest.raises(UserError, match=r"`base_model` must be a hub id, .*, or left out; got '/models/tiny'"):
        command.main([*arguments, "--base-model", "/models/tiny"])


def test_a_model_that_is_not_there_is_given_by_an_option(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = tiny_model()
    dynakv_model(model, 0.4)
    model.config._name_or_path = "/elsewhere/a model"  # which no hub id can be
    dynakv.save_compressor(model, tmp_path / "trained")
    dynakv.export_compressor(tmp_path / "trained", tmp_path / "out")
    with pytest.raises(UserError, match="cannot load `a model`: there is no such directory here, .*; `--model` takes"):
        generate.main(["--checkpoint", str(tmp_path / "out"), "--prompt", "x"])


def test_what_cannot_be_exported_is_refused(saved, exported, tmp_path):
    with pytest.raises(UserError, match="was exported already; share it as it is"):
        dynakv.export_compressor(exported, tmp_path / "again")
    with pytest.raises(UserError, match="is the checkpoint itself, which training goes on from"):
        dynakv.export_compressor(saved, saved / "../trained")
    with pytest.raises(UserError, match="is within the checkpoint, which would be copied into itself"):
        dynakv.export_compressor(saved, saved / "shared")
    assert not (saved / "shared").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="holds other things"):
        dynakv.export_compressor(saved, tmp_path / "other")
    with pytest.raises(UserError, match="is no DynaKV checkpoint"):
        dynakv.export_compressor(tmp_path / "other", tmp_path / "new")
    assert not (tmp_path / "again").exists()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("decoder", ["orthogonal", "decoupled"])
def test_projections_that_are_no_matrix_and_its_inverse_are_refused(decoder, tmp_path):
    model = tiny_model()
    dynakv_model(model, 0.4, decoder=decoder)
    dynakv.save_compressor(model, tmp_path / "trained")
    with pytest.raises(UserError, match=f"`compressor.decoder: {decoder}`.*share the checkpoint as it is"):
        dynakv.export_compressor(tmp_path / "trained", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_projection_that_eight_bits_make_singular_is_refused(tmp_path):
    model = tiny_model()
    planned_model(model, 0.4)
    with torch.no_grad():
        projection = dynakv.compressors(model)[1].value.projection
        projection.weight.zero_()
        # Two columns that differ by a hundredth of a step of eight bits, where that moves no code to the next one.
        projection.start[:, 1] = projection.start[:, 0]
        row_C = projection.start.square().mean(dim=1).sqrt()
        step_C = row_C * (projection.start[:, 0] / row_C).abs().max() / 127
        code_C = projection.start[:, 0] / step_C
        place = int((code_C - code_C.round()).abs().argmin())
        projection.start[place, 1] += 0.01 * step_C[place]
        projection.start_inverse.copy_(torch.linalg.inv(projection.start.double()))
    dynakv.save_compressor(model, tmp_path / "trained")
    with pytest.raises(UserError, match=r"layers\.1\.value.*(does not come back from eight bits|cannot be inverted)"):
        dynakv.export_compressor(tmp_path / "trained", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_flipped_bit_is_found(exported, tmp_path):
    content = bytearray((exported / WEIGHTS).read_bytes())
    content[-100] ^= 1
    (exported / WEIGHTS).write_bytes(content)
    with pytest.raises(UserError, match=f"{WEIGHTS} is damaged: its SHA-256"):
        load_compressors(exported)


@pytest.mark.parametrize(
    "change",
    [
        lambda code, scale: (code[:-1], scale),
        lambda code, scale: (code.float(), scale),
        lambda code, scale: (code, scale[:-1]),
        lambda code, scale: (code, scale.half()),
        lambda code, scale: (code, None),
        lambda code, scale: (code * 0, scale),
        lambda code, scale: (code, scale * torch.nan),
    ],
    ids=["too few rows", "floats", "too few scales", "half scales", "no scale", "zeros", "not a number"],
)
def test_integers_of_another_form_are_refused_before_anything_is_filled(change, tmp_path):
    """With hashes that are right, as somebody may write them."""
    model, exported = tiny_model(), tmp_path / "exported"
    planned_model(model, 0.4)
    dynakv.save_compressor(model, tmp_path / "trained")
    dynakv.export_compressor(tmp_path / "trained", exported)
    state, config = load_file(exported / WEIGHTS), read_config(exported)
    place = "layers.0.key"
    code, scale = change(state.pop(place + CODES), state.pop(place + SCALE))
    state |= {place + CODES: code.contiguous()} | ({} if scale is None else {place + SCALE: scale.contiguous()})
    write_files(exported, state, config)
    model = tiny_model()
    before = set(model.state_dict())
    with pytest.raises(UserError, match=r"layers\.0\.key"):
        dynakv.attach(model, exported)
    assert set(model.state_dict()) == before
