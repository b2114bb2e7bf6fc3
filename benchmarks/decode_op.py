"""Time of one decode-attention step on compressed caches against scaled_dot_product_attention on an uncompressed one.

    python -m benchmarks.decode_op --device cpu --results results
    python -m benchmarks.decode_op --device cuda --results results

On a GPU the shapes are an 8 B model's and every step is replayed from a CUDA graph; on a CPU they are the demo model's.
Rows name what a step must read and compute, and which share of this machine's measured copy bandwidth and matrix rate that
is. Several layers with tensors of their own run one after another, so that no cache of the machine holds them. Before
anything is timed, every step is compared with the fp64 reference.
"""

import argparse
import functools
import importlib.metadata
import math
from collections.abc import Callable

import torch

from benchmarks.decode_shapes import Shape, Step, concatenated, flash, one_rank, preallocated, ragged
from benchmarks.harness import count, forget_tuning, interleaved_ms, use_device, write_results
from benchmarks.roofline import copy_bandwidth
from lowrank_kv.hf.loading import DTYPES
from lowrank_kv.utils import cli
from lowrank_kv.utils.config import require
from lowrank_kv.utils.flops import matmul_flops

ALLOWED = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DEFAULTS = {
    "cpu": {"heads": 9, "groups": 3, "head_dim": 64, "context": 8192, "batches": [1], "dtype": "float32", "granule": 8},
    "cuda": {
        "heads": 32, "groups": 8, "head_dim": 128, "context": 32768, "batches": [1, 8], "dtype": "bfloat16", "granule": 64,
    },
}  # fmt: skip
PREALLOCATED, FLASH, CAT = "preallocated", "preallocated, flash", "concatenated"


def steps(granule: int, tokens: int) -> dict[str, Callable[[Shape], Step]]:
    """What is compared; rates are of keys and of values."""
    per_head = functools.partial(one_rank, is_joint=False)
    joint = functools.partial(one_rank, is_joint=True)
    return {
        PREALLOCATED: preallocated,
        CAT: concatenated,
        "ojakv 0.6": functools.partial(per_head, key_rate=0.6, value_rate=0.6),
        "ojakv 0.3": functools.partial(per_head, key_rate=0.25, value_rate=0.35),
        "ojakv-joint 0.5": functools.partial(joint, key_rate=0.37, value_rate=0.63),
        "ojakv-joint 0.3": functools.partial(joint, key_rate=0.23, value_rate=0.37),
        "dynakv 0.30": functools.partial(ragged, key_rate=0.12, value_rate=0.48, granule=granule, tokens=tokens),
        "dynakv 0.12": functools.partial(ragged, key_rate=0.07, value_rate=0.17, granule=granule, tokens=tokens),
    }


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="[default %(default)s]")
    for name, what in {
        "heads": "query heads",
        "groups": "KV heads",
        "head_dim": "head dim",
        "context": "cached tokens",
        "granule": "ranks are multiples of it",
    }.items():
        parser.add_argument(
            f"--{name}", type=count, help=f"{what} [default {DEFAULTS['cpu'][name]}, on a GPU {DEFAULTS['cuda'][name]}]"
        )
    parser.add_argument(
        "--page-tokens",
        type=count,
        default=64,
        help="tokens of a page, on a GPU [default %(default)s, as a long cache has]",
    )
    parser.add_argument("--batches", type=_counts, help="sequences, separated by commas [default 1, on a GPU 1,8]")
    parser.add_argument("--dtype", choices=DTYPES, help="[default float32, on a GPU bfloat16]")
    parser.add_argument(
        "--layers", type=count, help="caches, one after another [default 4, on a GPU as many as make 32 with the batch]"
    )
    parser.add_argument("--repeats", type=count, default=20, help="[default %(default)s]")
    parser.add_argument(
        "--results", type=cli.output_directory, metavar="DIR", help="where to write the run record, e.g. results"
    )
    arguments = parser.parse_args(argv)
    for name, value in DEFAULTS[arguments.device].items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    device, dtype = use_device(arguments.device), getattr(torch, arguments.dtype)
    require(
        arguments.heads % arguments.groups == 0, "--groups", arguments.groups, f"a divisor of {arguments.heads} heads"
    )

    width = arguments.groups * arguments.head_dim
    require(arguments.granule <= width, "--granule", arguments.granule, f"at most the joint width, {width}")

    torch.manual_seed(0)
    bandwidth, rate = copy_bandwidth(device), matmul_flops(device, dtype)
    print(f"copy {bandwidth / 1e9:.0f} GB/s, matrix product {rate / 1e12:.2f} TFLOP/s")
    rows = []
    for batch in arguments.batches:
        shape = Shape(batch, arguments.heads, arguments.groups, arguments.head_dim, arguments.context, dtype, device)
        makers = steps(arguments.granule, arguments.page_tokens)
        if device.type == "cuda" and dtype.itemsize == 2:
            makers[FLASH] = flash
        rows += measured(shape, makers, arguments, bandwidth, rate)
    if arguments.results:
        versions = {"copy_bandwidth": bandwidth, "matmul_flops": rate}
        if device.type == "cuda":
            versions["triton"] = importlib.metadata.version("triton")
        write_results(arguments.results, "decode_op", vars(arguments) | versions, rows)


