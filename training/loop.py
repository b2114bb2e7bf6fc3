"""Continued pre-training of a DynaKV compressor: the one training loop."""

import contextlib
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import dynakv
from dynakv.config import METHOD, SOFT_THRESHOLD
from dynakv.paper_sentence import SENTENCE
from dynakv.training_config import COMPRESSOR, TrainConfig
from lowrank_kv.hf import full_checkpoint
from lowrank_kv.hf.geometry import geometry_of
from lowrank_kv.hf.loading import check_length, load_model, load_tokenizer, recompute_activations
from lowrank_kv.hf.recurrent_layers import has_recurrent_layers
from lowrank_kv.hf.self_check import check_by_itself
from lowrank_kv.utils.atomic_write import check_directory
from lowrank_kv.utils.config import require, to_dict
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.flops import matmul_flops
from lowrank_kv.utils.run_lock import run_lock

from .best_step import measure_if_due
from .data import Batch, TrainingBlocks
from .data_sources import heldout_blocks, labels_of, training_stream
from .divergence_guard import DivergenceGuard, GradientNorms
from .documents_apart import keep_apart
from .engine import Engine, is_first_process
from .finish import CHECKPOINT, FULL_CHECKPOINT, STATES, finish
from .initialization import check_continued, given_price
from .inspection import inspect, inspection_due
from .modes import begin_training
from .optimizer import build_optimizer
from .read_share import check_read_compressed
from .reporting import Reporter, Workload
from .resumable_state import changed_settings, save_state, saved_states
from .run_records import begin_record
from .run_state import RunState, begin_run, lr_projection_of, resume_run, saved_run
from .schedule import learning_rate_factor
from .selection import digest_of
from .soft_thresholds import fix_ranks_if_due
from .step import optimizer_step
from .stream_places import readers_of
from .throughput import model_flops
from .unused_settings import warn_of_unused_settings
from .worker_errors import WithErrors, without_errors

_LOOKED_AT = 8  # blocks of a text, for how much of it is read compressed


def train(config: TrainConfig, *, resume: bool = False) -> Path:
    """Train as `config` says; returns the directory of the final checkpoint.

    That is a compressor checkpoint if only the compressor was trained, and otherwise a full one: a compressor is worth
    nothing on another backbone than the one it was trained with.

    Args:
        config: of the run.
        resume: continue from the newest undamaged state under ``config.output`` instead of calibrating.

    Raises:
        UserError: another run writes into ``config.output``, or that holds a run that is not to be continued.
    """
    # The processes of a launch share one lock, which the first of them holds.
    with run_lock(config.output) if is_first_process() else contextlib.nullcontext():
        return _train(config, resume)


def _train(config: TrainConfig, resume: bool) -> Path:
    states, steps = check_directory(config.output) / STATES, config.optimizer.steps
    if not resume:
        _check_unused(Path(config.output))
    price = None  # a resumed run has it from the state
    if not resume:
        check_continued(config)
        price = given_price(config)
    engine = Engine(config)
    config = engine.config
    if engine.main:
        warn_of_unused_settings(config)
    saved = saved_run(states, engine) if resume else None
    tokenizer = load_tokenizer(config.model)
    model = _stock_model(engine)
    stream, heldout = training_stream(config, tokenizer), heldout_blocks(config, tokenizer)
    if (exact := config.compressor.seen_exactly) is not None:
        check_read_compressed(stream.first(_LOOKED_AT), exact, "the training text", warns=engine.main)
        for name, blocks in heldout.items():
            check_read_compressed(blocks[:_LOOKED_AT], exact, f"held-out {name}", warns=engine.main)
    lr_projection = lr_projection_of(config, saved)
    _prepare(engine, model, lr_projection)
    if config.dataset.isolate_documents:
        _isolate_documents(engine)
    gradient_norms = GradientNorms(engine.parameters, engine.device)
    layers = list(dynakv.compressors(engine.model))
    guard = DivergenceGuard(gradient_norms.names, layers, config.max_loss_increase, states)
    heldout_text = digest_of(heldout)
    if saved is None:
        run = begin_run(engine, stream, price, lr_projection, guard, heldout_text)
    else:
        run = resume_run(engine, *saved, lr_projection, guard, heldout_text)
    record = begin_record(engine, None if saved is None else saved[1])
    batches = _batches(engine, stream, run)
    reporter = _reporter(engine, run.step)
    with contextlib.closing(reporter):  # a run that fails keeps its last events, too
        if saved is not None:
            _tell_of_changed_settings(saved[1], config, reporter)
        sentence = tokenizer(config.report.sentence or SENTENCE)["input_ids"]
        begin_training(engine)
        apart = stream.apart() if config.heldout_every else stream
        select = functools.partial(measure_if_due, engine, run, apart, heldout, states, reporter)
        select()  # a run may have been stopped between a state and its measurement
        while run.step < steps:
            _schedule(engine, run.step)
            passes = config.optimizer.gradient_accumulation_steps
            step_batches = list(itertools.islice(batches, passes))
            rounds = run.places.rounds()
            run.places.note(step_batches, run.step * passes)
            _step(engine, run, step_batches, gradient_norms, reporter)
            _tell_of_repeated_text(run, rounds, config, reporter)
            if inspection_due(run.step, steps, config.report.inspect_every):
                _inspect(engine, run.step, tokenizer, sentence, reporter)
            is_due = config.checkpoint_every and run.step % config.checkpoint_every == 0
            # What comes after the last step may fail, and would take the steps since the last state with it. A mean is of
            # the states that a run writes on its way.
            is_last = run.step == steps and bool(config.checkpoint_every) and not config.average_checkpoints
            if is_due or run.step == steps:
                run.places.gather()
            if is_due or is_last:
                _check_projections(engine, run)
                progress = run.progress(engine) | {"run_id": record["run_id"], "inputs": record["inputs"]}
                also = run.selection.states_kept
                save_state(states, run.step, engine, progress, config.keep_checkpoints, also)
            select()
        return finish(engine, run, stream, heldout, tokenizer, reporter, record)


