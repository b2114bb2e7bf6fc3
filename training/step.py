"""One optimizer step: forward and backward passes over its batches, looked at before the parameters move.

Shapes: B batch, T tokens, L layers, P trained parameters; 2 is (keys, values).
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from dynakv.config import NESTED
from dynakv.objective import RateRecorder, RetainRates, objective
from lowrank_kv.utils.errors import UserError

from .data import Batch
from .distillation import read_by_teacher, summed_kl
from .divergence_guard import DivergenceGuard, GradientNorms
from .engine import Engine
from .nested_ranks import draw_ranks


@dataclasses.dataclass
class StepResult:
    """Means over the passes and processes of a step.

    Attributes:
        loss, cross_entropy, soft_rate, hard_rate: of the global batch.
        kl: KL(uncompressed ‖ compressed), None where nothing is distilled.
        rates: per layer.
    """

    loss: float
    cross_entropy: float
    soft_rate: float
    hard_rate: float
    rates: RetainRates
    kl: float | None


def optimizer_step(
    engine: Engine,
    batches: list[Batch],
    alpha: float,
    *,
    number: int,
    gradient_norms: GradientNorms,
    guard: DivergenceGuard,
) -> StepResult:
    """Take step `number` (counted from 1) over this process's `batches`, one pass each.

    The cross-entropy is the mean over all predicted tokens of the global batch, however they lie on processes and passes;
    R of equation 9 is the mean over all processes of a pass, so that α R² does not depend on how a pass is spread.

    Raises:
        UserError: the step must not be taken; see :class:`DivergenceGuard`.
    """
    batches = [batch.to(engine.device) for batch in batches]
    predicted = sum((batch.targets >= 0).sum() for batch in batches)
    # Gradients are averaged over processes and passes; times their number that is a sum.
    share = engine.world * len(batches) / _total(engine, predicted.float())
    sums = torch.zeros(3, device=engine.device)
    weights, rate = engine.config.loss, engine.config.rate
    soft_L2 = hard_L2 = torch.zeros((), device=engine.device)
    for index, batch in enumerate(batches):
        last = index == len(batches) - 1
        if engine.config.compressor.rank_policy == NESTED:
            draw_ranks(engine.model, f"{engine.config.seed} {number} {index}")
        with engine.one_pass(last=last):
            with engine.computing():
                teacher, logits, recorder = _passes(engine, batch, guard, number)
            # Only told where it is no part of the task: its gradients, zeros, are as large as the logits in fp32.
            told = logits if weights.cross_entropy else logits.detach()
            cross_entropy = share * _summed_cross_entropy(told, batch.targets)
            kl = torch.zeros_like(cross_entropy)
            if teacher is not None:
                kl = share * summed_kl(logits, teacher, batch.targets)
            task = weights.cross_entropy * cross_entropy + weights.distillation * kl
            rates = _global_rates(engine, recorder.rates())
            loss = objective(task, rates, alpha, floor=rate.layer_floor, key_cost=rate.key_cost)
            engine.backward(loss, last=last)
        sums += torch.stack([loss, cross_entropy, kl]).detach().float()
        soft_L2, hard_L2 = soft_L2 + rates.soft_L2.detach().float(), hard_L2 + rates.hard_L2.float()
    passes = len(batches)
    squares_P = engine.accelerator.reduce(gradient_norms.pop(), reduction="sum")
    loss, cross_entropy, kl = engine.accelerator.reduce(sums / passes, reduction="mean").tolist()
    guard.check(number, loss, cross_entropy, soft_L2, squares_P)
    engine.step()
    means = RetainRates(soft_L2=soft_L2 / passes, hard_L2=hard_L2 / passes)
    return StepResult(loss, cross_entropy, float(means.soft), means.hard, means, kl if weights.distillation else None)


def _passes(
    engine: Engine, batch: Batch, guard: DivergenceGuard, number: int
) -> tuple[Tensor | None, Tensor, RateRecorder]:
    """(the uncompressed model's logits where they are asked for, those of the compressed one, what it kept)."""
    try:
        teacher, more = read_by_teacher(engine.model, batch.inputs, logits=bool(engine.config.loss.distillation))
        with RateRecorder(engine.model) as recorder:
            return teacher, engine.wrapped(**batch.inputs, **more, use_cache=False).logits, recorder
    except UserError as error:
        # A projection that cannot be inverted names its layer, but neither the step nor where to go back to.
        raise guard.stop(number, str(error), None) from error


def _summed_cross_entropy(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    flat = logits_BTV[:, :-1].flatten(0, 1).float()
    return F.cross_entropy(flat, targets_BT.flatten(), reduction="sum")


def _total(engine: Engine, value: Tensor) -> Tensor:
    return engine.accelerator.reduce(value, reduction="sum")


def _global_rates(engine: Engine, rates: RetainRates) -> RetainRates:
    """Rates with the mean over all processes as value and this process's own gradient.

    Averaged over processes, the gradient of any function of them is then that of the function of the means.
    """
    if engine.world == 1:
        return rates
    stacked = torch.stack([rates.soft_L2.detach(), rates.hard_L2.to(rates.soft_L2.dtype)])
    soft_L2, hard_L2 = engine.accelerator.reduce(stacked, reduction="mean")
    return RetainRates(soft_L2=rates.soft_L2 + (soft_L2 - rates.soft_L2).detach(), hard_L2=hard_L2)