def _counts(text: str) -> list[int]:
    return [count(part) for part in text.split(",")]


@torch.no_grad()
def measured(
    shape: Shape,
    makers: dict[str, Callable[[Shape], Step]],
    arguments: argparse.Namespace,
    bandwidth: float,
    rate: float,
) -> list[dict]:
    """One row for each step, checked first."""
    # What launching costs must not be seen beside what a GPU does.
    depth = arguments.layers or (4 if shape.device.type == "cpu" else max(4, 32 // shape.batch))
    layers = {name: [make(shape) for _ in range(depth)] for name, make in makers.items()}
    calls = {}
    for name, found in layers.items():
        forget_tuning(shape.device)  # methods and batches share what kernels are tuned by
        check(name, found[0], shape.dtype)  # of what is timed, so at its very lengths and tuning
        calls[name] = repeated([step.attend for step in found], shape.device)
    ms = interleaved_ms(calls, repeats=arguments.repeats, warmup=3)
    fastest = min(ms[PREALLOCATED], ms.get(FLASH, math.inf))  # of the ways to attend over a preallocated cache
    rows = []
    for name, found in layers.items():
        seconds = ms[name] / 1e3
        nbytes, flops = sum(step.nbytes for step in found), sum(step.flops for step in found)
        rows.append(
            {
                "method": name,
                "batch": shape.batch,
                "context": shape.context,
                "layers": depth,
                "us_per_layer": ms[name] * 1e3 / depth,
                "speedup_over_preallocated": fastest / ms[name],
                "speedup_over_concatenated": ms[CAT] / ms[name],
                "rate": nbytes / (shape.full_bytes * depth),
                "bandwidth_fraction": nbytes / seconds / bandwidth,
                "flop_fraction": flops / seconds / rate,
            }
        )
        print(
            "{method:>15}  batch {batch}  {us_per_layer:9.1f} µs/layer  speed {speedup_over_preallocated:.2f}× preallocated "
            "{speedup_over_concatenated:.2f}× concatenated  rate {rate:.3f}  {bandwidth_fraction:.0%} of the bandwidth  "
            "{flop_fraction:.0%} of the FLOP/s".format(**rows[-1])
        )
    return rows


def check(name: str, step: Step, dtype: torch.dtype) -> None:
    """What is timed must first be right, by the norm of its error relative to the fp64 reference's."""
    expected = step.reference().double()
    error = float((step.attend().double() - expected).norm() / expected.norm())
    if not error <= ALLOWED[dtype]:
        raise AssertionError(f"{name}: relative error {error:.2e}, allowed {ALLOWED[dtype]}")


def repeated(attend: list[Callable], device: torch.device) -> Callable[[], None]:
    """All layers' steps one after another, on a GPU as one CUDA graph."""

    def run() -> None:
        for call in attend:
            call()

    if device.type != "cuda":
        return run
    # Kernels are tuned and workspaces found outside the capture.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


if __name__ == "__main__":
    cli.run(main)
