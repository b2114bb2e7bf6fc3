"""The model's rotation of keys, read from its own table of cosines and sines.

Shapes: X positions, F pairs of a head, T tokens, G KV heads, D head dim.
"""

import dataclasses

import torch
from torch import Tensor
from vllm.model_executor.layers import rotary_embedding

from lowrank_kv.utils.errors import UserError

# Kinds that rotate halves by a table that depends on nothing but the position.
_KINDS = ("RotaryEmbedding", "LinearScalingRotaryEmbedding", "Llama3RotaryEmbedding", "YaRNScalingRotaryEmbedding")


@dataclasses.dataclass(frozen=True)
class RotaryPairs:
    """Dims j and j + F of a head are rotated by one angle.

    Attributes:
        cos_XF, sin_XF: at every position, fp32, contiguous.
    """

    cos_XF: Tensor
    sin_XF: Tensor

    @classmethod
    def of_model(cls) -> "RotaryPairs":
        """That of the model which this process has just built.

        Raises:
            UserError: it rotates by several tables, by none, or in another way.
        """
        found = list(rotary_embedding._ROPE_DICT.values())
        if len(found) != 1:
            raise UserError(f"the model has {len(found)} rotary embeddings; models with one for all layers are served")
        [rope] = found
        kind = type(rope).__name__
        if kind not in _KINDS or not rope.is_neox_style:
            raise UserError(f"the model rotates keys by {kind}, which is not served; served are: {', '.join(_KINDS)}")
        cos_XF, sin_XF = rope.cos_sin_cache.float().chunk(2, dim=-1)
        return cls(cos_XF.contiguous(), sin_XF.contiguous())

    @property
    def packed(self) -> tuple[Tensor, Tensor]:
        return self.cos_XF, self.sin_XF

    def rotate(self, key_TGD: Tensor, position_T: Tensor | slice) -> Tensor:
        """Rotated keys, fp32."""
        cos_T1F, sin_T1F = self.cos_XF[position_T][:, None], self.sin_XF[position_T][:, None]
        first, second, rest = self._split(key_TGD)
        return torch.cat([first * cos_T1F - second * sin_T1F, second * cos_T1F + first * sin_T1F, rest], dim=-1)

    def unrotate(self, key_TGD: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """Keys as they were before rotation, fp32; `turn` from :meth:`turn_back`."""
        cos_T1F, sin_T1F = turn
        first, second, rest = self._split(key_TGD)
        return torch.cat([first * cos_T1F + second * sin_T1F, second * cos_T1F - first * sin_T1F, rest], dim=-1)

    def turn_back(self, position_T: Tensor) -> tuple[Tensor, Tensor]:
        """What undoes the rotation at some positions: cosines and sines over the square of their length, as some kinds scale
        both."""
        cos_TF, sin_TF = self.cos_XF[position_T], self.sin_XF[position_T]
        square_TF = cos_TF.square() + sin_TF.square()
        return (cos_TF / square_TF)[:, None], (sin_TF / square_TF)[:, None]

    def _split(self, key_TGD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        half, key_TGD = self.cos_XF.shape[1], key_TGD.float()
        return key_TGD[..., :half], key_TGD[..., half : 2 * half], key_TGD[..., 2 * half :]
