"""Which tensors a cache holds, found without asking it."""

import torch

from lowrank_kv.utils.derived import derived_from


def found_tensors(cache) -> set[int]:
    """Addresses of every non-empty tensor reachable from the cache's own objects; those of the model, the codecs (and what
    codecs give out, which must be their own tensors, and
    what is worked out of their decoders) and the calibrated bases, which all caches share, left out, and the
    layers' numbers, of 8 bytes, which an empty cache has, too."""
    sides = [
        layer.plan.pair(layer.index, layer.device) for layer in cache.compressed_layers() if hasattr(layer, "plan")
    ]
    shared = reachable_tensors(sides)
    for layer in cache.compressed_layers():
        shared.add(layer.number.untyped_storage().data_ptr())
        for codec in (layer.codec.key, layer.codec.value) if hasattr(layer, "codec") else ():
            given = [codec.decoder(layer.dtype, layer.device)]
            shared |= reachable_tensors(derived_from(given[0]))
            if (gate := codec.token_gate(layer.dtype)) is not None:
                given += [tensor for tensor in vars(gate).values() if isinstance(tensor, torch.Tensor)]
            shared |= {tensor.untyped_storage().data_ptr() for tensor in given}
    return reachable_tensors(cache) - shared


def reachable_tensors(root) -> set[int]:
    """Addresses of every non-empty tensor that an object leads to, but for those of modules and codecs."""
    seen, found, queue = set(), set(), [root]
    while queue:
        thing = queue.pop()
        if id(thing) in seen or isinstance(thing, torch.nn.Module):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            if thing.numel():
                found.add(thing.untyped_storage().data_ptr())
        elif isinstance(thing, dict):
            queue.extend(thing.values())
        elif isinstance(thing, list | tuple | set):
            queue.extend(thing)
        elif hasattr(thing, "__dict__") and not callable(thing):
            queue.extend(value for name, value in vars(thing).items() if name != "codec")
    return found
