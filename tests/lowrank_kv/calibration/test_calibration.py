"""Calibration: of what model, in what mode, and what is read back from a disk."""

import hashlib
import json

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from methods import calibration_of, dynakv_model, tiny_model
from safetensors.torch import load_file, save_file

import dynakv
import lowrank_kv
from lowrank_kv.calibration import calibration
from lowrank_kv.calibration.activation_moments import calibrate
from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.calibration.gradient_moments import gradient_moments
from lowrank_kv.calibration.read_moments import read_moments
from lowrank_kv.hf.exact_tokens import ExactTokens
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.text_data import CalibrationText, labelled_block
from ojakv import OjaKVCache


def token_ids(count: int = 2, length: int = 24) -> torch.Tensor:
    return torch.randint(1, 97, (count, length), generator=torch.Generator().manual_seed(3))


def from_text(model, blocks, progress):
    return Calibration.from_text(model, blocks, gradients=True, progress=progress)


@pytest.mark.parametrize("measure", [calibrate, gradient_moments, from_text])
def test_a_model_with_compressors_is_refused_before_it_runs(measure):
    model = tiny_model()
    dynakv_model(model, 0.5)
    model.register_forward_pre_hook(lambda *_: pytest.fail("a pass was made"))
    model.model.register_forward_pre_hook(lambda *_: pytest.fail("a pass was made"))
    with pytest.raises(UserError, match=r"has compressors, .* uncompressed model; call dynakv.detach\(model\) first"):
        measure(model, token_ids(), progress=False)
    assert dynakv.compressors(model)


@pytest.mark.parametrize("gradients", [False, True])
def test_a_model_that_fills_a_presets_cache_is_calibrated_as_the_stock_one(gradients):
    """No pass of a calibration fills a cache; the check of a model would, and is left out."""
    blocks = token_ids(length=160)
    expected = Calibration.from_text(tiny_model(), blocks, gradients=gradients, read_gradients=True, progress=False)
    other, bases = tiny_model(), calibration_of(tiny_model(), read=True)
    lowrank_kv.compress(other, "static-mixed", rate=0.3, bases=bases, self_check=False)
    found = Calibration.from_text(other, blocks, gradients=gradients, read_gradients=True, progress=False)
    for index, sides in expected.moments.items():
        for side, moment in sides.items():
            assert torch.equal(found.moments[index][side], moment), (index, side)
        for side, states in expected.read[index].items():
            assert torch.equal(found.read[index][side].state_CC, states.state_CC)
    assert isinstance(other(blocks[:1]).past_key_values, OjaKVCache)


def test_what_gradients_refuse_is_refused_before_the_states_are_read(monkeypatch):
    monkeypatch.setattr(calibration, "calibrate", lambda *_, **__: pytest.fail("a pass was made"))
    with pytest.raises(UserError, match="blocks of one token"):
        from_text(tiny_model(), token_ids(4, 1), progress=False)


@pytest.mark.parametrize("measure", [calibrate, gradient_moments])
def test_a_model_in_training_is_measured_without_dropout_and_stays_in_training(measure):
    model = tiny_model(attention_dropout=0.5)
    expected = measure(model, token_ids(), progress=False)
    model.train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    found = measure(model, token_ids(), progress=False)
    assert [module.training for module in model.modules()] == modes
    for index, sides in expected.items():
        for side, moment in sides.items():
            torch.testing.assert_close(found[index][side].mean(), moment.mean(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("tokens", "length", "shape"), [(1000, 1024, (3, 333)), (1000, 100, (9, 100)), (3, 8, (3, 1)), (96, 32, (3, 32))]
)
def test_no_more_text_is_read_than_was_asked_for(tmp_path, tokens, length, shape):
    names = []
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"the text called {name} is read a share of. " * 60)
        names.append(str(tmp_path / f"{name}.txt"))
    blocks_NT = CalibrationText(name=names, tokens=tokens, length=length).blocks(byte_tokenizer())
    assert tuple(blocks_NT.shape) == shape
    assert blocks_NT.numel() <= tokens


