"""What one step of the engine is about, worked out once for all layers.

Shapes: T new tokens of all sequences, B sequences, N sequences of a kind.
"""

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata

from lowrank_kv.hf.cache.layer import MAX_DECODE_QUERIES
from lowrank_kv.ops.native.pages import Sequences

_CACHED = "_lowrank_kv_step"  # an attribute of vLLM's description of a step


class Prompt(NamedTuple):
    """A sequence whose new tokens are many, or its first.

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
        sequences: where each one's new tokens and pages are.
        position_T, slot_T: see :class:`lowrank_kv.ops.native.pages.NewTokens`.
        decoding_N: sequences that attend in the compressed form, int64.
        decoding_rows: their tokens, int64; None where all are.
        prompts: the others.
        turn: what undoes the rotation of the new keys; the first layer works it out.
    """

    num_tokens: int
    sequences: Sequences
    position_T: Tensor
    slot_T: Tensor
    decoding_N: Tensor
    decoding_rows: Tensor | None
    prompts: list[Prompt]
    turn: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, common: CommonAttentionMetadata) -> "Step":
        tokens, count = common.num_actual_tokens, common.num_reqs
        first_B = common.query_start_loc[: count + 1].int()
        length_B = common.seq_lens[:count].int()
        new_B = first_B.diff()
        position_T = torch.arange(tokens) + (length_B - new_B - first_B[:-1]).long().repeat_interleave(new_B)
        prompts, decoding, rows = [], [], []
        for b, (start, new, length) in enumerate(
            zip(first_B.tolist(), new_B.tolist(), length_B.tolist(), strict=False)
        ):
            if new == 0:
                continue
            if length > new and new <= MAX_DECODE_QUERIES:
                decoding.append(b)
                rows.extend(range(start, start + new))
            else:
                prompts.append(Prompt(b, slice(start, start + new), length - new))
        return cls(
            num_tokens=tokens,
            sequences=Sequences(first_B.contiguous(), length_B.contiguous(), common.block_table_tensor[:count].int()),
            position_T=position_T,
            slot_T=common.slot_mapping[:tokens].long().contiguous(),
            decoding_N=torch.tensor(decoding, dtype=torch.int64),
            decoding_rows=torch.tensor(rows, dtype=torch.int64) if prompts else None,
            prompts=prompts,
        )


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
            found = Step.of(common_attn_metadata)
            setattr(common_attn_metadata, _CACHED, found)
        return found
