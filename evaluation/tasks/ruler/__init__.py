"""RULER's thirteen tasks (arXiv 2404.06654), generated: eleven from nothing, `qa_1` and `qa_2` from local files.

Each sample has as many units of its haystack (sentences, words, documents) as fit: its prompt and its new tokens
take at most `length` tokens. Differences from the published generator, each for a reason:

- The number of units is found for each sample, not for the first one alone, so all are as long as they can be.
- Every shuffle has a seed of its sample. Under one seed for all the right document of `qa_*` stands at the same place.
- The essay is local prose, of which each sample begins at another sentence. Results are those of an own haystack.
- `cwe` adds pairs of an adjective and a noun where all words of its list do not fill the length (from about 200 K tokens
  on). The published generator draws all words from another list there, which it has beside the package of the first.
- `vt` says "assigned" where the published prompt has "assgined".
- `qa_2` keeps the supporting documents of a question and fills up with the others, so it works below 4 K tokens.
"""

import random
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from lowrank_kv.utils.config import require
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.search import last_where

from ..item import GenerationItem
from ..matching import AllContained, AnyContained, Metric
from .documents import DocumentTask
from .needles import NEEDLE_TASKS
from .sample import RulerTask, Sample
from .variables import VariableTracking
from .word_counts import CommonWords, FrequentWords

OFFLINE: dict[str, RulerTask] = {
    **NEEDLE_TASKS,
    "vt": VariableTracking(),
    "cwe": CommonWords(),
    "fwe": FrequentWords(),
}
FROM_FILES = {"qa_1": "squad", "qa_2": "hotpotqa"}
NAMES = (*OFFLINE, *FROM_FILES)
NEED_ESSAY = tuple(name for name, task in NEEDLE_TASKS.items() if task.needs_essay)


def metric_of(name: str) -> Metric:
    """How RULER scores a task."""
    return AnyContained() if name in FROM_FILES else AllContained()


def ruler_task(name: str, *, essay: Sequence[str] = (), file: str | None = None) -> RulerTask:
    """The task of that name.

    Args:
        essay: sentences of prose, for the tasks of :data:`NEED_ESSAY`.
        file: for `qa_1` SQuAD's JSON (version 2), for `qa_2` HotpotQA's.
    """
    if name in FROM_FILES:
        require(file is not None, "file", file, f"given for `{name}`: {FROM_FILES[name]}'s published JSON")
        return DocumentTask.read(FROM_FILES[name], file)
    if name in NEED_ESSAY:
        require(bool(essay), "essay", None, f"given for `{name}`: a file of prose to hide needles in")
        return NEEDLE_TASKS[name].within(essay)
    return OFFLINE[name]


def longest_sample(
    task: RulerTask, tokenizer: PreTrainedTokenizerBase, length: int, seed: str, index: int, *, chat: bool = False
) -> Sample | None:
    """The sample with the most units whose tokens, new ones and a chat template's included, are at most `length`; None where
    none fits."""

    def sample(units: int) -> Sample:
        return task.sample(random.Random(f"{seed}:{index}"), index, units, length, tokenizer)

    def fits(units: int) -> bool:
        return sample(units).num_tokens(tokenizer, chat=chat) <= length

    least, most = task.units(index, length)
    # A tokenizer that merges over the ends of units may leave several ends, and which one is found follows from what is
    # tried. Counted from one more, the same units are tried as for the samples of published runs.
    found = last_where(lambda count: fits(count - 1), least=least + 1, limit=most + 1)
    return None if found is None else sample(found - 1)


def ruler_items(
    name: str,
    task: RulerTask,
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int,
    count: int,
    seed: int,
    chat: bool = False,
) -> list[GenerationItem]:
    """`count` samples as items.

    Raises:
        UserError: `length` is too short for the task, or its file has too few questions that fit.
    """
    items: list[GenerationItem] = []
    for index in range(task.num_indices(count)):
        if len(items) == count:
            break
        sample = longest_sample(task, tokenizer, length, f"{seed}:{name}:{length}", index, chat=chat)
        if sample is None:
            continue
        context, question = sample.pieces(tokenizer, chat=chat)
        items.append(
            GenerationItem(
                cluster=task.cluster(index),
                context=context,
                question=question,
                references=tuple(sample.references),
                max_new_tokens=task.max_new_tokens,
                metric=metric_of(name),
                tokenizer=tokenizer,
            )
        )
    if len(items) < count:
        raise UserError(
            f"`length` {length} leaves room for {len(items)} of the {count} samples of `{name}`; take a larger length or "
            "fewer items"
        )
    return items
