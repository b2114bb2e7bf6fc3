"""A cache that keeps some tokens whole and forgets the others, while a prompt is read and while text is generated.

Shapes: B batch, H query heads, G KV heads, J query heads of one, D head dim, Q new tokens, N tokens held, M tokens kept,
P parts (1 where all heads of a layer hold the same tokens, G where each chooses its own).
"""

import abc
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lowrank_kv.eviction import top_scores
from lowrank_kv.hf.backends import Backend
from lowrank_kv.hf.cache.layer import CallContext
from lowrank_kv.hf.cache.lowrank_cache import LowRankCache
from lowrank_kv.hf.cache.per_sequence_layer import SequenceLayer, present
from lowrank_kv.hf.cache.windowed.sequence import mask_at
from lowrank_kv.hf.geometry import KVGeometry, geometry_of
from lowrank_kv.stores.memory_report import FULL_RANK, POSITIONS, SCALES
from lowrank_kv.utils.config import require
from lowrank_kv.utils.errors import UserError

from .peer import MakeCache, TextLength

LATEST = 32  # tokens at most that rules of scores hold always, and that are decoded between two choices
_OF_BUDGET = 4  # they are at most this part of the tokens held: others must remain to choose from
_NUMBER_BYTES = 4  # of a position, int32, and of a score, fp32


class WholeTokens:
    """The tokens that one sequence of one layer still holds, in the text's order.

    Attributes:
        key_GND, value_GND: rotated keys and values, in the model's dtype.
        position_PN: where they stand in the text, int32.
        score_GN: how much queries have looked at them since tokens were last chosen, fp32; None where nobody asks.
        noted: what the rule remembers of the queries seen, never written in place; its bytes are not counted.
        length: tokens seen, padding and forgotten ones included.
        num_seen: the same without padding.
        chosen_at: how many had been seen when some were last forgotten.
    """

    min_crop_length = 0

    def __init__(self, rule: "Rule", key_GND: Tensor):
        self.key_GND = self.value_GND = key_GND
        parts = len(key_GND) if rule.chooses_by_head else 1
        self.position_PN = torch.empty(parts, 0, dtype=torch.int32, device=key_GND.device)
        self.score_GN = key_GND[..., 0].float() if rule.sums_attention else None
        self.noted: Any = None
        self.length = self.num_seen = self.chosen_at = 0

    @property
    def num_held(self) -> int:
        return self.position_PN.shape[1]

    def append(self, key_GQD: Tensor, value_GQD: Tensor, present_Q: Tensor | None) -> None:
        """New tokens; `present_Q` is False for padding, which is not held, None where there is none."""
        queries = key_GQD.shape[1]
        position_Q = torch.arange(self.length, self.length + queries, dtype=torch.int32, device=key_GQD.device)
        if present_Q is not None:
            key_GQD, value_GQD, position_Q = key_GQD[:, present_Q], value_GQD[:, present_Q], position_Q[present_Q]
        key_GND = torch.cat([self.key_GND, key_GQD.detach()], dim=1)
        value_GND = torch.cat([self.value_GND, value_GQD.detach()], dim=1)
        position_PN = torch.cat([self.position_PN, position_Q.expand(len(self.position_PN), -1)], dim=1)
        if self.score_GN is not None:
            self.score_GN = torch.nn.functional.pad(self.score_GN, (0, len(position_Q)))
        self.key_GND, self.value_GND, self.position_PN = key_GND, value_GND, position_PN
        self.length += queries
        self.num_seen += len(position_Q)

    def keep(self, index_PM: Tensor) -> None:
        """Forget all but these rows, rising."""
        self.chosen_at = self.num_seen
        index_GM1 = index_PM.expand(len(self.key_GND), -1)[..., None]
        self.key_GND = self.key_GND.take_along_dim(index_GM1, dim=1)
        self.value_GND = self.value_GND.take_along_dim(index_GM1, dim=1)
        self.position_PN = self.position_PN.take_along_dim(index_PM, dim=1)
        if self.score_GN is not None:
            self.score_GN = torch.zeros_like(self.key_GND[..., 0], dtype=torch.float32)

    def crop(self, length: int) -> None:
        """Drop the tokens from `length` on, before which none was forgotten since they came: a call was cut short."""
        count = int((self.position_PN[0] < length).sum())
        self.num_seen -= self.num_held - count
        self.key_GND, self.value_GND = self.key_GND[:, :count], self.value_GND[:, :count]
        self.position_PN, self.length = self.position_PN[:, :count], length
        if self.score_GN is not None:
            self.score_GN = self.score_GN[:, :count]

    def clone(self) -> "WholeTokens":
        """An independent copy: nothing is ever written in place."""
        return copy.copy(self)

    def tensors_by_kind(self) -> Iterator[tuple[str, Tensor]]:
        """(kind, tensor) of everything held."""
        yield FULL_RANK, self.key_GND
        yield FULL_RANK, self.value_GND
        yield POSITIONS, self.position_PN
        if self.score_GN is not None:
            yield SCALES, self.score_GN


