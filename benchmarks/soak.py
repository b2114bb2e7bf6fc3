"""Compressed pages under clients that come and go, for as long as one likes: are all texts right, and does memory stay?

    .venv-vllm/bin/python -m benchmarks.soak --bases runs/demo-bases --rate 0.1 --minutes 60 --results results

Runs in the environment of `make test-vllm`. Clients ask for texts of many lengths, half of which begin alike, in memory
small enough that requests are preempted; some hang up in the middle. Each answer is compared with what transformers
generates through a cache of the same settings. Prompts see rebuilt states, so that a text depends on nothing but its tokens.
Where two tokens are nearly as likely the server may say either, and what follows is not compared.

Ends with status 1 where a text was wrong, a request was left, or memory grew.
"""

import argparse
import dataclasses
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import dynakv
from benchmarks.harness import count, write_results
from benchmarks.openai_server import COMPRESSED, Answer, Server, add_settings, settings_words
from dynakv.checkpoint import read_config
from lowrank_kv.hf.cache.lowrank_cache import LowRankCache
from lowrank_kv.hf.loading import load_model, load_tokenizer
from lowrank_kv.utils import cli
from lowrank_kv.utils.paths import demo_model, home
from lowrank_kv.utils.text_data import load_documents
from lowrank_kv_vllm.plans import retention
from lowrank_kv_vllm.settings import PRESETS, ServingConfig
from ojakv import Calibration, OjaKVCache, OjaKVConfig, make_plan

PREFILL = "reconstructed"
MARGIN = 1.0  # so wide that no page fills: a full one codes later tokens more coarsely, which no reference knows of
NEARLY = 1e-3  # logits: two tokens that differ by less may change places where sums are added in another order
GROWTH = 1.05  # of memory, from the first quarter of the run to its end, that is still called none
LENGTHS = (5, 700)


@dataclasses.dataclass
class Expected:
    """What a prompt is to be answered.

    Attributes:
        prompt, answer: token ids.
        first_doubt: the first place of the answer where another token is nearly as likely.
    """

    prompt: list[int]
    answer: list[int]
    first_doubt: int

    def is_wrong(self, found: list[int]) -> bool:
        certain = min(len(found), self.first_doubt)
        return found[:certain] != self.answer[:certain]


class Clients:
    """What all clients have seen so far."""

    def __init__(self, server: Server, expected: list[Expected], arguments: argparse.Namespace):
        self.server, self.expected, self.arguments = server, expected, arguments
        self.counts: Counter[str] = Counter()
        self.wrong: list[tuple[int, list[int]]] = []
        self._lock = threading.Lock()

    def run(self, seed: int, until: float) -> None:
        """One client."""
        chance = random.Random(seed)
        while time.monotonic() < until:
            number = chance.randrange(len(self.expected))
            expected, hangs_up = self.expected[number], chance.random() < self.arguments.abort_share
            tokens = chance.randint(1, len(expected.answer))
            enough = chance.randint(1, tokens)

            def is_enough(answer: Answer, enough: int = enough) -> bool:
                return len(answer.token_ids) >= enough

            answer = self.server.complete(
                expected.prompt, max_tokens=tokens, ignore_eos=True, until=is_enough if hangs_up else None
            )
            with self._lock:
                self.counts["aborted" if hangs_up else "answered"] += 1
                self.counts["tokens"] += len(answer.token_ids)
                is_short = not hangs_up and len(answer.token_ids) != tokens
                if is_short or expected.is_wrong(answer.token_ids):
                    self.wrong.append((number, answer.token_ids))
            time.sleep(chance.random() * 0.2)


