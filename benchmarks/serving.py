"""Compressed pages beside stock vLLM in the same memory: tokens per second, time to first token, requests at once.

    .venv-vllm/bin/python -m benchmarks.serving --bases runs/demo-bases --rate 0.1 --results results

Runs in the environment of `make test-vllm`. All OpenAI-compatible servers are up for the whole run, with the same memory
for pages, and are given the same requests in turn, while the others wait; who comes first alternates from round to round:

- many requests at once (64 prompts of 512 tokens, 128 new tokens each), in memory small enough that stock preempts;
- one request of 2,048 tokens, and its decoding;
- four prompts of 512 tokens at once, for which every server has room, until each has its first token. How many of them
  the first step reads is luck, and steps of many tokens can be slower: `rounds` of the record shows both kinds, and
  `--step-tokens` fixes the schedule for all servers.

Prompts are distinct text and no prefix is cached, so that nobody gains from another's request. Times are medians over the
rounds. `--stock-cache-dtypes fp8` adds a stock server whose pages hold one byte a number; the record has each server's ratio
to each stock server.
"""

import argparse
import contextlib
import json
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import count, in_turns, write_results
from benchmarks.openai_server import COMPRESSED, STOCK, Answer, Server, Watch, add_settings, settings_words
from lowrank_kv.hf.loading import load_shape, load_tokenizer
from lowrank_kv.utils import cli
from lowrank_kv.utils.errors import UserError
from lowrank_kv.utils.paths import demo_model, home
from lowrank_kv.utils.text_data import load_documents
from lowrank_kv_vllm.plans import preset_of
from lowrank_kv_vllm.settings import ServingConfig

SERVED, BASELINE = "compressed", "stock"
RUNNING, PREEMPTED = "vllm:num_requests_running", "vllm:num_preemptions_total"
_BITS = {"float32": 32, "bfloat16": 16}


def main(argv: Sequence[str]) -> None:
    arguments = _parser().parse_args(argv)
    prompts, shape = _Prompts(arguments), load_shape(arguments.model)
    environment = {"VLLM_LOGGING_LEVEL": "INFO", "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1")}
    with contextlib.ExitStack() as stack:
        logs = Path(arguments.logs or stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {
            name: stack.enter_context(Server(words, logs / f"{name}.log", environment))
            for name, words in _commands(arguments).items()
        }
        rows = _measured(servers, prompts, arguments)
    for row in rows:
        print(_LINE.format(**row))
    if arguments.results:
        write_results(arguments.results, "serving", {**vars(arguments), "device": "cpu"}, rows, model=shape)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(demo_model()), metavar="ID", help="[default: the demo's]")
    add_settings(parser)
    parser.add_argument("--dtype", choices=_BITS, default="bfloat16", help="of all servers [default %(default)s]")
    parser.add_argument(
        "--stock-cache-dtypes", type=lambda text: text.split(","), default=[], metavar="DTYPE,…",
        help="further stock servers, whose --kv-cache-dtype is one of these, e.g. fp8",
    )  # fmt: skip
    parser.add_argument(
        "--memory", type=count, default=54, metavar="MIB", help="for pages, of each server [default %(default)s]"
    )
    parser.add_argument("--requests", type=count, default=64, help="at once [default %(default)s]")
    parser.add_argument("--prompt", type=count, default=512, help="tokens of each one's prompt [default %(default)s]")
    parser.add_argument("--tokens", type=count, default=128, help="new tokens of each [default %(default)s]")
    parser.add_argument("--context", type=count, default=2048, help="tokens of the single prompt [default %(default)s]")
    parser.add_argument(
        "--batch", type=count, default=4, help="prompts whose first tokens are timed [default %(default)s]"
    )
    parser.add_argument("--repeats", type=count, default=3, help="rounds [default %(default)s]")
    parser.add_argument(
        "--step-tokens", type=count, metavar="TOKENS",
        help="a step reads at most so many: with as many as --prompt has, all servers read prompts one behind another "
        "[default: vLLM's]",
    )  # fmt: skip
    parser.add_argument("--compile", action="store_true", help="let vLLM compile the models, as it does by default")
    parser.add_argument(
        "--text", default=str(home() / "text" / "messages-1790-1946.jsonl"), metavar="FILE",
        help="of prompts [default: one of the demo's]",
    )  # fmt: skip
    parser.add_argument("--logs", type=cli.output_directory, metavar="DIR", help="where the servers' logs are kept")
    parser.add_argument(
        "--results", type=cli.output_directory, metavar="DIR", help="where to write the run record, e.g. results"
    )
    return parser


