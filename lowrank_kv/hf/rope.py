"""Rotary embeddings: rotate and un-rotate with the family's own function, and remember each token's rotation.

Shapes: B batch (or 1 when all sequences agree), G heads, T tokens, N picked tokens, D head dim, E rotary dims (≤ D).
"""

import copy
import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.utils.weak import WeakIdKeyDictionary

from lowrank_kv.hf.frequencies import angles, turns_by_frequencies
from lowrank_kv.ops import native
from lowrank_kv.ops.rotary_table import RotaryTable
from lowrank_kv.ops.rotation import Places, Rotate, Rotation
from lowrank_kv.stores.growable_tensor import GrowingTensor
from lowrank_kv.utils.errors import UserError

# Rotary kinds whose frequencies depend on the length seen so far; a cached key keeps the rotation it was given.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclasses.dataclass(frozen=True)
class Rope:
    """The rotation of one forward pass.

    Attributes:
        apply: the family's ``apply_rotary_pos_emb(q, k, cos, sin)``.
        cos_BTE, sin_BTE: as the model computed them, scaling included.
        position_BT: position ids, int64, or None when the model did not pass them on.
    """

    apply: Callable
    cos_BTE: Tensor
    sin_BTE: Tensor
    position_BT: Tensor | None = None

    def rotate(self, key_BGTD: Tensor) -> Tensor:
        """Rotated keys, same shape and dtype."""
        return self._call(key_BGTD, self.cos_BTE, self.sin_BTE)

    def unrotate(self, key_BGTD: Tensor) -> Tensor:
        """The exact inverse of :meth:`rotate`, computed in fp32.

        With s = cos² + sin² the inverse rotation is (cos/s, −sin/s); s differs from 1 for rotary kinds that scale the
        embedding (yarn, longrope), where merely negating the sine would be far off.
        """
        inverse = _INVERSES.get(self.cos_BTE)
        if inverse is None:
            cos, sin = self.cos_BTE.float(), self.sin_BTE.float()
            norm = cos.square() + sin.square()
            inverse = _INVERSES[self.cos_BTE] = (cos / norm, -sin / norm)
        return self._call(key_BGTD.float(), *inverse).to(key_BGTD.dtype)

    def copied(self) -> "Rope":
        """The same in memory of its own: what a graph passed on it may write over as soon as the call is done."""
        position_BT = None if self.position_BT is None else self.position_BT.clone()
        return Rope(self.apply, self.cos_BTE.clone(), self.sin_BTE.clone(), position_BT)

    @functools.cached_property
    def packed(self) -> native.PackedRope | None:
        """This rotation for compiled code; None for a family that does not rotate halves of a head."""
        return native.PackedRope(self.cos_BTE, self.sin_BTE) if _rotates_halves(self.apply) else None

    def _call(self, key_BGTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos.to(key_BGTD.device), sin.to(key_BGTD.device)
        if cos.dtype == key_BGTD.dtype and _rotates_halves(self.apply):
            return _RotatedHalves.apply(key_BGTD, cos, sin)
        # The function rotates queries and keys together; no heads of queries means no work for them.
        return self.apply(key_BGTD[:, :0], key_BGTD, cos, sin)[1]


# cos of a pass → (cos/s, −sin/s): its layers share one rotation, and what is computed from it goes when it goes.
_INVERSES = WeakIdKeyDictionary()


class RopeHistory:
    """Every cached token's rotation, shared by the layers of a cache.

    Position ids (4 bytes a token for the whole model) are enough where the frequencies are fixed: cos and sin are
    computed again, once per step for all layers, by the model's own module or by compiled code that does the same.
    Kinds whose frequencies move with the length keep the rows each token was rotated with, and so do families that do
    not pass position ids to their layers.

    Args:
        module: what :func:`lowrank_kv.hf.geometry.rotary_module` found.
        apply: the family's ``apply_rotary_pos_emb``.
    """

    def __init__(self, module: Callable, apply: Callable):
        self.module, self.apply = module, apply
        self.keeps_rows = getattr(module, "rope_type", "default") in LENGTH_DEPENDENT_ROPE
        self._kept: list[GrowingTensor] = []  # [positions (B, T)] or [cos (B, T, E), sin (B, T, E)]
        self._newest: Rope | None = None  # of this step's tokens, dropped after the last layer
        self._table: Rope | None = None  # of all tokens, dropped with it
        self._rotary: RotaryTable | None = None  # the same where pairs are turned by one angle each
        self._rotations: dict[tuple[int, torch.device], Rotation] = {}  # the same for attention
        self._turns_pairs: bool | None = None  # whether both dims of a pair turn by one angle, once seen
        # Whether compiled code can do what the module does, once asked for.
        self._turns_by_frequencies: bool | None = None
        self._dtype = torch.float32

    @property
    def length(self) -> int:
        return self._kept[0].length if self._kept else 0

    def tensors(self) -> list[Tensor]:
        """Every tensor held between steps, room to grow included."""
        return [held.buffer for held in self._kept]

    def extend(self, rope: Rope, length: int) -> Rope:
        """Remember the rotation of the newest tokens; a no-op for all but the first layer of a step to report them.

        Returns:
            the same rotation, where layers share it the first one's: what is worked out from it is so once a step.
        """
        if self.length == length:
            return self._newest or rope
        if rope.position_BT is None:
            self.keeps_rows = True
        new = [rope.cos_BTE, rope.sin_BTE] if self.keeps_rows else [rope.position_BT.to(torch.int32)]
        self._dtype = rope.cos_BTE.dtype
        if self._kept:
            for held, tensor in zip(self._kept, new, strict=True):
                _append(held, tensor)
        else:
            # Never a view of the model's own tensors, which would keep more alive than is counted.
            self._kept = [_growing(tensor.clone(memory_format=torch.contiguous_format)) for tensor in new]
        self.release()
        self._newest = rope.copied()
        return self._newest

    def rope(self) -> Rope:
        """The rotation of all cached tokens."""
        if self._table is None:
            if self.keeps_rows:
                cos, sin = (held.rows for held in self._kept)
            else:
                position_BT = self._kept[0].rows
                like = torch.empty(0, dtype=self._dtype, device=position_BT.device)
                cos, sin = self.module(like, position_BT.long())
            self._table = Rope(self.apply, cos, sin)
        return self._table

    def picked(self, sequence: int, places: Places) -> Rope:
        """The rotation of one sequence's tokens at some places, for states (1, G, N, D)."""
        table = self.rope()
        row = sequence if table.cos_BTE.shape[0] > 1 else 0
        if isinstance(places, Tensor):
            places = places.to(table.cos_BTE.device)
        return Rope(self.apply, table.cos_BTE[row, places][None], table.sin_BTE[row, places][None])

    def rotation(self, sequence: int, device: torch.device) -> Rotation:
        """The rotation of one sequence's keys on a device, for the attention operations; made once per step."""
        rotation = self._rotations.get((sequence, device))
        if rotation is None:
            rotation = self._rotations[sequence, device] = self._rotation(sequence, device)
        return rotation

    def _rotation(self, sequence: int, device: torch.device) -> Rotation:
        def rotate(key_GND: Tensor, places: Places) -> Tensor:
            return self.picked(sequence, places).rotate(key_GND[None])[0]

        table = self._pairs()
        return Rotation(rotate, None if table is None else table.of_sequence(sequence, device))

    def table(self) -> RotaryTable:
        """The rotations of all sequences' tokens, for kernels.

        Raises:
            UserError: the family does not rotate pairs (j, j + E/2) by one angle each.
        """
        table = self._pairs()
        if table is None:
            raise _turned_otherwise()
        return table

    def check_turns_halves(self) -> None:
        """Raise :class:`UserError` for a family for which there will be no :meth:`table`."""
        if not _rotates_halves(self.apply):
            raise _turned_otherwise()

    def _pairs(self) -> RotaryTable | None:
        """:meth:`table`, once per step; None for a family that rotates otherwise."""
        if self._rotary is not None or not _rotates_halves(self.apply):
            return self._rotary
        if self._turns_compiled():
            self._rotary = angles(self.module, self._kept[0].rows)
        else:
            table = self.rope()
            half = table.cos_BTE.shape[2] // 2
            halves = [states.float().split(half, dim=2) for states in (table.cos_BTE, table.sin_BTE)]
            if self._turns_pairs is None:
                self._turns_pairs = all(torch.equal(first, second) for first, second in halves)
            if self._turns_pairs:
                self._rotary = RotaryTable(*(first.contiguous() for first, _ in halves))
        return self._rotary

    def _turns_compiled(self) -> bool:
        """Whether compiled code computes the table, for which the module takes some milliseconds at every step."""
        if self.keeps_rows or self._dtype != torch.float32 or not native.computes_angles(self._kept[0].buffer.device):
            return False
        if self._turns_by_frequencies is None:
            self._turns_by_frequencies = turns_by_frequencies(self.module)
        return self._turns_by_frequencies

    def unrotate_rows(self, sequence: int) -> Rotate:
        """A function (key_GND, places) → keys of one sequence as they were before rotation."""
        return lambda key_GND, places: self.picked(sequence, places).unrotate(key_GND[None])[0]

    def release(self) -> None:
        """Drop this step's tables of cos and sin."""
        self._newest = self._table = self._rotary = None
        self._rotations = {}

    def crop(self, length: int) -> None:
        for held in self._kept:
            held.crop(length)
        self.release()

    def select(self, index_B: Tensor) -> None:
        """Keep the sequences at `index_B`, in that order, repeats allowed."""
        if self._kept and self._kept[0].buffer.shape[0] > 1:
            self._kept = [_growing(held.rows[index_B.to(held.buffer.device)]) for held in self._kept]
        self.release()

    def clear(self) -> None:
        self._kept = []
        self.release()

    def __deepcopy__(self, memo: dict) -> "RopeHistory":
        # The model's module is shared; only the tokens' state is copied.
        twin = copy.copy(self)
        twin._kept = [held.clone() for held in self._kept]
        twin.release()
        memo[id(self)] = twin
        return twin


def _turned_otherwise() -> UserError:
    return UserError("a paged cache needs keys whose halves are rotated; use an ordinary compressed cache")


@functools.lru_cache
def _rotates_halves(apply: Callable) -> bool:
    """Whether a family's function is the usual rotation of halves, found by trying it.

    :func:`_rotated_halves` then does the same in two passes over the keys instead of five, which is much of the time of
    decoding on a CPU. Families that rotate otherwise keep their own function.
    """
    # Said outright: defaults of device and dtype are the user's.
    plain = {"generator": torch.Generator().manual_seed(0), "device": "cpu", "dtype": torch.float32}
    key = torch.randn(1, 2, 3, 8, **plain)
    for rotary in (8, 4):
        cos, sin = torch.randn(2, 1, 3, rotary, **plain)
        try:
            theirs = apply(key[:, :0], key, cos, sin)[1]
        except RuntimeError:
            # A family that rotates all of a head cannot be tried on part of one.
            continue
        if theirs.shape != key.shape or not torch.allclose(theirs, _rotated_halves(key, cos, sin), atol=1e-6):
            return False
    return True


def _rotated_halves(key_BGTD: Tensor, cos_BTE: Tensor, sin_BTE: Tensor) -> Tensor:
    """(k₁ cos − k₂ sin, k₂ cos + k₁ sin) on the first E dims of a head, the rest as they are."""
    rotary = cos_BTE.shape[-1]
    half = rotary // 2
    cos, sin = cos_BTE.unsqueeze(1), sin_BTE.unsqueeze(1)
    first, second = key_BGTD[..., :half], key_BGTD[..., half:rotary]
    out = torch.empty_like(key_BGTD)
    torch.mul(first, cos[..., :half], out=out[..., :half]).addcmul_(second, sin[..., :half], value=-1)
    torch.mul(second, cos[..., half:], out=out[..., half:rotary]).addcmul_(first, sin[..., half:])
    out[..., rotary:] = key_BGTD[..., rotary:]
    return out


class _RotatedHalves(torch.autograd.Function):
    """:func:`_rotated_halves` with a backward pass as short: rotation is linear, and its transpose turns back."""

    @staticmethod
    def forward(ctx: FunctionCtx, key_BGTD: Tensor, cos_BTE: Tensor, sin_BTE: Tensor) -> Tensor:
        ctx.save_for_backward(cos_BTE, sin_BTE)
        return _rotated_halves(key_BGTD, cos_BTE, sin_BTE)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_BGTD: Tensor) -> tuple[Tensor, None, None]:
        cos_BTE, sin_BTE = ctx.saved_tensors
        # The entry of cos and sin that a dim was multiplied with goes with it: halves swap their sines.
        return _rotated_halves(grad_BGTD, cos_BTE, -sin_BTE.roll(sin_BTE.shape[-1] // 2, dims=-1)), None, None


def _growing(rows_BTX: Tensor) -> GrowingTensor:
    return GrowingTensor(rows_BTX, dim=1)


def _append(held: GrowingTensor, new_BTX: Tensor) -> None:
    """Of a batch either may have 1 where the other has B."""
    batch = new_BTX.shape[0]
    if held.buffer.shape[0] < batch:
        held.buffer = held.buffer.expand(batch, *held.buffer.shape[1:]).contiguous()
    held.append(new_BTX)
