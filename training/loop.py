"""Continued pre-training of a DynaKV compressor: the one training loop.

Shapes: S data sets; 3 is a cursor (see :class:`training.data.Batch`).
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate.utils import broadcast
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import dynakv
from dynakv.objective import RateController
from lowrank_kv.hf.geometry import geometry_of
from lowrank_kv.hf.loading import check_length, load_model, load_tokenizer, recompute_activations
from lowrank_kv.utils.atomic_write import check_directory, write_text
from lowrank_kv.utils.config import require, to_dict
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.flops import matmul_flops

from .checkpoint_averaging import load_mean
from .config import COMPRESSOR, TrainConfig
from .data import Batch, TrainingBlocks
from .data_sources import heldout_blocks, training_stream
from .divergence_guard import GradientWatch, Watch
from .engine import Engine
from .initialization import DEFAULT_PRICE, given_price, initialize
from .inspection import SENTENCE, inspect, inspection_due
from .nested_ranks import allocate_ranks
from .optimizer import build_optimizer, merged_state
from .reporting import Reporter, Workload
from .resumable_state import (
    check_same_run,
    drop_later_states,
    load_into,
    newest_state,
    save_state,
    saved_states,
)
from .schedule import learning_rate_factor
from .step import optimizer_step
from .threshold_calibration import calibrate_threshold
from .throughput import model_flops
from .validation import measure

CHECKPOINT, STATES, WHOLE = "checkpoint", "states", "full"


@dataclasses.dataclass(kw_only=True)
class RunState:
    """Where a run is: beside what is trained and its optimizer, all that is needed to go on.

    Attributes:
        step: optimizer steps done.
        lr_projection: peak learning rate of U.
        cursor_S3: where the training text goes on, as of the last saved state or the run's end; None at its beginning.
        controller: holds α.
        watch: decides whether the run goes on.
    """

    step: int
    lr_projection: float
    cursor_S3: Tensor | None
    controller: RateController
    watch: Watch


def train(config: TrainConfig, *, resume: bool = False) -> Path:
    """Train as `config` says; returns the directory of the final checkpoint.

    That is the compressor's alone where nothing else was trained, and otherwise a full one: a compressor is worth nothing
    on another backbone than it was trained with.

    Args:
        config: of the run.
        resume: continue from the newest undamaged state under ``config.output`` instead of calibrating.
    """
    states, steps = check_directory(config.output) / STATES, config.optimizer.steps
    if not resume:
        _check_unused(Path(config.output))
    # A resumed run has its price from the state.
    price = None if resume else given_price(config)
    engine = Engine(config)
    saved = _saved_run(states, engine) if resume else None
    tokenizer = load_tokenizer(config.model)
    model = _stock_model(engine)
    stream, heldout = training_stream(config, tokenizer), heldout_blocks(config, tokenizer)
    lr_projection = _lr_projection(config, saved)
    _prepare(engine, model, lr_projection)
    gradients = GradientWatch(engine.parameters, engine.device)
    watch = Watch(gradients.names, list(dynakv.compressors(engine.model)), config.max_loss_increase, states)
    if saved is None:
        run = _begin(engine, stream, price, lr_projection, watch)
    else:
        run = _resume(engine, *saved, lr_projection, watch)
    batches = _batches(engine, stream, run)
    reporter = _reporter(engine, run.step)
    sentence = tokenizer(config.report.sentence or SENTENCE)["input_ids"]
    engine.wrapped.train()
    while run.step < steps:
        _schedule(engine, run.step)
        taken = list(itertools.islice(batches, config.optimizer.gradient_accumulation_steps))
        _step(engine, run, taken, gradients, reporter)
        if inspection_due(run.step, steps, config.report.inspect_every):
            _inspect(engine, run.step, tokenizer, sentence, reporter)
        due = config.checkpoint_every and run.step % config.checkpoint_every == 0
        if due or run.step == steps:
            # The last process reads the last block of a step, and knows where the text goes on.
            run.cursor_S3 = broadcast(taken[-1].cursor_S3.to(engine.device), from_process=engine.world - 1).cpu()
        if due:
            _check_projections(engine, run)
            save_state(states, run.step, engine, _progress(engine, run), config.keep_checkpoints)
    return _finish(engine, run, stream, heldout, tokenizer, reporter)


def _check_unused(output: Path) -> None:
    if saved_states(output / STATES) or (output / CHECKPOINT).exists() or (output / WHOLE).exists():
        go_on = "pass --resume to continue it, " if saved_states(output / STATES) else ""
        raise UserError(
            f"`output` is {output}, which holds an earlier run; {go_on}choose another `output`, or remove it"
        )


def _saved_run(states: Path, engine: Engine) -> tuple[Path, dict[str, Any]]:
    """The state to resume from and its progress entries, of a run that may go on as it is configured now."""
    state, progress = newest_state(states, main=engine.main)
    check_same_run(progress["config"], to_dict(engine.config))
    return state, progress


def _stock_model(engine: Engine) -> PreTrainedModel:
    config = engine.config
    model = load_model(config.model, dtype=engine.loading_dtype, device=engine.device)
    check_length(model, config.dataset.sequence_length, "dataset.sequence_length")
    if dynakv.is_attached(model):
        raise UserError(
            f"`model` is {config.model}, a full checkpoint that has a compressor already; name the uncompressed model, and "
            f"a compressor checkpoint to train on from as `initial_checkpoint`"
        )
    _check_target(config, geometry_of(model).width)
    return model


def _check_target(config: TrainConfig, width: int) -> None:
    target, granularity = config.rate.target_retain_rate, config.compressor.granularity
    least = min(granularity, width) / width
    require(
        target is None or target >= least,
        "rate.target_retain_rate",
        target,
        f"at least {least:.3g}: every token keeps `compressor.granularity`, {granularity}, of {width} coefficients",
    )


def _prepare(engine: Engine, model: PreTrainedModel, lr_projection: float) -> None:
    """Give a stock model its compressors and hand it to the engine."""
    config = engine.config
    dynakv.add_compressors(model, config.compressor)
    dynakv.use_ragged_cache(model)
    if config.gradient_checkpointing:
        recompute_activations(model)
    engine.prepare(model, build_optimizer(model, config, lr_projection))


def _lr_projection(config: TrainConfig, saved: tuple[Path, dict[str, Any]] | None) -> float:
    """Of U: as given, or else as the run to go on with has it, whose start may no longer be told from `config`."""
    if saved is None or config.optimizer.lr_projection is not None:
        return config.lr_projection
    return saved[1].get("lr_projection", config.lr_projection)  # states of earlier versions do not have it


def _begin(engine: Engine, stream: TrainingBlocks, price: float | None, lr_projection: float, watch: Watch) -> RunState:
    """Start the compressors, at the price given or else the one their start estimates."""
    estimate = initialize(engine, stream)
    price = price if price is not None else estimate or DEFAULT_PRICE
    controller = _controller(engine.config, start=price)
    return RunState(step=0, lr_projection=lr_projection, cursor_S3=None, controller=controller, watch=watch)


def _resume(engine: Engine, state: Path, progress: dict[str, Any], lr_projection: float, watch: Watch) -> RunState:
    """Go on from what :func:`_saved_run` found."""
    step, settings = progress["step"], engine.config.optimizer
    if progress["blocks_per_step"] != engine.blocks_per_step:
        raise UserError(
            f"--resume needs the same global batch: the run had {progress['blocks_per_step']} sequences a step, and "
            f"`optimizer.batch_size` × `optimizer.gradient_accumulation_steps` × processes is {engine.blocks_per_step}"
        )
    if step > settings.steps:
        raise UserError(
            f"`optimizer.steps` is {settings.steps}, and the run to go on with has done {step}; ask for at least so many"
        )
    load_into(engine, state, step)
    drop_later_states(state.parent, step, engine)
    watch.load(progress["watch"])
    controller = _controller(engine.config, **progress["controller"])
    cursor_S3 = torch.tensor(progress["cursor"])
    return RunState(step=step, lr_projection=lr_projection, cursor_S3=cursor_S3, controller=controller, watch=watch)


def _progress(engine: Engine, run: RunState) -> dict[str, Any]:
    """What :func:`_resume` needs of a run, ready for JSON."""
    return {
        "controller": run.controller.state(),
        "watch": run.watch.state(),
        "lr_projection": run.lr_projection,
        "cursor": run.cursor_S3.tolist(),
        "blocks_per_step": engine.blocks_per_step,
        "config": to_dict(engine.config),
    }


def _controller(config: TrainConfig, **state: float | None) -> RateController:
    """Of α: a fresh one's `start`, or all that was saved of one that goes on."""
    rate = config.rate
    if config.compressor.rank_policy == "nested":
        # Ranks are drawn, and allocated at the end: nothing that is learned has a price.
        return RateController(0.0, target=None, gain=0.0, ramp=0.0)
    return RateController(**state, target=rate.target_retain_rate, gain=rate.gain, ramp=rate.ramp)


