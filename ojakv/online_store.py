"""One sequence's keys, or values, of one layer: coefficients in a moving basis, and tokens at full rank.

Shapes: G KV heads, D head dim, P parts, N tokens, F tokens at full rank, W width of a part, R rank.
"""

import copy
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from lowrank_kv.ops.lowrank_attention import Operands
from lowrank_kv.stores.coefficients import Coefficients
from lowrank_kv.stores.growable_tensor import GrowingTensor
from lowrank_kv.stores.memory_report import BASES, BUFFERS, FULL_RANK
from lowrank_kv.utils.errors import UserError
from ojakv.basis_plan import InitialBasis
from ojakv.change_of_basis import change_basis, energy_of, moment
from ojakv.config import OjaKVConfig
from ojakv.step_guard import StepGuard
from ojakv.trackers import FixedTracker, FrequentDirections, NewRows, OjaTracker, Tracker
from ojakv.update_trigger import UpdateTrigger

TINY = torch.finfo(torch.float32).tiny


class OnlineStore:
    """Coefficients, the basis they are in, and the rows of tokens at full rank.

    Args:
        initial: the calibrated basis.
        config: the cache's settings.
        head_dim: D.
        dtype: the dtype in which states are stored.
        name: such as ``layer 3 keys``, for errors.

    Attributes:
        guard, trigger: say how far a step may go, and whether a triggered one is worth its price.
        updates: steps made.
        rounding: share of their energy that coefficients lose by being stored: a bound in a floating dtype, measured for
            integers.
    """

    def __init__(self, initial: InitialBasis, config: OjaKVConfig, *, head_dim: int, dtype: torch.dtype, name: str):
        parts, width, rank = initial.vectors_PWR.shape
        groups = parts * width // head_dim
        device = initial.vectors_PWR.device
        self.config, self.name = config, name
        self.tracker = _tracker(initial, config, name)
        self.initial = initial
        self.coef_scale_PR = initial.coef_scale
        self.coef = Coefficients((parts, rank), dtype=dtype, device=device, quantization=initial.quantization)
        self.full = GrowingTensor(torch.empty(groups, 0, head_dim, dtype=dtype, device=device), dim=1)
        self._operands: Operands | None = None
        self.guard = StepGuard(config.max_loss, config.max_drift)
        self.trigger = UpdateTrigger(config.trigger)
        self.updates = 0
        self.rounding = (torch.finfo(dtype).eps / 2) ** 2

    # -- reading --------------------------------------------------------------------------------------------------

    def operands(self) -> Operands:
        """For attention; the same object until an update, or until tokens are compressed or cropped."""
        last, basis_PWR = self._operands, self._decoder_PWR
        if last is None or last.coef is not self.coef or last.full is not self.full or last.basis_PWR is not basis_PWR:
            # A scaled basis, or one in another dtype, is made anew each time: it would be a tensor more to keep and count.
            last = Operands(self.coef, self._scaled(basis_PWR, 1).to(self.coef.dtype), self.full)
            self._operands = last if last.basis_PWR is basis_PWR else None
        return last

    @property
    def _decoder_PWR(self) -> Tensor:  # noqa: N802 (a tensor's dims are part of its name)
        """States are decoder · coefficients. Of a moving basis in fp32, else in the coefficients' dtype."""
        return self.tracker.vectors_PWR if self.initial.decoder_PWR is None else self.initial.decoder(self.coef.dtype)

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
        return rows_PNW @ self.tracker.vectors_PWR

    def rebuilt(self, coef_PNR: Tensor) -> Tensor:
        """Rows (G, N, D), fp32, from their coefficients."""
        no_rows = GrowingTensor(self.full.buffer[:, :0].float(), dim=1)
        return Operands(Coefficients.from_rows(coef_PNR), self._decoder_PWR.float(), no_rows).rebuild()

    def forget_operands(self) -> None:
        """To be called before their tensors are replaced, which they would keep alive."""
        self._operands = None

    def drift(self) -> float:
        """A bound on how far the stored rows have moved, ‖now − when they were stored‖ / ‖now‖ over all of them."""
        distance = self.guard.distance
        energy = energy_of(moment(self.coef, self.coef_scale_PR)) if distance else 0.0
        return distance / math.sqrt(energy) if energy else 0.0

    # -- writing --------------------------------------------------------------------------------------------------

    def follow(self, rows_PNW: Tensor, *, is_prompt: bool) -> None:
        """Let the basis follow rows that are about to be compressed, and carry the stored coefficients over."""
        self.forget_operands()
        if isinstance(self.tracker, FixedTracker) or not rows_PNW.shape[1]:
            return
        config = self.config
        pooled_PNW = _pooled(rows_PNW, config.pool)
        self.tracker.observe(pooled_PNW)
        rate = config.learning_rate if is_prompt else config.decode_learning_rate
        if not rate:
            return
        if is_prompt:
            new = NewRows(pooled_PNW, config.prompt_steps)
            for _ in range(config.prompt_steps):
                self._step(new, rate)
        else:
            self._step(NewRows(pooled_PNW), rate, is_triggered=config.update == "triggered")

    def append(self, coef_PNR: Tensor) -> None:
        """Append coefficients in the present basis."""
        # Coefficients that are rewritten by every update need no room to grow.
        exact = self.config.update_period > 1
        length = self.coef.length
        self.coef.append(self._scaled(coef_PNR, -1), exact=exact)
        if self.coef_scale_PR is not None and coef_PNR.numel():
            rounded_PNR = self._scaled(self.coef.rows(length).float(), 1)
            self.rounding = float((coef_PNR - rounded_PNR).square().sum() / coef_PNR.square().sum().clamp(min=TINY))

    def crop(self, length: int) -> None:
        """Forget the coefficients from row `length` on."""
        self.coef.crop(length)
        if not length:
            self.guard.forget_rows()

    def _step(self, new: NewRows, rate: float, *, is_triggered: bool = False) -> None:
        """Move the basis as far towards new rows as the guard allows.

        A triggered step waits until the trigger says that it is worth its price. It then sees all rows since the last one.
        """
        old_PWR = self.tracker.vectors_PWR
        known_PRR, stored_PRR = self._moments()
        move = self.guard.largest_move(
            old_PWR, lambda share: self.tracker.propose(new, known_PRR, rate, share), stored_PRR, self.rounding
        )
        is_worth_it = move is not None and (
            not is_triggered or self.trigger.is_worth_a_step(new.rows_PNW, old_PWR, move.basis_PWR)
        )
        if not is_worth_it:
            if is_triggered:
                self.tracker.defer(new)
            return
        self.trigger.reset()
        self.guard.accept(move)
        self.tracker.move_to(move.basis_PWR)
        self.updates += 1
        if self.coef.length:
            # Into a buffer that has room for the rows about to be compressed: all rows are moved once, not twice.
            room = self.coef.length + new.rows_PNW.shape[1] * self.config.pool
            self.coef = change_basis(self.coef, move.change_PRR, room, self.coef_scale_PR)

    def _moments(self) -> tuple[Tensor, Tensor | None]:
        """Σ cᵀc of the tokens that new rows are weighed against, and of all rows stored, None where there are none."""
        if not self.coef.length:
            # Before anything is stored, the calibration stands for a number of tokens.
            return (self.initial.energy_PR * self.config.prior_tokens).diag_embed(), None
        window = self.config.update_window
        recent = 0 if window is None else max(0, self.coef.length - window)
        known_PRR = moment(self.coef, self.coef_scale_PR, start=recent)
        return known_PRR, known_PRR + moment(self.coef, self.coef_scale_PR, end=recent)

    # -- bookkeeping ----------------------------------------------------------------------------------------------

    def tensors_by_kind(self, num_pinned: int) -> Iterator[tuple[str, Tensor]]:
        """(kind, tensor) of everything held; the first `num_pinned` full-rank tokens stay, the others wait."""
        yield from self.coef.tensors_by_kind()
        yield FULL_RANK, self.full.buffer[:, :num_pinned]
        yield BUFFERS, self.full.buffer[:, num_pinned:]
        for tensor in self.tracker.tensors():
            yield BASES, tensor

    def clone(self) -> "OnlineStore":
        """An independent copy."""
        twin = copy.copy(self)
        twin.tracker, twin.coef, twin.full = self.tracker.clone(), self.coef.clone(), self.full.clone()
        twin.guard, twin.trigger = copy.copy(self.guard), copy.copy(self.trigger)
        twin.forget_operands()
        return twin


def _tracker(initial: InitialBasis, config: OjaKVConfig, name: str) -> Tracker:
    if config.tracker == "fixed" or not initial.is_compressed:
        return FixedTracker(initial.vectors_PWR, name)
    if config.tracker == "oja":
        return OjaTracker(initial.vectors_PWR, name, preconditioned=config.preconditioned)
    return FrequentDirections(initial.vectors_PWR, name, energy_PR=initial.energy_PR, prior_rows=config.prior_tokens)


def _pooled(rows_PNW: Tensor, size: int) -> Tensor:
    """Means over windows of `size` rows; a shorter last window is averaged over what it has."""
    if size == 1:
        return rows_PNW
    return F.avg_pool1d(rows_PNW.mT, size, ceil_mode=True, count_include_pad=False).mT
