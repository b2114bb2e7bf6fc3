"""What all Triton kernels of the package agree on."""

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Whether kernels run in Triton's interpreter, on a CPU and one program at a time (TRITON_INTERPRET=1 at import).
INTERPRETED: bool = triton.knobs.runtime.interpret
# Scores are kept times log2(e), since the hardware's exponential has base 2.
LOG2E = tl.constexpr(math.log2(math.e))
# Programs for each multiprocessor that a split of the sequence aims at.
PROGRAMS_PER_MULTIPROCESSOR = 4
MAX_SPLITS = 64

_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def computing_type(dtype: torch.dtype) -> tl.dtype:
    """The type operands have in a kernel's matrix products."""
    # The interpreter computes wrongly in bf16.
    return tl.float32 if INTERPRETED and dtype == torch.bfloat16 else _TYPES[dtype]


_TUNED = []  # kernels that are tuned when they first run


def tuned(*choices: triton.Config, key: list[str]) -> Callable:
    """Decorator of a kernel of which a GPU times the choices, once for each value of the arguments in `key`. The
    interpreter, where time means nothing, takes the first."""

    def decorate(kernel: Any) -> Any:
        _TUNED.append(triton.autotune(list(choices[:1] if INTERPRETED else choices), key=key)(kernel))
        return _TUNED[-1]

    return decorate


def forget_tuning() -> None:
    """Let kernels be tuned anew: what a nearly empty cache was best served by may not be best for a full one."""
    for tuner in _TUNED:
        tuner.cache.clear()


def tuning_class(room: int, *widths: int) -> int:
    """What a kernel over growing rows is tuned by beside its blocks: the room, so that it is tuned a few times and not at
    every length, and, as the sign, whether all widths and strides are multiples of 16: rows are then read in wide loads,
    and what fits into shared memory differs."""
    is_wide = all(width % 16 == 0 for width in widths)
    return triton.next_power_of_2(room) * (1 if is_wide else -1)


def block(size: int) -> int:
    """The smallest block that holds `size` and that a matrix product takes."""
    return max(16, triton.next_power_of_2(size))


def multiprocessors(device: torch.device) -> int:
    """Of a GPU; 1 elsewhere."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def splits_of(blocks: int, beside: int, device: torch.device, *, programs: int = PROGRAMS_PER_MULTIPROCESSOR) -> int:
    """Parts to cut a sequence of at most `blocks` blocks into, when `beside` programs run for each part; `programs` for
    each multiprocessor.

    Told by capacities alone, never by lengths, which only the device knows.
    """
    wanted = -(-programs * multiprocessors(device) // beside)
    return max(1, min(blocks, wanted, MAX_SPLITS))


def rows_together(mask: Tensor) -> Tensor:
    """The same with its last dim contiguous, as kernels read a mask; a copy only where it is not."""
    return mask if mask.stride(-1) == 1 else mask.contiguous()


def sequence_stride(tensor: Tensor) -> int:
    """From one sequence of a batch to the next; 0 where all share one."""
    return 0 if tensor.shape[0] == 1 else tensor.stride(0)


def first_strides(tensor: Tensor | None, count: int) -> tuple[int, ...]:
    """The first `count` strides of a tensor, as :func:`sequence_stride` has the one of sequences; zeros of no tensor."""
    return (0,) * count if tensor is None else (sequence_stride(tensor), *tensor.stride()[1:count])


@triton.jit
def capped(score, softcap):
    """softcap · tanh(score / softcap) (Gemma 2, section 2)."""
    return softcap * (1.0 - 2.0 / (tl.exp(2.0 / softcap * score) + 1.0))


@triton.jit
def online_softmax_step(score_PN, max_P, sum_P):
    """One step of a running softmax over scores times log2 e: weights relative to the new maxima, what sums so far fade by,
    the new maxima and the new sums of weights."""
    largest_P = tl.maximum(max_P, tl.max(score_PN, 1))
    # Where nothing has been seen yet there is nothing to be relative to.
    base_P = tl.where(largest_P == float("-inf"), 0.0, largest_P)
    weight_PN = tl.exp2(score_PN - base_P[:, None])
    rescale_P = tl.exp2(max_P - base_P)
    return weight_PN, rescale_P, largest_P, sum_P * rescale_P + tl.sum(weight_PN, 1)
