"""One softmax over low-rank tokens and tokens at full rank, cut into parts that programs of their own work on.

Shapes: B batch, H query heads, G KV heads, Q queries, M = H/G · Q rows that share a KV head, P = G·M, D head dim,
F full-rank tokens, X parts of the softmax, S of them of low-rank tokens, V column blocks of their sums with a maximum of
their own, R rank.
"""

import math

import torch
from torch import Tensor

from lowrank_kv.ops.full_rank_tokens import FullRankTokens
from lowrank_kv.ops.scoring import Scoring
from lowrank_kv.ops.triton.launch import block, splits_of
from lowrank_kv.ops.triton.merge_splits import merge
from lowrank_kv.ops.triton.split_attention import attend_split

# The fewest tokens worth a part.
_TOKENS_PER_PART = 256


class SplitSoftmax:
    """What the parts write their maxima and sums of weights to, and what joins them.

    Args:
        query_BHQD: rotated queries.
        groups: G.
        scoring: its scale and cap are of the tokens at full rank; the sinks, where there are any, are the last part.
        low: S, parts of the low-rank tokens, the first ones.
        maxima: V; 1 beside tokens at full rank.
        full: tokens at full rank, the last parts; None where there are none.
        splits: parts of the tokens at full rank; None lets the device's size decide.

    Attributes:
        query_BGMD: the queries by KV head, contiguous.
        max_BPXV, sum_BPX: fp32 maxima (times log2 e) and sums of weights; whoever attends the low-rank tokens writes the
            first S parts.
    """

    def __init__(
        self,
        query_BHQD: Tensor,
        groups: int,
        scoring: Scoring,
        *,
        low: int,
        maxima: int = 1,
        full: FullRankTokens | None = None,
        splits: int | None = None,
    ):
        batch, heads, self._queries, _ = query_BHQD.shape
        rows, device = heads * self._queries, query_BHQD.device
        self.query_BGMD = query_BHQD.reshape(batch, groups, rows // groups, -1).contiguous()
        self._full, self._low, self._scoring = full, low, scoring
        self._full_parts = 0 if full is None else splits or token_splits(full.key_BGFD.shape[2], batch * groups, device)
        parts = low + self._full_parts + (scoring.sink_H is not None)
        self.max_BPXV = torch.empty(batch, rows, parts, maxima, dtype=torch.float32, device=device)
        self.sum_BPX = torch.empty(batch, rows, parts, dtype=torch.float32, device=device)
        if scoring.sink_H is not None:
            sink_P = scoring.sink_H.float().repeat_interleave(self._queries) * math.log2(math.e)
            self.max_BPXV[:, :, -1] = sink_P[None, :, None]
            self.sum_BPX[:, :, -1] = 1.0

    def attended(self, partial_BPSR: Tensor, value_decoder_XGRD: Tensor, *, block_width: int) -> Tensor:
        """Attention's output, (B, H, Q, D) in the queries' dtype.

        Args:
            partial_BPSR: fp32 sums of weighted coefficients of the low-rank parts, relative to their maxima.
            value_decoder_XGRD: gives each KV head's values from coefficients; X is B, 1 or not there.
            block_width: columns of the sums that share a maximum, where V > 1; a power of two.
        """
        _, groups, _, head_dim = self.query_BGMD.shape
        # Before anything is merged: a part at full rank may hold the largest score.
        full_BPSD = self._attend_full() if self._full is not None else None
        latent_BPR = self._merged(partial_BPSR, first=0, block_width=block_width)
        out_BGMD = latent_BPR.unflatten(1, (groups, -1)) @ value_decoder_XGRD
        if full_BPSD is not None:
            out_BGMD += self._merged(full_BPSD, first=self._low, block_width=block(head_dim)).view_as(out_BGMD)
        return out_BGMD.view(out_BGMD.shape[0], -1, self._queries, head_dim)

    def _merged(self, partial_BPSW: Tensor, *, first: int, block_width: int) -> Tensor:
        dtype = self.query_BGMD.dtype
        return merge(partial_BPSW, self.max_BPXV, self.sum_BPX, first=first, dtype=dtype, block_width=block_width)

    def _attend_full(self) -> Tensor:
        """Sums of weighted full-rank values, (B, P, S, D) fp32, of the last parts."""
        return attend_split(
            self.query_BGMD,
            self._full.key_BGFD,
            self._full.value_BGFD,
            self._full.length_B,
            self.max_BPXV,
            self.sum_BPX,
            first=self._low,
            splits=self._full_parts,
            queries=self._queries,
            scaling=self._scoring.scaling,
            softcap=self._scoring.softcap,
            mask_BQN=self._full.mask_BQF,
            value_width=self.query_BGMD.shape[3],
        )


def token_splits(tokens: int, beside: int, device: torch.device) -> int:
    """Parts to cut so many tokens into, when `beside` programs run for each part."""
    return splits_of(-(-tokens // _TOKENS_PER_PART), beside, device)
