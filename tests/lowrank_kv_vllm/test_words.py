"""`lowrank-kv serve` gives vLLM its words, and refuses those by which vLLM would read something else."""

import importlib
import json
import sys

import pytest

from lowrank_kv.utils.errors import UserError
from lowrank_kv_cli import serve

pytestmark = pytest.mark.usefixtures("offline")
OWN, SINGLE = "`--additional-config` is what this command sets, and vLLM would read", "this one starts a single server"


@pytest.fixture
def words(files, monkeypatch):
    """Of this command; the server is not started, and `sys.argv` is what it would read."""
    entry = importlib.import_module("vllm.entrypoints.launchers.api_server.entry")
    monkeypatch.setattr(entry, "main", lambda: None)
    monkeypatch.setattr(sys, "argv", ["lowrank-kv serve"])
    return ["--model", str(files.directory / "model"), "--bases", files.settings["bases"], "--rate", "0.3"]


def test_what_is_not_of_this_command_goes_to_vllm(files, words):
    serve.main([*words, "--max-model-len", "99", "--port=8001"])
    model, config = str(files.directory / "model"), {"lowrank_kv": {"bases": files.settings["bases"], "rate": 0.3}}
    own = ["--model", model, "--additional-config", json.dumps(config)]
    assert sys.argv[1:] == [*own, "--max-model-len", "99", "--port=8001"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--additional-config", "{}"], OWN),
        (["--additional_config={}"], OWN),
        (["--additional-conf", '{"x": 1}'], OWN),
        (["--additional-config.other", "1"], OWN),
        (["--headless"], SINGLE),
        (["--headl"], SINGLE),
        (["--api-server-count=2"], SINGLE),
        (["--api-server-count", "0"], SINGLE),
        (["-asc", "2"], SINGLE),
        (["--grpc"], SINGLE),
        (["--data-parallel-multi-port-external-lb"], SINGLE),
        (["true"], "'true' is no option, and the model is given by `--model`"),
    ],
)
def test_nothing_takes_the_place_of_what_vllm_is_told(words, given, message):
    with pytest.raises(UserError, match=message):
        serve.main([*words, *given])


def test_a_file_of_words_cannot_either(words, tmp_path):
    file = tmp_path / "words.yaml"
    file.write_text("port: 8001\nadditional-config.other: 1\n", encoding="utf-8")
    with pytest.raises(UserError, match=OWN):
        serve.main([*words, "--config", str(file)])
