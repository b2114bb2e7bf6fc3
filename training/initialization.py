"""Initialization of a run's compressors: from moments of the leading text, a saved calibration, or an earlier run."""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import dynakv
from dynakv.checkpoint_files import read_config
from dynakv.initialization import Moments
from dynakv.measured_rates import measured_rates
from dynakv.training_config import TrainConfig
from lowrank_kv.calibration.activation_moments import calibrate
from lowrank_kv.calibration.bit_plans import CodedModel, coded_model
from lowrank_kv.calibration.calibration import Calibration
from lowrank_kv.calibration.gradient_moments import gradient_moments
from lowrank_kv.utils.config import require, to_dict
from lowrank_kv.utils.errors import UserError

from .data import TrainingBlocks
from .distillation import uncompressed
from .engine import Engine

# α at the start where nothing better is known: after a PCA the goal starts at the rate of the open gates, and α adapts.
DEFAULT_PRICE = 4.0
# Settings that say how a checkpoint is served, none of which its weights depend on.
_SERVED_BY = ("prefill", "exact_tokens", "own_directions")
_SAME_RATE = 0.05  # how far, as a share, a plan may be from the rate it was made for


def given_price(config: TrainConfig) -> float | None:
    """α at the start, if it is known before the initialization, else None.

    It is `rate.alpha`, or, for a run with a target that trains on from `initial_checkpoint`, the last α of that run, which
    held its rate (unless that was zero, which no factor can raise).

    Raises:
        UserError: `initial_checkpoint` is no checkpoint.
    """
    if config.rate.alpha is not None or config.initial_checkpoint is None:
        return config.rate.alpha
    last = read_config(config.initial_checkpoint).summary.get("alpha")
    return last if last and config.rate.target_retain_rate is not None else None


def starting_price(config: TrainConfig, estimate: float | None) -> float:
    """α at the start of a run that is not given it.

    Args:
        estimate: what :func:`initialize` returned.

    Raises:
        UserError: the run learns classes of a plan, from a start that does not say what bytes are worth to the loss. From
            too high a price, bytes are lost that come back late or never.
    """
    if estimate:
        return estimate
    if config.compressor.has_plan and config.compressor.has_price:
        without = "`initial_checkpoint` was trained without a price"
        if config.initial_checkpoint is None:
            without = "`calibration.bases` were read without gradients"
        raise UserError(
            f"`rate.alpha` must be given, for {without}, and nothing else says at what price the classes start; or "
            f"set `compressor.learned_classes: false`, which needs none"
        )
    return DEFAULT_PRICE


def check_continued(config: TrainConfig) -> None:
    """Raise :class:`UserError` where `initial_checkpoint` has a plan of bits for another rate than the run's: training keeps
    the bits that it starts with."""
    if config.initial_checkpoint is None or not config.compressor.has_plan:
        return
    saved, target = read_config(config.initial_checkpoint), config.rate.target_retain_rate
    planned = saved.summary.get("target_retain_rate")
    if planned is None and saved.compressor.has_plan:
        planned = measured_rates(config.initial_checkpoint, saved).mean
    require(
        planned is None or math.isclose(planned, target, rel_tol=_SAME_RATE),
        "rate.target_retain_rate",
        target,
        f"{planned:.3g}, for which the plan of `initial_checkpoint` was made; for another, start from a calibration",
    )


def initialize(engine: Engine, stream: TrainingBlocks) -> float | None:
    """Initialize a prepared engine's compressors from `initial_checkpoint`, from `calibration.bases`, or from moments of the
    leading training blocks. All processes get those of the first, and all must call this.

    Returns:
        the estimate of α by an initialization from gradients, or from what a plan's loss answers to; None for the others.
    """
    config, model = engine.config, engine.model
    start: Callable[[], float | None]
    if config.initial_checkpoint is not None:
        if engine.main:
            warn_of_served_settings(config)
        start = functools.partial(dynakv.initialize_from_checkpoint, model, config.initial_checkpoint)
    elif config.compressor.has_plan:
        coded = coded_model(
            _calibration_of_reads(engine, stream),
            config.rate.target_retain_rate,
            token_classes=config.compressor.token_classes,
            rebuild_cost=config.compressor.rebuild_cost,
            joint_layers=config.compressor.joint_layers,
        )
        start = functools.partial(_start_from, model, coded, config.rate.target_retain_rate)
    elif config.starts_from_gradients:
        moments, gradients = _moments(engine, stream, gradients=True)
        rate = config.rate
        start = functools.partial(
            dynakv.initialize_from_gradients,
            model,
            moments,
            gradients,
            rate.target_retain_rate,
            key_cost=rate.key_cost,
            floor=rate.layer_floor,
        )
    else:
        moments, _ = _moments(engine, stream, gradients=False)
        start = functools.partial(dynakv.initialize_from_moments, model, moments)
    with engine.gather_full(engine.compressor_parameters(), write=True):
        price = start()
        engine.broadcast_compressors()
    if price is None:
        return None
    # Near the uncompressed model the KL to it grows as the cross-entropy does (both by the Fisher information).
    return engine.broadcast_value(price * (config.loss.cross_entropy + config.loss.distillation))


