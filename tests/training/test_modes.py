"""A frozen backbone computes in training what it computes when it is served: without dropout."""

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from families import tiny_opt
from training_runs import PLANNED, STILL, losses, merged, rows, summary, train_here
from transformers import GPT2Config, GPT2LMHeadModel

import training.loop
from dynakv.layer_compressor import LayerCompressor

IDS = {"vocab_size": 257, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
# GPT-2 drops numbers in modules of their own, OPT in its layers' own code.
MODELS = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(**IDS, n_embd=64, n_layer=2, n_head=4, n_positions=256, initializer_range=0.1)
    ),
    "opt": lambda: tiny_opt(**IDS, init_std=0.1, dropout=0.1, layerdrop=0.1),
}
# At all bytes nothing is lost, so that what KL there is comes from something else.
LOSSLESS = merged(
    merged(PLANNED, STILL),
    {"rate": {"target_retain_rate": 1.0}, "calibration": {"tokens": 512}, "optimizer": {"steps": 1, "batch_size": 1}},
)


@pytest.fixture(params=MODELS)
def dropping(request, tmp_path):
    """A tiny model whose configuration has dropout."""
    torch.manual_seed(0)
    MODELS[request.param]().save_pretrained(tmp_path / request.param)
    byte_tokenizer().save_pretrained(tmp_path / request.param)
    return str(tmp_path / request.param)


@pytest.fixture
def modes(monkeypatch):
    """The mode of every module when training begins, and how often the second layer was computed with gradients."""
    found = {"training": {}, "computed": 0}
    begin = training.loop.begin_training

    def caught(engine):
        begin(engine)
        found["training"] = {module: module.training for module in engine.model.modules()}
        parts = engine.model.get_decoder().children()
        layers = next(part for part in parts if isinstance(part, torch.nn.ModuleList))
        norm = next(part for part in layers[1].modules() if isinstance(part, torch.nn.LayerNorm))

        def count(*args):
            found["computed"] += torch.is_grad_enabled()

        norm.register_forward_hook(count)

    monkeypatch.setattr(training.loop, "begin_training", caught)
    return found


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("trainable", ["compressor", "lora"])
def test_what_is_lost_is_not_the_noise_of_dropout(training_values, dropping, tmp_path, modes, trainable, recompute):
    if trainable == "lora":
        pytest.importorskip("peft")
    values = {**merged(training_values, LOSSLESS), "model": dropping, "trainable": trainable}
    train_here(values, tmp_path / "run", gradient_checkpointing=recompute)
    [row] = rows(tmp_path / "run")
    [heldout] = summary(tmp_path / "run")["heldout"].values()
    assert row["kl"] < 3 * heldout["kl"] + 1e-6
    assert modes["computed"] == 1 + recompute
    for module, mode in modes["training"].items():
        assert mode or not (isinstance(module, LayerCompressor) or hasattr(module, "get_delta_weight"))
        assert not mode or not isinstance(module, torch.nn.Dropout)


def test_a_backbone_that_is_trained_drops_numbers_as_its_configuration_says(training_values, dropping, tmp_path, modes):
    values = {**training_values, "model": dropping, "trainable": "full"}
    train_here(values, tmp_path / "run", optimizer={"steps": 1})
    assert all(modes["training"].values())


def test_recomputing_changes_no_loss(training_values, dropping, tmp_path):
    few = merged(training_values, {"model": dropping, "optimizer": {"steps": 3}})
    train_here(few, tmp_path / "kept")
    train_here(few, tmp_path / "recomputed", gradient_checkpointing=True)
    assert losses(tmp_path / "recomputed") == losses(tmp_path / "kept")
