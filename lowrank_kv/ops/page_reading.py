"""What does not change from step to step where a layer's tokens attend to pages."""

from typing import NamedTuple

from lowrank_kv.ops.decoders import Decoders
from lowrank_kv.ops.native.page_decoders import PageDecoders
from lowrank_kv.ops.rotation import RotaryTable
from lowrank_kv.ops.scoring import Scoring


class PageReading(NamedTuple):
    """How rows become keys and values, and these an output.

    Attributes:
        decoders: of keys and values from coefficients, as compiled code or as kernels read them.
        rotary: the rotation of every place, (1, X, F), on the pages' device; for compiled code fp32 and contiguous.
        scoring: of the model, without sinks of heads.
        sees_itself: False where a new token sees its own row, which has been written, instead of its exact key and value.
    """

    decoders: PageDecoders | Decoders
    rotary: RotaryTable
    scoring: Scoring
    sees_itself: bool = True
