"""What a user gets wrong of lm-evaluation-harness's arguments, and of the model's, is named without a traceback."""

import sys
from pathlib import Path

import pytest

from evaluation.lm_eval_harness import command
from evaluation.lm_eval_harness.model import CompressedLM
from lowrank_kv.utils.errors import UserError

CONFIGS = Path(__file__).parents[2] / "configs/lm_eval"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model lowrank-kv --tasks arc_esy_local,arc_easy_local", "Tasks not found: arc_esy_local; .* ls tasks`"),
        ("--model lowrank-kv --tasks arc_easy_local --gen_kwargs {a", "Invalid JSON: {a"),
        ("--config nothing.yaml", "Config file not found: .*nothing.yaml; .* run --help`"),
        ("--model lowrank --tasks arc_easy_local", "'lowrank', but no model for this name"),
    ],
)
def test_what_the_harness_refuses_of_its_arguments_is_no_traceback(words, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lowrank-kv"])
    monkeypatch.setattr("lm_eval.__main__.setup_logging", lambda: None)
    with pytest.raises(UserError, match=message):
        command.main([*words.split(), "--include_path", str(CONFIGS)])


def test_an_error_of_the_harness_behind_its_arguments_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lowrank-kv"])
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: int("a defect"))
    with pytest.raises(ValueError, match="a defect") as found:
        command.main([])
    assert not isinstance(found.value, UserError)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give `pretrained`, or `model`, `tokenizer` and `make_cache`"),
        ({"pretrained": "x", "batch_size": 8}, "`batch_size` must be 1"),
        (
            {"pretrained": "MODEL", "preset": "static-joint-pf", "rates": 0.5},
            "`bases` must be given: `static-joint-pf`",
        ),
        ({"pretrained": "MODEL", "bases": "x"}, "`bases` must be given with a `preset` or a `peer`: .*; got 'x'"),
        (
            {"model": "x", "tokenizer": "x", "make_cache": "x", "bases": "x"},
            "`bases` is a key beside `pretrained` only",
        ),
        (
            {"pretrained": "x", "preset": "static-joint-pf", "bytes_of": "full"},
            "`bytes_of` must be left out: nothing is scored beside; got 'full'",
        ),
        ({"pretrained": "MODEL", "preset": "magic", "rates": 0.5}, "`preset` must be .*; got 'magic'"),
        ({"pretrained": "MODEL", "peer": "snapkv", "bytes": [0.3, 0.5]}, "`rates` must be one"),
    ],
)
def test_mistakes_are_named(tiny_dir, options, message):
    options = {key: str(tiny_dir) if value == "MODEL" else value for key, value in options.items()}
    with pytest.raises(UserError, match=message):
        CompressedLM(**options)
