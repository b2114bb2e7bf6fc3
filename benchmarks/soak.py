"""Compressed pages under clients that come and go, for as long as one likes: are all texts right, and does memory stay?

    .venv-vllm/bin/python -m benchmarks.soak --bases runs/demo-bases --rate 0.1 --minutes 60 --results results

Runs in the environment of `make test-vllm`. Clients ask for texts of many lengths, half of which begin alike, in memory
small enough that requests are preempted; some hang up in the middle. Each answer is held against what transformers says
through a cache of the same settings, by the rule of `right_texts.py`. Prompts see rebuilt states, so that a text depends on
nothing but its tokens and on how sums are rounded. The same rule is given texts that are wrong, and must tell them.

Ends with status 1 where a request failed, a text was wrong or short, wrong ones were not told, a request was left, memory
grew, nobody was answered, or the clients stopped early.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

import dynakv
from benchmarks.harness import count, write_results
from benchmarks.openai_server import COMPRESSED, Answer, Server, add_settings, settings_words
from benchmarks.right_texts import Distance, Expected, Reference, Text, controls, limits
from dynakv.checkpoint_files import read_config
from lowrank_kv.hf.loading import load_model, load_shape, load_tokenizer
from lowrank_kv.utils import cli
from lowrank_kv.utils.config import require
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.paths import demo_model, home
from lowrank_kv.utils.progress import progress_bar
from lowrank_kv.utils.text_data import load_documents
from lowrank_kv_vllm.plans import preset_of, retention, rows_differ
from lowrank_kv_vllm.settings import ServingConfig
from ojakv import Calibration, OjaKVCache, make_plan

PREFILL = "reconstructed"
PAGE_MARGIN = 1.0  # no page fills then: a full one codes later tokens more coarsely, which no reference knows of
# Of the wrong texts of these kinds so many must be found wrong. A wrong page early in a prompt often does less to some dozen
# tokens than rounding does: its share is reported.
TOLD, MUST_BE_TOLD = 0.9, ("foreign", "swapped")
GROWTH = 1.05  # of memory, from the first quarter of the run to its end, that is still called none
LASTED = 0.95  # of `--minutes`, that clients must have asked for
LENGTHS = (5, 700)
# oneDNN keeps a compiled product for each number of tokens that a step has had, and glibc keeps freed memory between them;
# that makes stock vLLM grow, too. With these a growth is a leak.
STEADY = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0", "MALLOC_TRIM_THRESHOLD_": "131072"}


class Clients:
    """What all clients have seen so far.

    Attributes:
        counts: of requests and of tokens, by what came of them.
        found: texts that were answered, by the prompt's number.
        first_failure: what the first request that failed was told.
    """

    def __init__(self, server: Server, expected: list[Expected], arguments: argparse.Namespace):
        self.server, self.expected, self.arguments = server, expected, arguments
        self.counts: Counter[str] = Counter()
        self.found: dict[int, set[Text]] = defaultdict(set)
        self.first_failure: str | None = None
        self._lock, self._ended = threading.Lock(), threading.Event()

    def run(self, seed: int, until: float) -> None:
        """One client."""
        chance = random.Random(seed)
        while time.monotonic() < until and not self._ended.is_set():
            self._ask(chance)
            self._ended.wait(chance.random() * 0.2)

    def end(self) -> None:
        """Let no client ask again."""
        self._ended.set()

    def _ask(self, chance: random.Random) -> None:
        number = chance.randrange(len(self.expected))
        expected, hangs_up = self.expected[number], chance.random() < self.arguments.abort_share
        tokens = chance.randint(1, len(expected.answer.tokens))
        enough = chance.randint(1, tokens)

        def is_enough(answer: Answer) -> bool:
            return len(answer.token_ids) >= enough

        try:
            answer = self.server.complete(
                expected.prompt, max_tokens=tokens, ignore_eos=True, logprobs=1, until=is_enough if hangs_up else None
            )
        except UserError as error:
            with self._lock:
                self.counts["failed"] += 1
                self.first_failure = self.first_failure or str(error)
            return
        with self._lock:
            self.counts["aborted" if hangs_up else "answered"] += 1
            self.counts["tokens"] += len(answer.token_ids)
            self.counts["agreed"] += expected.agreed(answer.token_ids)
            self.counts["short"] += not is_enough(answer) if hangs_up else len(answer.token_ids) != tokens
            self.found[number].add(Text(tuple(answer.token_ids), tuple(answer.logprobs)))


def main(argv: Sequence[str]) -> None:
    arguments = _parser().parse_args(argv)
    require(
        arguments.prompts >= 2, "--prompts", arguments.prompts, "at least 2, one of which tells wrong texts of another"
    )
    arguments.prefill = PREFILL
    shape, (reference, prompts) = load_shape(arguments.model), _reference(arguments)
    with progress_bar(prompts, unit="prompt", desc="reading the reference") as bar:
        expected = [reference.expected(prompt, arguments.tokens) for prompt in bar]
    allowed = limits(expected)
    told = _told(expected, controls(reference, expected, arguments.seed), allowed)
    print(f"{_line(_of_limits(allowed))}  {_line(told)}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        environment = {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"), **STEADY}
        with Server(_words(arguments), Path(directory, "log"), environment) as server:
            row, found = _soaked(server, expected, arguments)
    row |= {**_of_limits(allowed), **_judged(expected, found, allowed), **told}
    print(_line(row))
    if arguments.results:
        write_results(arguments.results, "soak", {**vars(arguments), "device": "cpu"}, [row], model=shape)
    if reasons := faults(row, arguments.minutes):
        print(f"failed: {'; '.join(reasons)}")
        sys.exit(1)


def faults(row: dict[str, Any], minutes: float) -> list[str]:
    """Why a run does not pass, from its row and from how long it was to last; empty where it does."""
    found = [f"{key} is {row[key]}" for key in ("failed", "wrong", "short", "left") if row[key]]
    found += [f"{kind}_told is {row[f'{kind}_told']}" for kind in MUST_BE_TOLD if row[f"{kind}_told"] < TOLD]
    if not row["answered"]:
        found.append("nobody was answered")
    if row["minutes"] < LASTED * minutes:
        found.append(f"clients asked for {row['minutes']:.2f} of {minutes:g} minutes")
    if row["memory_growth"] > GROWTH:
        found.append(f"memory is {row['memory_growth']:.3f} times that of the first quarter")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(demo_model()), metavar="ID", help="[default: the demo's]")
    add_settings(parser)
    parser.add_argument("--minutes", type=float, default=60.0, help="[default %(default)s]")
    parser.add_argument("--clients", type=count, default=12, help="at once [default %(default)s]")
    parser.add_argument("--prompts", type=count, default=32, help="different ones [default %(default)s]")
    parser.add_argument("--tokens", type=count, default=64, help="of an answer, at most [default %(default)s]")
    parser.add_argument("--abort-share", type=float, default=0.25, help="of requests [default %(default)s]")
    parser.add_argument("--memory", type=count, default=12, metavar="MIB", help="for pages [default %(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="[default %(default)s]")
    parser.add_argument(
        "--text", default=str(home() / "text" / "addresses-heldout.jsonl"), metavar="FILE", help="of prompts"
    )
    parser.add_argument("--results", type=cli.output_directory, metavar="DIR", help="where to write the run record")
    return parser


def _words(arguments: argparse.Namespace) -> list[str]:
    """What starts the server."""
    return [
        *(*COMPRESSED, "--model", os.path.expanduser(arguments.model), "--dtype", "float32", "--enforce-eager"),
        *("--kv-cache-memory-bytes", str(arguments.memory << 20), "--disable-uvicorn-access-log"),
        *("--max-model-len", str(LENGTHS[1] + arguments.tokens), "--max-num-seqs", str(arguments.clients)),
        *settings_words(arguments),
        *(("--page-margin", str(PAGE_MARGIN)) if rows_differ(_settings(arguments)) else ()),
    ]


def _soaked(
    server: Server, expected: list[Expected], arguments: argparse.Namespace
) -> tuple[dict[str, Any], dict[int, set[Text]]]:
    """What was counted, and the texts that were answered to each prompt."""
    # vLLM compiles some of its own code in its first request: seconds, and many on a busy machine, of no client's time.
    server.complete(expected[0].prompt, max_tokens=1, ignore_eos=True, logprobs=1)
    began = time.monotonic()
    until = began + 60 * arguments.minutes
    clients = Clients(server, expected, arguments)
    with ThreadPoolExecutor(arguments.clients) as pool:
        running = [pool.submit(clients.run, arguments.seed + i, until) for i in range(arguments.clients)]
        try:
            early, size = _watched(server, clients, running, arguments.minutes)
        finally:
            clients.end()
    for each in running:
        each.result()  # raises a client's defect
    minutes = (time.monotonic() - began) / 60
    deadline = time.monotonic() + 60
    while (left := _left(server)) and time.monotonic() < deadline:
        time.sleep(1)
    metrics = server.metrics()
    row = {
        "method": "compressed",
        "minutes": minutes,
        **{key: clients.counts[key] for key in ("answered", "aborted", "failed", "tokens", "short")},
        "first_failure": clients.first_failure,
        "reference_share": clients.counts["agreed"] / max(clients.counts["tokens"], 1),
        "left": left,
        "preempted": metrics["vllm:num_preemptions_total"],
        "prefix_hit_share": metrics["vllm:prefix_cache_hits_total"]
        / max(metrics["vllm:prefix_cache_queries_total"], 1),
        "resident_bytes": size,
        "memory_growth": size / max(early, 1),
    }
    return row, clients.found


def _watched(server: Server, clients: Clients, running: list[Future[None]], minutes: float) -> tuple[int, int]:
    """The most memory of the server in the first quarter of the run, and that at the end, in bytes.

    Raises:
        UserError: the server ended.
    """
    began = time.monotonic()
    early = size = server.resident_bytes()
    with progress_bar(unit="request", desc=f"{minutes:g} minutes") as bar:
        left = set(running)
        while left and not any(each.exception() for each in running if each.done()):
            left = wait(left, timeout=2, return_when=FIRST_EXCEPTION).not_done
            bar.update(clients.counts["answered"] + clients.counts["aborted"] - bar.n)
            if server.process.poll() is not None:
                raise UserError(f"the server ended with status {server.process.returncode}: {server.tail()}")
            size = server.resident_bytes()
            if time.monotonic() < began + 15 * minutes:
                early = max(early, size)
    return early, size


def _told(
    expected: list[Expected], wrong_texts: dict[str, list[tuple[int, Text]]], allowed: list[Distance]
) -> dict[str, float]:
    """The share of wrong texts that are further than right ones may be, and how far they are, of each kind."""
    row = {}
    for kind, texts in wrong_texts.items():
        pairs = [(expected[number].distances([text], allowed[number])[0], allowed[number]) for number, text in texts]
        if pairs:
            row[f"{kind}_told"] = sum(distance.exceeds(limit) for distance, limit in pairs) / len(pairs)
            row[f"{kind}_median_gap"] = statistics.median(distance.gap for distance, _ in pairs)
            row[f"{kind}_median_drift"] = statistics.median(distance.drift for distance, _ in pairs)
    return row


def _of_limits(allowed: list[Distance]) -> dict[str, float]:
    """How far right texts may be, of the prompt in the middle and of the one that is allowed most."""
    row = {}
    for name in ("gap", "drift"):
        values = [getattr(limit, name) for limit in allowed]
        row |= {f"median_{name}_limit": statistics.median(values), f"largest_{name}_limit": max(values)}
    return row


def _judged(expected: list[Expected], found: dict[int, set[Text]], allowed: list[Distance]) -> dict[str, Any]:
    """How far served texts are, and how many of them are not the reference's."""
    row = {"parted": 0, "largest_gap": 0.0, "largest_drift": 0.0, "wrong": 0}
    row |= {"largest_gap_of_limit": 0.0, "largest_drift_of_limit": 0.0}
    for number, texts in found.items():
        limit = allowed[number]
        for text, distance in zip(texts, expected[number].distances(texts, limit), strict=True):
            row["parted"] += expected[number].agreed(text.tokens) < len(text.tokens)
            for name in ("gap", "drift"):
                value = getattr(distance, name)
                row[f"largest_{name}"] = max(row[f"largest_{name}"], value)
                share = value / getattr(limit, name)
                row[f"largest_{name}_of_limit"] = max(row[f"largest_{name}_of_limit"], share)
            if distance.exceeds(limit):
                row["wrong"] += 1
                print(f"wrong by {distance}, {limit} allowed: prompt {number}: {text} for {expected[number].answer}")
    return row


