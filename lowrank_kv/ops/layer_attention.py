"""What does not change from step to step where a layer's tokens attend to pages.

Shapes: X places, F pairs of dims.
"""

import dataclasses
from typing import Generic, TypeVar

from lowrank_kv.ops.rotation import RotaryTable
from lowrank_kv.ops.scoring import Scoring
from lowrank_kv.utils.config import require

DecodersT = TypeVar("DecodersT")


@dataclasses.dataclass(frozen=True)
class LayerAttention(Generic[DecodersT]):
    """How rows become keys and values, and these an output.

    Attributes:
        decoders: of keys and values from coefficients, for compiled code
            :class:`lowrank_kv.ops.native.page_decoders.PageDecoders`, for kernels :class:`lowrank_kv.ops.decoders.Decoders`.
        rotary: the rotation of every place, (1, X, F), on the pages' device; for compiled code fp32 and contiguous.
        scoring: of the model.
        sees_itself: False where a new token sees its own row, which has been written, instead of its exact key and value.

    Raises:
        UserError: the model's heads have sinks, which attention over pages does not know.
    """

    decoders: DecodersT
    rotary: RotaryTable
    scoring: Scoring
    sees_itself: bool = True

    def __post_init__(self):
        has_sinks = self.scoring.sink_H is not None
        require(
            not has_sinks, "scoring.sink_H", "a tensor", "None for pages; take a cache without pages for this model"
        )
