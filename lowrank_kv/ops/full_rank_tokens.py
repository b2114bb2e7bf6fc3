"""Tokens at full rank that stand beside compressed ones in one softmax: sinks, recent tokens, buffers.

Shapes: B batch, G KV heads, Q queries, F tokens (room for them), D head dim.
"""

import dataclasses

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class FullRankTokens:
    """Tokens kept at full rank, as attention takes them.

    Attributes:
        key_BGFD, value_BGFD: rotated keys, and values, in the queries' dtype; contiguous in D.
        length_B: how many of the F rows each sequence uses, int32.
        mask_BQF: bool, True where a query may see a token; None when it may see all.
    """

    key_BGFD: Tensor
    value_BGFD: Tensor
    length_B: Tensor
    mask_BQF: Tensor | None = None
