"""The benchmark of serving and the soak, as they are called, on a tiny model."""

import json

import pytest
import torch

from benchmarks import serving, soak
from lowrank_kv.utils import run_record


@pytest.fixture
def words(files, text_file, tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text(text_file.read_text() * 4)
    shared = {"model": files.directory / "model", "bases": files.directory / "bases", "rate": 0.3, "text": path}
    return [str(word) for key, value in shared.items() for word in (f"--{key}", value)]


def record(directory):
    [path] = directory.glob("speed/*.json")
    return run_record.load(path)


def test_servers_in_turn_in_the_same_memory(words, tmp_path, capsys):
    sizes = ["--requests", 6, "--prompt", 60, "--tokens", 150, "--context", 100, "--batch", 2, "--repeats", 1]
    # vLLM's pages of fp8 need AVX-512 on a CPU.
    further = ["--stock-cache-dtypes", "fp8"] if torch.cpu._is_avx512_supported() else []
    serving.main([*words, "--memory", "1", *map(str, sizes), *further, "--results", str(tmp_path)])
    found = record(tmp_path)
    stock, *fp8, compressed = found["rows"]
    assert [row["method"] for row in found["rows"]] == ["stock", *["stock fp8"] * bool(further), "compressed"]
    for row in fp8:
        assert row["token_capacity"] == pytest.approx(2 * stock["token_capacity"], rel=0.1)
        for key in ("token_capacity", "crowd_tokens_per_second", "single_seconds_to_first"):
            assert row[f"{key}_to_stock"] == pytest.approx(row[key] / stock[key])
            assert compressed[f"{key}_to_stock_fp8"] == pytest.approx(compressed[key] / row[key])
            assert row[f"{key}_to_stock_fp8"] == 1
    assert found["n"] == {"tokens": 150, "repeats": 1, "batch": 2, "context": 100}
    assert stock["crowd_tokens_per_second_to_stock"] == 1
    for key in (
        "crowd_tokens_per_second",
        "single_tokens_per_second",
        "single_seconds_to_first",
        "batch_seconds_to_all_first",
    ):
        assert compressed[f"{key}_to_stock"] == pytest.approx(compressed[key] / stock[key])
    assert stock["token_capacity"] < compressed["token_capacity"]
    assert all(1 <= row["peak_requests"] <= 6 for row in (stock, compressed))
    assert compressed["byte_rate"] == pytest.approx(0.3)
    printed = capsys.readouterr().out
    assert "compressed  many: " in printed
    assert json.loads(printed.splitlines()[0])["stock"]["single_tokens_per_second"] > 0


def test_a_short_soak(words, tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "LENGTHS", (5, 220))
    monkeypatch.setattr(soak, "GROWTH", 2.0)  # a server that has just started is not as large yet
    monkeypatch.setattr(soak, "TOLD", 0.0)  # a random model has no opinion that other texts could contradict
    sizes = ["--minutes", 0.2, "--clients", 4, "--prompts", 6, "--tokens", 24, "--memory", 1, "--abort-share", 0.3]
    soak.main([*words, *map(str, sizes), "--results", str(tmp_path)])
    [row] = record(tmp_path)["rows"]
    assert row["answered"] > 3
    assert row["aborted"] > 0
    assert row["wrong"] == row["short"] == row["left"] == 0
    assert row["prefix_hit_share"] > 0
    assert row["reference_share"] > 0.5
    for name in ("gap", "drift"):
        assert row[f"median_{name}_limit"] <= row[f"largest_{name}_limit"]
        assert row[f"largest_{name}"] <= row[f"largest_{name}_limit"]
        assert row[f"largest_{name}_of_limit"] <= 1
    assert row["largest_drift"] > 0
    assert row["foreign_told"] == 1
