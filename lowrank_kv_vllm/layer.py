"""What a layer's attention needs to know, and what it asks of its pages, whichever code reads and writes them.

Shapes: T new tokens of all sequences, H query heads, G KV heads, D head dim, C = G·D joint width, R coefficients, N rows, F
exact tokens, P pages of a sequence.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lowrank_kv.ops.native.pages import NewTokens
from lowrank_kv.ops.rotation import RotaryTable
from lowrank_kv.stores.arena import PageLayout
from lowrank_kv_vllm.sides import Side
from lowrank_kv_vllm.step import Prompt, PromptAttention, Step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer.

    Attributes:
        layout: of its pages.
        key, value: what compresses it, on the device of the pages.
        rotation: the model's, on the same device.
        num_heads, num_kv_heads, head_dim, dtype: of the model.
        scale: of scores.
        most_tokens: of a sequence.
        sees_itself: whether a generated token sees itself exactly; else its row.
    """

    layout: PageLayout
    key: Side
    value: Side
    rotation: RotaryTable
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scale: float
    most_tokens: int
    sees_itself: bool


class LayerPages(Protocol):
    """The pages of one layer.

    Attributes:
        cut: how many rows so far are of a cheaper level than they asked for, because their pages are full, int64 on the
            pages' device.
    """

    cut: Tensor

    def decode(self, query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, step: Step, output_THD: Tensor) -> bool:
        """Write and attend a step's tokens in one call, where all of them decode. False, and nothing is done, where that is
        not one call."""

    def project(self, new: NewTokens) -> tuple[Tensor, Tensor]:
        """The coefficients of keys and values, where they are products with the sides' vectors, (T, R) fp32 each."""

    def write(
        self, new: NewTokens, key_TC: Tensor, value_TC: Tensor, ranks: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Write tokens; arguments as of :meth:`lowrank_kv.ops.native.pages.Pages.write`."""

    def attend(self, query_THD: Tensor, new: NewTokens, step: Step, output_THD: Tensor) -> None:
        """Attention of the step's decoding tokens; rows of others stay as they are."""

    def rows(self, page_P: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The coefficients of a sequence's first `count` rows, keys' and values', (N, R) each in the model's dtype."""

    def sinks(self, page_P: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """A sequence's first `count` exact tokens, (F, G, D): rotated keys, and values."""

    def prompts(self, prompts: list[Prompt]) -> Sequence[PromptAttention]:
        """What attends for a step's prompts, for some of them after others, so that few are uncompressed at a time."""
