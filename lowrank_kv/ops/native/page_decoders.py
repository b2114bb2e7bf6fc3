"""What gives keys and values from the rows of pages, for compiled code.

Shapes: D head dim, C joint width, R coefficients.
"""

from typing import Any

from torch import Tensor

from lowrank_kv.ops.native.attention import PackedDecoders


class PageDecoders:
    """The maps from coefficients to keys and values, as :meth:`lowrank_kv.ops.native.pages.Pages.attend` reads them.

    Args:
        key_RC, value_RC: rebuild keys, and values, from coefficients.
        head_dim: D, where coefficients are packed by plans of bits, and the model computes in bf16: they are then rounded to
            it. None where they are not.
    """

    def __init__(self, key_RC: Tensor, value_RC: Tensor, *, head_dim: int | None):
        value_memo: dict[str, Any] = {}  # one copy of the values' decoder for both
        rows = PackedDecoders(key_RC[None], value_RC, value_memo=value_memo)
        pairs = None
        if head_dim is not None:
            pairs = PackedDecoders(key_RC[None], value_RC, head_dim=head_dim, value_memo=value_memo)
        self._keepalive = rows, pairs
        self.members = (
            rows.key_address,
            *((0, 0) if pairs is None else (pairs.key_address, pairs.column_address)),
            rows.key_stride,
            0 if pairs is None else pairs.key_stride,
            rows.value_address,
            value_RC.shape[1],
        )
