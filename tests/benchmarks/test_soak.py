"""A soak does not pass where its clients saw less than it claims."""

import types

import pytest

from benchmarks import soak
from benchmarks.openai_server import Answer
from benchmarks.right_texts import Distance, Expected, Reading, Text
from lowrank_kv.utils.errors import UserError

TOKENS = (3, 1, 4, 1, 5)
EXPECTED = [Expected([7, 8], [Reading(None, Text(TOKENS, (0.0,) * len(TOKENS)))], Distance(0, 0))]
PASSES = {
    **{"answered": 9, "failed": 0, "wrong": 0, "short": 0, "left": 0, "minutes": 60.0, "memory_growth": 1.0},
    **{f"{kind}_told": 1.0 for kind in ("foreign", "swapped", "wrong_page")},
}


class SpokenServer:
    """Answers without a model.

    Args:
        refuses: it answers one of so many requests.
        spoken: tokens of each answer; as many as are asked for where it is None.
        status: of its process, where that has ended.
    """

    def __init__(self, *, refuses: int = 1, spoken: int | None = None, status: int | None = None):
        self.refuses, self.spoken, self.asked = refuses, spoken, 0
        self.process = types.SimpleNamespace(returncode=status, poll=lambda: status)

    def complete(self, prompt, *, max_tokens, until=None, **options):
        self.asked += 1
        if (self.asked - 1) % self.refuses:
            raise UserError(f"the server answers 500: request {self.asked}")
        answer = Answer()
        answer.token_ids = list(TOKENS[: max_tokens if self.spoken is None else self.spoken])
        answer.logprobs = [0.0] * len(answer.token_ids)
        return answer

    def resident_bytes(self):
        return 1000

    def metrics(self):
        zero = ("num_requests_running", "num_requests_waiting", "num_preemptions_total")
        return {f"vllm:{name}": 0.0 for name in (*zero, "prefix_cache_hits_total", "prefix_cache_queries_total")}

    def tail(self):
        return "out of memory"


def arguments(**changed):
    return types.SimpleNamespace(**{"minutes": 0.1, "clients": 1, "seed": 0, "abort_share": 0.0, **changed})


@pytest.fixture
def soaked(monkeypatch):
    """What is counted, by a clock on which only requests take time, a second each: a client makes six in 0.1 minutes."""

    def call(server, **changed):
        monkeypatch.setattr(soak, "time", types.SimpleNamespace(monotonic=lambda: float(server.asked)))
        return soak._soaked(server, EXPECTED, arguments(**changed))[0]

    return call


def test_requests_that_fail_are_counted_and_their_clients_go_on(soaked):
    row = soaked(SpokenServer(refuses=3))
    assert (row["failed"], row["answered"]) == (4, 2)
    assert row["first_failure"] == "the server answers 500: request 2"
    assert soak.faults({**PASSES, **row}, 0.1) == ["failed is 4"]


def test_a_run_without_faults(soaked):
    row = soaked(SpokenServer())
    assert (row["failed"], row["answered"]) == (0, 6)
    assert row["first_failure"] is None
    assert row["minutes"] == pytest.approx(0.1)
    assert soak.faults({**PASSES, **row}, 0.1) == []


@pytest.mark.parametrize("abort_share", [0.0, 1.0])
def test_an_answer_that_ends_before_its_client_has_enough_is_short(soaked, abort_share):
    row = soaked(SpokenServer(spoken=0), abort_share=abort_share)
    assert row["short"] == row["aborted" if abort_share else "answered"] == 6


def test_a_server_that_ends_ends_the_soak(soaked):
    with pytest.raises(UserError, match="the server ended with status -9: out of memory"):
        soaked(SpokenServer(status=-9), minutes=10)


def test_a_client_s_defect_ends_the_soak(soaked):
    server = SpokenServer()
    answers = server.complete

    def complete(prompt, **options):
        if server.asked == 1:  # that of the first client, behind the soak's own
            server.asked += 1
            raise TypeError("a defect")
        return answers(prompt, **options)

    server.complete = complete
    with pytest.raises(TypeError, match="a defect"):
        soaked(server, minutes=10, clients=2)
    assert server.asked < 600, "the other client does not ask to its end"


def test_clients_that_are_ended_stop():
    clients = soak.Clients(SpokenServer(), EXPECTED, arguments())
    clients.end()
    clients.run(0, float("inf"))
    assert not clients.counts


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"failed": 1}, "failed is 1"),
        ({"wrong": 2}, "wrong is 2"),
        ({"short": 1}, "short is 1"),
        ({"left": 1.0}, "left is 1.0"),
        ({"answered": 0}, "nobody was answered"),
        ({"minutes": 50.0}, "clients asked for 50.00 of 60 minutes"),
        ({"memory_growth": 1.2}, "memory is 1.200 times that of the first quarter"),
        ({"swapped_told": 0.5}, "swapped_told is 0.5"),
    ],
)
def test_what_does_not_pass_is_named(changed, reason):
    assert soak.faults(PASSES, 60) == []
    assert soak.faults({**PASSES, **changed}, 60) == [reason]


def test_wrong_pages_are_reported_only():
    assert soak.faults({**PASSES, "wrong_page_told": 0.0}, 60) == []


@pytest.mark.parametrize(("preset", "has_margin"), [("tokenwise-mixed", True), ("static-mixed", False)])
def test_pages_have_a_margin_where_they_can_be_full(preset, has_margin):
    arguments = soak._parser().parse_args(["--bases", "b", "--preset", preset])
    arguments.prefill = soak.PREFILL
    assert ("--page-margin" in soak._words(arguments)) == has_margin
