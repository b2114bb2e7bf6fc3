"""A compressed cache as a file: what it holds of its tokens, without the bases that all caches of a model share.

The file is one of safetensors. Its metadata say what the tensors are (:mod:`lowrank_kv.hf.cache.state_graph`) and what the
cache belongs to: a model of these weights, compressed with these bases and settings. Another one is refused, since it would
read other states from the coefficients.
"""

import base64
import hashlib
import importlib.metadata
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from transformers import PreTrainedModel

from lowrank_kv.hf.attention import PREPARED
from lowrank_kv.hf.cache.layer import CompressedLayer
from lowrank_kv.hf.cache.lowrank_cache import LowRankCache
from lowrank_kv.hf.cache.state_graph import StateReader, StateWriter, dtype_named
from lowrank_kv.hf.default_cache import new_default_cache
from lowrank_kv.hf.geometry import attention_modules
from lowrank_kv.hf.rope import RopeHistory
from lowrank_kv.utils.atomic_write import write_bytes
from lowrank_kv.utils.config import check_entries, require
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.provenance import DISTRIBUTION, weights_input

FORMAT = "lowrank-kv cache"
_HEADER = {
    "package": str,
    "cache": str,
    "dtype": str,
    "sequences": int,
    "tokens": int,
    "weights": str,
    "shared": str,
    "sha256": str,
}


def save_cache(model: PreTrainedModel, cache: LowRankCache, path: str | Path) -> None:
    """Write a cache to a file of about as many bytes as it holds (:attr:`LowRankCache.nbytes`, without room to grow).

    ``output = model.generate(…); lowrank_kv.save_cache(model, output.past_key_values, "prefix.safetensors")``

    Args:
        model: the one that filled it.
        cache: at least one token is in it.
        path: an earlier file there is replaced, whole or not at all.

    Raises:
        UserError: the cache is empty, of another model or of a kind that is not saved, or the disk refuses.
    """
    _check_kind(cache)
    layer = cache.compressed_layers()[0]
    require(layer.is_initialized and layer.get_seq_length() > 0, "cache", "empty", "a cache that has read some tokens")
    cache.check_not_cut_short()
    _check_own(model, cache)
    shared, shared_sha256 = _shared(cache)
    writer = StateWriter(shared)
    state = _packed(writer.write(_state(cache)))
    header = {
        "package": importlib.metadata.version(DISTRIBUTION),
        "cache": _kind_of(cache),
        "dtype": str(layer.dtype).removeprefix("torch."),
        "sequences": layer.batch_size,
        "tokens": layer.get_seq_length(),
        "weights": weights_input(model)["sha256"],
        "shared": shared_sha256,
        "sha256": _digest(state, writer.tensors),
    }
    write_bytes(path, save(writer.tensors, {"format": FORMAT, "header": json.dumps(header), "state": state}))


def load_cache(model: PreTrainedModel, path: str | Path, *, empty: LowRankCache | None = None) -> LowRankCache:
    """Read a cache that :func:`save_cache` wrote; the text goes on where it ended.

    ``cache = lowrank_kv.load_cache(model, "prefix.safetensors"); model.generate(**inputs, past_key_values=cache)``

    No code of the file is run. Load files that you trust all the same: what a cache holds is what the model reads.

    Args:
        model: compressed as the one that filled the cache was, with the same bases and settings, and of the same weights.
        path: the file.
        empty: an empty cache of this model, to be filled; None takes one as the model makes it by itself.

    Returns:
        `empty`, or the model's own cache, filled; on the model's device.

    Raises:
        UserError: there is no such file, or a damaged one, or one of another version of this package, another model, dtype,
            method, or of other bases or settings.
    """
    path = Path(path).expanduser()
    with torch.inference_mode(False), torch.no_grad():  # the text may go on outside of that mode
        return _load(model, path, empty)


def _load(model: PreTrainedModel, path: Path, empty: LowRankCache | None) -> LowRankCache:
    header, state, tensors = _read(path)
    cache = new_default_cache(model) if empty is None else empty
    _check_kind(cache)
    require(not cache.compressed_layers()[0].is_initialized, "empty", "filled", "a cache that has read nothing")
    _check_own(model, cache)
    expected = {
        "package": (importlib.metadata.version(DISTRIBUTION), "was written by another version of this package"),
        "cache": (_kind_of(cache), "is of another method"),
        "dtype": (str(model.dtype).removeprefix("torch."), "is of a model in another dtype"),
        "weights": (
            weights_input(model)["sha256"],
            "is of a model with other weights, or compressed by another compressor",
        ),
    }
    for name, (value, what) in expected.items():
        if header[name] != value:
            raise UserError(f"`{path}` {what} ({header[name]}, and here {value}); read its text again with this model")
    device = _start(cache, model, header)
    shared, shared_sha256 = _shared(cache)
    if header["shared"] != shared_sha256:
        raise UserError(
            f"`{path}` is of a cache with other bases or settings than this one; compress the model as it was when the file "
            f"was written, or read its text again"
        )
    _restore(cache, StateReader(tensors, shared, device).read(state))
    return cache


