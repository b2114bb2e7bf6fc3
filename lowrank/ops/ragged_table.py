"""A ragged store as compiled code reads it, and the way of a few new rows into it.

Shapes: C width, T rows.
"""

from torch import Tensor

from lowrank.ops import native
from lowrank.ragged import RaggedStore


def table_of(store: RaggedStore) -> native.Table:
    """The store's rows, of which there must be some; kept with the store until it changes otherwise than by compiled code's
    appending."""
    if store.memo is None:
        buckets = store.filled()
        for bucket in buckets:
            if bucket.coef.memo is None:
                bucket.coef.memo = native.Piece.of(bucket.coef, bucket.position_N.buffer)
        store.memo = native.Table([bucket.coef.memo for bucket in buckets], buckets[-1].coef.rank)
    return store.memo


def enters(store: RaggedStore) -> bool:
    """Whether compiled code can append to such a store."""
    return store.quantisation is None and native.appends(store.dtype, store.device)


def entrance_of(store: RaggedStore, rows: int) -> native.Table | None:
    """:func:`table_of`, for compiled code to append so many rows to it; None where there are none yet, or their places would
    not fit the index. What has been appended must be counted by :meth:`RaggedStore.count_one`. Only where :func:`enters`."""
    return table_of(store) if store.length and store.can_count(rows) else None


def append_few(store: RaggedStore, coef_TC: Tensor, ranks: list[int]) -> None:
    """Add T rows at the end, of which only the first ``ranks[t]`` entries are read and kept; a call of compiled code for
    each, where there is some for them and their bucket has room.

    Args:
        coef_TC: in the store's dtype and on its device; C contiguous.
    """
    address, row_bytes = coef_TC.data_ptr(), coef_TC.stride(0) * coef_TC.itemsize
    is_open = enters(store)
    for t, rank in enumerate(ranks):
        table = entrance_of(store, 1) if is_open else None
        if table is not None and table.append(address + t * row_bytes, rank, store.length):
            store.count_one(rank)
        else:
            store.append_one(coef_TC[t : t + 1, :rank])
