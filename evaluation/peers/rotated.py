"""Scalar quantization after a random rotation of each head: the strongest peer that neither learns nor calibrates.

TurboQuant's core (arXiv 2504.19874, section 3): a rotated unit vector's coordinates are nearly normal, whatever it was, and
each is coded by the Lloyd–Max codebook of normal numbers. Its scale has eight bits for each head here; ports store sixteen.

Shapes: G KV heads, D head dim.
"""

from collections.abc import Callable

import torch
from transformers import Cache, PreTrainedModel

from lowrank_kv.bases.codebooks import lloyd_max
from lowrank_kv.hf.cache.windowed.plan import InitialBasis, Plan, by_columns
from lowrank_kv.hf.geometry import geometry_of
from lowrank_kv.stores.bit_plan import BitPlan
from ojakv import OjaKVCache

from .peer import fixed_config

# name → bits
ROTATED = {"rotated-int8": 8, "rotated-int4": 4, "rotated-int3": 3, "rotated-int2": 2}
_SAMPLES = 1_000_000


def rotated_maker(model: PreTrainedModel, name: str) -> Callable[[], Cache]:
    """Makes caches of rotated keys (after their rotary embedding) and values at one of :data:`ROTATED`; first and latest
    tokens are exact as in an OjaKV cache."""
    geometry, generator = geometry_of(model), torch.Generator().manual_seed(0)
    levels = {ROTATED[name]: lloyd_max(torch.randn(_SAMPLES, generator=generator), ROTATED[name])}
    plan = BitPlan([ROTATED[name]] * geometry.head_dim, levels)

    def rotation() -> InitialBasis:
        shape = (geometry.num_kv_heads, geometry.head_dim, geometry.head_dim)
        vectors_GDD = by_columns(torch.linalg.qr(torch.randn(shape, generator=generator)).Q)
        return InitialBasis(
            vectors_PWR=vectors_GDD, energy_PR=torch.ones(shape[:2]), decoder_PWR=vectors_GDD, quantization=plan
        )

    config = fixed_config(layout="per_head", rope="post")
    layers = {index: (rotation(), rotation()) for index in geometry.layers}
    whole = Plan(config=config, geometry=geometry, layers=layers)
    return lambda: OjaKVCache(model, whole)
