"""A model's mode: training, or evaluation."""

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model is in eval mode inside, and in the mode it was in afterwards, however the block ends."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        # By `train`, too: some modules do more in it than to keep the mode.
        model.train(modes[model])
        for module, mode in modes.items():
            module.training = mode  # parts may be kept in another than the whole
