"""Continued pre-training of a DynaKV compressor: the one training loop."""

import itertools
import math
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate.utils import broadcast
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import dynakv
from dynakv.objective import RateController
from lowrank.atomic import write_text
from lowrank.config import to_dict
from lowrank.errors import UserError
from lowrank.hf.loading import check_length, load_model, load_tokenizer, recompute_activations
from training.average import load_mean
from training.config import COMPRESSOR, TrainConfig
from training.data import Batch, TrainingBlocks
from training.engine import Engine
from training.heldout import measure
from training.inspection import SENTENCE, inspect, inspection_due
from training.nested import allocate_ranks
from training.reporting import Reporter, Workload
from training.schedule import learning_rate_factor
from training.setup import DEFAULT_PRICE, given_price, heldout_blocks, initialise, training_stream
from training.state import check_same_run, drop_later_states, load_into, newest_state, save_state, saved_states
from training.step import optimizer_step
from training.threshold import settle_threshold
from training.throughput import matmul_flops, model_flops
from training.trainable import build_optimizer, merged_state
from training.watch import GradientWatch, Watch

CHECKPOINT, STATES, WHOLE = "checkpoint", "states", "full"


def train(config: TrainConfig, *, resume: bool = False) -> Path:
    """Train as `config` says; returns the directory of the final checkpoint.

    That is the compressor's alone where nothing else was trained, and otherwise a full one: a compressor is worth nothing
    on another backbone than it was trained with.

    Args:
        config: of the run.
        resume: continue from the newest undamaged state under ``config.output`` instead of calibrating.
    """
    output, settings = Path(config.output), config.optimizer
    if not resume and (saved_states(output / STATES) or (output / CHECKPOINT).exists() or (output / WHOLE).exists()):
        go_on = "pass --resume to continue it, " if saved_states(output / STATES) else ""
        raise UserError(
            f"`output` is {output}, which holds an earlier run; {go_on}choose another `output`, or remove it"
        )
    # A resumed run has its price from the state.
    price = None if resume else given_price(config)
    engine = Engine(config)
    state, progress = newest_state(output / STATES, main=engine.main) if resume else (None, None)
    if progress is not None:
        check_same_run(progress["config"], to_dict(config))
    tokenizer = load_tokenizer(config.model)
    model = load_model(config.model, dtype=engine.loading_dtype, device=engine.device)
    check_length(model, config.dataset.sequence_length, "dataset.sequence_length")
    if dynakv.is_attached(model):
        raise UserError(
            f"`model` is {config.model}, a full checkpoint that has a compressor already; name the uncompressed model, and "
            f"a compressor checkpoint to train on from as `initial_checkpoint`"
        )
    stream, heldout = training_stream(config, tokenizer), heldout_blocks(config, tokenizer)

    dynakv.add_compressors(model, config.compressor)
    dynakv.use_ragged_cache(model)
    if config.gradient_checkpointing:
        recompute_activations(model)
    engine.prepare(model, build_optimizer(model, config))
    gradients = GradientWatch(engine.parameters, engine.device)
    watch = Watch(gradients.names, list(dynakv.compressors(engine.model)), config.divergence, output / STATES)
    blocks_per_step = settings.batch_size * settings.accumulate * engine.world
    start, cursor_S3 = 0, None
    if progress is None:
        estimate = initialise(engine, stream)
        controller = _controller(config, price if price is not None else estimate or DEFAULT_PRICE)
    else:
        if progress["blocks_per_step"] != blocks_per_step:
            raise UserError(
                f"--resume needs the same global batch: the run had {progress['blocks_per_step']} sequences a step, and "
                f"`optimizer.batch_size` × `optimizer.accumulate` × processes is {blocks_per_step}"
            )
        if progress["step"] > settings.steps:
            raise UserError(
                f"`optimizer.steps` is {settings.steps}, and the run to go on with has done {progress['step']}; ask for at "
                f"least so many"
            )
        load_into(engine, state, progress["step"])
        drop_later_states(output / STATES, progress["step"], engine)
        controller = _controller(config, progress["controller"]["start"])
        controller.load(progress["controller"])
        watch.load(progress["watch"])
        start, cursor_S3 = progress["step"], torch.tensor(progress["cursor"])

    tokens_per_step = blocks_per_step * config.dataset.sequence_length
    part = stream.part(
        batch=settings.batch_size,
        rank=engine.accelerator.process_index,
        world=engine.world,
        start=start * blocks_per_step,
        cursor_S3=cursor_S3,
    )
    # A forked worker inherits locks that the threads of a process with a model and a tokenizer may hold.
    context = "spawn" if config.dataset.workers else None
    loader = DataLoader(part, batch_size=None, num_workers=config.dataset.workers, multiprocessing_context=context)
    batches = iter(loader)
    work = Workload(
        tokens=tokens_per_step,
        flops=model_flops(engine.model, config.dataset.sequence_length),
        peak_flops=engine.world
        * (config.report.peak_flops or matmul_flops(engine.device, getattr(torch, config.dtype))),
        device=engine.device,
    )
    reporter = Reporter(
        output, steps=settings.steps, start=start, work=work, every=config.log_every, enabled=engine.main
    )
    sentence = tokenizer(config.report.sentence or SENTENCE)["input_ids"]
    engine.wrapped.train()
    for step in range(start, settings.steps):
        _schedule(engine, step)
        taken = list(itertools.islice(batches, settings.accumulate))
        alpha = controller.alpha
        result = optimizer_step(engine, taken, alpha, number=step + 1, gradients=gradients, watch=watch)
        controller.update(result.hard_rate, (step + 1) / settings.steps)
        values = {
            "loss": result.loss,
            "cross_entropy": result.cross_entropy,
            "soft_rate": result.soft_rate,
            "hard_rate": result.hard_rate,
            "alpha": alpha,
            **({} if result.divergence is None else {"divergence": result.divergence}),
        }
        reporter.step(step + 1, values, result.rates)
        if inspection_due(step + 1, settings.steps, config.report.inspect_every):
            with engine.gathered(engine.compressor_parameters()), engine.computing():
                found = inspect(engine.model, torch.tensor(sentence))
            reporter.inspection(step + 1, found, tokenizer.batch_decode([[token] for token in sentence]))
        due = config.checkpoint_every and (step + 1) % config.checkpoint_every == 0
        if due or step + 1 == settings.steps:
            # The last process reads the last block of a step, and knows where the text goes on.
            cursor_S3 = broadcast(taken[-1].cursor_S3.to(engine.device), from_process=engine.world - 1).cpu()
        if due:
            _check_projections(engine, watch, step + 1)
            progress = {
                "controller": controller.state(),
                "watch": watch.state(),
                "cursor": cursor_S3.tolist(),
                "blocks_per_step": blocks_per_step,
                "config": to_dict(config),
            }
            save_state(output / STATES, step + 1, engine, progress, config.keep_checkpoints)

    summary = {
        "steps": settings.steps,
        "tokens": settings.steps * tokens_per_step,
        "engine": {"type": engine.accelerator.distributed_type.value, "zero_stage": engine.stage},
        "threads": torch.get_num_threads(),
        "processes": engine.world,
        "alpha": controller.alpha,
    }
    if config.average_checkpoints:
        summary["averaged_steps"] = load_mean(engine, output / STATES, config.average_checkpoints)
    unseen = stream.part(start=settings.steps * blocks_per_step, cursor_S3=cursor_S3)
    engine.wrapped.eval()
    with engine.computing():
        summary |= _settle_and_measure(engine.model, config, unseen, heldout, reporter)
    reporter.close()
    final = _save(engine, tokenizer, output, summary)
    engine.accelerator.wait_for_everyone()
    engine.accelerator.end_training()
    return final


