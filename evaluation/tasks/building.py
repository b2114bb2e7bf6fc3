"""Tasks made of their configuration: every item of each, as tokens."""

import dataclasses
import re
from collections.abc import Iterator, Sequence
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
from .long_decoding import long_items, position_edges
from .lookup import lookup_items
from .registry import BOXED, COUNT, LOOKUP, NEW_TOKENS, WITH_LENGTH, TaskConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A benchmark that is ready to be answered.

    Attributes:
        label: name in the results.
        query: whether the compression knows the question.
        items: all of them.
        inputs: entries of a record for the files it read.
        together: the row of several tasks that it is a part of; None where there is none.
    """

    label: str
    query: str
    items: Sequence[Item]
    inputs: Sequence[dict[str, Any]]
    together: str | None = None

    @property
    def metric(self) -> str:
        """What its score is called."""
        return self.items[0].metric_name


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
        for length in config.length if name in WITH_LENGTH else [None]:
            yield Task(
                label=config.label_of(name, length),
                query=config.query_of(name),
                items=_items(config, name, length, model, tokenizer, directory),
                inputs=[path_input(role, path) for role, path in files.items() if path is not None],
                together=config.together_of(length),
            )


def _items(
    config: TaskConfig,
    name: str,
    length: int | None,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
) -> Sequence[Item]:
    """The items of one task, at one length."""
    file, count, seed, chat = config.file_of(name), config.items, config.seed, config.chat
    if name in ruler.NAMES:
        task = ruler.ruler_task(name, essay=_sentences(config.essay) if name in ruler.NEED_ESSAY else (), file=file)
        if config.max_new_tokens is not None:
            task = dataclasses.replace(task, max_new_tokens=config.max_new_tokens)
        return ruler.ruler_items(name, task, tokenizer, length=length, count=count or COUNT, seed=seed, chat=chat)
    if name in longbench.NAMES:
        new_tokens = config.max_new_tokens
        return longbench.longbench_items(
            name, tokenizer, file, count=count, max_length=length, max_new_tokens=new_tokens, chat=chat
        )
    if name in CHOICE_TASKS:
        return choice_items(name, tokenizer, file, labels=config.labels, shots=config.shots, count=count, seed=seed)
    if name == LOOKUP:
        return lookup_items(tokenizer, count=count or COUNT, facts=config.facts, questions=config.questions, seed=seed)
    if name == BOXED:
        return boxed_items(tokenizer, file, count=count, max_new_tokens=config.max_new_tokens or NEW_TOKENS, chat=chat)
    prompts = load_documents(file, subset=None, split="train", text_field="text")["text"]
    most = f"at most {len(prompts)}, the rows of `{file}`"
    require(count is None or count <= len(prompts), "items", count, most)
    return long_items(
        model,
        tokenizer,
        prompts[:count],
        directory,
        length=length,
        temperature=config.temperature,
        seed=seed,
        chat=chat,
        edges=position_edges(length) if config.edges is None else (*config.edges, length),
    )


def _sentences(path: str) -> tuple[str, ...]:
    """Of a file's prose."""
    rows = load_documents(path, subset=None, split="train", text_field="text")
    text = " ".join(" ".join(row.split()) for row in rows["text"])
    return tuple(sentence for sentence in re.split(r"(?<=[.!?])\s+", text) if sentence)
