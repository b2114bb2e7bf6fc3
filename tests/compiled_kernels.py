"""Kernels compiled for an H100 or H200 without one.

Launches are recorded on meta tensors, from which nothing can be read, and compiled ahead of time, with the specialisations a
launch would have.
"""

import contextlib
import subprocess
from pathlib import Path
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from lowrank_kv.ops.triton import launch as kernel_launch

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 227 * 1024
META = torch.device("meta")
TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}
OPTIONS = ("num_warps", "num_stages")


class Launches:
    """What would have been launched: (kernel, values of all parameters, options), of autotuned kernels each choice."""

    def __init__(self):
        self.found = []

    def of_plain(self, kernel, *args, grid, warmup, **kwargs):
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        self.found.append((kernel, dict(zip(kernel.arg_names, args, strict=False)) | kwargs, options))

    def of_tuned(self, tuner, *args, **kwargs):
        for config in tuner.configs:
            chosen = {name: value for name, value in config.all_kwargs().items() if value is not None}
            self.of_plain(tuner.fn, *args, **kwargs, **chosen)

    @contextlib.contextmanager
    def recorded(self):
        def plain(kernel, *args, **kwargs):
            self.of_plain(kernel, *args, **kwargs)

        def tuned(tuner, *args, **kwargs):
            self.of_tuned(tuner, *args, **kwargs)

        runs = mock.patch.object(JITFunction, "run", plain), mock.patch.object(Autotuner, "run", tuned)
        with runs[0], runs[1], mock.patch.object(kernel_launch, "multiprocessors", return_value=132):
            yield self


def compiled(kernel: JITFunction, values: dict, options: dict):
    """The kernel as a launch with these values would compile it."""
    signature, constants, aligned = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        is_special = type(value) is int and not parameter.do_not_specialize
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + TYPES[value.dtype]
            aligned[(index,)] = [["tt.divisibility", 16]]  # as the allocator aligns
        elif parameter.is_constexpr or value is None or (is_special and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32"
            if is_special and value % 16 == 0:
                aligned[(index,)] = [["tt.divisibility", 16]]
    return triton.compile(ASTSource(kernel, signature, constants, aligned), target=HOPPER, options=options)


def resources(cubin: bytes, directory: Path) -> dict[str, int]:
    """REG, STACK, SHARED, LOCAL … of the one function of a cubin."""
    path = directory / "kernel.cubin"
    path.write_bytes(cubin)
    dump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    text = subprocess.run([dump, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    [line] = [line for line in text.splitlines() if "REG:" in line]
    return {name: int(number) for name, number in (pair.split(":") for pair in line.split() if pair.count(":") == 1)}


def check_all(launches: Launches, directory: Path) -> None:
    assert launches.found
    for kernel, values, options in launches.found:
        built = compiled(kernel, values, options)
        used = resources(built.asm["cubin"], directory)
        assert built.metadata.shared <= SHARED_BYTES, (kernel.__name__, options)
        assert used["STACK"] == used["LOCAL"] == 0, (kernel.__name__, options, used)


def first_only(launches: Launches) -> Launches:
    """The first choice of each kernel: other data, the same tuning."""
    firsts = Launches()
    seen = set()
    for launch in launches.found:
        if launch[0].__name__ not in seen:
            seen.add(launch[0].__name__)
            firsts.found.append(launch)
    return firsts
