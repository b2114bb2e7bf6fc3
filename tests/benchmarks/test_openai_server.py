"""A server that does not start is not left running, and what goes wrong while it is asked is told."""

import contextlib
import math
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from benchmarks.openai_server import Server, Watch
from lowrank_kv.utils.errors import UserError

PIECE = b'data: {"choices": [{"text": "a", "token_ids": [1], "finish_reason": null}]}\n\n'
RUNNING = "vllm:num_requests_running"


def interrupted(server, path):
    raise KeyboardInterrupt


def never(server, path):
    raise ConnectionRefusedError


@pytest.mark.parametrize(("answer", "error"), [(interrupted, KeyboardInterrupt), (never, UserError)])
def test_waiting_that_ends_ends_the_server(tmp_path, monkeypatch, answer, error):
    monkeypatch.setattr(Server, "_get", answer)
    server = Server(("-c", "import time; time.sleep(300)"), tmp_path / "logs" / "log", seconds_to_start=0.5)
    with pytest.raises(error), server:
        raise AssertionError("nobody answered")
    assert server.process.poll() is not None


@contextlib.contextmanager
def answering(*, status: int = 200, body: bytes = b"", length: int | None = None):
    """A server in this process that answers everything alike; one that names a larger `length` breaks off."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):  # noqa: N802 - http.server's names
            self.send_response(status)
            self.send_header("Content-Length", str(len(body) if length is None else length))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self):  # noqa: N802
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def log_message(self, *_):
            pass

    found = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=found.serve_forever, args=(0.01,))
    thread.start()
    server = Server((), None)
    server.port = found.server_port
    try:
        yield server
    finally:
        found.shutdown()
        thread.join()
        found.server_close()


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"status": 500, "body": b"no room"}, "the server answers 500: no room"),
        ({"body": b'data: {"error": "no room"}\n'}, "the server answers with an error: no room"),
        ({"body": PIECE + b'data: {"choi\n'}, "the server broke off after 1 tokens: JSONDecodeError"),
    ],
)
def test_an_answer_that_is_none_says_why(answers, message):
    with answering(**answers) as server, pytest.raises(UserError, match=message):
        server.complete([1], max_tokens=2)


def test_tokens_that_came_at_once_have_no_speed():
    with answering(body=PIECE) as server:
        assert math.isnan(server.complete([1], max_tokens=1).tokens_per_second)


def test_a_server_that_is_gone_broke_off():
    with answering(body=PIECE) as server:
        assert server.complete([1], max_tokens=1).token_ids == [1]
    with pytest.raises(UserError, match="the server broke off after 0 tokens: ConnectionRefusedError"):
        server.complete([1], max_tokens=1)


def test_a_watch_sees_the_largest_value():
    with answering(body=f'{RUNNING}{{engine="0"}} 3.0\n'.encode()) as server:
        with Watch(server, RUNNING) as watch:
            pass
        assert watch.largest == {RUNNING: 3.0}


def test_a_watch_that_cannot_look_says_so():
    """It would otherwise keep what it saw before, as if that had been the largest."""
    with answering(status=500, body=b"busy") as server:
        with pytest.raises(UserError, match="the server answers 500 to `/metrics`: busy"), Watch(server, RUNNING):
            pass
        with pytest.raises(KeyError, match="what ended it"), Watch(server, RUNNING):
            raise KeyError("what ended it")
    with pytest.raises(ConnectionRefusedError), Watch(server, RUNNING):
        pass
