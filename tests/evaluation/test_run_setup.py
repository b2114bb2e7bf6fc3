"""What measurements have in common."""

import torch

from evaluation.compare import CompareConfig
from evaluation.run_setup import load_calibration, measured_model
from evaluation.texts import measured_texts
from lowrank_kv.utils.config import build


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
        model, tokenizer = measured_model(config.model, config)
        ids_NT = config.calibration.blocks(tokenizer)
        measured = measured_texts(config.texts)
        _, [told] = load_calibration(model, tokenizer, config, read_gradients=read_gradients, measured=measured)
        return ids_NT.flatten(), told["sha256"]

    found = [entry(*each) for each in ((128, True), (64, True), (128, False), (128, True))]
    assert all(torch.equal(tokens, found[0][0]) for tokens, _ in found), "these are the same tokens"
    assert found[0][1] == found[3][1]
    assert len({sha256 for _, sha256 in found}) == 3
