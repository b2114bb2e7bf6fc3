"""One sequence's keys, or values, of one layer, in a basis that follows them.

Shapes: P parts, N tokens, W width of a part, R rank.
"""

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowrank_kv.hf.cache.windowed.layer import fixed_store
from lowrank_kv.hf.cache.windowed.plan import InitialBasis
from lowrank_kv.hf.cache.windowed.store import TokenStore
from lowrank_kv.stores.memory_report import BASES
from ojakv.change_of_basis import change_basis, energy_of, moment
from ojakv.config import OjaKVConfig
from ojakv.step_guard import StepGuard
from ojakv.trackers import FrequentDirections, NewRows, OjaTracker, Tracker
from ojakv.update_trigger import UpdateTrigger

TINY = torch.finfo(torch.float32).tiny


def new_store(
    initial: InitialBasis, config: OjaKVConfig, *, head_dim: int, dtype: torch.dtype, name: str
) -> TokenStore:
    """An empty store for one sequence; see :class:`TokenStore` for the arguments."""
    if initial.is_compressed and config.follows_text:
        settings = {"head_dim": head_dim, "dtype": dtype, "name": name, "leaves_room": config.compresses_singly}
        return OnlineStore(initial, config, **settings)
    return fixed_store(initial, config, head_dim=head_dim, dtype=dtype, name=name)


class OnlineStore(TokenStore):
    """Coefficients in a moving basis, of which each sequence has its own.

    Args:
        config: the cache's settings; the others are as for :class:`TokenStore`.

    Attributes:
        tracker: the basis and its rule.
        guard, trigger: say how far a step may go, and whether a triggered one is worth its price.
        updates: steps made.
        rounding: share of their energy that coefficients lose by being stored: a bound in a floating dtype, the most of any
            rows appended together for integers.
    """

    def __init__(self, initial: InitialBasis, config: OjaKVConfig, *, dtype: torch.dtype, name: str, **settings: Any):
        super().__init__(initial, dtype=dtype, name=name, **settings)
        self.config = config
        self.tracker = _tracker(initial, config, name)
        self.guard = StepGuard(config.max_loss, config.max_drift)
        self.trigger = UpdateTrigger(config.trigger)
        self.updates = 0
        self.rounding = (torch.finfo(dtype).eps / 2) ** 2

    @property
    def basis_PWR(self) -> Tensor:  # noqa: N802 (a tensor's dims are part of its name)
        return self.tracker.vectors_PWR

    def drift(self) -> float:
        """A bound on how far the stored rows have moved, ‖now − when they were stored‖ / ‖now‖ over all of them."""
        distance = self.guard.distance
        energy = energy_of(moment(self.coef, self.coef_scale_PR)) if distance else 0.0
        return distance / math.sqrt(energy) if energy else 0.0

    def _move(self, rows_PNW: Tensor, *, is_prompt: bool) -> None:
        """Let the basis follow rows that are about to be compressed, and carry the stored coefficients over."""
        config = self.config
        pooled_PNW = _pooled(rows_PNW, config.pool)
        self.tracker.observe(pooled_PNW)
        learning_rate = config.learning_rate if is_prompt else config.decode_learning_rate
        if not learning_rate:
            return
        if is_prompt:
            new = NewRows(pooled_PNW, config.prompt_steps)
            for _ in range(config.prompt_steps):
                self._step(new, learning_rate)
        else:
            self._step(NewRows(pooled_PNW), learning_rate, is_triggered=config.update == "triggered")

    def append(self, coef_PNR: Tensor) -> None:
        length = self.coef.length
        super().append(coef_PNR)
        if self.coef_scale_PR is not None and coef_PNR.numel():
            rounded_PNR = self._scaled(self.coef.rows(length).float(), 1)
            lost = float((coef_PNR - rounded_PNR).square().sum() / coef_PNR.square().sum().clamp(min=TINY))
            self.rounding = max(self.rounding, lost)

    def crop(self, length: int) -> None:
        super().crop(length)
        if not length:
            self.guard.forget_rows()

    def _step(self, new: NewRows, learning_rate: float, *, is_triggered: bool = False) -> None:
        """Move the basis as far towards new rows as the guard allows.

        A triggered step waits until the trigger says that it is worth its price. It then sees all rows since the last one.
        """
        old_PWR = self.tracker.vectors_PWR
        known_PRR, stored_PRR = self._moments()
        move = self.guard.largest_move(
            old_PWR, lambda share: self.tracker.propose(new, known_PRR, learning_rate, share), stored_PRR, self.rounding
        )
        is_worth_it = move is not None and (
            not is_triggered or self.trigger.is_worth_a_step(new.rows_PNW, old_PWR, move.basis_PWR)
        )
        if not is_worth_it:
            if is_triggered:
                self.tracker.defer(new)
            return
        coef, tracker = self.coef, copy.copy(self.tracker)
        if move.step_PRR is not None:
            # Into a buffer that has room for the rows about to be compressed: all rows are moved once, not twice.
            room = coef.length + new.rows_PNW.shape[1] * self.config.pool
            coef, rounded = change_basis(coef, move.step_PRR, room, self.coef_scale_PR)
            if coef.quantization is not None:
                move = move._replace(rounded=rounded)
        tracker.move_to(move.basis_PWR)
        self.guard.accept(move)
        # No call is between these: an interrupt finds coefficients in the basis that they are of.
        self.tracker, self.coef = tracker, coef
        self.updates += 1
        self.trigger.reset()

    def _moments(self) -> tuple[Tensor, Tensor | None]:
        """Σ cᵀc of the tokens that new rows are weighed against, and of all rows stored, None where there are none."""
        if not self.coef.length:
            # Before anything is stored, the calibration stands for a number of tokens.
            return (self.initial.energy_PR * self.config.prior_tokens).diag_embed(), None
        window = self.config.update_window
        recent = 0 if window is None else max(0, self.coef.length - window)
        known_PRR = moment(self.coef, self.coef_scale_PR, start=recent)
        return known_PRR, known_PRR + moment(self.coef, self.coef_scale_PR, end=recent)

    def tensors_by_kind(self, num_pinned: int) -> Iterator[tuple[str, Tensor]]:
        yield from super().tensors_by_kind(num_pinned)
        for tensor in self.tracker.tensors():
            yield BASES, tensor

    def clone(self) -> "OnlineStore":
        twin = super().clone()
        twin.tracker = self.tracker.clone()
        twin.guard, twin.trigger = copy.copy(self.guard), copy.copy(self.trigger)
        return twin


def _tracker(initial: InitialBasis, config: OjaKVConfig, name: str) -> Tracker:
    if config.tracker == "oja":
        return OjaTracker(initial.vectors_PWR, name, preconditioned=config.preconditioned)
    return FrequentDirections(initial.vectors_PWR, name, energy_PR=initial.energy_PR, prior_rows=config.prior_tokens)


def _pooled(rows_PNW: Tensor, size: int) -> Tensor:
    """Means over windows of `size` rows; a shorter last window is averaged over what it has."""
    if size == 1:
        return rows_PNW
    return F.avg_pool1d(rows_PNW.mT, size, ceil_mode=True, count_include_pad=False).mT
