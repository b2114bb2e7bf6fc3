"""What a calibration keeps of what is read of a compressed cache, in memory and on disk.

Shapes: C width of a side: the joint width G·D of keys and of values, twice that of both together; N rows.
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
from lowrank_kv.hf.geometry import KVGeometry
from lowrank_kv.stores.importance_gate import ImportanceGate
from lowrank_kv.utils.config import within

# Rows of each layer's keys and of its values that are kept for codebooks: a thousandth of their spread is known from them.
_KEPT_ROWS = 1024
_FIELDS = ("state", "gradient", "sample", "gate", "costs")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadStates:
    """What is read of one layer's keys before rotation, of its values, or of both together, once they are compressed.

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
    """Layer index → ``key``, ``value``, ``key_value`` → what is kept of what was found."""
    read: dict[int, dict[str, ReadStates]] = {index: {} for index in found}
    # Gates of rows that are coded apart share a level, and so do those of rows that are coded together.
    for sides in ((KEY, VALUE), (KEY_VALUE,)):
        names = [(index, side) for index in found for side in sides]
        moments = [found[index][side] for index, side in names]
        means = [(each.state.mean().float().cpu(), each.gradient.mean().float().cpu()) for each in moments]
        spectra = [Spectrum.of_states(*pair) for pair in means]
        fits = fit_gates(spectra, [each.sample_NC for each in moments], [each.sample_gradient_NC for each in moments])
        for (index, side), each, (state_CC, gradient_CC), fit in zip(names, moments, means, fits, strict=True):
            kept_NC = each.sample_NC[:: -(-len(each.sample_NC) // _KEPT_ROWS)].contiguous()
            read[index][side] = ReadStates(state_CC=state_CC, gradient_CC=gradient_CC, sample_NC=kept_NC, fit=fit)
    return read


def tensors_of(read: dict[int, dict[str, ReadStates]]) -> dict[str, Tensor]:
    """The tensors of a file, by name. Of keys and values together there is only what those apart do not say: moments of the
    one with the other, and the gate."""
    flat: dict[str, Tensor] = {}
    for index, sides in read.items():
        for side, each in sides.items():
            gate, fit = each.fit.gate, each.fit
            weights = torch.cat([gate.linear_C, gate.square_C, gate.rest_3, torch.tensor([float(gate.leading)])])
            found = {"gate": weights, "costs": torch.stack([fit.score_N, fit.cost_N])}
            if side == KEY_VALUE:
                found |= {"state": _across(each.state_CC), "gradient": _across(each.gradient_CC)}
            else:
                found |= {"state": each.state_CC, "gradient": each.gradient_CC, "sample": each.sample_NC}
            flat |= {_name(index, side, field): tensor for field, tensor in found.items()}
    return flat


def read_from(flat: dict[str, Tensor], geometry: KVGeometry, path: Path) -> dict[int, dict[str, ReadStates]] | None:
    """What :func:`tensors_of` wrote; None where it is not there. Older files say nothing of keys and values together.

    Raises:
        UserError: a tensor is not what it should be.
    """

    def is_there(side: str) -> bool:
        return any(_name(index, side, field) in flat for index in geometry.layers for field in _FIELDS)

    if not (is_there(KEY) or is_there(VALUE) or is_there(KEY_VALUE)):
        return None
    width = geometry.width

    def moments_of(index: int, side: str) -> list[Tensor]:
        names = (_name(index, side, field) for field in ("state", "gradient"))
        return [checked_tensor(flat, name, (width, width), torch.float32, path) for name in names]

    def fit_of(index: int, side: str, width: int) -> GateFit:
        name = _name(index, side, "gate")
        weights = checked_tensor(flat, name, (2 * width + 4,), torch.float32, path)
        linear_C, square_C, rest_3, leading = weights.split([width, width, 3, 1])
        with within(prefix=f"{name}.", source=str(path)):
            gate = ImportanceGate(linear_C=linear_C, square_C=square_C, rest_3=rest_3, leading=int(leading)).check()
        score_N, cost_N = checked_tensor(flat, _name(index, side, "costs"), (2, None), torch.float32, path)
        return GateFit(gate=gate, score_N=score_N, cost_N=cost_N)

    read: dict[int, dict[str, ReadStates]] = {index: {} for index in geometry.layers}
    for index, sides in read.items():
        for side in (KEY, VALUE):
            state_CC, gradient_CC = moments_of(index, side)
            sample_NC = checked_tensor(flat, _name(index, side, "sample"), (None, width), torch.bfloat16, path)
            fit = fit_of(index, side, width)
            sides[side] = ReadStates(state_CC=state_CC, gradient_CC=gradient_CC, sample_NC=sample_NC, fit=fit)
        if is_there(KEY_VALUE):
            key, value = sides[KEY], sides[VALUE]
            state_CC, gradient_CC = moments_of(index, KEY_VALUE)
            sides[KEY_VALUE] = ReadStates(
                state_CC=_joined(key.state_CC, state_CC, value.state_CC),
                gradient_CC=_joined(key.gradient_CC, gradient_CC, value.gradient_CC),
                sample_NC=torch.cat([key.sample_NC, value.sample_NC], dim=1),
                fit=fit_of(index, KEY_VALUE, 2 * width),
            )
    return read


def _name(index: int, side: str, field: str) -> str:
    return f"layers.{index}.{side}_read_{field}"


def _across(moment_XX: Tensor) -> Tensor:
    """Of a moment of keys and values together, that of keys with values."""
    width = len(moment_XX) // 2
    return moment_XX[:width, width:].contiguous()


def _joined(key_CC: Tensor, across_CC: Tensor, value_CC: Tensor) -> Tensor:
    """The moment of keys and values together."""
    return torch.cat([torch.cat([key_CC, across_CC], dim=1), torch.cat([across_CC.mT, value_CC], dim=1)])