def _controller(config: TrainConfig, price: float) -> RateController:
    rate = config.rate
    if config.compressor.truncation == "nested":
        # Ranks are drawn, and allocated at the end: nothing that is learned has a price.
        return RateController(0.0, target=None, gain=0.0, ramp=0.0)
    return RateController(price, target=rate.target_retain_rate, gain=rate.gain, ramp=rate.ramp)


def _check_projections(engine: Engine, watch: Watch, step: int) -> None:
    """Before a state is written: one that no run can go on from must not take the place of one that can."""
    with engine.gathered(engine.compressor_parameters()):
        try:
            for compressor in dynakv.token_compressors(engine.model):
                compressor.projection.check_condition()
        except UserError as error:
            raise watch.stop(step, str(error), None) from error


def _schedule(engine: Engine, step: int) -> None:
    """Set this step's learning rates and random numbers and, for a straight-through run, its mask."""
    config, settings = engine.config, engine.config.optimizer
    factor = learning_rate_factor(step, settings.steps, warmup=settings.warmup, final=settings.final_lr)
    for group in engine.optimizer.param_groups:
        group["lr"] = group["peak"] * factor
    # From the step alone, so that a resumed run draws what the uninterrupted one would have drawn.
    torch.manual_seed((config.seed * 1_000_003 + step) * engine.world + engine.accelerator.process_index)
    late = step >= config.straight_through_from * settings.steps
    for compressor in dynakv.token_compressors(engine.model):
        compressor.train_on_hard_mask = late and config.compressor.gap == "straight_through"


def _settle_and_measure(
    model: PreTrainedModel,
    config: TrainConfig,
    unseen: TrainingBlocks,
    heldout: dict[str, list[Batch]],
    reporter: Reporter,
) -> dict[str, Any]:
    """Settle τ on training text that was not trained on, then measure every held-out text."""
    summary = {"heldout": {}}
    target = config.rate.target_retain_rate
    if target is not None and (config.rate.settle or config.compressor.truncation == "nested"):
        summary["settled"] = _settle(model, config, unseen, target)
        reporter.note("settled", summary["settled"], config.optimizer.steps)
    for name, batches in heldout.items():
        summary["heldout"][name] = measure(model, batches)
        reporter.note(f"held out, {name}", summary["heldout"][name], config.optimizer.steps)
    return summary


def _settle(model: PreTrainedModel, config: TrainConfig, unseen: TrainingBlocks, target: float) -> dict[str, float]:
    batches = unseen.first(math.ceil(config.rate.settle_tokens / config.dataset.sequence_length))
    if config.compressor.truncation == "nested":
        return {"hard_rate": allocate_ranks(model, batches, target)}
    return settle_threshold(model, batches, target, floor=config.rate.layer_floor)


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
