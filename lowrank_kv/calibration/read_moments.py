"""What later tokens read of a compressed cache: moments of these keys and values, and of how the loss answers to them.

A token's nearest successors see it at full rank (:class:`lowrank_kv.hf.exact_tokens.ExactTokens`), and they are the ones
that look at it most. Their share of the gradient says nothing about what its compressed form is needed for: it is left out.

Where a backward pass does not fit, energy stands for the gradients. The loss is then taken to be the squared error of what
is rebuilt, over the energy of each layer's keys, and of its values.

Shapes: B batch, T tokens, N sampled rows, C width: the joint width G·D of keys, and of values; the sum of those that are
coded together.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lowrank_kv.bases.moments import SecondMoment
from lowrank_kv.calibration.activation_moments import (
    KEY,
    KEY_VALUE,
    VALUE,
    add_rows,
    check_uncompressed,
    empty_moments,
    observe,
)
from lowrank_kv.calibration.energy_weights import relative_weights
from lowrank_kv.calibration.gradient_moments import gradients_of_loss, probes_of
from lowrank_kv.hf.exact_tokens import ExactTokens
from lowrank_kv.hf.geometry import layer_groups
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.eval_mode import evaluating
from lowrank_kv.utils.progress import progress_bar

# About how many rows of each layer's keys, and of its values, are kept with their gradients to fit a gate to.
SAMPLED_ROWS = 12_288
# (layer index, `key` or `value`, states, and gradients with regard to them where these are taken), (1, T, C) each.
_Rows = Sequence[tuple[Any, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadMoments:
    """Of one layer's keys before rotation, of its values, or of both in one layer or several as rows.

    Attributes:
        state: second moment of the tokens that some later one reads compressed.
        gradient: second moment of ∂(Σ CE)/∂x̃ with regard to their compressed forms x̃, which here equal x; or what the
            squared error of each number counts, on the diagonal.
        sample_NC, sample_gradient_NC: some of these rows, evenly spread over the text, and their gradients; bf16. None for
            the gradients where energy stands for them.
    """

    state: SecondMoment
    gradient: SecondMoment
    sample_NC: Tensor
    sample_gradient_NC: Tensor | None


def read_moments(
    model: PreTrainedModel,
    blocks_NT: Tensor,
    *,
    joint_layers: int,
    exact_tokens: ExactTokens | None = None,
    by_energy: bool = False,
    progress: bool = True,
) -> dict[int, dict[str, ReadMoments]]:
    """Layer index → ``key``, ``value`` → what is read of that layer; and of the last of so many layers that are coded
    together ``key_value``, what is read of all of them.

    One backward pass a block through the model in eval mode, whose attention is over twice as many keys; it keeps the
    activations of one block. Parameters get no gradients. By energy it is a forward pass that keeps none.

    Args:
        model: an uncompressed model, any floating dtype; for gradients it attends with sdpa or eager attention.
        blocks_NT: token ids.
        joint_layers: how many consecutive layers are coded together; 0 for none.
        exact_tokens: which tokens are seen exactly; by default as an OjaKV cache keeps them.
        by_energy: take no gradients; energy stands for them.

    Raises:
        UserError: the model has compressors or attends otherwise, blocks are too short, inference mode is on, or states
            or gradients are not finite, or no gradient reaches what is read.
    """
    check_uncompressed(model)
    exact_tokens = exact_tokens or ExactTokens()
    read = exact_tokens.read_by_some(blocks_NT.shape[1])
    rows_of_block = read.stop - read.start
    if not rows_of_block:
        raise UserError(
            f"in blocks of {blocks_NT.shape[1]} tokens none is read compressed: the first {exact_tokens.num_sink_tokens}, "
            f"the latest {exact_tokens.recent_window} and the {exact_tokens.update_period} that wait are exact; calibrate "
            f"on longer blocks"
        )
    states = empty_moments(model, (KEY, VALUE))
    gradients = {} if by_energy else empty_moments(model, (KEY, VALUE))
    groups = layer_groups(list(states), joint_layers)
    kinds = 1 if by_energy else 2  # of moments: of states, and of gradients
    together = {group[-1]: [_empty_moment(states, group) for _ in range(kinds)] for group in groups}
    stride = max(1, len(blocks_NT) * rows_of_block // SAMPLED_ROWS)
    samples: dict[tuple[int, str], list[tuple[Tensor, ...]]] = {
        (index, side): [] for index in states for side in (KEY, VALUE)
    }
    what = "read" if by_energy else "read gradients"
    with (
        evaluating(model),
        _rows_of(model, exact_tokens, by_energy) as rows_of,
        progress_bar(total=blocks_NT.numel(), unit="tok", desc=what, disable=not progress) as bar,
    ):
        for number, block_T in enumerate(blocks_NT):
            found = rows_of(block_T)
            for index, side, state_1TC, *_ in found:  # before any gradient: it says first what is not finite
                add_rows(states[index][side], state_1TC[0, read], f"layer {index}, {side}")
            first = -number * rows_of_block % stride
            for index, side, *parts in found:
                for gradient_1TC in parts[1:]:
                    add_rows(gradients[index][side], gradient_1TC[0, read], f"gradients of layer {index}, {side}")
                rows = (each_1TC[0, read][first::stride] for each_1TC in parts)
                samples[index, side].append(tuple(each_NC.bfloat16().cpu() for each_NC in rows))
            for group in groups:
                of_group = [parts for index, _, *parts in found if index in group]
                for moment, parts in zip(together[group[-1]], zip(*of_group, strict=True), strict=True):
                    rows = [each_1TC[0, read].to(moment.sum_CC.device) for each_1TC in parts]
                    moment.update(torch.cat(rows, dim=1))
            bar.update(block_T.numel())
    if gradients and not any(float(each.sum_CC.trace()) for sides in gradients.values() for each in sides.values()):
        raise UserError(
            "the loss has no gradient with regard to any key or value that is read compressed, so that nothing says where "
            "bits are needed; check that the model predicts anything, and calibrate on longer blocks"
        )
    moments: dict[int, dict[str, ReadMoments]] = {index: {} for index in states}
    for (index, side), blocks in samples.items():
        row_NC, *gradient_NC = (torch.cat(each) for each in zip(*blocks, strict=True))
        state = states[index][side]
        moments[index][side] = ReadMoments(
            state=state,
            gradient=_energy_of(state, len(state.sum_CC)) if by_energy else gradients[index][side],
            sample_NC=row_NC,
            sample_gradient_NC=None if by_energy else gradient_NC[0],
        )
    for group in groups:
        state, *gradient = together[group[-1]]
        parts = [moments[index][side] for index in group for side in (KEY, VALUE)]
        moments[group[-1]][KEY_VALUE] = ReadMoments(
            state=state,
            gradient=_energy_of(state, len(parts[0].state.sum_CC)) if by_energy else gradient[0],
            sample_NC=torch.cat([each.sample_NC for each in parts], dim=1),
            sample_gradient_NC=None if by_energy else torch.cat([each.sample_gradient_NC for each in parts], dim=1),
        )
    return moments


@contextlib.contextmanager
def _rows_of(model: PreTrainedModel, exact_tokens: ExactTokens, by_energy: bool) -> Iterator[Callable[[Tensor], _Rows]]:
    """A function from a block of token ids, (T,), to the states of all layers and, unless by energy, their gradients."""
    if by_energy:
        yield functools.partial(_states_of, model)
        return
    with probes_of(model, exact_tokens) as probes, torch.enable_grad():
        yield functools.partial(gradients_of_loss, model, probes)


def _states_of(model: PreTrainedModel, block_T: Tensor) -> _Rows:
    found: list[tuple[int, str, Tensor]] = []

    def keep(index: int, side: str, rows_TC: Tensor) -> None:
        found.append((index, side, rows_TC[None]))

    observe(model, block_T[None], keep, sides=(KEY, VALUE), progress=False)
    return found


def _energy_of(state: SecondMoment, width: int) -> SecondMoment:
    """What stands for the gradients' moment of rows whose parts, each a layer's keys or its values, have so many numbers."""
    return SecondMoment.from_mean(relative_weights(state.mean(), width).diag())


def _empty_moment(states: dict[int, dict[str, SecondMoment]], group: Sequence[int]) -> SecondMoment:
    last_CC = states[group[-1]][KEY].sum_CC
    return SecondMoment(2 * len(group) * len(last_CC), device=last_CC.device)
