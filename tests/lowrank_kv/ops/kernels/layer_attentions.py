"""The attention of one layer for compiled code and for kernels."""

import torch
from paged_rows import HEAD_DIM
from written_pages import MOST

from lowrank_kv.ops.decoders import Decoders
from lowrank_kv.ops.layer_attention import LayerAttention
from lowrank_kv.ops.native.page_decoders import PageDecoders
from lowrank_kv.ops.rotation import RotaryTable
from lowrank_kv.ops.scoring import Scoring


def layer_attentions(
    decoders: list[torch.Tensor],
    device: torch.device,
    generator: torch.Generator,
    *,
    sees_itself: bool,
    softcap: float | None = None,
) -> tuple[LayerAttention, LayerAttention]:
    """On a CPU, and on a device: with rotations by any angles."""
    in_pairs = decoders[0].dtype == torch.bfloat16
    in_c = PageDecoders(*decoders, head_dim=HEAD_DIM if in_pairs else None)
    on_device = Decoders(*(each.to(device) for each in decoders))
    angle_1XF = torch.rand(1, MOST, HEAD_DIM // 2, generator=generator) * 6
    rotary = RotaryTable(angle_1XF.cos(), angle_1XF.sin())
    scoring = Scoring(0.25, softcap)
    return (
        LayerAttention(in_c, rotary, scoring, sees_itself),
        LayerAttention(on_device, rotary.for_sequence(0, device), scoring, sees_itself),
    )
