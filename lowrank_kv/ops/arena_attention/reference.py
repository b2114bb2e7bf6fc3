"""Plain form of decode attention over a server's pages: read and rebuild everything, then attend, in fp64.

Shapes: B sequences, H query heads, G KV heads, D head dim, P pages of a sequence, N rows, T tokens, R coefficients.
"""

import torch
from torch import Tensor

from lowrank_kv.ops.arena_attention.operands import ArenaPages
from lowrank_kv.ops.decoders import Decoders
from lowrank_kv.ops.rotation import RotaryTable
from lowrank_kv.ops.scoring import Scoring
from lowrank_kv.ops.softmax_reference import fp64_attention
from lowrank_kv.stores.arena import SideLayout, read_rows


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
) -> Tensor:
    """Arguments and result as in :func:`lowrank_kv.ops.arena_attention.triton.arena_attention`."""
    sharing = query_BHD.shape[1] // pages.num_kv_heads
    key_new_BGD, value_new_BGD = (None, None) if new_BGD is None else new_BGD
    found = []
    for b, past in enumerate(past_B.tolist()):
        key_TGD = _rebuilt(pages, pages.layout.keys, page_BP[b], past, decoders.key_CC)
        if rotation is not None:
            position_T = torch.arange(past - len(key_TGD), past)
            key_TGD = rotation.rotate(key_TGD.transpose(0, 1)[None], position_T[None])[0].transpose(0, 1)
        value_TGD = _rebuilt(pages, pages.layout.values, page_BP[b], past, decoders.value_CC)
        sinks, first = past - len(key_TGD), int(page_BP[b, 0])
        parts = (
            (pages.sink_key_XFGD[first, :sinks], key_TGD, key_new_BGD),
            (pages.sink_value_XFGD[first, :sinks], value_TGD, value_new_BGD),
        )
        key_HTD, value_HTD = (
            torch.cat([sink_FGD.double(), state_TGD, *([] if each_BGD is None else [each_BGD[b : b + 1].double()])])
            .transpose(0, 1)
            .repeat_interleave(sharing, dim=0)
            for sink_FGD, state_TGD, each_BGD in parts
        )
        query_H1D = query_BHD[b][:, None]
        found.append(fp64_attention(query_H1D, key_HTD, value_HTD, scoring, None)[:, 0])
    return torch.stack(found)


def _rebuilt(pages: ArenaPages, side: SideLayout, page_P: Tensor, past: int, decoder_RC: Tensor) -> Tensor:
    """The states of the tokens behind the exact ones, up to `past`, (T, G, D) fp64, keys not rotated."""
    row_NR = arena_rows(side, pages.page_XY, page_P, max(past - pages.num_sinks, 0))
    return (row_NR.double() @ decoder_RC.double()).unflatten(1, (pages.num_kv_heads, pages.head_dim))


def arena_rows(side: SideLayout, page_XY: Tensor, page_P: Tensor, count: int) -> Tensor:
    """The coefficients of a sequence's first `count` rows, (N, R) fp32."""
    found, left = [torch.empty(0, side.row_format.num_coefficients)], count
    for p, page in enumerate(page_P.tolist()):
        found.append(read_rows(side, page_XY[page], min(left, side.row_capacity(is_first=p == 0))))
        left -= len(found[-1])
    return torch.cat(found)
