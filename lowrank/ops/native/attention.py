"""Calling the compiled decode attention.

Shapes: G KV heads, M rows of queries that share one (heads × new queries), H = G·M, P parts (1, or G where heads are
compressed apart), D head dim, W width of a part, N tokens of a piece, T tokens in all, R rank, F pairs of a rotation.
"""

import ctypes
import struct
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lowrank.coefficients import Coefficients
from lowrank.ops.native.library import lanes, library
from lowrank.ops.rotation import Rotation

_KINDS = {torch.float32: 0, torch.bfloat16: 1}
_QUANTISED = {8: 2, 4: 3}


class Piece(NamedTuple):
    """Tokens of one rank.

    Attributes:
        coef: their coefficients, (N, R) or (P, N, R).
        slot_N: where each is in the order that the mask's columns and places have, contiguous, possibly with room to grow;
            None where token n is at n.
    """

    coef: Coefficients
    slot_N: Tensor | None = None


def serves(dtype: torch.dtype, device: torch.device, rotation: Rotation | None) -> bool:
    """Whether compiled code can attend: on a CPU, in fp32 or bf16, where keys are rotated in pairs or not at all."""
    rotates_pairs = rotation is None or rotation.angle_TF is not None
    return device.type == "cpu" and dtype in _KINDS and rotates_pairs and library() is not None


def attend(
    query_GMX: Tensor,
    keys: list[Piece],
    values: list[Piece],
    *,
    scaling: float,
    slots: int,
    parts: int = 1,
    queries: int = 1,
    decoder_PRW: Tensor | None = None,
    angle_TF: Tensor | None = None,
    place_T: Tensor | slice | None = None,
    softcap: float | None = None,
    mask_QT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Weighted sums of the values' coefficients, softmax over all pieces' tokens.

    Args:
        query_GMX: rotated queries (X = D), or what stands for them over the coefficients (X = R) without a decoder.
        keys, values: the same tokens, at least one, each cut into pieces in its own way.
        scaling: of the scores.
        slots: T.
        parts: P.
        queries: new queries, the fastest of the M rows.
        decoder_PRW: rebuilds keys; R is at least the largest rank.
        angle_TF: complex64 cos + i·sin that turn the pairs (j, j + F) of rebuilt keys; None to leave them.
        place_T: the place of each slot in `angle_TF`; None where they are the same.
        softcap, mask_QT: see :func:`lowrank.ops.ragged_attention.ragged_attention`.

    Returns:
        (H, R) fp32 with R the largest rank of the values, and the logarithm of each row's sum of exponentials, (H,).
    """
    held = []  # what the addresses below point into

    def address(tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        held.append(tensor)
        return tensor.data_ptr()

    key_store, value_store = _store(keys, held), _store(values, held)
    groups, rows, depth = query_GMX.shape
    heads = groups * rows
    width, stride = heads + -heads % lanes(), 0
    if decoder_PRW is not None:
        decoder_PRW = _padded(decoder_PRW.float())
        key_store.rank, stride = decoder_PRW.shape[1:]
    first_place = 0
    if isinstance(place_T, slice):
        place_T, first_place = None, place_T.start
    latent = torch.empty(heads, value_store.rank + -value_store.rank % lanes())
    logsumexp = torch.empty(heads)
    task = _Task(
        keys=key_store,
        values=value_store,
        query=address((query_GMX.float() * scaling).contiguous()),
        decoder=address(decoder_PRW),
        angle=address(None if angle_TF is None else angle_TF.contiguous()),
        place=address(None if place_T is None else place_T.long().contiguous()),
        mask=address(None if mask_QT is None else mask_QT.contiguous()),
        score=address(torch.empty(slots, width)),
        latent=address(latent),
        logsumexp=address(logsumexp),
        slots=slots,
        parts=parts,
        groups=groups,
        heads=heads,
        lanes=width,
        queries=queries,
        depth=depth,
        pairs=0 if angle_TF is None else angle_TF.shape[1],
        decoder_stride=stride,
        latent_stride=latent.shape[1],
        first_place=first_place,
        threads=torch.get_num_threads(),
        softcap=softcap or 0.0,
    )
    if library().attend(ctypes.byref(task)):
        raise MemoryError("no memory for the scratch space of compiled decode attention")
    return latent[:, : value_store.rank], logsumexp


def _padded(states: Tensor) -> Tensor:
    """The same with zeros up to a whole number of vector registers in every row, contiguous."""
    missing = -states.shape[-1] % lanes()
    return F.pad(states, (0, missing)) if missing else states.contiguous()


class _Store(ctypes.Structure):
    _fields_ = [
        ("pieces", ctypes.c_char_p),
        ("count", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("kind", ctypes.c_int32),
        ("slot_bytes", ctypes.c_int32),
        ("group", ctypes.c_int64),
    ]


class _Task(ctypes.Structure):
    _fields_ = [
        ("keys", _Store),
        ("values", _Store),
        *[
            (name, ctypes.c_void_p)
            for name in ("query", "decoder", "angle", "place", "mask", "score", "latent", "logsumexp")
        ],
        *[
            (name, ctypes.c_int64)
            for name in ("slots", "parts", "groups", "heads", "lanes", "queries", "depth", "pairs")
            + ("decoder_stride", "latent_stride", "first_place", "threads")
        ],
        ("softcap", ctypes.c_float),
    ]


def _store(pieces: list[Piece], held: list) -> _Store:
    """The pieces as ``struct store``; what they point into is added to `held`."""
    numbers = []
    for coef, slot_N in pieces:
        row_PNY, scale_PNS = coef.buffers()
        numbers += (
            row_PNY.data_ptr(),
            0 if scale_PNS is None else scale_PNS.data_ptr(),
            0 if slot_N is None else slot_N.data_ptr(),
            coef.length,
            coef.rank,
            row_PNY.shape[-1] * row_PNY.itemsize,
            row_PNY.stride(0) * row_PNY.itemsize,
            0 if scale_PNS is None else scale_PNS.stride(0) * scale_PNS.itemsize,
        )
    first = pieces[0]
    quantisation = first.coef.quantisation
    table = struct.pack(f"{len(numbers)}q", *numbers)
    held += (table, pieces)
    return _Store(
        pieces=table,
        count=len(pieces),
        rank=max(piece.coef.rank for piece in pieces),
        kind=_KINDS[first.coef.dtype] if quantisation is None else _QUANTISED[quantisation.bits],
        slot_bytes=0 if first.slot_N is None else first.slot_N.itemsize,
        group=0 if quantisation is None else quantisation.group or 0,
    )
