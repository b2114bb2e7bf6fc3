"""A server's pages on a GPU, with the calls by which :class:`lowrank_kv.ops.native.pages.Pages` reads them on a CPU.

Shapes: T new tokens of all sequences, H query heads, G KV heads, D head dim, N sequences to serve, P pages of a sequence at
most, X places, R coefficients, F exact tokens or pairs of dims.
"""

import torch
from torch import Tensor

from lowrank_kv.ops.arena_attention.operands import ArenaPages
from lowrank_kv.ops.arena_attention.triton import arena_attention
from lowrank_kv.ops.arena_attention.triton_rebuild import arena_rows
from lowrank_kv.ops.decoders import Decoders
from lowrank_kv.ops.layer_attention import LayerAttention
from lowrank_kv.ops.native.pages import NewTokens, Sequences
from lowrank_kv.ops.triton.availability import has_kernels, launching_on
from lowrank_kv.stores.arena import PageLayout
from lowrank_kv.utils.errors import UserError


class PageReader:
    """The pages of one layer.

    Args:
        page_XY: uint8, one page after another; as of :class:`lowrank_kv.ops.arena_attention.operands.ArenaPages`.
        layout: of each.
        num_kv_heads: G.
        head_dim: D.
        dtype: of exact states, fp32 or bf16.

    Raises:
        UserError: there are no kernels for the pages' device, or the pages do not lie as they need it.
    """

    def __init__(self, page_XY: Tensor, layout: PageLayout, *, num_kv_heads: int, head_dim: int, dtype: torch.dtype):
        if not has_kernels(page_XY.device):
            raise UserError(
                f"pages on {page_XY.device} have no Triton kernels; put them on an NVIDIA GPU since Ampere, or read pages "
                "on a CPU by compiled code"
            )
        self._pages = ArenaPages(page_XY, layout, num_kv_heads, head_dim, dtype)
        self._device = page_XY.device

    def rows(self, page_P: Tensor, count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """The coefficients of a sequence's first `count` rows, keys' and values', (N, R) each in `dtype`.

        Args:
            page_P: its pages, int32, contiguous.
        """
        with launching_on(self._device):
            key_NR, value_NR = (
                arena_rows(self._pages, side, page_P, count, dtype) for side in (self._pages.keys, self._pages.values)
            )
        return key_NR, value_NR

    def sinks(self, page: int | Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The first `count` exact tokens of a sequence whose first page this is, (F, G, D): rotated keys, and values.

        Args:
            page: its number; as a tensor of no dims it is not waited for.
        """
        found = self._pages.sink_key_XFGD, self._pages.sink_value_XFGD
        page_1 = torch.as_tensor(page, device=self._device).reshape(1)  # an index of no dims would be waited for
        key_FGD, value_FGD = (each.index_select(0, page_1)[0, :count] for each in found)
        return key_FGD, value_FGD

    def attend(
        self,
        query_THD: Tensor,
        new: NewTokens,
        sequences: Sequences,
        served_N: Tensor,
        layer: LayerAttention[Decoders],
        output_THD: Tensor,
    ) -> None:
        """Attention of some sequences' new tokens, one of each, over their pages and, exactly, over themselves.

        Nothing in it waits for the device, so that a CUDA graph can hold it once a first call has tuned the kernels.

        Args:
            query_THD: rotated queries of all sequences, in the pages' dtype.
            sequences: on the pages' device; the table as short as what is known of the lengths lets it be.
            served_N: the sequences to serve, int64, each of one new token.
            layer: how its rows are read, by decoders of the R coefficients that rows keep, (R, C) each in the pages' dtype.
            output_THD: any floating dtype, written; rows of sequences that are not served stay as they are.
        """
        token_N = sequences.first_B[served_N].long()
        past_N = sequences.length_B[served_N]
        new_NGD = None
        if layer.sees_itself:
            past_N = past_N - 1
            new_NGD = new.key_TGD[token_N], new.value_TGD[token_N]
        with launching_on(self._device):
            found_NHD = arena_attention(
                query_THD[token_N],
                self._pages,
                sequences.page_BP[served_N],
                past_N,
                layer.decoders,
                layer.scoring,
                rotation=layer.rotary,
                new_BGD=new_NGD,
            )
        output_THD[token_N] = found_NHD.to(output_THD.dtype)
