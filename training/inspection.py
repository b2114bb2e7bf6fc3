"""Periodic inspection: how a fixed sentence is compressed, and how well conditioned the projections are.

Shapes: B batch, T tokens of the sentence, L compressed layers, C joint width; 2 is (keys, values).
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import dynakv
from dynakv.compressor import TokenCompressor
from dynakv.layer_compressor import by_layer
from dynakv.mask import entropy
from lowrank_kv.bases.hard_rank import hard_rank
from lowrank_kv.hf.geometry import geometry_of

from .data import Batch
from .validation import run_uncached


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspection:
    """The result of one inspection.

    Attributes:
        rate_L2T: share of coefficients kept of each token (Figures 4 and 5), fp32; by a plan of bits, share of bytes.
        entropy_L2: mean entropy of the gates over the sentence in nats, at most log C; None without gates.
        condition_L2: condition number of U.
        inversion_error_L2: ‖U V − I‖ / ‖I‖ in fp32.
    """

    rate_L2T: Tensor
    entropy_L2: Tensor | None
    condition_L2: Tensor
    inversion_error_L2: Tensor

    def values(self) -> dict[str, float]:
        """A summary in a few numbers."""
        found = {
            "condition_mean": float(self.condition_L2.mean()),
            "condition_largest": float(self.condition_L2.max()),
            "inversion_error_largest": float(self.inversion_error_L2.max()),
            "sentence_rate": float(self.rate_L2T.mean()),
        }
        if self.entropy_L2 is not None:
            keys, values = self.entropy_L2.mean(dim=0).tolist()
            found |= {"gate_entropy_keys": keys, "gate_entropy_values": values}
        return found


def inspection_due(step: int, steps: int, every: int) -> bool:
    """Whether to inspect after step number `step` of `steps`: every `every` steps (0 for never), and after the last."""
    return step == steps or (every > 0 and step % every == 0)


@torch.no_grad()
def inspect(model: PreTrainedModel, sentence_T: Tensor) -> Inspection:
    """Run the hard-mask path of an attached model over one sentence; all parameters must be gathered.

    Args:
        sentence_T: token ids, int64.
    """
    layers, settings = dynakv.compressors(model), dynakv.settings_of(model)
    places = by_layer(geometry_of(model), settings)
    sides = {side.gate: side for side in dynakv.token_compressors(model)}
    rates: dict[nn.Module, Tensor] = {}
    entropies: dict[nn.Module, Tensor] = {}

    def record(gate: nn.Module, arguments: tuple, output: Tensor) -> None:
        if settings.has_plan:
            rates[gate] = gate.token_rates(arguments[0])[0]
            return
        if settings.has_gates:
            entropies[gate] = entropy(output).mean()
            output = hard_rank(output, settings.threshold, settings.granularity)
        rates[gate] = output[0] / sides[gate].width

    def per_side(read: Callable[[TokenCompressor], Tensor]) -> Tensor:
        found = {(i, name): read(side).float().cpu() for i, la in layers.items() for name, side in la.sides.items()}
        return torch.stack([torch.stack([found[place] for place in pair]) for pair in places.values()])

    # Before the pass, in which each module of a sharded model releases its parameters.
    condition_L2 = per_side(lambda side: torch.tensor(side.projection.condition()))
    inversion_error_L2 = per_side(lambda side: torch.tensor(side.projection.inversion_error()))
    run_uncached(model, [Batch.from_ids(sentence_T[None], None)], dict.fromkeys(sides, record))

    return Inspection(
        rate_L2T=per_side(lambda side: rates[side.gate]),
        entropy_L2=per_side(lambda side: entropies[side.gate]) if entropies else None,
        condition_L2=condition_L2,
        inversion_error_L2=inversion_error_L2,
    )
