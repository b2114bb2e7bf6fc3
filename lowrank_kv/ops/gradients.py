"""Attention over a compressed cache cannot be differentiated, and says so where somebody tries.

Stored coefficients keep no graph, and compiled code and kernels build none. Without a word a backward pass would go around
attention, through the residual stream alone, and end in gradients that look like any others.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowrank_kv.utils.errors import UserError


def attend_without_graph(operation: Callable[..., Tensor], query: Tensor, *arguments: Any) -> Tensor:
    """What `operation` makes of the queries and the arguments, through which a backward pass is an error.

    It keeps nothing of what caches share for such a pass: tensors that were made in inference mode could not be kept.
    """
    with torch.no_grad():
        output = operation(query, *arguments)
    return without_gradients(output, query)


def without_gradients(output: Tensor, *inputs: Tensor | None) -> Tensor:
    """The output of attention over a compressed cache, through which a backward pass to these inputs is an error: queries,
    and the keys and values that the call has stored."""
    recorded = [each for each in inputs if each is not None and each.requires_grad] if torch.is_grad_enabled() else []
    return _Undifferentiable.apply(output.detach(), recorded[0]) if recorded else output


class _Undifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, recorded: Tensor) -> Tensor:
        ctx.shape = recorded.shape
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, refuse_gradient(gradient, ctx.shape)


@torch.library.custom_op("lowrank_kv::refuse_gradient", mutates_args=())
def refuse_gradient(gradient: Tensor, shape: Sequence[int]) -> Tensor:
    """An operation, so that the backward pass of a compiled graph can be traced, and fails only when it runs."""
    raise UserError(
        "attention over a compressed cache has no gradients; read the whole text in one call with `use_cache=False`, or "
        "take the compression off first: lowrank_kv.uncompress(model)"
    )


@refuse_gradient.register_fake
def _(gradient: Tensor, shape: Sequence[int]) -> Tensor:
    return gradient.new_empty(shape)
