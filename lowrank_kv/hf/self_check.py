"""A model is tried before it is trusted with a compressed cache: at full rank it must say what it says by itself.

What a family does to its keys and values that no rule of this package foresees shows here, before any token is generated.

Shapes: B batch (one), T tokens, E hidden size, G KV heads, D head dim.
"""

import dataclasses
import weakref

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from lowrank_kv.hf.attention import has_compressors, is_prepared
from lowrank_kv.hf.backends import check_backend
from lowrank_kv.hf.cache.lowrank_cache import LowRankCache
from lowrank_kv.hf.cache.windowed.config import WindowedConfig
from lowrank_kv.hf.cache.windowed.layer import WindowedLayer
from lowrank_kv.hf.cache.windowed.plan import InitialBasis, Plan
from lowrank_kv.hf.cache_argument import CACHE
from lowrank_kv.hf.default_cache import has_default_cache
from lowrank_kv.hf.geometry import KVGeometry, geometry_of
from lowrank_kv.hf.loading import position_limit
from lowrank_kv.hf.prepare import check_own_config, prepare, restore
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.eval_mode import evaluating

# A prompt, a token, and two at a time as a draft comes.
_CALLS = (12, 1, 2)
# How much further than its own rounding a compressed form may be off, as root mean squares over all numbers.
TIMES_ROUNDING = 4.0
# What rounding may do at least, in units of the last place: a model in half precision has none to spare, and what is wrong
# with a family is far from the last place of fp32.
_UNITS, _UNITS_OF_HALVES = 64.0, 2.0

_checked: "weakref.WeakSet[torch.nn.Module]" = weakref.WeakSet()


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far hidden states are from those of the stock model, in units of their own root mean square."""

    largest: float
    rms: float

    @classmethod
    def between(cls, found_BTE: Tensor, stock_BTE: Tensor) -> "Difference":
        found_BTE, stock_BTE = found_BTE.double(), stock_BTE.double()
        scale = stock_BTE.square().mean().sqrt().clamp(min=torch.finfo(torch.float64).tiny)
        off = (found_BTE - stock_BTE).abs() / scale
        return cls(largest=float(off.max()), rms=float(off.square().mean().sqrt()))


def check_by_itself(model: PreTrainedModel) -> None:
    """Compare a model with a full-rank compressed cache to the stock model, on a short random prompt and a few tokens.

    It runs once for each model, without gradients, in eval mode, and leaves the model and all random generators as they
    were. A model whose weights are elsewhere (on the meta device, or spread by DeepSpeed), one that is compressed, and one
    of too few positions are not tried.

    Args:
        model: a stock model, prepared or not; it is prepared afterwards.

    Raises:
        UserError: hidden states differ by more than the rounding of the model's dtype explains, or the model cannot run
            with a compressed cache. A model that was not prepared is not prepared then.
    """
    geometry = geometry_of(model)  # first, as it knows the reasons of families that cannot be served
    base = model.base_model
    limit = position_limit(model)
    is_compressed = has_compressors(model) or has_default_cache(model)
    if base in _checked or not _is_here(model) or is_compressed or (limit or sum(_CALLS)) < sum(_CALLS):
        return
    was_prepared = is_prepared(model)
    if not was_prepared:
        check_own_config(model)
        check_backend(model.config._attn_implementation)
    device = next(model.parameters()).device
    ids_BT = random_ids(model, sum(_CALLS), device)
    gpus = [device.index] if device.type == "cuda" else []
    with torch.no_grad(), evaluating(model), torch.random.fork_rng(devices=gpus):
        stock_BTE = _hidden_states(base, ids_BT, None)
        try:
            prepare(model)
            found_BTE = _hidden_states(base, ids_BT, _full_rank_cache(model, geometry, device))
            _check_equal(model, found_BTE, stock_BTE, ids_BT)
        except BaseException:  # whatever ended it, an interrupt, too, a model that was stock is stock again
            if not was_prepared:
                restore(model)
            raise
    _checked.add(base)


def least_allowed(dtype: torch.dtype) -> float:
    """By how much hidden states may differ in any case, as a root mean square in units of their own.

    Those of a model in fp64 may differ as those of one in fp32, in which coefficients and rotations are.
    """
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    return eps * (_UNITS_OF_HALVES if dtype.itemsize == 2 else _UNITS)


def _check_equal(model: PreTrainedModel, found_BTE: Tensor, stock_BTE: Tensor, ids_BT: Tensor) -> None:
    difference = Difference.between(found_BTE, stock_BTE)
    allowed = least_allowed(stock_BTE.dtype)
    if difference.rms <= allowed:
        return
    # A deep model enlarges its rounding. By how much shows in another order of the same work, which costs another pass.
    in_one_call_BTE = model.base_model(input_ids=ids_BT, use_cache=False)[0]
    rounding = Difference.between(in_one_call_BTE, stock_BTE).rms
    if difference.rms <= TIMES_ROUNDING * rounding:
        return
    config = model.config.get_text_config(decoder=True)
    allowed, dtype = max(allowed, TIMES_ROUNDING * rounding), str(stock_BTE.dtype).removeprefix("torch.")
    raise UserError(
        f"a {config.model_type} model does not compute the same with a compressed cache at full rank as by itself: hidden "
        f"states differ by up to {difference.largest:.2g} of their root mean square, {difference.rms:.2g} on average, where "
        f"{dtype} explains {allowed:.2g} on average; use a model of another family, or pass `self_check=False` if you know "
        f"better"
    )


def _hidden_states(base: torch.nn.Module, ids_BT: Tensor, cache: Cache | None) -> Tensor:
    """Of the calls one after another, (B, T, E); with no cache given the model makes its own."""
    hidden = []
    for part_BT in ids_BT.split(_CALLS, dim=1):
        output = base(input_ids=part_BT, use_cache=True, **{CACHE: cache})
        cache = output[CACHE]
        hidden.append(output[0])
    return torch.cat(hidden, dim=1)


def _full_rank_cache(model: PreTrainedModel, geometry: KVGeometry, device: torch.device) -> LowRankCache:
    """A cache that stores every token at once, keys before rotation, by an identity in place of bases."""
    basis = InitialBasis.identity(geometry.num_kv_heads, geometry.head_dim, is_compressed=True, device=device)
    config = WindowedConfig(update_period=1, num_sink_tokens=0, recent_window=0)
    plan = Plan(config=config, geometry=geometry, layers=dict.fromkeys(geometry.layers, (basis, basis)))
    return LowRankCache(model, {index: WindowedLayer(plan, index) for index in geometry.layers})


def random_ids(model: PreTrainedModel, count: int, device: torch.device) -> Tensor:
    """Token ids, (1, `count`), none of them one that the configuration gives a meaning."""
    config = model.config.get_text_config(decoder=True)
    special = {
        value
        for each in (model.config, config)
        for name, value in each.to_dict().items()
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }
    generator = torch.Generator().manual_seed(0)
    ids = torch.randperm(config.vocab_size, generator=generator, device="cpu")[: count + len(special)].tolist()
    chosen = [each for each in ids if each not in special] or ids
    return torch.tensor([(chosen * count)[:count]], device=device)


def _is_here(model: PreTrainedModel) -> bool:
    """Whether this process holds all weights of the model."""
    return not any(each.is_meta or hasattr(each, "ds_id") for each in model.parameters())
