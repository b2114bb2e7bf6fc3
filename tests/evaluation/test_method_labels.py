"""Rows that take the bytes of others, by their labels."""

import pytest

from evaluation.compare import CompareConfig
from evaluation.methods import MethodConfig, available_methods, methods_of
from evaluation.peers.peer import TextLength
from lowrank_kv.utils.config import build
from lowrank_kv.utils.errors import UserError


def test_bytes_that_are_taken_are_not_passed_on():
    """Refused as the configuration is read: the model is not there."""
    methods = [
        {"peer": "streaming-llm", "bytes": [0.5]},
        {"peer": "keydiff", "label": "a", "bytes_of": "streaming-llm at 0.5"},
        {"peer": "snapkv", "bytes_of": "a at the bytes of streaming-llm at 0.5"},
    ]
    values = {"model": "nowhere", "texts": [{"label": "t", "name": "t.txt"}], "methods": methods}
    message = "`bytes_of` must be a row whose bytes are its own; got 'a at the bytes of streaming-llm at 0.5', .*: give"
    with pytest.raises(UserError, match=f"{message} 'streaming-llm at 0.5'"):
        build(CompareConfig, values)
    methods[2]["bytes_of"] = "streaming-llm at 0.5"
    build(CompareConfig, values)
    methods[2]["bytes_of"] = "streaming-llm at 0.4"
    with pytest.raises(
        UserError, match="`bytes_of` must be a method's label; got 'streaming-llm at 0.4'; did you mean"
    ):
        build(CompareConfig, values)


def test_who_takes_the_bytes_of_a_missing_checkpoint_is_left_out_too(capsys):
    missing = MethodConfig(checkpoint="/nowhere", label="learned", optional=True)
    alone = MethodConfig(preset="static-joint-pf", bytes_of="learned")
    beside = MethodConfig(preset="ojakv-joint", bytes=[0.5], bytes_of="learned")
    for order in ([missing, alone, beside], [beside, alone, missing]):
        [kept] = available_methods(order)
        assert (kept.name, kept.bytes, kept.bytes_of) == ("ojakv-joint", [0.5], None)
        assert "leaving out `static-joint-pf`: it takes the bytes of `learned`" in capsys.readouterr().out
    message = "none of the checkpoints is there: /nowhere; train one of them, or give others"
    with pytest.raises(UserError, match=message):
        available_methods([missing, alone])


@pytest.mark.parametrize("kind", [{"peer": "snapkv"}, {"preset": "static-joint-pf"}], ids=["peer", "preset"])
def test_who_takes_more_than_an_uncompressed_cache_takes_all_of_it(kind, model, calibration):
    """Such as the bytes of open gates, which keep everything and say so for each token."""
    *_, method = methods_of(
        [MethodConfig(**kind, bytes_of="open")], model, calibration, TextLength(prompt=40, tokens=60)
    )
    assert type(method.maker(1.2)()) is type(method.maker(1.0)())
