"""Documents that are packed into one sequence see nothing of one another.

transformers makes the block mask of such documents from positions that begin anew, in families whose code passes positions
on to where masks are made. Others, GPT-OSS and OPT among them, let each document see all before it. A model is tried, and
given the mask where it lacks it.

Shapes: B batch (one where a model is tried), T tokens, E hidden size.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

from lowrank_kv.hf.cache_argument import cache_name
from lowrank_kv.hf.loading import position_limit
from lowrank_kv.hf.self_check import TIMES_ROUNDING, Difference, least_allowed, random_ids
from lowrank_kv.utils.eval_mode import evaluating

_DOCUMENT = 24  # tokens of each of the two that a model is tried with


def isolate_documents(model: PreTrainedModel, device: torch.device) -> str | None:
    """Let a model read each document of a sequence as it reads that document by itself, where `position_ids` begin anew with
    every document; returns why it does not, or None.

    The model reads two random documents, packed and each by itself. Where the second differs by more than rounding, the
    decoder is given masks from then on in every call that passes positions and no mask. Where that does not help, either,
    the model is left as it was.

    Args:
        model: uncompressed, of any dtype. All processes that share its weights must call this.
        device: where its inputs go.
    """
    with evaluating(model):
        if objection_to_packing(model, device) is None:
            return None
        hook = model.get_decoder().register_forward_pre_hook(_give_masks, with_kwargs=True)
        objection = objection_to_packing(model, device)
    if objection is not None:
        hook.remove()
    return objection


@torch.no_grad()
def objection_to_packing(model: PreTrainedModel, device: torch.device) -> str | None:
    """How a model in eval mode reads the second of two packed documents differently from that document by itself, if it
    does; the arguments are those of :func:`isolate_documents`."""
    limit = min(position_limit(model) or _DOCUMENT, _DOCUMENT)
    first_BT, second_BT = random_ids(model, 2 * limit, device).split(limit, dim=1)
    position_BT = torch.arange(first_BT.shape[1], device=first_BT.device)[None]
    base = model.base_model

    def states(ids_BT: Tensor, **positions: Tensor) -> Tensor:
        return base(input_ids=ids_BT, **positions, use_cache=False)[0]

    packed_BTE = states(torch.cat([first_BT, second_BT], dim=1), position_ids=position_BT.repeat(1, 2))
    in_first_BTE, in_second_BTE = packed_BTE.split(first_BT.shape[1], dim=1)
    # The first one sees nothing but itself in any family, so that its difference is what rounding does.
    rounding = Difference.between(in_first_BTE, states(first_BT, position_ids=position_BT)).rms
    # By itself a model counts positions as it does when it is served.
    difference = Difference.between(in_second_BTE, states(second_BT))
    allowed = max(least_allowed(packed_BTE.dtype), TIMES_ROUNDING * rounding)
    if difference.rms <= allowed:
        return None
    return (
        f"a {model.config.get_text_config(decoder=True).model_type} model does not read a document that stands behind "
        f"another in a sequence as it reads it by itself: hidden states differ by up to {difference.largest:.2g} of their "
        f"root mean square, {difference.rms:.2g} on average, where rounding explains {allowed:.2g} on average"
    )


def _give_masks(decoder: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """The pre-hook of a decoder: its masks, by kinds of layers where it has several, as it would make them itself."""
    position_BT = kwargs.get("position_ids")
    if position_BT is None or kwargs.get("attention_mask") is not None or kwargs.get(cache_name(kwargs)) is not None:
        return None
    like_BTE = torch.empty(*position_BT.shape, 1, dtype=decoder.dtype, device=position_BT.device)
    kwargs["attention_mask"] = create_masks_for_generate(decoder.config, like_BTE, None, None, position_ids=position_BT)
    return args, kwargs
