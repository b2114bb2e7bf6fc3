"""How many tokens stay at full rank, and when the others are compressed (OjaKV, Algorithm 1): counts in, counts out.

The full-rank tokens of a sequence lie in one row: first those that are *pinned*, which stay, then, oldest first, those that
*wait* to be compressed. A sequence and the byte budget follow the same schedule, one with tokens, the other with counts.
"""

import dataclasses
from typing import NamedTuple

from lowrank_kv.hf.cache.windowed.config import WindowedConfig

# Rows at full rank that are allocated at once, ahead of their tokens; where more are to wait, their store grows with them.
_MOST_AHEAD = 512


class CompressionStep(NamedTuple):
    """Compress the tokens that have waited longest.

    Attributes:
        num_pinned: full-rank tokens in front of them.
        num_due: the tokens that the bases follow.
        num_kept: how many of these stay at full rank, pinned from now on; the others become coefficients.
        is_prompt: whether the bases follow them at a prompt's rate.
    """

    num_pinned: int
    num_due: int
    num_kept: int
    is_prompt: bool

    @property
    def due(self) -> slice:
        """Where the tokens that are due are, among those at full rank."""
        return slice(self.num_pinned, self.num_pinned + self.num_due)

    @property
    def num_pinned_after(self) -> int:
        """Pinned tokens once the step is made."""
        return self.num_pinned + self.num_kept

    @property
    def keeps_all(self) -> bool:
        """Whether none of them becomes coefficients."""
        return self.num_kept == self.num_due


@dataclasses.dataclass(frozen=True)
class RetentionSchedule:
    """The rules of one configuration, for one layer. It has no state.

    Args:
        config: the settings.
        phase: decoded tokens leave whenever the number of tokens read, less `phase`, is a multiple of the period; None lets
            them leave a full period after those before them.
    """

    config: WindowedConfig
    phase: int | None = None

    @classmethod
    def of_layer(cls, config: WindowedConfig, number: int, layers: int) -> "RetentionSchedule":
        """Of one of so many layers: behind a prompt they take turns, so that no token pays for the work of all.
        Layers that are coded together do so together."""
        number -= number % max(1, config.joint_layers)
        return cls(config, number * config.update_period // layers if config.staggered else None)

    @property
    def compresses_at_once(self) -> bool:
        """Whether each token is compressed in the call that brings it, because no other token matters to it: that first
        tokens stay at full rank depends on their place alone. Directions of a text's own come of many tokens, some of which
        a call may take back."""
        config = self.config
        waits = config.update_period > 1 or config.recent_window or config.min_length
        keeps = config.full_rank_ratio or config.keep_prompt_full_rank
        return not config.follows_text and not config.own_directions and not waits and not keeps

    def full_rank_capacity(self, num_pinned: int, *, held: int) -> int:
        """Tokens at full rank for which a step that leaves `held` of them makes room: as many as there will be while tokens
        are decoded one at a time, the newest of which may be uncommitted, unless these are far more."""
        most = num_pinned + self.config.recent_window + self.config.update_period + (not self.compresses_at_once)
        return max(held, min(most, held + _MOST_AHEAD))

    def due(
        self,
        *,
        num_pinned: int,
        num_waiting: int,
        num_seen: int,
        has_started: bool,
        is_prompt: bool,
        goes_on: bool = False,
    ) -> CompressionStep | None:
        """The step that a call makes; None where no token is due. For a prompt that stays at full rank: :meth:`keep_prompt`.

        Args:
            num_pinned: full-rank tokens that stay.
            num_waiting: full-rank tokens that wait, without uncommitted ones.
            num_seen: all tokens of the sequence, without padding and uncommitted ones.
            has_started: whether there has been a step before.
            is_prompt: whether the call ends a prompt, or a chunk of one.
            goes_on: whether more of the prompt is known to come.
        """
        config = self.config
        if num_seen < config.min_length:
            return None
        if has_started:
            num_due = max(0, num_waiting - config.recent_window)
            ahead = num_due if self.phase is None else num_seen - self.phase  # of the last token that may leave
            num_due = max(0, num_due - ahead % config.update_period)
        else:
            num_due = max(0, num_pinned + num_waiting - config.num_sink_tokens - config.recent_window)
            num_pinned = config.num_sink_tokens
            # A prompt is compressed at once. If it was too short for that, its tokens wait until a period is full.
            if not is_prompt and num_due < config.update_period:
                return None
            # Own directions are found in the first tokens that are compressed together: small chunks wait to be enough.
            if goes_on and config.own_directions and num_due < config.own_directions_from:
                return None
        if not num_due:
            return None
        return CompressionStep(
            num_pinned, num_due, round(config.full_rank_ratio * num_due) if is_prompt else 0, is_prompt
        )

    def keep_prompt(
        self, *, num_pinned: int, num_earlier: int, num_prompt: int, num_seen: int
    ) -> list[CompressionStep]:
        """The steps of a call that ends a prompt all of which stays at full rank: bases follow it all the same.

        Args:
            num_earlier: waiting tokens from before the prompt, such as those of an earlier turn.
            num_prompt: waiting tokens of the prompt.
            num_pinned, num_seen: as for :meth:`due`.
        """
        if num_earlier and num_seen >= self.config.min_length:
            earlier = [CompressionStep(num_pinned, num_earlier, 0, is_prompt=False)]
        else:
            earlier, num_prompt = [], num_earlier + num_prompt
        return [*earlier, CompressionStep(num_pinned, num_prompt, num_prompt, is_prompt=True)]