def test_a_text_in_the_user_s_directory_is_read_by_its_short_name(tmp_path, monkeypatch):
    """A shell leaves the `~` of LABEL=~/FILE as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("the text is in the directory of the user. " * 4)
    label, tokens_T = labelled_block("mine=~/a.txt", byte_tokenizer(), 16)
    assert (label, len(tokens_T)) == ("mine", 16)


GEOMETRY = {"layers": [0, 1, 2], "num_kv_heads": 2, "head_dim": 16}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            {"geometry": {**GEOMETRY, "head_dim": None}},
            "`geometry` in .*config.json is damaged: its `head_dim` is None",
        ),
        ({"geometry": {"layers": [0, 1, 2], "num_kv_heads": 2}}, "`geometry` in .*config.json .* it has no `head_dim`"),
        ({"geometry": {**GEOMETRY, "head_dim": 0}}, "config.json is damaged: it is .*'head_dim': 0"),
        ({"geometry": {**GEOMETRY, "layers": ["0"]}}, "config.json is damaged: it is .*'layers': \\['0'\\]"),
        ({"geometry": {**GEOMETRY, "layers": []}}, "config.json is damaged: it is .*'layers': \\[\\]"),
        ({"geometry": {**GEOMETRY, "scale": 2}}, "config.json is damaged: it is .*'scale': 2"),
        ({"geometry": [2, 16]}, "config.json is damaged: its `geometry` is \\[2, 16\\]"),
        ({"geometry": {**GEOMETRY, "layers": [0, 1, 2, 3]}}, "moments.safetensors .* it has no layers.3.key"),
        ({"geometry": {**GEOMETRY, "head_dim": 8}}, "layers.0.key is \\(32, 32\\), not \\(16, 16\\)"),
        ({"model": 7}, "config.json is damaged: its `model` is 7"),
        ({"weights": [7]}, "config.json is damaged: its `weights` is \\[7\\]"),
        ({"tokens": "many"}, "config.json is damaged: its `tokens` is 'many'"),
    ],
)
def test_what_a_damaged_calibration_lacks_is_named(tmp_path, entries, message):
    calibration_of(tiny_model()).save(tmp_path / "bases", model="tiny", text=["random"])
    path = tmp_path / "bases/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    with pytest.raises(UserError, match=message):
        Calibration.load(tmp_path / "bases")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": "book.txt"}, r"`text` must be of type list \| None; got 'book.txt'"),
        ({"length": "long"}, r"`length` must be of type int \| None; got 'long'"),
        ({"model": None}, "`model` must be a name; got None"),
        ({"format": "mine"}, "`format` is nothing that a calibration records; valid keys: "),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(tmp_path, changes, message):
    with pytest.raises(UserError, match=f"^{message}"):
        calibration_of(tiny_model()).save(tmp_path / "bases", **{"model": "tiny", "text": ["random"], **changes})
    assert not any(tmp_path.iterdir())


def test_what_is_only_read_compressed_is_not_saved(tmp_path):
    found = Calibration.of_reads(tiny_model(), token_ids(2, 64), exact_tokens=ExactTokens(), progress=False)
    with pytest.raises(UserError, match="has only what is read of a compressed cache, and cannot be saved"):
        found.save(tmp_path / "bases", model="tiny", text=["random"])


def test_a_calibration_says_what_it_read_and_an_older_one_less(tmp_path):
    (tmp_path / "a.txt").write_text("a text that is calibrated on. " * 30)
    text = CalibrationText(name=[str(tmp_path / "a.txt")], heldout_share=0.25, tokens=96, length=32)
    blocks_NT = token_ids(3, 32)
    Calibration.from_text(tiny_model(), blocks_NT, progress=False).save(tmp_path / "bases", model="", **text.record())
    record = Calibration.load(tmp_path / "bases").record
    assert record == {
        "text": ["a.txt"],
        "subset": None,
        "split": "train",
        "text_field": "text",
        "heldout_share": 0.25,
        "length": 32,
        "tokens": 96,
        "tokens_sha256": hashlib.sha256(blocks_NT.numpy().tobytes()).hexdigest(),
    }
    path = tmp_path / "bases/config.json"
    older = {"format", "model", "geometry", "text", "tokens", "sha256"}
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key in older}))
    assert Calibration.load(tmp_path / "bases").record == {"text": ["a.txt"], "tokens": 96}


def test_a_calibration_in_the_user_s_directory_is_read_by_its_short_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    calibration_of(tiny_model()).save(tmp_path / "bases", model="tiny", text=["random"])
    assert Calibration.is_in("~/bases")
    assert Calibration.load("~/bases").model == "tiny"


def test_a_configuration_that_is_no_text_is_refused(tmp_path):
    calibration_of(tiny_model()).save(tmp_path / "bases", model="tiny", text=["random"])
    (tmp_path / "bases/config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is no calibration"):
        Calibration.load(tmp_path / "bases")


@pytest.mark.parametrize("lost", ["layers.1.query", "layers.2.value_gradient"])
def test_missing_moments_are_named(tmp_path, lost):
    from_text(tiny_model(), token_ids(), progress=False).save(tmp_path / "bases", model="tiny", text=["random"])
    moments, config = tmp_path / "bases/moments.safetensors", tmp_path / "bases/config.json"
    save_file({name: tensor for name, tensor in load_file(moments).items() if name != lost}, moments)
    digest = hashlib.sha256(moments.read_bytes()).hexdigest()
    config.write_text(json.dumps(json.loads(config.read_text()) | {"sha256": digest}))
    with pytest.raises(
        UserError, match=f"moments.safetensors does not hold what its config.json says: it has no {lost}"
    ):
        Calibration.load(tmp_path / "bases")


def test_the_moments_that_are_used_are_those_that_were_hashed(tmp_path, monkeypatch):
    calibration = calibration_of(tiny_model())
    calibration.save(tmp_path / "bases", model="tiny", text=["random"])
    moments = tmp_path / "bases/moments.safetensors"
    zeros = {name: torch.zeros_like(tensor) for name, tensor in load_file(moments).items()}
    sha256 = hashlib.sha256

    def replace_after_hashing(data):
        save_file(zeros, moments)
        return sha256(data)

    monkeypatch.setattr(hashlib, "sha256", replace_after_hashing)
    loaded = Calibration.load(tmp_path / "bases")
    assert torch.equal(loaded.moments[1]["key"], calibration.moments[1]["key"])


@pytest.mark.parametrize(
    ("moments_of", "settings"), [(gradient_moments, {}), (read_moments, {"joint_layers": 0})], ids=["gradient", "read"]
)
def test_gradients_are_refused_in_inference_mode(moments_of, settings):
    with torch.inference_mode(), pytest.raises(UserError, match=r"use `torch.no_grad\(\)` in its place"):
        moments_of(tiny_model(), torch.randint(1, 97, (2, 96)), progress=False, **settings)
