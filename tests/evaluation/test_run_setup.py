"""What measurements have in common."""

import pytest
import torch

from evaluation.compare import CompareConfig, compare
from evaluation.run_setup import calibration_of
from evaluation.texts import measured_texts
from lowrank_kv.hf.loading import load_model, load_tokenizer
from lowrank_kv.utils.config import build
from lowrank_kv.utils.errors import UserError


def test_the_same_tokens_in_other_blocks_or_with_gradients_are_another_calibration(tiny_dir, text_file):
    """Were they one, a comparison would take over the cells of the other."""

    def entry(length: int, read_gradients: bool):
        values = {
            "model": str(tiny_dir),
            "dtype": "float32",
            "calibration": {"name": [str(text_file)], "tokens": 256, "length": length, "streaming": True},
            "texts": [{"label": "same", "name": str(text_file)}],
            "methods": [{"preset": "static-joint-pf", "bytes": [0.5]}],
            "prefix": 64,
            "length": 100,
        }
        config = build(CompareConfig, values)
        model, tokenizer = load_model(config.model, dtype=config.dtype), load_tokenizer(config.model)
        ids_NT = config.calibration.blocks(tokenizer)
        measured = measured_texts(config.texts)
        _, [told] = calibration_of(model, tokenizer, config, None, read_gradients=read_gradients, measured=measured)
        return ids_NT.flatten(), told["sha256"]

    found = [entry(*each) for each in ((128, True), (64, True), (128, False), (128, True))]
    assert all(torch.equal(tokens, found[0][0]) for tokens, _ in found), "these are the same tokens"
    assert found[0][1] == found[3][1]
    assert len({sha256 for _, sha256 in found}) == 3


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"bases": "nowhere"}, "`nowhere`"),
        ({"texts": [{"label": "gone", "name": "gone.txt"}]}, "`gone.txt`"),
    ],
)
def test_files_are_looked_for_before_a_model_is_loaded(changed, message, tiny_dir, text_file, tmp_path, monkeypatch):
    """Which takes minutes."""
    monkeypatch.setattr("evaluation.compare.load_measured", None)
    values = {
        "model": str(tiny_dir),
        "texts": [{"label": "same", "name": str(text_file)}],
        "methods": [{"peer": "quanto-int4"}],
        "prefix": 64,
        "length": 100,
    }
    with pytest.raises(UserError, match=message):
        next(compare(build(CompareConfig, values | changed), tmp_path / "out"))
