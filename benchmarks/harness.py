"""Timing that survives a noisy machine, and the record of where it was taken."""

import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from lowrank.atomic import write_text


def interleaved_ms(candidates: dict[str, Callable[[], Any]], *, repeats: int, warmup: int = 1) -> dict[str, float]:
    """Median milliseconds of each candidate, called in turn A B C A B C …, so that drift of the machine hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for round_number in range(warmup + repeats):
        for name, call in candidates.items():
            _synchronise()
            start = time.perf_counter()
            call()
            _synchronise()
            if round_number >= warmup:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def environment() -> dict[str, Any]:
    """Hardware and versions, for the JSON beside every figure."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def write_results(path: str | Path, name: str, settings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write one benchmark's JSON, whole or not at all."""
    values = {"benchmark": name, "settings": settings, "environment": environment(), "rows": rows}
    write_text(path, json.dumps(values, indent=2) + "\n")


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
