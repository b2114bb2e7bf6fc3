"""A model's mode: training, or evaluation."""

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode inside the block, and back in its mode afterwards, however the block ends."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        # `train` comes first: some modules do more in it than set the mode.
        model.train(modes[model])
        for module, mode in modes.items():
            module.training = mode  # a submodule may be in another mode than the model