def _commands(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """The words that start each server."""
    longest = max(arguments.prompt, arguments.context) + arguments.tokens
    shared = [
        *("--model", os.path.expanduser(arguments.model), "--dtype", arguments.dtype),
        *("--kv-cache-memory-bytes", str(arguments.memory << 20), "--max-model-len", str(longest)),
        *("--max-num-seqs", str(arguments.requests), "--no-enable-prefix-caching", "--disable-uvicorn-access-log"),
        *([] if arguments.step_tokens is None else ["--max-num-batched-tokens", str(arguments.step_tokens)]),
        *([] if arguments.compile else ["--enforce-eager"]),
    ]
    found = {BASELINE: [*STOCK, *shared]}
    for dtype in arguments.stock_cache_dtypes:
        found[f"{BASELINE} {dtype}"] = [*STOCK, *shared, "--kv-cache-dtype", dtype]
    return {**found, SERVED: [*COMPRESSED, *shared, *settings_words(arguments)]}


class _Prompts:
    """Distinct pieces of a text, as token ids, that are handed out one behind another."""

    def __init__(self, arguments: argparse.Namespace):
        tokenizer = load_tokenizer(os.path.expanduser(arguments.model))
        once = arguments.requests * arguments.prompt + arguments.context + arguments.batch * arguments.prompt
        needed, self._ids = once * (1 + arguments.repeats), []
        for document in load_documents(arguments.text, subset=None, split="train", text_field="text"):
            self._ids += tokenizer(document["text"])["input_ids"]
            if len(self._ids) >= needed:
                return
        raise UserError(f"`--text` has {len(self._ids):,} tokens, and the requests need {needed:,}; name a longer one")

    def take(self, requests: int, length: int) -> list[list[int]]:
        """So many prompts of so many tokens."""
        found = [self._ids[i * length : (i + 1) * length] for i in range(requests)]
        del self._ids[: requests * length]
        return found


def _measured(servers: dict[str, Server], prompts: _Prompts, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    found: dict[str, dict[str, list[float]]] = {name: {} for name in servers}

    def each(turn: int, call: Callable[[Server], dict[str, float]]) -> None:
        for name in in_turns(servers, turn):
            for key, value in call(servers[name]).items():
                found[name].setdefault(key, []).append(value)

    first = prompts.take(arguments.batch, arguments.prompt)
    for server in servers.values():
        _first_tokens(server, first)  # not timed: the first steps allocate
    for turn in range(arguments.repeats):
        one, few = prompts.take(1, arguments.context), prompts.take(arguments.batch, arguments.prompt)
        many = prompts.take(arguments.requests, arguments.prompt)
        each(turn, lambda server, one=one: _single(server, one[0], arguments.tokens))
        each(turn, lambda server, few=few: _first_tokens(server, few))
        each(turn, lambda server, many=many: _crowd(server, many, arguments.tokens))
        latest = {name: {key: values[-1] for key, values in own.items()} for name, own in found.items()}
        print(json.dumps(latest), flush=True)
    capacity = {name: server.token_capacity() for name, server in servers.items()}
    return [_row(name, found, capacity, arguments) for name in servers]


def _single(server: Server, prompt: list[int], tokens: int) -> dict[str, float]:
    answer = server.complete(prompt, max_tokens=tokens, ignore_eos=True)
    _check([answer], tokens)
    if math.isnan(answer.tokens_per_second):
        raise UserError(
            f"all {tokens} tokens of an answer came at once, from which no speed follows; give more --tokens"
        )
    return {"single_tokens_per_second": answer.tokens_per_second, "single_seconds_to_first": answer.seconds_to_first}


def _first_tokens(server: Server, prompts: list[list[int]]) -> dict[str, float]:
    answers = server.complete_all(prompts, max_tokens=1, ignore_eos=True)
    _check(answers, 1)
    return {"batch_seconds_to_all_first": max(answer.seconds_to_first for answer in answers)}


def _crowd(server: Server, prompts: list[list[int]], tokens: int) -> dict[str, float]:
    before = server.metrics()[PREEMPTED]
    with Watch(server, RUNNING) as watch:
        answers = server.complete_all(prompts, max_tokens=tokens, ignore_eos=True)
    _check(answers, tokens)
    if not watch.largest[RUNNING]:
        raise UserError(
            f"all {len(prompts)} requests had ended before the server was asked how many run; give more --tokens"
        )
    seconds = max(answer.last for answer in answers) - min(answer.started for answer in answers)
    return {
        "crowd_tokens_per_second": tokens * len(answers) / seconds,
        "crowd_seconds_to_first": statistics.fmean(answer.seconds_to_first for answer in answers),
        "peak_requests": watch.largest[RUNNING],
        "preemptions": server.metrics()[PREEMPTED] - before,
    }


def _check(answers: list[Answer], tokens: int) -> None:
    wrong = [len(answer.token_ids) for answer in answers if len(answer.token_ids) != tokens]
    if wrong:
        raise UserError(f"a server answered with {wrong[0]} tokens where {tokens} were asked for; see its log (--logs)")


def _row(
    name: str, found: dict[str, dict[str, list[float]]], capacity: dict[str, int], arguments: argparse.Namespace
) -> dict[str, Any]:
    medians = {each: {key: statistics.median(values) for key, values in own.items()} for each, own in found.items()}
    row: dict[str, Any] = {"method": name, "token_capacity": capacity[name], **medians[name]}
    row["rounds"] = found[name]
    for baseline in (each for each in medians if each != SERVED):
        for key in (*medians[name], "token_capacity"):
            stock = capacity[baseline] if key == "token_capacity" else medians[baseline][key]
            if stock and key != "preemptions":
                row[f"{key}_to_{baseline.replace(' ', '_')}"] = row[key] / stock
    if name == SERVED and (rate := _byte_rate(arguments)) is not None:
        row["byte_rate"] = rate
        for key in ("token_capacity", "peak_requests"):  # of what equal bytes leave to expect
            row[f"{key}_of_expected"] = row[f"{key}_to_stock"] * rate
    return row


def _byte_rate(arguments: argparse.Namespace) -> float | None:
    """Bytes that the rate asks for, as a share of an uncompressed token's; None with a checkpoint, which is given no rate.

    A plan's rate is of bytes in 16 bits. That of `static-joint-pf` is of coefficients, stored in the model's dtype.
    """
    if arguments.bases is None:
        return None
    config = preset_of(ServingConfig(bases=arguments.bases, preset=arguments.preset, rate=arguments.rate))
    return config.rate * (16 / _BITS[arguments.dtype] if config.has_plan else 1)


_LINE = (
    "{method:>16}  many: {crowd_tokens_per_second:.1f} tokens/s ({crowd_tokens_per_second_to_stock:.2f}×), "
    "{peak_requests:.0f} at once ({peak_requests_to_stock:.1f}×), {preemptions:.0f} preempted; "
    "one: {single_tokens_per_second:.1f} tokens/s ({single_tokens_per_second_to_stock:.2f}×), "
    "first after {single_seconds_to_first:.2f} s ({single_seconds_to_first_to_stock:.2f}×); "
    "several: all first after {batch_seconds_to_all_first:.2f} s ({batch_seconds_to_all_first_to_stock:.2f}×); "
    "room for {token_capacity:,} tokens ({token_capacity_to_stock:.1f}×)"
)


if __name__ == "__main__":
    cli.run(main)
