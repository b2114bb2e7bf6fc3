"""Reading a prompt again, or loading a cache that was saved after it, of compressed caches and of an uncompressed one.

    python -m benchmarks.saved_prefix --bases bases/demo --presets adaptive-mixed@0.1 --model MODEL --context 2048

An uncompressed cache is saved as its keys and values, in one file of safetensors. Before timing, what was loaded must decode
a token as what was saved does. Files are in the system's memory when they are loaded.
"""

import copy
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from benchmarks.caches import DYNAMIC, PAGED, PREALLOCATED, argument_parser, candidates, context_ids, prefill
from benchmarks.harness import check_close, count, interleaved_ms, write_results
from lowrank_kv.hf.cache.saved_cache import load_cache, save_cache
from lowrank_kv.utils import cli


def main(argv: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--context", type=count, default=2048, help="tokens of the prompt [default %(default)s]")
    parser.add_argument("--repeats", type=count, default=3, help="of each [default %(default)s]")
    arguments = parser.parse_args(argv)

    found = candidates(arguments, arguments.context + 1)
    # The file of the one would be that of the other uncompressed cache; pages are not saved.
    for name in (PREALLOCATED, PAGED):
        found.pop(name, None)
    text = context_ids(arguments, found[DYNAMIC][0], arguments.context + 1)
    ids, token = text.split([arguments.context, 1], dim=1)
    with tempfile.TemporaryDirectory() as directory:
        files = {name: Path(directory, name) for name in found}
        read, saved, loaded = {}, {}, {}
        for name, (model, make_cache) in found.items():
            cache = prefill(model, ids, make_cache())
            save, load = save_cache, functools.partial(_load_into, make_cache)
            if name == DYNAMIC:
                save, load = _save_states, _load_states
            save(model, cache, files[name])
            _check(name, model, cache, load(model, files[name]), token)
            read[name] = functools.partial(_read, model, make_cache, ids)
            saved[name] = functools.partial(save, model, cache, files[name])
            loaded[name] = functools.partial(load, model, files[name])
        times = [interleaved_ms(calls, repeats=arguments.repeats) for calls in (read, saved, loaded)]
        sizes = {name: path.stat().st_size for name, path in files.items()}
    rows = [
        {
            "method": name,
            "context": arguments.context,
            "ms_to_read": to_read,
            "ms_to_save": to_save,
            "ms_to_load": to_load,
            "file_bytes": sizes[name],
            "load_over_read": to_load / to_read,
            "file_over_uncompressed": sizes[name] / sizes[DYNAMIC],
        }
        for name, (to_read, to_save, to_load) in {name: [each[name] for each in times] for name in found}.items()
    ]
    for row in rows:
        print(
            "{method:>20}  read {ms_to_read:8.0f} ms  save {ms_to_save:6.0f} ms  load {ms_to_load:6.0f} ms, "
            "{load_over_read:.3f}×  {file_bytes:12,} bytes, {file_over_uncompressed:.3f}×".format(**row)
        )
    if arguments.results:
        write_results(arguments.results, "saved_prefix", vars(arguments), rows, model=found[DYNAMIC][0])


def _read(model: PreTrainedModel, make_cache: Callable[[], Cache], ids: Tensor) -> Cache:
    return prefill(model, ids, make_cache())


def _load_into(make_cache: Callable[[], Cache], model: PreTrainedModel, path: Path) -> Cache:
    return load_cache(model, path, empty=make_cache())


def _save_states(model: PreTrainedModel, cache: DynamicCache, path: Path) -> None:
    layers = enumerate(cache.layers)
    save_file({f"{index}.{name}": getattr(layer, name) for index, layer in layers for name in ("keys", "values")}, path)


def _load_states(model: PreTrainedModel, path: Path) -> DynamicCache:
    states, cache = load_file(path, device=str(model.device)), DynamicCache(config=model.config)
    for index in range(len(cache.layers)):
        cache.update(states[f"{index}.keys"], states[f"{index}.values"], index)
    return cache


@torch.no_grad()
def _check(name: str, model: PreTrainedModel, cache: Cache, loaded: Cache, token: Tensor) -> None:
    """A token behind what was loaded is that behind what was saved."""
    logits = [model(token, past_key_values=each).logits for each in (copy.deepcopy(cache), loaded)]
    check_close(name, *logits)


if __name__ == "__main__":
    cli.run(main)