def _batches(engine: Engine, stream: TrainingBlocks, run: RunState) -> Iterator[Batch]:
    """This process's batches, from where the run is."""
    workers = engine.config.dataset.workers
    part = stream.part(
        batch=engine.config.optimizer.batch_size,
        rank=engine.accelerator.process_index,
        world=engine.world,
        start=run.step * engine.blocks_per_step,
        cursor_S3=run.cursor_S3,
    )
    # A forked worker inherits locks that the threads of a process with a model and a tokenizer may hold.
    context = "spawn" if workers else None
    return iter(DataLoader(part, batch_size=None, num_workers=workers, multiprocessing_context=context))


def _reporter(engine: Engine, start: int) -> Reporter:
    config = engine.config
    length = config.dataset.sequence_length
    peak_flops = config.report.peak_flops or matmul_flops(engine.device, getattr(torch, config.dtype))
    work = Workload(
        tokens=engine.blocks_per_step * length,
        flops=model_flops(engine.model, length),
        peak_flops=engine.world * peak_flops,
        device=engine.device,
    )
    return Reporter(
        Path(config.output),
        steps=config.optimizer.steps,
        start=start,
        work=work,
        every=config.log_every,
        enabled=engine.main,
    )


def _step(engine: Engine, run: RunState, batches: list[Batch], gradients: GradientWatch, reporter: Reporter) -> None:
    """Take the run's next step over this process's `batches`, let α answer, and report it."""
    number, alpha = run.step + 1, run.controller.alpha
    result = optimizer_step(engine, batches, alpha, number=number, gradients=gradients, watch=run.watch)
    run.controller.update(result.hard_rate, number / engine.config.optimizer.steps)
    values = {
        "loss": result.loss,
        "cross_entropy": result.cross_entropy,
        "soft_rate": result.soft_rate,
        "hard_rate": result.hard_rate,
        "alpha": alpha,
        **({} if result.kl is None else {"kl": result.kl}),
    }
    reporter.step(number, values, result.rates)
    run.step = number


