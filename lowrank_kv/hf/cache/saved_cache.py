"""A compressed cache as a file: what it holds of its tokens, without the bases that all caches of a model share.

The file is one of safetensors. Its metadata say what the tensors are (:mod:`lowrank_kv.hf.cache.state_graph`) and what the
cache belongs to: a model of these weights, compressed with these bases and settings. Another one is refused, since it would
read other states from the coefficients.
"""

import base64
import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from lowrank_kv.hf.attention import PREPARED, is_prepared
from lowrank_kv.hf.cache.layer import CompressedLayer
from lowrank_kv.hf.cache.lowrank_cache import LowRankCache
from lowrank_kv.hf.cache.shared_marks import agree, shared_and_marks
from lowrank_kv.hf.cache.state_graph import StateReader, StateWriter, dtype_named
from lowrank_kv.hf.default_cache import new_default_cache
from lowrank_kv.hf.geometry import attention_modules, check_not_offloaded, device_of_module, geometry_of
from lowrank_kv.hf.rope import RopeHistory
from lowrank_kv.utils.atomic_write import write_bytes
from lowrank_kv.utils.config import check_entries, require
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.paths import path_of
from lowrank_kv.utils.provenance import DISTRIBUTION, model_input, version_of, weights_input
from lowrank_kv.utils.values import check_type

FORMAT = "lowrank-kv cache"
_STATE = 2  # raised where an attribute of what holds tokens is renamed: files name them
_HEADER = {
    "versions": dict,
    "cache": str,
    "model": str,
    "weights": str,
    "dtype": str,
    "states": str,
    "shared": dict,
    "sequences": int,
    "tokens": int,
    "sha256": str,
}
# Header's key → what a cache is of that has another.
_OTHERS = {
    "versions": "was written by other versions",
    "cache": "is of another method",
    "model": "is of a model of another configuration",
    "dtype": "is of a model in another dtype",
    "weights": "is of a model with other weights, or with another compressor",
}
_HASHES = "model", "weights"  # of the header, which tell a reader nothing
# What a state that this module did not write may do to who reads it.
_MISREAD = (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError, zlib.error)


def save_cache(model: PreTrainedModel, cache: LowRankCache, path: str | Path) -> None:
    """Write a cache to a file of about as many bytes as it holds (:attr:`LowRankCache.nbytes`, without room to grow).

    ``output = model.generate(…); lowrank_kv.save_cache(model, output.past_key_values, "prefix.safetensors")``

    Args:
        model: the one that filled it.
        cache: at least one token is in it.
        path: an earlier file there is replaced, whole or not at all.

    Raises:
        UserError: the cache is empty, of another model or of a kind that is not saved, the model is on several devices, or
            the disk refuses.
    """
    target = path_of(path)
    _check(model, cache, "cache")
    layer, tokens = cache.compressed_layers()[0], _tokens(cache)
    require(tokens > 0, "cache", f"{tokens} tokens", "a cache that has read some")
    cache.check_not_cut_short()
    shared, marks = shared_and_marks(cache.compressed_layers())
    writer = StateWriter(shared)
    state = _packed(writer.write(_state(cache)))
    header = {
        **_belongs_to(model, cache),
        "states": str(layer.dtype).removeprefix("torch."),  # under autocast another dtype than the model's
        "shared": marks,
        "sequences": layer.batch_size,
        "tokens": tokens,
    }
    header["sha256"] = _digest(header, state, writer.tensors)
    metadata = {"format": FORMAT, "header": json.dumps(header), "state": state}
    write_bytes(target, save(writer.tensors, metadata))


