"""Every method on every item of every task, each answered through a fresh cache; a second start measures what is
missing."""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from lowrank_kv.hf.loading import load_tokenizer
from lowrank_kv.utils import run_record
from lowrank_kv.utils.config import configuration, option, require, to_dict
from lowrank_kv.utils.paths import name_of
from lowrank_kv.utils.progress import progress_bar
from lowrank_kv.utils.provenance import model_input, path_input, weights_input
from ojakv import Calibration

from ..cells import Cell, Cells, Measurer, measured_by
from ..methods import FULL, Method, MethodConfig, available_methods, methods_of
from ..output import MakeRecord
from ..peers.peer import TextLength
from ..run_setup import MeasuredText, MethodsConfig, calibration_of, cells_in, setting_of
from ..wide_products import load_measured
from ..window_cells import at_budget, rounds
from .building import Task, tasks_of
from .item import AWARE, Item, ItemScore
from .prompts import FreshReader, Prompts
from .registry import TaskConfig
from .rows import pooled, row_of

_ITEMS_PER_READING = 25  # items that are asked behind one reading of their context
_ROUNDED = 64  # tokens, so that tasks of about the same length share the plans of a budget


@configuration
class TasksConfig(MethodsConfig):
    """Methods, and tasks that each of them answers."""

    tasks: list[TaskConfig] = option(help="what to answer")

    def __post_init__(self):
        super().__post_init__()
        require(bool(self.tasks), "tasks", self.tasks, "at least one")


class _Progress:
    """What a run has measured so far."""

    def __init__(self, record: dict[str, Any], tasks: Sequence[Task]):
        self._record, self._tasks = record, {task.label: task for task in tasks}
        self._found: dict[tuple[str, str], dict[int, Cell]] = {}

    def add(self, task: str, method: str, index: int, cell: Cell) -> None:
        """One item's cell; `index` is the item's number in its task."""
        self._found.setdefault((task, method), {})[index] = cell

    def scores(self, task: str, method: str) -> dict[int, ItemScore]:
        """By the number of the item; none where the method has answered nothing yet."""
        return {index: cell.score for index, cell in sorted(self._found.get((task, method), {}).items())}

    def record(self) -> dict[str, Any]:
        """The run's record with a row for each task and method, beside the uncompressed cache on the same items."""
        rows, scores = [], []
        for label, method in self._found:
            found, full = self.scores(label, method), self.scores(label, FULL)
            rows.append(row_of(method, self._tasks[label], found, full))
            scores.append({"method": method, "dataset": label, "scores": [each.score for each in found.values()]})
        rows += self._rows_together()
        by = measured_by(cell for each in self._found.values() for cell in each.values())
        answered = [len(items) for (_, method), items in self._found.items() if method == FULL]
        n = {"tasks": len(answered), "items": sum(answered)}
        return self._record | {"n": n, "rows": rows, "summary": {"measured_by": by, "items": scores}}

    def _rows_together(self) -> Iterator[dict[str, Any]]:
        """A row for each method and each group of tasks, from the items that were answered."""
        groups: dict[str, list[Task]] = {}
        for task in self._tasks.values():
            if task.together is not None:
                groups.setdefault(task.together, []).append(task)
        methods = dict.fromkeys(method for _, method in self._found)
        for label, tasks in groups.items():
            whole = pooled(label, tasks)
            found = {method: self._scores_of(tasks, method) for method in methods}
            for method, scores in found.items():
                if scores:
                    yield row_of(method, whole, scores, found[FULL]) | {"tasks": len(tasks)}

    def _scores_of(self, tasks: Sequence[Task], method: str) -> dict[int, ItemScore]:
        """Of several tasks, by the number of the item among those of all, one task after another."""
        found, first = {}, 0
        for task in tasks:
            found |= {first + number: score for number, score in self.scores(task.label, method).items()}
            first += len(task.items)
        return found


class _Part(NamedTuple):
    """Items of one task that share a context; a single one where its question is part of the prompt."""

    task: Task
    methods: Sequence[Method]
    numbers: Sequence[int]


