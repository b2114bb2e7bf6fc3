"""How much a run computes: the FLOPs of a token.

Shapes: T tokens of a sequence.
"""

from transformers import PreTrainedModel

import dynakv
from lowrank_kv.hf.geometry import geometry_of
from lowrank_kv.utils.flops import multiplied_weights, size_of


def model_flops(model: PreTrainedModel, length: int) -> float:
    """Floating-point operations of one token's forward and backward pass, without what is merely recomputed.

    Two for each weight forward; two for the gradient of its input; two more for its own where it is trained; causal
    attention reads T/2 keys and values on average. Inverting U is left out: it does not grow with the tokens.

    Args:
        model: with what is trained marked so; attached, or a stock one.
        length: T.
    """
    geometry = geometry_of(model)
    config = model.config.get_text_config(decoder=True)
    products = sum(size_of(p)[0] * (6 if p.requires_grad else 4) for p in multiplied_weights(model))
    for side in dynakv.token_compressors(model) if dynakv.is_attached(model) else []:
        if side.config.decoder != "decoupled":
            products += 6 * side.width**2  # V, which is no parameter of its own
    attention = 6 * length * config.num_attention_heads * geometry.head_dim * config.num_hidden_layers
    return float(products + attention)
