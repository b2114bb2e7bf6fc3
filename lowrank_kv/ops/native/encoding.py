"""Calling the compiled way of a few new tokens into a cache.

Shapes: S sides (keys, values), B batch, G KV heads, T tokens, D head dim, C = G·D joint width.
"""

import ctypes
import struct
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from lowrank_kv.codec import TokenGate
from lowrank_kv.ops.native.library import ABSENT, CPU, contiguous_fp32, lanes, library
from lowrank_kv.ops.native.rotary import ENCODE_ROTARY, PackedRotary
from lowrank_kv.ops.native.store_view import KINDS, StoreView
from lowrank_kv.utils.dispatch_log import log_choice

# More tokens than this are a prompt, which torch's own products serve better.
MAX_TOKENS = 16

# The members of `struct encoding` in encode.c, in their order: each side's gate, (the keys' rotation,) and a call's.
_GATE, _CALL = struct.Struct("6qfxxxx"), struct.Struct("19q")
_NO_ROTATION = bytes(ENCODE_ROTARY.size)

# The stores of a sequence's keys and of its values.
AppendTarget = tuple[StoreView, StoreView]


class EncodedTokens:
    """Encoded tokens.

    Attributes:
        coef_SBTC: coefficients, fp32.
        rank_SBT: their ranks, int64.
        are_stored: whether all keys and values are in their stores; otherwise none are.
    """

    def __init__(self, batch: int, tokens: int, width: int):
        self.shape = batch, tokens, width
        with torch.inference_mode(False):  # else none but that mode could go on with it
            self.coef_SBTC = torch.empty(2, batch, tokens, width, dtype=torch.float32, device=CPU)
            self.rank_SBT = torch.empty(2, batch, tokens, dtype=torch.int64, device=CPU)
        self.are_stored = False
        self.stores = (ctypes.c_int64 * (2 * batch))()  # addresses of the stores of keys, then of values
        self.members = self.coef_SBTC.data_ptr(), self.rank_SBT.data_ptr()


class _Last(threading.local):
    """Memory for what a call gives out, which nearly every call could take over from the one before, whatever its layer: to
    ask torch for it takes as long as much of the encoding."""

    new: EncodedTokens | None = None


_last = _Last()


class Encoder:
    """What a layer's new tokens become, by the weights as they are when this is made.

    Args:
        key, value: the gates of keys and of values, of one width, for states of that dtype.
        dtype: of states, fp32 or bf16; in bf16 every step is rounded to it, as it is where torch computes.
    """

    def __init__(self, key: TokenGate, value: TokenGate, dtype: torch.dtype):
        self._gates, self._dtype = (key, value), dtype
        self._sides = [_weights(gate) for gate in self._gates]  # kept alive: addresses in them follow
        self._width = self._sides[0][0].shape[0]
        self._packed = b"".join(
            _GATE.pack(
                *[0 if tensor is None else tensor.data_ptr() for tensor in tensors], gate.granularity, gate.threshold
            )
            for tensors, gate in zip(self._sides, self._gates, strict=True)
        )

    def __reduce__(self) -> tuple:
        return _made_again, (*self._gates, self._dtype)

    def encode(
        self,
        key_BGTD: Tensor,
        value_BGTD: Tensor,
        rotary: PackedRotary | None,
        targets: Sequence[AppendTarget] = (),
    ) -> EncodedTokens | None:
        """Coefficients and ranks of new tokens (DynaKV, equations 1, 5, 6 and 8), appended to stores that have room for all.

        Args:
            key_BGTD: rotated keys.
            value_BGTD: values.
            rotary: the rotation of halves that is undone; None where keys are not rotated.
            targets: the stores of each sequence; empty: the tokens are appended nowhere.

        Returns:
            the encoded tokens, which the thread's next call, of whatever layer, writes over; None, and nothing is done,
            unless these are few tokens, in the encoder's dtype and on a CPU.

        Raises:
            MemoryError: there is no memory for the call.
        """
        batch, groups, tokens, head_dim = key_BGTD.shape
        if batch * tokens > MAX_TOKENS or not (self._reads(key_BGTD) and self._reads(value_BGTD)):
            return None
        new = _last.new
        if new is None or new.shape != (batch, tokens, self._width):
            new = _last.new = EncodedTokens(batch, tokens, self._width)
        if targets:
            for b, (key, value) in zip(range(batch), targets, strict=True):
                new.stores[b], new.stores[batch + b] = key.address, value.address
        call = _CALL.pack(
            key_BGTD.data_ptr(),
            *key_BGTD.stride(),
            value_BGTD.data_ptr(),
            *value_BGTD.stride(),
            *new.members,
            ctypes.addressof(new.stores) if targets else 0,
            batch,
            tokens,
            groups,
            head_dim,
            torch.get_num_threads(),
            KINDS[self._dtype],
        )
        result = library().encode(self._packed + (_NO_ROTATION if rotary is None else rotary.for_encode) + call)
        if result < 0:
            raise MemoryError("no memory for the scratch space of compiled encoding")
        new.are_stored = result == 1
        return new

    def _reads(self, states: Tensor) -> bool:
        return states.dtype == self._dtype and states.is_cpu


def encodes(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there is compiled code for new tokens that are held in `dtype` on a device."""
    if device.type != "cpu":
        return False
    because = None
    if dtype not in KINDS:
        because = "compiled code writes fp32 and bf16"
    elif library() is None:
        because = ABSENT
    if because is not None:
        log_choice("encode", "eager", dtype, device, because)
    return because is None


def encoder_of(key: TokenGate | None, value: TokenGate | None, dtype: torch.dtype) -> Encoder | None:
    """An encoder by these gates for states in `dtype`, where :func:`encodes`; None where there are no gates, or they do not
    fill whole vector registers."""
    because = None
    if key is None or value is None:
        because = "compiled code encodes by a gate's weights"
    elif key.basis_CC.shape[0] % lanes():
        because = "compiled code encodes widths that fill vector registers"
    log_choice("encode", "eager" if because else "native", dtype, CPU, because)
    return None if because else Encoder(key, value, dtype)


def _made_again(key: TokenGate, value: TokenGate, dtype: torch.dtype) -> Encoder | None:
    """A copy, by the compiled code that there is where it is made."""
    return encoder_of(key, value, dtype) if encodes(dtype, CPU) else None


def _weights(gate: TokenGate) -> list[Tensor | None]:
    """U, s, W, b and what coefficients are divided by, as compiled code reads them: the gate's own tensors where it can."""
    tensors = gate.basis_CC, gate.scale_C, gate.weight_CC, gate.bias_C, gate.coef_scale_C
    return [None if tensor is None else contiguous_fp32(tensor.detach()) for tensor in tensors]
