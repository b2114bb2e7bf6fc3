"""Multiple choice by log-likelihood, read through the cache: ARC, PIQA, WinoGrande, HellaSwag, OpenBookQA from local
files.

A prompt shows `shots` questions with their answers; it is what a cache compresses, since a question alone has some 30
tokens. The others are asked behind it. Prompts are those of lm-evaluation-harness.
"""

import dataclasses
import functools
import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowrank_kv.utils.config import require
from lowrank_kv.utils.errors import UserError

from .continuation import encode_beginning, encode_behind
from .item import PASS_EFFORT, FreshReader, Item, ItemScore
from .jsonl import Row, read_rows
from .reader import Reader

ACCURACY, NORMALIZED = "acc", "acc_norm"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choices:
    """A question and what may follow it.

    Attributes:
        questions: of each choice, the text before it; mostly all the same.
        continuations: the choices.
        right: the number of the right one.
        about: questions that are equal in this are drawn together by intervals.
    """

    questions: list[str]
    continuations: list[str]
    right: int
    about: str

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
    def metric_name(self) -> str:
        return self.metric

    @property
    def num_asked(self) -> int:
        return max(map(len, self.questions))

    @property
    def num_answered(self) -> int:
        return max(map(len, self.continuations))

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


# Of a row: the text before each choice, the choices, and what the answer is called for each.
ReadRow = Callable[[Row], tuple[list[str], list[str], list[str]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChoiceTask:
    """How a file's rows become questions.

    Attributes:
        answer: the key of the answer.
        metric: the harness's convention.
        about: what rows about the same have in common; None where a row does not say it, and its questions do.
    """

    read: ReadRow
    answer: str
    metric: str
    about: Callable[[Row], str | None] = lambda row: None

    def choices(self, row: Row) -> Choices:
        """The question of a row."""
        questions, texts, letters = self.read(row)
        answer = row.get(self.answer)
        if str(answer) not in letters:
            raise row.error(f"names the answer {answer!r}, which is none of {', '.join(letters)}")
        continuations = [f" {text}" for text in texts]
        about = self.about(row) or "\n".join(questions)
        return Choices(questions=questions, continuations=continuations, right=letters.index(str(answer)), about=about)


_OF_CHOICE = ("label", "text")


def _lettered(prompt: str) -> ReadRow:
    """ARC's and OpenBookQA's rows, as published and as the hub has them."""

    def read(row: Row) -> tuple[list[str], list[str], list[str]]:
        question = row.get("question_stem", "question")
        if isinstance(question, Mapping):  # as published: the choices are in it
            row = row.within("question")
        stem, choices = row.text("stem", "question_stem", "question"), row.get("choices")
        if not isinstance(choices, Mapping):  # a list of them
            row = row.changed(
                "choices", {key: [each.get(key) for each in row.mappings("choices")] for key in _OF_CHOICE}
            )
        letters, texts = (row.within("choices").texts(key) for key in _OF_CHOICE)
        if len(letters) != len(texts):
            raise row.error(f"has {len(letters)} labels of {len(texts)} choices")
        return [prompt.format(stem)] * len(texts), texts, letters

    return read


def _piqa(row: Row) -> tuple[list[str], list[str], list[str]]:
    return [f"Question: {row.text('goal')}\nAnswer:"] * 2, [row.text("sol1"), row.text("sol2")], ["0", "1"]


def _winogrande(row: Row) -> tuple[list[str], list[str], list[str]]:
    before, gap, after = row.text("sentence").partition("_")
    if not gap:
        raise row.error(f"has the sentence {before!r}, without a gap `_`")
    return [before + row.text(name) for name in ("option1", "option2")], [after.strip()] * 2, ["1", "2"]


def _hellaswag(row: Row) -> tuple[list[str], list[str], list[str]]:
    question = _without_marks(f"{row.text('activity_label')}: {row.text('ctx_a')} {row.text('ctx_b').capitalize()}")
    endings = [_without_marks(ending) for ending in row.texts("endings")]
    return [question] * len(endings), endings, [str(i) for i in range(len(endings))]


def _twins(row: Row) -> str | None:
    """WinoGrande's sentences that differ in a word have one identifier, and a number behind it."""
    return row.values["qID"].rpartition("-")[0] if "qID" in row.values else None


def _source(row: Row) -> str | None:
    """The video or the article that HellaSwag's rows are from."""
    return row.values.get("source_id")


def _without_marks(text: str) -> str:
    """HellaSwag's texts without the marks of WikiHow."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


CHOICE_TASKS: dict[str, ChoiceTask] = {
    "arc_easy": ChoiceTask(read=_lettered("Question: {}\nAnswer:"), answer="answerKey", metric=ACCURACY),
    "arc_challenge": ChoiceTask(read=_lettered("Question: {}\nAnswer:"), answer="answerKey", metric=NORMALIZED),
    "openbookqa": ChoiceTask(read=_lettered("{}"), answer="answerKey", metric=NORMALIZED),
    "piqa": ChoiceTask(read=_piqa, answer="label", metric=ACCURACY),
    "winogrande": ChoiceTask(read=_winogrande, answer="answer", metric=ACCURACY, about=_twins),
    "hellaswag": ChoiceTask(read=_hellaswag, answer="label", metric=NORMALIZED, about=_source),
}


def read_choices(name: str, path: str, labels: str | None = None) -> list[Choices]:
    """The questions of a local file.

    Args:
        name: one of :data:`CHOICE_TASKS`.
        labels: a file with a label on each line, where rows have none.

    Raises:
        UserError: a file is missing, or not of this task.
    """
    task, rows = CHOICE_TASKS[name], read_rows(path)
    if labels is not None:
        try:
            right = Path(labels).read_text(encoding="utf-8").split()
        except OSError as error:
            raise UserError(f"cannot read `{labels}`: {error.strerror}; check `labels`") from error
        except UnicodeDecodeError as error:
            raise UserError(f"`{labels}` is not UTF-8 text: {error.reason}; check `labels`") from error
        require(len(right) == len(rows), "labels", labels, f"as long as `{path}`, which has {len(rows)} rows")
        rows = [row.changed(task.answer, answer) for row, answer in zip(rows, right, strict=True)]
    return [task.choices(row) for row in rows]


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
    require(left >= 1, "shots", shots, f"below {len(found)}, the rows of `{path}`, of which one at least is asked")
    count = left if count is None else count
    require(1 <= count <= left, "items", count, f"at most {left}, which `{path}` has besides the `shots`")
    examples, asked = found[:shots], found[shots : shots + count]
    context = "".join(f"{example.shown}\n\n" for example in examples)
    metric = CHOICE_TASKS[name].metric
    clusters = {about: number for number, about in enumerate(dict.fromkeys(each.about for each in asked))}

    begin, behind = (functools.partial(encode, tokenizer) for encode in (encode_beginning, encode_behind))
    return [
        ChoiceItem(
            cluster=clusters[each.about],
            context=begin(context) if context else (),
            questions=tuple(map(behind if context else begin, each.questions)),
            continuations=tuple(map(behind, each.continuations)),
            lengths=tuple(max(1, len(text) - 1) for text in each.continuations),  # a choice may have no character
            texts=tuple(text.strip() for text in each.continuations),
            right=each.right,
            metric=metric,
        )
        for each in asked
    ]
