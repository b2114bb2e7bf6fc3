"""Multiple choice by log-likelihood, read through the cache: ARC, PIQA, WinoGrande, HellaSwag, OpenBookQA from local
files.

A prompt shows `shots` questions with their answers; it is what a cache compresses, since a question alone has some 30
tokens. The others are asked behind it. Prompts are those of lm-evaluation-harness.
"""

import dataclasses
import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowrank_kv.utils.config import require
from lowrank_kv.utils.errors import UserError

from .continuation import encode_behind
from .item import PASS_EFFORT, FreshReader, Item, ItemScore
from .jsonl import field, read_rows
from .reader import Reader

ACCURACY, NORMALIZED = "acc", "acc_norm"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choices:
    """A question and what may follow it.

    Attributes:
        questions: of each choice, the text before it; mostly all the same.
        continuations: the choices.
        right: the number of the right one.
    """

    questions: list[str]
    continuations: list[str]
    right: int

    @property
    def shown(self) -> str:
        """With its answer."""
        return self.questions[self.right] + self.continuations[self.right]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChoiceItem(Item):
    """A question whose answer is the most likely of several texts.

    Attributes:
        questions, continuations: of each choice, token ids.
        lengths: of the choices in characters, by which `acc_norm` divides.
        texts: the choices.
        right: the number of the right one.
        metric: which of `acc` and `acc_norm` is the score; results have both.
    """

    questions: tuple[tuple[int, ...], ...]
    continuations: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    texts: tuple[str, ...]
    right: int
    metric: str

    def content(self) -> dict[str, Any]:
        return {
            "context": self.context,
            "questions": self.questions,
            "continuations": self.continuations,
            "right": self.right,
            "metric": self.metric,
        }

    @property
    def num_after(self) -> int:
        return max(map(len, self.questions)) + max(map(len, self.continuations))

    @property
    def effort(self) -> int:
        return PASS_EFFORT * (len(set(self.questions)) * 2 + len(self.continuations))

    def answer_after(self, context: Reader) -> ItemScore:
        def read(question: tuple[int, ...]) -> Reader:
            reader = context.copy()
            reader.read(question)
            return reader

        return self._choose(read)

    def answer_within(self, fresh: FreshReader) -> ItemScore:
        return self._choose(lambda question: fresh((*self.context, *question)))

    def _choose(self, read: Callable[[tuple[int, ...]], Reader]) -> ItemScore:
        likelihoods, readers = [], {}
        for question, continuation in zip(self.questions, self.continuations, strict=True):
            if question not in readers:
                readers[question] = read(question)
            reader = readers[question]
            likelihoods.append((reader if len(continuation) == 1 else reader.copy()).log_likelihood(continuation)[0])
        divided = [value / length for value, length in zip(likelihoods, self.lengths, strict=True)]
        right = {
            ACCURACY: float(_best(likelihoods) == self.right),
            NORMALIZED: float(_best(divided) == self.right),
        }
        last = readers[self.questions[-1]]
        return ItemScore(
            score=right[self.metric],
            values=right,
            answer=self.texts[_best(likelihoods if self.metric == ACCURACY else divided)],
            cache_bytes=last.cache_bytes,
            full_bytes=last.full_bytes,
        )


