"""Tensors of a calibration's file, held against what they should be."""

from pathlib import Path

import torch
from torch import Tensor

from lowrank_kv.utils.errors import UserError


def checked_tensor(
    flat: dict[str, Tensor], name: str, shape: tuple[int | None, ...], dtype: torch.dtype, path: Path
) -> Tensor:
    """A tensor of the file. A size that is None may be any but zero.

    Args:
        flat: what the file holds, by name.
        path: the file, for errors.

    Raises:
        UserError: it is missing, has another shape or dtype, or numbers that are not finite.
    """
    tensor = flat.get(name)
    if tensor is None:
        wrong = f"it has no {name}"
    elif len(tensor.shape) != len(shape) or not all(
        size == wanted or (wanted is None and size) for size, wanted in zip(tensor.shape, shape, strict=True)
    ):
        wanted = ", ".join("any" if each is None else str(each) for each in shape)
        wrong = f"{name} is {tuple(tensor.shape)}, not ({wanted})"
    elif tensor.dtype != dtype:
        found, needed = (str(each).removeprefix("torch.") for each in (tensor.dtype, dtype))
        wrong = f"{name} is of {found}, not {needed}"
    elif not bool(tensor.isfinite().all()):
        wrong = f"{name} has numbers that are not finite"
    else:
        return tensor
    raise UserError(f"{path} does not hold what its config.json says: {wrong}; calibrate again")
