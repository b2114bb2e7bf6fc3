"""The model that a configuration measures methods on, and what its methods need.

Comparisons by text and by tasks share the keys `model`, `methods`, `bases` and `calibration`.
"""

from typing import Protocol

from dynakv.checkpoint import read_config
from lowrank_kv.utils.config import require
from lowrank_kv.utils.text_data import CalibrationText

from .methods import MethodConfig
from .peers.peer import CALIBRATION, READ


class Measured(Protocol):
    """A configuration with these keys."""

    model: str | None
    methods: list[MethodConfig]
    bases: str | None
    calibration: CalibrationText | None


def check_measured(config: Measured) -> None:
    """Raise :class:`UserError` unless methods are given, and all that they need."""
    require(bool(config.methods), "methods", config.methods, "at least one")
    checkpoints = [method.checkpoint for method in config.methods if method.checkpoint]
    require(bool(config.model or checkpoints), "model", config.model, "given where there is no checkpoint")
    needing = [method.name for method in config.methods if method.needs & {CALIBRATION, READ}]
    require(
        not needing or config.bases is not None or config.calibration is not None,
        "bases",
        config.bases,
        f"given where there are presets, or peers that are calibrated ({', '.join(needing)}), or `calibration`",
    )


def base_model(config: Measured) -> str:
    """Hub id or directory: by default that of what the first checkpoint was trained on."""
    return config.model or read_config(next(m.checkpoint for m in config.methods if m.checkpoint)).base_model
