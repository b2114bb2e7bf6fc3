"""What one layer's keys, or values, become in pages: how they are encoded, what rows they take, and what rebuilds them.

Shapes: T tokens, C joint width, R coefficients.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from lowrank_kv.codec import Codec
from lowrank_kv.hf.cache.windowed.plan import InitialBasis
from lowrank_kv.stores.bit_plan import BitPlan
from lowrank_kv.stores.page_rows import RowFormat
from lowrank_kv.stores.quantization import IntegerQuantization
from lowrank_kv.stores.ranked_rows import RankedRows
from lowrank_kv.stores.token_plans import TokenPlans


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """Keys, or values, of one layer.

    Attributes:
        row_format: how coefficients lie in pages.
        decoder_RC: the map from coefficients to states, in the model's dtype.
        vectors_CR: coefficients are states before rotation times these, fp32; None where a codec gives them.
        encode: that codec, from states (T, C), fp32, to coefficients (T, C), fp32, and how many of them each token keeps,
            (T,) int64.
    """

    row_format: RowFormat
    decoder_RC: Tensor
    vectors_CR: Tensor | None = None
    encode: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None

    def to(self, device: torch.device) -> "Side":
        """The same with its matrices on a device; a codec is where it is made."""
        vectors_CR = None if self.vectors_CR is None else self.vectors_CR.to(device)
        return dataclasses.replace(self, decoder_RC=self.decoder_RC.to(device), vectors_CR=vectors_CR)

    @property
    def may_multiply_pairs(self) -> bool:
        """Whether attention may round coefficients to bf16."""
        return isinstance(self.row_format, (BitPlan, TokenPlans)) and self.decoder_RC.dtype == torch.bfloat16


def side_of_basis(initial: InitialBasis, dtype: torch.dtype) -> Side:
    """All tokens in one basis, packed by a plan, or all of its coefficients as numbers of one width.

    Args:
        initial: of joint states.
        dtype: of the model.
    """
    [vectors_CR] = initial.vectors_PWR
    decoder_RC = _joint_decoder(initial, dtype)
    row_format = initial.quantization
    if isinstance(row_format, IntegerQuantization) or row_format is None:
        scale_R = initial.coef_scale
        if scale_R is not None:
            vectors_CR, decoder_RC = vectors_CR / scale_R[0], scale_R[0].to(dtype)[:, None] * decoder_RC
        rank = vectors_CR.shape[1]
        fixed = {"num_coefficients": rank, "granularity": None, "dtype": dtype, "quantization": row_format}
        row_format = RankedRows(**fixed, mean_row_bytes=RankedRows(**fixed, mean_row_bytes=0.0).row_bytes(rank))
    return Side(row_format=row_format, decoder_RC=decoder_RC.contiguous(), vectors_CR=vectors_CR)


def side_of_codec(
    codec: Codec,
    *,
    granularity: int,
    mean_rank: float,
    dtype: torch.dtype,
    device: torch.device,
    quantization: IntegerQuantization | None,
) -> Side:
    """Tokens that keep a prefix of their coefficients, as long as a codec says.

    Args:
        codec: of joint states.
        granularity: ranks are its multiples.
        mean_rank: of the tokens that pages are made for.
        dtype: of the model, in which the codec computes.
        device: of the codec.
        quantization: how coefficients are integers; the codec has then scaled them.
    """
    ranked = {"num_coefficients": codec.width, "granularity": granularity, "dtype": dtype, "quantization": quantization}
    # Rows grow evenly but for the scales of a last group, so that the mean of sizes is about the size of the mean.
    size = RankedRows(**ranked, mean_row_bytes=0.0).row_bytes(min(codec.width, round(mean_rank)))

    def encode(states_TC: Tensor) -> tuple[Tensor, Tensor]:
        coef_TC, rank_T = codec.encode(states_TC.to(dtype))
        return coef_TC.to(dtype).float().contiguous(), rank_T.contiguous()

    return Side(
        encode=encode,
        row_format=RankedRows(**ranked, mean_row_bytes=float(size)),
        decoder_RC=codec.decoder(dtype, device).contiguous(),
    )


def _joint_decoder(initial: InitialBasis, dtype: torch.dtype) -> Tensor:
    """The map from coefficients to states, (R, C)."""
    if initial.decoder_PWR is None:
        return initial.vectors_PWR[0].mT.to(dtype)
    return initial.decoder(dtype)[0].mT
