"""Continued pre-training of a DynaKV compressor: the one training loop.

Shapes: B batch, T tokens.
"""

import itertools
import math
from pathlib import Path

import torch
import torch.nn.functional as F
import yaml
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

import dynakv
from dynakv.objective import RateController, objective, retain_rates
from lowrank.atomic import write_text
from lowrank.config import to_dict
from lowrank.errors import UserError
from lowrank.hf.calibration import calibrate
from lowrank.hf.loading import check_length, load_model, load_tokenizer
from lowrank.text import blocks, load_documents
from training.config import TrainConfig
from training.data import TrainingBlocks
from training.heldout import measure
from training.reporting import Reporter
from training.schedule import learning_rate_factor
from training.state import load_latest, save_state

CHECKPOINT, STATES = "checkpoint", "states"


def train(config: TrainConfig, *, resume: bool = False) -> Path:
    """Train as `config` says; returns the directory of the final compressor checkpoint.

    Args:
        config: of the run.
        resume: continue from the newest state under ``config.output`` instead of calibrating.
    """
    accelerator = Accelerator(gradient_accumulation_steps=config.optimizer.accumulate)
    output = Path(config.output)
    tokenizer = load_tokenizer(config.model)
    model = load_model(config.model, dtype=config.dtype)
    check_length(model, config.dataset.sequence_length, "dataset.sequence_length")
    dataset = config.dataset
    sources = [
        load_documents(name, subset=dataset.subset, split=dataset.split, text_field=dataset.text_field)
        for name in dataset.name
    ]
    heldout = {
        name: blocks(
            load_documents(name, subset=dataset.subset, split=dataset.heldout_split, text_field=dataset.text_field),
            tokenizer,
            dataset.sequence_length,
            config.heldout_blocks,
        )
        for name in (dataset.heldout or [])
        if config.heldout_blocks
    }
    weights = dataset.weights or [1.0] * len(sources)
    stream = TrainingBlocks(sources, weights, tokenizer, dataset.sequence_length, seed=config.seed)

    model.to(accelerator.device)
    if resume:
        dynakv.add_compressors(model, config.compressor)
    else:
        _calibrate_and_attach(model, config, stream, show=accelerator.is_main_process)
    dynakv.use_ragged_cache(model)
    optimizer = _optimizer(model, config)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    rate = config.rate
    controller = RateController(rate.alpha, target=rate.target_retain_rate, gain=rate.gain, ramp=rate.ramp)
    start = 0
    if resume:
        progress = load_latest(output / STATES, model, optimizer)
        start, controller.alpha = progress["step"], progress["alpha"]
    per_step = config.optimizer.batch_size * config.optimizer.accumulate
    stream.rank, stream.world = accelerator.process_index, accelerator.num_processes
    stream.skip = start * per_step * stream.world
    loader = DataLoader(stream, batch_size=config.optimizer.batch_size)
    trained, optimizer = accelerator.prepare(model, optimizer)
    model = accelerator.unwrap_model(trained)

    if accelerator.is_main_process:
        output.mkdir(parents=True, exist_ok=True)
    reporter = Reporter(
        output,
        steps=config.optimizer.steps,
        start=start,
        tokens_per_step=per_step * stream.world * dataset.sequence_length,
        every=config.log_every,
        enabled=accelerator.is_main_process,
    )
    trained.train()
    batches = iter(loader)
    for step in range(start, config.optimizer.steps):
        _set_rates_and_mask(model, optimizer, config, step)
        values = _step(accelerator, trained, model, optimizer, batches, config, controller.alpha, step)
        rates = retain_rates(model)
        controller.update(values["hard_rate"], (step + 1) / config.optimizer.steps)
        reporter.step(step + 1, values, rates)
        every = config.checkpoint_every
        if every and (step + 1) % every == 0 and accelerator.is_main_process:
            progress = {"alpha": controller.alpha, "config": to_dict(config)}
            save_state(output / STATES, step + 1, model, optimizer, progress, config.keep_checkpoints)

    summary = {
        "steps": config.optimizer.steps,
        "tokens": config.optimizer.steps * per_step * stream.world * dataset.sequence_length,
        "alpha": controller.alpha,
        "heldout": {},
    }
    model.eval()
    for name, blocks_NT in heldout.items():
        summary["heldout"][Path(name).name] = measured = measure(model, blocks_NT)
        reporter.note(f"held out, {Path(name).name}", measured, config.optimizer.steps)
    reporter.close()
    if accelerator.is_main_process:
        dynakv.save_compressor(model, output / CHECKPOINT, summary=summary)
        if config.full_checkpoint:
            dynakv.save_full(model, output / "full")
            tokenizer.save_pretrained(output / "full")

        write_text(output / "config.yaml", yaml.safe_dump(to_dict(config), allow_unicode=True, sort_keys=False))
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return output / CHECKPOINT


def _calibrate_and_attach(model: PreTrainedModel, config: TrainConfig, stream: TrainingBlocks, *, show: bool) -> None:
    """PCA of the leading training blocks; every process computes the same one."""
    length = min(config.dataset.sequence_length, config.calibration.tokens)
    count = math.ceil(config.calibration.tokens / config.dataset.sequence_length)
    blocks_NT = torch.stack([block[:length] for block in itertools.islice(stream, count)])
    moments = calibrate(model, blocks_NT, progress=show)
    dynakv.add_compressors(model, config.compressor)
    dynakv.initialise_from_moments(model, moments)


def _optimizer(model: PreTrainedModel, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW over the compressors; the backbone is frozen."""
    model.requires_grad_(False)
    groups: dict[str, list[torch.nn.Parameter]] = {"projection": [], "gate": [], "gate_bias": []}
    for layer in dynakv.compressors(model).values():
        layer.requires_grad_(True)
        for compressor in (layer.key, layer.value):
            groups["projection"] += compressor.projection.parameters()
            groups["gate"].append(compressor.gate.weight)
            groups["gate_bias"].append(compressor.gate.bias)
    peaks = {
        "projection": config.optimizer.lr_projection,
        "gate": config.optimizer.lr_gate,
        "gate_bias": config.optimizer.lr_gate_bias,
    }
    return torch.optim.AdamW(
        [{"params": params, "lr": peaks[name], "peak": peaks[name]} for name, params in groups.items()],
        weight_decay=config.optimizer.weight_decay,
        betas=(0.9, 0.95),
    )


def _set_rates_and_mask(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, config: TrainConfig, step: int
) -> None:
    settings = config.optimizer
    factor = learning_rate_factor(step, settings.steps, warmup=settings.warmup, final=settings.final_lr)
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * factor
    late = step >= config.straight_through_from * settings.steps
    for layer in dynakv.compressors(model).values():
        for compressor in (layer.key, layer.value):
            compressor.train_on_hard_mask = late and config.compressor.gap == "straight_through"


def _step(
    accelerator, trained, model, optimizer, batches, config: TrainConfig, alpha: float, step: int
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
    values["alpha"] = alpha
    return values
