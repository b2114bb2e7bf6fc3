"""What is looked at only now and then: how a fixed sentence is compressed, and how sound the projections are.

Shapes: B batch, T tokens of the sentence, L compressed layers, C joint width; 2 is (keys, values).
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import dynakv
from dynakv.compressor import TokenCompressor
from dynakv.gate import Gate, entropy
from lowrank_kv.bases.hard_rank import hard_rank

from .data import Batch
from .validation import run_uncached

# The sentence of the DynaKV paper's Figures 4 and 5.
SENTENCE = (
    "I keep telling myself that I am going to start working on it tomorrow, but to be honest, I am just struggling with "
    "chronic procrastination."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspection:
    """One look at a model.

    Attributes:
        rate_L2T: share of coefficients kept of each token (Figures 4 and 5), fp32.
        entropy_L2: mean entropy of the gates over the sentence in nats, at most log C; None without gates.
        condition_L2: condition number of U.
        inversion_error_L2: ‖U V − I‖ / ‖I‖ in fp32.
    """

    rate_L2T: Tensor
    entropy_L2: Tensor | None
    condition_L2: Tensor
    inversion_error_L2: Tensor

    def values(self) -> dict[str, float]:
        """The whole in a few numbers."""
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
    """Whether to look after step number `step` of `steps`: after every `every` steps, if any, and after the last."""
    return step == steps or (every > 0 and step % every == 0)


@torch.no_grad()
def inspect(model: PreTrainedModel, sentence_T: Tensor) -> Inspection:
    """Run the hard-mask path of an attached model over one sentence; all parameters must be whole.

    Args:
        sentence_T: token ids, int64.
    """
    layers = list(dynakv.compressors(model).values())
    sides = {side.gate: side for side in dynakv.token_compressors(model)}
    ranks: dict[nn.Module, Tensor] = {}
    entropies: dict[nn.Module, Tensor] = {}

    def record(gate: nn.Module, arguments: tuple, output: Tensor) -> None:
        if isinstance(gate, Gate):
            entropies[gate] = entropy(output).mean()
            output = hard_rank(output, sides[gate].config.threshold, sides[gate].config.granularity)
        ranks[gate] = output[0]

    def of_sides(read: Callable[[TokenCompressor], Tensor]) -> Tensor:
        return torch.stack([torch.stack([read(side).float().cpu() for side in (la.key, la.value)]) for la in layers])

    # Before the pass: a sharded model's parameters are released by its modules, one by one.
    condition_L2 = of_sides(lambda side: torch.tensor(side.projection.condition()))
    inversion_error_L2 = of_sides(lambda side: torch.tensor(side.projection.inversion_error()))
    run_uncached(model, [Batch.of(sentence_T[None], None)], dict.fromkeys(sides, record))
    return Inspection(
        rate_L2T=of_sides(lambda side: ranks[side.gate] / side.width),
        entropy_L2=of_sides(lambda side: entropies[side.gate]) if entropies else None,
        condition_L2=condition_L2,
        inversion_error_L2=inversion_error_L2,
    )
