"""The bytes of a cache before there is one, from shapes and rates. Every sequence is one prompt without padding."""

import dataclasses
import math

from transformers import DynamicCache, PreTrainedModel

from dynakv.checkpoint_files import CheckpointConfig
from dynakv.layer_compressor import row_widths
from dynakv.measured_rates import Rates
from lowrank_kv.hf.cache.windowed.own_directions import OwnDirections
from lowrank_kv.hf.cache.windowed.planned_sequence import PlannedSequence
from lowrank_kv.hf.cache.windowed.retention import RetentionSchedule
from lowrank_kv.hf.geometry import KVGeometry, heads_of_layer
from lowrank_kv.hf.rope import POSITION_BYTES
from lowrank_kv.stores.ragged import position_nbytes
from lowrank_kv.utils.budget import Budget
from lowrank_kv.utils.errors import UserError
from ojakv import PRESETS, Calibration, OjaKVConfig, Plan, make_plan, plan_for_budget
from ojakv.basis_plan import plan_of_shapes
from ojakv.planned_bytes import planned_nbytes


def sliding_window_nbytes(model: PreTrainedModel, geometry: KVGeometry, *, tokens: int, itemsize: int) -> int | None:
    """Bytes that the layers with a sliding window hold of one sequence; None where a layer holds something else, such as a
    recurrent state."""
    config = model.config.get_text_config(decoder=True)
    native = DynamicCache(config=config).layers
    others = {index: layer for index, layer in enumerate(native) if index not in geometry.layers}
    if not all(getattr(layer, "is_sliding", False) for layer in others.values()):
        return None
    # A window's newest token comes on top of what is held.
    held = (min(tokens, layer.sliding_window - 1) * math.prod(heads_of_layer(config, i)) for i, layer in others.items())
    return 2 * itemsize * sum(held)


def dynakv_nbytes(
    config: CheckpointConfig, rates: Rates, *, tokens: int, itemsize: int, rotation_bytes: int = POSITION_BYTES
) -> int:
    """Bytes that a DynaKV cache holds of one sequence, at measured rates; room to grow (less than 1 in 64) is left out."""
    geometry, settings = config.geometry, config.compressor
    if settings.has_plan:
        return _windowed_nbytes(config, rates, tokens=tokens, itemsize=itemsize, rotation_bytes=rotation_bytes)
    rows = settings.eviction.num_kept(tokens) if settings.eviction.is_on else tokens
    position = position_nbytes(tokens)
    held = rotation_bytes * tokens
    for rate in (*rates.keys, *rates.values):
        coefficients = rate * geometry.width
        row = coefficients * itemsize
        if settings.quantization is not None:
            row = settings.quantization.nbytes(round(coefficients))
        held += rows * (row + position)
    if settings.eviction.is_on:
        held += 4 * rows * len(geometry.layers)  # where the rows' tokens were
    return round(held)


def _windowed_nbytes(config: CheckpointConfig, rates: Rates, *, tokens: int, itemsize: int, rotation_bytes: int) -> int:
    """The same where a plan of bits is kept, and some tokens at full rank."""
    geometry, settings = config.geometry, config.compressor
    # After a prompt alone all layers hold as many tokens.
    schedule = RetentionSchedule(settings.windowed)
    sequence = PlannedSequence.after(schedule, prompt=tokens, tokens=tokens)
    row = sum(rate * 2 * geometry.width for rate in (*rates.keys, *rates.values))
    full = 2 * geometry.width * itemsize * len(geometry.layers)
    positions = sequence.position_bytes(1) * len(geometry.layers) + rotation_bytes * tokens
    own = 0
    if sequence.has_own_directions:
        widths = row_widths(geometry, settings).values()
        own = sum(OwnDirections.nbytes(width, settings.own_directions) for width in widths)
    return round(sequence.low_rank_capacity * row + sequence.full_rank_capacity * full + own + positions)


def preset_plan(
    geometry: KVGeometry,
    preset: str,
    *,
    rate: float | None,
    budget: Budget | None,
    calibration: Calibration | None,
    model: str,
    itemsize: int,
    rotation_bytes: int = POSITION_BYTES,
) -> Plan:
    """The plan of a named preset, of which only the shapes count.

    Args:
        rate: of the preset; None leaves it as the preset has it.
        budget: in place of a rate.
        calibration: of the model; needed where the preset's ranks follow from one, or from a budget.
        model: the model's name, for errors.
        itemsize: bytes of an uncompressed number.
        rotation_bytes: what a cache keeps of each token's rotation.

    Raises:
        UserError: unknown preset, a rate out of range, a budget that no rate keeps, or a preset that needs a calibration and
            has none.
    """
    config = OjaKVConfig.preset(preset, rate=rate)
    read = " --read_gradients true" if config.has_plan else ""
    calibrate = (
        f"make one with `lowrank-kv calibrate --model {model} --name TEXT --output DIR{read}` and give `--bases DIR`"
    )
    if calibration is not None:
        geometry.check_equal(calibration.geometry, calibration.origin)
        calibration = dataclasses.replace(calibration, rotation_bytes=rotation_bytes)
        if budget is not None:
            return plan_for_budget(calibration, config, budget, itemsize=itemsize)
        return make_plan(calibration, config)
    if budget is not None:
        raise UserError(f"`--budget` finds a rate with a calibration's help: {calibrate}, or give `--rate`")
    if config.ranks == "fraction":
        return plan_of_shapes(geometry, config, rotation_bytes=rotation_bytes)
    free = [name for name in PRESETS if OjaKVConfig.preset(name).ranks == "fraction"]
    raise UserError(
        f"the ranks of the preset `{preset}` follow from a calibration (`ranks: {config.ranks}`): {calibrate}, or take a "
        f"preset that needs none: {', '.join(free)}"
    )


def preset_nbytes(plan: Plan, *, tokens: int, itemsize: int) -> int:
    """Bytes that an OjaKV cache of a plan holds of one sequence."""
    return round(planned_nbytes(plan, prompt=tokens, tokens=tokens, itemsize=itemsize))
