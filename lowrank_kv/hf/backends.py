"""The attention that runs underneath, on exact or rebuilt keys and values: the one the model was loaded with.

Shapes: B batch, H query heads, Q queries, T keys, D head dim.
"""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lowrank_kv.ops.scoring import Scoring
from lowrank_kv.utils.errors import UserError

_FLASH = "flash_attention_2"
_QUERIES_AT_ONCE = 1024  # whose masks are looked at
MASKED_BACKENDS = ("sdpa", "eager")  # their masks may be of any form
BACKENDS = (*MASKED_BACKENDS, _FLASH)


def check_backend(name: str) -> None:
    """Raise :class:`UserError` unless `name` can run underneath the compressed attention."""
    if name not in BACKENDS:
        raise UserError(
            f"the compressed attention cannot run on `attn_implementation={name!r}`; load the model with one of "
            f"{', '.join(BACKENDS)}"
        )


@dataclasses.dataclass(frozen=True)
class Backend:
    """A function (module, query, key, value, mask, **kwargs) → ((B, Q, H, D), weights or None).

    The mask it takes is the one of the compressed attention: boolean (B, 1, Q, T), True where a query may see a token, or
    None where only causality masks.

    Attributes:
        weighs_scores: whether it honours `softcap`, and `s_aux`, the sinks of each head. sdpa ignores sinks, and up to
            transformers 5.17 the cap, too, which it refuses later; a model that was loaded so attends without them, and must
            do so when it attends in the compressed form, too.
    """

    run: Callable
    weighs_scores: bool

    def __call__(self, *args: Any, **kwargs: Any) -> tuple:
        return self.run(*args, **kwargs)

    def scoring(self, kwargs: dict[str, Any]) -> Scoring:
        """What this backend does to scores when called with `kwargs`."""
        if self.weighs_scores:
            return Scoring(kwargs["scaling"], kwargs.get("softcap"), kwargs.get("s_aux"))
        return Scoring(kwargs["scaling"])


def default_backend(model: PreTrainedModel) -> str:
    """What transformers loads this model with when nothing is asked for."""
    return "sdpa" if model._supports_sdpa else "eager"


def backend(name: str) -> Backend:
    """One of :data:`BACKENDS`; eager attention is the module's family's own."""
    return _BACKENDS[name]


def _sdpa(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> tuple:
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **kwargs)


def _eager(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> tuple:
    """Eager attention adds its mask to the scores and knows no causality of its own."""
    if mask is None:
        queries, tokens = query.shape[2], key.shape[2]
        position_Q = torch.arange(tokens - queries, tokens, device=query.device)
        mask = (torch.arange(tokens, device=query.device) <= position_Q[:, None])[None, None]
    added = mask
    if mask.dtype == torch.bool:  # without a compressed cache a user's own mask may add what it likes
        added = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)
    forward = sys.modules[type(module).__module__].eager_attention_forward
    return forward(module, query, key, value, added, **kwargs)


def _flash(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> tuple:
    """Flash attention is causal, with the last query aligned with the last key; it is told only of padding, of a sliding
    window, and of documents packed into one sequence by their `position_ids`."""
    seen_BT = None
    if mask is not None:
        if mask.dtype != torch.bool:
            raise UserError(
                f"a four-dimensional `attention_mask` must be boolean for `{_FLASH}`, which cannot add to scores; got "
                f"{mask.dtype}; load the model with sdpa or eager attention"
            )
        seen_BT = mask[:, 0].any(dim=1)
        is_padded = not bool(seen_BT.all())
        reads_documents = query.shape[0] == 1 and not is_padded
        _check_told(
            mask[:, 0], seen_BT, kwargs.get("sliding_window"), kwargs.get("position_ids") if reads_documents else None
        )
        seen_BT = seen_BT.expand(query.shape[0], -1) if is_padded else None
    # transformers looks up which flash attention is meant under the name of the attention that the model has now.
    as_loaded = _Replaced(module, config=_Replaced(module.config, _attn_implementation=_FLASH))
    return ALL_ATTENTION_FUNCTIONS[_FLASH](as_loaded, query, key, value, seen_BT, **kwargs)


def _check_told(mask_BQT: Tensor, seen_BT: Tensor, sliding_window: int | None, position_BT: Tensor | None) -> None:
    """Raise :class:`UserError` where a query that sees something sees other tokens than flash attention shows it."""
    queries, tokens = mask_BQT.shape[1:]
    position_T, document_T = torch.arange(tokens, device=mask_BQT.device), None
    if position_BT is not None and position_BT.shape[1] == tokens:
        document_T = (position_BT[0].diff(prepend=position_BT[0, :1] - 1) != 1).cumsum(0)
    # Some queries at a time: together they would take several times the mask's bytes.
    for mask_BNT, position_N in zip(
        mask_BQT.split(_QUERIES_AT_ONCE, dim=1), position_T[tokens - queries :].split(_QUERIES_AT_ONCE), strict=True
    ):
        shown_NT = position_T <= position_N[:, None]
        if sliding_window is not None:
            shown_NT &= position_T > position_N[:, None] - sliding_window
        if document_T is not None:
            shown_NT &= document_T == document_T[position_N, None]
        is_other_BNT = (mask_BNT != shown_NT & seen_BT[:, None]) & mask_BNT.any(dim=2, keepdim=True)
        if bool(is_other_BNT.any()):
            raise UserError(
                f"`attention_mask` hides other tokens than padding and those that come later, which is all that `{_FLASH}` "
                f"is told of; load the model with sdpa or eager attention, or pass documents in sequences of their own"
            )


class _Replaced:
    """An object as it is but for some attributes."""

    def __init__(self, of: Any, **attributes: Any):
        self.__dict__.update(attributes, _of=of)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


_BACKENDS = {
    "sdpa": Backend(_sdpa, weighs_scores=False),
    "eager": Backend(_eager, weighs_scores=True),
    _FLASH: Backend(_flash, weighs_scores=True),
}
