"""How an attention module's output projection reads each KV head's values.

Shapes: H query heads, G KV heads, J = H/G, D head dim, X hidden size.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lowrank_kv.hf.geometry import attention_modules, geometry_of
from lowrank_kv.utils.errors import UserError

# What families call the projection.
_NAMES = ("o_proj", "out_proj", "dense", "c_proj")


def output_moments(model: PreTrainedModel) -> dict[int, Tensor]:
    """Layer index → Σ_j W_j W_jᵀ over the query heads j of each KV head, (G, D, D) fp64: W_j maps a head's output, (D, X).

    Raises:
        UserError: the family's output projection is not found.
    """
    geometry, modules = geometry_of(model), attention_modules(model)
    moments = {}
    for index in geometry.layers:
        children = dict(modules[index].named_children())
        projection = next((children[name] for name in _NAMES if name in children), None)
        if projection is None:
            raise UserError(
                f"the attention of {type(model).__name__} has no projection among {', '.join(_NAMES)}; this family's values "
                f"cannot be weighed by their output, so leave the peer out"
            )
        weight = projection.weight.detach().double().cpu()
        weight_YX = (
            weight.T if isinstance(projection, nn.Linear) else weight
        )  # GPT-2's Conv1D is laid out the other way
        weight_GJDX = weight_YX.unflatten(0, (geometry.num_kv_heads, -1, geometry.head_dim))
        moments[index] = torch.einsum("gjdx,gjex->gde", weight_GJDX, weight_GJDX)
    return moments
