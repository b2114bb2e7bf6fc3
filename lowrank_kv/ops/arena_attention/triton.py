"""Decode attention over a server's pages, one new token of each sequence, in Triton.

Two passes, as joint coefficients outside of pages take them: the first rebuilds keys, rotates them and writes scores, the
second multiplies values' coefficients with their softmax. Values are never rebuilt, keys only within the first. Exact
tokens, those of the first page and the new one, are attended beside them.

Shapes: B sequences, H query heads, G KV heads, M = H/G, D head dim, C = G·D, P pages of a sequence at most, R rank, F exact
tokens.
"""

import torch
from torch import Tensor

from lowrank_kv.ops.arena_attention.operands import ArenaPages
from lowrank_kv.ops.arena_attention.triton_scores import arena_scores
from lowrank_kv.ops.arena_attention.triton_values import arena_values, block_of
from lowrank_kv.ops.decoders import Decoders
from lowrank_kv.ops.full_rank_tokens import FullRankTokens
from lowrank_kv.ops.rotation import RotaryTable
from lowrank_kv.ops.scoring import Scoring
from lowrank_kv.ops.triton.split_softmax import SplitSoftmax, token_splits
from lowrank_kv.utils.config import require


def arena_attention(
    query_BHD: Tensor,
    pages: ArenaPages,
    page_BP: Tensor,
    past_B: Tensor,
    decoders: Decoders,
    scoring: Scoring,
    *,
    rotation: RotaryTable | None = None,
    new_BGD: tuple[Tensor, Tensor] | None = None,
    splits: int | None = None,
) -> Tensor:
    """softmax(q K̂ᵀ · scaling) V̂ of one query of each sequence, with K̂ rotated after it is rebuilt.

    Nothing in it waits for the device, so that a CUDA graph can hold it once the kernels have been tuned by a first call.
    Programs are launched, and scores kept, for all P pages: who knows a bound cuts the table.

    Args:
        query_BHD: rotated queries, fp32 or bf16, the dtype of the pages' exact states.
        page_BP: each sequence's pages, int32, contiguous in P. Of a sequence without tokens the first is any page.
        past_B: tokens of each that are in pages and seen, the exact ones included, int32; at most P pages of them.
        decoders: of the R coefficients that rows keep, (R, C) each in the queries' dtype.
        scoring: what the model does to scores.
        rotation: of rebuilt keys, a table for all sequences; None for a family without one.
        new_BGD: rotated keys and values of the new tokens, which are then seen exactly and are none of `past_B`; None where
            pages hold all that is seen.
        splits: parts the sequence is cut into; None lets the device's size decide.

    Returns:
        (B, H, D) in the dtype of `query_BHD`; 0 for a query that may see nothing. Scores and softmax are in fp32.

    Raises:
        UserError: D is odd, the queries have another dtype than the pages, or sequences have tables of their own.
    """
    batch, heads, head_dim = query_BHD.shape
    require(
        head_dim % 2 == 0, "query_BHD", tuple(query_BHD.shape), "of an even head dim: keys are rotated in two halves"
    )
    require(query_BHD.dtype == pages.dtype, "query_BHD", query_BHD.dtype, f"{pages.dtype}, as the pages' exact states")
    tables = 1 if rotation is None else rotation.cos_BTF.shape[0]
    require(tables == 1, "rotation", tables, "one table of angles for all sequences")
    room, side = page_BP.shape[1] * pages.block_size, pages.values
    columns = -(-side.rank // block_of(pages))
    low = splits or token_splits(room, batch * columns, query_BHD.device)
    softmax = SplitSoftmax(
        query_BHD[:, :, None],
        pages.num_kv_heads,
        scoring,
        low=low,
        full=exact_tokens(pages, page_BP, past_B, new_BGD),
        splits=splits,
    )
    score_BTH = arena_scores(
        softmax.query_BGMD,
        pages,
        page_BP,
        past_B,
        decoders.key_CC,
        scaling=scoring.scaling,
        rotation=rotation,
        softcap=scoring.softcap,
    )
    partial_BHSR = arena_values(
        score_BTH, pages, page_BP, past_B, softmax.max_BPXV, softmax.sum_BPX, splits=low, dtype=query_BHD.dtype
    )
    value_decoder_GRD = decoders.value_CC.unflatten(1, (pages.num_kv_heads, head_dim)).transpose(0, 1)
    return softmax.attended(partial_BHSR, value_decoder_GRD, block_width=block_of(pages))[:, :, 0]


def exact_tokens(
    pages: ArenaPages, page_BP: Tensor, past_B: Tensor, new_BGD: tuple[Tensor, Tensor] | None
) -> FullRankTokens | None:
    """The tokens that stand exactly beside rows; None where there are none. The new one comes first, so that those in use
    are the first ones."""
    if new_BGD is None and not pages.num_sinks:
        return None
    length_B = past_B.clamp(max=pages.num_sinks)
    states_BFGD = [sink_XFGD[page_BP[:, 0]] for sink_XFGD in (pages.sink_key_XFGD, pages.sink_value_XFGD)]
    if new_BGD is not None:
        length_B = length_B + 1
        states_BFGD = [
            torch.cat([state_BGD[:, None], sink_BFGD], dim=1)
            for state_BGD, sink_BFGD in zip(new_BGD, states_BFGD, strict=True)
        ]
    key_BGFD, value_BGFD = (state_BFGD.transpose(1, 2) for state_BFGD in states_BFGD)
    return FullRankTokens(key_BGFD, value_BGFD, length_B)
