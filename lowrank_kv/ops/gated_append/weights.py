"""The one matrix that projects a token and asks its gate.

Shapes: C joint width.
"""

import torch
from torch import Tensor


def append_weights(
    basis_CC: Tensor, gate_CC: Tensor, gate_scale_C: Tensor, coef_scale_C: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """[U / coef_scale | U · diag(s) · W], (C, 2C) in `dtype`: a token times it is its coefficients and its gate's logits
    without the bias (DynaKV, equations 1 and 5), in one reading of the token instead of two products in a row.

    Args:
        basis_CC: U.
        gate_CC: W.
        gate_scale_C: s, what the gate multiplies coefficients by before W.
        coef_scale_C: what coefficients are divided by before they become integers
            (:func:`lowrank_kv.stores.quantization.coef_scale_of`); None where they do not.
    """
    basis_CC = basis_CC.double()
    held_CC = basis_CC if coef_scale_C is None else basis_CC / coef_scale_C.double()
    return torch.cat([held_CC, (basis_CC * gate_scale_C.double()) @ gate_CC.double()], dim=1).to(dtype)
