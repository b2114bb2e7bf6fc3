"""Timing that survives a noisy machine, and the run record of a benchmark."""

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lowrank_kv.hf.loading import device_of
from lowrank_kv.utils import run_record
from lowrank_kv.utils.provenance import file_inputs, model_input, path_input

COUNTS = ("tokens", "repeats", "sequences", "batch", "context", "layers", "length")  # settings that say how many


def count(text: str) -> int:
    """The type of a command's argument that says how many."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1; got {text!r}")
    return int(text)


def in_turns(names: Iterable[str], turn: int) -> list[str]:
    """The order of a round, backwards in every other one: whoever comes behind another finds the processor warm."""
    names = list(names)
    return names[::-1] if turn % 2 else names


def interleaved_ms(
    candidates: dict[str, Callable[[], Any]], *, repeats: int, warmup: int = 1, mean: bool = False
) -> dict[str, float]:
    """Milliseconds of each candidate, called in turn A B C C B A …, so that drift of the machine hits all alike.

    The median over the repeats, or the `mean` where some calls rightly take longer than others.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for round_number in range(warmup + repeats):
        for name in in_turns(candidates, round_number):
            _synchronize()
            start = time.perf_counter()
            candidates[name]()
            _synchronize()
            if round_number >= warmup:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: (statistics.fmean if mean else statistics.median)(values) for name, values in times.items()}


def check_close(
    name: str,
    actual: Tensor,
    expected: Tensor,
    exact: Callable[[], Tensor] | None = None,
    *,
    stored_in_half: bool = False,
) -> None:
    """What is timed must first be right: logits agree to 1e-3 in fp32, to 2 % of the largest in half precision.

    Where a cache of an fp32 model is `stored_in_half`, its 16 bits a number count as half precision. A lossy compressor
    multiplies what half precision rounds, so that two right results may differ by more. Then `exact`
    gives the logits in fp32, and `actual` may be up to 1.5 times as far from those as `expected` is, and a tenth of the
    largest at most.
    """
    is_half = stored_in_half or expected.dtype != torch.float32
    largest = float(expected.abs().max())
    tolerance = 0.02 * largest if is_half else 1e-3
    if is_half and exact is not None and float((actual - expected).abs().max()) > tolerance:
        in_fp32 = exact()
        tolerance = min(0.1 * largest, 1.5 * float((expected - in_fp32).abs().max()))
        actual, expected = actual.float(), in_fp32
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


def write_results(
    root: str | Path,
    name: str,
    settings: dict[str, Any],
    rows: list[dict[str, Any]],
    *,
    model: PreTrainedModel | None = None,
) -> None:
    """Write the run record of a benchmark under `root`, as ``memory`` or else as ``speed``, and print where it lies.

    Args:
        root: directory of all records.
        name: of the benchmark.
        settings: its arguments, which name a `device`, and what it measured of the machine.
        rows: one for each method.
        model: uncompressed, or its shape (:func:`lowrank_kv.hf.loading.load_shape`) where servers run it; None where no
            model is run.
    """
    settings = {key: value for key, value in settings.items() if key != "results"}
    inputs = [path_input(role, settings[role]) for role in ("checkpoint", "bases") if settings.get(role)]
    inputs += file_inputs("text", filter(None, [settings.get("text")]))
    inputs += [] if model is None else [model_input(model)]
    record = run_record.new_record(
        "memory" if name == "memory" else "speed",
        config={"benchmark": name, **settings},
        inputs=inputs,
        n={key: settings[key] for key in COUNTS if settings.get(key)},
        rows=rows,
        device=settings["device"],
    )
    print(f"record: {run_record.write(record, root)}")


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
