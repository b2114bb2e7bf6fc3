"""Tokens of a text that begins a prompt, and of one that stands behind another.

SentencePiece tokenizers, such as those of Llama 2 and of Mistral's first models, take every text for the beginning of one
and put a space before it. Behind a context there is none: the tokens would be those of another text.
"""

from transformers import PreTrainedTokenizerBase

from lowrank_kv.utils.errors import UserError

# What may stand before a text while it is encoded. A tokenizer may join the first with line breaks that begin a text.
_LEADS = ("\n", ".")
_PROBE = "a"


def encode_beginning(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Token ids of a text that begins a prompt, and does not end it: an end of text that a tokenizer adds is left out."""
    ids, own = tokenizer(text).input_ids, tokenizer(text, add_special_tokens=False).input_ids
    end = tokenizer.eos_token_id
    ends_with_own = ids[len(ids) - 1 - len(own) : -1] == own and (own or tokenizer.bos_token_id != end)
    return tuple(ids[:-1] if end is not None and ids[-1:] == [end] and ends_with_own else ids)


def encode_behind(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Token ids of a text that is no beginning; what stands before it has no part in them.

    Raises:
        UserError: the tokenizer puts a space before a text, and joins this one with whatever else stands there.
    """

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    if _behind(ids(_LEADS[0] + _PROBE), ids(_LEADS[0])) == ids(_PROBE):
        return tuple(ids(text))  # no space is put anywhere
    for lead in _LEADS:
        found = _behind(ids(lead + text), ids(lead))
        if found is not None:
            return tuple(found)
    raise UserError(
        f"`{tokenizer.name_or_path}` puts a space before each text, and joins {text[:20]!r} with what else stands there: "
        "its tokens behind a prompt are not known; take a model with another tokenizer"
    )


def _behind(whole: list[int], lead: list[int]) -> list[int] | None:
    """What follows the tokens of a lead; None where they are not the first ones."""
    return whole[len(lead) :] if whole[: len(lead)] == lead else None