class Rule(abc.ABC):
    """Which tokens are kept.

    Args:
        share: of the bytes of all tokens seen that those held take.
        most_latest: how many of the latest tokens are held whatever their scores are, where the budget is large. As many
            tokens come while decoding before some are forgotten again.
        least: tokens that are held whatever their share and their scores are, besides the latest.
    """

    chooses_by_head = False  # whether each KV head holds tokens of its own
    sums_attention = False  # whether tokens have a score, the attention that the latest queries give them

    def __init__(self, share: float, *, most_latest: int, least: int):
        self.share, self.most_latest, self.least = share, most_latest, least

    def budget(self, num_seen: int, *, groups: int, head_dim: int, itemsize: int) -> float:
        """How many tokens of so many take the share of their bytes.

        Args:
            groups, head_dim, itemsize: KV heads of a layer, and their numbers' width and bytes.
        """
        whole = 2 * groups * head_dim * itemsize
        parts = groups if self.chooses_by_head else 1
        beside = _NUMBER_BYTES * (parts + (groups if self.sums_attention else 0))
        return self.share * num_seen * whole / (whole + beside)

    def latest(self, budget: float) -> int:
        """How many of the latest tokens are held whatever their scores are, and come between two choices."""
        return min(self.most_latest, max(1, int(budget) // _OF_BUDGET))

    def latest_of(self, tokens: WholeTokens) -> int:
        """The same of tokens that came so far."""
        return self.latest(self._budget_of(tokens))

    def num_kept(self, tokens: WholeTokens, queries: int) -> int:
        """How many tokens are held after a choice, so that they take their share on average where calls bring so many."""
        budget = self._budget_of(tokens)
        latest = self.latest(budget)
        calls = max(
            latest // queries, 1
        )  # from one choice to the next, in which as much more is held as the share lets grow
        more = (1 - self.share) * queries * (calls - 1)
        return min(tokens.num_held, max(self.least + latest, int(budget - more / 2)))

    def check(self, geometry: KVGeometry, text: TextLength | None, *, itemsize: int) -> None:
        """Raise :class:`UserError` where the first choice, at the end of the prompt, has nothing to choose."""
        if text is None:
            return
        shape = {"groups": geometry.num_kv_heads, "head_dim": geometry.head_dim, "itemsize": itemsize}
        budget = self.budget(text.prompt, **shape)
        always = self.least + self.latest(budget)
        require(
            int(budget) > always,
            "share",
            self.share,
            f"large enough for more than the {always} tokens that are held always, or the prompt longer: of "
            f"{text.prompt} tokens it is {int(budget)}",
        )

    def _budget_of(self, tokens: WholeTokens) -> float:
        groups, _, head_dim = tokens.key_GND.shape
        itemsize = tokens.key_GND.dtype.itemsize
        return self.budget(tokens.num_seen, groups=groups, head_dim=head_dim, itemsize=itemsize)

    def watch(self, tokens: WholeTokens, query_HQD: Tensor, place_Q: Tensor, scaling: float) -> None:
        """Take note of a call's queries, whose tokens have been appended.

        Args:
            query_HQD: rotated, without those of padding.
            place_Q: where they stand in the text, padding counted.
            scaling: the model's score scale.
        """
        if self.sums_attention:
            latest = slice(-self.latest_of(tokens), None)
            sums_GN = attention_sums(query_HQD[:, latest], place_Q[latest], tokens, scaling)
            tokens.score_GN = tokens.score_GN + sums_GN

    @abc.abstractmethod
    def kept(self, tokens: WholeTokens, count: int) -> Tensor:
        """The rows of `count` tokens to keep, rising, (P, count)."""


class WholeTokensLayer(SequenceLayer):
    """One layer of sequences of whole tokens."""

    is_croppable = False
    rotates = False

    def __init__(self, rule: Rule):
        super().__init__()
        self.rule = rule
        self._none_G0D: Tensor | None = None  # no tokens, of the right shape, dtype and device

    def append(self, key_BGQD: Tensor, value_BGQD: Tensor, context: CallContext) -> None:
        places = slice(self.get_seq_length(), self.get_seq_length() + key_BGQD.shape[2])
        for b, sequence in enumerate(self.sequences):
            present_Q = None if context.mask is None else present(context.mask, b, places)
            sequence.append(key_BGQD[b], value_BGQD[b], present_Q)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._none_G0D = key_states[0, :, :0].clone()
        super().lazy_initialization(key_states, value_states)

    def new_sequence(self) -> WholeTokens:
        return WholeTokens(self.rule, self._none_G0D)

    def check_crop(self, length: int) -> None:
        if length != self.get_seq_length():
            raise UserError(
                f"the cache cannot be cropped to {length} tokens: it forgets tokens as it goes; generate without drafts"
            )

    def activate_past_recording(self) -> None:
        raise UserError("a call with drafts must be able to take tokens back, and this cache forgets; generate without")

    def attend_cached(
        self, module: nn.Module, query: Tensor, mask: Tensor | None, inner: Backend, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """The model's own attention over the tokens held, after which some are forgotten."""
        outputs, first = [], self.get_seq_length() - query.shape[2]
        for b, sequence in enumerate(self.sequences):
            query_HQD, place_Q = query[b], torch.arange(first, self.get_seq_length(), device=query.device)
            if mask is not None:
                is_present_Q = present(mask, b, slice(first, None))
                query_HQD, place_Q = query_HQD[:, is_present_Q], place_Q[is_present_Q]
            position = sequence.position_PN.long()
            mask_1HQN = mask_at(mask, b, position[0] if len(position) == 1 else position, query.shape[1])
            states = sequence.key_GND[None], sequence.value_GND[None]
            outputs.append(inner(module, query[b : b + 1], *states, mask_1HQN, **kwargs)[0])
            self.rule.watch(sequence, query_HQD, place_Q, kwargs["scaling"])
            self._forget(sequence, query.shape[2])
        return torch.cat(outputs), None

    def _forget(self, sequence: WholeTokens, queries: int) -> None:
        """Forget tokens where with another call of so many queries too many would have come since the last choice."""
        count, come = self.rule.num_kept(sequence, queries), sequence.num_seen - sequence.chosen_at
        if sequence.num_held > count and come + queries > self.rule.latest_of(sequence):
            sequence.keep(self.rule.kept(sequence, count))


def latest_and_best(score_GN: Tensor, count: int, *, latest: int) -> Tensor:
    """The rows of the latest tokens and of those before them with the highest scores, `count` in all, rising, (G, count)."""
    score_GN = score_GN.clone()
    score_GN[:, score_GN.shape[1] - latest :] = torch.inf
    return top_scores(score_GN, count)


def attention_sums(query_HQD: Tensor, place_Q: Tensor, tokens: WholeTokens, scaling: float) -> Tensor:
    """Σ over queries, and over the heads that share a KV head, of the attention that each token gets, (G, N) fp32.

    Args:
        query_HQD, place_Q: rotated queries, and where they stand in the text.
        scaling: the model's score scale.
    """
    query_GJQD = query_HQD.float().unflatten(0, (len(tokens.key_GND), -1))
    sees_GQN = tokens.position_PN[:, None] <= place_Q[:, None]
    score_GJQN = torch.einsum("gjqd,gnd->gjqn", query_GJQD, tokens.key_GND.float()) * scaling
    weight_GJQN = score_GJQN.masked_fill(~sees_GQN[:, None], -torch.inf).softmax(dim=-1)
    return weight_GJQN.nan_to_num(0.0).sum(dim=(1, 2))


def whole_tokens_maker(model: PreTrainedModel, rule: Rule, text: TextLength | None = None) -> MakeCache:
    """Makes caches whose layers all follow one rule, which has no state.

    Raises:
        UserError: at the end of the text's prompt the rule has nothing to choose.
    """
    geometry = geometry_of(model)
    rule.check(geometry, text, itemsize=model.dtype.itemsize)
    return lambda: LowRankCache(model, {index: WholeTokensLayer(rule) for index in geometry.layers})
