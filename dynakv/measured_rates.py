"""The shares of a compressor's coefficients that a checkpoint's training measured, or that stand in its weights."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dynakv.checkpoint import WEIGHTS, CheckpointConfig
from lowrank_kv.hf.geometry import KVGeometry
from lowrank_kv.stores.bit_plan import SCALE_BITS
from lowrank_kv.stores.token_plans import PLACE_BYTES
from lowrank_kv.utils.errors import UserError

SIDES = ("key", "value")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """Shares of coefficients that a compressor keeps, a number for each compressed layer.

    Attributes:
        source: what they were measured on.
        of_bytes: they are shares of the bytes of a token in 16 bits, as a plan of bits gives them.
        is_mean: only the mean over all layers, keys and values is known, and every number is that.
    """

    source: str
    keys: list[float]
    values: list[float]
    is_mean: bool = False
    of_bytes: bool = False

    @property
    def mean(self) -> float:
        both = [*self.keys, *self.values]
        return sum(both) / len(both)


def measured_rates(directory: str | Path, config: CheckpointConfig) -> Rates | None:
    """The rates of a compressor checkpoint; None where nobody measured any.

    Ranks of `rank_policy: nested` and plans of bits stand in the weights. The rates of gates are those of the first text
    that the training run held out, or else those after the calibration of its threshold.
    """
    geometry, summary = config.geometry, config.summary
    if not config.compressor.has_gates:
        settings = config.compressor
        has_classes = settings.has_plan and settings.token_classes > 1
        return _rates_in_weights(
            Path(directory) / WEIGHTS, geometry, of_bytes=settings.has_plan, has_classes=has_classes
        )
    text, measured = next(iter((summary.get("heldout") or {}).items()), (None, None))
    if measured is None:
        calibrated = summary.get("calibrated_threshold")
        return calibrated and _mean_rates("the training text", calibrated["hard_rate"], geometry)
    if "layer_rates" in measured:
        return Rates(source=text, **measured["layer_rates"])
    return _mean_rates(text, measured["hard_rate"], geometry)


def _rates_in_weights(path: Path, geometry: KVGeometry, *, of_bytes: bool, has_classes: bool) -> Rates:
    def rate(weights: Any, layer: int, side: str) -> float:
        if of_bytes:
            bits_K = weights.get_tensor(f"layers.{layer}.{side}.gate.bits").sum(dim=1, dtype=torch.int64)
            share_K = weights.get_tensor(f"layers.{layer}.{side}.gate.shares")
            row_K = (bits_K + SCALE_BITS + 7) // 8
            place = PLACE_BYTES if has_classes else 0.0
            return (float((row_K * share_K).sum()) + place) / (2 * geometry.width)
        return int(weights.get_tensor(f"layers.{layer}.{side}.gate.rank")) / geometry.width

    try:
        with safe_open(path, framework="pt") as weights:
            keys, values = ([rate(weights, index, side) for index in geometry.layers] for side in SIDES)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({error}); restore the checkpoint or train it again") from error
    source = "every text: all tokens of a layer keep the same"
    if has_classes:
        source = "text whose tokens are divided into classes as the calibration's"
    return Rates(source=source, keys=keys, values=values, of_bytes=of_bytes)


def _mean_rates(source: str, rate: float, geometry: KVGeometry) -> Rates:
    rates = [rate] * len(geometry.layers)
    return Rates(source=source, keys=rates, values=rates, is_mean=True)
