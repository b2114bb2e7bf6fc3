"""Calling compiled code once for one layer's part of a step in which all tokens decode: they are projected, written to their
pages, and attended.

The model's weights have replaced Python's data in the processor's caches by then, so that each step of Python is slow.

Shapes: T new tokens of all sequences, H query heads, G KV heads, D head dim.
"""

import struct

import torch
from torch import Tensor

from lowrank_kv.ops.native.library import CPU, library
from lowrank_kv.ops.native.pages import (
    PageDecoders,
    Pages,
    Sequences,
    querying,
    rotation_members,
    states_of,
    writing,
)
from lowrank_kv.ops.native.projection import Projection
from lowrank_kv.ops.native.store_view import KINDS

_CONVERTING = struct.Struct("8q")  # the members of `struct converting` in serve.c, in their order
_FLOAT_BYTES = 4


class ServedTokens:
    """A step's tokens, all of which decode, as every layer's call reads them.

    Args:
        position_T, slot_T: see :class:`lowrank_kv.ops.native.pages.NewTokens`.
        sequences: theirs.
        served_N: the sequences to attend for, int64: all of them.
    """

    def __init__(self, position_T: Tensor, slot_T: Tensor, sequences: Sequences, served_N: Tensor):
        self._keepalive = position_T, slot_T, sequences, served_N  # their addresses follow
        self.count = len(position_T)
        self.places = position_T.data_ptr(), slot_T.data_ptr(), self.count
        self.sequences = sequences.members(served_N)


class ServedLayer:
    """One layer's pages, and what its tokens become in them.

    Args:
        pages: of it.
        projection: gives coefficients.
        decoders: of keys and values.
        rotation: cos and sin of each place and pair, fp32, contiguous.
        slow_from: of the rotation, see :class:`lowrank_kv.ops.rotation.RotaryTable`.
        num_heads: H.
        scaling: of scores.
        sees_itself: see :meth:`lowrank_kv.ops.native.pages.Pages.attend`.
    """

    def __init__(
        self,
        pages: Pages,
        projection: Projection,
        decoders: PageDecoders,
        rotation: tuple[Tensor, Tensor],
        *,
        slow_from: int | None,
        num_heads: int,
        scaling: float,
        sees_itself: bool,
    ):
        self._pages, self._projection, self._scaling = pages, projection, scaling
        self._keepalive = decoders, rotation
        self._members = *rotation_members(rotation, slow_from), *decoders.members, num_heads, sees_itself
        self._dtype, self._kind = pages.dtype, KINDS[pages.dtype]
        self._width = num_heads * pages.head_dim
        self._head_strides = [pages.head_dim, 1]

    def __call__(
        self, query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, tokens: ServedTokens, output_THD: Tensor
    ) -> int | None:
        """Write tokens and attend.

        Args:
            query_THD, key_TGD, value_TGD: exact, queries and keys rotated; keys and values in the pages' dtype.
            output_THD: written.

        Returns:
            how many rows are of a cheaper level than asked for; None, and nothing is done, where queries and outputs are not
            of the pages' dtype, or their heads do not lie side by side.
        """
        if not query_THD.dtype == output_THD.dtype == self._dtype:
            return None
        query_stride, *query_strides = query_THD.stride()
        output_stride, *output_strides = output_THD.stride()
        if query_strides != self._head_strides or output_strides != self._head_strides:
            return None
        count, width, threads = tokens.count, self._width, torch.get_num_threads()
        key_width, value_width = self._projection.widths
        is_bf16 = self._dtype == torch.bfloat16
        if not is_bf16 and count > 1 and not query_stride == output_stride == width:
            return None
        scratch = torch.empty(count * (key_width + value_width + 2 * width * is_bf16), dtype=torch.float32, device=CPU)
        keys = scratch.data_ptr()
        values = keys + count * key_width * _FLOAT_BYTES
        in_and_out, converting = (query_THD.data_ptr(), output_THD.data_ptr()), None
        if is_bf16:
            floats_in = values + count * value_width * _FLOAT_BYTES
            floats_out = floats_in + count * width * _FLOAT_BYTES
            converting = _CONVERTING.pack(*in_and_out, query_stride, output_stride, floats_in, floats_out, count, width)
            in_and_out = floats_in, floats_out
        states = *states_of(key_TGD), *states_of(value_TGD)
        cut = library().serve_pages(
            self._pages.address,
            self._projection.packed(states, self._kind, (keys, values), tokens.places[0], count, threads),
            writing(states, (keys, values), (key_width, value_width), tokens.places, threads),
            querying(in_and_out, states, tokens.sequences, self._members, threads, self._scaling, None),
            converting,
        )
        if cut < 0:
            raise MemoryError("no memory for the scratch space of serving a layer")
        return cut
