"""Documents that are packed into one sequence see nothing of one another.

transformers makes the block mask of such documents from positions that begin anew, in families whose code passes positions
on to where masks are made. Others, GPT-OSS and OPT among them, let each document see all before it. A model is tried, and
given the mask where it lacks it. In some, such as Llama 4, attention is not told positions, by which a compressor tells the
first and latest tokens of a document; these are given them as a keyword argument, which their code passes on.

Shapes: B batch (one where a model is tried), T tokens, E hidden size.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

from lowrank_kv.hf.attention import POSITIONS
from lowrank_kv.hf.cache_argument import cache_name
from lowrank_kv.hf.geometry import attention_modules
from lowrank_kv.hf.loading import position_limit
from lowrank_kv.hf.self_check import TIMES_ROUNDING, Difference, least_allowed, random_ids
from lowrank_kv.utils.eval_mode import evaluating

_DOCUMENT = 24  # tokens of each of the two that a model is tried with


def isolate_documents(model: PreTrainedModel, device: torch.device) -> str | None:
    """Let a model read each document of a sequence as it reads that document by itself, where `position_ids` begin anew with
    every document; returns why it does not, or None.

    The model reads two random documents, packed and each by itself. Where the second differs by more than rounding, the
    decoder is given masks from then on in every call that passes positions and no mask. Where its attention is not told
    the positions, it is told them. Where that does not help, either, the model is left as it was.

    Args:
        model: prepared and uncompressed, of any dtype. All processes that share its weights must call this.
        device: where its inputs go.
    """
    hooks = []
    with evaluating(model):
        for objection_of, mend in ((objection_to_packing, _give_masks), (_objection_to_silence, _tell_positions)):
            if objection_of(model, device) is None:
                continue
            hooks.append(model.get_decoder().register_forward_pre_hook(mend, with_kwargs=True))
            objection = objection_of(model, device)
            if objection is not None:
                for hook in hooks:
                    hook.remove()
                return objection
    return None


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


@torch.no_grad()
def _objection_to_silence(model: PreTrainedModel, device: torch.device) -> str | None:
    """That attention is not told the positions that the decoder is given, if so."""
    told = set()

    def look(module: nn.Module, args: tuple, kwargs: dict) -> None:
        if any(kwargs.get(name) is not None for name in ("position_ids", POSITIONS)):
            told.add(module)

    modules = attention_modules(model).values()
    hooks = [module.register_forward_pre_hook(look, prepend=True, with_kwargs=True) for module in modules]
    try:
        ids_BT = random_ids(model, 2, device)
        model.base_model(input_ids=ids_BT, position_ids=torch.zeros_like(ids_BT), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    if len(told) == len(hooks):
        return None
    return (
        f"the code of a {model.config.get_text_config(decoder=True).model_type} model does not tell its attention where a "
        f"document begins, so that a compressor would take the first tokens of a block for those of each document"
    )


def _tell_positions(decoder: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """The pre-hook of a decoder whose attention is not told positions."""
    position_BT = kwargs.get("position_ids")
    if position_BT is None or kwargs.get(cache_name(kwargs)) is not None:
        return None
    return args, {**kwargs, POSITIONS: position_BT}


def _give_masks(decoder: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """The pre-hook of a decoder: its masks, by kinds of layers where it has several, as it would make them itself."""
    position_BT = kwargs.get("position_ids")
    if position_BT is None or kwargs.get("attention_mask") is not None or kwargs.get(cache_name(kwargs)) is not None:
        return None
    like_BTE = torch.empty(*position_BT.shape, 1, dtype=decoder.dtype, device=position_BT.device)
    kwargs["attention_mask"] = create_masks_for_generate(decoder.config, like_BTE, None, None, position_ids=position_BT)
    return args, kwargs
