"""One sequence of one layer: tokens at full rank, and tokens as coefficients.

A token's way: :meth:`WindowedSequence.append` stores it at full rank, where it waits. A later call finds that it is due
(:class:`~lowrank_kv.hf.cache.windowed.retention.RetentionSchedule`), and bases that move follow it. It then is
pinned, and stays at full rank, or becomes a row of coefficients, which :meth:`WindowedSequence.evict` may forget.

Shapes: H query heads, G KV heads, D head dim, N low-rank tokens, F tokens at full rank, Q new tokens, P parts, W width of a
part, R rank, T all tokens seen.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowrank_kv.eviction import Eviction
from lowrank_kv.hf.cache.per_sequence_layer import mask_of_sequence
from lowrank_kv.hf.cache.prompt_tracker import Prompt
from lowrank_kv.hf.cache.windowed.changes import Changes, make_changes
from lowrank_kv.hf.cache.windowed.positions import TokenPositions
from lowrank_kv.hf.cache.windowed.residuals import largest_residuals
from lowrank_kv.hf.cache.windowed.retention import CompressionStep, RetentionSchedule
from lowrank_kv.hf.cache.windowed.rows import Rows, SeparateRows
from lowrank_kv.hf.cache.windowed.store import TokenStore
from lowrank_kv.ops.native.full_rank_view import append_full_rank
from lowrank_kv.ops.rotation import Rotate, Rotation
from lowrank_kv.stores.growable_tensor import GrowingTensor
from lowrank_kv.stores.memory_report import POSITIONS


class CompressionContext(NamedTuple):
    """What a sequence's tokens are compressed by, beside its bases.

    Attributes:
        prompt: the prompt to compress, of this one sequence; None where there is none.
        scaling: the model's score scale.
        rotation, unrotate: rotate keys at given positions, and back; None where keys are compressed as they are.
    """

    prompt: Prompt | None
    scaling: float
    rotation: Rotation | None
    unrotate: Rotate | None


class WindowedSequence:
    """Keys, values and positions of the tokens of one sequence.

    Full-rank tokens lie in one block for keys and one for values: first those that are pinned, then, in order, those that
    wait. Keys there are rotated. Padding is never stored.

    Attributes:
        num_pinned: how many of the full-rank tokens stay at full rank.
        has_started: whether the bases have followed any token.
        min_crop_length: the sequence cannot be cropped to fewer tokens, because some of these are evicted.
    """

    def __init__(self, rows: Rows, schedule: RetentionSchedule):
        self.config, self.schedule = schedule.config, schedule
        self.rows = rows
        self.positions = TokenPositions(rows.key.device)
        self.num_pinned = 0
        self.has_started = False
        self.min_crop_length = 0
        self._num_new = 0  # tokens that the running call stored

    @property
    def key(self) -> TokenStore:
        """What holds the keys."""
        return self.rows.key

    @property
    def value(self) -> TokenStore:
        """What holds the values."""
        return self.rows.value

    @property
    def length(self) -> int:
        """Tokens seen, padding and evicted ones included."""
        return self.positions.length

    def is_whole(self) -> bool:
        """Whether positions and rows are of as many tokens, as in a file that nobody changed."""
        stores, held = (self.key, self.value), self.positions.full_rank.length
        rows = [store.coef.length for store in stores] if isinstance(self.rows, SeparateRows) else []
        return (
            all(store.full.length == held for store in stores)
            and all(count == self.positions.num_low_rank for count in rows)
            and 0 <= self.num_pinned <= held
        )

    # -- writing --------------------------------------------------------------------------------------------------

    def append(self, key_GQD: Tensor, value_GQD: Tensor, present_Q: Tensor | None) -> None:
        """New tokens, at full rank; `present_Q` is False for padding, None where there is none."""
        count = key_GQD.shape[1]
        # A prompt is compressed at once, so it needs no room behind it; a few tokens leave room for those that follow.
        leaves_room = count <= self.config.update_period
        if present_Q is None and leaves_room:
            rows = self.key.full, self.value.full, self.positions.full_rank
            if append_full_rank(*rows, key_GQD, value_GQD, self.positions.length):
                self.positions.length += count
                self._num_new = count
                return
        if key_GQD.requires_grad or value_GQD.requires_grad:
            key_GQD, value_GQD = key_GQD.detach(), value_GQD.detach()
        # Every token that is decoded without compiled code takes this way, which saves it a dozen small operations.
        if count == 1 and present_Q is None:
            self.key.full.append(key_GQD)
            self.value.full.append(value_GQD)
            self.positions.append_one()
            self._num_new = 1
            return
        if present_Q is not None:
            key_GQD, value_GQD = key_GQD[:, present_Q], value_GQD[:, present_Q]
        self.key.full.append(key_GQD, leaves_room=leaves_room)
        self.value.full.append(value_GQD, leaves_room=leaves_room)
        self.positions.append(count, present_Q, leaves_room=leaves_room)
        self._num_new = key_GQD.shape[1]

    def steps_due(self, prompt: Prompt | None, *, is_uncommitted: bool) -> Sequence[CompressionStep]:
        """The steps that :meth:`compress` is to take now, one after another: none, most of the time.

        Args:
            prompt: the prompt to compress, of this one sequence; None where there is none.
            is_uncommitted: whether the call's tokens may be taken back, so that they wait and nothing depends on them.
        """
        num_uncommitted = self._num_new if is_uncommitted else 0
        num_seen = self.positions.num_present - num_uncommitted
        if prompt is not None and self.config.keep_prompt_full_rank:
            num_earlier = self._num_waiting_before(prompt.start)
            return self.schedule.keep_prompt(
                num_pinned=self.num_pinned,
                num_earlier=num_earlier,
                num_prompt=self._num_waiting_before(prompt.end) - num_earlier,
                num_seen=num_seen,
            )
        step = self.schedule.due(
            num_pinned=self.num_pinned,
            num_waiting=self.key.full.length - self.num_pinned - num_uncommitted,
            num_seen=num_seen,
            has_started=self.has_started,
            is_prompt=prompt is not None,
            goes_on=prompt is not None and prompt.query_end < prompt.end,
        )
        return () if step is None else (step,)

    def _num_waiting_before(self, position: int) -> int:
        return int((self.positions.full_rank.rows[self.num_pinned :] < position).sum())

    def compress(self, step: CompressionStep, context: CompressionContext) -> None:
        """Let the bases follow the tokens that are due. Those that the step keeps stay, the others become coefficients.

        Where this is cut short, all of them wait as before. A basis that has followed them by then stays, in which the
        stored coefficients are.
        """
        num_low_rank = self.positions.num_low_rank
        try:
            changes = self.changes_by(step, self._store_due(step, context))
        except BaseException:  # an interrupt, too
            self.rows.crop(num_low_rank)
            raise
        make_changes(changes)

    def _store_due(self, step: CompressionStep, context: CompressionContext) -> Tensor:
        """Append the coefficients of the tokens that are due, but for those that the step keeps. Returns which these are,
        (N,) bool."""
        prompt, scaling, rotation, unrotate = context
        due = step.due
        position_N = self.positions.full_rank.rows[due].long()
        with torch.autocast(position_N.device.type, enabled=False):  # bases are fp32, whatever the model computes in
            key_PNR, value_PNR = self.rows.follow(*self.states_due(step, unrotate), is_prompt=step.is_prompt)
            if step.keeps_all:
                is_kept_N = torch.ones_like(position_N, dtype=torch.bool)
            elif step.num_kept:
                rebuilt_GND = self.key.rebuilt(key_PNR)
                if rotation is not None:
                    rebuilt_GND = rotation.rotate(rebuilt_GND, position_N)
                residual_GND = self.key.full.rows[:, due].float() - rebuilt_GND
                is_kept_N = largest_residuals(residual_GND, position_N, prompt, step.num_kept, scaling, self.config)
            else:
                is_kept_N = torch.zeros_like(position_N, dtype=torch.bool)
            if step.num_kept:
                key_PNR, value_PNR = key_PNR[:, ~is_kept_N], value_PNR[:, ~is_kept_N]
            self.key.append(key_PNR)
            self.value.append(value_PNR)
        return is_kept_N

    def states_due(self, step: CompressionStep, unrotate: Rotate | None) -> tuple[Tensor, Tensor]:
        """Keys as they are compressed, and values, of the tokens that are due, as rows of parts, (P, N, W) fp32."""
        key_GND, value_GND = self.key.full.rows[:, step.due], self.value.full.rows[:, step.due]
        if unrotate is not None:
            key_GND = unrotate(key_GND, self.positions.full_rank.rows[step.due].long())
        return self.key.parts(key_GND), self.value.parts(value_GND)

    def changes_by(self, step: CompressionStep, is_kept_N: Tensor | bool) -> Changes:
        """What changes here once the tokens that are due have rows.

        Args:
            is_kept_N: of the tokens that are due, those that stay at full rank, (N,) bool; or whether all do.
        """
        full_rank_F, num_pinned = self.positions.full_rank.rows, step.num_pinned_after
        stays_F = torch.ones(len(full_rank_F), dtype=torch.bool, device=full_rank_F.device)
        stays_F[step.due] = is_kept_N
        key_full, value_full, position_full = self._full_rank_rows(stays_F, num_pinned)
        positions = self.positions.with_low_rank(full_rank_F[~stays_F].long(), position_full)
        return [
            (self.key, {"full": key_full}),
            (self.value, {"full": value_full}),
            (self, {"positions": positions, "num_pinned": num_pinned, "has_started": True}),
        ]

    def _full_rank_rows(self, is_kept_F: Tensor, num_pinned: int) -> list[GrowingTensor]:
        """Keys, values and positions of these full-rank tokens, with room for those that will wait until the next step."""
        rows = [store.full.rows[:, is_kept_F] for store in (self.key, self.value)]
        kept = [*(GrowingTensor(each, dim=1) for each in rows), GrowingTensor(self.positions.full_rank.rows[is_kept_F])]
        for each in kept:
            each.reserve(self.schedule.full_rank_capacity(num_pinned, held=each.length))
        for store in (self.key, self.value):
            store.forget_operands()
        return kept

    def evict(self, score_PT: Tensor, prompt: slice, eviction: Eviction) -> None:
        """See :meth:`SequenceState.evict`. The prompt's full-rank tokens are all kept."""
        position_PN, full_rank_F = torch.atleast_2d(self.positions.low_rank()), self.positions.full_rank.rows
        num_full_rank = int(((full_rank_F >= prompt.start) & (full_rank_F < prompt.stop)).sum())
        kept = eviction.rows_kept(score_PT, position_PN, prompt, beside=num_full_rank)
        if kept is None:
            return
        row_PN, min_crop_length = kept
        key, value = self.rows.only(row_PN)
        positions = self.positions.with_only(position_PN.expand(len(row_PN), -1).gather(1, row_PN))
        make_changes(
            [
                (self.key, {"coef": key}),
                (self.value, {"coef": value}),
                (self, {"positions": positions, "min_crop_length": min_crop_length}),
            ]
        )

    # -- reading --------------------------------------------------------------------------------------------------

    def rebuilt(self, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
        """Rotated keys and values of all tokens held, low-rank ones first, (G, N + F, D) each."""
        value_GND = self.value.operands().rebuild()
        return self._rebuilt_keys(rotation), torch.cat([value_GND, self.value.full.rows], 1)

    def _rebuilt_keys(self, rotation: Rotation | None) -> Tensor:
        key_GND = self.key.operands().rebuild()
        if rotation is not None:
            low_rank = self.positions.low_rank_positions()
            if isinstance(low_rank, Tensor) and low_rank.dim() == 2:
                heads = [rotation.rotate(key_GND[g : g + 1], low_rank[g]) for g in range(len(key_GND))]
                key_GND = torch.cat(heads)
            else:
                key_GND = rotation.rotate(key_GND, low_rank)
        return torch.cat([key_GND, self.key.full.rows], 1)

    def keys_at(self, positions: slice, rotation: Rotation | None) -> Tensor:
        """Rotated keys of the tokens at `positions`, (G, T, D), none of them evicted; zero where there was padding."""
        key_GND = self._rebuilt_keys(rotation)
        position_N = torch.atleast_2d(self.positions.stored())[0]  # parts differ only in older tokens
        is_inside_N = (position_N >= positions.start) & (position_N < positions.stop)
        key_GTD = key_GND.new_zeros(key_GND.shape[0], positions.stop - positions.start, key_GND.shape[2])
        key_GTD[:, position_N[is_inside_N] - positions.start] = key_GND[:, is_inside_N]
        return key_GTD

    def in_order(self, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values as in :meth:`rebuilt`, in the text's order, for attention that takes causality from it, and their
        positions, (N + F,) or (P, N + F)."""
        position, order = self.positions.stored().sort(dim=-1)
        index_PND = torch.atleast_2d(order)[:, :, None]
        key_GND, value_GND = self.rebuilt(rotation)
        return key_GND.take_along_dim(index_PND, dim=1), value_GND.take_along_dim(index_PND, dim=1), position

    def dense(self, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
        """Keys and values at their positions, (G, T, D) each; zero where there was padding. Not for evicted tokens."""
        position_N = self.positions.stored()

        def at_positions(rows_GND: Tensor) -> Tensor:
            states_GTD = rows_GND.new_zeros(rows_GND.shape[0], self.length, rows_GND.shape[2])
            states_GTD[:, position_N] = rows_GND
            return states_GTD

        key_GND, value_GND = self.rebuilt(rotation)
        return at_positions(key_GND), at_positions(value_GND)

    # -- bookkeeping ----------------------------------------------------------------------------------------------

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens. Uncommitted tokens leave no trace; a basis that has followed others stays.

        Positions say which tokens there are. An :meth:`append` that was cut short may have left rows without one, which go.
        """
        self.positions.forget_uncounted()
        for store in (self.key, self.value):
            store.full.crop(self.positions.full_rank.length)
        low_rank_N = torch.atleast_2d(self.positions.low_rank())[0]
        num_low_rank = int((low_rank_N < length).sum())
        is_kept_F = self.positions.full_rank.rows < length
        num_pinned = int(is_kept_F[: self.num_pinned].sum())
        full = self.key.full, self.value.full, self.positions.full_rank
        if not bool(is_kept_F.all()):
            full = self._full_rank_rows(is_kept_F, num_pinned)
        key_full, value_full, position_full = full
        positions = self.positions.cropped(length, num_low_rank, position_full)
        # Where sink tokens are gone, the tokens that come next take their place.
        has_started = self.has_started and positions.num_present >= max(1, self.config.num_sink_tokens)
        # First: where this is all that is done, the tokens are still counted, and go when it is cropped again.
        self.rows.crop(num_low_rank)
        make_changes(
            [
                (self.key, {"full": key_full}),
                (self.value, {"full": value_full}),
                (self, {"positions": positions, "num_pinned": num_pinned, "has_started": has_started}),
            ]
        )
        if not num_low_rank and num_pinned <= self.config.num_sink_tokens:
            self.rows.forget_text()

    def clone(self) -> "WindowedSequence":
        """An independent copy."""
        twin = copy.copy(self)
        twin.rows, twin.positions = self.rows.clone(), self.positions.clone()
        return twin

    def tensors_by_kind(self) -> Iterator[tuple[str, Tensor]]:
        """(kind, tensor) of everything held."""
        yield from self.rows.tensors_by_kind(self.num_pinned)
        for tensor in self.positions.tensors():
            yield POSITIONS, tensor


def columns_of(mask_QT: Tensor, position: Tensor, heads: int) -> Tensor:
    """A mask's columns of tokens at given positions, (N,) or (P, N) → (Q, N), or (H, Q, N) where parts differ."""
    if position.dim() == 1:
        return mask_QT[:, position]
    return mask_QT[:, position].transpose(0, 1).repeat_interleave(heads // len(position), dim=0)


def mask_at(mask: Tensor | None, b: int, position: Tensor, heads: int) -> Tensor | None:
    """The same of one sequence of a mask (B or 1, 1, Q, T), as a model's own attention takes it, (1, 1 or H, Q, N)."""
    if mask is None:
        return None
    columns = columns_of(mask_of_sequence(mask, b), position, heads)
    return columns[(None,) * (4 - columns.dim())]