def load_cache(model: PreTrainedModel, path: str | Path, *, empty: LowRankCache | None = None) -> LowRankCache:
    """Read a cache that :func:`save_cache` wrote; the text goes on where it ended.

    ``cache = lowrank_kv.load_cache(model, "prefix.safetensors"); model.generate(**inputs, past_key_values=cache)``

    Load files that you trust, as you do with a model: damage is found by a hash, but attention reads what the file says.

    Args:
        model: compressed as the one that filled the cache was, with the same bases and settings, and of the same weights.
        path: the file.
        empty: an empty cache of this model, to be filled; None takes one as the model makes it by itself. Where a file is
            refused it stays empty.

    Returns:
        `empty`, or the model's own cache, filled; on the model's device.

    Raises:
        UserError: there is no such file, or a damaged one, or one of another version of this package (of transformers, where
            some layers are its own), of another model, dtype or method, or of other bases or settings.
    """
    path = path_of(path)
    with torch.inference_mode(False), torch.no_grad():  # the text may go on outside of that mode
        header, state, tensors = _read(path)
        cache = new_default_cache(model) if empty is None else empty
        _check(model, cache, "empty")
        require(_tokens(cache) == 0, "empty", f"{_tokens(cache)} tokens", "a cache that has read nothing")
        here = _belongs_to(model, cache)
        for name, what in _OTHERS.items():
            if header[name] != here[name]:
                both = f" ({header[name]}, here {here[name]})" if name not in _HASHES else ""
                raise UserError(f"`{path}` {what}{both}; let this model read its text again")
        try:
            _fill(cache, model, path, header, state, tensors)
        except BaseException:  # an interrupt, too
            cache.reset()
            raise
    return cache


def _fill(
    cache: LowRankCache,
    model: PreTrainedModel,
    path: Path,
    header: Mapping[str, Any],
    state: str,
    tensors: Mapping[str, Tensor],
) -> None:
    [device] = _devices(model)
    layers = cache.compressed_layers()
    shape = header["sequences"], cache.geometry.num_kv_heads, 0, cache.geometry.head_dim
    none_BG0D = torch.empty(shape, dtype=dtype_named(header["states"]), device=device)
    for layer in layers:  # as the first tokens let them start
        layer.lazy_initialization(none_BG0D, none_BG0D)
    shared, marks = shared_and_marks(layers)
    try:
        is_alike = agree(header["shared"], marks)
        if is_alike:
            _restore(cache, StateReader(tensors, shared, device).read(_unpacked(state)))
            found = _tokens(cache), len(layers[0].sequences)
    except _MISREAD as error:
        raise UserError(f"`{path}` is damaged ({type(error).__name__}: {error}); save the cache again") from error
    if not is_alike:
        raise UserError(
            f"`{path}` is of a cache with other bases or settings than this one; compress the model as it was when the file "
            f"was written, or let it read the text again"
        )
    if found != (header["tokens"], header["sequences"]):
        raise UserError(f"`{path}` is damaged: it holds {found}, tokens and sequences; save the cache again")


def _check(model: PreTrainedModel, cache: LowRankCache, name: str) -> None:
    """Raise :class:`UserError` for a cache, the argument of this name, that is not of this model or is not saved."""
    what = "a compressed cache, as a model fills behind `lowrank_kv.compress(model, …)`"
    check_type(name, cache, LowRankCache, what)
    if any(layer.saved is None for layer in cache.compressed_layers()):
        raise UserError(
            f"a {type(cache).__name__} is not saved; save one as `generate()` of the model fills it by itself"
        )
    geometry_of(model).check_equal(cache.geometry, f"`{name}`")
    if not is_prepared(model):
        raise UserError("`model` is not compressed, as the cache's is; call lowrank_kv.compress(model, …) first")
    modules = attention_modules(model)
    for index, layer in zip(cache.geometry.layers, cache.compressed_layers(), strict=True):
        layer.check_owner(getattr(modules[index], PREPARED).identity)
    for name, tensor in model.state_dict().items():  # all of them say what the file is of
        check_not_offloaded(tensor.device, f"`{name}`")
    devices = sorted(map(str, _devices(model)))
    require(len(devices) == 1, "model", ", ".join(devices), "on one device, to save or load a cache")


def _tokens(cache: LowRankCache) -> int:
    return cache.compressed_layers()[0].get_seq_length()


def _devices(model: PreTrainedModel) -> set[torch.device]:
    """Where the attention modules are whose states are compressed."""
    modules = attention_modules(model)
    return {device_of_module(modules[index], model) for index in geometry_of(model).layers}


