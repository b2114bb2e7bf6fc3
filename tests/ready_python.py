"""Python processes that find torch and transformers imported.

These imports take four to five seconds of each process, longer than most of what tests start processes for. A server pays
for them once: it imports them, and nothing of this project, and forks for every process that is asked for. :func:`program`
is called as `python` is, with a script, `-m` or `-c`. The fork takes over its arguments, environment, directory and standard
streams, imports the project anew, and ends as an interpreter does; the program ends with the same status or signal.

`test_wheel.py` and `test_launch.py` start interpreters of their own, which import everything themselves.
"""

import array
import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

# `datasets` starts a thread, so that forks import it themselves.
IMPORTED = (
    "torch.utils.tensorboard",
    "torch.distributed.run",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "accelerate.commands.launch",
    "deepspeed",
)
HEAD = struct.Struct("=i")
RELAYED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@functools.cache
def program() -> str:
    """The path of a program that starts ready processes; its server ends with this process."""
    # Elsewhere the libraries that torch loads forbid forks.
    if sys.platform != "linux":
        return sys.executable
    server = Server()
    atexit.register(server.close)
    return server.program


class Server:
    """A server and its `program`.

    Args:
        prefix: a command that starts the server, such as one that gives it a file system of its own.
    """

    def __init__(self, prefix: tuple[str, ...] = ()):
        directory = Path(tempfile.mkdtemp(prefix="ready-"))  # a socket's path must be short
        self.program = str(directory / "python")
        client = [sys.executable, "-IS", __file__, "call", str(directory / "socket")]
        Path(self.program).write_text(f'#!/bin/sh\nexec {shlex.join(client)} "$@"\n')
        Path(self.program).chmod(0o755)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.process = subprocess.Popen(
            [*prefix, sys.executable, __file__, "serve", str(directory / "socket")],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert b"ready\n" in iter(self.process.stdout.readline, b""), "the server did not start"

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def serve(path: str) -> dict:
    """Answer requests until standard input ends, which ends the process. In a fork it returns the request."""
    found_in = sys.path.copy()
    for name in IMPORTED:
        with contextlib.suppress(ImportError):  # an extra that is not installed
            importlib.import_module(name)
    sys.path[:] = found_in  # which an old setuptools adds to when it is imported
    gc.freeze()  # forks share the pages of what is not looked at
    wakes, woken = socket.socketpair()
    for each in (wakes, woken):
        each.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken.fileno())
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    print("ready", flush=True)
    callers: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        for each in (listener, wakes, sys.stdin):
            selector.register(each, selectors.EVENT_READ)
        while True:
            for ready in [key.fileobj for key, _ in selector.select()]:
                if ready is sys.stdin:
                    for pid in callers:
                        os.kill(pid, signal.SIGKILL)
                    shutil.rmtree(Path(path).parent)
                    sys.exit()
                elif ready is listener:
                    caller, _ = listener.accept()
                    request, streams = received(caller)
                    pid = os.fork()
                    if pid == 0:
                        signal.set_wakeup_fd(-1)
                        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                        for each in (listener, wakes, woken, caller, *callers.values()):
                            each.close()
                        for number, stream in enumerate(streams):
                            os.dup2(stream, number)
                            os.close(stream)
                        return request
                    for stream in streams:
                        os.close(stream)
                    caller.sendall(HEAD.pack(pid))
                    callers[pid] = caller
                    selector.register(caller, selectors.EVENT_READ)
                elif ready is wakes:
                    wakes.recv(4096)
                    for pid, status in ended():
                        caller = callers.pop(pid)
                        selector.unregister(caller)
                        with caller, contextlib.suppress(OSError):  # a caller that was killed
                            caller.sendall(HEAD.pack(os.waitstatus_to_exitcode(status)))
                else:  # whoever called was killed
                    for pid in [pid for pid, caller in callers.items() if caller is ready]:
                        os.kill(pid, signal.SIGKILL)


def ended() -> list[tuple[int, int]]:
    """(process, status) of all that have ended since."""
    found = []
    with contextlib.suppress(ChildProcessError):
        while (one := os.waitpid(-1, os.WNOHANG))[0]:
            found.append(one)
    return found


def received(caller: socket.socket) -> tuple[dict, list[int]]:
    """A request, and the standard streams that came with it."""
    head, streams, *_ = socket.recv_fds(caller, HEAD.size, 3)
    [size], text = HEAD.unpack(head), b""
    while len(text) < size:
        text += caller.recv(size - len(text))
    return json.loads(text), streams


def execute(arguments: list[str], environment: dict[str, str], directory: str) -> None:
    """Run what an interpreter of these arguments would run."""
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if arguments[0] == "-u":
        sys.stdout.reconfigure(write_through=True)
        del arguments[0]
    sys.executable = environment.get("PYTHON_EXEC", sys.executable)
    given = [os.path.abspath(each) for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each]
    first, *rest = arguments
    if first in ("-m", "-c"):
        what, *rest = rest
        sys.path[:1] = [directory if first == "-m" else "", *given]
    else:
        sys.path[:1] = [os.path.dirname(os.path.abspath(first)), *given]
    sys.argv = [first, *rest]
    if first == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    elif first == "-c":
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(first, run_name="__main__")


def call(path: str, arguments: list[str]) -> int:
    """Ask the server for a process and wait for it; returns its status."""
    request = json.dumps({"arguments": arguments, "environment": dict(os.environ), "directory": os.getcwd()}).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        streams = array.array("i", [0, 1, 2])
        server.sendmsg([HEAD.pack(len(request))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
        server.sendall(request)
        [pid] = HEAD.unpack(server.recv(HEAD.size))
        for number in RELAYED:
            signal.signal(number, lambda number, _: os.kill(pid, number))
        [status] = HEAD.unpack(server.recv(HEAD.size))
    if status < 0:
        if -status in RELAYED:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    role, where, *words = sys.argv[1:]
    if role == "call":
        sys.exit(call(where, words))
    execute(**serve(where))
