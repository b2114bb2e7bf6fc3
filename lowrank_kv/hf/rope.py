"""Rotary embeddings of cached tokens: rotate and un-rotate keys, and remember each token's rotation.

Shapes: B batch (or 1 when all sequences agree), G heads, T tokens, N tokens at chosen positions, D head dim, E rotary dims
(≤ D).
"""

import copy
import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from lowrank_kv.hf.geometry import attention_modules, geometry_of
from lowrank_kv.hf.rotary import Rotary, rotary_function, rotate_halves, rotates_halves
from lowrank_kv.ops import native
from lowrank_kv.ops.rotation import Positions, RotaryTable, Rotate, Rotation
from lowrank_kv.stores.growable_tensor import GrowingTensor
from lowrank_kv.utils.errors import UserError

POSITION_BYTES = 4  # of a position id, int32
_ROUNDING = 0.02  # of cos and sin: bf16's is 0.004, and compiled code rounds angles at far positions otherwise
# Tokens at scattered positions whose rotation is computed by itself: that of all tokens takes milliseconds.
_FEW = 256


@dataclasses.dataclass(frozen=True)
class Rope:
    """The rotation of some tokens' keys, as a forward pass of the model computed it.

    Attributes:
        function: the family's ``apply_rotary_pos_emb(q, k, cos, sin)``.
        cos_BTE, sin_BTE: as the model computed them, scaling included.
        position_BT: position ids, int64; None when the model did not pass them to its layers.
    """

    function: Callable
    cos_BTE: Tensor
    sin_BTE: Tensor
    position_BT: Tensor | None = None

    def rotate(self, key_BGTD: Tensor) -> Tensor:
        """Rotated keys, same shape and dtype."""
        return self._apply(key_BGTD, self.cos_BTE, self.sin_BTE)

    def unrotate(self, key_BGTD: Tensor) -> Tensor:
        """The exact inverse of :meth:`rotate`, computed in fp32; same shape and dtype.

        With s = cos² + sin² the inverse rotation is (cos/s, −sin/s); s differs from 1 for rotary kinds that scale the
        embedding (yarn, longrope), where merely negating the sine would be far off.
        """
        inverse = _INVERSES.get(self.cos_BTE)
        if inverse is None:
            cos, sin = self.cos_BTE.float(), self.sin_BTE.float()
            norm = cos.square() + sin.square()
            inverse = _INVERSES[self.cos_BTE] = (cos / norm, -sin / norm)
        return self._apply(key_BGTD.float(), *inverse).to(key_BGTD.dtype)

    def clone(self) -> "Rope":
        """A copy in memory of its own; a compiled graph may reuse the memory of its tensors as soon as the call is done."""
        position_BT = None if self.position_BT is None else self.position_BT.clone()
        return Rope(self.function, self.cos_BTE.clone(), self.sin_BTE.clone(), position_BT)

    @functools.cached_property
    def packed(self) -> native.PackedRotary | None:
        """This rotation for compiled code; None for a family that does not rotate halves of a head."""
        return native.PackedRotary(self.cos_BTE, self.sin_BTE) if rotates_halves(self.function) else None

    def _apply(self, key_BGTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos.to(key_BGTD.device), sin.to(key_BGTD.device)
        if cos.dtype == key_BGTD.dtype and rotates_halves(self.function):
            return rotate_halves(key_BGTD, cos, sin)
        # The function rotates queries and keys together; no heads of queries means no work for them.
        return self.function(key_BGTD[:, :0], key_BGTD, cos, sin)[1]


def rotated(key_BGTD: Tensor, rope: Rope | None) -> Tensor:
    """Keys as the model attends to them; the same where its family does not rotate them."""
    return key_BGTD if rope is None else rope.rotate(key_BGTD)


def unrotated(key_BGTD: Tensor, rope: Rope | None) -> Tensor:
    """Rotated keys before their rotation; the same where there is none."""
    return key_BGTD if rope is None else rope.unrotate(key_BGTD)


# cos of a forward pass → (cos/s, −sin/s). All layers of the pass share them, and they are freed with that cos.
_INVERSES = WeakIdKeyDictionary()


class RopeHistory:
    """Every cached token's rotation, shared by the layers of a cache.

    Where frequencies are fixed, position ids are kept (4 bytes a token for the whole model); cos and sin are computed again
    from them once per step for all layers, by the model's own module or by compiled code that does the same. The rows of cos
    and sin that each token was rotated with are kept where position ids do not tell them: where frequencies change with the
    length, where a family passes no position ids to its layers, or others than it rotates by, as models that read images do,
    whose tokens have places in time, height and width.
    """

    saved = "_kept", "keeps_rows", "_dtype"  # attributes that hold the tokens' rotations, for a file

    def __init__(self, rotary: Rotary):
        self.rotary = rotary
        self.keeps_rows = rotary.is_length_dependent
        self._kept: list[GrowingTensor] = []  # [positions (B, T)] or [cos (B, T, E), sin (B, T, E)]
        self._dtype = torch.float32  # of cos and sin
        # Computed once per step, and dropped after its last layer:
        self._newest: Rope | None = None  # the rotation of this step's tokens
        self._all: Rope | None = None  # the rotation of all tokens
        self._table: RotaryTable | None = None  # the same, for a family that rotates pairs by one angle each
        self._rotations: dict[tuple[int, torch.device], Rotation] = {}  # the same, of one sequence on one device

    @staticmethod
    def token_nbytes(model: PreTrainedModel, itemsize: int | None = None) -> int:
        """Bytes that are kept of a token's rotation, for a family that passes position ids to its layers.

        Args:
            itemsize: bytes of a number that the model computes with; by default as it is.
        """
        modules = attention_modules(model)
        rotates = any(rotary_function(modules[index]) is not None for index in geometry_of(model).layers)
        rotary = Rotary.from_model(model) if rotates else None
        if rotary is None or not rotary.is_length_dependent:
            return POSITION_BYTES
        return 2 * rotary.num_dims * (model.dtype.itemsize if itemsize is None else itemsize)

    @property
    def length(self) -> int:
        return self._kept[0].length if self._kept else 0

    def tensors(self) -> list[Tensor]:
        """Every tensor held between steps, room to grow included."""
        return [held.buffer for held in self._kept]

    def extend(self, rope: Rope, length: int) -> Rope:
        """Remember the rotation of the newest tokens, up to `length`; only the first layer of a step to report them does so.

        Returns:
            the same rotation; layers that share it get the first one's, so that its derived tensors are computed once.

        Raises:
            UserError: the layers hold different numbers of tokens.
        """
        if self.length == length:
            return self._newest or rope
        check_same_length(self.length + rope.cos_BTE.shape[1], length)
        if not self.keeps_rows and not self._is_told_by_positions(rope):
            self._keep_rows()
        new = [rope.cos_BTE, rope.sin_BTE] if self.keeps_rows else [rope.position_BT.to(torch.int32)]
        self._dtype = rope.cos_BTE.dtype
        if self._kept:
            for held, tensor in zip(self._kept, new, strict=True):
                _append(held, tensor)
        else:
            # Never a view of the model's own tensors, which would keep more alive than is counted.
            self._kept = [_growing(tensor.clone(memory_format=torch.contiguous_format)) for tensor in new]
        self.release()
        self._newest = rope.clone()
        return self._newest

    def _is_told_by_positions(self, rope: Rope) -> bool:
        """Whether a call's rotation is that of its position ids. A token by itself is not looked at: it is rotated as those
        before it were, and decoding would pay for the look."""
        if rope.position_BT is None:
            return False
        if rope.cos_BTE.shape[1] == 1:
            return True
        found = self.rotary.cos_sin(rope.position_BT, rope.cos_BTE.dtype)
        return all(map(_is_about, found, (rope.cos_BTE, rope.sin_BTE)))

    def _keep_rows(self) -> None:
        """From now on keep rows of cos and sin, those of the tokens so far, too."""
        if self._kept:
            self._kept = [_growing(rows) for rows in self.rotary.cos_sin(self._kept[0].rows, self._dtype)]
        self.keeps_rows = True

    def rope(self) -> Rope:
        """The rotation of all cached tokens."""
        if self._all is None:
            if self.keeps_rows:
                cos, sin = (held.rows for held in self._kept)
            else:
                cos, sin = self.rotary.cos_sin(self._kept[0].rows, self._dtype)
            self._all = Rope(self.rotary.function, cos, sin)
        return self._all

    def rope_at(self, sequence: int, positions: Positions) -> Rope:
        """The rotation of one sequence's tokens at some positions, for states (1, G, N, D)."""
        if isinstance(positions, Tensor):
            positions = positions.to(self._kept[0].buffer.device)
            if self._all is None and not self.keeps_rows and len(positions) <= _FEW:
                row = sequence if self._kept[0].buffer.shape[0] > 1 else 0
                position_1N = self._kept[0].rows[row, positions][None]
                return Rope(self.rotary.function, *self.rotary.cos_sin(position_1N, self._dtype))
        rope = self.rope()
        row = sequence if rope.cos_BTE.shape[0] > 1 else 0
        return Rope(rope.function, rope.cos_BTE[row, positions][None], rope.sin_BTE[row, positions][None])

    def rotation(self, sequence: int, device: torch.device) -> Rotation:
        """The rotation of one sequence's keys on a device, for the attention operations; made once per step."""
        rotation = self._rotations.get((sequence, device))
        if rotation is None:
            table = self._table_of_pairs()
            rotation = self._rotations[sequence, device] = Rotation(
                lambda key_GND, positions: self.rope_at(sequence, positions).rotate(key_GND[None])[0],
                None if table is None else table.for_sequence(sequence, device),
            )
        return rotation

    def unrotation_of(self, sequence: int) -> Rotate:
        """A function (key_GND, positions) → keys of one sequence as they were before rotation."""
        return lambda key_GND, positions: self.rope_at(sequence, positions).unrotate(key_GND[None])[0]

    def table(self) -> RotaryTable:
        """The rotations of all sequences' tokens, for kernels.

        Raises:
            UserError: the family does not rotate pairs (j, j + E/2) by one angle each.
        """
        table = self._table_of_pairs()
        if table is None:
            raise _does_not_rotate_halves()
        return table

    def check_rotates_halves(self) -> None:
        """Raise :class:`UserError` for a family for which there will be no :meth:`table`."""
        if not self.rotary.rotates_halves:
            raise _does_not_rotate_halves()

    def _table_of_pairs(self) -> RotaryTable | None:
        """:meth:`table`, once per step; None for a family that rotates otherwise."""
        if self._table is None and self.rotary.rotates_halves:
            if not self.keeps_rows:
                self._table = self.rotary.compiled_table(self._kept[0].rows, self._dtype)
            if self._table is None:
                rope = self.rope()
                self._table = self.rotary.table_of_rows(rope.cos_BTE, rope.sin_BTE)
        return self._table

    def release(self) -> None:
        """Drop this step's cos and sin."""
        self._newest = self._all = self._table = None
        self._rotations = {}

    def crop(self, length: int) -> None:
        """Keep the rotations of the first `length` tokens; of none, another number of sequences may come next."""
        if not length:
            self.clear()
            return
        for held in self._kept:
            held.crop(length)
        self.release()

    def select(self, index_B: Tensor) -> None:
        """Keep the sequences at `index_B`, in that order, repeats allowed."""
        if self._kept and self._kept[0].buffer.shape[0] > 1:
            self._kept = [_growing(held.rows[index_B.to(held.buffer.device)]) for held in self._kept]
        self.release()

    def clear(self) -> None:
        """Forget all tokens."""
        self._kept, self.keeps_rows = [], self.rotary.is_length_dependent
        self.release()

    def __deepcopy__(self, memo: dict) -> "RopeHistory":
        # The model's module is shared; only the tokens' state is copied.
        twin = copy.copy(self)
        twin._kept = [held.clone() for held in self._kept]
        twin.release()
        memo[id(self)] = twin
        return twin


def check_same_length(expected: int, length: int) -> None:
    """Raise :class:`UserError` where a layer is to hold another number of tokens than the cache does."""
    if length != expected:
        raise UserError(
            f"the cache's layers hold different numbers of tokens, as after a call that was cut short: `cache.crop(0)` "
            f"makes them equal (a layer was to hold {length}, and the cache {expected})"
        )


def _does_not_rotate_halves() -> UserError:
    return UserError("a paged cache needs keys whose halves are rotated; use an ordinary compressed cache")


def _is_about(found_BTE: Tensor, given_BTE: Tensor) -> bool:
    """Whether two tables of cos, or of sin, are the same but for rounding. Other positions turn the leading dims by a radian
    or more."""
    return found_BTE.shape[1:] == given_BTE.shape[1:] and torch.allclose(found_BTE, given_BTE, rtol=0, atol=_ROUNDING)


def _growing(rows_BTX: Tensor) -> GrowingTensor:
    return GrowingTensor(rows_BTX, dim=1)


def _append(held: GrowingTensor, new_BTX: Tensor) -> None:
    """Append rows; where sequences agreed so far (a batch of 1) and new rows are of B, the old rows are expanded first."""
    batch = new_BTX.shape[0]
    if held.buffer.shape[0] < batch:
        held.buffer = held.buffer.expand(batch, *held.buffer.shape[1:]).contiguous()
    held.append(new_BTX)
