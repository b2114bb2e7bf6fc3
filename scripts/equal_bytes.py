"""Compare methods of a comparison at equal bytes, where their own bytes differ.

    python -m scripts.equal_bytes RECORD … --method "learned 0.06" --against "adaptive-mixed 0.04" "adaptive-mixed 0.06" …

In each window the methods `--against` make a curve of log KL over the bytes held: the cubic through the four nearest to the
bytes of `--method`, two of them on either side where there are so many. The script says by how much the KL of `--method`
differs from that curve at its bytes: the geometric mean over windows, its 95 % interval (`lowrank_kv.utils.intervals`,
windows of one document together), and in how many windows it is less. It says the same of the straight line between the two
neighbours. KL falls ever more slowly as bytes grow, so that the line lies above what a method between them would have: it
flatters `--method`, and is all there is of fewer than four. One method `--against` is compared as it is, whatever its bytes.
A curve is of one family at several rates: it is refused where two of `--against` hold nearly the same bytes.
The methods may stand in several records, if these measured the same model on the same windows in the same way. A record of a
comparison that was ended before has the first of its windows: with `--common` those are compared that all methods have.
"""

import argparse
import bisect
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
from lowrank_kv.utils.paths import path_of

Windows = Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]

_AROUND = 4  # methods that the curve goes through
_NEAREST = 0.1  # times the widest step between two of them: from nearer ones a cubic swings far out


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=path_of, nargs="+", metavar="RECORD", help="of `lowrank-kv compare`")
    parser.add_argument("--method", required=True, help="its name in a record")
    parser.add_argument("--against", required=True, nargs="+", metavar="METHOD", help="names of others in the records")
    parser.add_argument(
        "--common", action="store_true", help="compare the windows that all have, where a comparison was ended before"
    )
    arguments = parser.parse_args(argv)
    methods = [arguments.method, *arguments.against]
    windows, documents = windows_of(arguments.records, methods, common=arguments.common)
    whole = {}
    for text, of in documents.items():
        if missing := [name for name in methods if (name, text) not in windows]:
            print(f"{text}: left out, not measured with {', '.join(missing)}")
        else:
            whole[text] = of
    for way, points in (("a curve", _AROUND), ("a straight line", 2)):
        if 1 < len(arguments.against) < points:
            continue
        if len(arguments.against) > 1:
            print(f"from {way}:")
        found = {text: differences(windows, text, arguments.method, arguments.against, points=points) for text in whole}
        for text, of in whole.items():
            print(f"{text}: {told([found[text]], [of])}")
        print(f"all: {told(list(found.values()), list(whole.values()))}")
        if len(arguments.against) == 1:
            return


def windows_of(
    paths: Sequence[Path], methods: Sequence[str], *, common: bool = False
) -> tuple[Windows, dict[str, list[int]]]:
    """The windows of these methods in all records, and each text's document of each window.

    Args:
        common: of each text only the windows that all methods have which were measured on it.

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
        if not common:
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
    if common:
        for text in documents:
            counts = [len(each) for (_, other), each in windows.items() if other == text]
            documents[text] = documents[text][: min(counts)]
        windows = {(method, text): each[: len(documents[text])] for (method, text), each in windows.items()}
    return windows, documents


def check_whole(windows: Windows, documents: Mapping[str, Sequence[int]], record: Path) -> None:
    """Raise :class:`UserError` where a record was written while its comparison was still running."""
    for (method, text), measured in windows.items():
        if len(measured) != len(documents[text]):
            raise UserError(
                f"{record} has {len(measured)} of {len(documents[text])} windows of {text} with `{method}`; let the "
                f"comparison come to its end, or take `--common` windows"
            )


def differences(
    windows: Windows, text: str, method: str, against: Sequence[str], *, points: int = _AROUND
) -> list[float]:
    """log KL of a method less that of a curve through others at its bytes, for each window.

    Args:
        points: how many of the others the curve goes through, those around the method's bytes; 2 for a straight line.

    Raises:
        UserError: the method's bytes lie beyond those of the others, two of these are too near to one another for a curve,
            or a KL is not above zero, as the full cache's.
    """
    curves = [[(held(each), log_kl(each, other)) for each in windows[other, text]] for other in against]
    return [
        log_kl(each, method) - _on_curve(sorted(those), held(each), points, f"window {number} of {text}")
        for number, (each, those) in enumerate(zip(windows[method, text], zip(*curves, strict=True), strict=True), 1)
    ]


def held(window: Mapping[str, Any]) -> float:
    """Bytes over those of an uncompressed cache."""
    return window["cache_bytes"] / window["full_bytes"]


def log_kl(window: Mapping[str, Any], method: str) -> float:
    """Of one window."""
    if window["kl"] <= 0:
        raise UserError(f"`{method}` has a KL of {window['kl']:.1e} in a window, which has no logarithm; leave it out")
    return math.log(window["kl"])


def _on_curve(measured: Sequence[tuple[float, float]], x: float, points: int, where: str) -> float:
    if len(measured) == 1:
        return measured[0][1]
    best: dict[float, float] = {}  # of several with equal bytes, the better
    for each_x, each_y in measured:
        best[each_x] = min(each_y, best.get(each_x, math.inf))
    known = sorted(best)
    if not known[0] <= x <= known[-1]:
        raise UserError(
            f"`--against` must hold fewer and more bytes than `--method` does; in {where} it holds {x:.3f}, and they from "
            f"{known[0]:.3f} to {known[-1]:.3f}"
        )
    above = bisect.bisect_left(known, x)
    first = max(0, min(above - points // 2, len(known) - points))
    around = known[first : first + points]
    steps = [higher - lower for lower, higher in itertools.pairwise(around)]
    if points > 2 and steps and min(steps) < _NEAREST * max(steps):
        near = around[steps.index(min(steps))]
        raise UserError(
            f"two of `--against` hold nearly the same bytes, {near:.4f} and {near + min(steps):.4f} in {where}, and no "
            f"curve goes well through both; leave one of them out"
        )
    return sum(  # Lagrange's form
        best[one] * math.prod((x - other) / (one - other) for other in around if other != one) for one in around
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
