"""Second moments of a model's keys, values and queries over calibration text.

Shapes: B batch, G KV heads, T tokens, D head dim, C = G·D.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from lowrank.errors import UserError
from lowrank.hf.attention import CONTEXT, prepare
from lowrank.hf.cache import join_heads
from lowrank.hf.geometry import attention_modules, geometry_of
from lowrank.hf.rope import Rope
from lowrank.moments import SecondMoment

KEY, ROTATED_KEY, VALUE = "key", "rotated_key", "value"


def calibrate(
    model: PreTrainedModel, blocks_NT: Tensor, *, sides: Sequence[str] = (KEY, VALUE), progress: bool = True
) -> dict[int, dict[str, SecondMoment]]:
    """Layer index → side → second moment of that layer's joint states over all blocks.

    Activations are folded into the moments layer by layer as the model runs and never kept: memory is O(L·C²).

    Args:
        model: an uncompressed model.
        blocks_NT: token ids.
        sides: which of ``key`` (before rotation), ``rotated_key`` and ``value``.
    """
    geometry = geometry_of(model)
    modules = attention_modules(model)
    prepare(model)
    moments = {
        index: {side: SecondMoment(geometry.width, device=next(modules[index].parameters()).device) for side in sides}
        for index in geometry.layers
    }

    def observer_of(index: int):
        def observe(query: Tensor, key: Tensor, value: Tensor, rope: Rope | None) -> None:
            for side, moment in moments[index].items():
                if side == VALUE:
                    states = value
                elif side == ROTATED_KEY or rope is None:
                    states = key
                else:
                    states = rope.unrotate(key)
                try:
                    moment.update(join_heads(states))
                except ValueError as error:
                    raise UserError(f"layer {index}, {side}: {error}") from error

        return observe

    try:
        for index in geometry.layers:
            getattr(modules[index], CONTEXT).observer = observer_of(index)
        with (
            torch.no_grad(),
            tqdm(total=blocks_NT.numel(), unit="tok", desc="calibrating", disable=not progress) as bar,
        ):
            for block_T in blocks_NT:
                # The language-model head is most of a small model's work, and calibration never looks at it.
                model.base_model(input_ids=block_T[None].to(model.device), use_cache=False)
                bar.update(block_T.numel())
    finally:
        for index in geometry.layers:
            getattr(modules[index], CONTEXT).observer = None
    return moments
