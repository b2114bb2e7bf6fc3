"""Cells of a comparison on disk."""

import dataclasses
import json

import pytest

from evaluation.cells import CELLS, Cell, Cells, Measurer, measured_by
from evaluation.scores import WindowScore
from evaluation.tasks.item import ItemScore
from lowrank_kv.utils.errors import UserError

SCORE = WindowScore(loss=3.1, full_loss=3.0, kl=0.1, top1=0.9, scored=10, cache_bytes=1, full_bytes=4)
BY = Measurer(run_id="run", commit="commit", dirty=False, torch="2.13.0", processor="a processor")
LATER = dataclasses.replace(BY, run_id="later", dirty=True)


def written(directory):
    cells = Cells(directory)
    for window in "ab":
        cells.add({"method": "m", "window": window}, Cell(SCORE, BY), "m")
    return cells


def test_what_was_written_is_found_again_by_its_settings_in_any_order(tmp_path):
    written(tmp_path)
    cells = Cells(tmp_path)
    assert len(cells) == 2
    assert cells.get({"window": "a", "method": "m"}) == Cell(SCORE, BY)
    assert cells.get({"window": "c", "method": "m"}) is None
    assert cells.get({"window": "a", "method": "m", "rate": 0.1}) is None


def test_a_line_that_was_cut_short_is_measured_again_and_the_others_stay(tmp_path):
    written(tmp_path)
    path = tmp_path / CELLS
    content = path.read_bytes()
    for cut in (1, 20, len(content) // 2 - 1):
        path.write_bytes(content[:-cut])
        cells = Cells(tmp_path)
        assert len(cells) == 1
        cells.add({"method": "m", "window": "b"}, Cell(dataclasses.replace(SCORE, kl=0.2), LATER), "m")
        assert Cells(tmp_path).get({"method": "m", "window": "b"}).score.kl == 0.2
        assert Cells(tmp_path).get({"method": "m", "window": "a"}).score.kl == 0.1


def test_each_cell_says_what_measured_it(tmp_path):
    """Also one of an earlier version, which knew less."""
    cells = written(tmp_path)
    cells.add({"method": "m", "window": "c"}, Cell(SCORE, LATER), "m")
    path = tmp_path / CELLS
    earlier = {"of": {"method": "m", "window": "d"}, "score": dataclasses.asdict(SCORE), "run_id": "old", "commit": "c"}
    path.write_text(path.read_text() + json.dumps(earlier) + "\n")
    assert measured_by(Cells(tmp_path)) == [
        {**dataclasses.asdict(BY), "cells": 2},
        {**dataclasses.asdict(LATER), "cells": 1},
        {"run_id": "old", "commit": "c", **dict.fromkeys(["dirty", "torch", "processor", "version"]), "cells": 1},
    ]


def test_code_that_was_installed_is_told_by_its_version():
    record = {
        "run_id": "run",
        "code": {"commit": None, "dirty": None, "version": "0.2.0"},
        "environment": {"torch": "2.13.0", "gpu": None, "cpu": "a CPU", "vector": "AVX2"},
    }
    assert Measurer.of_run(record).version == "0.2.0"
    record["code"] = {"commit": "c", "dirty": False, "version": "0.2.0"}
    assert Measurer.of_run(record).version is None, "the commit tells more"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kl": float("nan"), "loss": float("inf")}, r"`m` on window 3: figures are not finite \(loss, kl\)"),
        ({"full_loss": float("nan")}, r"`m` on window 3: the uncompressed model's own figures .*another `dtype`"),
    ],
)
def test_what_is_not_finite_is_said_and_not_written(tmp_path, changed, message):
    cells = written(tmp_path)
    content = (tmp_path / CELLS).read_bytes()
    with pytest.raises(UserError, match=message):
        cells.add({"window": "d"}, Cell(dataclasses.replace(SCORE, **changed), BY), "`m` on window 3")
    assert (tmp_path / CELLS).read_bytes() == content


def test_what_another_command_measured_here_is_not_called_damaged(tmp_path):
    content = written(tmp_path) and (tmp_path / CELLS).read_bytes()
    with pytest.raises(UserError, match=r"what another command measured: line 1 says full_loss, .*another --output"):
        Cells(tmp_path, ItemScore)
    assert (tmp_path / CELLS).read_bytes() == content


@pytest.mark.parametrize("damage", [b"{}", b"no json", b'{"of": {}, "score": {"loss": 1}, "run_id": "", "commit": ""}'])
def test_a_damaged_line_is_named(tmp_path, damage):
    written(tmp_path)
    path = tmp_path / CELLS
    path.write_bytes(damage + b"\n" + path.read_bytes())
    with pytest.raises(UserError, match="line 1 is damaged .* delete that line"):
        Cells(tmp_path)
