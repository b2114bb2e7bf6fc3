"""Calling the compiled way of a few new tokens into a cache.

Shapes: S sides (keys, values), B batch, G KV heads, T tokens, D head dim, C = G·D joint width, E rotary dims.
"""

import ctypes
import struct
import threading
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
_TASK = struct.Struct("6qfxxxx6q" * 2 + "10q")
_ENTRANCE = 5  # members of `struct entrance`

Entrance = tuple[Table | None, Table | None, int]
_NO_ENTRANCE: Entrance = None, None, 0


class NewTokens:
    """What an encoder has made of new tokens.

    Attributes:
        coef_SBTC: coefficients, fp32.
        rank_SBT: their ranks, int64.
    """

    def __init__(self, batch: int, tokens: int, width: int):
        self.shape = batch, tokens, width
        with torch.inference_mode(False):  # else none but that mode could go on with it
            self.coef_SBTC = torch.empty(2, batch, tokens, width, dtype=torch.float32, device=CPU)
            self.rank_SBT = torch.empty(2, batch, tokens, dtype=torch.int64, device=CPU)
        self._ranks = (ctypes.c_int64 * (2 * batch * tokens)).from_address(self.rank_SBT.data_ptr())
        self._entrances = (ctypes.c_int64 * (_ENTRANCE * batch))()
        self.side_members = [
            (coef_BTC.data_ptr(), rank_BT.data_ptr())
            for coef_BTC, rank_BT in zip(self.coef_SBTC, self.rank_SBT, strict=True)
        ]
        self.members = ctypes.addressof(self._entrances), batch, tokens

    def enter(self, entrances: Sequence[Entrance]) -> None:
        """The tokens about to be encoded go there."""
        numbers, batch = self._entrances, self.shape[0]
        for b, (key, value, slot) in zip(range(batch), entrances or [_NO_ENTRANCE] * batch, strict=True):
            place = b * _ENTRANCE
            numbers[place] = 0 if key is None else key.address
            numbers[place + 1] = 0 if value is None else value.address
            numbers[place + 2] = slot

    def ranks(self, side: int, sequence: int) -> list[int]:
        """Those of one sequence's keys (`side` 0) or values (1)."""
        batch, tokens, _ = self.shape
        start = (side * batch + sequence) * tokens
        return self._ranks[start : start + tokens]

    def appended(self, side: int, sequence: int) -> int:
        """How many of these tokens are in their store: those before the first that found no room."""
        return self._entrances[sequence * _ENTRANCE + 3 + side]


class _Last(threading.local):
    """Memory for what a call gives out, which nearly every call could take over from the one before, whatever its layer: to
    ask torch for it takes as long as much of the encoding."""

    new: NewTokens | None = None


_last = _Last()


class Encoder:
    """What a layer's new tokens become, by the weights as they are when this is made.

    Args:
        key, value: the gates of keys and of values, of one width.
    """

    def __init__(self, key: TokenGate, value: TokenGate):
        self._gates = key, value
        self._sides = [_weights(gate) for gate in self._gates]  # kept alive: addresses in them follow
        self._width = self._sides[0][0].shape[0]
        self._members = [
            (*[0 if tensor is None else tensor.data_ptr() for tensor in tensors], gate.granularity, gate.threshold)
            for tensors, gate in zip(self._sides, self._gates, strict=True)
        ]

    def __reduce__(self) -> tuple:
        return _made_again, self._gates

    def serves(self, key_BGTD: Tensor, value_BGTD: Tensor) -> bool:
        """Whether these are few tokens, in fp32 on a CPU."""
        batch, _, tokens, _ = key_BGTD.shape
        return (
            batch * tokens <= MAX_TOKENS
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
    ) -> NewTokens:
        """Coefficients and ranks of new tokens (DynaKV, equations 1, 5, 6 and 8), and their way into stores.

        Args:
            key_BGTD: rotated keys, and values, as :meth:`serves` asks for.
            rotated_by: cos and sin, (B or 1, T, E), by which halves of the keys' first E dims were rotated and are turned
                back; None where keys are not rotated.
            entrances: for each sequence the stores of its keys and of its values, to which its tokens are appended (None:
                they are not), and the slot of the first.

        Returns:
            what the tokens have become; the thread's next call, of whatever layer, writes over it.
        """
        batch, groups, tokens, head_dim = key_BGTD.shape
        new = _last.new
        if new is None or new.shape != (batch, tokens, self._width):
            new = _last.new = NewTokens(batch, tokens, self._width)
        new.enter(entrances)
        key_BGTD, value_BGTD = _rows(key_BGTD), _rows(value_BGTD)
        turned = 0, 0, 0, 0
        if rotated_by is not None:
            cos, sin = plain(rotated_by[0]), plain(rotated_by[1])
            turned = cos.data_ptr(), sin.data_ptr(), 0 if cos.shape[0] == 1 else cos.stride(0), cos.shape[2]
        packed = _TASK.pack(
            *self._members[0],
            *new.side_members[0],
            key_BGTD.data_ptr(),
            *key_BGTD.stride()[:3],
            *self._members[1],
            *new.side_members[1],
            value_BGTD.data_ptr(),
            *value_BGTD.stride()[:3],
            *new.members,
            groups,
            head_dim,
            torch.get_num_threads(),
            *turned,
        )
        if library().encode(packed):
            raise MemoryError("no memory for the scratch space of compiled encoding")
        return new


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


def _made_again(key: TokenGate, value: TokenGate) -> Encoder | None:
    """A copy, by the compiled code that there is where it is made."""
    return encoder_of(key, value) if encodes(torch.float32, CPU) else None


def _rows(states_BGTD: Tensor) -> Tensor:
    """The same with the dims of a head side by side."""
    return states_BGTD if states_BGTD.stride(3) == 1 else states_BGTD.contiguous()


def _weights(gate: TokenGate) -> list[Tensor | None]:
    """U, s, W and b of a gate softmax(x·U·diag(s)·W + b), and what coefficients are divided by; fp32 ones uncopied."""
    tensors = gate.basis_CC, gate.scale_C, gate.weight_CC, gate.bias_C, gate.spread_C
    return [None if tensor is None else plain(tensor.detach()) for tensor in tensors]
