"""Where a run stands: how it begins, what a saved state records of it, and how it resumes."""

import dataclasses
from pathlib import Path
from typing import Any

from dynakv.config import SOFT_THRESHOLD
from dynakv.objective import RateController
from dynakv.training_config import TrainConfig
from lowrank_kv.utils.config import to_dict
from lowrank_kv.utils.errors import UserError

from .data import TrainingBlocks
from .data_sources import warn_of_heldout_text
from .divergence_guard import DivergenceGuard
from .engine import Engine
from .initialization import initialize, starting_price
from .resumable_state import check_same_run, drop_later_states, load_into, newest_state
from .run_records import check_same_texts
from .selection import Selection
from .soft_thresholds import has_fixed_ranks, learn_again, learns_at, warn_of_fixed_ranks
from .stream_places import StreamPlaces
from .texts_read import texts_of_run


@dataclasses.dataclass(kw_only=True)
class RunState:
    """Everything a run needs to continue, besides the trained parameters and their optimizer.

    Attributes:
        step: optimizer steps done.
        lr_projection: peak learning rate of U.
        places: where the training text continues.
        controller: holds α.
        guard: stops the run if it diverges.
        texts_read: records of the texts that its compressors come from (:func:`training.texts_read.texts_of_run`).
        selection: what was measured on held-out text so far.
    """

    step: int
    lr_projection: float
    places: StreamPlaces
    controller: RateController
    guard: DivergenceGuard
    texts_read: list[dict[str, Any]]
    selection: Selection

    def progress(self, engine: Engine) -> dict[str, Any]:
        """The entries that :func:`resume_run` reads, ready for JSON."""
        return {
            "controller": self.controller.state(),
            "divergence_guard": self.guard.state(),
            "lr_projection": self.lr_projection,
            "places": self.places.saved,
            "blocks_per_step": engine.blocks_per_step,
            "texts_read": self.texts_read,
            "config": to_dict(engine.config),
            **({"has_fixed_ranks": has_fixed_ranks(engine.model)} if _has_thresholds(engine.config) else {}),
            **self.selection.progress(),
        }


def saved_run(states: Path, engine: Engine) -> tuple[Path, dict[str, Any]]:
    """The newest undamaged state and its progress entries.

    Raises:
        UserError: there is none, or its run had another configuration or other text.
    """
    state, progress = newest_state(states, main=engine.main)
    check_same_run(progress["config"], to_dict(engine.config))
    check_fixed_target(progress, engine.config)
    if engine.main:  # texts may be long to hash
        check_same_texts(engine.config.dataset, progress)
    return state, progress


def check_fixed_target(progress: dict[str, Any], config: TrainConfig) -> None:
    """Raise :class:`UserError` where a target has changed by which bits or ranks were fixed already."""
    saved, has_plan = progress["config"], config.compressor.has_plan
    before, now = saved["rate"]["target_retain_rate"], config.rate.target_retain_rate
    last = progress["step"] - 1, saved["optimizer"]["steps"], config.rate.fix_ranks_from
    # States of earlier versions do not say; these fixed ranks by the steps that were then given.
    is_fixed = _has_thresholds(config) and progress.get("has_fixed_ranks", not learns_at(*last))
    if (has_plan or is_fixed) and before != now:
        what = "its plan of bits was made" if has_plan else "its ranks were fixed"
        raise UserError(
            f"--resume cannot change `rate.target_retain_rate`: {what} for {before!r}, and now it is {now!r}; set it back, "
            f"or start another run, without --resume and with another `output`"
        )


def lr_projection_of(config: TrainConfig, saved: tuple[Path, dict[str, Any]] | None) -> float:
    """Peak learning rate of U: from the configuration, or from the resumed run, whose start `config` may no longer tell."""
    if saved is None or config.optimizer.lr_projection is not None:
        return config.lr_projection
    return saved[1]["lr_projection"]


def begin_run(
    engine: Engine,
    stream: TrainingBlocks,
    price: float | None,
    lr_projection: float,
    guard: DivergenceGuard,
    heldout_text: str,
) -> RunState:
    """Initialize the compressors and start α at `price`, or at the initialization's estimate if `price` is None.

    Args:
        heldout_text: digest of what is held out (:func:`training.selection.digest_of`).
    """
    texts_read = texts_of_run(engine.config)
    if engine.main:  # before a long calibration
        warn_of_heldout_text(engine.config, texts_read)
    estimate = initialize(engine, stream)
    if engine.config.initial_checkpoint is not None and _has_thresholds(engine.config):
        learn_again(engine.model)
    price = price if price is not None else starting_price(engine.config, estimate)
    controller = _controller(engine.config, start=price)
    places = StreamPlaces(engine, None)
    return RunState(
        step=0,
        selection=Selection(engine.config, heldout_text),
        lr_projection=lr_projection,
        places=places,
        controller=controller,
        guard=guard,
        texts_read=texts_read,
    )


def resume_run(
    engine: Engine,
    state: Path,
    progress: dict[str, Any],
    lr_projection: float,
    guard: DivergenceGuard,
    heldout_text: str,
) -> RunState:
    """Load the state that :func:`saved_run` found into a prepared engine.

    Args:
        heldout_text: as for :func:`begin_run`.

    Raises:
        UserError: the global batch is another, or the run has done more steps than `optimizer.steps`.
    """
    step, settings = progress["step"], engine.config.optimizer
    if progress["blocks_per_step"] != engine.blocks_per_step:
        raise UserError(
            f"--resume needs the same global batch: the run had {progress['blocks_per_step']} sequences a step, and "
            f"`optimizer.batch_size` × `optimizer.gradient_accumulation_steps` × processes is {engine.blocks_per_step}"
        )
    if step > settings.steps:
        raise UserError(
            f"`optimizer.steps` is {settings.steps}, and the resumed run has done {step} steps already; set it to {step} "
            f"or more"
        )
    texts_read = progress.get("texts_read", [])  # states of earlier versions do not say
    if engine.main:
        warn_of_heldout_text(engine.config, texts_read)
    places = StreamPlaces(engine, progress["places"])
    load_into(engine, state, step)
    drop_later_states(state.parent, step, engine)
    if engine.main and _has_thresholds(engine.config):
        warn_of_fixed_ranks(engine, step, progress["config"]["optimizer"]["steps"])
    guard.load(progress["divergence_guard"])
    controller = _controller(engine.config, **progress["controller"])
    return RunState(
        step=step,
        selection=Selection.resumed(engine.config, heldout_text, progress, main=engine.main),
        lr_projection=lr_projection,
        places=places,
        controller=controller,
        guard=guard,
        texts_read=texts_read,
    )


def _has_thresholds(config: TrainConfig) -> bool:
    return config.compressor.rank_policy == SOFT_THRESHOLD


def _controller(config: TrainConfig, **state: float | None) -> RateController:
    """The controller of α, from the `start` of a fresh run or from everything a resumed run saved."""
    rate = config.rate
    if not config.compressor.has_price:
        # Ranks are drawn in training and allocated at its end, or bits are before it: nothing that is learned has a price.
        return RateController(0.0, target=None, gain=0.0, ramp=0.0)
    return RateController(**state, target=rate.target_retain_rate, gain=config.gain, ramp=rate.ramp)
