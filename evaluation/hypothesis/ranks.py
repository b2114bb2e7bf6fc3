"""Each head's spectrum, the ranks that follow from it, and caches whose heads have ranks of their own.

Shapes: P parts, which are heads here, W width of one, R the largest rank of a layer's heads.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from lowrank_kv.bases.pca import Basis, parts_of, pca_basis
from lowrank_kv.bases.rank_allocation import energy_rank, waterfill_ranks
from lowrank_kv.calibration.activation_moments import KEY, ROTATED_KEY, VALUE
from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.hf.cache.windowed.plan import InitialBasis, Plan, by_columns
from ojakv import OjaKVConfig

# Layer index → rank of each head.
HeadRanks = Mapping[int, Sequence[int]]
KEYS, VALUES = "keys", "values"
SIDES = (KEYS, VALUES)
# (side, rope) of what a head caches → its name on pages, in their order.
STATE_NAMES = {(KEYS, "pre"): "keys, unrotated", (KEYS, "post"): "keys, rotated", (VALUES, "-"): "values"}
STATES_OF_ROPE = {"pre": KEY, "post": ROTATED_KEY}


class Spectra(NamedTuple):
    """The principal components of every head's keys before and after rotation, and of its values.

    Attributes:
        keys: ``pre`` or ``post`` → layer index → basis of the heads (vectors (P, W, W), energies (P, W)).
        values: layer index → the same.
    """

    keys: dict[str, dict[int, Basis]]
    values: dict[int, Basis]

    @classmethod
    def of(cls, calibration: Calibration) -> "Spectra":
        def bases(kind: str) -> dict[int, Basis]:
            heads = calibration.geometry.num_kv_heads
            return {
                index: pca_basis(parts_of(sides[kind].double(), layout="per_head", num_heads=heads))
                for index, sides in calibration.moments.items()
            }

        return cls({rope: bases(kind) for rope, kind in STATES_OF_ROPE.items()}, bases(VALUE))

    def of_side(self, side: str, rope: str) -> dict[int, Basis]:
        """Those of ``keys`` on a side of the rotation, or of ``values``."""
        return self.keys[rope] if side == KEYS else self.values


def threshold_ranks(bases: Mapping[int, Basis], threshold: float) -> HeadRanks:
    """The least rank of each head that holds a share of its energy (SubSpace, protocol of SubSpace-G)."""
    return {index: [energy_rank(each, threshold) for each in basis.energy_PW] for index, basis in bases.items()}


def adaptive_ranks(bases: Mapping[int, Basis], share: float) -> HeadRanks:
    """Ranks whose mean over all heads is `share` of the head dim, given where they hold most of a head's energy."""
    unit = [each / each.sum().clamp(min=1e-30) for basis in bases.values() for each in basis.energy_PW]
    ranks = iter(waterfill_ranks(unit, share))
    return {index: [next(ranks) for _ in basis.energy_PW] for index, basis in bases.items()}


def uniform_ranks(bases: Mapping[int, Basis], share: float, *, at: Sequence[tuple[int, int | None]]) -> HeadRanks:
    """`share` of the head dim where `at` names (layer, head) or (layer, None for all of its heads); elsewhere all of it."""
    found = {}
    for index, basis in bases.items():
        heads, dims = basis.energy_PW.shape
        chosen = {head for layer, head in at if layer == index}
        rank = max(1, round(share * dims))
        found[index] = [rank if None in chosen or head in chosen else dims for head in range(heads)]
    return found


def mean_share(ranks: HeadRanks, head_dim: int) -> float:
    """Mean rank over all heads, over the head dim."""
    found = [rank for each in ranks.values() for rank in each]
    return sum(found) / len(found) / head_dim


def head_plan(calibration: Calibration, spectra: Spectra, config: OjaKVConfig, ranks: Mapping[str, HeadRanks]) -> Plan:
    """A plan in which each head has the rank given for it.

    A layer's coefficients are stored at the largest rank of its heads; those a head does not have are zero. So the cache
    computes what ranks of each head compute, and holds more bytes than they need.

    Args:
        config: a fixed basis of each head.
        ranks: ``keys``, ``values`` → ranks; a side that is missing stays uncompressed.
    """
    layers = {}
    for index in calibration.geometry.layers:
        layers[index] = tuple(
            _initial_basis(spectra.of_side(side, config.rope)[index], ranks[side][index] if side in ranks else None)
            for side in SIDES
        )
    return Plan(config=config, geometry=calibration.geometry, layers=layers)


def _initial_basis(basis: Basis, ranks: Sequence[int] | None) -> InitialBasis:
    heads, dims = basis.energy_PW.shape
    if ranks is None or min(ranks) == dims:
        return InitialBasis.identity(heads, dims)
    widest = max(ranks)
    kept_PR = torch.arange(widest) < torch.tensor(list(ranks))[:, None]
    vectors_PWR = basis.vectors_PWW[:, :, :widest] * kept_PR[:, None]
    energy_PR = basis.energy_PW[:, :widest] * kept_PR
    return InitialBasis(vectors_PWR=by_columns(vectors_PWR), energy_PR=energy_PR.contiguous())
