"""Which prompt a call lets a windowed cache compress, and which tokens are still uncommitted.

Shapes: B batch, H query heads, Q queries of a call, D head dim.
"""

import dataclasses
from collections.abc import Iterator

from torch import Tensor

from lowrank_kv.hf.cache.layer import MAX_DECODE_QUERIES
from lowrank_kv.hf.cache.prompt_tracker import Prompt, PromptTracker
from lowrank_kv.hf.cache.windowed.config import WindowedConfig
from lowrank_kv.hf.cache.windowed.retention import RetentionSchedule


class CommittedPromptTracker(PromptTracker):
    """Also keeps a prompt waiting while some of its call's tokens may be taken back.

    Neither a basis that has followed tokens nor a token that is compressed can go back. Tokens that may be cropped (drafts)
    are therefore uncommitted until the next call: neither they, nor their number, nor their queries decide anything, so that
    a crop of them leaves exactly the state of a sequence that never saw them.

    Attributes:
        uncommitted: a prompt that waits for the next call.
    """

    def __init__(self, config: WindowedConfig):
        self.uncommitted: Prompt | None = None
        self._needs_queries = config.full_rank_ratio > 0
        self._commits_at_once = RetentionSchedule(config).compresses_at_once
        super().__init__()

    def clear(self) -> None:
        super().clear()
        self.uncommitted = None

    def committed(self, query_BHQD: Tensor, length: int) -> tuple[Prompt | None, bool]:
        """What a call commits. To be asked once in every call.

        Each chunk of a prompt is a prompt here, and so is the first call, whatever its length: bases follow its tokens at
        the prompt's rate, and from these tokens `full_rank_ratio` and `keep_prompt_full_rank` keep some at full rank.

        Args:
            query_BHQD: the call's queries.
            length: tokens in the cache, the call's included.

        Returns:
            The prompt to compress now, None where there is none, and whether the call's own tokens are uncommitted. Nothing
            is to be compressed while :attr:`uncommitted` is a prompt.
        """
        queries = query_BHQD.shape[2]
        first = length - queries
        # A few tokens behind a prompt may be drafts, whoever drives the cache.
        may_be_drafts = self.record_past or (0 < first >= self.end and queries <= MAX_DECODE_QUERIES)
        is_uncommitted = may_be_drafts and not self._commits_at_once
        bounds = self.prompt_at(first, length) or ((0, length) if first == 0 else None)
        prompt = None if bounds is None else Prompt(first, bounds[1], query_BHQD, length)
        waiting = self.uncommitted
        if waiting is not None and prompt is not None:
            prompt = dataclasses.replace(prompt, start=waiting.start)
        if prompt is not None and is_uncommitted:
            self.uncommitted = dataclasses.replace(
                prompt, query_BHQD=query_BHQD.detach().clone() if self._needs_queries else None
            )
            return None, True
        if waiting is None:
            return prompt, is_uncommitted
        self.uncommitted = None
        if prompt is None:
            prompt = waiting
            if prompt.query_BHQD is None:
                # The call's queries choose. If they are uncommitted, only the first is certain to be no draft's.
                query_BHQD = query_BHQD[:, :, :1] if is_uncommitted else query_BHQD
                prompt = dataclasses.replace(prompt, query_BHQD=query_BHQD, query_end=first + query_BHQD.shape[2])
        return prompt, is_uncommitted

    def crop(self, length: int, old_length: int) -> None:
        super().crop(length, old_length)
        if self.uncommitted is not None:
            self.uncommitted = self.uncommitted.cropped(length)

    def select(self, rows: list[int]) -> None:
        super().select(rows)
        if self.uncommitted is not None:
            self.uncommitted = self.uncommitted.select(rows)

    def tensors(self) -> Iterator[Tensor]:
        yield from super().tensors()
        if self.uncommitted is not None and self.uncommitted.query_BHQD is not None:
            yield self.uncommitted.query_BHQD
