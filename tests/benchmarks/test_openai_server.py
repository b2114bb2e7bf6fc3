"""A server that does not start is not left running."""

import pytest

from benchmarks.openai_server import Server
from lowrank_kv.utils.errors import UserError


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