def _inspect(
    engine: Engine, step: int, tokenizer: PreTrainedTokenizerBase, sentence: list[int], reporter: Reporter
) -> None:
    with engine.gathered(engine.compressor_parameters()), engine.computing():
        found = inspect(engine.model, torch.tensor(sentence))
    reporter.inspection(step, found, tokenizer.batch_decode([[token] for token in sentence]))


def _check_projections(engine: Engine, run: RunState) -> None:
    """Before a state is written: one that no run can go on from must not take the place of one that can."""
    with engine.gathered(engine.compressor_parameters()):
        try:
            for compressor in dynakv.token_compressors(engine.model):
                compressor.projection.check_condition()
        except UserError as error:
            raise run.watch.stop(run.step, str(error), None) from error


def _schedule(engine: Engine, step: int) -> None:
    """Set this step's learning rates and random numbers and, for a straight-through run, its mask."""
    config, settings = engine.config, engine.config.optimizer
    factor = learning_rate_factor(step, settings.steps, warmup=settings.warmup_ratio, final=settings.min_lr_ratio)
    for group in engine.optimizer.param_groups:
        group["lr"] = group["peak"] * factor
    # From the step alone, so that a resumed run draws what the uninterrupted one would have drawn.
    torch.manual_seed((config.seed * 1_000_003 + step) * engine.world + engine.accelerator.process_index)
    late = step >= config.straight_through_from * settings.steps
    for compressor in dynakv.token_compressors(engine.model):
        compressor.train_on_hard_mask = late and config.compressor.mask == "straight_through"


