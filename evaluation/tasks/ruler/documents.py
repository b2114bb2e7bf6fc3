"""Questions about documents: `qa_1` from SQuAD's file, `qa_2` from HotpotQA's."""

import dataclasses
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowrank_kv.utils.errors import UserError

from .sample import RulerTask, Sample

_INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DocumentQuestion:
    """A question and the numbers of documents.

    Attributes:
        needed: hold the answer.
        related: stand with them before others do: of the same article, or chosen to distract.
    """

    text: str
    answers: tuple[str, ...]
    needed: tuple[int, ...]
    related: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DocumentTask(RulerTask):
    """Documents in any order, of which some hold the answer.

    Attributes:
        documents: all of the file, each once.
    """

    documents: tuple[str, ...]
    questions: tuple[DocumentQuestion, ...]
    max_new_tokens: int = 32

    @classmethod
    def read(cls, kind: str, path: str) -> "DocumentTask":
        """The questions of a file.

        Args:
            kind: `squad` (version 2, a JSON object) or `hotpotqa` (a JSON list), both as published.

        Raises:
            UserError: the file is missing, or is of another form.
        """
        found = _READERS[kind](_json(path), path)
        numbers = {
            document: i for i, document in enumerate(sorted({each for row in found for each in row[2] + row[3]}))
        }
        questions = [
            DocumentQuestion(
                text=text,
                answers=tuple(answers),
                needed=tuple(numbers[each] for each in dict.fromkeys(needed)),
                related=tuple(numbers[each] for each in dict.fromkeys(related) if each not in needed),
            )
            for text, answers, needed, related in found
        ]
        if not questions:
            raise UserError(f"`{path}` has no question with an answer; check `file`: the published one has some")
        return cls(documents=tuple(numbers), questions=tuple(questions))

    def num_indices(self, count: int) -> int:
        return len(self.questions)

    def cluster(self, index: int) -> int:
        needed = self.questions[index].needed
        return next(i for i, question in enumerate(self.questions) if question.needed == needed)

    def units(self, index: int, length: int) -> tuple[int, int]:
        return len(self.questions[index].needed), len(self.documents)

    def sample(
        self, rng: random.Random, index: int, units: int, length: int, tokenizer: PreTrainedTokenizerBase
    ) -> Sample:
        question = self.questions[index]
        taken = {*question.needed, *question.related}
        others = [i for i in range(len(self.documents)) if i not in taken]
        ranked = [*rng.sample(question.related, len(question.related)), *rng.sample(others, len(others))]
        chosen = [*question.needed, *ranked][:units]
        rng.shuffle(chosen)
        shown = [f"Document {i}:\n{self.documents[number]}" for i, number in enumerate(chosen, 1)]
        return Sample(
            context=f"{_INSTRUCTION}\n\nThe following are given documents.\n\n" + "\n\n".join(shown),
            question=f"\n\n{_INSTRUCTION}\n\nQuestion: {question.text}",
            answer_prefix=" Answer:",
            references=question.answers,
            max_new_tokens=self.max_new_tokens,
        )


_Row = tuple[str, list[str], list[str], list[str]]  # question, answers, documents needed, documents related


def _squad(content: Any) -> Iterator[_Row]:
    for article in content["data"]:
        paragraphs = [paragraph["context"] for paragraph in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                if not question.get("is_impossible", False):
                    answers = [answer["text"] for answer in question["answers"]]
                    yield question["question"], answers, [paragraph["context"]], paragraphs


def _hotpotqa(content: Any) -> Iterator[_Row]:
    for row in content:
        documents = {title: f"{title}\n{''.join(sentences)}" for title, sentences in row["context"]}
        needed = [documents[title] for title, _ in row["supporting_facts"] if title in documents]
        yield row["question"], [row["answer"]], needed, list(documents.values())


def _rows(read: Callable[[Any], Iterator[_Row]]) -> Callable[[Any, str], list[_Row]]:
    """The same with its rows in a list, and an error that names the file where that is of another form."""

    def call(content: Any, path: str) -> list[_Row]:
        try:
            return list(read(content))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"`{path}` is not {read.__name__.strip('_')}'s published JSON ({type(error).__name__}: {error}); download "
                "that file"
            ) from error

    return call


_READERS = {"squad": _rows(_squad), "hotpotqa": _rows(_hotpotqa)}


def _json(path: str) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the questions `{path}`: {error.strerror}; check `file`") from error
    except ValueError as error:
        raise UserError(f"the questions `{path}` are not JSON ({error}); check `file`") from error
