"""One sequence's keys, or values, of one layer: coefficients in a basis, and tokens at full rank.

Shapes: G KV heads, D head dim, P parts, N tokens, F tokens at full rank, W width of a part, R rank.
"""

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lowrank_kv.hf.cache.windowed.plan import InitialBasis
from lowrank_kv.ops.lowrank_attention import Operands
from lowrank_kv.stores.coefficients import Coefficients
from lowrank_kv.stores.growable_tensor import GrowingTensor
from lowrank_kv.stores.memory_report import BUFFERS, FULL_RANK
from lowrank_kv.stores.tokenwise import coefficients_of
from lowrank_kv.utils.errors import UserError


class TokenStore:
    """Coefficients in a basis that stays as it was made, which all sequences share, and the rows of tokens at full rank.

    Args:
        initial: the basis.
        head_dim: D.
        dtype: the dtype in which states are stored.
        name: such as ``layer 3 keys``, for errors.
        leaves_room: whether room to grow is left behind coefficients, as they are appended one token at a time.
    """

    def __init__(self, initial: InitialBasis, *, head_dim: int, dtype: torch.dtype, name: str, leaves_room: bool):
        parts, width, _ = initial.vectors_PWR.shape
        groups = parts * width // head_dim
        self.initial, self.name = initial, name
        self.coef_scale_PR = initial.coef_scale
        self.coef = coefficients_of(
            (parts, initial.rank), dtype=dtype, device=self.device, quantization=initial.quantization
        )
        self.full = GrowingTensor(torch.empty(groups, 0, head_dim, dtype=dtype, device=self.device), dim=1)
        self._appends_exactly = not leaves_room  # named in saved caches
        self._operands: Operands | None = None

    @property
    def device(self) -> torch.device:
        return self.initial.vectors_PWR.device

    @property
    def basis_PWR(self) -> Tensor:  # noqa: N802 (a tensor's dims are part of its name)
        """Coefficients are rows · basis, fp32."""
        return self.initial.vectors_PWR

    # -- reading --------------------------------------------------------------------------------------------------

    def operands(self) -> Operands:
        """For attention; the same object until an update, or until tokens are compressed or cropped."""
        last, basis_PWR = self._operands, self._decoder_PWR
        if last is None or last.coef is not self.coef or last.full is not self.full or last.basis_PWR is not basis_PWR:
            # A scaled basis, or one in another dtype, is made anew each time: it would be a tensor more to keep and count.
            prepared = {} if self.initial.decoder_PWR is None else self.initial.prepared(self.coef.dtype)
            last = Operands(self.coef, self._scaled(basis_PWR, 1).to(self.coef.dtype), self.full, prepared)
            self._operands = last if last.basis_PWR is basis_PWR else None
        return last

    @property
    def _decoder_PWR(self) -> Tensor:  # noqa: N802
        """States are decoder · coefficients. A basis in fp32, else in the coefficients' dtype."""
        return self.basis_PWR if self.initial.decoder_PWR is None else self.initial.decoder(self.coef.dtype)

    def _scaled(self, states_PXR: Tensor, power: int) -> Tensor:
        """States times the coefficients' scale (power 1), or divided by it (power −1)."""
        return states_PXR if self.coef_scale_PR is None else states_PXR * self.coef_scale_PR[:, None] ** power

    def parts(self, rows_GND: Tensor) -> Tensor:
        """Rows of heads as rows of parts, fp32, (P, N, W).

        Raises:
            UserError: a row is NaN or infinite.
        """
        rows_GND = rows_GND.float()
        if not math.isfinite(float(rows_GND.sum())):  # what is not finite stays so in a sum
            raise UserError(f"{self.name} hold NaN or infinite entries; check the model's weights and dtype")
        joint = self.initial.vectors_PWR.shape[0] == 1
        return rows_GND.transpose(0, 1).flatten(1)[None] if joint else rows_GND

    def projected(self, rows_PNW: Tensor) -> Tensor:
        """Rows (P, N, W) as coefficients in the present basis, (P, N, R)."""
        return rows_PNW @ self.basis_PWR

    def rebuilt(self, coef_PNR: Tensor) -> Tensor:
        """Rows (G, N, D), fp32, from their coefficients."""
        decoder_PWR = self._decoder_PWR.float()
        return self.states_of(coef_PNR[..., : decoder_PWR.shape[2]], decoder_PWR)  # a gate reads more than is kept

    def states_of(self, coef_PNR: Tensor, decoder_PWR: Tensor) -> Tensor:
        """States (G, N, D) from coefficients and a decoder, in their dtype."""
        return Operands(self.coef, decoder_PWR, self.full).rebuilt(coef_PNR)

    def forget_operands(self) -> None:
        """To be called before their tensors are replaced, which they would keep alive."""
        self._operands = None

    # -- writing --------------------------------------------------------------------------------------------------

    def follow(self, rows_PNW: Tensor, *, is_prompt: bool) -> Tensor:
        """See rows (P, N, W) that are about to be compressed; a basis that moves follows them. Returns their coefficients in
        the basis as it is then, (P, N, R)."""
        self.forget_operands()
        if rows_PNW.shape[1]:
            self._move(rows_PNW, is_prompt=is_prompt)
        coef_PNR = self.projected(rows_PNW)
        self.look_at(coef_PNR)
        return coef_PNR

    def _move(self, rows_PNW: Tensor, *, is_prompt: bool) -> None:
        """Let the basis follow rows, of which there is at least one; this one stays."""

    def look_at(self, coef_PNR: Tensor) -> None:
        """See coefficients that are about to be appended; this store learns nothing from them."""

    def read_rows_of(self, other: "TokenStore") -> None:
        """Read the coefficients that another store of the same rows writes (:class:`JointRows`)."""
        self.coef = other.coef

    def append(self, coef_PNR: Tensor) -> None:
        """Append coefficients in the present basis."""
        self._write(self._scaled(coef_PNR, -1))

    def _write(self, coef_PNR: Tensor, **settings: Any) -> None:
        """Append coefficients as they are stored; the settings are those of a store's `append`."""
        self.coef.append(coef_PNR, leaves_room=not self._appends_exactly, writer=self.initial.writer, **settings)

    def crop(self, length: int) -> None:
        """Forget the coefficients from row `length` on."""
        self.coef.crop(length)

    def forget_text(self) -> None:
        """All tokens but the first are gone: forget what was found in them."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_operands": None}  # of a copy, too, which makes its own

    # -- bookkeeping ----------------------------------------------------------------------------------------------

    def tensors_by_kind(self, num_pinned: int) -> Iterator[tuple[str, Tensor]]:
        """(kind, tensor) of everything held; the first `num_pinned` full-rank tokens stay, the others wait."""
        yield from self.coef.tensors_by_kind()
        yield from self.full_rank_by_kind(num_pinned)

    def full_rank_by_kind(self, num_pinned: int) -> Iterator[tuple[str, Tensor]]:
        """The same of tokens at full rank alone."""
        yield FULL_RANK, self.full.buffer[:, :num_pinned]
        yield BUFFERS, self.full.buffer[:, num_pinned:]

    def clone(self) -> "TokenStore":
        """An independent copy."""
        return self._clone_with(self.coef.clone())

    def clone_full_rank(self) -> "TokenStore":
        """The same without coefficients: it reads none before it is told where they are (:meth:`read_rows_of`)."""
        return self._clone_with(self.coef.clone(rows=0))

    def _clone_with(self, coef: Coefficients) -> "TokenStore":
        twin = copy.copy(self)
        twin.full, twin.coef = self.full.clone(), coef
        return twin
