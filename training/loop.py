"""Continued pre-training of a DynaKV compressor: the one training loop.

Shapes: B batch, T tokens.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
import yaml
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

import dynakv
from dynakv.objective import RateController, objective, retain_rates
from lowrank.atomic import write_text
from lowrank.config import to_dict
from lowrank.errors import UserError
from lowrank.hf.loading import check_length, load_model, load_tokenizer, recompute_activations
from training.config import TrainConfig
from training.data import TrainingBlocks
from training.heldout import measure
from training.reporting import Reporter
from training.schedule import learning_rate_factor
from training.setup import attach_calibrated, build_optimizer, heldout_blocks, training_stream
from training.state import check_same_run, load_latest, save_state, saved_states
from training.threshold import settle_threshold

CHECKPOINT, STATES, FULL = "checkpoint", "states", "full"
SETTLING_BLOCKS = 4  # sequences the final threshold is read from


def train(config: TrainConfig, *, resume: bool = False) -> Path:
    """Train as `config` says; returns the directory of the final compressor checkpoint.

    Args:
        config: of the run.
        resume: continue from the newest state under ``config.output`` instead of calibrating.
    """
    accelerator = Accelerator(gradient_accumulation_steps=config.optimizer.accumulate)
    output, settings = Path(config.output), config.optimizer
    if not resume and (saved_states(output / STATES) or (output / CHECKPOINT).exists()):
        raise UserError(
            f"`output` is {output}, which holds an earlier run; pass --resume to continue it, choose another `output`, or "
            f"remove it"
        )
    tokenizer = load_tokenizer(config.model)
    model = load_model(config.model, dtype=config.dtype, device=accelerator.device)
    check_length(model, config.dataset.sequence_length, "dataset.sequence_length")
    stream, heldout = training_stream(config, tokenizer), heldout_blocks(config, tokenizer)

    if resume:
        dynakv.add_compressors(model, config.compressor)
    else:
        attach_calibrated(model, config, stream, progress=accelerator.is_main_process)
    dynakv.use_ragged_cache(model)
    if config.gradient_checkpointing:
        recompute_activations(model)
    optimizer = build_optimizer(model, config)
    rate = config.rate
    controller = RateController(rate.alpha, target=rate.target_retain_rate, gain=rate.gain, ramp=rate.ramp)
    start = 0
    if resume:
        progress = load_latest(output / STATES, model, optimizer)
        check_same_run(progress["config"], to_dict(config))
        start = progress["step"]
        controller.load(progress["controller"])

    world = accelerator.num_processes
    blocks_per_step = settings.batch_size * settings.accumulate * world
    tokens_per_step = blocks_per_step * config.dataset.sequence_length
    part = stream.part(rank=accelerator.process_index, world=world, skip=start * blocks_per_step)
    batches = iter(DataLoader(part, batch_size=settings.batch_size))
    trained, optimizer = accelerator.prepare(model, optimizer)
    model = accelerator.unwrap_model(trained)
    reporter = Reporter(
        output,
        steps=settings.steps,
        start=start,
        tokens_per_step=tokens_per_step,
        every=config.log_every,
        enabled=accelerator.is_main_process,
    )
    trained.train()
    for step in range(start, settings.steps):
        _schedule(model, optimizer, config, step)
        values = _step(accelerator, trained, model, optimizer, batches, config, controller.alpha, step)
        controller.update(values["hard_rate"], (step + 1) / settings.steps)
        reporter.step(step + 1, values, retain_rates(model))
        every = config.checkpoint_every
        if every and (step + 1) % every == 0 and accelerator.is_main_process:
            progress = {"controller": controller.state(), "config": to_dict(config)}
            save_state(output / STATES, step + 1, model, optimizer, progress, config.keep_checkpoints)

    summary = {
        "steps": settings.steps,
        "tokens": settings.steps * tokens_per_step,
        "processes": world,
        "alpha": controller.alpha,
    }
    model.eval()
    summary |= _settle_and_measure(model, config, stream.part(skip=settings.steps * blocks_per_step), heldout, reporter)
    reporter.close()
    if accelerator.is_main_process:
        dynakv.save_compressor(model, output / CHECKPOINT, summary=summary)
        if config.full_checkpoint:
            dynakv.save_full(model, output / FULL)
            tokenizer.save_pretrained(output / FULL)
        write_text(output / "config.yaml", yaml.safe_dump(to_dict(config), allow_unicode=True, sort_keys=False))
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return output / CHECKPOINT


def _schedule(model: PreTrainedModel, optimizer: torch.optim.Optimizer, config: TrainConfig, step: int) -> None:
    """Set this step's learning rates and, for a straight-through run, its mask."""
    settings = config.optimizer
    factor = learning_rate_factor(step, settings.steps, warmup=settings.warmup, final=settings.final_lr)
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * factor
    late = step >= config.straight_through_from * settings.steps
    for layer in dynakv.compressors(model).values():
        for compressor in (layer.key, layer.value):
            compressor.train_on_hard_mask = late and config.compressor.gap == "straight_through"


def _step(
    accelerator: Accelerator,
    trained: torch.nn.Module,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Tensor],
    config: TrainConfig,
    alpha: float,
    step: int,
) -> dict[str, float]:
    """One optimizer step over ``accumulate`` passes; returns means over passes and processes."""
    sums = torch.zeros(4, device=accelerator.device)
    for _ in range(config.optimizer.accumulate):
        ids_BT = next(batches).to(accelerator.device)
        with accelerator.accumulate(trained):
            logits = trained(input_ids=ids_BT, use_cache=False).logits
            cross_entropy = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids_BT[:, 1:].flatten())
            rates = retain_rates(model)
            loss = objective(cross_entropy, rates, alpha)
            accelerator.backward(loss)
            if accelerator.sync_gradients and config.optimizer.clip:
                accelerator.clip_grad_norm_(trained.parameters(), config.optimizer.clip)
            optimizer.step()
            optimizer.zero_grad()
        sums += torch.stack([loss, cross_entropy, rates.soft, rates.hard_L2.mean()]).detach().float()
    means = accelerator.reduce(sums / config.optimizer.accumulate, reduction="mean").tolist()
    values = dict(zip(("loss", "cross_entropy", "soft_rate", "hard_rate"), means, strict=True))
    if not math.isfinite(values["loss"]):
        raise UserError(
            f"the loss of step {step + 1} is {values['loss']}; lower `optimizer.lr_projection` and `optimizer.lr_gate`, "
            f"and resume from the last checkpoint"
        )
    return {**values, "alpha": alpha}


def _settle_and_measure(
    model: PreTrainedModel, config: TrainConfig, unseen: TrainingBlocks, heldout: dict[str, Tensor], reporter: Reporter
) -> dict:
    """Settle τ on training text that was not trained on, then measure every held-out text."""
    summary = {"heldout": {}}
    target = config.rate.target_retain_rate
    if target is not None and config.rate.settle:
        summary["settled"] = settle_threshold(model, unseen.first(SETTLING_BLOCKS), target)
        reporter.note("settled", summary["settled"], config.optimizer.steps)
    for name, blocks_NT in heldout.items():
        measured = measure(model, blocks_NT)
        summary["heldout"][Path(name).name] = measured
        reporter.note(f"held out, {Path(name).name}", measured, config.optimizer.steps)
    return summary