def main(argv: Sequence[str]) -> None:
    arguments = _parser().parse_args(argv)
    arguments.prefill = PREFILL
    expected = _expected(arguments)
    with tempfile.TemporaryDirectory() as directory:
        words = [
            *(*COMPRESSED, "--model", os.path.expanduser(arguments.model), "--dtype", "float32", "--enforce-eager"),
            *("--kv-cache-memory-bytes", str(arguments.memory << 20), "--disable-uvicorn-access-log"),
            *("--max-model-len", str(LENGTHS[1] + arguments.tokens), "--max-num-seqs", str(arguments.clients)),
            *settings_words(arguments),
            *("--page-margin", str(MARGIN)),
        ]
        with Server(words, Path(directory, "log"), {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1")}) as server:
            row = _soaked(server, expected, arguments)
    print("  ".join(f"{key} {value}" for key, value in row.items()))
    if arguments.results:
        write_results(arguments.results, "soak", {**vars(arguments), "device": "cpu"}, [row])
    if row["wrong"] or row["left"] or row["memory_growth"] > GROWTH:
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


def _soaked(server: Server, expected: list[Expected], arguments: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()
    until = began + 60 * arguments.minutes
    clients = Clients(server, expected, arguments)
    threads = [threading.Thread(target=clients.run, args=(arguments.seed + i, until)) for i in range(arguments.clients)]
    for thread in threads:
        thread.start()
    early, size = 0, server.resident_bytes()
    while any(thread.is_alive() for thread in threads):
        time.sleep(2)
        size = server.resident_bytes()
        if time.monotonic() < began + 15 * arguments.minutes:  # a quarter of the run
            early = max(early, size)
    deadline = time.monotonic() + 60
    while (left := _left(server)) and time.monotonic() < deadline:
        time.sleep(1)
    metrics = server.metrics()
    for number, found in clients.wrong:
        print(f"wrong: prompt {number} of {len(expected[number].prompt)} tokens: {found} for {expected[number].answer}")
    return {
        "method": "compressed",
        "minutes": (time.monotonic() - began) / 60,
        **{key: clients.counts[key] for key in ("answered", "aborted", "tokens")},
        "wrong": len(clients.wrong),
        "left": left,
        "preempted": metrics["vllm:num_preemptions_total"],
        "prefix_hit_share": metrics["vllm:prefix_cache_hits_total"]
        / max(metrics["vllm:prefix_cache_queries_total"], 1),
        "compared_share": sum(each.first_doubt for each in expected) / sum(len(each.answer) for each in expected),
        "resident_bytes": size,
        "memory_growth": size / max(early, 1),
    }


def _left(server: Server) -> float:
    """Requests that still run or wait."""
    metrics = server.metrics()
    return metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"]


@torch.no_grad()
def _expected(arguments: argparse.Namespace) -> list[Expected]:
    """Prompts of many lengths, every other of which begins as one before it, and what transformers answers."""
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
    model, new_cache = _compressed(model, arguments)
    return [_answered(model, new_cache(), prompt, arguments.tokens) for prompt in prompts]


def _compressed(model: PreTrainedModel, arguments: argparse.Namespace) -> tuple[PreTrainedModel, Any]:
    """The model, and a maker of caches that do what the server does."""
    settings = {key: getattr(arguments, key) for key in ("bases", "checkpoint", "preset", "rate", "prefill")}
    kept = retention(ServingConfig(**settings))
    if arguments.checkpoint:
        has_plan = read_config(arguments.checkpoint).compressor.has_plan
        overrides = {"prefill": PREFILL, **({"exact_tokens": kept} if has_plan else {})}
        model = dynakv.attach(model, arguments.checkpoint, **overrides)
        return model, lambda: dynakv.DynaKVCache.from_model(model)
    rate = {} if arguments.rate is None else {"rate": arguments.rate}
    config = OjaKVConfig.preset(arguments.preset or PRESETS[-1], **rate, **kept, prefill=PREFILL)
    plan = make_plan(Calibration.load(arguments.bases).for_model(model), config)
    return model, lambda: OjaKVCache(model, plan)


def _answered(model: PreTrainedModel, cache: LowRankCache, prompt: list[int], tokens: int) -> Expected:
    answer, doubts = [], []
    ids_1T = torch.tensor([prompt])
    for place in range(tokens):
        logits_V = model(input_ids=ids_1T, past_key_values=cache).logits[0, -1]
        best_2 = logits_V.topk(2)
        answer.append(int(best_2.indices[0]))
        if best_2.values[0] - best_2.values[1] < NEARLY:
            doubts.append(place)
        ids_1T = torch.tensor([answer[-1:]])
    return Expected(prompt, answer, min(doubts, default=tokens))


if __name__ == "__main__":
    cli.run(main)
