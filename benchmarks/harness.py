"""Timing that survives a noisy machine, and the record of where it was taken."""

import argparse
import json
import platform
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from lowrank_kv.hf.loading import device_of
from lowrank_kv.utils.atomic_write import write_text
from lowrank_kv.utils.paths import name_of


def count(text: str) -> int:
    """The type of a command's argument that says how many."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1; got {text!r}")
    return int(text)


def interleaved_ms(
    candidates: dict[str, Callable[[], Any]], *, repeats: int, warmup: int = 1, mean: bool = False
) -> dict[str, float]:
    """Milliseconds of each candidate, called in turn A B C A B C …, so that drift of the machine hits all alike.

    The median over the repeats, or the `mean` where some calls rightly take longer than others.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for round_number in range(warmup + repeats):
        for name, call in candidates.items():
            _synchronize()
            start = time.perf_counter()
            call()
            _synchronize()
            if round_number >= warmup:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: (statistics.fmean if mean else statistics.median)(values) for name, values in times.items()}


def check_close(name: str, actual: Tensor, expected: Tensor) -> None:
    """What is timed must first be right: logits agree to 1e-3 in fp32, to 2 % of the largest in half precision."""
    largest = float(expected.abs().max())
    tolerance = 1e-3 if expected.dtype == torch.float32 else 0.02 * largest
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0, msg=lambda found: f"{name}: {found}")


def use_device(name: str) -> torch.device:
    """The device of a benchmark, which is waited for and launched on from here on."""
    device = device_of(name)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device


def forget_tuning(device: torch.device) -> None:
    """Let GPU kernels be tuned anew, for what is timed next and not for what was checked before."""
    if device.type == "cuda":
        from lowrank_kv.ops.triton import launch  # only here: a CPU needs no Triton

        launch.forget_tuning()


def environment(device: str) -> dict[str, Any]:
    """Hardware and versions, for the JSON beside every figure."""
    return {
        "device": _processor() if torch.device(device).type == "cpu" else torch.cuda.get_device_name(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def write_results(path: str | Path, name: str, settings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write one benchmark's JSON, whole or not at all. The settings name a `device`; of a path in them only the last part is
    kept."""
    settings = {key: value for key, value in settings.items() if key != "json" and value is not None}
    settings = {key: name_of(value) if isinstance(value, str) else value for key, value in settings.items()}
    values = {"benchmark": name, "settings": settings, "environment": environment(settings["device"]), "rows": rows}
    write_text(path, json.dumps(values, indent=2) + "\n")


def _processor() -> str:
    """The processor's name, where the system says it, and what vector instructions torch uses on it."""
    found = []
    if (listing := Path("/proc/cpuinfo")).exists():
        found = re.findall(r"^model name\s*: (.+)$", listing.read_text(encoding="utf-8"), flags=re.MULTILINE)
    name = found[0] if found else platform.processor() or platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
