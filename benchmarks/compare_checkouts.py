"""Is this checkout as fast as another, such as an earlier commit in a worktree? Both are timed in turns, in one run.

    git worktree add ../before COMMIT
    python -m benchmarks.compare_checkouts --other ../before --bases ../before/bases bases \\
        --checkpoints ../before/runs/demo/checkpoint runs/demo/checkpoint --results results

Each checkout has a process of its own, and its own checkpoint and bases, since formats may differ. A repeat begins with
fresh processes: where the system puts a process's memory decides some hundredths of its speed for as long as it lives. A
round decodes a few tokens in one and then in the other, in alternating order; a row gives the ratio of medians and the
quartiles of the rounds' ratios. Prefills are timed in turns as well, and with --train so are steps of the training loop.
`--this DIR` compares another checkout in this one's place.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.harness import count, in_turns
from lowrank_kv.utils import cli, run_record
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.paths import demo_model
from lowrank_kv.utils.provenance import path_input

ROOT = Path(__file__).parents[1]
WORKER = Path(__file__).parent / "checkout_worker.py"
NAMES = ("other", "this")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", required=True, metavar="DIR", help="the checkout to compare with")
    parser.add_argument(
        "--this", default=str(ROOT), metavar="DIR", help="the checkout that is compared [default: this one]"
    )
    parser.add_argument("--model", default=str(demo_model()), help="[default: the demo's]")
    parser.add_argument(
        "--checkpoints", required=True, nargs=2, metavar="DIR", help="of the other checkout, of this one"
    )
    parser.add_argument("--bases", required=True, nargs=2, metavar="DIR", help="of the other checkout, of this one")
    parser.add_argument("--presets", nargs="*", default=["ojakv-pf", "ojakv-joint"], help="[default %(default)s]")
    parser.add_argument("--rate", type=float, default=0.3, help="of the presets [default %(default)s]")
    parser.add_argument("--context", type=count, default=4096, help="tokens of the prompt [default %(default)s]")
    parser.add_argument("--rounds", type=count, default=24, help="of decoding, for each repeat [default %(default)s]")
    parser.add_argument("--tokens", type=count, default=4, help="decoded in a round [default %(default)s]")
    parser.add_argument("--repeats", type=count, default=3, help="prompts, and trainings [default %(default)s]")
    parser.add_argument("--train", nargs=argparse.REMAINDER, help="also time training, with all further arguments")
    parser.add_argument("--results", metavar="DIR", help="where to write the run record")
    arguments = parser.parse_args(argv)

    sides = dict(zip(NAMES, (Path(arguments.other), Path(arguments.this)), strict=True))
    commits = {f"{name}_commit": commit(root) for name, root in sides.items()}  # asked before hours are measured
    rows = decode_and_prefill(arguments, sides)
    if arguments.train is not None:
        rows.append(training(arguments, sides))
    for row in rows:
        print(
            "{what:>26}: {ratio:.3f} of the other's time, quartiles {lower:.3f} to {upper:.3f} ({n} pairs)".format(
                **row
            )
        )
    if arguments.results:
        pairs = [*zip(NAMES, arguments.checkpoints, strict=True), *zip(NAMES, arguments.bases, strict=True)]
        inputs = [path_input(f"{name}'s {Path(path).name}", path) for name, path in pairs]
        config = {"benchmark": "compare_checkouts", **commits, **vars(arguments)}
        n = {key: getattr(arguments, key) for key in ("repeats", "rounds", "tokens", "context")}
        record = run_record.new_record("speed", config=config, inputs=inputs, n=n, rows=rows)
        print(run_record.write(record, arguments.results))


def decode_and_prefill(arguments: argparse.Namespace, sides: dict[str, Path]) -> list[dict]:
    prefills: dict[str, dict[str, list[float]]] = {}
    decodes: dict[str, dict[str, list[float]]] = {}
    for repeat in range(arguments.repeats):
        with contextlib.ExitStack() as stack:
            workers = {
                name: stack.enter_context(Worker(root, arguments, checkpoint, bases))
                for (name, root), checkpoint, bases in zip(
                    sides.items(), arguments.checkpoints, arguments.bases, strict=True
                )
            }
            methods = workers["this"].answer()["methods"]
            assert workers["other"].answer()["methods"] == methods
            for method in methods:
                prefill = prefills.setdefault(method, {name: [] for name in NAMES})
                decode = decodes.setdefault(method, {name: [] for name in NAMES})
                for name in in_turns(NAMES, repeat):
                    prefill[name].append(workers[name].seconds(do="prefill", method=method))
                for name in NAMES:
                    workers[name].seconds(do="decode", method=method, tokens=2)  # the first steps allocate
                for turn in range(arguments.rounds):
                    for name in in_turns(NAMES, turn):
                        took = workers[name].seconds(do="decode", method=method, tokens=arguments.tokens)
                        decode[name].append(took / arguments.tokens)
    return [
        paired(f"{what} {method}", seconds[method])
        for method in prefills
        for what, seconds in (("decode", decodes), ("prefill", prefills))
    ]


def training(arguments: argparse.Namespace, sides: dict[str, Path]) -> dict:
    """Seconds a token of the real loop, from the metrics of whole runs."""
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    checkpoints = dict(zip(NAMES, arguments.checkpoints, strict=True))
    for repeat in range(arguments.repeats):
        for name in in_turns(NAMES, repeat):
            with tempfile.TemporaryDirectory() as output:
                command = [sys.executable, "train_dynakv.py", *arguments.train, "--output", f"{output}/run"]
                command += ["--initial_checkpoint", str(Path(checkpoints[name]).resolve())]
                subprocess.run(command, cwd=sides[name], env=environment(sides[name]), check=True, capture_output=True)
                lines = Path(output, "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
                speeds = [row["tokens_per_second"] for row in map(json.loads, lines) if "tokens_per_second" in row]
                if not speeds:
                    raise UserError("`--train` must let a run log a step; give more `steps`, or a smaller `log_every`")
                seconds[name].append(1 / speeds[-1])
    return paired("training token", seconds)


class Worker:
    """A process that runs :mod:`benchmarks.checkout_worker` on one checkout, until its block ends."""

    def __init__(self, root: Path, arguments: argparse.Namespace, checkpoint: str, bases: str):
        settings = {key: getattr(arguments, key) for key in ("model", "presets", "rate", "context")}
        settings |= {"checkpoint": checkpoint, "bases": bases, "threads": torch.get_num_threads()}
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), json.dumps(settings)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(root),
        )  # fmt: skip

    def answer(self) -> dict:
        line = self.process.stdout.readline()
        assert line, "the worker ended; its error stands above"
        return json.loads(line)

    def seconds(self, **request: object) -> float:
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return self.answer()["seconds"]

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            self.process.kill()  # it may be in the middle of a long request
        with contextlib.suppress(BrokenPipeError):  # of a request that it did not live to read
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


def paired(what: str, seconds: dict[str, list[float]]) -> dict:
    """This checkout's time over the other's."""
    ratios = sorted(this / other for other, this in zip(seconds["other"], seconds["this"], strict=True))
    lower, _, upper = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    medians = {name: statistics.median(seconds[name]) for name in NAMES}
    return {
        "what": what,
        "ratio": medians["this"] / medians["other"],
        "median_of_ratios": statistics.median(ratios),
        "lower": lower,
        "upper": upper,
        "n": len(ratios),
        "ms_other": medians["other"] * 1e3,
        "ms_this": medians["this"] * 1e3,
    }


def environment(root: Path) -> dict[str, str]:
    """This process's, with a checkout's packages before any that are installed."""
    return {**os.environ, "PYTHONPATH": str(root.resolve())}


def commit(root: Path) -> str | None:
    """Of a checkout; None of what git does not know as one."""
    done = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], check=False, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


if __name__ == "__main__":
    cli.run(main)
