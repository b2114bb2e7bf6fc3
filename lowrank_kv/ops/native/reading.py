"""Calling compiled code that reads planned rows as floats.

Shapes: P parts, N rows, R coefficients.
"""

import torch
from torch import Tensor

from lowrank_kv.ops.native.library import CPU, lanes, library
from lowrank_kv.ops.native.store_view import RankBucketView, StoreView
from lowrank_kv.stores.bit_plan import BitPlan
from lowrank_kv.stores.coefficients import Coefficients
from lowrank_kv.stores.token_plans import TokenPlans
from lowrank_kv.stores.tokenwise import TokenwiseCoefficients


def rows_of(coef: Coefficients, start: int = 0, *, dtype: torch.dtype | None = None) -> Tensor:
    """Rows from `start` on, (P, N, R), as :meth:`Coefficients.rows` gives them; those that a plan of bits packs are read by
    compiled code, where there is some, in a tenth of the time.

    Args:
        dtype: of quantized rows; by default that of the coefficients.
    """
    if not (is_planned(coef) and coef.rank and coef.device == CPU and library() is not None):
        return coef.rows(start, dtype=dtype)
    parts = 1 if isinstance(coef, TokenwiseCoefficients) else coef.buffers()[0].shape[0]
    end, width = coef.length, coef.rank + -coef.rank % lanes()
    row_PNR = torch.empty(parts, end - start, width, dtype=torch.float32, device=CPU)
    library().read_rows_of(
        coefficients_view(coef).address, parts, start, end, torch.get_num_threads(), row_PNR.data_ptr()
    )
    return row_PNR[..., : coef.rank].to(coef.dtype if dtype is None else dtype)


def is_planned(coef: Coefficients) -> bool:
    """Whether a plan of bits packs the rows."""
    return isinstance(coef.quantization, (BitPlan, TokenPlans))


def coefficients_view(coef: Coefficients) -> StoreView:
    """One store's rows as compiled code reads them; kept with them until they move."""
    if isinstance(coef, TokenwiseCoefficients):
        view = coef.native_view
        if view is None or not view.reads(coef.stored.buffer, coef.classes.buffer, coef.marks.buffer):
            view = coef.native_view = StoreView([RankBucketView.from_tokenwise(coef)], coef.rank)
        return view
    if coef.stored.native_view is None:
        coef.stored.native_view = StoreView([RankBucketView.from_coefficients(coef)], coef.rank)
    return coef.stored.native_view
