"""Calling the compiled decode attention.

Shapes: B batch, H query heads, G KV heads, Q new queries, P parts (1, or G where heads are compressed apart), D head dim,
W width of a part, T tokens in all, R rank, F pairs of a rotation.
"""

import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lowrank_kv.ops.native.library import ABSENT, CPU, contiguous_fp32, lanes, library
from lowrank_kv.ops.native.rotary import ATTEND_ROTARY, PackedRotary
from lowrank_kv.ops.native.store_view import KINDS, NOTHING, StoreView
from lowrank_kv.ops.scoring import Scoring

# The members of `struct task` in task.h, in their order: tokens and queries, (the rotation,) decoders, what tasks share.
_TOKENS, _DECODERS, _COMMON = (struct.Struct(members) for members in ("10q", "7q", "7q2f"))
# What a basis keeps of its decoder for compiled code: of keys pairs of rows and of columns in bf16, or padded rows; rows of
# values.
_PAIRS, _COLUMNS, _KEY_ROWS, _VALUE_ROWS = "native pairs", "native columns", "native key rows", "native value rows"
_NO_ROTATION = bytes(ATTEND_ROTARY.size)


def unsupported_reason(dtype: torch.dtype, device: torch.device, *, in_pairs: bool) -> str | None:
    """Why compiled code cannot attend; None where it can: on a CPU, in fp32 or bf16, with keys that are rotated in pairs or
    not at all."""
    if device.type != "cpu":
        return "compiled code runs on a CPU"
    if dtype not in KINDS:
        return "compiled code reads fp32 and bf16"
    if not in_pairs:
        return "compiled code rotates keys in pairs"
    return ABSENT if library() is None else None


class _Decoder:
    """A decoder in the form that is read: where it is, numbers from one row to the next, and of how many parts it is."""

    def __init__(self, decoder_PRX: Tensor):
        # Detached: one that is kept with the tensor it was made of, and is that tensor, would keep its own key alive.
        self._keepalive, self.address = decoder_PRX.detach(), decoder_PRX.data_ptr()
        self.stride, self.parts = decoder_PRX.shape[-1], decoder_PRX.shape[0] if decoder_PRX.dim() == 3 else 1

    def __reduce__(self) -> tuple:
        return NOTHING


class PackedDecoders:
    """The maps from coefficients to keys and values, as compiled code reads them.

    Args:
        key_PRW: rebuilds keys, with as many rows as the keys' :class:`StoreView` has coefficients. None where queries are
            projected onto the coefficients.
        value_PRW: the same for values, which are not rebuilt one by one.
        key_memo, value_memo: where copies in the form that is read are kept for the next time.
        head_dim: D, where planned coefficients are multiplied two at a time (:func:`multiplies_pairs`); the keys' decoder
            then has one part and is rounded to bf16. None where they are not.

    Attributes:
        key_address, column_address, value_address: where they are; 0 where there are none.
        key_stride: numbers from one row of the keys' to the next.
    """

    def __init__(
        self,
        key_PRW: Tensor | None,
        value_PRW: Tensor,
        *,
        head_dim: int | None = None,
        key_memo: dict[str, Any] | None = None,
        value_memo: dict[str, Any] | None = None,
    ):
        key = columns = None
        if key_PRW is not None and head_dim is None:
            key = _kept(key_memo, _KEY_ROWS, _padded, key_PRW)
        elif key_PRW is not None:
            key = _kept(key_memo, _PAIRS, _pairs, key_PRW)
            columns = _kept(key_memo, _COLUMNS, functools.partial(_columns, head_dim=head_dim), key_PRW)
        value = _kept(value_memo, _VALUE_ROWS, contiguous_fp32, value_PRW)
        self._keepalive = key, columns, value
        self.key_address, self.key_stride = (0, 0) if key is None else (key.address, key.stride)
        self.column_address, self.value_address = 0 if columns is None else columns.address, value.address
        self.packed = _DECODERS.pack(
            self.key_address,
            self.column_address,
            value.address,
            self.key_stride,
            value.stride,
            value.parts,
            head_dim is not None,
        )

    def __reduce__(self) -> tuple:
        return NOTHING


class Tokens(NamedTuple):
    """Tokens of one softmax that are stored in the same way.

    Attributes:
        query_BMX: rotated queries (X = D), or queries projected onto the coefficients (X = R) where no decoder rebuilds
            keys; M = H·Q rows of each sequence, in as many dims as is convenient, and of one sequence without its dim; as
            :func:`contiguous_fp32` gives them.
        keys, values: of the same tokens, at least one; each store has its own pieces.
        slots: T.
        decoders: of `keys` and `values`; None where each KV head's coefficients are its keys and values.
        rotary: the rotation of rebuilt keys, for a batch of one and each pair (j, j + F); None to leave them as they are.
        position_T: each slot's position in `rotary`; None where slot t is at position t.
        mask_QT: bool, True where a query may see a token; None when it may see all.
    """

    query_BMX: Tensor
    keys: StoreView
    values: StoreView
    slots: int
    decoders: PackedDecoders | None = None
    rotary: PackedRotary | None = None
    position_T: Tensor | slice | None = None
    mask_QT: Tensor | None = None


