"""Second moments of a model's keys, values and queries over calibration text.

Shapes: B batch, G KV heads, T tokens, D head dim, C = G·D.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lowrank_kv.bases.moments import SecondMoment
from lowrank_kv.hf.attention import has_compressors
from lowrank_kv.hf.cache.layer import join_heads
from lowrank_kv.hf.geometry import attention_modules, check_not_offloaded, device_of_module, geometry_of
from lowrank_kv.hf.observing import observing
from lowrank_kv.hf.prepare import prepare
from lowrank_kv.hf.rope import Rope
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.eval_mode import evaluating
from lowrank_kv.utils.progress import progress_bar

KEY, ROTATED_KEY, VALUE, QUERY = "key", "rotated_key", "value", "query"
SIDES = (KEY, ROTATED_KEY, VALUE, QUERY)
# Keys before rotation and values of the same tokens, of one layer or of several, as rows [key, value, key, value, …].
KEY_VALUE = "key_value"


def calibrate(
    model: PreTrainedModel, blocks_NT: Tensor, *, sides: Sequence[str] = (KEY, VALUE), progress: bool = True
) -> dict[int, dict[str, SecondMoment]]:
    """Layer index → side → second moment of that layer's joint states over all blocks.

    Activations are folded into the moments layer by layer as the model runs and never kept: memory is O(L·C²).

    Args:
        model: an uncompressed model; it runs in eval mode, and is in the mode it was in afterwards.
        blocks_NT: token ids.
        sides: which of ``key`` (before rotation), ``rotated_key``, ``value`` and ``query`` (rotated; the queries of a KV
            head's group are its rows, so that only the head's own D×D block means anything).

    Raises:
        UserError: the model has compressors, or states that are not finite.
    """
    moments = empty_moments(model, sides)

    def fold(index: int, side: str, rows_NC: Tensor) -> None:
        add_rows(moments[index][side], rows_NC, f"layer {index}, {side}")

    observe(model, blocks_NT, fold, sides=sides, progress=progress)
    return moments


def add_rows(moment: SecondMoment, rows_NC: Tensor, name: str) -> None:
    """Add rows to a moment; raises :class:`UserError` with the name of the states if they are not finite."""
    try:
        moment.update(rows_NC)
    except ValueError as error:
        raise UserError(f"{name}: {error}") from error


def check_uncompressed(model: PreTrainedModel) -> None:
    """Raise :class:`UserError` for a model with compressors: what later layers see would be of rebuilt states."""
    if has_compressors(model):
        raise UserError(
            "the model has compressors, and calibration is of an uncompressed model; call dynakv.detach(model) first"
        )


def empty_moments(model: PreTrainedModel, sides: Sequence[str]) -> dict[int, dict[str, SecondMoment]]:
    """Layer index → side → a moment of no rows, on the layer's device. Raises :class:`UserError` for an offloaded layer."""
    geometry, modules = geometry_of(model), attention_modules(model)
    devices = {index: device_of_module(modules[index], model) for index in geometry.layers}
    for index, device in devices.items():
        check_not_offloaded(device, f"the attention of layer {index}")
    return {
        index: {side: SecondMoment(geometry.width, device=device) for side in sides}
        for index, device in devices.items()
    }


def observe(
    model: PreTrainedModel,
    blocks_NT: Tensor,
    visit: Callable[[int, str, Tensor], None],
    *,
    sides: Sequence[str],
    progress: bool = True,
) -> None:
    """Run the model over blocks and call ``visit(layer index, side, rows_NC)`` with each layer's joint states.

    Arguments and errors as for :func:`calibrate`.
    """
    check_uncompressed(model)
    prepare(model)

    def split(index: int, query: Tensor, key: Tensor, value: Tensor, rope: Rope | None) -> None:
        for side in sides:
            if side == QUERY:
                # Query heads of one group are further rows of its KV head: (B, G·J, T, D) → (B, G, J·T, D).
                states = query.unflatten(1, (key.shape[1], -1)).flatten(2, 3)
            elif side == VALUE:
                states = value
            elif side == ROTATED_KEY or rope is None:
                states = key
            else:
                states = rope.unrotate(key)
            visit(index, side, join_heads(states).flatten(0, 1))

    with (
        observing(model, split),
        torch.no_grad(),
        evaluating(model),
        progress_bar(total=blocks_NT.numel(), unit="tok", desc="calibrating", disable=not progress) as bar,
    ):
        for block_T in blocks_NT:
            # The language-model head is most of a small model's work, and calibration never looks at it.
            model.base_model(input_ids=block_T[None].to(model.device), use_cache=False)
            bar.update(block_T.numel())
