"""Projections of a checkpoint that is shared, as integers of eight bits.

Of a projection U alone is kept: an integer for each entry, one scale for each of its rows, which is a number of a key or
value, and one for each of its columns, which is a coefficient's direction. In a row of several layers numbers differ a
thousandfold in size, and scales of columns alone would round away the entries of the largest (docs/log/bit-plans.md). The
way back is taken anew from what was kept, so that U · V stays I whatever was rounded.

Shapes: C joint width.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from dynakv.projection import RELATIVE, Projection
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.torch_defaults import fp32_on_cpu

PLACE = ".projection."
CODES, SCALE = f"{PLACE}codes", f"{PLACE}scale"
_LARGEST = 127
# Which of a projection's kinds have one matrix and its inverse.
PACKABLE = ("exact", RELATIVE)


def is_packed(names: Iterable[str]) -> bool:
    """Whether tensors of these names hold packed projections."""
    return any(name.endswith(CODES) for name in names)


@torch.no_grad()
@fp32_on_cpu()
def packed(state: Mapping[str, Tensor], decoder: str) -> dict[str, Tensor]:
    """The tensors of a compressor with its projections packed.

    Args:
        state: as :func:`dynakv.checkpoint.compressor_state` names them.
        decoder: kind of the projections, one of :data:`PACKABLE`.

    Returns:
        `layers.….projection.codes` (C, C) int8 and `….scale` (2, C) fp32, of rows and of columns, for each projection, and
        all other tensors.
    """
    found = {name: tensor for name, tensor in state.items() if PLACE not in name}
    for projection in projections_in(state, decoder):
        place = projection.name
        basis_CC, _ = projection.fixed_matrices(torch.float64, torch.device("cpu"))
        # A row or column of zeros, which no projection that can be inverted has, would be divided by zero.
        least = torch.finfo(torch.float32).tiny
        row_C = basis_CC.square().mean(dim=1).sqrt().clamp_min(least).float()
        even_CC = basis_CC / row_C.double()[:, None]
        column_C = (even_CC.abs().amax(dim=0) / _LARGEST).clamp_min(least).float()
        found[place + CODES] = (even_CC / column_C.double()).round().clamp(-_LARGEST, _LARGEST).to(torch.int8)
        found[place + SCALE] = torch.stack([row_C, column_C])
    return found


@torch.no_grad()
@fp32_on_cpu()
def unpacked(state: Mapping[str, Tensor], decoder: str, widths: Mapping[str, int], origin: str) -> dict[str, Tensor]:
    """The tensors of a compressor from those of :func:`packed`; others are returned as they are.

    Args:
        widths: where each projection is, such as `layers.0.key` → C.
        origin: of the tensors, for errors.

    Raises:
        UserError: a projection has another form than :func:`packed` gives it, or cannot be inverted.
    """
    found = {name: tensor for name, tensor in state.items() if not name.endswith((CODES, SCALE))}
    for name, code_CC in state.items():
        if not name.endswith(CODES):
            continue
        place = name.removesuffix(CODES)
        scale, width = state.get(place + SCALE), widths.get(place, 0)
        _check(code_CC, scale, width, f"{name} of `{origin}`")
        if scale.ndim == 1:  # files of older versions have scales of columns alone
            scale = torch.stack([torch.ones(width), scale])
        row_C, column_C = scale.double()
        basis_CC = row_C[:, None] * code_CC.double() * column_C
        if decoder != RELATIVE:
            found[f"{place}{PLACE}weight"] = basis_CC.float()
            continue
        inverse_CC, failed = torch.linalg.inv_ex(basis_CC)
        if failed:
            raise UserError(
                f"{name} of `{origin}` cannot be inverted; the file is damaged: export the checkpoint again"
            )
        found[f"{place}{PLACE}start"] = basis_CC.float()
        found[f"{place}{PLACE}start_inverse"] = inverse_CC.float()
        found[f"{place}{PLACE}weight"] = torch.zeros(width, width)
    return found


def projections_in(state: Mapping[str, Tensor], decoder: str) -> Iterator[Projection]:
    """The projections of a compressor's tensors, each named by where it is in them, such as `layers.0.key`."""
    for name in state:
        if not name.endswith(f"{PLACE}weight"):
            continue
        place = name.removesuffix(f"{PLACE}weight")
        projection = Projection(len(state[name]), decoder=decoder, name=place)
        projection.load_state_dict({each: state[f"{place}{PLACE}{each}"] for each in projection.state_dict()})
        yield projection


def _check(code_CC: Tensor, scale: Tensor | None, width: int, what: str) -> None:
    fits = (
        scale is not None
        and code_CC.shape == (width, width)
        and code_CC.dtype == torch.int8
        and scale.shape in {(width,), (2, width)}
        and scale.dtype == torch.float32
    )
    if not fits:
        raise UserError(
            f"{what} and its scale must be int8 of {width} × {width} and fp32 of 2 × {width}; the file is damaged or of "
            f"another model: export the checkpoint again"
        )