def attend(
    softmaxes: Sequence[Sequence[Tokens]], shape_BHQD: Sequence[int], scoring: Scoring, *, groups: int
) -> Tensor:
    """Attention of each sequence over all its tokens in one softmax.

    Args:
        softmaxes: for each of the B sequences its tokens, one entry for each way in which some are stored.
        shape_BHQD: query heads, new queries and head dim of B sequences.
        scoring: what the model does to scores.
        groups: G.

    Returns:
        (B, Q, H, D) fp32; 0 for a query that may see nothing.
    """
    scaling, softcap, sink_H = scoring
    batch, heads, queries, head_dim = shape_BHQD
    rows = heads * queries
    # On the CPU, whatever torch's defaults are set to.
    output_BQHD = torch.empty(batch, queries, heads, head_dim, dtype=torch.float32, device=CPU)
    output, output_bytes = output_BQHD.data_ptr(), rows * head_dim * 4
    lanes_of_rows, threads = rows + -rows % lanes(), torch.get_num_threads()
    sinks = None if sink_H is None else contiguous_fp32(sink_H.detach())  # kept alive: its address follows
    sink = 0 if sinks is None else sinks.data_ptr()
    common = _COMMON.pack(groups, rows, lanes_of_rows, head_dim, queries, threads, sink, scaling, softcap or 0.0)
    for b, tokens in enumerate(softmaxes):
        copies: list[Tensor] = []  # kept alive: addresses in them follow
        packed = b""
        for query_BMX, keys, values, slots, decoders, rotary, position_T, mask_QT in tokens:
            positions, first_position, mask, mask_stride = 0, 0, 0, 0
            if isinstance(position_T, slice):
                first_position = position_T.start
            elif position_T is not None:
                copies.append(position_T.long().contiguous())
                positions = copies[-1].data_ptr()
            if mask_QT is not None:
                copies.append(mask_QT if mask_QT.stride(1) == 1 else mask_QT.contiguous())
                mask, mask_stride = copies[-1].data_ptr(), copies[-1].stride(0)
            packed += _TOKENS.pack(
                keys.address,
                values.address,
                slots,
                query_BMX.shape[-1],
                query_BMX.data_ptr() + b * query_BMX.stride(0) * 4,
                positions,
                first_position,
                mask,
                mask_stride,
                output + b * output_bytes,
            )
            packed += _NO_ROTATION if rotary is None else rotary.for_attend
            packed += (_DECODERS.pack(0, 0, 0, 0, 0, groups, False) if decoders is None else decoders.packed) + common
        if library().attend(packed, len(tokens)):
            raise MemoryError("no memory for the scratch space of compiled decode attention")
    return output_BQHD


@functools.cache
def multiplies_pairs(dtype: torch.dtype, head_dim: int, rotated_dims: int) -> bool:
    """Whether compiled code multiplies planned coefficients as bf16, two at a time.

    Args:
        dtype: of the coefficients; in fp32 they are not rounded.
        rotated_dims: of a head.
    """
    return dtype == torch.bfloat16 and bool(library().multiplies_pairs(head_dim, rotated_dims // 2))


def _kept(memo: dict[str, Any] | None, name: str, prepare: Callable[[Tensor], Tensor], decoder_PRW: Tensor) -> _Decoder:
    """`prepare(decoder_PRW)`, or what it returned the last time."""
    if memo is None:
        return _Decoder(prepare(decoder_PRW))
    kept = memo.get(name)  # None in a copy, too
    if kept is None:
        kept = memo[name] = _Decoder(prepare(decoder_PRW))
    return kept


def _pairs(decoder_1RW: Tensor) -> Tensor:
    """Neighbouring rows side by side, (⌈R/2⌉, W) int32 of two bf16 numbers each, the first in the low half; W padded."""
    [decoder_RW] = decoder_1RW
    rank, width = decoder_RW.shape
    padded_RW = F.pad(decoder_RW.to(CPU, torch.bfloat16), (0, -width % lanes(), 0, rank % 2))
    bits_RW = padded_RW.view(torch.int16).int()
    return ((bits_RW[1::2] << 16) | (bits_RW[0::2] & 0xFFFF)).contiguous()


def _columns(decoder_1RW: Tensor, *, head_dim: int) -> Tensor:
    """A pair of dims (j, j + D/2) side by side, (G, D/2, R) int32 of two bf16 numbers each, the first in the low half; R
    padded."""
    [decoder_RW] = decoder_1RW
    padded_RW = F.pad(decoder_RW.to(CPU, torch.bfloat16), (0, 0, 0, -len(decoder_RW) % lanes()))
    bits_GXFR = padded_RW.T.contiguous().view(torch.int16).int().view(-1, 2, head_dim // 2, len(padded_RW))
    return ((bits_GXFR[:, 1] << 16) | (bits_GXFR[:, 0] & 0xFFFF)).contiguous()


def _padded(states: Tensor) -> Tensor:
    """The same with zeros up to a whole number of vector registers in every row."""
    missing = -states.shape[-1] % lanes()
    return contiguous_fp32(F.pad(states, (0, missing)) if missing else states)