def _best(values: list[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChoiceTask:
    """How a file's rows become questions.

    Attributes:
        read: row, path, number of the row, and its label where labels have a file of their own → the question.
        metric: the harness's convention.
    """

    read: Callable[[Mapping[str, Any], str, int, str | None], Choices]
    metric: str


def _lettered(prompt: str) -> Callable[[Mapping[str, Any], str, int, str | None], Choices]:
    """ARC's and OpenBookQA's rows, as published and as the hub has them."""

    def read(row: Mapping[str, Any], path: str, number: int, label: str | None) -> Choices:
        at = {"path": path, "number": number}
        question = field(row, "question_stem", "question", **at)
        choices = question["choices"] if isinstance(question, Mapping) else field(row, "choices", **at)
        stem = question["stem"] if isinstance(question, Mapping) else question
        if isinstance(choices, Mapping):
            letters, texts = choices["label"], choices["text"]
        else:
            letters, texts = ([each[key] for each in choices] for key in ("label", "text"))
        return Choices(
            questions=[prompt.format(stem)] * len(texts),
            continuations=[f" {text}" for text in texts],
            right=_index(letters, field(row, "answerKey", **at), path, number),
        )

    return read


def _piqa(row: Mapping[str, Any], path: str, number: int, label: str | None) -> Choices:
    at = {"path": path, "number": number}
    return Choices(
        questions=[f"Question: {field(row, 'goal', **at)}\nAnswer:"] * 2,
        continuations=[f" {field(row, name, **at)}" for name in ("sol1", "sol2")],
        right=_index(["0", "1"], label if label is not None else field(row, "label", **at), path, number),
    )


def _winogrande(row: Mapping[str, Any], path: str, number: int, label: str | None) -> Choices:
    at = {"path": path, "number": number}
    before, _, after = field(row, "sentence", **at).partition("_")
    return Choices(
        questions=[before + field(row, name, **at) for name in ("option1", "option2")],
        continuations=[f" {after.strip()}"] * 2,
        right=_index(["1", "2"], label if label is not None else field(row, "answer", **at), path, number),
    )


def _hellaswag(row: Mapping[str, Any], path: str, number: int, label: str | None) -> Choices:
    at = {"path": path, "number": number}
    text = f"{field(row, 'ctx_a', **at)} {field(row, 'ctx_b', **at).capitalize()}"
    endings = field(row, "endings", **at)
    return Choices(
        questions=[_without_marks(f"{field(row, 'activity_label', **at)}: {text}")] * len(endings),
        continuations=[f" {_without_marks(ending)}" for ending in endings],
        right=_index(
            [str(i) for i in range(len(endings))],
            label if label is not None else field(row, "label", **at),
            path,
            number,
        ),
    )


def _without_marks(text: str) -> str:
    """HellaSwag's texts without the marks of WikiHow."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _index(letters: list[str], wanted: Any, path: str, number: int) -> int:
    if str(wanted) not in letters:
        raise UserError(f"`{path}`: row {number} names the answer {wanted!r}, which is none of {', '.join(letters)}")
    return letters.index(str(wanted))


CHOICE_TASKS: dict[str, ChoiceTask] = {
    "arc_easy": ChoiceTask(read=_lettered("Question: {}\nAnswer:"), metric=ACCURACY),
    "arc_challenge": ChoiceTask(read=_lettered("Question: {}\nAnswer:"), metric=NORMALIZED),
    "openbookqa": ChoiceTask(read=_lettered("{}"), metric=NORMALIZED),
    "piqa": ChoiceTask(read=_piqa, metric=ACCURACY),
    "winogrande": ChoiceTask(read=_winogrande, metric=ACCURACY),
    "hellaswag": ChoiceTask(read=_hellaswag, metric=NORMALIZED),
}


def read_choices(name: str, path: str, labels: str | None = None) -> list[Choices]:
    """The questions of a local file.

    Args:
        name: one of :data:`CHOICE_TASKS`.
        labels: a file with a label on each line, where rows have none.

    Raises:
        UserError: a file is missing, or not of this task.
    """
    rows, right = read_rows(path), None
    if labels is not None:
        try:
            right = Path(labels).read_text(encoding="utf-8").split()
        except OSError as error:
            raise UserError(f"cannot read `{labels}`: {error.strerror}; check `labels`") from error
        except UnicodeDecodeError as error:
            raise UserError(f"`{labels}` is not UTF-8 text: {error.reason}; check `labels`") from error
        require(len(right) == len(rows), "labels", labels, f"as long as `{path}`, which has {len(rows)} rows")
    return [
        CHOICE_TASKS[name].read(row, path, number, right[number - 1] if right else None)
        for number, row in enumerate(rows, 1)
    ]


def choice_items(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    path: str,
    *,
    labels: str | None = None,
    shots: int,
    count: int | None,
    seed: int,
) -> list[ChoiceItem]:
    """Questions behind `shots` others of the same file, which are not asked.

    Args:
        count: how many are asked, drawn with `seed`; None asks all.

    Raises:
        UserError: the file has too few.
    """
    found = read_choices(name, path, labels)
    random.Random(f"{seed}:{name}").shuffle(found)
    left = len(found) - shots
    count = left if count is None else count
    require(1 <= count <= left, "items", count, f"at most {left}, which `{path}` has besides the `shots`")
    examples, asked = found[:shots], found[shots : shots + count]
    context = "".join(f"{example.shown}\n\n" for example in examples)
    metric = CHOICE_TASKS[name].metric

    def begin(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text).input_ids)

    def behind(text: str) -> tuple[int, ...]:
        return encode_behind(tokenizer, text)

    return [
        ChoiceItem(
            cluster=number,
            context=begin(context) if context else (),
            questions=tuple(map(behind if context else begin, each.questions)),
            continuations=tuple(map(behind, each.continuations)),
            lengths=tuple(max(1, len(text) - 1) for text in each.continuations),  # a choice may have no character
            texts=tuple(text.strip() for text in each.continuations),
            right=each.right,
            metric=metric,
        )
        for number, each in enumerate(asked)
    ]
