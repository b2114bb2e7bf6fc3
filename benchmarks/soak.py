"""Compressed pages under clients that come and go, for as long as one likes: are all texts right, and does memory stay?

    .venv-vllm/bin/python -m benchmarks.soak --bases runs/demo-bases --rate 0.1 --minutes 60 --results results

Runs in the environment of `make test-vllm`. Clients ask for texts of many lengths, half of which begin alike, in memory
small enough that requests are preempted; some hang up in the middle. Each answer is held against what transformers says
through a cache of the same settings, by the rule of `right_texts.py`. Prompts see rebuilt states, so that a text depends on
nothing but its tokens and on how sums are rounded. The same rule is given texts that are wrong, and must tell them.

Ends with status 1 where a text was wrong, wrong ones were not told, a request was left, or memory grew.
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
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

import dynakv
from benchmarks.harness import count, write_results
from benchmarks.openai_server import COMPRESSED, Answer, Server, add_settings, settings_words
from benchmarks.right_texts import Distance, Expected, Reference, Text, controls, limits
from dynakv.checkpoint_files import read_config
from lowrank_kv.hf.loading import load_model, load_tokenizer
from lowrank_kv.utils import cli
from lowrank_kv.utils.paths import demo_model, home
from lowrank_kv.utils.progress import progress_bar
from lowrank_kv.utils.text_data import load_documents
from lowrank_kv_vllm.plans import preset_of, retention
from lowrank_kv_vllm.settings import ServingConfig
from ojakv import Calibration, OjaKVCache, make_plan

PREFILL = "reconstructed"
PAGE_MARGIN = 1.0  # no page fills then: a full one codes later tokens more coarsely, which no reference knows of
# Of the wrong texts of these kinds so many must be found wrong. A wrong page early in a prompt often does less to some dozen
# tokens than rounding does: its share is reported.
TOLD, MUST_BE_TOLD = 0.9, ("foreign", "swapped")
GROWTH = 1.05  # of memory, from the first quarter of the run to its end, that is still called none
LENGTHS = (5, 700)
# oneDNN keeps a compiled product for each number of tokens that a step has had, and glibc keeps freed memory between them;
# that makes stock vLLM grow, too. With these a growth is a leak.
STEADY = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0", "MALLOC_TRIM_THRESHOLD_": "131072"}


class Clients:
    """What all clients have seen so far."""

    def __init__(self, server: Server, expected: list[Expected], arguments: argparse.Namespace):
        self.server, self.expected, self.arguments = server, expected, arguments
        self.counts: Counter[str] = Counter()
        self.found: dict[int, set[Text]] = defaultdict(set)  # by the prompt's number
        self._lock = threading.Lock()

    def run(self, seed: int, until: float) -> None:
        """One client."""
        chance = random.Random(seed)
        while time.monotonic() < until:
            number = chance.randrange(len(self.expected))
            expected, hangs_up = self.expected[number], chance.random() < self.arguments.abort_share
            tokens = chance.randint(1, len(expected.answer.tokens))
            enough = chance.randint(1, tokens)

            def is_enough(answer: Answer, enough: int = enough) -> bool:
                return len(answer.token_ids) >= enough

            answer = self.server.complete(
                expected.prompt, max_tokens=tokens, ignore_eos=True, logprobs=1, until=is_enough if hangs_up else None
            )
            with self._lock:
                self.counts["aborted" if hangs_up else "answered"] += 1
                self.counts["tokens"] += len(answer.token_ids)
                self.counts["agreed"] += expected.agreed(answer.token_ids)
                self.counts["short"] += not hangs_up and len(answer.token_ids) != tokens
                self.found[number].add(Text(tuple(answer.token_ids), tuple(answer.logprobs)))
            time.sleep(chance.random() * 0.2)


def main(argv: Sequence[str]) -> None:
    arguments = _parser().parse_args(argv)
    arguments.prefill = PREFILL
    reference, prompts = _reference(arguments)
    with progress_bar(prompts, unit="prompt", desc="reading the reference") as bar:
        expected = [reference.expected(prompt, arguments.tokens) for prompt in bar]
    allowed = limits(expected)
    told = _told(expected, controls(reference, expected, arguments.seed), allowed)
    print(f"{_line(_of_limits(allowed))}  {_line(told)}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        words = [
            *(*COMPRESSED, "--model", os.path.expanduser(arguments.model), "--dtype", "float32", "--enforce-eager"),
            *("--kv-cache-memory-bytes", str(arguments.memory << 20), "--disable-uvicorn-access-log"),
            *("--max-model-len", str(LENGTHS[1] + arguments.tokens), "--max-num-seqs", str(arguments.clients)),
            *settings_words(arguments),
            *("--page-margin", str(PAGE_MARGIN)),
        ]
        environment = {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"), **STEADY}
        with Server(words, Path(directory, "log"), environment) as server:
            row, found = _soaked(server, expected, arguments)
    row |= {**_of_limits(allowed), **_judged(expected, found, allowed), **told}
    print(_line(row))
    if arguments.results:
        write_results(arguments.results, "soak", {**vars(arguments), "device": "cpu"}, [row])
    is_told = all(told[f"{kind}_told"] >= TOLD for kind in MUST_BE_TOLD)
    if row["wrong"] or row["short"] or row["left"] or row["memory_growth"] > GROWTH or not is_told:
        sys.exit(1)


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


def _soaked(
    server: Server, expected: list[Expected], arguments: argparse.Namespace
) -> tuple[dict[str, Any], dict[int, set[Text]]]:
    """What was counted, and the texts that were answered to each prompt."""
    # vLLM compiles some of its own code in its first request: seconds, and many on a busy machine, of no client's time.
    server.complete(expected[0].prompt, max_tokens=1, ignore_eos=True, logprobs=1)
    began = time.monotonic()
    until = began + 60 * arguments.minutes
    clients = Clients(server, expected, arguments)
    threads = [threading.Thread(target=clients.run, args=(arguments.seed + i, until)) for i in range(arguments.clients)]
    for thread in threads:
        thread.start()
    early, size = 0, server.resident_bytes()
    with progress_bar(unit="request", desc=f"{arguments.minutes:g} minutes") as bar:
        while any(thread.is_alive() for thread in threads):
            time.sleep(2)
            bar.update(clients.counts["answered"] + clients.counts["aborted"] - bar.n)
            size = server.resident_bytes()
            if time.monotonic() < began + 15 * arguments.minutes:  # a quarter of the run
                early = max(early, size)
    deadline = time.monotonic() + 60
    while (left := _left(server)) and time.monotonic() < deadline:
        time.sleep(1)
    metrics = server.metrics()
    row = {
        "method": "compressed",
        "minutes": (time.monotonic() - began) / 60,
        **{key: clients.counts[key] for key in ("answered", "aborted", "tokens", "short")},
        "reference_share": clients.counts["agreed"] / max(clients.counts["tokens"], 1),
        "left": left,
        "preempted": metrics["vllm:num_preemptions_total"],
        "prefix_hit_share": metrics["vllm:prefix_cache_hits_total"]
        / max(metrics["vllm:prefix_cache_queries_total"], 1),
        "resident_bytes": size,
        "memory_growth": size / max(early, 1),
    }
    return row, clients.found


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
    keys = ("bases", "checkpoint", "preset", "rate", "rebuild_cost")
    settings = ServingConfig(**{key: getattr(arguments, key) for key in keys}, prefill=PREFILL)
    if arguments.checkpoint:
        has_plan = read_config(arguments.checkpoint).compressor.has_plan
        overrides = {"prefill": PREFILL, **({"exact_tokens": retention(settings)} if has_plan else {})}
        model = dynakv.attach(model, arguments.checkpoint, **overrides)
        return model, lambda: dynakv.DynaKVCache.from_model(model)
    plan = make_plan(Calibration.load(arguments.bases).for_model(model), preset_of(settings))
    return model, lambda: OjaKVCache(model, plan)


if __name__ == "__main__":
    cli.run(main)
