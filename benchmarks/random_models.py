"""A model, a compressor and bases whose shapes alone matter, as on a GPU that times an 8 B model without its weights."""

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import dynakv
from lowrank_kv.hf.geometry import geometry_of
from ojakv import Calibration

CALIBRATION_TOKENS = 512


def load_model(name: str, *, dtype: str, device: str) -> PreTrainedModel:
    """A model of random weights, of which only the configuration is read.

    Args:
        name: hub id or directory.
        dtype, device: of its weights.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name), dtype=getattr(torch, dtype))
    return model.eval()


def random_ids(model: PreTrainedModel, length: int, seed: int = 0) -> Tensor:
    """(1, T) int64, the same for every call with one seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, model.config.vocab_size, (1, length), generator=generator).to(model.device)


def calibration(model: PreTrainedModel, *, read: bool = False) -> Calibration:
    """Moments of random tokens; `read`: and what plans of bits need."""
    return Calibration.from_text(model, random_ids(model, CALIBRATION_TOKENS), read_gradients=read, progress=False)


def granularity_of(model: PreTrainedModel) -> int:
    """What ranks are multiples of: 64 of an 8 B model's 1,024 coefficients, 16 of the demo's 192."""
    return max(8, min(64, geometry_of(model).width // 12))


def add_compressors(
    model: PreTrainedModel, calibration: Calibration, rates: tuple[float, float], granularity: int
) -> None:
    """Compress a model by PCA, all tokens at one rank.

    Args:
        rates: shares of the keys' and of the values' coefficients that are kept, rounded to the granularity.
    """
    dynakv.add_compressors(model, dynakv.DynaKVConfig(granularity=granularity))
    dynakv.initialize_from_moments(model, calibration.second_moments())
    for layer in dynakv.compressors(model).values():
        for side, rate in zip((layer.key, layer.value), rates, strict=True):
            rank = max(1, round(rate * side.width / granularity)) * granularity
            side.gate.initialize_at(side.energies(), rank, side.config.threshold)
    dynakv.use_dynakv_cache(model)
