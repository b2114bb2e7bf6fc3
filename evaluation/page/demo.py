"""The page that `make demo` ends with: that of its comparison, and the text of the full and the compressed cache."""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from markupsafe import Markup, escape
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lowrank_kv.hf.geometry import geometry_of

from ..reading import cache_bytes
from .build import page


@dataclasses.dataclass(frozen=True, kw_only=True)
class Continuation:
    """What a model wrote after a prompt.

    Attributes:
        label: of its cache.
        text: without the prompt.
        nbytes: that the cache holds at the end.
    """

    label: str
    text: str
    nbytes: int


@torch.no_grad()
def continuation(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids_1T: Tensor, *, label: str, tokens: int
) -> Continuation:
    """Let `model`, as it is, continue a prompt greedily.

    Args:
        ids_1T: of the prompt.
        tokens: to write, whatever they are.
    """
    output = model.generate(
        ids_1T,
        attention_mask=torch.ones_like(ids_1T),
        do_sample=False,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        return_dict_in_generate=True,
        pad_token_id=tokenizer.eos_token_id,
    )
    return Continuation(
        label=label,
        text=tokenizer.decode(output.sequences[0, ids_1T.shape[1] :], skip_special_tokens=True),
        nbytes=cache_bytes(output.past_key_values, geometry_of(model).layers),
    )


def demo_page(record: Mapping[str, Any], prompt: str, texts: Sequence[Continuation], commands: Sequence[str]) -> str:
    """The page of a comparison, with one prompt continued through two caches; one file of HTML that loads nothing.

    Args:
        record: of the comparison.
        prompt: whose end is shown.
        texts: of the full cache, then of the compressed one.
        commands: to go on with.
    """
    caches = [
        {"label": each.label, "marked": marked, "nbytes": each.nbytes, "share": each.nbytes / texts[0].nbytes}
        for each, marked in zip(texts, _marked(*(each.text for each in texts)), strict=True)
    ]
    return page(
        [record],
        template="demo.html.jinja",
        title="What the demo made",
        model=record["config"]["model"],
        prompt=prompt[-400:],
        caches=caches,
        commands=commands,
    )


def _marked(first: str, second: str) -> tuple[Markup, Markup]:
    """Both texts as HTML, the words marked in which they differ."""
    words = [text.split() for text in (first, second)]
    shown: tuple[list[Markup], list[Markup]] = ([], [])
    for tag, *places in difflib.SequenceMatcher(a=words[0], b=words[1], autojunk=False).get_opcodes():
        for side, (start, end) in enumerate((places[:2], places[2:])):
            if start < end:
                part = escape(" ".join(words[side][start:end]))
                shown[side].append(part if tag == "equal" else Markup("<mark>{}</mark>").format(part))
    return Markup(" ").join(shown[0]), Markup(" ").join(shown[1])