def _check_kind(cache: LowRankCache) -> None:
    require(isinstance(cache, LowRankCache), "cache", type(cache).__name__, "a compressed cache")
    if any(layer.saved is None for layer in cache.compressed_layers()):
        raise UserError(
            f"a {type(cache).__name__} is not saved; save one as `generate()` of the model fills it by itself"
        )


def _kind_of(cache: LowRankCache) -> str:
    return f"{type(cache).__module__}.{type(cache).__qualname__}"


def _check_own(model: PreTrainedModel, cache: LowRankCache) -> None:
    for layer, module in zip(cache.compressed_layers(), _modules(model, cache), strict=True):
        layer.check_owner(getattr(module, PREPARED).identity)


def _modules(model: PreTrainedModel, cache: LowRankCache) -> list[nn.Module]:
    modules = attention_modules(model)
    return [modules[index] for index in cache.geometry.layers]


def _start(cache: LowRankCache, model: PreTrainedModel, header: Mapping[str, Any]) -> torch.device:
    """Let the layers of an empty cache have sequences, as the first tokens do, and return where these are."""
    devices = [next(module.parameters()).device for module in _modules(model, cache)]
    require(len(set(devices)) == 1, "model", sorted(set(map(str, devices))), "on one device, to read a saved cache")
    shape = header["sequences"], cache.geometry.num_kv_heads, 0, cache.geometry.head_dim
    none_BG0D = torch.empty(shape, dtype=dtype_named(header["dtype"]), device=devices[0])
    for layer in cache.compressed_layers():
        layer.lazy_initialization(none_BG0D, none_BG0D)
    return devices[0]


def _shared(cache: LowRankCache) -> tuple[list[Any], str]:
    """What the sequences of a cache refer to and all caches like it share, in an order that depends on nothing else, and a
    hash of its content."""
    writer = StateWriter()
    said = json.dumps([writer.write(layer.shared_by_sequences()) for layer in cache.compressed_layers()])
    return writer.visited, _digest(said, writer.tensors)


def _state(cache: LowRankCache) -> dict[str, Any]:
    """All that a cache holds of its tokens; layers of the model's own kinds are taken whole."""
    layers = [_saved(layer) if isinstance(layer, CompressedLayer) else layer and vars(layer) for layer in cache.layers]
    return {"layers": layers, "history": cache.history and _saved(cache.history)}


def _saved(part: CompressedLayer | RopeHistory) -> dict[str, Any]:
    return {name: getattr(part, name) for name in part.saved}


def _restore(cache: LowRankCache, state: Mapping[str, Any]) -> None:
    for part, saved in [*zip(cache.layers, state["layers"], strict=True), (cache.history, state["history"])]:
        for name, value in (saved or {}).items():
            setattr(part, name, value)


def _digest(said: str, tensors: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256(said.encode())
    for name, tensor in tensors.items():
        found.update(f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        found.update(tensor.cpu().flatten().view(torch.uint8).numpy())
    return found.hexdigest()


def _read(path: Path) -> tuple[dict[str, Any], Any, dict[str, Tensor]]:
    """Header, state and tensors of a file. Raises :class:`UserError` where it is not whole."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dict)
    except (OSError, SafetensorError) as error:
        raise UserError(f"`{path}` cannot be read ({error}); save the cache again") from error
    if metadata.get("format") != FORMAT:
        raise UserError(f"`{path}` is no saved cache; `lowrank_kv.save_cache` writes them")
    try:
        header, state = json.loads(metadata["header"]), metadata["state"]
        in_order = {str(number): tensors[str(number)] for number in range(len(tensors))}
    except (KeyError, json.JSONDecodeError) as error:
        raise UserError(f"`{path}` is damaged ({error}); save the cache again") from error
    check_entries(header, _HEADER, path)
    if header["sha256"] != _digest(state, in_order):
        raise UserError(f"`{path}` is damaged: its SHA-256 is not the recorded one; save the cache again")
    return header, _unpacked(state), tensors


def _packed(value: Any) -> str:
    """JSON in a tenth of its bytes: it says the same of every layer, and would outweigh the tensors of a short text."""
    return base64.b85encode(zlib.compress(json.dumps(value).encode())).decode()


def _unpacked(packed: str) -> Any:
    return json.loads(zlib.decompress(base64.b85decode(packed)))
