"""What a calibration keeps of what is read of a compressed cache, in memory and on disk.

Shapes: C width: the joint width G·D of keys, and of values, the sum of those that are coded together; N rows.
"""

import dataclasses
import functools
from pathlib import Path

import torch
from torch import Tensor

from lowrank_kv.calibration.activation_moments import KEY, KEY_VALUE, VALUE
from lowrank_kv.calibration.checked_tensor import checked_tensor
from lowrank_kv.calibration.read_moments import ReadMoments
from lowrank_kv.calibration.spectrum import Spectrum
from lowrank_kv.calibration.token_gates import GateFit, fit_gates
from lowrank_kv.hf.geometry import KVGeometry, layer_groups
from lowrank_kv.stores.importance_gate import ImportanceGate
from lowrank_kv.utils.config import within

# Rows of each layer's keys and of its values that are kept for codebooks: a thousandth of their spread is known from them.
_KEPT_ROWS = 1024
SIDES = (KEY, VALUE, KEY_VALUE)
_FIELDS = ("state", "gradient", "sample", "gate", "costs")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadStates:
    """What is read of one layer's keys before rotation, of its values, or of both in one layer or several, once they are
    compressed.

    Attributes:
        state_CC, gradient_CC: mean second moments, fp32.
        sample_NC: some rows, bf16.
        fit: the gate that tells which tokens are to be coded finely.

    See :class:`lowrank_kv.calibration.read_moments.ReadMoments`.
    """

    state_CC: Tensor
    gradient_CC: Tensor
    sample_NC: Tensor
    fit: GateFit

    @functools.cached_property
    def spectrum(self) -> Spectrum:
        """The loss-weighted basis of these states, from which plans of all rates are made."""
        return Spectrum.of_states(self.state_CC, self.gradient_CC)


def read_states_of(found: dict[int, dict[str, ReadMoments]]) -> dict[int, dict[str, ReadStates]]:
    """What is kept of what :func:`lowrank_kv.calibration.read_moments.read_moments` found."""
    read: dict[int, dict[str, ReadStates]] = {index: {} for index in found}
    # Gates of rows that are coded apart share a level, and so do those of rows that are coded together.
    for sides in ((KEY, VALUE), (KEY_VALUE,)):
        names = [(index, side) for index in found for side in sides if side in found[index]]
        moments = [found[index][side] for index, side in names]
        if not moments:
            continue
        means = [(each.state.mean().float().cpu(), each.gradient.mean().float().cpu()) for each in moments]
        spectra = [Spectrum.of_states(*pair) for pair in means]
        fits = fit_gates(spectra, [each.sample_NC for each in moments], [each.sample_gradient_NC for each in moments])
        for (index, side), each, (state_CC, gradient_CC), fit in zip(names, moments, means, fits, strict=True):
            kept_NC = each.sample_NC[:: -(-len(each.sample_NC) // _KEPT_ROWS)].contiguous()
            read[index][side] = ReadStates(state_CC=state_CC, gradient_CC=gradient_CC, sample_NC=kept_NC, fit=fit)
    return read


def tensors_of(read: dict[int, dict[str, ReadStates]]) -> dict[str, Tensor]:
    """The tensors of a file, by name. Moments of keys and values together are symmetric: half of them is written."""
    flat: dict[str, Tensor] = {}
    for index, sides in read.items():
        for side, each in sides.items():
            gate, fit = each.fit.gate, each.fit
            weights = torch.cat([gate.linear_C, gate.square_C, gate.rest_3, gate.linear_C.new_tensor([gate.leading])])
            found = {"gate": weights, "costs": torch.stack([fit.score_N, fit.cost_N])}
            if side == KEY_VALUE:
                found |= {"state": _half(each.state_CC), "gradient": _half(each.gradient_CC)}
            else:
                found |= {"state": each.state_CC, "gradient": each.gradient_CC, "sample": each.sample_NC}
            flat |= {_name(index, side, field): tensor for field, tensor in found.items()}
    return flat


def read_from(
    flat: dict[str, Tensor], geometry: KVGeometry, joint_layers: int, path: Path
) -> dict[int, dict[str, ReadStates]] | None:
    """What :func:`tensors_of` wrote; None where it is not there.

    Args:
        joint_layers: how many layers are coded together; 0 where the file says nothing of that.

    Raises:
        UserError: a tensor is not what it should be.
    """
    if not any(_name(index, side, field) in flat for index in geometry.layers for side in SIDES for field in _FIELDS):
        return None

    def tensor(index: int, side: str, field: str, *shape: int | None, dtype: torch.dtype = torch.float32) -> Tensor:
        return checked_tensor(flat, _name(index, side, field), shape, dtype, path)

    def fit_of(index: int, side: str, width: int) -> GateFit:
        weights = tensor(index, side, "gate", 2 * width + 4)
        linear_C, square_C, rest_3, leading = weights.split([width, width, 3, 1])
        with within(prefix=f"{_name(index, side, 'gate')}.", source=str(path)):
            gate = ImportanceGate(linear_C=linear_C, square_C=square_C, rest_3=rest_3, leading=int(leading)).check()
        score_N, cost_N = tensor(index, side, "costs", 2, None)
        return GateFit(gate=gate, score_N=score_N, cost_N=cost_N)

    width = geometry.width
    read: dict[int, dict[str, ReadStates]] = {index: {} for index in geometry.layers}
    for index, sides in read.items():
        for side in (KEY, VALUE):
            sides[side] = ReadStates(
                state_CC=tensor(index, side, "state", width, width),
                gradient_CC=tensor(index, side, "gradient", width, width),
                sample_NC=tensor(index, side, "sample", None, width, dtype=torch.bfloat16),
                fit=fit_of(index, side, width),
            )
    for group in layer_groups(geometry.layers, joint_layers):
        last, joint = group[-1], 2 * len(group) * width
        half = joint * (joint + 1) // 2
        read[last][KEY_VALUE] = ReadStates(
            state_CC=_whole(tensor(last, KEY_VALUE, "state", half), joint),
            gradient_CC=_whole(tensor(last, KEY_VALUE, "gradient", half), joint),
            sample_NC=torch.cat([read[index][side].sample_NC for index in group for side in (KEY, VALUE)], dim=1),
            fit=fit_of(last, KEY_VALUE, joint),
        )
    return read


def _name(index: int, side: str, field: str) -> str:
    return f"layers.{index}.{side}_read_{field}"


def _half(moment_CC: Tensor) -> Tensor:
    """The numbers of a symmetric matrix on its diagonal and above, row after row."""
    return moment_CC[tuple(torch.triu_indices(*moment_CC.shape, device=moment_CC.device))].contiguous()


def _whole(half_X: Tensor, width: int) -> Tensor:
    """The matrix that :func:`_half` was taken of."""
    moment_CC = half_X.new_zeros(width, width)
    row_X, column_X = torch.triu_indices(width, width, device=half_X.device)
    moment_CC[row_X, column_X] = half_X
    moment_CC[column_X, row_X] = half_X
    return moment_CC
