"""The mean of a run's last states, which is less noisy than the last of them.

A step sees only a few sequences, so the weights at which a run ends are partly chance. Their mean over the run's end lies
nearer the middle of the valley that they move in (Izmailov et al. 2018, Averaging Weights Leads to Wider Optima).
"""

import sys
from pathlib import Path

from torch import Tensor

from lowrank_kv.utils.errors import UserError

from .engine import Engine
from .resumable_state import load_weights, read_progress, read_weights, saved_states


def load_mean(engine: Engine, root: Path, count: int, *, every: int, until: int) -> list[int]:
    """Fill a prepared engine's parameters with their means over the last `count` states up to a step; every process must
    call this.

    A damaged state is skipped with a warning on stderr, and having fewer than `count` is only warned of, so that a missing
    state does not lose the run.

    Args:
        root: directory of all states, which may hold the best step's, too, long before the others.
        every: steps from one state to the next.
        until: the last step whose state counts.

    Returns:
        The steps after which those states were written.

    Raises:
        UserError: there is no undamaged state.
    """
    found: dict[int, Path] = {}
    for directory in reversed(saved_states(root, until=until)):
        try:
            step = read_progress(directory)["step"]
        except UserError as error:
            _warn(engine, f"{directory} is damaged and is left out of the mean: {error}")
            continue
        if len(found) == count or (found and step <= max(found) - count * every):
            break
        found[step] = directory
    if not found:
        raise UserError(f"there is no undamaged checkpoint under `{root}` to average; set `average_checkpoints` to 0")
    if len(found) < count:
        _warn(engine, f"`average_checkpoints` is {count}, and the mean is of {len(found)}: `{root}` holds no more")
    load_weights(engine, _mean(list(found.values())), f"the mean of {len(found)} checkpoints under {root}")
    return sorted(found)


def _mean(directories: list[Path]) -> dict[str, dict[str, Tensor]]:
    """The means of the weights in states, of which the newest comes first. Whole numbers, such as bits and ranks, are that
    one's."""
    newest, *others = directories
    weights = read_weights(newest)
    sums = {
        name: {key: tensor.double() for key, tensor in tensors.items() if tensor.is_floating_point()}
        for name, tensors in weights.items()
    }
    for directory in others:
        for name, tensors in read_weights(directory).items():
            for key, sum_of_key in sums[name].items():
                sum_of_key += tensors[key].double()
    means = {
        name: {key: (total / len(directories)).to(weights[name][key].dtype) for key, total in totals.items()}
        for name, totals in sums.items()
    }
    return {name: {**tensors, **means[name]} for name, tensors in weights.items()}


def _warn(engine: Engine, message: str) -> None:
    if engine.main:
        print(f"warning: {message}", file=sys.stderr, flush=True)
