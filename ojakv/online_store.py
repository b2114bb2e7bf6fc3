"""One sequence's keys, or values, of one layer: coefficients in a moving basis and tokens at full rank.

Shapes: G KV heads, D head dim, P parts, N tokens, F tokens at full rank, W width of a part, R rank.
"""

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
from ojakv.change_of_basis import change_basis, moment
from ojakv.config import OjaKVConfig
from ojakv.trackers import FixedTracker, FrequentDirections, NewRows, OjaTracker, Tracker

# A step that loses too much is halved at most this often, then left out.
MAX_HALVINGS = 6
# A residual below this is rounding.
SMALLEST_RESIDUAL = 1e-6
TINY = torch.finfo(torch.float32).tiny


class OnlineStore:
    """Coefficients, the basis they are in, and the rows that are stored whole.

    Args:
        start: the calibrated basis.
        config: of the cache.
        head_dim: D.
        dtype: of what is stored.
        name: such as ``layer 3 keys``, for errors.
    """

    def __init__(self, start: InitialBasis, config: OjaKVConfig, *, head_dim: int, dtype: torch.dtype, name: str):
        parts, width, rank = start.vectors_PWR.shape
        groups = parts * width // head_dim
        device = start.vectors_PWR.device
        self.config, self.name = config, name
        self.tracker = _tracker(start, config, name)
        self.start = start
        quantization = config.quantization if start.is_compressed else None
        # Unquantized coefficients are divided by nothing.
        self.coef_scale_PR = None if quantization is None else start.coef_scale
        self.coef = Coefficients((parts, rank), dtype=dtype, device=device, quantization=quantization)
        self.full = GrowingTensor(torch.empty(groups, 0, head_dim, dtype=dtype, device=device), dim=1)
        self._operands: Operands | None = None
        self.updates = 0
        self.refused = 0  # steps that would have lost too much
        self.regret = 0.0  # what deferring triggered steps has cost the rows since the last one
        # Share of their energy that holding coefficients costs: at most so much as numbers of a dtype; measured as integers.
        self.rounding = (torch.finfo(dtype).eps / 2) ** 2
        self.kept_energy = 1.0  # product over updates of the share of stored energy that survived
        self._path = 0.0  # sum over updates of how far they moved the stored rows, ‖·‖

    # -- reading --------------------------------------------------------------------------------------------------

    def operands(self) -> Operands:
        """For attention; the same object until an update, or until tokens change sides or are cropped."""
        held, basis_PWR = self._operands, self.tracker.vectors_PWR
        if held is None or held.coef is not self.coef or held.full is not self.full or held.basis_PWR is not basis_PWR:
            # A basis in another dtype, or times a spread, is made anew each time: kept, it would be one more to count.
            held = Operands(self.coef, self._scaled(basis_PWR, 1).to(self.coef.dtype), self.full)
            self._operands = held if held.basis_PWR is basis_PWR else None
        return held

    def _scaled(self, states_PXR: Tensor, power: int) -> Tensor:
        """States times the coefficients' spread (power 1), or divided by it (power −1)."""
        return states_PXR if self.coef_scale_PR is None else states_PXR * self.coef_scale_PR[:, None] ** power

    def parts(self, rows_GND: Tensor) -> Tensor:
        """Rows of heads as rows of parts, fp32, (P, N, W).

        Raises:
            UserError: a row is NaN or infinite.
        """
        rows_GND = rows_GND.float()
        if not math.isfinite(float(rows_GND.sum())):  # what is not finite stays so in a sum
            raise UserError(f"{self.name} hold NaN or infinite entries; check the model's weights and dtype")
        joint = self.start.vectors_PWR.shape[0] == 1
        return rows_GND.transpose(0, 1).flatten(1)[None] if joint else rows_GND

    def projected(self, rows_PNW: Tensor) -> Tensor:
        """Rows (P, N, W) as coefficients in the present basis, (P, N, R)."""
        return rows_PNW @ self.tracker.vectors_PWR

    def rebuilt(self, coef_PNR: Tensor) -> Tensor:
        """Rows (G, N, D), fp32, from their coefficients."""
        whole = self.full.buffer
        nothing = GrowingTensor(whole[:, :0].float(), dim=1)
        return Operands(Coefficients.from_rows(coef_PNR), self.tracker.vectors_PWR, nothing).rebuild()

    def forget_operands(self) -> None:
        """What they are of is about to be replaced, and they would keep it alive."""
        self._operands = None

    def drift(self) -> float:
        """At most so far are the stored rows, ‖now − when they were stored‖ / ‖now‖ over all of them.

        An update takes rows to their projection on the new basis, at right angles to what it drops: they move by the root
        of the energy they lose (and by the rounding of integers). Moves in turning directions may add up to more than what
        is lost of the energy in the end, so that their lengths are added.
        """
        energy = _energy(moment(self.coef, self.coef_scale_PR)) if self._path else 0.0
        return self._path / math.sqrt(energy) if energy else 0.0

    # -- writing --------------------------------------------------------------------------------------------------

    def follow(self, rows_PNW: Tensor, *, is_prompt: bool) -> None:
        """Let the basis follow new rows and carry the stored coefficients over. After it tokens change sides."""
        self.forget_operands()
        if isinstance(self.tracker, FixedTracker) or not rows_PNW.shape[1]:
            return
        config = self.config
        pooled_PNW = _pooled(rows_PNW, config.pool)
        self.tracker.observe(pooled_PNW)
        if is_prompt:
            new = NewRows(pooled_PNW, config.prompt_steps)
            for _ in range(config.prompt_steps):
                self._step(new, config.learning_rate)
        else:
            self._step(NewRows(pooled_PNW), config.decode_learning_rate, is_triggered=config.update == "triggered")

    def store(self, coef_PNR: Tensor) -> None:
        """Append coefficients in the present basis."""
        # Coefficients that are rewritten by every update need no room to grow.
        exact = self.config.update_period > 1
        start = self.coef.length
        self.coef.append(self._scaled(coef_PNR, -1), exact=exact)
        if self.coef_scale_PR is not None and coef_PNR.numel():
            rounded_PNR = self._scaled(self.coef.rows(start).float(), 1)
            self.rounding = float((coef_PNR - rounded_PNR).square().sum() / coef_PNR.square().sum().clamp(min=TINY))

    def crop(self, length: int) -> None:
        """Forget the coefficients from row `length` on."""
        self.coef.crop(length)
        if not length:
            self._path = 0.0

    def _step(self, new: NewRows, rate: float, *, is_triggered: bool = False) -> None:
        """Move the basis, by a share of the step that leaves what is stored at least ``1 − max_loss`` of its energy and
        within ``max_drift`` of where it was.

        A triggered step waits until it is worth its price: until the residuals of the rows since the last one exceed
        what a step would have left of them by `trigger` in sum. It then sees all of those rows.
        """
        config, old_PWR = self.config, self.tracker.vectors_PWR
        # Before anything is stored, the calibration stands for so many tokens.
        known_PRR = stored_PRR = (self.start.energy_PR * config.prior_tokens).diag_embed()
        if self.coef.length:
            # New rows are weighed against the latest stored ones; what a step may lose is told by all.
            remembered = 0 if config.update_window is None else max(0, self.coef.length - config.update_window)
            known_PRR = moment(self.coef, self.coef_scale_PR, start=remembered)
            stored_PRR = known_PRR + moment(self.coef, self.coef_scale_PR, end=remembered)
        energy = _energy(stored_PRR) if self.coef.length else 0.0
        for halving in range(MAX_HALVINGS + 1):
            new_PWR = self.tracker.propose(new, known_PRR, rate, 0.5**halving)
            if new_PWR is None:
                return
            change_PRR = old_PWR.mT @ new_PWR
            # Turned coefficients are rounded anew.
            lost = _lost_energy(stored_PRR, old_PWR, new_PWR, change_PRR) / energy + self.rounding if energy else 0.0
            path = self._path + math.sqrt(lost * energy)
            if lost <= config.max_loss and self._is_within_drift(path, (1 - lost) * energy):
                break
        else:
            self.refused += 1
            if is_triggered:
                self.tracker.defer(new)
            return
        if is_triggered:
            left = _residual(new.rows_PNW, new_PWR)
            self.regret += max(0.0, _residual(new.rows_PNW, old_PWR) / max(left, SMALLEST_RESIDUAL) - 1)
            if self.regret <= config.trigger:
                self.tracker.defer(new)
                return
        self.regret = 0.0
        self.tracker.move_to(new_PWR)
        self.updates += 1
        self.kept_energy *= 1 - lost
        self._path = path
        if self.coef.length:
            # Into a buffer that has room for the rows about to be compressed: all rows are moved once, not twice.
            room = self.coef.length + new.rows_PNW.shape[1] * config.pool
            self.coef = change_basis(self.coef, change_PRR, room, self.coef_scale_PR)

    def _is_within_drift(self, path: float, energy: float) -> bool:
        limit = self.config.max_drift
        return limit is None or path <= limit * math.sqrt(max(0.0, energy))

    # -- bookkeeping ----------------------------------------------------------------------------------------------

    def tensors_by_kind(self, num_pinned: int) -> Iterator[tuple[str, Tensor]]:
        """(kind, tensor) of everything held; the first `num_pinned` full-rank tokens stay, the others wait."""
        yield from self.coef.tensors_by_kind()
        yield FULL_RANK, self.full.buffer[:, :num_pinned]
        yield BUFFERS, self.full.buffer[:, num_pinned:]
        for tensor in self.tracker.tensors():
            yield BASES, tensor

    def clone(self) -> "OnlineStore":
        twin = object.__new__(OnlineStore)
        twin.__dict__.update(self.__dict__)
        twin.tracker, twin.coef, twin.full = self.tracker.clone(), self.coef.clone(), self.full.clone()
        twin._operands = None
        return twin


