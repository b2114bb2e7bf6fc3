"""Calling the compiled way of a few new tokens into a cache.

Shapes: B batch, G KV heads, T tokens, D head dim, C = G·D joint width, E rotary dims.
"""

import ctypes
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from lowrank.codec import TokenGate
from lowrank.ops.chosen import log_choice
from lowrank.ops.native.library import ABSENT, lanes, library
from lowrank.ops.native.plain import CPU, plain
from lowrank.ops.native.table import Table

# More tokens than this are a prompt, which torch's own products serve better.
MAX_TOKENS = 16

# The members of `struct side` and the others of `struct encoding` in encode.c, in order.
_TASK = struct.Struct("12qfxxxx" * 2 + "10q")
_ENTRANCE = 5  # members of `struct entrance`

Entrance = tuple[Table | None, Table | None, int]


class Encoder:
    """What a layer's new tokens become, by the weights as they are when this is made.

    Args:
        key, value: the gates of keys and of values, of one width.
    """

    def __init__(self, key: TokenGate, value: TokenGate):
        self._sides = [_weights(gate) for gate in (key, value)]  # kept alive: addresses in them follow
        self._width = self._sides[0][0].shape[0]
        self._members = [
            ([0 if tensor is None else tensor.data_ptr() for tensor in tensors], gate.granularity, gate.threshold)
            for tensors, gate in zip(self._sides, (key, value), strict=True)
        ]

    def serves(self, key_BGTD: Tensor, value_BGTD: Tensor) -> bool:
        """Whether these are few tokens, in fp32 on a CPU."""
        return (
            key_BGTD.shape[0] * key_BGTD.shape[2] <= MAX_TOKENS
            and key_BGTD.dtype == value_BGTD.dtype == torch.float32
            and key_BGTD.is_cpu
            and value_BGTD.is_cpu
        )

    def encode(
        self,
        key_BGTD: Tensor,
        value_BGTD: Tensor,
        rotated_by: tuple[Tensor, Tensor] | None,
        entrances: Sequence[Entrance] = (),
    ) -> tuple[Tensor, Tensor, tuple[list[int], list[int]]]:
        """Coefficients and ranks of new tokens (DynaKV, equations 1, 5, 6 and 8), and their way into stores.

        Args:
            key_BGTD: rotated keys, and values, as :meth:`serves` asks for.
            rotated_by: cos and sin, (B or 1, T, E), by which halves of the keys' first E dims were rotated and are turned
                back; None where keys are not rotated.
            entrances: for each sequence the stores of its keys and of its values, to which its tokens are appended (None:
                they are not), and the slot of the first.

        Returns:
            the coefficients of keys and values, (2, B, T, C) fp32; their ranks, (2, B, T) int64; and how many tokens' keys
            and how many tokens' values were appended, of each sequence: those before the first that found no room.
        """
        batch, groups, tokens, head_dim = key_BGTD.shape
        coef = torch.empty(2, batch, tokens, self._width, dtype=torch.float32, device=CPU)
        rank = torch.empty(2, batch, tokens, dtype=torch.int64, device=CPU)
        numbers = [number for key, value, slot in entrances for number in (_address(key), _address(value), slot, 0, 0)]
        places = (ctypes.c_int64 * (_ENTRANCE * batch))(*numbers)
        cos, sin = (None, None) if rotated_by is None else [plain(table) for table in rotated_by]
        members, kept = [], []
        coef_address, rank_address = coef.data_ptr(), rank.data_ptr()
        for states_BGTD, (weights, granularity, threshold) in zip((key_BGTD, value_BGTD), self._members, strict=True):
            strides = states_BGTD.stride()
            if strides[3] != 1:
                states_BGTD = states_BGTD.contiguous()
                strides = states_BGTD.stride()
            kept.append(states_BGTD)
            members += (
                *weights,
                states_BGTD.data_ptr(),
                *strides[:3],
                coef_address,
                rank_address,
                granularity,
                threshold,
            )
            coef_address += batch * tokens * self._width * 4
            rank_address += batch * tokens * 8
        packed = _TASK.pack(
            *members,
            0 if cos is None else cos.data_ptr(),
            0 if sin is None else sin.data_ptr(),
            0 if cos is None or cos.shape[0] == 1 else cos.stride(0),
            ctypes.addressof(places),
            batch,
            tokens,
            groups,
            head_dim,
            0 if cos is None else cos.shape[2],
            torch.get_num_threads(),
        )
        if library().encode(packed):
            raise MemoryError("no memory for the scratch space of compiled encoding")
        return coef, rank, (places[3::_ENTRANCE], places[4::_ENTRANCE])


def encodes(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there is compiled code for new tokens that are held in `dtype` on a device."""
    if device.type != "cpu":
        return False
    because = None
    if dtype != torch.float32:
        because = "compiled code writes fp32"
    elif library() is None:
        because = ABSENT
    if because is not None:
        log_choice("encode", "torch", dtype, device, because)
    return because is None


def encoder_of(key: TokenGate | None, value: TokenGate | None) -> Encoder | None:
    """An encoder by these gates, where :func:`encodes`; None where there are no gates, or they do not fill whole vector
    registers."""
    because = None
    if key is None or value is None:
        because = "compiled code encodes by a gate's weights"
    elif key.basis_CC.shape[0] % lanes():
        because = "compiled code encodes widths that fill vector registers"
    log_choice("encode", "torch" if because else "compiled", torch.float32, CPU, because)
    return None if because else Encoder(key, value)


def _address(table: Table | None) -> int:
    return 0 if table is None else table.address


def _weights(gate: TokenGate) -> list[Tensor | None]:
    """U, s, W and b of a gate softmax(x·U·diag(s)·W + b), and what coefficients are divided by; fp32 ones uncopied."""
    tensors = gate.basis_CC, gate.scale_C, gate.weight_CC, gate.bias_C, gate.spread_C
    return [None if tensor is None else plain(tensor.detach()) for tensor in tensors]
