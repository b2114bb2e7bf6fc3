"""Pages of packed coefficients (`lowrank_kv/stores/arena.py`) as compiled code writes them and attends to them.

Shapes: T new tokens of all sequences, H query heads, G KV heads, D head dim, C = G·D joint width, B sequences, P pages of a
sequence at most, N rows, R coefficients.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowrank_kv.ops.layer_attention import LayerAttention
from lowrank_kv.ops.native.library import CPU, WITHOUT_IT, CStruct, contiguous_fp32, lanes, library
from lowrank_kv.ops.native.packed_plan import PackedClasses, packed_plan
from lowrank_kv.ops.native.packing import PackedCoder, PackedGate
from lowrank_kv.ops.native.page_decoders import PageDecoders
from lowrank_kv.ops.native.store_view import INTEGER_KINDS, KINDS, PLANNED
from lowrank_kv.stores.arena import PageLayout, SideLayout
from lowrank_kv.stores.bit_plan import BitPlan
from lowrank_kv.stores.token_plans import MOST_CLASSES, TokenPlans
from lowrank_kv.utils.errors import UserError

# The members of the structs in pages.c, and of those in new_tokens.h, in their order.
_SIDE, _PAGES = struct.Struct("17q"), struct.Struct("7q")
_WRITING, _QUERYING = struct.Struct("16q"), struct.Struct("28q2f")


class NewTokens(NamedTuple):
    """A step's new tokens.

    Attributes:
        key_TGD, value_TGD: exact, keys rotated, in the pages' dtype, the dims of a head side by side.
        position_T: of each token in its sequence, int64.
        slot_T: page · block size + place in the page, int64; negative for tokens that have no place. Those of a page come in
            their order.
    """

    key_TGD: Tensor
    value_TGD: Tensor
    position_T: Tensor
    slot_T: Tensor


class Sequences(NamedTuple):
    """The sequences of a step, as a server describes them.

    Attributes:
        first_B: each one's first new token, and behind the last the number of all, int32.
        length_B: of each, new tokens included, int32.
        page_BP: their pages, int32; a row's numbers lie side by side.
    """

    first_B: Tensor
    length_B: Tensor
    page_BP: Tensor

    def members(self, served_N: Tensor) -> tuple[int, ...]:
        """Where they are, for :func:`querying`, and the numbers of those to serve, int64."""
        page_BP = self.page_BP
        return (
            self.first_B.data_ptr(),
            self.length_B.data_ptr(),
            page_BP.data_ptr(),
            page_BP.stride(0),
            served_N.data_ptr(),
            len(served_N),
        )


class Pages:
    """The pages of one layer.

    Args:
        page_XY: uint8, one page after another, the bytes of each side by side; must not move while this is in use.
        layout: of each.
        num_kv_heads: G.
        head_dim: D.
        dtype: of exact states, fp32 or bf16.
        most_tokens: of a sequence.

    Attributes:
        address: of what compiled code reads about them.

    Raises:
        UserError: there is no compiled code, or pages are smaller than their layout.
    """

    def __init__(
        self,
        page_XY: Tensor,
        layout: PageLayout,
        *,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        most_tokens: int,
    ):
        if library() is None:
            raise UserError(f"pages need compiled code: {WITHOUT_IT}")
        if page_XY.shape[1] < layout.page_bytes:
            raise UserError(f"pages have {page_XY.shape[1]} bytes, and their layout needs {layout.page_bytes}")
        self.layout, self.dtype, self.head_dim = layout, dtype, head_dim
        self.page_XY, self._width = page_XY, num_kv_heads * head_dim
        order = torch.arange(most_tokens, dtype=torch.int32, device=CPU)
        sides = [_PackedSide(side) for side in (layout.keys, layout.values)]
        memory = _PAGES.pack(
            page_XY.data_ptr(),
            page_XY.stride(0),
            layout.keys.block_size,
            layout.keys.num_sinks,
            num_kv_heads,
            head_dim,
            KINDS[dtype],
        )
        memory += struct.pack("q", order.data_ptr()) + b"".join(side.packed for side in sides)
        self._struct = CStruct(memory, keepalive=(page_XY, order, sides))
        self.address = self._struct.address

    def write(
        self, new: NewTokens, key_TC: Tensor, value_TC: Tensor, ranks: tuple[Tensor, Tensor] | None = None
    ) -> int:
        """Write tokens.

        Args:
            key_TC, value_TC: all coefficients of each, fp32, those of a token side by side.
            ranks: how many of them each token asks to keep, of keys and of values, (T,) int64, where rows have ranks.

        Returns:
            how many rows are of a cheaper level than asked for, because their pages are full.
        """
        call = writing(
            (*states_of(new.key_TGD), *states_of(new.value_TGD)),
            (key_TC.data_ptr(), value_TC.data_ptr()),
            (key_TC.stride(0), value_TC.stride(0)),
            (new.position_T.data_ptr(), new.slot_T.data_ptr(), len(new.slot_T)),
            torch.get_num_threads(),
            ranks=(0, 0) if ranks is None else [rank_T.data_ptr() for rank_T in ranks],
        )
        cut = library().write_pages(self.address, call)
        if cut < 0:
            raise MemoryError("no memory for the scratch space of packing")
        return cut

    def rows(self, page_P: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The coefficients of a sequence's first `count` rows, keys' and values', (N, R) fp32 each.

        Args:
            page_P: its pages, int32, contiguous.
        """
        found, threads = [], torch.get_num_threads()
        for which, side in enumerate((self.layout.keys, self.layout.values)):
            rank = side.row_format.num_coefficients
            row_NR = torch.empty(count, rank + -rank % lanes(), dtype=torch.float32, device=CPU)
            if library().read_pages(self.address, which, page_P.data_ptr(), count, threads, row_NR.data_ptr()):
                raise MemoryError("no memory for the scratch space of reading pages")
            found.append(row_NR[:, :rank])
        return found[0], found[1]

    def sinks(self, page: int, count: int) -> tuple[Tensor, Tensor]:
        """The first `count` exact tokens of a sequence whose first page this is, (F, G, D): rotated keys, and values."""
        states = []
        for side in (self.layout.keys, self.layout.values):
            byte_Y = self.page_XY[page, side.sinks : side.sinks + count * self._width * self.dtype.itemsize]
            states.append(byte_Y.clone().view(self.dtype).view(count, self._width // self.head_dim, self.head_dim))
        return states[0], states[1]

    def attend(
        self,
        query_THD: Tensor,
        new: NewTokens,
        sequences: Sequences,
        served_N: Tensor,
        layer: LayerAttention[PageDecoders],
        output_THD: Tensor,
    ) -> None:
        """Attention of some sequences' new tokens over their pages and, exactly, over the new tokens up to their own.

        Args:
            query_THD: rotated queries of all sequences.
            served_N: the sequences to serve, int64. Where tokens see their own rows, each has one new token.
            layer: how its rows are read.
            output_THD: fp32, contiguous, written; rows of sequences that are not served stay as they are.
        """
        query_THD = contiguous_fp32(query_THD)
        call = querying(
            (query_THD.data_ptr(), output_THD.data_ptr()),
            (*states_of(new.key_TGD), *states_of(new.value_TGD)),
            sequences.members(served_N),
            attention_members(layer, query_THD.shape[1]),
            torch.get_num_threads(),
            layer.scoring.scaling,
            layer.scoring.softcap,
        )
        if library().attend_pages(self.address, call):
            raise MemoryError("no memory for the scratch space of attention over pages")


class _PackedSide:
    """A side's layout and how its rows are packed; `packed` are the bytes of `struct side`."""

    def __init__(self, side: SideLayout):
        row_format = side.row_format
        classes = plan = gate = None
        coders: list[PackedCoder] = []
        form = PLANNED, 0, 0
        if isinstance(row_format, TokenPlans):
            coders = [PackedCoder(plan) for plan in row_format.plans]
            classes, gate = PackedClasses(row_format), PackedGate(row_format.gate, row_format.bounds_K)
        elif isinstance(row_format, BitPlan):
            coders, plan = [PackedCoder(row_format)], packed_plan(row_format)
        else:
            integers = row_format.quantization
            kind = KINDS[row_format.dtype] if integers is None else INTEGER_KINDS[integers.bits]
            form = kind, 0 if integers is None else integers.group_size or 0, row_format.granularity or 0
        self._keepalive = coders, classes, plan, gate
        self.packed = _SIDE.pack(
            side.packed,
            side.marks,
            side.first_row,
            side.sinks,
            side.end,
            row_format.num_coefficients,
            (side.end - side.first_row) // side.block_size if side.rows.differ else side.rows.size(side.rows.least),
            *(0 if each is None else each.address for each in (plan, classes, gate)),
            *(coder.address for coder in coders),
            *[0] * (MOST_CLASSES - len(coders)),
            *form,
        )


def states_of(state_TGD: Tensor) -> tuple[int, int, int]:
    """Address, and bytes from token to token and from head to head."""
    return state_TGD.data_ptr(), *(stride * state_TGD.itemsize for stride in state_TGD.stride()[:2])


def attention_members(layer: LayerAttention[PageDecoders], num_heads: int) -> tuple[int, ...]:
    """What :func:`querying` is told of a layer: where the rotation of each place is, how many pairs it has and from which
    one on they turn slowly; where the decoders are; how many heads queries have, and whether a token sees itself."""
    rotary, pairs = layer.rotary, layer.rotary.cos_BTF.shape[2]
    rotation = rotary.cos_BTF.data_ptr(), rotary.sin_BTF.data_ptr(), pairs
    slow_from = pairs if rotary.slow_from is None else rotary.slow_from
    return *rotation, slow_from, *layer.decoders.members, num_heads, layer.sees_itself


def writing(
    states: Sequence[int],
    coefs: Sequence[int],
    strides: Sequence[int],
    places: Sequence[int],
    threads: int,
    *,
    ranks: Sequence[int] = (0, 0),
) -> bytes:
    """A call that writes tokens.

    Args:
        states: of keys and then of values, see :func:`states_of`.
        coefs, strides: addresses of the coefficients of keys and of values, and numbers from one token to the next.
        places: addresses of the tokens' positions and slots, and how many tokens there are.
        ranks: addresses of the ranks that tokens ask for; 0 where rows have none.
    """
    return _WRITING.pack(*states, *coefs, *strides, *ranks, *places, threads)


def querying(
    in_and_out: Sequence[int],
    states: Sequence[int],
    sequences: Sequence[int],
    layer: Sequence[int],
    threads: int,
    scaling: float,
    softcap: float | None,
) -> bytes:
    """A call that attends.

    Args:
        in_and_out: addresses of queries and of the output.
        states: as for :func:`writing`.
        sequences: see :meth:`Sequences.members`.
        layer: see :func:`attention_members`.
    """
    return _QUERYING.pack(*in_and_out, *states, *sequences, *layer, threads, scaling, softcap or 0.0)
