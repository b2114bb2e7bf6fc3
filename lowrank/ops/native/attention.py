"""Calling the compiled decode attention.

Shapes: B batch, H query heads, G KV heads, Q new queries, P parts (1, or G where heads are compressed apart), D head dim,
W width of a part, T tokens in all, R rank, F pairs of a rotation.
"""

import struct

import torch
import torch.nn.functional as F
from torch import Tensor

from lowrank.ops.native.library import ABSENT, lanes, library
from lowrank.ops.native.plain import CPU, plain
from lowrank.ops.native.table import KINDS, NOTHING, Table
from lowrank.ops.rotary_table import RotaryTable

# The members of `struct task` in attend.c, in their order.
_TASK = struct.Struct("4q5q3q5q7q2f")
_UNTURNED = (0, 0, 0)


def refusal(dtype: torch.dtype, device: torch.device, *, in_pairs: bool) -> str | None:
    """What keeps compiled code from attending; None on a CPU, in fp32 or bf16, where keys are rotated in pairs or not at
    all."""
    if device.type != "cpu":
        return "compiled code runs on a CPU"
    if dtype not in KINDS:
        return "compiled code reads fp32 and bf16"
    if not in_pairs:
        return "compiled code rotates keys in pairs"
    return ABSENT if library() is None else None


class Decoders:
    """What gives keys and values from coefficients, as compiled code reads it.

    Args:
        key_PRW: rebuilds keys, as many rows as the keys' :class:`Table` has coefficients; (R, W) of one part. None where
            queries stand over the coefficients themselves.
        value_PRW: the same of values, which are not rebuilt one by one.

    Attributes:
        is_copy: whether it holds tensors of its own.
    """

    def __init__(self, key_PRW: Tensor | None, value_PRW: Tensor):
        key = None if key_PRW is None else _padded(key_PRW)
        value = plain(value_PRW)
        self._held = key, value  # kept alive: addresses in them follow
        self.is_copy = key is not key_PRW or value is not value_PRW
        self.members = (
            0 if key is None else key.data_ptr(),
            value.data_ptr(),
            0 if key is None else key.shape[-1],
            value.shape[-1],
            value.shape[0] if value.dim() == 3 else 1,
        )

    def __reduce__(self) -> tuple:
        return NOTHING


class Turns:
    """The rotations of rebuilt keys, as compiled code reads them.

    Args:
        table: of a batch of one, by which the pairs (j, j + F) of keys are turned.
    """

    def __init__(self, table: RotaryTable):
        cos, sin = self._held = plain(table.cos_BTF), plain(table.sin_BTF)  # kept alive: addresses in them follow
        self.members = cos.data_ptr(), sin.data_ptr(), cos.shape[2]

    def __reduce__(self) -> tuple:
        return NOTHING


class Tokens:
    """Tokens of one softmax that are held in one way.

    Args:
        query_MX: rotated queries (X = D), or what stands for them over the coefficients (X = R) where no decoder rebuilds
            keys; M = H·Q rows, over as many dims as is convenient.
        keys, values: the same tokens, at least one, each cut into pieces in its own way.
        slots: T.
        decoders: of `keys` and `values`; None where each KV head's coefficients are its keys and values.
        turns: of rebuilt keys; None to leave them.
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
        decoders: Decoders | None = None,
        turns: Turns | None = None,
        place_T: Tensor | slice | None = None,
        mask_QT: Tensor | None = None,
    ):
        query_MX = plain(query_MX)
        self._addressed = [query_MX, keys, values, decoders, turns]  # kept alive until the call is over
        place, first_place, mask, mask_stride = 0, 0, 0, 0
        if isinstance(place_T, slice):
            first_place = place_T.start
        elif place_T is not None:
            place_T = place_T.long().contiguous()
            self._addressed.append(place_T)
            place = place_T.data_ptr()
        if mask_QT is not None:
            mask_QT = mask_QT if mask_QT.stride(1) == 1 else mask_QT.contiguous()
            self._addressed.append(mask_QT)
            mask, mask_stride = mask_QT.data_ptr(), mask_QT.stride(0)
        tokens = (keys.address, values.address, slots, query_MX.shape[-1])
        self._members = (*tokens, query_MX.data_ptr(), place, first_place, mask, mask_stride)
        self._members += _UNTURNED if turns is None else turns.members
        self._decoders = decoders

    def pack(self, common: tuple, groups: int) -> bytes:
        """``struct task``."""
        decoders = (0, 0, 0, 0, groups) if self._decoders is None else self._decoders.members
        return _TASK.pack(*self._members, *decoders, *common)


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
        raise _no_memory()
    return output_HQD


def attend_newest(
    query_BH1D: Tensor,
    held: list[tuple[Table, Table, int, Turns]],
    decoders: Decoders,
    *,
    groups: int,
    scaling: float,
    softcap: float | None = None,
) -> Tensor:
    """:func:`attend` of one new token of each sequence, in as few steps as that takes.

    Args:
        query_BH1D: rotated queries, fp32.
        held: of each of the B sequences the keys, the values, T and the turns of rebuilt keys, as :class:`Tokens` takes
            them; all tokens are seen.
        decoders: of all of them, keys among them.
        groups, scaling, softcap: as for :func:`attend`.

    Returns:
        (B, 1, H, D) fp32.
    """
    batch, heads, _, head_dim = query_BH1D.shape
    query_BH1D = plain(query_BH1D)
    output_B1HD = torch.empty(batch, 1, heads, head_dim, dtype=torch.float32, device=CPU)
    query, output, row = query_BH1D.data_ptr(), output_B1HD.data_ptr(), heads * head_dim * 4
    shapes = (groups, heads, heads + -heads % lanes(), head_dim, 1, torch.get_num_threads(), scaling, softcap or 0.0)
    for keys, values, slots, turns in held:
        tokens = (keys.address, values.address, slots, head_dim, query, 0, 0, 0, 0)
        if library().attend(_TASK.pack(*tokens, *turns.members, *decoders.members, output, *shapes), 1):
            raise _no_memory()
        query, output = query + row, output + row
    return output_B1HD


def _no_memory() -> MemoryError:
    return MemoryError("no memory for the scratch space of compiled decode attention")


def _padded(states: Tensor) -> Tensor:
    """The same with zeros up to a whole number of vector registers in every row."""
    missing = -states.shape[-1] % lanes()
    return plain(F.pad(states, (0, missing)) if missing else states)
