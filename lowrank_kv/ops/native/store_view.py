"""What a store holds, as compiled code reads it and appends to it.

Shapes: P parts (1, or one for each KV head where heads are compressed apart), N tokens of a piece, Y numbers or bytes of a
row.
"""

import ctypes
import struct

import torch
from torch import Tensor

from lowrank_kv.ops.native.library import library
from lowrank_kv.stores.coefficients import Coefficients

KINDS = {torch.float32: 0, torch.bfloat16: 1}
_QUANTISED = {8: 2, 4: 3}
# The members of `struct piece` and `struct store` in store.h, in their order.
_PIECE, _STORE = struct.Struct("9q"), struct.Struct("3q2iq")
_COUNT = struct.calcsize("3q")  # where a piece's count is in it

NOTHING = type(None), ()  # what a copy of addresses is: whoever has it must work out its own


class RankBucketView:
    """Tokens of one rank; what is passed must not move while this is in use.

    Args:
        rows_PNY: their coefficients, (N, Y) or (P, N, Y), contiguous, with room to grow after each part's rows.
        rank: R, which is Y unless the rows are integers.
        scale_PNS: of integers.
        count: N, where there is room to grow.
        slot_N: where each is in the order that the mask's columns and places have, rising; contiguous, with room to grow.
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
        room = rows_PNY.shape[-2]
        self.members = _PIECE.pack(
            rows_PNY.data_ptr(),
            0 if scale_PNS is None else scale_PNS.data_ptr(),
            0 if slot_N is None else slot_N.data_ptr(),
            room if count is None else count,
            room if slot_N is None else min(room, slot_N.shape[0]),
            rank,
            rows_PNY.shape[-1] * rows_PNY.itemsize,
            rows_PNY.stride(0) * rows_PNY.itemsize,
            0 if scale_PNS is None else scale_PNS.stride(0) * scale_PNS.itemsize,
        )

    def __reduce__(self) -> tuple:
        return NOTHING

    @classmethod
    def of(cls, coef: Coefficients, slot_N: Tensor | None = None) -> "RankBucketView":
        """Coefficients as a cache holds them."""
        rows_PNY, scale_PNS = coef.buffers()
        quantization = coef.quantization
        return cls(
            rows_PNY,
            rank=coef.rank,
            scale_PNS=scale_PNS,
            count=coef.length,
            slot_N=slot_N,
            kind=KINDS[coef.dtype] if quantization is None else _QUANTISED[quantization.bits],
            group=0 if quantization is None else quantization.group or 0,
        )

    @classmethod
    def whole(cls, states_GTD: Tensor) -> "RankBucketView":
        """Keys, or values, at full rank, (G, N, D), contiguous."""
        return cls(states_GTD, rank=states_GTD.shape[2], kind=KINDS[states_GTD.dtype])


def appends(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether compiled code can append rows that are held in `dtype`, not as integers."""
    return dtype == torch.float32 and device.type == "cpu" and library() is not None


class StoreView:
    """The pieces of one store, held in one way and in order of rank.

    Args:
        pieces: what the store holds; none to which nothing is appended and which are not attended over.
        rank: the largest of the pieces, or more; with several parts as many as the decoder of each has rows.
    """

    def __init__(self, pieces: list[RankBucketView], rank: int):
        kind, slot_bytes, group = (pieces[0].kind, pieces[0].slot_bytes, pieces[0].group) if pieces else (0, 0, 0)
        self._pieces = pieces  # kept alive: addresses in them follow
        self._memory = ctypes.create_string_buffer(_STORE.size + len(pieces) * _PIECE.size)
        self.address = ctypes.addressof(self._memory)
        store = _STORE.pack(self.address + _STORE.size, len(pieces), rank, kind, slot_bytes, group)
        self._memory.raw = b"".join([store, *(piece.members for piece in pieces)])

    def __reduce__(self) -> tuple:
        return NOTHING

    def counts(self) -> list[int]:
        """The tokens of each piece."""
        places = range(_STORE.size + _COUNT, len(self._memory), _PIECE.size)
        return [struct.unpack_from("q", self._memory, place)[0] for place in places]

    def count_whole(self, count: int) -> None:
        """There are so many tokens in the only piece, :meth:`RankBucketView.whole`."""
        struct.pack_into("q", self._memory, _STORE.size + _COUNT, count)

    def append(self, coef_address: int, rank: int, slot: int) -> bool:
        """Write a row of `rank` coefficients and its slot behind those of its rank; False, and nothing is written, where
        there is no room. Only where :func:`appends`, and pieces have one part and slots."""
        return bool(library().append(self.address, coef_address, rank, slot))
