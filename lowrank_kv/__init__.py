"""Low-rank compression of the key-value cache: `lowrank_kv.compress(model, "PRESET or DIR", …)` and `uncompress(model)`;
`save_cache(model, cache, FILE)` and `load_cache(model, FILE)`; `compile_decoding(model)`; the exception `UserError`.

The first two live in `lowrank_kv_auto`, which chooses the method. All are loaded when they are first asked for. The rest
is the core that both methods share. It knows neither: `dynakv` (learned ranks) and `ojakv` (online bases) build on it.

Two modules are the seams that the author of a method meets:

- `codec`: what a method gives a cache, a way from keys and values to coefficients and back, and how they are stored.
- `eviction`: which tokens of a prompt a cache keeps at all; it combines with every codec.

The subpackages, each of which may import those above it (the seams stand between `stores` and `ops`; tests/test_layout.py):

- `utils`: configuration classes, errors for users, atomic writes, texts as token blocks, run records.
- `bases`: second moments, the PCA bases made from them, and how a budget of coefficients becomes ranks.
- `stores`: tensors of coefficients that grow with the text, in 16, 8 or 4 bits or by a plan of bits, ragged, by the class of
  a token or in pages, and their bytes by kind.
- `ops`: the attention operations on coefficients. Each has a fp64 reference, a torch form and compiled ones (C, Triton).
- `hf`: all contact with transformers: model shapes, rotary embeddings, the attention function, compiling, checkpoints.
  `hf.cache` is the cache that `generate()` fills, and its layers; a method supplies a layer, or only a codec. In
  `hf.cache.windowed` first and latest tokens stay at full rank; bases may follow the text, and tokens have classes.
- `calibration`: second moments of a model's keys, values, queries and gradients on a text, in memory and on disk.

A decoded token passes through them so: the model calls the cache (`hf.cache`), which encodes the token's key and value with
its codec, appends them to a store (`stores`), and attends with an operation (`ops`) to everything stored.

Importing the package registers an attention function with transformers and changes nothing else.
"""

import importlib
from typing import Any

# Name → where it is defined.
_CALLS = {
    "compress": "lowrank_kv_auto",
    "uncompress": "lowrank_kv_auto",
    "save_cache": "lowrank_kv.hf.cache.saved_cache",
    "load_cache": "lowrank_kv.hf.cache.saved_cache",
    "compile_decoding": "lowrank_kv.hf.compile_decoding",
    "UserError": "lowrank_kv.utils.errors",
}
__all__ = sorted(_CALLS)


def __getattr__(name: str) -> Any:
    """The calls, loaded on first use: they need torch, and two of them both methods, which nothing below may import."""
    if name in _CALLS:
        return getattr(importlib.import_module(_CALLS[name]), name)
    if name == "__version__":  # None of a checkout that is not installed
        provenance = importlib.import_module("lowrank_kv.utils.provenance")
        return provenance.version_of(provenance.DISTRIBUTION)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), "__version__", *__all__})
