"""How much a run computes: the FLOPs of a token.

Shapes: T tokens of a sequence.
"""

import torch
from transformers import PreTrainedConfig, PreTrainedModel

import dynakv
from lowrank_kv.hf.geometry import geometry_of
from lowrank_kv.utils.flops import multiplied_weights, size_of


def model_flops(model: PreTrainedModel, length: int) -> float:
    """Floating-point operations of one token's forward and backward pass, without what is merely recomputed. Of experts
    those count that a token goes through.

    Two for each weight forward; two for the gradient of its input; two more for its own where it is trained; causal
    attention reads T/2 keys and values on average. Inverting U is left out: it does not grow with the tokens.

    Args:
        model: with what is trained marked so; attached, or a stock one.
        length: T.
    """
    geometry = geometry_of(model)
    config = model.config.get_text_config(decoder=True)
    products = sum(
        size_of(p)[0] * _share_of_experts(p, config) * (6 if p.requires_grad else 4) for p in multiplied_weights(model)
    )
    for side in dynakv.token_compressors(model) if dynakv.is_attached(model) else []:
        if side.config.decoder != "decoupled":
            products += 6 * side.width**2  # V, which is no parameter of its own
    attention = 6 * length * config.num_attention_heads * geometry.head_dim * config.num_hidden_layers
    return float(products + attention)


def _share_of_experts(parameter: torch.nn.Parameter, config: PreTrainedConfig) -> float:
    """The share of a weight that a token is multiplied with; 1 of all but experts, which lie one behind another."""
    shape, chosen = getattr(parameter, "ds_shape", parameter.shape), getattr(config, "num_experts_per_tok", None)
    counts = {getattr(config, key, None) for key in ("num_local_experts", "num_experts", "n_routed_experts")}
    return chosen / shape[0] if chosen and len(shape) == 3 and shape[0] in counts else 1.0
