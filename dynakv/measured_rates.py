"""The shares of a compressor's coefficients that a checkpoint's training measured, or that stand in its weights."""

import dataclasses
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from dynakv.checkpoint import check_gate
from dynakv.checkpoint_files import WEIGHTS, CheckpointConfig
from dynakv.layer_compressor import by_layer, kind_of_compressor, row_widths
from dynakv.planned_bits import PlannedBits
from dynakv.rank_gate import RankGate
from lowrank_kv.hf.geometry import KVGeometry
from lowrank_kv.stores.token_plans import TokenPlans
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.torch_defaults import fp32_on_cpu


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

    Ranks that all tokens of a layer share, and plans of bits, stand in the weights. The rates of gates are those of the
    first text that the training run held out, or else those after the calibration of its threshold.
    """
    geometry, summary = config.geometry, config.summary
    if not config.compressor.has_gates:
        return _rates_in_weights(Path(directory) / WEIGHTS, config)
    text, measured = next(iter((summary.get("heldout") or {}).items()), (None, None))
    if measured is None:
        calibrated = summary.get("calibrated_threshold")
        return calibrated and _mean_rates("the training text", calibrated["hard_rate"], geometry)
    if "layer_rates" in measured:
        return Rates(source=text, **measured["layer_rates"])
    return _mean_rates(text, measured["hard_rate"], geometry)


def _rates_in_weights(path: Path, config: CheckpointConfig) -> Rates:
    """Of ranks, or of plans of bits."""
    geometry, has_plan = config.geometry, config.compressor.has_plan

    def gate(weights: Any, index: int, side: str, width: int) -> RankGate | PlannedBits:
        found = kind_of_compressor(config.compressor).make_gate(width, config.compressor)
        prefix = f"layers.{index}.{side}.gate."
        tensors = {name: weights.get_tensor(prefix + name) for name in found.state_dict()}
        found.load_state_dict(tensors)
        check_gate(found, tensors, prefix, path)
        return found

    try:
        with safe_open(path, framework="pt") as weights, fp32_on_cpu():
            widths = row_widths(geometry, config.compressor)
            gates = {place: gate(weights, *place, width) for place, width in widths.items()}
    except (OSError, SafetensorError, RuntimeError) as error:
        raise UserError(f"{path} cannot be read ({error}); restore the checkpoint or train it again") from error
    places = by_layer(geometry, config.compressor).values()
    keys, values = ([gates[place].rate for place in each] for each in zip(*places, strict=True))
    source = "every text: all tokens of a layer keep the same"
    if has_plan and any(isinstance(gate.plan, TokenPlans) for gate in gates.values()):
        text = (config.summary.get("measured_classes") or {}).get("text", "the calibration")
        source = f"text whose tokens are divided into classes as those of {text}"
    return Rates(source=source, keys=keys, values=values, of_bytes=has_plan)


def _mean_rates(source: str, rate: float, geometry: KVGeometry) -> Rates:
    rates = [rate] * len(geometry.layers)
    return Rates(source=source, keys=rates, values=rates, is_mean=True)
