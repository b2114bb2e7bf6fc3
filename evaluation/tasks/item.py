"""What a benchmark asks: a context, a question about it, and how an answer is scored.

Texts become tokens piece by piece, context, question, continuation, so that they are the same tokens wherever the
prompt ends.
"""

import abc
import dataclasses
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowrank_kv.utils.errors import UserError

from .continuation import encode_beginning, encode_behind
from .matching import Metric
from .prompts import FreshReader
from .reader import Reader

AGNOSTIC, AWARE = "agnostic", "aware"
QUERIES = (AGNOSTIC, AWARE)

_MARK = "\x00"
# Templates that tell today's date would ask other questions tomorrow. This one is that of Llama 3.1's, given none.
_DATE = "26 Jul 2024"
_ONE_DAY = f"{{% macro strftime_now(format) %}}{_DATE}{{% endmacro %}}"
# A forward pass of one token, or of a few, takes about as long as that many tokens of a prompt (demo model, one core).
PASS_EFFORT = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class ItemScore:
    """One item answered through one cache.

    Attributes:
        score: between 0 and 1.
        values: further figures by name.
        answer: what was generated or chosen.
        cache_bytes, full_bytes: held by the cache, and by an uncompressed one, when it was answered.
    """

    score: float
    values: dict[str, float]
    answer: str
    cache_bytes: int
    full_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item(abc.ABC):
    """One question.

    Attributes:
        context: token ids that are compressed before the question is known; items of equal context may share a cache.
        cluster: items of one cluster are about the same text, so that an interval draws them together.
    """

    context: tuple[int, ...]
    cluster: int

    @abc.abstractmethod
    def content(self) -> dict[str, Any]:
        """All that distinguishes it from other items, as JSON."""

    @property
    @abc.abstractmethod
    def metric_name(self) -> str:
        """What its score is called."""

    @property
    @abc.abstractmethod
    def num_asked(self) -> int:
        """Tokens of the question."""

    @property
    @abc.abstractmethod
    def num_answered(self) -> int:
        """Tokens of the answer that a cache may hold."""

    @property
    def num_after(self) -> int:
        """All tokens that a cache may hold behind the context."""
        return self.num_asked + self.num_answered

    @property
    @abc.abstractmethod
    def effort(self) -> int:
        """How long an answer takes after the context, roughly, as that many tokens of a prompt."""

    @abc.abstractmethod
    def answer_after(self, context: Reader) -> ItemScore:
        """Answer with the question behind a context that was read; `context` itself stays as it is."""

    @abc.abstractmethod
    def answer_within(self, fresh: FreshReader) -> ItemScore:
        """Answer with the question as a part of the prompt."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationItem(Item):
    """A question that is answered by generated text.

    Attributes:
        question: token ids, those that the answer is to begin with included.
        references: of the answer.
        max_new_tokens: at most as many are generated.
        metric: scores the text.
        tokenizer: decodes it.
    """

    question: tuple[int, ...]
    references: tuple[str, ...]
    max_new_tokens: int
    metric: Metric
    tokenizer: PreTrainedTokenizerBase = dataclasses.field(repr=False)

    def content(self) -> dict[str, Any]:
        return {
            "context": self.context,
            "question": self.question,
            "references": self.references,
            "max_new_tokens": self.max_new_tokens,
            "metric": self.metric.content(),
        }

    @property
    def metric_name(self) -> str:
        return self.metric.name

    @property
    def num_asked(self) -> int:
        return len(self.question)

    @property
    def num_answered(self) -> int:
        return self.max_new_tokens

    @property
    def effort(self) -> int:
        return PASS_EFFORT * (1 + self.max_new_tokens)

    def answer_after(self, context: Reader) -> ItemScore:
        reader = context.copy()
        reader.read(self.question)
        return self._generate(reader)

    def answer_within(self, fresh: FreshReader) -> ItemScore:
        return self._generate(fresh((*self.context, *self.question)))

    def _generate(self, reader: Reader) -> ItemScore:
        text = reader.generate(
            self.tokenizer, self.max_new_tokens, is_done=lambda text: self.metric.is_settled(text, self.references)
        )
        return ItemScore(
            score=self.metric.score(text, self.references),
            values={},
            answer=text,
            cache_bytes=reader.cache_bytes,
            full_bytes=reader.full_bytes,
        )


def prompt_pieces(
    tokenizer: PreTrainedTokenizerBase, context: str, question: str, answer_prefix: str = "", *, chat: bool = False
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids of a context and of the question behind it.

    Args:
        answer_prefix: what the answer begins with; behind a template's own end of the user's turn.
        chat: whether context and question are a user's turn in the tokenizer's chat template.

    Raises:
        UserError: it has none.
    """
    if not chat:
        return encode_beginning(tokenizer, context), encode_behind(tokenizer, question + answer_prefix)
    if tokenizer.chat_template is None:
        raise UserError("`chat` is true, and this model's tokenizer has no chat template; leave it out")
    turn = [{"role": "user", "content": _MARK}]
    template = _ONE_DAY + tokenizer.get_chat_template()
    options = {"add_generation_prompt": True, "tokenize": False, "date_string": _DATE}
    head, tail = tokenizer.apply_chat_template(turn, chat_template=template, **options).split(_MARK)
    begin = tokenizer(head + context, add_special_tokens=False).input_ids
    return tuple(begin), encode_behind(tokenizer, question + tail + answer_prefix.lstrip())