def _start_from(model: PreTrainedModel, coded: CodedModel, rate: float) -> float | None:
    """Initialize from a plan of bits; returns the α at which a byte more adds as much to α R² as it takes from the loss.
    None where energy stands for the loss."""
    dynakv.initialize_from_coders(model, coded.layers)
    return None if coded.loss_per_rate is None else coded.loss_per_rate / (2 * rate)


def _moments(engine: Engine, stream: TrainingBlocks, *, gradients: bool) -> tuple[Moments, Moments | None]:
    """Second moments of the states and, if asked for, of the loss's gradients with regard to them."""
    config, model = engine.config, engine.model
    if config.calibration.bases is not None:
        calibration = _saved_calibration(engine)
        return calibration.second_moments(), calibration.gradients() if gradients else None
    blocks_NT = _leading_blocks(config, stream)
    with uncompressed(model):
        moments = calibrate(model, blocks_NT, progress=engine.main)
        return moments, gradient_moments(model, blocks_NT, progress=engine.main) if gradients else None


def _calibration_of_reads(engine: Engine, stream: TrainingBlocks) -> Calibration:
    """What is read of a compressed cache, and how the loss answers to it."""
    config, model = engine.config, engine.model
    if config.calibration.bases is not None:
        calibration = _saved_calibration(engine)
        if engine.main:
            warn_of_exact_tokens(config, calibration)
        return calibration
    blocks_NT = _leading_blocks(config, stream)
    settings = {key: getattr(config.compressor, key) for key in ("exact_tokens", "joint_layers")}
    with uncompressed(model):
        return Calibration.of_reads(model, blocks_NT, **settings, progress=engine.main)


def warn_of_served_settings(config: TrainConfig) -> None:
    """Warn where a run that trains on would serve its checkpoint otherwise than the one that it starts from."""
    before = read_config(config.initial_checkpoint).compressor
    for key in _SERVED_BY:
        was, now = getattr(before, key), getattr(config.compressor, key)
        if was != now:
            warnings.warn(
                f"`compressor.{key}` is {_told(now)}, and `initial_checkpoint` is served with {_told(was)}; set it to that, "
                f"if the new checkpoint is to be served so, too",
                stacklevel=2,
            )


def _told(value: Any) -> Any:
    return to_dict(value) if dataclasses.is_dataclass(value) else value


def warn_of_exact_tokens(config: TrainConfig, calibration: Calibration) -> None:
    """Warn where a calibration was taken beside other exact tokens than the run's, as far as it says: something else is read
    compressed then, and at other times."""
    found, wanted = calibration.exact_tokens, config.compressor.exact_tokens
    if found is None or found == wanted:
        return
    warnings.warn(
        f"`compressor.exact_tokens` is {to_dict(wanted)}, and {calibration.origin} says what is read compressed beside "
        f"{to_dict(found)}; leave out `calibration.bases`, so that the run calibrates beside its own, or set "
        f"`compressor.exact_tokens` to those of the calibration",
        stacklevel=2,
    )


def _saved_calibration(engine: Engine) -> Calibration:
    """That of `calibration.bases`."""
    return Calibration.load(engine.config.calibration.bases).for_model(engine.model)


def _leading_blocks(config: TrainConfig, stream: TrainingBlocks) -> Tensor:
    """The text that is calibrated on, (N, T)."""
    length = min(config.dataset.sequence_length, config.calibration.tokens)
    count = math.ceil(config.calibration.tokens / config.dataset.sequence_length)
    return torch.cat([batch.ids_BT for batch in stream.first(count)])[:, :length]
