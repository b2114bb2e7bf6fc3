"""Who is timed when: nobody always comes behind another, and finds the processor warm."""

import argparse
import json

from benchmarks import serving
from benchmarks.harness import in_turns, interleaved_ms
from benchmarks.openai_server import Answer


def test_every_other_round_is_backwards():
    assert [in_turns("abc", turn) for turn in range(3)] == [list("abc"), list("cba"), list("abc")]


def test_candidates_are_called_in_turn():
    called = []
    candidates = {name: (lambda name=name: called.append(name)) for name in "abc"}
    found = interleaved_ms(candidates, repeats=3, warmup=1)
    assert list(found) == list("abc")
    assert "".join(called) == "abccbaabccba"


class SpokenServer:
    """Answers at once, and writes down that it was asked."""

    def __init__(self, name, asked):
        self._name, self._asked = name, asked

    def complete(self, prompt, *, max_tokens, **options):
        self._asked.append(self._name)
        answer = Answer()
        answer.token_ids = [0] * max_tokens
        answer.first, answer.last = answer.started + 1, answer.started + 2
        return answer

    def complete_all(self, prompts, **options):
        return [self.complete(prompts[0], **options)]

    def metrics(self):
        return {serving.RUNNING: 1.0, serving.PREEMPTED: 0.0}

    def token_capacity(self):
        return 100


class SomePrompts:
    def take(self, requests, length):
        return [[0] * length] * requests


def test_servers_take_turns_in_who_comes_first(capsys):
    asked, names = [], (serving.BASELINE, serving.SERVED)
    servers = {name: SpokenServer(name, asked) for name in names}
    sizes = {"requests": 1, "prompt": 4, "tokens": 3, "context": 4, "batch": 1, "repeats": 2}
    arguments = argparse.Namespace(**sizes, bases=None, rate=None, dtype="float32")
    rows = serving._measured(servers, SomePrompts(), arguments)
    assert [row["method"] for row in rows] == list(names)
    assert asked == [*names, *names * 3, *names[::-1] * 3]  # to warm up; one, several and many; the same backwards
    assert list(json.loads(capsys.readouterr().out.splitlines()[0])) == list(names)
