"""The model's rotation of keys, read from its own table of cosines and sines.

Shapes: T tokens, G KV heads, D head dim.
"""

import functools

import torch
from torch import Tensor, nn
from vllm.model_executor.layers import rotary_embedding

from lowrank_kv.ops import native
from lowrank_kv.ops.rotation import RotaryTable
from lowrank_kv.utils.errors import UserError

# The end of a sentence about a model.
OF_NEIGHBOURS = (
    "rotates neighbouring dims of a head as pairs, as GPT-J does, which is not served; serve a model that pairs the halves "
    "of a head, as Llama does"
)
# Kinds that rotate halves by a table that depends on nothing but the position, as configurations name them and as vLLM does.
ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
_KINDS = ("RotaryEmbedding", "LinearScalingRotaryEmbedding", "Llama3RotaryEmbedding", "YaRNScalingRotaryEmbedding")


def rotation_of_model(positions: int) -> RotaryTable:
    """That of the model which this process has just built, fp32, of one sequence; all layers share one copy.

    Args:
        positions: that a sequence may have.

    Raises:
        UserError: it rotates by several tables, by none, or in another way, or has fewer positions.
    """
    found = list(rotary_embedding._ROPE_DICT.values())
    if len(found) != 1:
        raise UserError(
            f"vLLM's code of the model, and of models that this process has served before, has {len(found)} rotary "
            f"embeddings, and one for all layers is served; serve this model in a process of its own, by vLLM's own code "
            f"(`--model-impl vllm`), or another model"
        )
    [rope] = found
    kind = type(rope).__name__
    if not rope.is_neox_style:
        raise UserError(f"the model {OF_NEIGHBOURS}")
    if kind not in _KINDS:
        raise UserError(f"the model rotates keys by {kind}, which is not served; served are: {', '.join(_KINDS)}")
    known = len(rope.cos_sin_cache)
    if known < positions:
        raise UserError(
            f"`max_model_len` is {positions}, and the model's table of rotations ends at {known}; set it to {known} at most"
        )
    return _table_of(rope, positions)


@functools.lru_cache(maxsize=1)
def _table_of(rope: nn.Module, positions: int) -> RotaryTable:
    cos_TF, sin_TF = rope.cos_sin_cache[:positions].float().chunk(2, dim=-1)
    frequency_F = torch.atan2(sin_TF[1], cos_TF[1])  # of position 1; none turns by more than half a turn
    return RotaryTable(cos_TF[None].contiguous(), sin_TF[None].contiguous(), native.slow_from(frequency_F))


def rotated(table: RotaryTable, key_TGD: Tensor, position_T: Tensor) -> Tensor:
    """Keys of any dtype, each turned by the table's angles at its position, (T, G, D) fp32."""
    return table.rotate(key_TGD.float()[:, :, None], position_T[:, None])[:, :, 0]
