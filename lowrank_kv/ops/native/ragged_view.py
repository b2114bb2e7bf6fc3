"""A ragged store as compiled code reads it, and how a few new rows are appended to it.

Shapes: C width, T rows.
"""

from torch import Tensor

from lowrank_kv.ops import native
from lowrank_kv.stores.ragged import RaggedStore


def view_of(store: RaggedStore) -> native.StoreView:
    """The store's rows; kept with the store until anything but compiled code changes it."""
    if store.native_view is None:
        buckets = store.buckets()
        for bucket in buckets:
            if bucket.stored.native_view is None:
                bucket.stored.native_view = native.RankBucketView.from_coefficients(bucket, bucket.position_buffer)
        views = [bucket.stored.native_view for bucket in buckets]
        store.native_view = native.StoreView(views, buckets[-1].rank if buckets else 0, store.row_count)
    return store.native_view


def append_few(store: RaggedStore, coef_TC: Tensor, ranks: list[int]) -> None:
    """Add T rows at the end; only the first ``ranks[t]`` entries of row t are read and kept. Compiled code appends each row,
    if there is any for the store and the row's bucket has room.

    Args:
        coef_TC: in the store's dtype and on its device; C contiguous.
    """
    address, row_bytes = coef_TC.data_ptr(), coef_TC.stride(0) * coef_TC.itemsize
    is_open = store.quantization is None and native.appends(store.dtype, store.device)
    for t, rank in enumerate(ranks):
        if not (is_open and view_of(store).append(address + t * row_bytes, rank)):
            store.append_one(coef_TC[t : t + 1, :rank])