def _tracker(start: InitialBasis, config: OjaKVConfig, name: str) -> Tracker:
    if config.tracker == "fixed" or not start.is_compressed:
        return FixedTracker(start.vectors_PWR, name)
    if config.tracker == "oja":
        return OjaTracker(start.vectors_PWR, name, preconditioned=config.preconditioned)
    return FrequentDirections(start.vectors_PWR, name, energy_PR=start.energy_PR, prior_rows=config.prior_tokens)


def _residual(rows_PNW: Tensor, basis_PWR: Tensor) -> float:
    """RER of rows in a basis."""
    energy = rows_PNW.square().sum()
    return float(1 - (rows_PNW @ basis_PWR).square().sum() / energy) if energy > 0 else 0.0


def _pooled(rows_PNW: Tensor, size: int) -> Tensor:
    """Means over windows of `size` rows; a shorter last window is averaged over what it has."""
    if size == 1:
        return rows_PNW
    return F.avg_pool1d(rows_PNW.mT, size, ceil_mode=True, count_include_pad=False).mT


def _energy(moment_PRR: Tensor) -> float:
    """Of the rows that it is the sum of."""
    return float(moment_PRR.diagonal(dim1=1, dim2=2).sum())


def _lost_energy(stored_PRR: Tensor, old_PWR: Tensor, new_PWR: Tensor, change_PRR: Tensor) -> float:
    """What rows C·Uᵀ lose of their energy when they are projected on a new basis V: tr(D S Dᵀ) with S = CᵀC and D the part
    of U outside of V. The difference tr(S) − tr(Mᵀ S M) with M = UᵀV is the same, but nothing in fp32 for a small turn."""
    outside_PWR = old_PWR - new_PWR @ change_PRR.mT
    return max(0.0, float((outside_PWR @ stored_PRR * outside_PWR).sum()))
