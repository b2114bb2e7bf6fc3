"""A ragged store as compiled code reads it, and the way of a few new rows into it.

Shapes: C width, T rows.
"""

from torch import Tensor

from lowrank_kv.ops import native
from lowrank_kv.stores.ragged import RaggedStore


def table_of(store: RaggedStore) -> native.StoreView:
    """The store's rows; kept with the store until it changes otherwise than by compiled code's appending, which is to be
    counted by :meth:`RaggedStore.count`."""
    if store.memo is None:
        buckets = store.filled()
        for bucket in buckets:
            if bucket.coef.memo is None:
                bucket.coef.memo = native.RankBucketView.of(bucket.coef, bucket.position_N.buffer)
        rank = buckets[-1].coef.rank if buckets else 0
        store.memo = native.StoreView([bucket.coef.memo for bucket in buckets], rank)
    return store.memo


def append_few(store: RaggedStore, coef_TC: Tensor, ranks: list[int]) -> None:
    """Add T rows at the end, of which only the first ``ranks[t]`` entries are read and kept; a call of compiled code for
    each, where there is some for them and their bucket has room.

    Args:
        coef_TC: in the store's dtype and on its device; C contiguous.
    """
    address, row_bytes = coef_TC.data_ptr(), coef_TC.stride(0) * coef_TC.itemsize
    is_open = store.quantization is None and native.appends(store.dtype, store.device)
    for t, rank in enumerate(ranks):
        if is_open and table_of(store).append(address + t * row_bytes, rank, store.length):
            store.count(1)
        else:
            store.append_one(coef_TC[t : t + 1, :rank])
