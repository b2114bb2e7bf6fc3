"""A tiny model to serve. Without vLLM, which has an environment of its own (`make test-vllm`), few files are collected."""

import importlib.util
from pathlib import Path

import pytest
from methods import dynakv_model, tiny_model
from served_engines import Files

import dynakv
from lowrank_kv_cli.__main__ import dispatch

_WITHOUT_VLLM = ("test_settings.py",)
_OTHERS = sorted(path.name for path in Path(__file__).parent.glob("test_*.py") if path.name not in _WITHOUT_VLLM)
collect_ignore = [] if importlib.util.find_spec("vllm") else _OTHERS


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> Files:
    return Files(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def gated(files, text_file, tmp_path_factory):
    """A checkpoint with gates, measured by the command that the server names."""
    directory = tmp_path_factory.mktemp("gated") / "checkpoint"
    model = tiny_model(head_dim=32, vocab_size=257)
    dynakv_model(model, 0.4, granularity=4)
    dynakv.save_compressor(model, directory)
    words = ["--model", files.directory / "model", "--name", text_file, "--tokens", 2048, "--length", 128]
    dispatch([str(word) for word in ("measure", "--checkpoint", directory, *words)])
    return directory


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
