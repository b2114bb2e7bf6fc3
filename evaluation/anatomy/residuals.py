"""How far each method's bases are from the tokens that come next, while a text is decoded, and when they are updated.

Shapes: T tokens, P parts, W width of a part, R rank.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from lowrank_kv.calibration.activation_moments import KEY, ROTATED_KEY, VALUE
from lowrank_kv.hf.cache.windowed.layer import WindowedLayer
from ojakv import OjaKVCache
from ojakv.online_store import OnlineStore
from ojakv.update_trigger import residual_of

from .shares import States

STATE_SIDES = (KEY, ROTATED_KEY, VALUE)


def follows_text(make_cache: Callable[[], Cache]) -> bool:
    """Whether the method's bases move."""
    cache = make_cache()
    return isinstance(cache, OjaKVCache) and any(_layers(cache)[index].config.follows_text for index in _layers(cache))


@torch.no_grad()
def residuals(
    model: PreTrainedModel, make_cache: Callable[[], Cache], ids_T: Tensor, states: States, *, prefix: int, step: int
) -> dict[str, Any]:
    """Read a prompt, then `step` tokens at a time; after each, the relative error of the next ones in the bases as they are.

    Args:
        make_cache: a method whose bases may move.
        states: of the whole text, of :data:`STATE_SIDES`.

    Returns:
        ``position`` (of each part's first token), ``keys`` and ``values`` (the share of their energy outside of the bases,
        the layers' mean), ``key_starts`` and ``value_starts`` (the same in the calibrated bases), ``updates`` (how many
        bases moved before that part).
    """
    cache = make_cache()
    model(input_ids=ids_T[None, :prefix], past_key_values=cache, logits_to_keep=1)
    found: dict[str, Any] = {
        "position": [],
        "keys": [],
        "values": [],
        "key_starts": [],
        "value_starts": [],
        "updates": [],
    }
    before = 0
    for start in range(prefix, len(ids_T), step):
        end = min(start + step, len(ids_T))
        errors = [_errors(layer, index, states, start, end) for index, layer in _layers(cache).items()]
        mean = torch.tensor(errors).mean(dim=0).tolist()
        found["position"].append(start)
        for name, value in zip(("keys", "key_starts", "values", "value_starts"), mean, strict=True):
            found[name].append(round(value, 5))
        found["updates"].append(cache.updates - before)
        before = cache.updates
        model(input_ids=ids_T[None, start:end], past_key_values=cache)
    return found


def _layers(cache: Cache) -> dict[int, WindowedLayer]:
    return {index: layer for index, layer in enumerate(cache.layers) if isinstance(layer, WindowedLayer)}


def _errors(layer: WindowedLayer, index: int, states: States, start: int, end: int) -> list[float]:
    """Of keys in the present bases and in those of the start, then of values."""
    [sequence] = layer.sequences
    found = []
    for store, initial, side in (
        (sequence.key, layer.plan.layers[index][0], KEY if layer.config.rope == "pre" else ROTATED_KEY),
        (sequence.value, layer.plan.layers[index][1], VALUE),
    ):
        rows_TC = states[index, side][start:end]
        initial_PWR = initial.vectors_PWR.to(rows_TC.device)  # a plan stays where it was made
        now_PWR = store.basis_PWR if isinstance(store, OnlineStore) else initial_PWR
        found += (_outside(rows_TC, basis_PWR) for basis_PWR in (now_PWR, initial_PWR))
    return found


def _outside(rows_TC: Tensor, basis_PWR: Tensor) -> float:
    """Share of the rows' energy that orthonormal bases of the parts do not hold."""
    return residual_of(rows_TC.unflatten(1, basis_PWR.shape[:2]).transpose(0, 1), basis_PWR.float())
