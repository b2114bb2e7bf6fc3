"""By what two caches are known to share bases and settings, which each of two processes has made for itself.

Another number of threads, another processor or another device gives bases that differ in their last digits: those read each
other's coefficients as well as their own. Where eigenvectors changed their signs or turned among themselves they would read
other states. So settings, shapes and whole numbers must be equal, and of matrices a few random sums about equal.

Shapes: K numbers of a matrix that are read, S sums of them.
"""

import functools
import hashlib
import json
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lowrank_kv.hf.cache.layer import CompressedLayer
from lowrank_kv.hf.cache.state_graph import StateWriter

_SUMS = 4
_SAMPLE = 16384  # of a matrix; a column of a basis of 1,152 has about 14 of them
# Such a column with another sign moves a sum by a twentieth; digits that rounding changes, by a millionth.
_TOLERANCE = 1e-3


def shared_and_marks(layers: Iterable[CompressedLayer]) -> tuple[list[Any], dict[str, Any]]:
    """What the sequences of started layers refer to and all caches like theirs share, in the same order in each, and marks
    of it for :func:`agree`, as JSON: `exact`, a hash, and `sums` of each layer."""
    shared, exact, sums = [], hashlib.sha256(), []
    for layer in layers:
        writer = StateWriter(repeats=True)  # on another device what is one object may be several
        exact.update(json.dumps(writer.write(layer.shared_by_sequences())).encode())
        shared += writer.visited
        found_S = torch.zeros(_SUMS + 1, dtype=torch.float64, device="cpu")
        for place, tensor in enumerate(writer.tensors.values()):
            exact.update(f"\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
            if tensor.is_floating_point():
                found_S += _sums(tensor, place)
            else:
                exact.update(tensor.cpu().flatten().numpy().tobytes())
        sums.append(found_S.tolist())
    return shared, {"exact": exact.hexdigest(), "sums": sums}


def agree(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether the marks are those of the same bases and settings."""
    if one["exact"] != other["exact"] or len(one["sums"]) != len(other["sums"]):
        return False
    pairs = zip(sum(one["sums"], []), sum(other["sums"], []), strict=True)
    return all(math.isclose(*pair, rel_tol=0, abs_tol=_TOLERANCE) for pair in pairs)


def _sums(tensor: Tensor, place: int) -> Tensor:
    """Random sums of a sample of a tensor's numbers over its norm, and the norm's logarithm, by a sign of the place,
    (S + 1,) fp64."""
    picked_K, weights_SK = _sample(tensor.numel(), place)
    sample_K = tensor.detach().flatten()[picked_K.to(tensor.device)].cpu().double()
    norm = float(sample_K.norm()) or 1.0
    logarithm = weights_SK.new_tensor([(-1) ** place * math.log(norm)])
    return torch.cat([weights_SK @ sample_K / norm, logarithm])


@functools.lru_cache(maxsize=16)
def _sample(count: int, place: int) -> tuple[Tensor, Tensor]:
    """Which of `count` numbers are summed, (K,) int64, and the weights of each sum, (S, K) fp64; everywhere the same."""
    generator, cpu = torch.Generator().manual_seed(place), torch.device("cpu")  # whatever torch's default is
    # At random: numbers at a fixed step can be those of a few columns.
    if count > _SAMPLE:
        picked_K = torch.randint(count, (_SAMPLE,), generator=generator, dtype=torch.int64, device=cpu)
    else:
        picked_K = torch.arange(count, dtype=torch.int64, device=cpu)
    return picked_K, torch.randn(_SUMS, len(picked_K), generator=generator, dtype=torch.float64, device=cpu)
