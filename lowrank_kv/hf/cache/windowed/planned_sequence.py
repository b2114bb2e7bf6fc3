"""What a cache will hold of a sequence, by counts alone: the same decisions as a real sequence's, without any numbers."""

from lowrank_kv.hf.cache.windowed.config import WindowedConfig
from lowrank_kv.hf.cache.windowed.retention import CompressionStep, RetentionSchedule
from lowrank_kv.hf.rope import POSITION_BYTES
from lowrank_kv.stores.growable_tensor import grown


class PlannedSequence:
    """An unpadded sequence of which there are only counts: it follows the retention schedule as a real one does.

    Attributes:
        length: tokens read.
        num_pinned, num_waiting: tokens at full rank, which stay or wait.
        num_low_rank: tokens that are coefficients.
        has_started: whether the bases have followed any token.
        may_defer: whether steps may have been put off, which those of a prompt never are.
        full_rank_capacity, low_rank_capacity: tokens for which there is room, those in use included.
        has_evicted: whether any token has been evicted.
        has_own_directions: whether directions of its own have been found.
    """

    def __init__(self, schedule: RetentionSchedule):
        self.config, self.schedule = schedule.config, schedule
        self.length = self.num_pinned = self.num_waiting = self.num_low_rank = 0
        self.full_rank_capacity = self.low_rank_capacity = 0
        self.has_started = self.may_defer = self.has_evicted = self.has_own_directions = False

    @classmethod
    def after(cls, schedule: RetentionSchedule, *, prompt: int, tokens: int) -> "PlannedSequence":
        """A prompt read in one call, the first of the sequence, then tokens decoded one at a time, `tokens` in all."""
        sequence = cls(schedule)
        first = max(prompt, 1)
        sequence._read_prompt(first)
        for _ in range(tokens - first):
            sequence._decode()
        return sequence

    def _read_prompt(self, tokens: int) -> None:
        self._append(tokens)
        if self.config.keep_prompt_full_rank:
            for step in self.schedule.keep_prompt(num_pinned=0, num_earlier=0, num_prompt=tokens, num_seen=tokens):
                self._compress(step)
        else:
            self._compress_due(0, is_prompt=True)
        if self.config.eviction.is_on:
            num_kept = self.config.eviction.num_kept(self.num_low_rank, beside=tokens - self.num_low_rank)
            self.has_evicted = num_kept < self.num_low_rank
            self.num_low_rank = num_kept
        self.low_rank_capacity = self.num_low_rank

    def _decode(self) -> None:
        self._append(1)
        self._compress_due(0 if self.schedule.compresses_at_once else 1, is_prompt=False)

    def _append(self, count: int) -> None:
        self.length += count
        self.num_waiting += count
        self.full_rank_capacity = grown(self.full_rank_capacity, self.num_pinned + self.num_waiting)

    def _compress_due(self, num_uncommitted: int, *, is_prompt: bool) -> None:
        step = self.schedule.due(
            num_pinned=self.num_pinned,
            num_waiting=self.num_waiting - num_uncommitted,
            num_seen=self.length - num_uncommitted,
            has_started=self.has_started,
            is_prompt=is_prompt,
        )
        if step is not None:
            self._compress(step)

    def _compress(self, step: CompressionStep) -> None:
        if not self.num_low_rank and not self.has_own_directions:
            config = self.config
            self.has_own_directions = config.own_directions > 0 and step.num_due >= config.own_directions_from
        num_full_rank = self.num_pinned + self.num_waiting - step.num_due + step.num_kept
        self.num_pinned = step.num_pinned_after
        self.num_waiting = num_full_rank - self.num_pinned
        self.num_low_rank += step.num_due - step.num_kept
        self.has_started = True
        self.may_defer = self.may_defer or not step.is_prompt
        self.full_rank_capacity = self.schedule.full_rank_capacity(self.num_pinned, held=num_full_rank)
        leaves_room = self.config.compresses_singly
        self.low_rank_capacity = grown(self.low_rank_capacity, self.num_low_rank) if leaves_room else self.num_low_rank

    def position_bytes(self, parts: int) -> int:
        """Bytes of one layer's positions: of full-rank tokens and, once some are evicted, of each part's low-rank ones."""
        low_rank = parts * self.low_rank_capacity if self.has_evicted else 0
        return POSITION_BYTES * (self.full_rank_capacity + low_rank)


def planned_layers(config: WindowedConfig, layers: int, *, prompt: int, tokens: int) -> list[PlannedSequence]:
    """What each of so many layers holds of one sequence, as :meth:`PlannedSequence.after`; layers that compress in the same
    calls share the counts."""
    schedules = [RetentionSchedule.of_layer(config, number, layers) for number in range(layers)]
    found = {rules: PlannedSequence.after(rules, prompt=prompt, tokens=tokens) for rules in dict.fromkeys(schedules)}
    return [found[rules] for rules in schedules]
