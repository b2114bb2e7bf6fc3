"""Linear layers of a model in bf16 that multiply in fp32."""

import copy

import torch
from families import BY_NAME
from torch import nn
from transformers import PreTrainedModel

from evaluation.wide_products import load_measured, multiply_in_fp32

EPSILON = 2**-8  # half of the distance between neighbours of bf16, of a number


def model_of(family: str, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    return BY_NAME[family].model().to(dtype).requires_grad_(False)


def linear_layers(model: PreTrainedModel) -> list[nn.Linear]:
    return [module for module in model.modules() if type(module) is nn.Linear]


def test_every_linear_layer_rounds_the_exact_sum_once():
    model = model_of("qwen2")  # whose projections have biases
    multiply_in_fp32(model)
    found = linear_layers(model)
    assert len(found) > model.config.num_hidden_layers
    for module in found:
        states = torch.randn(3, module.in_features, dtype=torch.bfloat16)
        given = module(states)
        bias = 0 if module.bias is None else module.bias.double()
        exact = states.double() @ module.weight.double().T + bias
        size = states.double().abs() @ module.weight.double().abs().T + abs(bias)
        assert given.dtype == torch.bfloat16
        # A sum in fp32 is off by less than 1e-6 of its terms' sizes.
        assert bool(((given.double() - exact).abs() <= EPSILON * exact.abs() + 1e-6 * size).all())


def test_a_model_says_the_same():
    stock = model_of("llama")
    wide = copy.deepcopy(stock)
    multiply_in_fp32(wide)
    ids = torch.arange(10, 60)[None]
    exact, near, of_wide = (model(ids).logits.float() for model in (copy.deepcopy(stock).float(), stock, wide))
    assert float((of_wide - exact).norm()) <= 1.2 * float((near - exact).norm())


def test_only_bf16_on_processors_without_products_of_its_own(monkeypatch, tmp_path):
    model_of("llama").save_pretrained(tmp_path)
    for capability, expected in (("AVX2", True), ("AVX512", False)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda found=capability: found)
        for dtype, is_wide in (("bfloat16", expected), ("float32", False)):
            model = load_measured(str(tmp_path), dtype=dtype, device="cpu")
            assert model.dtype == getattr(torch, dtype)
            assert all(("forward" in vars(module)) is is_wide for module in linear_layers(model))


def test_other_dtypes_are_left_alone():
    model = model_of("llama", torch.float32)
    multiply_in_fp32(model)
    assert all("forward" not in vars(module) for module in linear_layers(model))
