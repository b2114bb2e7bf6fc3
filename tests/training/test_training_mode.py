"""Whatever looks at a model in training leaves it in training, even where it fails."""

import pytest
import torch
from methods import dynakv_model, planned_model, tiny_model

import dynakv
from lowrank_kv.utils.eval_mode import evaluating
from training.data import Batch
from training.distillation import teacher_logits
from training.inspection import inspect
from training.validation import measure, run_uncached

IDS = torch.arange(1, 21)
LOOKS = {
    "measure": lambda model: measure(model, [Batch.from_ids(IDS[None], None)]),
    "inspect": lambda model: inspect(model, IDS),
    "teacher_logits": lambda model: teacher_logits(model, {"input_ids": IDS[None]}),
    "run_uncached": lambda model: run_uncached(
        model,
        [Batch.from_ids(IDS[None], None)],
        {side.gate: lambda *passed: None for side in dynakv.token_compressors(model)},
    ),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_a_pass_that_fails_leaves_the_model_in_training(look):
    model = tiny_model()
    dynakv_model(model, 0.4)
    model.train()
    hooks = [len(module._forward_hooks) for module in model.modules()]

    def fail(module, args, output):
        assert not module.training
        raise RuntimeError("in the pass")

    handle = model.model.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="in the pass"):
        look(model)
    handle.remove()
    assert all(module.training for module in model.modules())
    assert [len(module._forward_hooks) for module in model.modules()] == hooks


def test_each_part_gets_its_own_mode_back():
    model = tiny_model().train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    assert set(modes) == {True, False}
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("decoder", ["exact", "orthogonal", "decoupled", "plan"])
def test_a_pass_in_inference_mode_leaves_nothing_that_gradients_cannot_pass(decoder, training):
    def built():
        model = tiny_model()
        planned_model(model, 0.4) if decoder == "plan" else dynakv_model(model, 0.4, decoder=decoder)
        return model.train(training)

    def gradients(model):
        model(IDS[None], use_cache=False).logits.sum().backward()
        return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}

    model = built()
    with torch.inference_mode():
        model(IDS[None], use_cache=False)
    found, expected = gradients(model), gradients(built())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
