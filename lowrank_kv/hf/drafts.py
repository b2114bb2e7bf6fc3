"""Drafts of a `generate()` whose cache holds the beginning of its text, as a kept prefix or an earlier turn.

There transformers gives the model the whole text in the first call, what the cache holds included, which would be stored a
second time. Two hooks on the instance leave that away.
"""

import functools
import inspect
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import CandidateGenerator

from lowrank_kv.hf.cache_argument import cache_name
from lowrank_kv.utils.errors import UserError

_REMEDY = "leave the drafts out (`prompt_lookup_num_tokens`, `assistant_model`), or take an empty cache"


def hook_drafts(model: PreTrainedModel) -> None:
    """Let a `generate()` with drafts read only what its compressed cache does not hold. What somebody else has put in the
    place of a hook stays there."""
    for name, hook in _HOOKS.items():
        if name not in model.__dict__ or _is_hooked(model, name):
            bound = functools.partial(hook, model)
            # transformers looks up there which arguments a model takes. Annotations not every pickle could hold.
            signature = inspect.signature(getattr(type(model), name))
            _, *parameters = (each.replace(annotation=each.empty) for each in signature.parameters.values())
            bound.__signature__ = inspect.Signature(parameters)
            setattr(model, name, bound)


def unhook_drafts(model: PreTrainedModel) -> None:
    """Undo :func:`hook_drafts`."""
    for name in _HOOKS:
        if _is_hooked(model, name):
            delattr(model, name)


def check_drafts(model: PreTrainedModel, held: int) -> None:
    """Raise :class:`UserError` where a `generate()` with drafts would store the tokens a second time that a cache holds."""
    for name in _HOOKS:
        if held and not _is_hooked(model, name):
            raise UserError(
                f"`model.{name}` was replaced, so that with drafts the {held} tokens that the cache holds would be stored a "
                f"second time; {_REMEDY}"
            )


def prompt_length(generation_config: Any, model_kwargs: dict) -> int:
    """The place where the prompt of a `generate()` ends, cached tokens included; 0 where it does not say."""
    mask = model_kwargs.get("attention_mask")
    # `generate()` has dropped a mask without padding by now, and noted its length.
    return getattr(generation_config, "_mask_length", 0) if mask is None else mask.shape[1]


def _get_candidate_generator(self: PreTrainedModel, *args: Any, **kwargs: Any) -> CandidateGenerator:
    """What makes the drafts of a `generate()`, which asks for it once, before its first call."""
    generator = type(self)._get_candidate_generator(self, *args, **kwargs)
    model_kwargs, input_ids = kwargs["model_kwargs"], kwargs["input_ids"]
    cache = model_kwargs.get(cache_name(model_kwargs))
    if not hasattr(cache, "compressed_layers"):
        return generator
    length, embeds = prompt_length(kwargs["generation_config"], model_kwargs), model_kwargs.get("inputs_embeds")
    mask = model_kwargs.get("attention_mask")
    if mask is not None and bool(mask.all()):
        # transformers cuts it to the length of the ids, which may be those of new tokens alone. Later versions drop it, too.
        del model_kwargs["attention_mask"]
        mask = None
    if embeds is not None and (input_ids.shape[1] or mask is not None):
        raise UserError(
            "`inputs_embeds` take the place of `input_ids` in the first call, and drafts or padding that go with these "
            "would get lost; leave out the `inputs_embeds`, or the drafts (`prompt_lookup_num_tokens`, `assistant_model`)"
        )
    held = cache.get_seq_length()
    if held:
        given = input_ids if embeds is None else embeds
        cache.is_given_again = given.shape[1] == length
        _check_generator(generator, cache.is_given_again, mask, held)
    return generator


def _check_generator(generator: CandidateGenerator, is_given_again: bool, mask: Tensor | None, held: int) -> None:
    """Raise :class:`UserError` where drafts cannot follow a text of which the cache holds a part."""
    if generator.requires_model_outputs:
        raise UserError(
            f"a {type(generator).__name__} drafts from what the model computes of all tokens of a prompt, and the cache "
            f"holds {held} of them already; draft by `prompt_lookup_num_tokens` or another model, or take an empty cache"
        )
    if not is_given_again and mask is not None:
        raise UserError(
            f"with drafts, an `attention_mask` with padding needs all of the text as `input_ids`, the {held} tokens that "
            f"the cache holds included; give them, or {_REMEDY}"
        )


def _prepare_inputs_for_generation(
    self: PreTrainedModel, input_ids: Tensor, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    cache, embeds = kwargs.get(cache_name(kwargs)), kwargs.get("inputs_embeds")
    if getattr(cache, "is_given_again", False):
        cache.is_given_again = False
        text = input_ids if embeds is None else embeds
        kwargs["next_sequence_length"] = text.shape[1] - cache.get_seq_length()
    return type(self).prepare_inputs_for_generation(self, input_ids, *args, **kwargs)


_HOOKS = {
    "_get_candidate_generator": _get_candidate_generator,
    "prepare_inputs_for_generation": _prepare_inputs_for_generation,
}


def _is_hooked(model: PreTrainedModel, name: str) -> bool:
    return getattr(model.__dict__.get(name), "func", None) is _HOOKS[name]