def _line(row: dict[str, Any]) -> str:
    return "  ".join(f"{key} {value}" for key, value in row.items())


def _left(server: Server) -> float:
    """Requests that still run or wait."""
    metrics = server.metrics()
    return metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"]


def _reference(arguments: argparse.Namespace) -> tuple[Reference, list[list[int]]]:
    """What transformers answers with caches like the server's, and prompts of many lengths, every other of which begins as
    one before it."""
    name, chance = os.path.expanduser(arguments.model), random.Random(arguments.seed)
    model, tokenizer = load_model(name, dtype="float32", device="cpu"), load_tokenizer(name)
    documents = load_documents(arguments.text, subset=None, split="train", text_field="text")
    ids = [token for document in documents for token in tokenizer(document["text"])["input_ids"]]
    require(len(ids) > LENGTHS[1], "--text", arguments.text, f"of more than {LENGTHS[1]} tokens; it has {len(ids)}")
    prompts: list[list[int]] = []
    for number in range(arguments.prompts):
        length, start = chance.randint(*LENGTHS), chance.randrange(len(ids) - LENGTHS[1])
        fresh = ids[start : start + length]
        if number % 2:
            earlier = prompts[-1]
            fresh = (earlier[: chance.randint(1, len(earlier))] + fresh)[: LENGTHS[1]]
        prompts.append(fresh)
    return Reference(*_compressed(model, arguments), seed=arguments.seed), prompts


def _compressed(model: PreTrainedModel, arguments: argparse.Namespace) -> tuple[PreTrainedModel, Any]:
    """The model, and a maker of caches that do what the server does."""
    settings = _settings(arguments)
    if arguments.checkpoint:
        has_plan = read_config(arguments.checkpoint).compressor.has_plan
        overrides = {"prefill": PREFILL, **({"exact_tokens": retention(settings)} if has_plan else {})}
        model = dynakv.attach(model, arguments.checkpoint, **overrides)
        return model, lambda: dynakv.DynaKVCache.from_model(model)
    plan = make_plan(Calibration.load(arguments.bases).for_model(model), preset_of(settings))
    return model, lambda: OjaKVCache(model, plan)


def _settings(arguments: argparse.Namespace) -> ServingConfig:
    keys = ("bases", "checkpoint", "preset", "rate", "rebuild_cost")
    return ServingConfig(**{key: getattr(arguments, key) for key in keys}, prefill=PREFILL)


if __name__ == "__main__":
    cli.run(main)
