"""Projection, gate, mask and reconstruction of a training pass as one operation that keeps little for its backward pass.

Composed of single operations the pass would keep five tensors as large as the states (states, coefficients, gate
probabilities, mask, masked coefficients), two of them in fp32. Here it keeps three in the states' own dtype, and takes
cumulative sum and mask again from the gate's probabilities (of half-precision states: from its logits).

Shapes: B batch, T tokens, C joint width.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from dynakv.mask import Truncation, probabilities, soft_mask
from lowrank_kv.bases.hard_rank import hard_rank
from lowrank_kv.codec import prefix_mask


def gated_reconstruction(
    states_BTC: Tensor, basis_CC: Tensor, decoder_CC: Tensor, weight_CC: Tensor, bias_C: Tensor, truncation: Truncation
) -> tuple[Tensor, Tensor, Tensor]:
    """x̂ = (x̃ ⊙ m) V with x̃ = x U and m = flip(cumsum(softmax(x̃ W + b))) (DynaKV, equations 1, 3, 5 and 6).

    With ``truncation.on_hard_mask`` the mask is the hard one of equation 8, and the gradient still that of the soft one.

    Args:
        states_BTC: joint keys (before rotation) or values.
        basis_CC, decoder_CC: U and V, in the states' dtype.
        weight_CC, bias_C: W, with the scale of its inputs multiplied in, and b, in the states' dtype.
        truncation: of the mask.

    Returns:
        the rebuilt states, same shape and dtype; the mean soft mask, a scalar in fp32 (fp64 for fp64 states) that carries
        gradients; the mean share of coefficients the threshold keeps, which does not.
    """
    # Everything is in the states' dtype already; autocast would change that of the products alone.
    with torch.autocast(states_BTC.device.type, enabled=False):
        return _GatedReconstruction.apply(states_BTC, basis_CC, decoder_CC, weight_CC, bias_C, truncation)


class _GatedReconstruction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        states_BTC: Tensor,
        basis_CC: Tensor,
        decoder_CC: Tensor,
        weight_CC: Tensor,
        bias_C: Tensor,
        truncation: Truncation,
    ) -> tuple[Tensor, Tensor, Tensor]:
        width = states_BTC.shape[-1]
        coef_BTC = states_BTC @ basis_CC
        logit_BTC = (coef_BTC @ weight_CC).add_(bias_C)
        probability_BTC = probabilities(logit_BTC)
        # Of the same size where the states are as wide, and then worth a softmax.
        kept_BTC = probability_BTC if probability_BTC.dtype == logit_BTC.dtype else logit_BTC
        cumulative_BTC = probability_BTC.cumsum(dim=-1)
        rank_BT = hard_rank(cumulative_BTC, truncation.threshold, truncation.granularity)
        soft, hard = cumulative_BTC.mean(), rank_BT.to(cumulative_BTC.dtype).mean() / width
        hard_rank_BT = rank_BT if truncation.on_hard_mask else None
        rebuilt_BTC = (coef_BTC * _mask(cumulative_BTC, hard_rank_BT, coef_BTC.dtype)) @ decoder_CC
        ctx.save_for_backward(states_BTC, coef_BTC, kept_BTC, hard_rank_BT, basis_CC, decoder_CC, weight_CC)
        ctx.mark_non_differentiable(hard)
        return rebuilt_BTC, soft, hard

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_rebuilt_BTC: Tensor, grad_soft: Tensor, _: None) -> tuple[Tensor | None, ...]:
        states_BTC, coef_BTC, kept_BTC, hard_rank_BT, basis_CC, decoder_CC, weight_CC = ctx.saved_tensors
        width, dtype = coef_BTC.shape[-1], coef_BTC.dtype
        states_NC, coef_NC, grad_rebuilt_NC = (t.reshape(-1, width) for t in (states_BTC, coef_BTC, grad_rebuilt_BTC))
        wide = torch.promote_types(dtype, torch.float32)
        probability_NC = (kept_BTC if dtype == wide else probabilities(kept_BTC)).view(-1, width)
        mask_NC = _mask(probability_NC.cumsum(-1), None if hard_rank_BT is None else hard_rank_BT.view(-1), dtype)
        grad_decoder_CC = (coef_NC * mask_NC).T @ grad_rebuilt_NC
        grad_masked_NC = grad_rebuilt_NC @ decoder_CC.T

        # m_i adds up p_0 … p_(C−1−i), so the gradient of p_j adds up those of m_0 … m_(C−1−j); the mean's is the same
        # number for every m_i.
        grad_sum_NC = (grad_masked_NC * coef_NC).cumsum(-1, dtype=wide)
        counts_C = torch.arange(1, width + 1, device=coef_BTC.device, dtype=grad_sum_NC.dtype)
        grad_probability_NC = grad_sum_NC.add_(counts_C * (grad_soft / coef_BTC.numel())).flip(-1)
        grad_logit_NC = torch.ops.aten._softmax_backward_data(grad_probability_NC, probability_NC, -1, wide)
        grad_bias_C = grad_logit_NC.sum(0).to(dtype)
        grad_logit_NC = grad_logit_NC.to(dtype)

        grad_weight_CC = coef_NC.T @ grad_logit_NC
        grad_coef_NC = torch.addmm(grad_masked_NC.mul_(mask_NC), grad_logit_NC, weight_CC.T)
        grad_basis_CC = states_NC.T @ grad_coef_NC
        # The states of the first layers may not depend on anything that is trained.
        grad_states_BTC = (grad_coef_NC @ basis_CC.T).view_as(states_BTC) if ctx.needs_input_grad[0] else None
        return grad_states_BTC, grad_basis_CC, grad_decoder_CC, grad_weight_CC, grad_bias_C, None


def _mask(cumulative: Tensor, hard_rank: Tensor | None, dtype: torch.dtype) -> Tensor:
    mask = soft_mask(cumulative) if hard_rank is None else prefix_mask(hard_rank, cumulative.shape[-1])
    return mask.to(dtype)
