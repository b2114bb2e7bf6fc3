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
_MAX_PAIRS = 512  # as in attend.c
# The members of `struct piece` and `struct task` there (with its two `struct store`), in their order.
_PIECE, _STORE = struct.Struct("8q"), "3q2iq"
_TASK = struct.Struct(f"{_STORE}{_STORE}9q12qf")


class Piece:
    """Tokens of one rank; what is passed must not change while this is in use.

    Args:
        coef: their coefficients, (N, R) or (P, N, R).
        slot_N: where each is in the order that the mask's columns and places have, contiguous, possibly with room to grow;
            None where token n is at n.
    """

    def __init__(self, coef: Coefficients, slot_N: Tensor | None = None):
        row_PNY, scale_PNS = coef.buffers()
        self.coef, self.slot_N = coef, slot_N
        self._buffers = row_PNY, scale_PNS  # kept alive: addresses in them follow
        self.members = _PIECE.pack(
            row_PNY.data_ptr(),
            0 if scale_PNS is None else scale_PNS.data_ptr(),
            0 if slot_N is None else slot_N.data_ptr(),
            coef.length,
            coef.rank,
            row_PNY.shape[-1] * row_PNY.itemsize,
            row_PNY.stride(0) * row_PNY.itemsize,
            0 if scale_PNS is None else scale_PNS.stride(0) * scale_PNS.itemsize,
        )


def serves(dtype: torch.dtype, device: torch.device, rotation: Rotation | None) -> bool:
    """Whether compiled code can attend: on a CPU, in fp32 or bf16, where keys are rotated in pairs (of which its tables hold
    so many) or not at all."""
    rotates_pairs = rotation is None or (rotation.angle_TF is not None and rotation.angle_TF.shape[1] <= _MAX_PAIRS)
    return device.type == "cpu" and dtype in _KINDS and rotates_pairs and library() is not None


def attend(
    query_GMX: Tensor,
    keys: list[Piece],
    values: list[Piece],
    value_decoder_PRW: Tensor,
    *,
    scaling: float,
    slots: int,
    queries: int = 1,
    decoder_PRW: Tensor | None = None,
    angle_TF: Tensor | None = None,
    place_T: Tensor | slice | None = None,
    softcap: float | None = None,
    mask_QT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over all pieces' tokens.

    Args:
        query_GMX: rotated queries (X = D), or what stands for them over the coefficients (X = R) without a decoder.
        keys, values: the same tokens, at least one, each cut into pieces in its own way.
        value_decoder_PRW: gives values from coefficients; R is at least the values' largest rank.
        scaling: of the scores.
        slots: T.
        queries: new queries, the fastest of the M rows.
        decoder_PRW: rebuilds keys; R is at least the largest rank.
        angle_TF: complex64 cos + i·sin that turn the pairs (j, j + F) of rebuilt keys; None to leave them.
        place_T: the place of each slot in `angle_TF`; None where they are the same.
        softcap, mask_QT: see :func:`lowrank.ops.ragged_attention.ragged_attention`.

    Returns:
        (G, M, D) fp32 and the logarithm of each row's sum of exponentials, (G, M).
    """
    groups, rows, depth = query_GMX.shape
    heads = groups * rows
    width = heads + -heads % lanes()
    parts, value_rank, value_width = value_decoder_PRW.shape
    # What the addresses below point into has a name of its own, which keeps it alive.
    query = (query_GMX.float() * scaling).contiguous()
    decoder = None if decoder_PRW is None else _padded(decoder_PRW.float())
    value_decoder = value_decoder_PRW.float().contiguous()
    angle = None if angle_TF is None else angle_TF.contiguous()
    place = None if place_T is None or isinstance(place_T, slice) else place_T.long().contiguous()
    mask = None if mask_QT is None else mask_QT.contiguous()
    score = torch.empty(slots, width)
    output = torch.empty(groups, rows, value_width * parts // groups)
    logsumexp = torch.empty(groups, rows)
    key_table, *key_store = _store(keys, None if decoder is None else decoder.shape[1])
    value_table, *value_store = _store(values, value_rank)
    tensors = (query, decoder, angle, place, mask, value_decoder, score, output, logsumexp)
    task = _TASK.pack(
        *key_store,
        *value_store,
        *(0 if tensor is None else tensor.data_ptr() for tensor in tensors),
        slots,
        parts,
        groups,
        heads,
        width,
        queries,
        depth,
        0 if angle is None else angle.shape[1],
        0 if decoder is None else decoder.shape[2],
        value_width,
        place_T.start if isinstance(place_T, slice) else 0,
        torch.get_num_threads(),
        softcap or 0.0,
    )
    if library().attend(task):
        raise MemoryError("no memory for the scratch space of compiled decode attention")
    return output, logsumexp


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
    coef, slot_N = pieces[0].coef, pieces[0].slot_N
    quantisation = coef.quantisation
    return (
        table,
        ctypes.addressof(table),
        len(pieces),
        max(piece.coef.rank for piece in pieces) if rank is None else rank,
        _KINDS[coef.dtype] if quantisation is None else _QUANTISED[quantisation.bits],
        0 if slot_N is None else slot_N.itemsize,
        0 if quantisation is None else quantisation.group or 0,
    )
