"""Compare methods of a comparison at equal bytes, where their own bytes differ.

    python -m scripts.equal_bytes RECORD … --method "learned 0.06" --against "adaptive-mixed 0.04" "adaptive-mixed 0.06" …

In each window the methods `--against` make a line: log KL, linear in the bytes held between two neighbours. The script says
by how much the KL of `--method` differs from that line at its bytes: the geometric mean over windows, its 95 % interval
(`lowrank_kv.utils.intervals`, windows of one document together), and in how many windows it is less. One method
`--against` is compared as it is, whatever its bytes. The methods may stand in several records, if these measured the same
model on the same windows in the same way.
"""

import argparse
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from evaluation.page.alike import check_read_alike
from lowrank_kv.utils import cli, run_record
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.intervals import clusters_of, interval

Windows = Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+", metavar="RECORD", help="of `lowrank-kv compare`")
    parser.add_argument("--method", required=True, help="its name in a record")
    parser.add_argument("--against", required=True, nargs="+", metavar="METHOD", help="names of others in the records")
    arguments = parser.parse_args(argv)
    windows, documents = windows_of(arguments.records, [arguments.method, *arguments.against])
    found = {}
    for text, of in documents.items():
        if missing := [name for name in (arguments.method, *arguments.against) if (name, text) not in windows]:
            print(f"{text}: left out, not measured with {', '.join(missing)}")
            continue
        found[text] = differences(windows, text, arguments.method, arguments.against)
        print(f"{text}: {told([found[text]], [of])}")
    print(f"all: {told(list(found.values()), [documents[text] for text in found])}")


def windows_of(paths: Sequence[Path], methods: Sequence[str]) -> tuple[Windows, dict[str, list[int]]]:
    """The windows of these methods in all records, and each text's document of each window.

    Raises:
        UserError: a method is in no record, or was measured on one text in two; the records are of different models or
            windows, read them otherwise, or have no text in common; or a comparison was still running.
    """
    windows, documents, measured, known = {}, {}, {}, set()
    records = {path: run_record.load(path) for path in paths}
    check_read_alike(list(records.values()))
    for path, record in records.items():
        summary = record["summary"]
        if not {"windows", "documents"} <= summary.keys():
            raise UserError(f"{path} holds no windows of a comparison; name a record of `lowrank-kv compare`")
        all_here = {(each["method"], each["dataset"]): each["windows"] for each in summary["windows"]}
        known |= {method for method, _ in all_here}
        here = {(method, text): each for (method, text), each in all_here.items() if method in methods}
        of = {text: summary["documents"][text]["of"] for _, text in here}
        check_whole(here, of, path)
        for role, name, sha256 in ((each["role"], each["name"], each["sha256"]) for each in record["inputs"]):
            if role == "weights" or (role == "text" and name in of):
                before, expected = measured.setdefault((role, name if role == "text" else None), (path, sha256))
                if sha256 != expected:
                    raise UserError(
                        f"{before} and {path} have different {role} of `{name}`; compare within one of them"
                    )
        for method, text in windows.keys() & here.keys():
            raise UserError(f"{path} has `{method}` on {text}, as a record before it has; leave one of them out")
        windows |= here
        documents |= of
    for name in methods:
        if name not in known:
            raise UserError(f"`{name}` is no method of {', '.join(map(str, paths))}; they have {sorted(known)}")
    if not any(all((name, text) in windows for name in methods) for text in documents):
        raise UserError(f"no text was measured with each of {', '.join(methods)}")
    return windows, documents


def check_whole(windows: Windows, documents: Mapping[str, Sequence[int]], record: Path) -> None:
    """Raise :class:`UserError` where a record was written while its comparison was still running."""
    for (method, text), measured in windows.items():
        if len(measured) != len(documents[text]):
            raise UserError(
                f"{record} has {len(measured)} of {len(documents[text])} windows of {text} with `{method}`; let the "
                f"comparison come to its end"
            )


def differences(windows: Windows, text: str, method: str, against: Sequence[str]) -> list[float]:
    """log KL of a method less that of the line of others at its bytes, for each window.

    Raises:
        UserError: the method's bytes lie beyond those of the others, or a KL is not above zero, as the full cache's.
    """
    lines = [[(held(each), log_kl(each, other)) for each in windows[other, text]] for other in against]
    return [
        log_kl(each, method) - _on_line(sorted(points), held(each), f"window {number} of {text}")
        for number, (each, points) in enumerate(zip(windows[method, text], zip(*lines, strict=True), strict=True))
    ]


def held(window: Mapping[str, Any]) -> float:
    """Bytes over those of an uncompressed cache."""
    return window["cache_bytes"] / window["full_bytes"]


def log_kl(window: Mapping[str, Any], method: str) -> float:
    """Of one window."""
    if window["kl"] <= 0:
        raise UserError(f"`{method}` has a KL of {window['kl']:.1e} in a window, which has no logarithm; leave it out")
    return math.log(window["kl"])


def _on_line(points: Sequence[tuple[float, float]], x: float, where: str) -> float:
    if len(points) == 1:
        return points[0][1]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x0 <= x <= x1:
            # Of two methods with equal bytes, the better.
            return min(y0, y1) if x0 == x1 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    raise UserError(
        f"`--against` must hold fewer and more bytes than `--method` does; in {where} it holds {x:.3f}, and they from "
        f"{points[0][0]:.3f} to {points[-1][0]:.3f}"
    )


def told(values: Sequence[Sequence[float]], documents: Sequence[Sequence[int]]) -> str:
    """What these differences say; of each text its windows, and the document that each is of."""
    value_N = torch.tensor(list(itertools.chain(*values)), dtype=torch.float64)
    if len(value_N) == 1:
        return f"{math.expm1(value_N):+.1%} in its one window, without an interval"
    low, high = interval(value_N, cluster_N=clusters_of(documents))
    mean, low, high = (f"{math.expm1(value):+.1%}" for value in (value_N.mean(), low, high))
    return f"{mean} ({low} to {high}), less in {int((value_N < 0).sum())} of {len(value_N)} windows"


if __name__ == "__main__":
    cli.run(main)
