"""Calling compiled code once for one layer's part of a step in which all tokens decode: they are projected, written to their
pages, and attended.

The model's weights have replaced Python's data in the processor's caches by then, so that each step of Python is slow. So
what the steps of a layer, or the layers of a step, have in common lies where compiled code reads it.

Shapes: T new tokens of all sequences, H query heads, G KV heads, D head dim.
"""

import struct

import torch
from torch import Tensor

from lowrank_kv.ops.layer_attention import LayerAttention
from lowrank_kv.ops.native.library import CStruct, library
from lowrank_kv.ops.native.page_decoders import PageDecoders
from lowrank_kv.ops.native.pages import Pages, Sequences, attention_members, querying
from lowrank_kv.ops.native.projection import Projection
from lowrank_kv.ops.native.store_view import KINDS

# The members of the structs in serve.c, in their order.
_LAYER, _STEP, _STATES = struct.Struct("q"), struct.Struct("10q"), struct.Struct("16q")
_LIES_OTHERWISE = -2
_OF_A_STEP = 0  # what comes with a step, in the struct of a layer


class ServedTokens:
    """A step's tokens, all of which decode, as every layer's call reads them.

    Args:
        position_T, slot_T: see :class:`lowrank_kv.ops.native.pages.NewTokens`.
        sequences: theirs.
        served_N: the sequences to attend for, int64: all of them.

    Attributes:
        address: of what compiled code reads about them.
    """

    def __init__(self, position_T: Tensor, slot_T: Tensor, sequences: Sequences, served_N: Tensor):
        places = position_T.data_ptr(), slot_T.data_ptr(), len(position_T)
        memory = _STEP.pack(*places, *sequences.members(served_N), torch.get_num_threads())
        self._struct = CStruct(memory, keepalive=(position_T, slot_T, sequences, served_N))
        self.address = self._struct.address


class ServedLayer:
    """One layer's pages, and what its tokens become in them.

    Args:
        pages: of it.
        projection: gives coefficients.
        layer: how its rows are read.
        num_heads: H.
    """

    def __init__(self, pages: Pages, projection: Projection, layer: LayerAttention[PageDecoders], *, num_heads: int):
        self._dtype, no_states = pages.dtype, (_OF_A_STEP,) * 6
        members, scoring = attention_members(layer, num_heads), layer.scoring
        memory = _LAYER.pack(pages.address)
        memory += projection.packed(
            no_states, KINDS[pages.dtype], (_OF_A_STEP,) * 2, _OF_A_STEP, _OF_A_STEP, _OF_A_STEP
        )
        memory += querying(
            (_OF_A_STEP,) * 2, no_states, (_OF_A_STEP,) * 6, members, _OF_A_STEP, scoring.scaling, scoring.softcap
        )
        self._struct = CStruct(memory, keepalive=(pages, projection, layer))
        self._address, self._serve = self._struct.address, library().serve_pages

    def __call__(
        self, query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, tokens: ServedTokens, output_THD: Tensor
    ) -> int | None:
        """Write tokens and attend.

        Args:
            query_THD, key_TGD, value_TGD: exact, queries and keys rotated; keys and values in the pages' dtype, and the dims
                of their heads side by side.
            output_THD: written.

        Returns:
            how many rows are of a cheaper level than asked for; None, and nothing is done, where queries and outputs are not
            of the pages' dtype, or their heads do not lie side by side.
        """
        if not query_THD.dtype == output_THD.dtype == self._dtype:
            return None
        states = _STATES.pack(
            query_THD.data_ptr(),
            *query_THD.stride(),
            output_THD.data_ptr(),
            *output_THD.stride(),
            key_TGD.data_ptr(),
            *key_TGD.stride(),
            value_TGD.data_ptr(),
            *value_TGD.stride(),
        )
        cut = self._serve(self._address, tokens.address, states)
        if cut >= 0:
            return cut
        if cut == _LIES_OTHERWISE:
            return None
        raise MemoryError("no memory for the scratch space of serving a layer")
