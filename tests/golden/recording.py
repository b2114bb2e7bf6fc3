"""Recordings: where one was made, how it is kept, and in what two of them differ.

A file has a header and entries. The header says what the bits of floating-point results depend on; where it is another's,
results are compared by a few of their numbers instead. Greedy tokens and errors must be equal everywhere.
"""

import json
import os
import platform
import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

from lowrank_kv.ops.native.library import library

Entries = dict[str, dict]

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-4  # of logits, absolute; of losses, relative


class Recording(NamedTuple):
    """Attributes:
    machine: see :func:`machine`.
    commit: that was recorded; says so where files of it were changed.
    entries: what was computed, by label.
    """

    machine: dict[str, str]
    commit: str
    entries: Entries


def machine() -> dict[str, str]:
    """What bits of floating-point results depend on beside the package."""
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "cpu": _cpu(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "compiled_kernels": "none" if library() is None else _first_line([*compiler, "--version"]),
    }


def kind(machine: dict[str, str]) -> str:
    """The processors that share a recording: torch and its libraries choose their code by maker and vector width."""
    maker = machine["cpu"].partition(" ")[0].removesuffix("(R)")
    return f"{maker} {machine['cpu_capability']}"


def commit() -> str:
    return _first_line(["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"])


def write(path: Path, recording: Recording) -> None:
    """A line for every entry, so that what changes is read from a diff."""
    header = json.dumps({"commit": recording.commit, **recording.machine})
    lines = ",\n".join(f"{json.dumps(label)}: {json.dumps(entry)}" for label, entry in recording.entries.items())
    path.write_text(f'{{"header": {header},\n"entries": {{\n{lines}\n}}}}\n')


def read(path: Path) -> Recording:
    found = json.loads(path.read_text())
    return Recording(found["header"], found["header"].pop("commit"), found["entries"])


def differences(expected: Entries, found: Entries, *, exact: bool) -> list[str]:
    """A line for every label whose entries differ, or that only one has.

    Args:
        exact: whether digests and losses must be equal to the bit; if not, samples and losses must be close.
    """
    lines = []
    for label in sorted(expected.keys() | found.keys()):
        if label not in found:
            lines.append(f"{label}: is no longer recorded")
        elif label not in expected:
            lines.append(f"{label}: was not recorded before")
        elif said := _difference(expected[label], found[label], exact):
            lines.append(f"{label}: {said}")
    return lines


def _difference(expected: dict, found: dict, exact: bool) -> str:
    """In what two entries of a label differ; empty where they do not."""
    if expected.keys() != found.keys():
        return f"has {', '.join(found)} {found.get('error', '')!r} instead of {', '.join(expected)}"
    said = [
        f"{key} {found[key]!r} instead of {expected[key]!r}"
        for key in ("error", "tokens")
        if _unequal(key, expected, found)
    ]
    if exact:
        said += [
            f"{key} not equal to the bit" for key in ("logits", "losses", "weights") if _unequal(key, expected, found)
        ]
    if "logits" in found:
        absolute = [abs(b - a) for a, b in _pairs(expected["logits"]["sample"], found["logits"]["sample"])]
        if not max(absolute) <= (0 if exact else TOLERANCE):
            said.append(f"sampled logits differ by up to {max(absolute):.1e}")
    if "losses" in found:
        relative = [abs(b / a - 1) for a, b in _pairs(expected["losses"], found["losses"])]
        if not max(relative) <= (0 if exact else TOLERANCE):
            first = next(step for step, one in enumerate(relative, 1) if not one <= (0 if exact else TOLERANCE))
            said.append(f"losses differ by up to {max(relative):.1e} of them, from step {first} on")
    return "; ".join(said)


def _unequal(key: str, expected: dict, found: dict) -> bool:
    return expected.get(key) != found.get(key)


def _pairs(expected: list[str], found: list[str]) -> list[tuple[float, float]]:
    return [(float.fromhex(a), float.fromhex(b)) for a, b in zip(expected, found, strict=True)]


def _cpu() -> str:
    """The processor's name, family, model and stepping, where the system says them."""
    file = Path("/proc/cpuinfo")
    if not file.exists():
        return platform.processor()
    pairs = (line.partition(":") for line in file.read_text().partition("\n\n")[0].splitlines())
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    return " ".join(fields[key] for key in ("model name", "cpu family", "model", "stepping") if key in fields)


def _first_line(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[0]
