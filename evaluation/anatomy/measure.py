"""The anatomy of a comparison's methods, as one part of its record.

Shapes: L layers, T tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dynakv.paper_sentence import RARE, SENTENCE, STOPWORDS
from lowrank_kv.calibration.calibration import Calibration

from ..methods import Method
from ..scores import rank_correlation
from .residuals import STATE_SIDES, follows_text, residuals
from .shares import States, states_of, token_shares
from .spectra import spectra

_SPACES = ("▁", "Ġ", " ")  # how tokenizers mark a token that begins with a space


def anatomy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    methods: Sequence[Method],
    calibration: Calibration | None,
    window_T: Tensor,
    *,
    prefix: int,
    step: int,
) -> dict[str, Any]:
    """Shares of tokens and layers, spectra, and residuals, ready for JSON.

    Args:
        model: uncompressed.
        methods: those of budgets known; the others are left out.
        calibration: whose spectra are described; None for none.
        window_T: a text over which allocations are compared and residuals followed.
        prefix: its prompt; the middle where there is none.
        step: tokens read at a time after it.
    """
    ids = _with_start(tokenizer, SENTENCE)
    sentence, text = states_of(model, torch.tensor(ids)), states_of(model, window_T, sides=STATE_SIDES)
    itemsize, found = (
        model.dtype.itemsize,
        {"sentence": {"text": SENTENCE, "tokens": tokenizer.convert_ids_to_tokens(ids)}},
    )
    makers = {method.label: method.maker(None) for method in methods if method.bytes_of is None}
    shares, allocations = {}, {}
    for label, make_cache in makers.items():
        share_L2T = token_shares(make_cache, sentence, itemsize)
        if share_L2T is None:
            continue
        if float(share_L2T.std(dim=2).max()) > 0:  # tokens differ
            shares[label] = _described(share_L2T, ids, tokenizer)
        allocations[label] = _allocation(make_cache, text, itemsize)
    found["sentence"]["methods"] = shares
    found["allocations"] = {
        "layers": list(dict.fromkeys(index for index, _ in sentence)),
        "methods": allocations,
        "correlations": _correlations(allocations),
    }
    found["spectra"] = [] if calibration is None else spectra(calibration)
    start = prefix or len(window_T) // 2
    found["residuals"] = {
        label: residuals(model, make_cache, window_T.to(model.device), text, prefix=start, step=step)
        for label, make_cache in makers.items()
        if follows_text(make_cache)
    }
    return found


def _with_start(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of a text after the token that texts begin with, as the paper reads it."""
    ids, start = tokenizer(text)["input_ids"], tokenizer.bos_token_id
    return ids if start is None or ids[:1] == [start] else [start, *ids]


def _described(share_L2T: Tensor, ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Shares by layer and token, and whether the paper's three claims hold of them."""
    share_LT = share_L2T.mean(dim=1)
    mean_T, mean_L = share_LT.mean(dim=0), share_LT.mean(dim=1)
    words = _words(ids, tokenizer)
    by_kind = {
        kind: [float(mean_T[i]) for i, word in enumerate(words) if word in chosen]
        for kind, chosen in (("stopwords", STOPWORDS), ("rare", RARE))
    }
    halves = mean_L[: len(mean_L) // 2], mean_L[len(mean_L) // 2 :]
    lower, upper = (float(half.mean()) if len(mean_L) > 1 else None for half in halves)
    return {
        "shares": [[round(float(value), 4) for value in row] for row in share_LT],
        "first": float(mean_T[0]),
        "others": float(mean_T[1:].mean()),
        "rare": _mean(by_kind["rare"]),
        "stopwords": _mean(by_kind["stopwords"]),
        "lower_layers": lower,
        "upper_layers": upper,
    }


def _words(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The word that each token is a part of, without punctuation; a token that begins with a space begins one."""
    found, tokens = [], tokenizer.convert_ids_to_tokens(list(ids))
    # A token alone is decoded as the beginning of a text, where SentencePiece leaves out the space that its mark stands for.
    spaces = [" " * token.startswith(_SPACES) for token in tokens]
    texts = [space + tokenizer.decode([token]).removeprefix(space) for space, token in zip(spaces, ids, strict=True)]
    starts = [i for i, text in enumerate(texts) if i <= 1 or text.startswith(" ") or not text.strip()[:1].isalnum()]
    for start, end in zip(starts, [*starts[1:], len(texts)], strict=True):
        found += ["".join(texts[start:end]).strip(" .,")] * (end - start)
    return [""] * (len(texts) - len(found)) + found


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _allocation(make_cache, text: States, itemsize: int) -> dict[str, Any]:
    """Means over the tokens of a text, layer by layer, and over layers, token by token."""
    states = {key: rows for key, rows in text.items() if key[1] in ("key", "value")}
    share_L2T = token_shares(make_cache, states, itemsize)
    return {
        "keys": [round(float(value), 4) for value in share_L2T[:, 0].mean(dim=1)],
        "values": [round(float(value), 4) for value in share_L2T[:, 1].mean(dim=1)],
        "tokens": [round(float(value), 4) for value in share_L2T.mean(dim=(0, 1))],
    }


def _correlations(allocations: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """Rank correlations of each pair of methods: of layers (keys and values one after another), and of tokens; None where
    one of them treats all alike."""
    labels, found = list(allocations), []
    for position, first in enumerate(labels):
        for second in labels[position + 1 :]:
            one, other = allocations[first], allocations[second]
            found.append(
                {
                    "methods": [first, second],
                    "layers": _correlation(one["keys"] + one["values"], other["keys"] + other["values"]),
                    "tokens": _correlation(one["tokens"], other["tokens"]),
                }
            )
    return found


def _correlation(first: list[float], second: list[float]) -> float | None:
    if len(set(first)) == 1 or len(set(second)) == 1:
        return None
    return round(rank_correlation(first, second), 3)
