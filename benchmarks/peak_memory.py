"""What a piece of work allocates, by the allocator's own record."""

import gc
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

Prepared = TypeVar("Prepared")


def allocations(
    prepare: Callable[[], Prepared], run: Callable[[Prepared], object], device: torch.device
) -> tuple[int, int]:
    """Bytes alive after `prepare` that were not alive before it, and the most alive at once during `run` beyond those.

    Args:
        prepare: what it returns is kept, and nothing else of what it made.
        run: takes what `prepare` returned.
        device: whose memory is meant. On a CPU torch's profiler keeps the record, which must have seen what is freed.
    """
    gc.collect()  # what earlier work left must not be freed, and counted as ours, during this
    return (_on_gpu if device.type == "cuda" else _on_cpu)(prepare, run, device)


def _on_gpu(prepare: Callable, run: Callable, device: torch.device) -> tuple[int, int]:
    run(prepare())  # kernels that are tuned when they first run take memory of their own for it
    before = torch.cuda.memory_allocated(device)
    prepared = prepare()
    kept = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run(prepared)
    return kept - before, torch.cuda.max_memory_allocated(device) - kept


def _on_cpu(prepare: Callable, run: Callable, device: torch.device) -> tuple[int, int]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        prepared = prepare()
        with record_function("run"):
            run(prepared)
    events = record.profiler.kineto_results.events()
    [start] = [event.start_ns() for event in events if event.name() == "run"]
    alive = kept = most = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        alive += event.nbytes()
        if event.start_ns() < start:
            kept = alive
        most = max(most, alive - kept) if event.start_ns() >= start else 0
    return kept, most
