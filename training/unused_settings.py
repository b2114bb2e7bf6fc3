"""Settings of a run that change nothing, because another one says otherwise."""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from dynakv.config import GATE, NESTED, SOFT_THRESHOLD
from dynakv.training_config import COMPRESSOR, LORA, TrainConfig


class _Condition(NamedTuple):
    """When settings say something, and in words what that depends on."""

    holds: Callable[[TrainConfig], bool]
    what: str


def _reads_on(config: TrainConfig) -> bool:
    """Whether a run reads more of the training text after its last step."""
    compressor = config.compressor
    counts_classes = compressor.has_plan and compressor.token_classes > 1
    return config.calibrates_threshold or compressor.rank_policy == NESTED or counts_classes


_GATES = _Condition(lambda config: config.compressor.has_gates, "`compressor.rank_policy: gate`")
_PLAN = _Condition(lambda config: config.compressor.has_plan, "`compressor.rank_policy: plan`")
_TARGET = _Condition(
    lambda config: config.rate.target_retain_rate is not None and config.compressor.has_price,
    "`rate.target_retain_rate`, and gates, soft thresholds or learned classes that are to meet it",
)
_BACKBONE = _Condition(lambda config: config.trainable != COMPRESSOR, "`trainable: lora` or `trainable: full`")
_HELD_OUT = _Condition(lambda config: bool(config.dataset.heldout), "`dataset.heldout`")
_KEYS = {
    "compressor.threshold": _GATES,
    "compressor.gate_decay": _Condition(
        lambda config: (
            config.compressor.has_gates and not config.starts_from_gradients and not config.initial_checkpoint
        ),
        "gates that start nearly open, from a PCA (`calibration.start: pca`), without `initial_checkpoint`",
    ),
    "compressor.granularity": _Condition(
        lambda config: not config.compressor.has_plan, "a `compressor.rank_policy` that keeps ranks"
    ),
    "compressor.token_classes": _PLAN,
    "compressor.own_directions_from": _Condition(
        lambda config: config.compressor.own_directions > 0, "`compressor.own_directions`"
    ),
    "rate.gain": _TARGET,
    "rate.ramp": _TARGET,
    "rate.calibrate_threshold": _Condition(
        lambda config: config.compressor.has_gates or config.compressor.has_plan and config.compressor.has_price,
        "`compressor.rank_policy: gate`, or a plan with `compressor.learned_classes`",
    ),
    "rate.calibrate_threshold_tokens": _Condition(
        _reads_on,
        "gates with `rate.target_retain_rate` and `rate.calibrate_threshold`, nested ranks, or a plan of several classes",
    ),
    "rate.fix_ranks_from": _Condition(
        lambda config: config.compressor.rank_policy == SOFT_THRESHOLD, "`compressor.rank_policy: soft_threshold`"
    ),
    "straight_through_from": _Condition(
        lambda config: config.compressor.mask == "straight_through", "`compressor.mask: straight_through`"
    ),
    "lora": _Condition(lambda config: config.trainable == LORA, "`trainable: lora`"),
    "optimizer.lr_gate": _Condition(
        lambda config: config.compressor.has_gates or bool(config.compressor.learned_classes),
        "`compressor.rank_policy: gate`, or a plan with `compressor.learned_classes`",
    ),
    "optimizer.lr_gate_bias": _Condition(
        lambda config: config.compressor.rank_policy in (GATE, SOFT_THRESHOLD),
        "`compressor.rank_policy: gate` or `soft_threshold`",
    ),
    "optimizer.lr_backbone": _BACKBONE,
    "optimizer.weight_decay": _BACKBONE,
    "dataset.shuffle_buffer": _Condition(lambda config: config.dataset.streaming, "`dataset.streaming: true`"),
    "dataset.heldout_subset": _HELD_OUT,
    "dataset.heldout_split": _HELD_OUT,
    "dataset.heldout_text_field": _HELD_OUT,
    "heldout_blocks": _Condition(
        # None of them measures nothing, as no text does.
        lambda config: bool(config.dataset.heldout or config.dataset.heldout_share) or not config.heldout_blocks,
        "`dataset.heldout` or `dataset.heldout_share`",
    ),
    "full_checkpoint": _Condition(
        lambda config: config.trainable == COMPRESSOR, "`trainable: compressor`, as other runs always write one"
    ),
    "keep_checkpoints": _Condition(lambda config: config.checkpoint_every > 0, "`checkpoint_every` above 0"),
    "calibration.start": _Condition(lambda config: config.initial_checkpoint is None, "no `initial_checkpoint`"),
    "calibration.tokens": _Condition(
        lambda config: config.calibration.bases is None and config.initial_checkpoint is None,
        "a run that calibrates, without `calibration.bases` and `initial_checkpoint`",
    ),
}


def warn_of_unused_settings(config: TrainConfig) -> None:
    """Warn of each setting that was given, other than by default, and changes nothing."""
    for key, condition in _KEYS.items():
        given, default = _given_and_default(config, key)
        if given != default and not condition.holds(config):
            shown = f"{given!r}" if not dataclasses.is_dataclass(given) else "given"
            warnings.warn(f"`{key}` is {shown} and changes nothing: it needs {condition.what}", stacklevel=2)


def _given_and_default(config: TrainConfig, key: str) -> tuple[Any, Any]:
    *sections, name = key.split(".")
    section = functools.reduce(getattr, sections, config)
    field = type(section).__dataclass_fields__[name]
    has_default = field.default is not dataclasses.MISSING
    return getattr(section, name), field.default if has_default else field.default_factory()
