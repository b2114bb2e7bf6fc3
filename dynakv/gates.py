"""The gate of a compressor, by its `rank_policy`."""

from dynakv.config import GATE, NESTED, PLAN, SOFT_THRESHOLD, DynaKVConfig
from dynakv.gate import Gate
from dynakv.nested_rank import NestedRank
from dynakv.planned_bits import PlannedBits
from dynakv.rank_gate import RankGate
from dynakv.soft_threshold import SoftThreshold

AnyGate = RankGate | PlannedBits
_RANK_GATES = {GATE: Gate, NESTED: NestedRank, SOFT_THRESHOLD: SoftThreshold}


def make_gate(width: int, config: DynaKVConfig) -> AnyGate:
    """What decides how much of a token of so many numbers is kept."""
    if config.rank_policy == PLAN:
        return PlannedBits(width, learns_classes=bool(config.learned_classes))
    return _RANK_GATES[config.rank_policy](width)
