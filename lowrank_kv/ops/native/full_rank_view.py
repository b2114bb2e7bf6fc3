"""Tokens at full rank as compiled code reads them, and how a few new ones are appended.

Shapes: G KV heads, D head dim, Q new tokens, F tokens at full rank.
"""

import ctypes
import struct

from torch import Tensor

from lowrank_kv.ops.native.library import CStruct, library
from lowrank_kv.ops.native.packed_plan import NOTHING
from lowrank_kv.ops.native.store_view import KINDS, RankBucketView, StoreView
from lowrank_kv.stores.growable_tensor import GrowingTensor

# The members of `struct positions` and `struct appending` in full_rank.c, in their order.
_POSITIONS, _APPENDING = struct.Struct("3q"), struct.Struct("12q")


class _PositionsView(CStruct):
    """Positions of tokens as compiled code appends to them."""

    def __init__(self, position_F: GrowingTensor):
        buffer, row_count = position_F.buffer, position_F.row_count
        memory = _POSITIONS.pack(buffer.data_ptr(), ctypes.addressof(row_count), len(buffer))
        super().__init__(memory, keepalive=(buffer, row_count))

    def __reduce__(self) -> tuple:
        return NOTHING


def full_rank_view(full: GrowingTensor) -> StoreView:
    """Keys, or values, (G, F, D); kept with them until their buffer moves."""
    view = full.native_view
    if view is None:
        view = full.native_view = StoreView([RankBucketView.from_full_rank(full)], full.buffer.shape[2])
    return view


def append_full_rank(
    keys: GrowingTensor,
    values: GrowingTensor,
    positions: GrowingTensor,
    key_GQD: Tensor,
    value_GQD: Tensor,
    first_position: int,
) -> bool:
    """Add a few tokens in compiled code, which every decoded token takes in every layer.

    Args:
        keys, values: (G, F, D).
        positions: of the same tokens, (F,) int32. Its row count is raised last.
        key_GQD, value_GQD: of the new tokens, which are at `first_position` and after it.

    Returns:
        whether the tokens were added; False, and nothing is written, where there is no compiled code for them, or no room.
    """
    dtype, kernels = key_GQD.dtype, library()
    if kernels is None or dtype not in KINDS or not (dtype == value_GQD.dtype == keys.buffer.dtype):
        return False
    if not key_GQD.is_cpu or key_GQD.stride(2) != 1 or value_GQD.stride(2) != 1:
        return False
    view = positions.native_view
    if view is None:
        view = positions.native_view = _PositionsView(positions)
    heads, tokens, _ = key_GQD.shape
    size = dtype.itemsize
    call = _APPENDING.pack(
        full_rank_view(keys).address,
        full_rank_view(values).address,
        key_GQD.data_ptr(),
        key_GQD.stride(1) * size,
        key_GQD.stride(0) * size,
        value_GQD.data_ptr(),
        value_GQD.stride(1) * size,
        value_GQD.stride(0) * size,
        view.address,
        tokens,
        heads,
        first_position,
    )
    return bool(kernels.append_full_rank(call))