class _Wanted(NamedTuple):
    """The cell of one item."""

    number: int
    item: Item
    of: dict[str, Any]


class _Asked(NamedTuple):
    """What one method is asked in a part: at which share of the bytes, and the cells of all items and of those that
    nobody has measured."""

    method: Method
    share: float | None
    wanted: list[_Wanted]
    missing: list[_Wanted]


def run_tasks(config: TasksConfig, output: Path) -> Iterator[MakeRecord]:
    """Yield, after each step, what makes the record of all that is measured so far. The items of all tasks take turns, so
    that a run that is stopped has some of every task.

    Args:
        config: what to measure.
        output: holds the cells of this and earlier runs.
    """
    config = dataclasses.replace(config, methods=available_methods(config.methods))
    name = config.model_name
    tokenizer, bases = load_tokenizer(name), config.load_bases()
    model = load_measured(name, dtype=config.dtype, device=config.device)
    tasks = tasks_of(config.tasks, model, tokenizer, output)
    calibration, inputs = calibration_of(
        model,
        tokenizer,
        config,
        bases,
        read_gradients=config.needs_read_gradients,
        measured=[MeasuredText(file) for each in config.tasks for file in sorted(each.files)],
        needed=config.needs_calibration,
    )
    inputs += [path_input("checkpoint", directory) for directory in config.checkpoints]
    inputs += [model_input(model), weights_input(model)]
    inputs += {each["sha256"]: each for task in tasks for each in task.inputs}.values()
    counts = {task.label: config.share_of(len(task.items)) for task in tasks}
    record = run_record.new_record(
        "quality",
        config=to_dict(config) | {"model": name_of(name)},
        inputs=inputs,
        n={"tasks": len(tasks), "items": sum(counts.values())},
        device=str(model.device),
    )
    setting = setting_of(record, config.dtype) | {"step": config.step}
    methods = _Methods(config.methods, model, calibration)
    parts = list(_parts(tasks, counts, methods))
    cells, progress = cells_in(output, record, ItemScore), _Progress(record, tasks)
    left = sum(_effort(part, method) for part in parts for method in part.methods)
    form = "{l_bar}{bar}| {elapsed}, {remaining} left{postfix}"
    with progress_bar(total=left, unit="token", desc="answering", bar_format=form) as bar:
        for part in parts:
            digests = {number: _digest(part.task.items[number]) for number in part.numbers}
            asked = [_asked(part, method, setting, digests, methods, progress, cells) for method in part.methods]
            makers = {each.method.label: each.method.maker(each.share) for each in asked if each.missing}
            exact = {method.label for method in part.methods if method.reads_exactly}
            prompts = Prompts(model, makers, exact=exact, step=config.step)
            for each in asked:
                label, effort = each.method.label, _effort(part, each.method)
                bar.set_postfix_str(f"{part.task.label}, {label}", refresh=False)
                scores = _answers(part.task, each.missing, prompts.of(label))
                for wanted, score in zip(each.missing, scores, strict=True):
                    what = f"`{label}` on item {wanted.number} of `{part.task.label}`"
                    cells.add(wanted.of, Cell(score, Measurer.of_run(record)), what)
                for wanted in each.wanted:
                    progress.add(part.task.label, label, wanted.number, cells.get(wanted.of))
                if each.missing:
                    bar.update(effort)
                else:  # what was there takes no time, and must not count as if it did
                    bar.total -= effort
                yield progress.record


def _asked(
    part: _Part,
    method: Method,
    setting: Mapping[str, Any],
    digests: Mapping[int, str],
    methods: "_Methods",
    progress: _Progress,
    cells: Cells,
) -> _Asked:
    """What a method is asked; `digests` are those of the part's items by their numbers, the same for all methods."""
    task = part.task
    share, of = at_budget(method, lambda other: list(progress.scores(task.label, other).values()))
    of = {**setting, **of, "task": task.label, "query": task.query}
    if "bytes" in of:
        of |= {"text": methods.text_of(task)}
    wanted = [_Wanted(number, task.items[number], of | {"item": digest}) for number, digest in digests.items()]
    return _Asked(method, share, wanted, [each for each in wanted if cells.get(each.of) is None])


