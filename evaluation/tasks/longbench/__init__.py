"""LongBench's 21 data sets (arXiv 2308.14508, version 1), from local files of the published form, with its own prompts.

A line of `<name>.jsonl` has `context`, `input`, `answers` and `all_classes`. Prompts and new tokens are those that
LongBench's configuration gives; of a prompt that is too long the middle is left out. Where the question comes after
the compressed prompt, what a template has behind `{context}` is the question.
"""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from lowrank_kv.utils.config import require

from ..item import GenerationItem, prompt_pieces
from ..jsonl import first_rows
from .datasets import DATASETS
from .metrics import CLASSES, LongBenchMetric, is_reference

NAMES = tuple(DATASETS)


def longbench_items(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    path: str,
    *,
    count: int | None,
    max_length: int,
    max_new_tokens: int | None = None,
    chat: bool = False,
) -> list[GenerationItem]:
    """The first `count` rows of a data set; None takes all.

    Args:
        max_length: tokens of a prompt and its answer, beyond which the prompt's middle is left out.
        max_new_tokens: of an answer; None for the benchmark's own.
        chat: whether prompts are a user's turn, but those of data sets that LongBench never puts into one.

    Raises:
        UserError: `max_length` leaves no room for the benchmark's own words and the answer, or the file has fewer rows or
            others than the benchmark's.
    """
    dataset = DATASETS[name]
    before, _, after = dataset.prompt.partition("{context}")
    new_tokens, items = max_new_tokens or dataset.max_new_tokens, []
    own = sum(map(len, prompt_pieces(tokenizer, before, after.replace("{input}", ""), chat=chat and dataset.chat)))
    room = f"above {own + new_tokens}, the {own} tokens of `{name}`'s own words and {new_tokens} of an answer"
    require(max_length > own + new_tokens, "length", max_length, room)
    clusters: dict[str, int] = {}  # several rows ask about one text
    for row in first_rows(path, count):
        # Texts are put in one after another: a context may hold braces of its own.
        question = after.replace("{input}", row.text("input"))
        text, references = row.text("context"), row.texts("answers")
        if not all(map(is_reference(dataset.metric), references)):
            raise row.error(f"has the answers {references!r}, which do not all name a paragraph")
        # Only where they are asked for: the rows of other data sets have none.
        classes = row.texts("all_classes") if dataset.metric == CLASSES else []
        context, question = prompt_pieces(tokenizer, before + text, question, chat=chat and dataset.chat)
        context, question = without_middle(context, question, max_length - new_tokens)
        items.append(
            GenerationItem(
                cluster=clusters.setdefault(text, row.number),
                context=context,
                question=question,
                references=tuple(references),
                max_new_tokens=new_tokens,
                metric=LongBenchMetric(dataset.metric, dataset.first_line, tuple(classes)),
                tokenizer=tokenizer,
            )
        )
    return items


def without_middle(
    context: Sequence[int], question: Sequence[int], length: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first and the last half of `length` tokens of a prompt that has more; what is left of context and of
    question."""
    excess = len(context) + len(question) - length
    if excess <= 0:
        return tuple(context), tuple(question)
    prompt = (*context, *question)
    head, tail = prompt[: length - length // 2], prompt[len(prompt) - length // 2 :]
    kept = head + tail
    of_question = min(len(question), len(tail)) + max(0, len(head) - len(context))
    return kept[: len(kept) - of_question], kept[len(kept) - of_question :]
