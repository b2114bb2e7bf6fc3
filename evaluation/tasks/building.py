"""Tasks made of their configuration: every item of each, as tokens."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lowrank_kv.hf.loading import check_length
from lowrank_kv.utils.config import require
from lowrank_kv.utils.provenance import path_input
from lowrank_kv.utils.text_data import load_documents

from . import longbench, ruler
from .boxed import boxed_items
from .choices import CHOICE_TASKS, choice_items
from .item import Item
from .long_decoding import long_items
from .lookup import lookup_items
from .matching import BeginsWith, BoxedInteger
from .registry import BOXED, COUNT, LONG, LOOKUP, NEW_TOKENS, WITH_LENGTH, TaskConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A benchmark that is ready to be answered.

    Attributes:
        label: name in the results.
        query: whether the compression knows the question.
        metric: what its score is called.
        items: all of them.
        inputs: entries of a record for the files it read.
        together: the row of several tasks that it is a part of; None where there is none.
    """

    label: str
    query: str
    metric: str
    items: Sequence[Item]
    inputs: Sequence[dict[str, Any]]
    together: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Order:
    """One task to be made, at one length."""

    config: TaskConfig
    name: str
    length: int | None
    file: str | None
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    directory: Path


def tasks_of(
    configs: Sequence[TaskConfig], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: Path
) -> list[Task]:
    """Every task that is there.

    Args:
        directory: of the output; a text that the model writes is kept there.

    Raises:
        UserError: a file is missing or of another form, two tasks have one label, or prompts do not fit the model.
    """
    found = [task for config in configs for task in _tasks(config, model, tokenizer, directory)]
    labels = [task.label for task in found]
    require(bool(found), "tasks", labels, "at least one that is there")
    twice = sorted({label for label in labels if labels.count(label) > 1})
    require(not twice, "tasks", twice, "each listed once at a length and a `query`")
    for task in found:
        require(task.together not in labels, "together", task.together, "another name than a task's")
        kinds = {(other.metric, other.query) for other in found if task.together == other.together is not None}
        require(len(kinds) < 2, "together", task.together, "of tasks with one metric and one `query`")
        check_length(model, max(len(item.context) + item.num_after for item in task.items), f"tasks.{task.label}")
    return found


def _tasks(
    config: TaskConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: Path
) -> Iterator[Task]:
    for name in config.names:
        file = config.file_of(name)
        if config.optional and file is not None and not Path(file).exists():
            print(f"leaving out `{name}`: {file} is not there")
            continue
        files = {"task": file, "labels": config.labels if name in CHOICE_TASKS else None}
        files["essay"] = config.essay if name in ruler.NEED_ESSAY else None
        build = next(builder for names, builder in _BUILDERS if name in names)
        for length in config.length if name in WITH_LENGTH else [None]:
            order = _Order(
                config=config,
                name=name,
                length=length,
                file=file,
                model=model,
                tokenizer=tokenizer,
                directory=directory,
            )
            metric, items = build(order)
            yield Task(
                label=config.label_of(name, length),
                query=config.query_of(name),
                metric=metric,
                items=items,
                inputs=[path_input(role, path) for role, path in files.items() if path is not None],
                together=config.together_of(length),
            )


def _ruler(order: _Order) -> tuple[str, Sequence[Item]]:
    config = order.config
    essay = _sentences(config.essay) if order.name in ruler.NEED_ESSAY else ()
    task = ruler.ruler_task(order.name, essay=essay, file=order.file)
    items = ruler.ruler_items(
        order.name,
        task if config.max_new_tokens is None else dataclasses.replace(task, max_new_tokens=config.max_new_tokens),
        order.tokenizer,
        length=order.length,
        count=config.items or COUNT,
        seed=config.seed,
        chat=config.chat,
    )
    return ruler.metric_of(order.name).name, items


def _longbench(order: _Order) -> tuple[str, Sequence[Item]]:
    items = longbench.longbench_items(
        order.name,
        order.tokenizer,
        order.file,
        count=order.config.items,
        max_length=order.length,
        max_new_tokens=order.config.max_new_tokens,
        chat=order.config.chat,
    )
    return longbench.DATASETS[order.name].metric, items


def _choices(order: _Order) -> tuple[str, Sequence[Item]]:
    config = order.config
    items = choice_items(
        order.name,
        order.tokenizer,
        order.file,
        labels=config.labels,
        shots=config.shots,
        count=config.items,
        seed=config.seed,
    )
    return CHOICE_TASKS[order.name].metric, items


def _lookup(order: _Order) -> tuple[str, Sequence[Item]]:
    config = order.config
    count = config.items or COUNT
    return BeginsWith.name, lookup_items(
        order.tokenizer, count=count, facts=config.facts, questions=config.questions, seed=config.seed
    )


def _boxed(order: _Order) -> tuple[str, Sequence[Item]]:
    config = order.config
    return BoxedInteger.name, boxed_items(
        order.tokenizer,
        order.file,
        count=config.items,
        max_new_tokens=config.max_new_tokens or NEW_TOKENS,
        chat=config.chat,
    )


def _long(order: _Order) -> tuple[str, Sequence[Item]]:
    config = order.config
    prompts = load_documents(order.file, subset=None, split="train", text_field="text")["text"][: config.items]
    return "equal top-1", long_items(
        order.model,
        order.tokenizer,
        prompts,
        order.directory,
        length=order.length,
        temperature=config.temperature,
        seed=config.seed,
        chat=config.chat,
    )


_BUILDERS: list[tuple[Sequence[str], Callable[[_Order], tuple[str, Sequence[Item]]]]] = [
    (ruler.NAMES, _ruler),
    (longbench.NAMES, _longbench),
    (tuple(CHOICE_TASKS), _choices),
    ((LOOKUP,), _lookup),
    ((BOXED,), _boxed),
    ((LONG,), _long),
]


def _sentences(path: str) -> tuple[str, ...]:
    """Of a file's prose."""
    rows = load_documents(path, subset=None, split="train", text_field="text")
    text = " ".join(" ".join(row.split()) for row in rows["text"])
    return tuple(sentence for sentence in re.split(r"(?<=[.!?])\s+", text) if sentence)
