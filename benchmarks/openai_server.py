"""An OpenAI-compatible server as a process, and requests to it: what a benchmark and a soak of serving share.

Requests carry token ids, so that no tokenizer stands between two servers' texts.
"""

import argparse
import contextlib
import dataclasses
import http.client
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from lowrank_kv.utils.errors import UserError

STOCK = ("-m", "vllm.entrypoints.openai.api_server")  # vLLM's own command asks for a distribution that is not the CPU's
COMPRESSED = ("-m", "lowrank_kv_cli", "serve")
_POLL = 0.25  # seconds
_METRIC = re.compile(r"^([\w:]+)(?:\{(.*)\})? (\S+)$", re.M)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Arguments that say which compressed caches a server has."""
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--bases", metavar="DIR", help="a calibration with `read_gradients`")
    which.add_argument("--checkpoint", metavar="DIR", help="a DynaKV compressor")
    parser.add_argument("--preset", help="with --bases [default: the server's]")
    parser.add_argument("--rate", type=float, help="with --bases: bytes over those in 16 bits [default: the preset's]")
    parser.add_argument("--rebuild-cost", type=float, help="with --bases, in bits [default: the preset's]")
    parser.add_argument("--prefill", help="what a prompt's tokens see of each other [default: the server's]")


def settings_words(arguments: argparse.Namespace) -> list[str]:
    """The words of `lowrank-kv serve` for the arguments of :func:`add_settings`."""
    keys = "bases", "checkpoint", "preset", "rate", "rebuild-cost", "prefill"
    given = {key: getattr(arguments, key.replace("-", "_")) for key in keys}
    return [word for key, value in given.items() if value is not None for word in (f"--{key}", str(value))]


class Answer:
    """What came back of one request.

    Attributes:
        text: all of it.
        token_ids: of the text.
        logprobs: the log-probability of each, in nats, where the request asks for them.
        started, first, last: when it was sent, and when its first and last tokens came, in seconds of one clock.
        finish_reason: as the server gives it; None where the request was aborted.
    """

    def __init__(self) -> None:
        self.text, self.token_ids, self.logprobs = "", [], []
        self.started = time.perf_counter()
        self.first = self.last = self.started
        self.finish_reason: str | None = None

    @property
    def seconds_to_first(self) -> float:
        return self.first - self.started

    @property
    def tokens_per_second(self) -> float:
        """After the first token; nan where all came at once, as to a client that was too busy to read."""
        seconds = self.last - self.first
        return (len(self.token_ids) - 1) / seconds if seconds else math.nan


@dataclasses.dataclass
class Server:
    """A server in a process of its own, from ``with`` on.

    Attributes:
        words: arguments of Python that start it, without the port.
        log: file for what it prints.
        environment: variables beside this process's.
        seconds_to_start: it has to answer by then.

    Raises:
        UserError: it ends, or does not answer in time; the message holds the end of its log.
    """

    words: Sequence[str]
    log: Path
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    seconds_to_start: float = 900.0

    def __enter__(self) -> "Server":
        self.port = _free_port()
        words = [sys.executable, *self.words, "--port", str(self.port), "--host", "127.0.0.1"]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                words,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )
        with contextlib.ExitStack() as stack:
            stack.callback(self.stop)  # also where an interrupt ends the waiting: nobody calls __exit__ then
            self._wait()
            stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End it and the processes that it started."""
        for number, seconds in ((signal.SIGINT, 30), (signal.SIGKILL, 10)):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(seconds)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        self.process.wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + self.seconds_to_start
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise UserError(f"the server ended with status {self.process.returncode}: {self.tail()}")
            try:
                if self._get("/health")[0] == http.client.OK:
                    return
            except OSError:
                pass  # it does not listen yet
            time.sleep(_POLL)
        raise UserError(f"the server did not answer within {self.seconds_to_start:.0f} s: {self.tail()}")

    def tail(self, characters: int = 2000) -> str:
        """The end of its log."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-characters:]

    def _get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode("utf-8")
        finally:
            connection.close()

    def metrics(self) -> dict[str, float]:
        """Its metrics by name; those of one name with several labels are added.

        Raises:
            UserError: the server answers with an error.
        """
        status, text = self._get("/metrics")
        if status != http.client.OK:
            raise UserError(f"the server answers {status} to `/metrics`: {text}")
        found: dict[str, float] = {}
        for name, _, value in _METRIC.findall(text):
            found[name] = found.get(name, 0.0) + float(value)
        return found

    def labels(self, metric: str) -> dict[str, str]:
        """The labels of one metric, which is how vLLM says what it was configured with."""
        for name, labels, _ in _METRIC.findall(self._get("/metrics")[1]):
            if name == metric:
                return dict(_LABEL.findall(labels))
        raise KeyError(metric)

    def token_capacity(self) -> int:
        """Tokens that its pages hold."""
        labels = self.labels("vllm:cache_config_info")
        return int(labels["num_gpu_blocks"]) * int(labels["block_size"])

    def resident_bytes(self) -> int:
        """Memory of all its processes."""
        return sum(_resident_bytes(process) for process in _processes_of(self.process.pid))

    def complete(self, prompt: list[int], *, until: Callable[[Answer], bool] | None = None, **options: Any) -> Answer:
        """Send a prompt and read the answer as it comes.

        Args:
            until: asked after each piece; the request is aborted where it says so.
            options: further fields of a completion request, ``max_tokens`` among them.

        Raises:
            UserError: the server refuses it, answers with an error, or breaks off.
        """
        fields = {"prompt": prompt, "temperature": 0, "stream": True, "return_token_ids": True, **options}
        connection, answer = http.client.HTTPConnection("127.0.0.1", self.port, timeout=1800), Answer()
        try:
            connection.request("POST", "/v1/completions", json.dumps(fields), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise UserError(f"the server answers {response.status}: {response.read().decode('utf-8', 'replace')}")
            for line in response:
                if line.startswith(b"data: {"):
                    _add(answer, json.loads(line[len("data: ") :]))
                    if until is not None and until(answer):
                        break
        except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
            raise UserError(f"the server broke off after {len(answer.token_ids)} tokens: {error!r}") from error
        finally:
            connection.close()
        return answer

    def complete_all(self, prompts: Iterable[list[int]], **options: Any) -> list[Answer]:
        """Send all at once; the answers in their order."""
        prompts = list(prompts)
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.complete(prompt, **options), prompts))


class Watch:
    """The largest value that a server's metrics have while ``with`` lasts. It looks often at first, since a small model's
    requests may end soon, then several times a second, since each look takes the server's time. A look that fails ends
    it with that error: nobody knows then what the largest value was."""

    def __init__(self, server: Server, *names: str):
        self.largest = dict.fromkeys(names, 0.0)
        self._server, self._done = server, threading.Event()
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> "Watch":
        self._looking: Future[None] = self._pool.submit(self._look)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._pool.shutdown()
        if error is None:
            self._looking.result()

    def _look(self) -> None:
        pause = _POLL / 32
        while True:
            found = self._server.metrics()
            for name in self.largest:
                self.largest[name] = max(self.largest[name], found[name])
            if self._done.wait(pause):
                return
            pause = min(2 * pause, _POLL)


def _add(answer: Answer, piece: Mapping[str, Any]) -> None:
    if "error" in piece:
        raise UserError(f"the server answers with an error: {piece['error']}")
    for choice in piece["choices"]:
        token_ids = choice.get("token_ids") or []
        answer.text += choice["text"]
        answer.token_ids += token_ids
        answer.logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or []
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
        if token_ids:
            answer.last = time.perf_counter()
            if len(answer.token_ids) == len(token_ids):
                answer.first = answer.last


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _processes_of(group: int) -> list[int]:
    """Processes of a session."""
    found = []
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit():
            continue
        try:
            fields = (directory / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        if int(fields[3]) == group:
            found.append(int(directory.name))
    return found


def _resident_bytes(process: int) -> int:
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except OSError:
        return 0  # it has just ended
    return pages * os.sysconf("SC_PAGE_SIZE")
