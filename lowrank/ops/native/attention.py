"""Calling the compiled decode attention.

Shapes: G KV heads, M rows of queries that share one (heads × new queries), H = G·M, P parts (1, or G where heads are
compressed apart), D head dim, W width of a part, N tokens of a piece, T tokens in all, R rank, F pairs of a rotation.
"""

import ctypes
import struct

import torch
import torch.nn.functional as F
from torch import Tensor

from lowrank.coefficients import Coefficients
from lowrank.ops.native.library import lanes, library
from lowrank.ops.rotation import Rotation

_KINDS = {torch.float32: 0, torch.bfloat16: 1}
_QUANTISED = {8: 2, 4: 3}
_FLOATS = {"dtype": torch.float32, "device": "cpu"}  # whatever torch's defaults are set to
_MAX_PAIRS = 512  # as in attend.c
# The members of `struct piece` in store.h and of `struct task` in attend.c (with its two `struct store`), in their order.
_PIECE, _STORE = struct.Struct("8q"), "3q2iq"
_TASK = struct.Struct(f"{_STORE}{_STORE}14q6q2f")


class Piece:
    """Tokens of one rank; what is passed must not change while this is in use.

    Args:
        rows_PNY: their coefficients, (N, Y) or (P, N, Y), contiguous but for room to grow after each part's rows.
        rank: R, which is Y unless the rows are integers.
        scale_PNS: of integers.
        count: N, where there is room to grow.
        slot_N: where each is in the order that the mask's columns and places have, contiguous, possibly with room to grow;
            None where token n is at n.
        kind: of the rows, as in `store.h`.
        group: of integers: coefficients that share a scale; 0 when all of a row do.
    """

    def __init__(
        self,
        rows_PNY: Tensor,
        *,
        rank: int,
        scale_PNS: Tensor | None = None,
        count: int | None = None,
        slot_N: Tensor | None = None,
        kind: int,
        group: int = 0,
    ):
        self.rank, self.kind, self.group = rank, kind, group
        self.slot_bytes = 0 if slot_N is None else slot_N.itemsize
        self._held = rows_PNY, scale_PNS, slot_N  # kept alive: addresses in them follow
        self.members = _PIECE.pack(
            rows_PNY.data_ptr(),
            0 if scale_PNS is None else scale_PNS.data_ptr(),
            0 if slot_N is None else slot_N.data_ptr(),
            rows_PNY.shape[-2] if count is None else count,
            rank,
            rows_PNY.shape[-1] * rows_PNY.itemsize,
            rows_PNY.stride(0) * rows_PNY.itemsize,
            0 if scale_PNS is None else scale_PNS.stride(0) * scale_PNS.itemsize,
        )

    @classmethod
    def of(cls, coef: Coefficients, slot_N: Tensor | None = None) -> "Piece":
        """Coefficients as a cache holds them."""
        rows_PNY, scale_PNS = coef.buffers()
        quantisation = coef.quantisation
        return cls(
            rows_PNY,
            rank=coef.rank,
            scale_PNS=scale_PNS,
            count=coef.length,
            slot_N=slot_N,
            kind=_KINDS[coef.dtype] if quantisation is None else _QUANTISED[quantisation.bits],
            group=0 if quantisation is None else quantisation.group or 0,
        )

    @classmethod
    def whole(cls, states_GTD: Tensor) -> "Piece":
        """Keys, or values, at full rank."""
        return cls(states_GTD, rank=states_GTD.shape[2], kind=_KINDS[states_GTD.dtype])


def serves(dtype: torch.dtype, device: torch.device, rotation: Rotation | None) -> bool:
    """Whether compiled code can attend: on a CPU, in fp32 or bf16, where keys are rotated in pairs (of which its tables hold
    so many) or not at all."""
    rotates_pairs = rotation is None or (rotation.angle_TF is not None and rotation.angle_TF.shape[1] <= _MAX_PAIRS)
    return device.type == "cpu" and dtype in _KINDS and rotates_pairs and library() is not None