class _Methods:
    """The methods as each task needs them: to meet a budget in bytes they must know how long its texts are. All others are
    made once, for a plan takes seconds to make, and much memory."""

    def __init__(self, configs: list[MethodConfig], model: PreTrainedModel, calibration: Calibration | None):
        self._model, self._calibration = model, calibration
        self._labels = [FULL, *(label for config in configs for label in config.labels)]
        of_any = [config.without_bytes() for config in configs if config.rates or not config.depends_on_text]
        self._of_any_text = methods_of(of_any, model, calibration)
        self._of_texts = [dataclasses.replace(config, rates=[]) for config in configs if config.depends_on_text]
        self._made: dict[TextLength, list[Method]] = {}

    def of(self, task: Task) -> list[Method]:
        """In the order of the configuration, the uncompressed cache first."""
        text = self.text_of(task)
        if text not in self._made:
            own = methods_of(self._of_texts, self._model, self._calibration, text)
            by_label = {method.label: method for method in [*own, *self._of_any_text]}
            self._made[text] = [by_label[label] for label in self._labels]
        return self._made[text]

    def text_of(self, task: Task) -> TextLength:
        """A mean item; all items count, whatever the run's fraction. What the compression knows is read as a prompt."""
        context, asked, answered = (
            sum(each) / len(task.items)
            for each in zip(
                *((len(item.context), item.num_asked, item.num_answered) for item in task.items), strict=True
            )
        )
        known, others = (context + asked, answered) if task.query == AWARE else (context, asked + answered)
        return TextLength(prompt := _rounded(known), prompt + _rounded(others))


def _rounded(tokens: float) -> int:
    return max(1, round(tokens) if tokens < _ROUNDED else _ROUNDED * round(tokens / _ROUNDED))


def _parts(tasks: Sequence[Task], counts: Mapping[str, int], methods: _Methods) -> Iterator[_Part]:
    """First the methods of known budgets on all tasks, by turns, then those that take the bytes of one of them."""
    groups = {task.label: list(_groups(task, counts[task.label])) for task in tasks}
    of_task = {task.label: rounds(methods.of(task)) for task in tasks}
    for turn in range(max(map(len, of_task.values()))):
        for numbers in itertools.zip_longest(*groups.values()):
            for task, each in zip(tasks, numbers, strict=True):
                if each is not None:
                    yield _Part(task, of_task[task.label][turn], each)


def _groups(task: Task, count: int) -> Iterator[list[int]]:
    """Numbers of the items of each part: of equal context, next to one another, at most :data:`_ITEMS_PER_READING`."""
    if task.query == AWARE:
        yield from ([number] for number in range(count))
        return
    numbered = list(enumerate(task.items[:count]))
    for _, each in itertools.groupby(numbered, key=lambda pair: pair[1].context):
        numbers = [number for number, _ in each]
        yield from (numbers[i : i + _ITEMS_PER_READING] for i in range(0, len(numbers), _ITEMS_PER_READING))


def _digest(item: Item) -> str:
    return hashlib.sha256(json.dumps(item.content()).encode("utf-8")).hexdigest()


def _answers(task: Task, wanted: Sequence[_Wanted], fresh: FreshReader) -> Iterator[ItemScore]:
    """The score of each item, in order."""
    if task.query == AWARE:
        yield from (each.item.answer_within(fresh) for each in wanted)
    elif wanted:
        context = fresh(wanted[0].item.context)
        yield from (each.item.answer_after(context) for each in wanted)


def _effort(part: _Part, method: Method) -> float:
    """How long a part takes, roughly, as tokens of a prompt."""
    items = [part.task.items[number] for number in part.numbers]
    readers = sum(each.reads_exactly for each in part.methods) if method.reads_exactly else 1
    return len(items[0].context) / readers + sum(item.effort for item in items)
