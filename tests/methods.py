"""Every method once: how to make a model of it with and without truncation. Contracts run over all rows.

Adding a method to the project adds a row here.
"""

import dataclasses
from collections.abc import Callable

import torch
from transformers import Cache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import dynakv
from evaluation.static import STATIC_METHODS, static_cache
from lowrank.hf.calibration import KEY, ROTATED_KEY, VALUE, calibrate

MakeCache = Callable[[], Cache]


@dataclasses.dataclass(frozen=True)
class Method:
    """One row. `build(model, rate)` prepares the model and returns a maker of caches; rate 1 truncates nothing."""

    name: str
    build: Callable[[PreTrainedModel, float], MakeCache]


def tiny_model(seed: int = 0, **overrides) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    settings = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.15,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return LlamaForCausalLM(LlamaConfig(**{**settings, **overrides})).eval()


def calibration_moments(model: PreTrainedModel):
    ids = torch.randint(1, model.config.vocab_size, (4, 32), generator=torch.Generator().manual_seed(1))
    return calibrate(model, ids, sides=(KEY, ROTATED_KEY, VALUE), progress=False)


def spread_gates(model: PreTrainedModel, seed: int = 2) -> None:
    """Random gates whose ranks differ from token to token."""
    generator = torch.Generator().manual_seed(seed)
    for layer in dynakv.compressors(model).values():
        for compressor in (layer.key, layer.value):
            gate = compressor.gate
            gate.weight.data.copy_(torch.randn(gate.weight.shape, generator=generator))
            gate.bias.data.copy_(torch.randn(gate.bias.shape, generator=generator))


def dynakv_model(model: PreTrainedModel, rate: float, **settings) -> MakeCache:
    moments = calibration_moments(model)
    dynakv.add_compressors(model, dynakv.DynaKVConfig(**{"granularity": 1, **settings}))
    dynakv.initialise_from_moments(model, moments)
    if rate == 1:
        dynakv.open_gates(model)
    else:
        spread_gates(model)
    dynakv.use_ragged_cache(model)
    return lambda: dynakv.DynaKVCache.from_model(model)


def _static(name: str) -> Callable[[PreTrainedModel, float], MakeCache]:
    return lambda model, rate: static_cache(model, calibration_moments(model), name, rate)


METHODS = [
    *(Method(name, _static(name)) for name in STATIC_METHODS),
    Method("dynakv", dynakv_model),
    Method("dynakv-rounded", lambda model, rate: dynakv_model(model, rate, granularity=8)),
    Method("dynakv-soft-prefix", lambda model, rate: dynakv_model(model, rate, gap="soft_prefix")),
    Method("dynakv-orthogonal", lambda model, rate: dynakv_model(model, rate, inverse="orthogonal")),
]
