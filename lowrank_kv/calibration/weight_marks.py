"""What tells that a calibration was made on other weights than a model's, such as those it was fine-tuned from."""

import hashlib

import torch
from transformers import PreTrainedModel

from lowrank_kv.hf.attention import TRANSFORM
from lowrank_kv.hf.geometry import attention_modules

_NUMBERS = 1 << 12  # about, of each matrix
_DTYPES = (torch.float32, torch.bfloat16)


def weight_marks(model: PreTrainedModel) -> dict[str, str]:
    """``INDEX.NAME`` of each matrix in the first and the last layer's attention module → a hash of some of its numbers.

    The numbers are rounded to bf16, so that the same weights have the same marks in fp32 and in bf16. Matrices in other
    dtypes, and such as are quantized, sharded or not loaded, have none.
    """
    modules = attention_modules(model)
    return {
        f"{index}.{name}": _mark(matrix)
        for index in (min(modules), max(modules))
        for name, matrix in modules[index].named_parameters()
        if matrix.dim() == 2 and _is_plain(matrix) and not matrix.is_meta and not name.startswith(TRANSFORM)
    }


def same_weights(marks: dict[str, str], model: PreTrainedModel) -> bool | None:
    """Whether the matrices that both have are those of the model of these marks; None where they have none in common."""
    found = weight_marks(model)
    common = marks.keys() & found.keys()
    return all(marks[name] == found[name] for name in common) if common else None


def _is_plain(matrix: torch.Tensor) -> bool:
    """Whether its numbers are its own: a quantized one rounds them, and may say the dtype that it computes in."""
    return matrix.dtype in _DTYPES and type(matrix.data) is torch.Tensor


def _mark(matrix: torch.Tensor) -> str:
    # An odd step: one that divides the width would see a few columns only.
    some_N = matrix.detach().flatten()[:: matrix.numel() // _NUMBERS | 1].to("cpu", torch.bfloat16)
    return hashlib.sha256(some_N.view(torch.int16).numpy().tobytes()).hexdigest()[:8]