def _belongs_to(model: PreTrainedModel, cache: LowRankCache) -> dict[str, Any]:
    """What a cache is of; a file of another is refused."""
    versions = {DISTRIBUTION: version_of(DISTRIBUTION), "state": _STATE}
    if any(_native(cache)):
        versions["transformers"] = transformers.__version__
    return {
        "versions": versions,
        "cache": f"{type(cache).__module__}.{type(cache).__qualname__}",
        # An attached compressor may be told of there; its settings are compared by themselves.
        "model": model_input(model, leave_out=["quantization_config"])["sha256"],
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights": weights_input(model)["sha256"],
    }


def _native(cache: LowRankCache) -> Iterator[CacheLayerMixin]:
    """The layers of the model's own kinds."""
    return (layer for layer in cache.layers if layer is not None and not isinstance(layer, CompressedLayer))


def _state(cache: LowRankCache) -> dict[str, Any]:
    """All that a cache holds of its tokens; layers of the model's own kinds are taken whole."""
    return {
        "compressed": [_saved(layer) for layer in cache.compressed_layers()],
        "native": [vars(layer) for layer in _native(cache)],
        "history": None if cache.history is None else _saved(cache.history),
    }


def _saved(part: CompressedLayer | RopeHistory) -> dict[str, Any]:
    return {name: getattr(part, name) for name in part.saved}


def _restore(cache: LowRankCache, state: Mapping[str, Any]) -> None:
    for layer, saved in zip(cache.compressed_layers(), state["compressed"], strict=True):
        _set(layer, saved)
    for layer, saved in zip(_native(cache), state["native"], strict=True):
        if any(callable(getattr(type(layer), name, None)) for name in saved):
            raise ValueError("attributes that are functions")
        vars(layer).update(saved)
    if cache.history is not None:
        _set(cache.history, state["history"])


def _set(part: CompressedLayer | RopeHistory, saved: Mapping[str, Any]) -> None:
    for name in part.saved:
        setattr(part, name, saved[name])


def _digest(header: Mapping[str, Any], state: str, tensors: Mapping[str, Tensor]) -> str:
    said = {name: value for name, value in header.items() if name != "sha256"}
    found = hashlib.sha256(f"{json.dumps(said, sort_keys=True)}\0{state}".encode())
    for name, tensor in tensors.items():
        found.update(f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        found.update(tensor.cpu().flatten().view(torch.uint8).numpy())
    return found.hexdigest()


def _read(path: Path) -> tuple[dict[str, Any], str, dict[str, Tensor]]:
    """Header, state and tensors of a file. Raises :class:`UserError` where there is none, or it is not whole."""
    if not path.is_file():
        raise UserError(f"`{path}` is no file; give the name that `lowrank_kv.save_cache` wrote to")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # Copies: the file may be overwritten while its tokens are used.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (no dict)
    except (OSError, SafetensorError) as error:
        raise UserError(f"`{path}` cannot be read ({error}); save the cache again") from error
    if metadata.get("format") != FORMAT:
        raise UserError(f"`{path}` is no saved cache; `lowrank_kv.save_cache` writes them")
    try:
        header, state = json.loads(metadata["header"]), metadata["state"]
        in_order = {str(number): tensors[str(number)] for number in range(len(tensors))}
    except (KeyError, json.JSONDecodeError) as error:
        raise UserError(f"`{path}` is damaged ({error}); save the cache again") from error
    require(isinstance(header, dict), f"header of {path}", header, "a JSON object")
    check_entries(header, _HEADER, path)
    if header["sha256"] != _digest(header, state, in_order):
        raise UserError(f"`{path}` is damaged: its SHA-256 is not the recorded one; save the cache again")
    return header, state, tensors


def _packed(value: Any) -> str:
    """JSON in a tenth of its bytes: it says the same of every layer, and would outweigh the tensors of a short text."""
    return base64.b85encode(zlib.compress(json.dumps(value).encode())).decode()


def _unpacked(packed: str) -> Any:
    return json.loads(zlib.decompress(base64.b85decode(packed)))
