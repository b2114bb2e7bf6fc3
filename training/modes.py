"""Which modules of a run are in train mode: those that learn.

A frozen backbone stays in eval mode, as it is when a compressor is calibrated, measured and served. Its dropout would teach
nothing, and drown what the compressor loses in noise: at full rank GPT-2 in train mode is far from its own teacher.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import GradientCheckpointingLayer

from dynakv.layer_compressor import LayerCompressor
from dynakv.training_config import FULL

from .engine import Engine


def begin_training(engine: Engine) -> None:
    """Put what a run trains in train mode and everything else in eval mode. Called once, on a prepared engine."""
    engine.wrapped.train()
    if engine.config.trainable == FULL:
        return
    engine.model.eval()
    for module in engine.model.modules():
        if isinstance(module, LayerCompressor) or hasattr(module, "get_delta_weight"):  # the latter has an adapter
            module.train()
        elif isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing:
            module.training = True  # without its parts: transformers recomputes a layer only where it is in train mode
            module._gradient_checkpointing_func = functools.partial(
                _checkpointed, module, module._gradient_checkpointing_func
            )


def _checkpointed(layer: nn.Module, checkpoint: Callable, forward: Callable, *args: Any) -> Any:
    """Run a layer's `forward` through transformers' `checkpoint`, in eval mode whenever it is computed: some layers drop
    numbers by their own mode."""

    def computed(*args: Any) -> Any:
        layer.training = False
        try:
            return forward(*args)
        finally:
            layer.training = True

    return checkpoint(computed, *args)
