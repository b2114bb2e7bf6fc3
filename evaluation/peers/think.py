"""ThinK: each head keeps the key channels that queries use (arXiv 2407.21018, section 3).

A channel c of a head counts ‖q_c‖ · ‖k_c‖, of the prompt's latest queries and of its keys. The channels that count least are
dropped from the keys of all tokens but the latest 32, and values stay whole: at most half of the bytes can be saved.

Shapes: H query heads, G KV heads, D head dim, N tokens, R channels kept, W queries.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.hf.backends import Backend
from lowrank_kv.hf.cache.lowrank_cache import LowRankCache
from lowrank_kv.hf.cache.windowed.layer import Side, WindowedLayer
from lowrank_kv.hf.cache.windowed.plan import InitialBasis, Plan
from lowrank_kv.hf.cache.windowed.store import TokenStore
from lowrank_kv.hf.geometry import geometry_of
from lowrank_kv.ops.lowrank_attention import Operands
from lowrank_kv.stores.memory_report import BASES
from lowrank_kv.utils.config import require

from .peer import MakeCache, TextLength, fixed_config, token_share

WINDOW = 32


class ChannelStore(TokenStore):
    """One sequence's keys of one layer, of which each head keeps some channels.

    Attributes:
        query_HWD: the latest queries, until the channels are chosen by them.
        channel_GR: the channels, rising, uint8, or int16 of wider heads; None before the first tokens are compressed.
    """

    def __init__(self, initial: InitialBasis, **settings: Any):
        super().__init__(initial, **settings)
        self.query_HWD: Tensor | None = None
        self.channel_GR: Tensor | None = None

    @property
    def basis_PWR(self) -> Tensor:  # noqa: N802 (a tensor's dims are part of its name)
        """Ones where a channel is kept: coefficients are the channels."""
        if self.channel_GR is None:
            return self.initial.vectors_PWR
        width = self.initial.vectors_PWR.shape[1]
        return torch.nn.functional.one_hot(self.channel_GR.long(), width).mT.float()

    def operands(self) -> Operands:
        operands = super().operands()
        self.forget_operands()  # with them it would hold the ones and zeros
        return operands

    def _move(self, rows_PNW: Tensor, *, is_prompt: bool) -> None:
        """Choose the channels by the first rows."""
        if self.channel_GR is None:
            _, width, rank = self.initial.vectors_PWR.shape
            self.channel_GR = self.chosen(rows_PNW, rank).to(torch.uint8 if width <= 256 else torch.int16)

    def chosen(self, key_GND: Tensor, rank: int) -> Tensor:
        """The channels of each head that count most, rising, (G, R)."""
        query_GMD = self.query_HWD.float().unflatten(0, (len(key_GND), -1)).flatten(1, 2)
        worth_GD = query_GMD.norm(dim=1) * key_GND.norm(dim=1)
        return worth_GD.topk(rank, dim=1).indices.sort(dim=1).values

    def tensors_by_kind(self, num_pinned: int) -> Iterator[tuple[str, Tensor]]:
        yield from super().tensors_by_kind(num_pinned)
        if self.channel_GR is not None:
            yield BASES, self.channel_GR

    def clone(self) -> "ChannelStore":
        twin = super().clone()
        twin.channel_GR = copy.copy(self.channel_GR)
        return twin


class ThinKLayer(WindowedLayer):
    """One layer whose keys lose channels."""

    store = ChannelStore  # of keys

    def new_store(self, initial: InitialBasis, side: Side) -> TokenStore:
        kind = self.store if initial.is_compressed else TokenStore
        return kind(initial, leaves_room=self.config.compresses_singly, **self.store_settings(side))

    def attend_cached(
        self, module: nn.Module, query: Tensor, mask: Tensor | None, inner: Backend, **kwargs: Any
    ) -> tuple[Tensor, None]:
        keys = [sequence.key for sequence in self.sequences if isinstance(sequence.key, ChannelStore)]
        for b, key in enumerate(keys):
            key.query_HWD = query[b, :, -WINDOW:]
        output = super().attend_cached(module, query, mask, inner, **kwargs)
        for key in keys:
            key.query_HWD = None
        return output


def think_maker(
    model: PreTrainedModel,
    calibration: Calibration | None,
    share: float,
    text: TextLength | None = None,
    *,
    layer: type[ThinKLayer] = ThinKLayer,
) -> MakeCache:
    """Caches of channels; `layer` may choose others."""
    geometry = geometry_of(model)
    config = fixed_config(
        layout="per_head",
        rope="post",
        num_sink_tokens=0,
        recent_window=WINDOW,
        prefill="exact",
    )
    kept = 2 * token_share(config, model, share, text) - 1
    rank = min(geometry.head_dim, int(kept * geometry.head_dim))
    require(rank >= 1, "share", share, "large enough for the values and one channel of each key")
    heads, head_dim = geometry.num_kv_heads, geometry.head_dim
    keys = InitialBasis.identity(heads, head_dim, rank=rank, is_compressed=rank < head_dim)
    pair = keys, InitialBasis.identity(heads, head_dim)
    plan = Plan(config=config, geometry=geometry, layers=dict.fromkeys(geometry.layers, pair))
    return lambda: LowRankCache(model, {index: layer(plan, index) for index in geometry.layers})
