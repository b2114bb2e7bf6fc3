"""What one step of the engine is about, worked out once for all layers.

Shapes: T new tokens of all sequences, B sequences, N sequences of a kind.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata

from lowrank_kv.ops.native.pages import Sequences
from lowrank_kv_vllm import statistics
from lowrank_kv_vllm.prompts import PromptPages

_CACHED = "_lowrank_kv_step"  # an attribute of vLLM's description of a step
# Of the step that is being described; vLLM's description of it does not tell prompts from what was generated.
_PROMPT_LENGTHS: contextvars.ContextVar[Sequence[int]] = contextvars.ContextVar("prompt lengths")


@contextlib.contextmanager
def describing(prompt_lengths: Sequence[int]) -> Iterator[None]:
    """Make known how many tokens the prompt of each request in the batch has, while vLLM describes a step."""
    token = _PROMPT_LENGTHS.set(prompt_lengths)
    try:
        yield
    finally:
        _PROMPT_LENGTHS.reset(token)


def prompt_lengths() -> Sequence[int]:
    """See :func:`describing`."""
    return _PROMPT_LENGTHS.get()


class Prompt(NamedTuple):
    """A piece of a prompt that is read in this step.

    Attributes:
        sequence: its number in the step.
        new: its new tokens among all of the step.
        past: tokens before them, which are in pages.
    """

    sequence: int
    new: slice
    past: int


@dataclasses.dataclass
class Step:
    """One step.

    Attributes:
        num_tokens: T.
        sequences: where each one's new tokens and pages are. A piece of a prompt is one, and so is every generated token: a
            guessed one, and one that is read again because its request was preempted, sees what it would see alone.
        position_T, slot_T: see :class:`lowrank_kv.ops.native.pages.NewTokens`.
        decoding_N: sequences that attend in the compressed form, int64.
        decoding_rows: their tokens, int64; None where all are.
        prompts: the others.
        prompt_pages: for uncompressed states of the prompts; the first layer makes them.
    """

    num_tokens: int
    sequences: Sequences
    position_T: Tensor
    slot_T: Tensor
    decoding_N: Tensor
    decoding_rows: Tensor | None
    prompts: list[Prompt]
    prompt_pages: PromptPages | None = None

    @classmethod
    def of(cls, common: CommonAttentionMetadata, prompt_B: Sequence[int]) -> "Step":
        """Work it out.

        Args:
            common: vLLM's description.
            prompt_B: tokens of each request's prompt.
        """
        tokens, count = common.num_actual_tokens, common.num_reqs
        first_B, length_B = common.query_start_loc[: count + 1].tolist(), common.seq_lens[:count].tolist()
        found, prompts, decoding, rows = _Pieces(), [], [], []
        for b, (start, end, length, prompt) in enumerate(
            zip(first_B[:-1], first_B[1:], length_B, prompt_B, strict=True)
        ):
            past = length - (end - start)
            read = min(max(prompt - past, 0), end - start)  # of the prompt
            if read:
                prompts.append(Prompt(found.add(b, read, past + read), slice(start, start + read), past))
            decoding += [found.add(b, 1, past + i + 1) for i in range(read, end - start)]
            rows += range(start + read, end)
        length_of_B = common.seq_lens[:count].long()
        new_B = common.query_start_loc[: count + 1].long().diff()
        before_B = length_of_B - new_B - common.query_start_loc[:count].long()
        return cls(
            num_tokens=tokens,
            sequences=found.sequences(common.block_table_tensor),
            position_T=torch.arange(tokens) + before_B.repeat_interleave(new_B),
            slot_T=common.slot_mapping[:tokens].long().contiguous(),
            decoding_N=torch.tensor(decoding, dtype=torch.int64),
            decoding_rows=torch.tensor(rows, dtype=torch.int64) if prompts else None,
            prompts=prompts,
        )


class _Pieces:
    """Sequences of a step in the order of their tokens."""

    def __init__(self) -> None:
        self._request, self._first, self._length = [], [0], []

    def add(self, request: int, new: int, length: int) -> int:
        """One more, whose last token is the `length`-th of its request; returns its number."""
        self._request.append(request)
        self._first.append(self._first[-1] + new)
        self._length.append(length)
        return len(self._request) - 1

    def sequences(self, page_BP: Tensor) -> Sequences:
        """See there.

        Args:
            page_BP: the pages of each request.
        """
        first_B, length_B = (torch.tensor(each, dtype=torch.int32) for each in (self._first, self._length))
        return Sequences(first_B, length_B, page_BP[torch.tensor(self._request, dtype=torch.int64)].int())


class StepBuilder(AttentionMetadataBuilder[Step]):
    """Makes a :class:`Step` of vLLM's description of one. Layers whose pages differ in size have builders of their own,
    which share it."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Step:
        found = getattr(common_attn_metadata, _CACHED, None)
        if found is None:
            found = Step.of(common_attn_metadata, prompt_lengths()[: common_attn_metadata.num_reqs])
            setattr(common_attn_metadata, _CACHED, found)
            statistics.of_process().say()
        return found
