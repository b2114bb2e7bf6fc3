"""Progress in a file is a line now and then, with its unit, and without colours."""

import io
import sys
import time

from lowrank_kv.utils.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def states_on(stream, monkeypatch) -> list[str]:
    monkeypatch.setattr(sys, "stderr", stream)
    for _ in progress_bar(range(40), unit="tok", desc="calibrating", file=stream):
        time.sleep(0.01)
    return [state for state in stream.getvalue().split("\r") if state.strip()]


def test_a_file_gets_the_first_state_and_the_last(monkeypatch):
    states = states_on(io.StringIO(), monkeypatch)
    assert len(states) == 2
    assert "40/40" in states[-1]
    assert "tok/s" in states[-1]
    assert "calibrating" in states[-1]
    assert "\x1b[3" not in "".join(states)


def test_a_terminal_sees_it_move(monkeypatch):
    assert len(states_on(Terminal(), monkeypatch)) > 3
