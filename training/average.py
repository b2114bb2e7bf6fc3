"""The mean of a run's last states, which is calmer than the last of them.

A step sees a few sequences, so that where a run happens to end is partly chance. The mean of weights along the last part of
the way lies nearer the middle of the valley they wander in (Izmailov et al. 2018, Averaging Weights Leads to Wider Optima).
"""

from pathlib import Path

from lowrank.errors import UserError
from training.engine import Engine
from training.state import load_weights, read_progress, read_weights, saved_states


def load_mean(engine: Engine, root: Path, count: int) -> list[int]:
    """Fill a prepared engine's parameters with their means over the newest `count` states; every process must call this.

    Args:
        root: directory of all states.

    Returns:
        The steps after which those states were written.

    Raises:
        UserError: there are fewer, or one of them is damaged.
    """
    states = saved_states(root)[-count:]
    if len(states) < count:
        raise UserError(
            f"`average_checkpoints` is {count}, and `{root}` holds {len(states)}; pass --resume with "
            f"`average_checkpoints` of at most that"
        )
    steps = [read_progress(directory)["step"] for directory in states]
    mean = {name: dict.fromkeys(tensors, 0.0) for name, tensors in read_weights(states[0]).items()}
    for directory in states:
        for name, tensors in read_weights(directory).items():
            for key, tensor in tensors.items():
                mean[name][key] = mean[name][key] + tensor.double() / count
    load_weights(engine, mean, f"the mean of {count} states under {root}")
    return steps
