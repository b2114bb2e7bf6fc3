"""How the loss answers to each layer's keys and values: second moments of its gradients over calibration text.

Shapes: B batch, G KV heads, T tokens, D head dim, C = G·D.
"""

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from lowrank_kv.bases.moments import SecondMoment
from lowrank_kv.calibration.activation_moments import KEY, VALUE, add_rows, check_uncompressed, empty_moments
from lowrank_kv.hf.attention import PREPARED, TRANSFORM
from lowrank_kv.hf.cache.layer import join_heads, split_heads
from lowrank_kv.hf.exact_tokens import ExactTokens
from lowrank_kv.hf.geometry import attention_modules, geometry_of
from lowrank_kv.hf.prepare import prepare
from lowrank_kv.hf.rope import Rope, rotated, unrotated
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.eval_mode import evaluating
from lowrank_kv.utils.progress import progress_bar


def gradient_moments(
    model: PreTrainedModel, blocks_NT: Tensor, *, progress: bool = True
) -> dict[int, dict[str, SecondMoment]]:
    """Layer index → ``key``, ``value`` → second moment of ∂(Σ CE)/∂x over the tokens x of that layer's joint states.

    With it, and errors e that do not depend on the gradients, ½ E[e G eᵀ] is to second order what rebuilding states with
    the error e adds to the cross-entropy of a token: the Gauss–Newton (empirical Fisher) estimate.

    One backward pass a block through the model in eval mode, which keeps the activations of one block; parameters get no
    gradients. Documents of one block are not kept apart.

    Args:
        model: an uncompressed model, any floating dtype; it is in the mode it was in afterwards.
        blocks_NT: token ids, at least 2 a block.

    Raises:
        UserError: the model has compressors, blocks are too short, inference mode is on, or gradients are not finite.
    """
    check_uncompressed(model)
    if blocks_NT.shape[1] < 2:
        raise UserError(
            "blocks of one token predict nothing that gradients could be taken of; calibrate on longer ones"
        )
    moments = empty_moments(model, (KEY, VALUE))
    with (
        evaluating(model),
        probes_of(model) as probes,
        torch.enable_grad(),
        progress_bar(total=blocks_NT.numel(), unit="tok", desc="gradients", disable=not progress) as bar,
    ):
        for block_T in blocks_NT:
            for index, side, _, gradient_1TC in gradients_of_loss(model, probes, block_T):
                add_rows(moments[index][side], gradient_1TC.flatten(0, 1), f"gradients of layer {index}, {side}")
            bar.update(block_T.numel())
    return moments


def gradients_of_loss(
    model: PreTrainedModel, probes: dict[int, "_Probe"], block_T: Tensor
) -> list[tuple[int, str, Tensor, Tensor]]:
    """How the sum of a block's cross-entropies answers to the states that the model's probes see.

    Returns:
        (layer index, ``key`` or ``value``, joint states x, ∂(Σ CE)/∂x), (1, T, C) each, of every probe.
    """
    ids_T = block_T.to(model.device)
    logits_TV = model(input_ids=ids_T[None], use_cache=False).logits[0, :-1]
    logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    loss = F.cross_entropy(logits_TV, ids_T[1:], reduction="sum")
    names = [(index, side) for index in probes for side in (KEY, VALUE)]
    states = [state_1TC for probe in probes.values() for state_1TC in probe.states]
    gradients = torch.autograd.grad(loss, states)
    return [(*name, state.detach(), grad) for name, state, grad in zip(names, states, gradients, strict=True)]


@contextlib.contextmanager
def probes_of(model: PreTrainedModel, exact_tokens: ExactTokens | None = None) -> Iterator[dict[int, "_Probe"]]:
    """A probe where each layer's compressor would be. Afterwards queries see what they did before.

    Args:
        exact_tokens: which tokens a query sees past the probe; None for none.

    Raises:
        UserError: inference mode is on, in which nothing has gradients.
    """
    if torch.is_inference_mode_enabled():
        raise UserError(
            "calibration takes gradients, and `torch.inference_mode()` is on, in which there are none; calibrate outside of "
            "it, or use `torch.no_grad()` in its place"
        )
    prepare(model)
    modules = attention_modules(model)
    probes = {index: _Probe() for index in geometry_of(model).layers}
    before = {index: getattr(modules[index], PREPARED).exact_tokens for index in probes}
    try:
        for index, probe in probes.items():
            modules[index]._modules[TRANSFORM] = probe
            getattr(modules[index], PREPARED).set_exact_tokens(exact_tokens)
        yield probes
    finally:
        for index in probes:
            modules[index]._modules.pop(TRANSFORM, None)
            getattr(modules[index], PREPARED).set_exact_tokens(before[index])


class _Probe(nn.Module):
    """Passes keys (but for the rounding of their rotation) and values on; what gradients can be asked of stays here."""

    def __init__(self):
        super().__init__()
        self.states: tuple[Tensor, Tensor] | None = None

    def forward(
        self, key_BGTD: Tensor, value_BGTD: Tensor, rope: Rope | None, position_BT: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        head_dim = key_BGTD.shape[-1]
        given = unrotated(key_BGTD, rope), value_BGTD
        self.states = tuple(_with_gradient(join_heads(states)) for states in given)
        key_BGTD, value_BGTD = (split_heads(states, head_dim) for states in self.states)
        return rotated(key_BGTD, rope), value_BGTD


def _with_gradient(states_BTC: Tensor) -> Tensor:
    # Behind a frozen backbone the first layer's depend on nothing that has gradients.
    return states_BTC if states_BTC.requires_grad else states_BTC.requires_grad_()
