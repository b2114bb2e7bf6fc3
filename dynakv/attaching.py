"""Put compressors on a stock model, and take them off again."""

from typing import Any

import torch
from transformers import PreTrainedModel

from dynakv.cache import DynaKVCache
from dynakv.config import METHOD, DynaKVConfig
from dynakv.layer_compressor import layer_compressor
from dynakv.model_compressors import compressors, settings_of, token_compressors
from lowrank_kv.bases.rank_allocation import check_rank
from lowrank_kv.hf import full_checkpoint
from lowrank_kv.hf.attention import PREPARED, TRANSFORM
from lowrank_kv.hf.default_cache import set_default_cache
from lowrank_kv.hf.exact_tokens import ExactTokens
from lowrank_kv.hf.geometry import attention_modules, device_of_module, geometry_of, model_within
from lowrank_kv.hf.prepare import prepare, restore
from lowrank_kv.utils.config import require, to_dict
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.values import check_type


@torch.inference_mode(False)  # parameters that were made in it could be neither served nor trained, not even later
def add_compressors(model: PreTrainedModel, config: DynaKVConfig) -> PreTrainedModel:
    """Give every compressed layer an fp32 identity projection and an unset gate, on the layer's own device.

    The caller fills them: from moments, from a checkpoint, or by weight loading.
    """
    geometry = geometry_of(model)
    check_type("config", config, DynaKVConfig, "settings, such as DynaKVConfig(rank_policy='gate')")
    _check_granularity(config, geometry.width, "compressor.granularity")
    modules = attention_modules(model)
    for index in geometry.layers:
        if TRANSFORM in modules[index]._modules:
            raise UserError(f"layer {index} already has a compressor; call dynakv.detach(model) first")
    try:
        for index in geometry.layers:
            with device_of_module(modules[index], model):
                layer = layer_compressor(geometry, config, index)
            modules[index].add_module(TRANSFORM, layer.to(torch.float32).train(model.training))
    except BaseException:  # whatever ended it, an interrupt, too: no layer has a compressor, or all have
        _remove_compressors(model)
        raise
    return model


def open_gates(model: PreTrainedModel) -> None:
    """Keep every coefficient of every token: the model then equals the uncompressed one.

    Raises:
        UserError: a plan of bits says what is kept, and rounds it.
    """
    settings = settings_of(model)
    remedy = "one with gates or ranks to open; a plan of bits that dropped nothing would be the uncompressed cache"
    require(not settings.has_plan, "rank_policy", settings.rank_policy, remedy)
    for compressor in token_compressors(model):
        compressor.gate.open()


def use_dynakv_cache(model: PreTrainedModel) -> PreTrainedModel:
    """Let `generate()`, and plain calls with ``use_cache``, fill a :class:`DynaKVCache`."""
    compressors(model)
    return set_default_cache(prepare(model), DynaKVCache)


def set_exact_tokens(model: PreTrainedModel, exact_tokens: ExactTokens | None) -> None:
    """Let each token of a pass without a cache attend to its first and latest tokens as they are, as a cache keeps them.

    Args:
        model: with compressors.
        exact_tokens: which ones; None for none.

    Raises:
        UserError: `exact_tokens` is something else, or the model's own attention takes no such mask.
    """
    check_type("exact_tokens", exact_tokens, ExactTokens | None, "ExactTokens(), with other counts or without, or None")
    for index in compressors(model):
        getattr(attention_modules(model)[index], PREPARED).set_exact_tokens(exact_tokens)


def configure(model: PreTrainedModel, **overrides: Any) -> PreTrainedModel:
    """Change how a model with compressors serves; caches made before keep to what they were made with.

    Such changes are ``cache_dtype="int8"`` or ``eviction={"keep_ratio": 0.3}``.

    Raises:
        UserError: an unknown key, a value out of range, or an override that would change nothing (see
            :meth:`DynaKVConfig.overridden`); the settings stay as they were.
    """
    settings = settings_of(model).overridden(**overrides)
    _check_granularity(settings, geometry_of(model).width, "granularity")
    for compressor in token_compressors(model):
        compressor.config = settings
    full_checkpoint.declare(model, METHOD, to_dict(settings))
    return model


def detach(model: PreTrainedModel) -> PreTrainedModel:
    """Take the compressors off; the model is, and saves itself as, the stock one it was before.

    A wrapper of the model serves as well (:func:`lowrank_kv.hf.geometry.model_within`). Returns what it was given.
    """
    stock = model_within(model)
    _remove_compressors(stock)
    restore(stock)
    if full_checkpoint.is_declared(stock, METHOD):
        del stock.config.quantization_config
    return model


def _check_granularity(config: DynaKVConfig, width: int, key: str) -> None:
    """Raise :class:`UserError`, which names `key`, where ranks would be multiples of more coefficients than there are."""
    if not config.has_plan:
        check_rank(config.granularity, width, key)


def _remove_compressors(model: PreTrainedModel) -> None:
    for module in attention_modules(model).values():
        module._modules.pop(TRANSFORM, None)
