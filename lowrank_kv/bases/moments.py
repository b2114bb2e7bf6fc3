"""Streaming second moments of keys, values and queries over a calibration text.

Shapes: N rows, C width.
"""

import torch
from torch import Tensor


class SecondMoment:
    """The uncentred second moment Σ xᵀx of a stream of rows, in fp64.

    Memory is O(C²) whatever the length of the stream: rows are multiplied into the sum and never kept. Each block's
    product is formed in fp64, so the sum does not drift over millions of rows.

    OjaKV (appendix A.3) starts its bases from this matrix. DynaKV (section 3.1, footnote 1) takes the covariance, which is
    centred; here nothing is, since x̃ = x U subtracts no mean either.
    """

    def __init__(self, width: int, *, device: torch.device | str = "cpu"):
        self.sum_CC = torch.zeros(width, width, dtype=torch.float64, device=device)
        self.count = 0

    @classmethod
    def from_mean(cls, mean_CC: Tensor) -> "SecondMoment":
        """A moment whose :meth:`mean` is known already, counted as one row."""
        moment = cls(len(mean_CC), device=mean_CC.device)
        moment.sum_CC += mean_CC
        moment.count = 1
        return moment

    def update(self, rows_NC: Tensor) -> None:
        """Add rows of any floating dtype. Raises ValueError for NaN or infinite rows or a wrong width."""
        if rows_NC.shape[-1] != self.sum_CC.shape[0]:
            raise ValueError(f"rows must have width {self.sum_CC.shape[0]}, got {rows_NC.shape[-1]}")
        rows_NC = rows_NC.reshape(-1, rows_NC.shape[-1]).to(self.sum_CC)
        product_CC = rows_NC.T @ rows_NC
        # A NaN or an infinity in any row reaches the diagonal, which is cheaper to look at than the rows.
        if not torch.isfinite(product_CC.diagonal()).all():
            raise ValueError("calibration rows hold NaN or infinite entries; check the model's dtype and weights")
        self.sum_CC += product_CC
        self.count += rows_NC.shape[0]

    def mean(self) -> Tensor:
        """Σ xᵀx / N as a (C, C) fp64 tensor. Raises ValueError before the first row."""
        if not self.count:
            raise ValueError("no calibration rows were seen; the calibration text is empty")
        return self.sum_CC / self.count