def _check_unused(output: Path) -> None:
    if saved_states(output / STATES) or (output / CHECKPOINT).exists() or (output / FULL_CHECKPOINT).exists():
        go_on = "pass --resume to continue it, " if saved_states(output / STATES) else ""
        raise UserError(
            f"`output` is {output}, which holds an earlier run; {go_on}choose another `output`, or remove it"
        )


def _stock_model(engine: Engine) -> PreTrainedModel:
    config = engine.config
    model = load_model(config.model, dtype=engine.loading_dtype, device=engine.device)
    check_length(model, config.dataset.sequence_length, "dataset.sequence_length")
    if dynakv.is_attached(model):
        raise UserError(
            f"`model` is {config.model}, a full checkpoint that has a compressor already; name the uncompressed model, and "
            f"a compressor checkpoint to train on from as `initial_checkpoint`"
        )
    if getattr(model, "_hf_peft_config_loaded", False):  # transformers puts the adapter of such a directory on its base
        raise UserError(
            f"`model` is {config.model}, an adapter of peft: a run would take it for one that it trains itself, and learn "
            f"from the model without it; name a directory of the merged model "
            f"(`model.merge_and_unload().save_pretrained(DIR)`)"
        )
    if (config.trainable != COMPRESSOR or config.full_checkpoint) and full_checkpoint.is_quantized(model, METHOD):
        asked = "`full_checkpoint`" if config.trainable == COMPRESSOR else f"`trainable: {config.trainable}`"
        raise UserError(
            f"`model` is {config.model}, which is quantized, and {asked} would write it into a full checkpoint, which can "
            f"name one method only; set `trainable` to {COMPRESSOR} and leave `full_checkpoint` out"
        )
    if config.dataset.isolate_documents and has_recurrent_layers(model.config.get_text_config(decoder=True)):
        raise UserError(
            f"`model` is {config.model}, whose recurrent layers carry a state from one document of a block into the next; "
            f"set `dataset.isolate_documents` to false"
        )
    _check_target(config, geometry_of(model).width)
    if config.self_check and not engine.deepspeed:
        check_by_itself(model)
    return model


def _check_target(config: TrainConfig, width: int) -> None:
    target, granularity = config.rate.target_retain_rate, config.compressor.granularity
    least = min(granularity, width) / width
    require(
        target is None or config.compressor.has_plan or target >= least,
        "rate.target_retain_rate",
        target,
        f"at least {least:.3g}: every token keeps `compressor.granularity`, {granularity}, of {width} coefficients",
    )


