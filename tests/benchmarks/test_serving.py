"""What the benchmark of serving says beside what it times."""

import pytest

from benchmarks import serving
from benchmarks.openai_server import Answer
from lowrank_kv.utils.errors import UserError


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--bases", "b", "--rate", "0.1"], 0.1),
        (["--bases", "b", "--rate", "0.1", "--dtype", "float32"], 0.05),
        (["--bases", "b", "--preset", "static-mixed", "--rate", "0.2", "--dtype", "float32"], 0.1),
        (["--bases", "b", "--preset", "static-mixed"], 0.15),  # the preset's own
        (["--bases", "b", "--preset", "static-joint-pf", "--rate", "0.5"], 0.5),
        (["--bases", "b", "--preset", "static-joint-pf", "--rate", "0.5", "--dtype", "float32"], 0.5),
        (["--checkpoint", "c"], None),
    ],
)
def test_what_equal_bytes_leave_to_expect_is_the_preset_s_to_say(words, expected):
    """A plan's rate counts bytes in 16 bits; the other presets' rate counts coefficients, which have the model's dtype."""
    assert serving._byte_rate(serving._parser().parse_args(words)) == (expected and pytest.approx(expected))


class QuickServer:
    """Answers before anybody looks at it."""

    def complete(self, prompt, **options):
        [answer] = self.complete_all([prompt], **options)
        return answer

    def complete_all(self, prompts, *, max_tokens, **options):
        answer = Answer()
        answer.token_ids = [1] * max_tokens
        return [answer for _ in prompts]

    def metrics(self):
        return {serving.RUNNING: 0.0, serving.PREEMPTED: 0.0}


def test_requests_that_nobody_saw_running_are_no_measurement():
    with pytest.raises(UserError, match="all 2 requests had ended before .*; give more --tokens"):
        serving._crowd(QuickServer(), [[1], [2]], 3)


def test_tokens_that_all_came_at_once_are_no_measurement():
    with pytest.raises(UserError, match="all 3 tokens of an answer came at once, .*; give more --tokens"):
        serving._single(QuickServer(), [1], 3)
