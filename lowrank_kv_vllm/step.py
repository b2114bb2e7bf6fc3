"""What one step of the engine is about, worked out once for all layers.

Shapes: T new tokens of all sequences, B sequences, N sequences of a kind, P pages of a sequence, H query heads, G KV heads,
D head dim.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder, CommonAttentionMetadata

from lowrank_kv.ops.native.pages import Sequences
from lowrank_kv.ops.native.serving import ServedTokens
from lowrank_kv_vllm import statistics

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

    @property
    def length(self) -> int:
        """Its tokens up to the last new one."""
        return self.past + self.new.stop - self.new.start


class PromptAttention(Protocol):
    """Attention of many new tokens of some of a step's prompts, for its layers in turn.

    Attributes:
        prompts: whose states are held at a time.
    """

    prompts: Sequence[Prompt]

    def hold(self, prompt: int, first: int, key_TGD: Tensor, value_TGD: Tensor) -> None:
        """Take the rotated keys, and values, of a prompt's tokens from position `first` on, which follow those before.

        Args:
            prompt: its place among :attr:`prompts`.
        """

    def hold_new(self, key_TGD: Tensor, value_TGD: Tensor) -> None:
        """The same of the prompts' new tokens, from those of the step."""

    def attend(self, query_THD: Tensor, output_THD: Tensor, *, scale: float) -> None:
        """Attend, each token to its prompt up to itself, and forget what was held.

        Args:
            query_THD: rotated, of all of the step's tokens.
            output_THD: of the same tokens; those of other sequences stay as they are.
            scale: of scores.
        """


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
        prompt_groups: what attends for them, some at a time; the first layer makes it.

    Tensors are on the device of the pages.
    """

    num_tokens: int
    sequences: Sequences
    position_T: Tensor
    slot_T: Tensor
    decoding_N: Tensor
    decoding_rows: Tensor | None
    prompts: list[Prompt]
    prompt_groups: Sequence[PromptAttention] | None = None

    @functools.cached_property
    def served(self) -> ServedTokens:
        """What each layer's compiled code reads of a step on a CPU that has no prompts."""
        return ServedTokens(self.position_T, self.slot_T, self.sequences, self.decoding_N)

    @classmethod
    def of(cls, common: CommonAttentionMetadata, prompt_B: Sequence[int], *, block_size: int, guesses: bool) -> "Step":
        """Work it out on the CPU.

        Args:
            common: vLLM's description.
            prompt_B: tokens of each request's prompt.
            block_size: tokens of a page.
            guesses: whether vLLM guesses tokens. Its own copy of the lengths may then count some that were refused, so the
                device's are waited for.
        """
        tokens, count, device = common.num_actual_tokens, common.num_reqs, common.slot_mapping.device
        firsts = common.query_start_loc_cpu[: count + 1].tolist()
        lengths = (common.seq_lens if guesses else common.seq_lens_cpu_upper_bound)[:count].tolist()
        found, prompts, decoding, rows = _Pieces(), [], [], []
        for b, (start, end, length, prompt) in enumerate(zip(firsts[:-1], firsts[1:], lengths, prompt_B, strict=True)):
            past = length - (end - start)
            read = min(max(prompt - past, 0), end - start)  # of the prompt
            if read:
                prompts.append(Prompt(found.add(b, read, past + read), slice(start, start + read), past))
            decoding += [found.add(b, 1, past + i + 1) for i in range(read, end - start)]
            rows += range(start + read, end)
        return cls(
            num_tokens=tokens,
            sequences=found.sequences(common.block_table_tensor, block_size),
            position_T=common.positions[:tokens],
            slot_T=common.slot_mapping[:tokens].long().contiguous(),
            decoding_N=torch.tensor(decoding, dtype=torch.int64).to(device, non_blocking=True),
            decoding_rows=torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True) if prompts else None,
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

    def sequences(self, page_BP: Tensor, block_size: int) -> Sequences:
        """See there; the table is as short as the longest sequence lets it be.

        Args:
            page_BP: the pages of each request.
            block_size: tokens of each.
        """
        device, pages = page_BP.device, -(-max(self._length, default=0) // block_size)
        first_B, length_B = (
            torch.tensor(each, dtype=torch.int32).to(device, non_blocking=True) for each in (self._first, self._length)
        )
        page_BP = page_BP[:, :pages]
        if self._request != list(range(len(self._request))):  # else each request is one piece, as where all decode
            page_BP = page_BP[torch.tensor(self._request, dtype=torch.int64).to(device, non_blocking=True)]
        return Sequences(first_B, length_B, page_BP.int())


class StepBuilder(AttentionMetadataBuilder[Step]):
    """Makes a :class:`Step` of vLLM's description of one. Layers whose pages differ in size have builders of their own,
    which share it."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER  # launches follow a step's lengths

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Step:
        found = getattr(common_attn_metadata, _CACHED, None)
        if found is None:
            found = Step.of(
                common_attn_metadata,
                prompt_lengths()[: common_attn_metadata.num_reqs],
                block_size=self.kv_cache_spec.block_size,
                guesses=self.vllm_config.speculative_config is not None,
            )
            setattr(common_attn_metadata, _CACHED, found)
            statistics.of_process().say()
        return found
