"""Rows of local files for the tasks of this folder; `!function` of lm-evaluation-harness finds it here."""

from typing import Any

import datasets

from lowrank_kv_cli.evaluation.tasks.choices import read_choices


def choices(name: str, rows: str, labels: str | None = None, **metadata: Any) -> datasets.DatasetDict:
    """The questions of a file of the published form.

    Args:
        name: of the task, as `lowrank-kv tasks` calls it.
        rows: JSON lines.
        labels: a file with an answer on each line, where rows have none.
        metadata: of the harness, which has nothing to say here.
    """
    found = [
        {
            "questions": each.questions,
            "question": each.questions[each.right],
            # The harness puts a space in front of a continuation.
            "choices": [text.removeprefix(" ") for text in each.continuations],
            "right": each.right,
        }
        for each in read_choices(name, rows, labels)
    ]
    return datasets.DatasetDict({"test": datasets.Dataset.from_list(found)})
