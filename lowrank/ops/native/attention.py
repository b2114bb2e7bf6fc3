"""Calling the compiled decode attention.

Shapes: H query heads, G KV heads, Q new queries, P parts (1, or G where heads are compressed apart), D head dim, W width of
a part, T tokens in all, R rank, F pairs of a rotation.
"""

import struct

import torch
import torch.nn.functional as F
from torch import Tensor

from lowrank.ops.native.library import ABSENT, lanes, library
from lowrank.ops.native.plain import CPU, plain
from lowrank.ops.native.table import KINDS, Table
from lowrank.ops.rotary_table import RotaryTable
from lowrank.ops.rotation import Rotation

# The members of `struct task` in attend.c, in their order.
_TASK = struct.Struct("2q7q8q7q2f")


def refusal(dtype: torch.dtype, device: torch.device, rotation: Rotation | None) -> str | None:
    """What keeps compiled code from attending; None on a CPU, in fp32 or bf16, where keys are rotated in pairs or not at
    all."""
    if device.type != "cpu":
        return "compiled code runs on a CPU"
    if dtype not in KINDS:
        return "compiled code reads fp32 and bf16"
    if rotation is not None and rotation.table is None:
        return "compiled code rotates keys in pairs"
    return ABSENT if library() is None else None


class Tokens:
    """Tokens of one softmax that are held in one way.

    Args:
        query_MX: rotated queries (X = D), or what stands for them over the coefficients (X = R) without a decoder; M = H·Q
            rows, over as many dims as is convenient.
        keys, values: the same tokens, at least one, each cut into pieces in its own way.
        slots: T.
        value_decoder_PRW: gives values from coefficients, R of `values`; (R, W) of one part. None where each KV head's
            coefficients are its values.
        decoder_PRW: rebuilds keys, R of `keys`; (R, W) of one part.
        turns: of a batch of one, by which the pairs (j, j + F) of rebuilt keys are turned; None to leave them.
        place_T: the place of each slot in `turns`; None where they are the same.
        mask_QT: bool, True where a query may see a token; None when it may see all.
    """

    def __init__(
        self,
        query_MX: Tensor,
        keys: Table,
        values: Table,
        *,
        slots: int,
        value_decoder_PRW: Tensor | None = None,
        decoder_PRW: Tensor | None = None,
        turns: RotaryTable | None = None,
        place_T: Tensor | slice | None = None,
        mask_QT: Tensor | None = None,
    ):
        self.keys, self.values, self.slots = keys, values, slots
        self.query = plain(query_MX)
        self.value_decoder = None if value_decoder_PRW is None else plain(value_decoder_PRW)
        self.decoder = None if decoder_PRW is None else _padded(decoder_PRW)
        self.cos, self.sin = (None, None) if turns is None else (plain(turns.cos_BTF), plain(turns.sin_BTF))
        self.place = None if place_T is None or isinstance(place_T, slice) else place_T.long().contiguous()
        self.first_place = place_T.start if isinstance(place_T, slice) else 0
        self.mask = mask_QT if mask_QT is None or mask_QT.stride(1) == 1 else mask_QT.contiguous()

    def pack(self, common: tuple, groups: int) -> bytes:
        """``struct task``."""
        query, decoder, mask, value_decoder = self.query, self.decoder, self.mask, self.value_decoder
        tensors = (query, decoder, self.cos, self.sin, self.place, mask, value_decoder)
        parts = groups
        if value_decoder is not None:
            parts = value_decoder.shape[0] if value_decoder.dim() == 3 else 1
        return _TASK.pack(
            self.keys.address,
            self.values.address,
            *[0 if tensor is None else tensor.data_ptr() for tensor in tensors],
            self.slots,
            parts,
            query.shape[-1],
            0 if self.cos is None else self.cos.shape[2],
            0 if decoder is None else decoder.shape[-1],
            0 if value_decoder is None else value_decoder.shape[-1],
            self.first_place,
            0 if mask is None else mask.stride(0),
            *common,
        )


def attend(
    tokens: list[Tokens],
    shape_HQD: torch.Size,
    *,
    groups: int,
    scaling: float,
    softcap: float | None = None,
) -> Tensor:
    """Attention over all tokens in one softmax.

    Args:
        tokens: of every way in which some are held.
        shape_HQD: query heads, new queries, head dim.
        groups: G.
        scaling: of the scores.
        softcap: see :func:`lowrank.ops.ragged_attention.ragged_attention`.

    Returns:
        (H, Q, D) fp32; 0 for a query that may see nothing.
    """
    heads, queries, head_dim = shape_HQD
    rows = heads * queries
    output_HQD = torch.empty(shape_HQD, dtype=torch.float32, device=CPU)  # whatever torch's defaults are set to
    shapes = (groups, rows, rows + -rows % lanes(), head_dim, queries)
    common = (output_HQD.data_ptr(), *shapes, torch.get_num_threads(), scaling, softcap or 0.0)
    if library().attend(b"".join([each.pack(common, groups) for each in tokens]), len(tokens)):
        raise MemoryError("no memory for the scratch space of compiled decode attention")
    return output_HQD


def _padded(states: Tensor) -> Tensor:
    """The same with zeros up to a whole number of vector registers in every row."""
    missing = -states.shape[-1] % lanes()
    return plain(F.pad(states, (0, missing)) if missing else states)
