"""KIVI: keys in few bits by channel, values by token, with a range for each group (arXiv 2402.02750).

A channel of keys with a large bias, as Qwen2.5's have, costs the other channels nothing: a group is of one channel's numbers
of 32 consecutive tokens. A group of values is of 32 numbers of one token. Each has a least number and a step, in fp16. Keys
are those after their rotary embedding; first 4 and latest 16 tokens stay whole.

Shapes: G KV heads, D head dim, N tokens, K pages of n tokens, B bytes of D codes, S groups of a row.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from lowrank_kv.hf.cache.lowrank_cache import LowRankCache
from lowrank_kv.hf.cache.windowed.layer import Side, WindowedLayer
from lowrank_kv.hf.cache.windowed.plan import InitialBasis, Plan
from lowrank_kv.hf.cache.windowed.store import TokenStore
from lowrank_kv.hf.geometry import geometry_of
from lowrank_kv.stores.memory_report import COEFFICIENTS, SCALES
from lowrank_kv.utils.errors import UserError

from .peer import fixed_config
from .token_pages import PAGE_TOKENS, PagedRows, PagedStore

KIVI = {"kivi-int4": 4, "kivi-int2": 2}  # name → bits
GROUP = PAGE_TOKENS  # tokens of a channel, and channels of a token


class Page(NamedTuple):
    """Pages of equally many tokens, of keys (one group a channel) or of values (S groups a token).

    Attributes:
        code_GKnB: uint8, of which each holds the codes of neighbouring channels.
        step, least: fp16, (G, K, 1, D) of keys, (G, K, n, S) of values.
    """

    code_GKnB: Tensor
    step: Tensor
    least: Tensor


class GroupedRows(PagedRows):
    """Rows of one layer's keys, or values, in groups with a range of their own.

    Args:
        bits: of a code, 4 or 2.
        by_channel: whether a group is of a channel's tokens, and not of a token's channels.
    """

    def __init__(self, bits: int, dtype: torch.dtype, *, by_channel: bool):
        super().__init__()
        self.bits, self.dtype, self.by_channel = bits, dtype, by_channel

    def encoded(self, page_GKnD: Tensor) -> Page:
        levels = 2**self.bits - 1
        if self.by_channel:
            least, most = page_GKnD.aminmax(dim=2, keepdim=True)
        else:
            least, most = page_GKnD.unflatten(3, (-1, _group_of(page_GKnD.shape[3]))).aminmax(dim=4)
        least = least.half()
        # A step that fp16 rounds down would leave the largest number out of reach; of a constant group any step does.
        step = ((most - least.float()) / levels).clamp(min=torch.finfo(torch.float16).tiny).half()
        shown = _across(page_GKnD.shape[3])
        code = ((page_GKnD - shown(least)) / shown(step)).round().clamp(0, levels).to(torch.uint8)
        places = torch.arange(0, 8, self.bits, dtype=torch.uint8)
        packed = (code.unflatten(3, (-1, len(places))) << places.to(code.device)).sum(dim=4, dtype=torch.uint8)
        return Page(packed, step, least)

    def decoded(self, run: Page) -> Tensor:
        places = torch.arange(0, 8, self.bits, dtype=torch.uint8, device=run.code_GKnB.device)
        code = (run.code_GKnB[..., None] >> places & 2**self.bits - 1).flatten(3)
        shown = _across(code.shape[3])
        return (code * shown(run.step) + shown(run.least)).to(self.dtype)

    def part_of(self, run: Page, pages: slice, rows: int) -> Page:
        # Of a page that is cut, the range of a channel stays that of all its tokens.
        return Page(*(each[:, pages, :rows].clone() for each in run))

    def tensors_by_kind(self) -> Iterator[tuple[str, Tensor]]:
        for run in self.runs:
            yield COEFFICIENTS, run.code_GKnB
            yield SCALES, run.step
            yield SCALES, run.least


def _group_of(head_dim: int) -> int:
    return min(GROUP, head_dim)


def _across(head_dim: int) -> Callable[[Tensor], Tensor]:
    """Shows a number of each group as fp32 numbers of each channel."""
    return lambda each: each.float().repeat_interleave(head_dim // each.shape[-1], dim=-1)


class KiviLayer(WindowedLayer):
    """One layer in groups of `bits` bits."""

    def __init__(self, plan: Plan, index: int, bits: int):
        super().__init__(plan, index)
        self.bits = bits

    def new_store(self, initial: InitialBasis, side: Side) -> TokenStore:
        grouped = GroupedRows(self.bits, self.dtype, by_channel=side == "key")
        return PagedStore(initial, grouped, leaves_room=False, **self.store_settings(side))


def kivi_maker(model: PreTrainedModel, name: str) -> Callable[[], Cache]:
    """Makes caches of keys and values at one of :data:`KIVI`, rebuilt for the model's own attention.

    Raises:
        UserError: heads cannot be divided into groups, or into bytes.
    """
    geometry, bits = geometry_of(model), KIVI[name]
    if geometry.head_dim % _group_of(geometry.head_dim) or geometry.head_dim % (8 // bits):
        raise UserError(
            f"`{name}` needs heads of a multiple of {GROUP} dims, and the model has {geometry.head_dim}; leave the peer out"
        )
    config = fixed_config(
        layout="per_head",
        rope="post",
        update_period=GROUP,
        staggered=False,  # in which the first page after a prompt would be a part of one
        prefill="exact",
        attention="reconstructed",
    )
    # Rows are stored as they are: the plan's bases are never read.
    basis = InitialBasis.identity(geometry.num_kv_heads, geometry.head_dim, is_compressed=True)
    plan = Plan(config=config, geometry=geometry, layers=dict.fromkeys(geometry.layers, (basis, basis)))
    return lambda: LowRankCache(model, {index: KiviLayer(plan, index, bits) for index in geometry.layers})