class Tokens:
    """Tokens of one softmax that are held in one way.

    Args:
        query_GMX: rotated queries (X = D), or what stands for them over the coefficients (X = R) without a decoder.
        keys, values: the same tokens, at least one, each cut into pieces in its own way.
        slots: T.
        value_decoder_PRW: gives values from coefficients; R is at least the values' largest rank. None where each KV
            head's coefficients are its values.
        decoder_PRW: rebuilds keys; R is at least the largest rank.
        angle_TF: complex64 cos + i·sin that turn the pairs (j, j + F) of rebuilt keys; None to leave them.
        place_T: the place of each slot in `angle_TF`; None where they are the same.
        mask_QT: bool, True where a query may see a token; None when it may see all.
    """

    def __init__(
        self,
        query_GMX: Tensor,
        keys: list[Piece],
        values: list[Piece],
        *,
        slots: int,
        value_decoder_PRW: Tensor | None = None,
        decoder_PRW: Tensor | None = None,
        angle_TF: Tensor | None = None,
        place_T: Tensor | slice | None = None,
        mask_QT: Tensor | None = None,
    ):
        self.query, self.keys, self.values, self.slots = query_GMX, keys, values, slots
        self.value_decoder = None if value_decoder_PRW is None else value_decoder_PRW.float().contiguous()
        self.decoder = None if decoder_PRW is None else _padded(decoder_PRW.float())
        self.angle = None if angle_TF is None else angle_TF.contiguous()
        self.place = None if place_T is None or isinstance(place_T, slice) else place_T.long().contiguous()
        self.first_place = place_T.start if isinstance(place_T, slice) else 0
        self.mask = mask_QT if mask_QT is None or mask_QT.stride(1) == 1 else mask_QT.contiguous()

    def pack(self, common: tuple, lanes: int) -> tuple[bytes, tuple]:
        """(``struct task``, what must be kept alive while it is in use)."""
        parts, rank = self.query.shape[0], None
        value_width = self.values[0].rank
        if self.value_decoder is not None:
            parts, rank, value_width = self.value_decoder.shape
        query = self.query.float().contiguous()
        score = torch.empty(self.slots, lanes, **_FLOATS)
        decoder, angle, mask = self.decoder, self.angle, self.mask
        key_table, *key_store = _store(self.keys, None if decoder is None else decoder.shape[1])
        value_table, *value_store = _store(self.values, rank)
        tensors = (query, decoder, angle, self.place, mask, self.value_decoder, score)
        packed = _TASK.pack(
            *key_store,
            *value_store,
            *(0 if tensor is None else tensor.data_ptr() for tensor in tensors),
            parts,
            query.shape[2],
            0 if angle is None else angle.shape[1],
            0 if decoder is None else decoder.shape[2],
            value_width,
            self.first_place,
            0 if mask is None else mask.stride(0),
            *common,
        )
        return packed, (key_table, value_table, query, score)


def attend(
    tokens: list[Tokens], head_dim: int, *, scaling: float, queries: int = 1, softcap: float | None = None
) -> Tensor:
    """Attention over all tokens in one softmax.

    Args:
        tokens: of every way in which some are held.
        head_dim: D.
        scaling: of the scores.
        queries: new queries, the fastest of the M rows.
        softcap: see :func:`lowrank.ops.ragged_attention.ragged_attention`.

    Returns:
        (G, M, D) fp32.
    """
    groups, rows, _ = tokens[0].query.shape
    heads = groups * rows
    width = heads + -heads % lanes()
    output = torch.zeros(groups, rows, head_dim, **_FLOATS)
    common = (output.data_ptr(), groups, heads, width, queries, torch.get_num_threads(), scaling, softcap or 0.0)
    packed = [each.pack(common, width) for each in tokens]
    if library().attend(b"".join([task for task, _ in packed]), len(packed)):
        raise MemoryError("no memory for the scratch space of compiled decode attention")
    return output


def _padded(states: Tensor) -> Tensor:
    """The same with zeros up to a whole number of vector registers in every row, contiguous."""
    missing = -states.shape[-1] % lanes()
    return F.pad(states, (0, missing)) if missing else states.contiguous()


def _store(pieces: list[Piece], rank: int | None) -> tuple:
    """The table of the pieces, to be kept alive, and the members of ``struct store``.

    Args:
        rank: how many rows the decoder has; the largest of the pieces where there is none.
    """
    table = ctypes.create_string_buffer(b"".join([piece.members for piece in pieces]))
    first = pieces[0]
    rank = max(piece.rank for piece in pieces) if rank is None else rank
    return table, ctypes.addressof(table), len(pieces), rank, first.kind, first.slot_bytes, first.group
