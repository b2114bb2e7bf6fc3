"""Caches with fixed PCA bases and one rank for all tokens: the baselines of a comparison."""

from collections.abc import Callable

from transformers import PreTrainedModel

from lowrank.allocation import uniform_ranks, waterfill_ranks
from lowrank.basis import Basis, pca_basis
from lowrank.codec import FixedCodec, LayerCodec
from lowrank.errors import UserError
from lowrank.hf.cache import LowRankCache
from lowrank.hf.calibration import KEY, ROTATED_KEY, VALUE
from lowrank.hf.geometry import geometry_of
from lowrank.moments import SecondMoment

# name → (layout, RoPE side of the keys, how ranks are spread)
STATIC_METHODS = {
    "static-pca-joint": ("joint", "pre", "uniform"),
    "static-pca-joint-waterfill": ("joint", "pre", "waterfill"),
    "static-pca-per-head": ("per_head", "post", "uniform"),
}


def static_cache(
    model: PreTrainedModel, moments: dict[int, dict[str, SecondMoment]], name: str, rate: float
) -> Callable[[], LowRankCache]:
    """A maker of caches whose coefficients take `rate` of the uncompressed bytes.

    Args:
        model: an uncompressed model.
        moments: of ``key``, ``rotated_key`` and ``value``, per layer (see :func:`lowrank.hf.calibration.calibrate`).
        name: a key of :data:`STATIC_METHODS`.
        rate: in (0, 1].
    """
    if name not in STATIC_METHODS:
        raise UserError(f"unknown static method `{name}`; choose from {', '.join(STATIC_METHODS)}")
    layout, rope, spread = STATIC_METHODS[name]
    geometry = geometry_of(model)
    sides = (KEY if rope == "pre" else ROTATED_KEY, VALUE)
    bases: list[Basis] = [
        pca_basis(moments[index][side].mean(), layout=layout, num_heads=geometry.num_kv_heads)
        for index in geometry.layers
        for side in sides
    ]
    if spread == "waterfill":
        ranks = waterfill_ranks([basis.energy_C for basis in bases], rate)
    else:
        ranks = uniform_ranks([basis.width for basis in bases], rate)
    pairs = [FixedCodec(basis, rank) for basis, rank in zip(bases, ranks, strict=True)]
    codecs = {
        index: LayerCodec(key=key, value=value, rope=rope)
        for index, key, value in zip(geometry.layers, pairs[::2], pairs[1::2], strict=True)
    }
    return lambda: LowRankCache(model, codecs)