def _finish(
    engine: Engine,
    run: RunState,
    stream: TrainingBlocks,
    heldout: dict[str, list[Batch]],
    tokenizer: PreTrainedTokenizerBase,
    reporter: Reporter,
) -> Path:
    """Average, settle, measure and save what was trained; returns the directory of the final checkpoint."""
    config, output = engine.config, Path(engine.config.output)
    summary = {
        "steps": config.optimizer.steps,
        "tokens": config.optimizer.steps * engine.blocks_per_step * config.dataset.sequence_length,
        "engine": {"type": engine.accelerator.distributed_type.value, "zero_stage": engine.stage},
        "threads": torch.get_num_threads(),
        "processes": engine.world,
        "alpha": run.controller.alpha,
    }
    if config.average_checkpoints:
        summary["averaged_steps"] = load_mean(engine, output / STATES, config.average_checkpoints)
    following = stream.part(start=run.step * engine.blocks_per_step, cursor_S3=run.cursor_S3)
    engine.wrapped.eval()
    with engine.computing():
        summary |= _settle_and_measure(engine.model, config, following, heldout, reporter)
    reporter.close()
    final = _save(engine, tokenizer, output, summary)
    engine.accelerator.wait_for_everyone()
    engine.accelerator.end_training()
    return final


def _settle_and_measure(
    model: PreTrainedModel,
    config: TrainConfig,
    following: TrainingBlocks,
    heldout: dict[str, list[Batch]],
    reporter: Reporter,
) -> dict[str, Any]:
    """Settle τ on the training text that comes next, then measure every held-out text."""
    summary = {"heldout": {}}
    target = config.rate.target_retain_rate
    if target is not None and (config.rate.calibrate_threshold or config.compressor.rank_policy == "nested"):
        summary["settled"] = _settle(model, config, following, target)
        reporter.note("settled", summary["settled"], config.optimizer.steps)
    for name, batches in heldout.items():
        summary["heldout"][name] = measure(model, batches)
        reporter.note(f"held out, {name}", summary["heldout"][name], config.optimizer.steps)
    return summary


def _settle(model: PreTrainedModel, config: TrainConfig, following: TrainingBlocks, target: float) -> dict[str, float]:
    batches = following.first(math.ceil(config.rate.calibrate_threshold_tokens / config.dataset.sequence_length))
    if config.compressor.rank_policy == "nested":
        return {"hard_rate": allocate_ranks(model, batches, target)}
    return calibrate_threshold(model, batches, target, floor=config.rate.layer_floor)


def _save(engine: Engine, tokenizer: PreTrainedTokenizerBase, output: Path, summary: dict[str, Any]) -> Path:
    """Write the final checkpoints; returns the directory of the one to use."""
    config, alone = engine.config, engine.config.trainable == COMPRESSOR
    if alone:
        with engine.gathered(engine.compressor_parameters()):
            if engine.main:
                dynakv.save_compressor(engine.model, output / CHECKPOINT, summary=summary)
    if config.full_checkpoint or not alone:
        state = merged_state(engine)
        if engine.main:
            dynakv.save_full(engine.model, output / WHOLE, state=state)
            tokenizer.save_pretrained(output / WHOLE)
    if engine.main:
        write_text(output / "summary.yaml", yaml.safe_dump(summary, allow_unicode=True, sort_keys=False))
        write_text(output / "config.yaml", yaml.safe_dump(to_dict(config), allow_unicode=True, sort_keys=False))
    return output / (CHECKPOINT if alone else WHOLE)