def _prepare(engine: Engine, model: PreTrainedModel, lr_projection: float) -> None:
    """Give a stock model its compressors and hand it to the engine."""
    config = engine.config
    dynakv.add_compressors(model, config.compressor)
    dynakv.use_dynakv_cache(model)
    dynakv.set_exact_tokens(model, config.compressor.seen_exactly)
    if config.gradient_checkpointing:
        recompute_activations(model)
    engine.prepare(model, build_optimizer(model, config, lr_projection))


def _isolate_documents(engine: Engine) -> None:
    """Let documents of a block see nothing of one another, after the engine has spread the weights."""
    remedy = "set `dataset.isolate_documents` to false, or use a model of another family"
    keep_apart(engine.model, engine.device, name=engine.config.model, remedy=remedy)


def _batches(engine: Engine, stream: TrainingBlocks, run: RunState) -> Iterator[Batch]:
    """This process's batches, from where the run is."""
    workers = engine.config.dataset.workers
    shard = stream.shard(
        batch=engine.config.optimizer.batch_size,
        rank=engine.accelerator.process_index,
        world=engine.world,
        start=run.step * engine.blocks_per_step,
        workers=readers_of(engine.config),
        places=run.places.own,
    )
    # A forked worker inherits locks that the threads of a process with a model and a tokenizer may hold.
    context = "spawn" if workers else None
    loader = DataLoader(WithErrors(shard), batch_size=None, num_workers=workers, multiprocessing_context=context)
    return without_errors(iter(loader))


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


def _step(
    engine: Engine, run: RunState, batches: list[Batch], gradient_norms: GradientNorms, reporter: Reporter
) -> None:
    """Take the run's next step over this process's `batches`, update α, and report the step."""
    number, alpha = run.step + 1, run.controller.alpha
    result = optimizer_step(engine, batches, alpha, number=number, gradient_norms=gradient_norms, guard=run.guard)
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


def _tell_of_repeated_text(run: RunState, before: list[int], config: TrainConfig, reporter: Reporter) -> None:
    """Say of which texts the last step began a second round, where they had been begun `before` so many times."""
    for name, earlier, now in zip(labels_of(config.dataset.name), before, run.places.rounds(), strict=True):
        if earlier < 2 <= now:
            reporter.say(
                f"step {run.step} of {config.optimizer.steps} begins {name} again: all of its documents have been trained "
                f"on. More text in `dataset.name`, or fewer `optimizer.steps`, would train on each of them once"
            )


def _tell_of_changed_settings(progress: dict[str, Any], config: TrainConfig, reporter: Reporter) -> None:
    """Say which settings are no longer those that the run had when the state was saved."""
    changed = changed_settings(progress["config"], to_dict(config))
    if changed:
        what = ", ".join(f"`{key}` was {before!r} and is {now!r}" for key, (before, now) in changed.items())
        reporter.say(f"from step {progress['step']} on the run continues with other settings: {what}")


def _inspect(
    engine: Engine, step: int, tokenizer: PreTrainedTokenizerBase, sentence: list[int], reporter: Reporter
) -> None:
    with engine.gather_full(engine.compressor_parameters()), engine.computing():
        found = inspect(engine.model, torch.tensor(sentence))
    reporter.inspection(step, found, tokenizer.batch_decode([[token] for token in sentence]))


def _check_projections(engine: Engine, run: RunState) -> None:
    """Stop the run before it replaces a state that can be resumed by one that cannot."""
    with engine.gather_full(engine.compressor_parameters()):
        try:
            for compressor in dynakv.token_compressors(engine.model):
                compressor.projection.check_condition()
        except UserError as error:
            raise run.guard.stop(run.step, str(error), None) from error


def _schedule(engine: Engine, step: int) -> None:
    """Set this step's learning rates and random numbers, the mask of a straight-through run, and what says ranks."""
    config, settings = engine.config, engine.config.optimizer
    factor = learning_rate_factor(step, settings.steps, warmup=settings.warmup_ratio, final=settings.min_lr_ratio)
    for group in engine.optimizer.param_groups:
        group["lr"] = group["peak"] * factor
    # From the step alone, so that a resumed run draws what the uninterrupted one would have drawn.
    torch.manual_seed((config.seed * 1_000_003 + step) * engine.world + engine.accelerator.process_index)
    if config.compressor.mask == "straight_through":
        for compressor in dynakv.token_compressors(engine.model):
            compressor.train_on_hard_mask = step >= config.straight_through_from * settings.steps
    if config.compressor.rank_policy == SOFT_THRESHOLD:
        fix_ranks_if_due(engine, step)
