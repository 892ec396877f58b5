"""Processes to kill: a server that has torch imported and the shim preloaded forks one for each.

`Lab.start(fn, ...)` runs an importable function in a process of its own and returns a `Child`,
which can be killed at any moment; `Lab.run` waits for it. A job talks to the test by `say`. The
server imports torch and never works with it, so that it has no threads when it forks.
"""

import contextlib
import ctypes
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults import shim

PRELOAD = ("tests.faults.jobs", "tests.faults.scenarios", "tests.faults.rank_jobs")
_HEAD = struct.Struct("<I")
_PR_SET_PDEATHSIG = 1


@dataclass
class Child:
    """A running job. `said` are the values that it sent, `value` what it returned at last."""

    pid: int
    name: str
    log: Path
    said: list[Any] = field(default_factory=list)
    value: Any = None
    finished: bool = False
    failed: str = ""
    over: bool = False
    _fd: int = -1
    _pidfd: int = -1
    _data: bytes = b""

    def kill(self, number=signal.SIGKILL):
        """Send a signal, unless it has ended."""
        if not self.over and self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def stuck(self):
        """End one that hangs; its output, with the stack of each of its threads."""
        self.kill(signal.SIGABRT)
        if not self.listen(10):
            self.kill()
        return f"the last it said: {self.said[-1:]}\n{self.output()}"

    def listen(self, seconds, until=None):
        """Take in messages for so long, or until `until(message)` or the end of the process."""
        deadline = time.monotonic() + seconds
        while not self.over:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._fd], [], [], left)[0]:
                return False
            chunk = os.read(self._fd, 1 << 16)
            self._data += chunk
            if not chunk:
                self._bury()
            seen = False
            while (message := self._next()) is not None:
                kind, value = message
                if kind == "said":
                    self.said.append(value)
                    seen = seen or (until is not None and until(value))
                elif kind == "value":
                    self.value, self.finished = value, True
                else:
                    self.failed = value
            if seen:
                return True
        return until is None

    def wait(self, seconds=120.0):
        """Its value; raises with its traceback, or with the end of its output if it hung."""
        if not self.listen(seconds):
            raise AssertionError(f"{self.name} hung for {seconds} s\n{self.stuck()}")
        if self.failed:
            raise AssertionError(f"{self.name} failed\n{self.failed}\n{self.output()}")
        if not self.finished:
            raise AssertionError(f"{self.name} died\n{self.output()}")
        return self.value

    def _bury(self):
        """Its pipe closes a moment before it is dead: wait for that too."""
        os.close(self._fd)
        if self._pidfd >= 0:
            select.select([self._pidfd], [], [], 30)
            os.close(self._pidfd)
        self.over = True

    def output(self):
        return self.log.read_text(errors="replace")[-4000:] if self.log.exists() else ""

    def _next(self):
        if len(self._data) < _HEAD.size:
            return None
        (size,) = _HEAD.unpack_from(self._data)
        if len(self._data) < _HEAD.size + size:
            return None
        body = self._data[_HEAD.size : _HEAD.size + size]
        self._data = self._data[_HEAD.size + size :]
        return pickle.loads(body)


class Lab:
    """The server and its children. Use as a context; every child dies with it."""

    def __init__(self, folder):
        self._folder = Path(folder)
        self._count = 0
        self._lock = threading.Lock()
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        env = shim.environment() | {
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",
        }
        code = f"from tests.faults.lab import serve; serve({there.fileno()})"
        self._server = subprocess.Popen(
            [sys.executable, "-c", code], env=env, pass_fds=[there.fileno()], close_fds=True
        )
        there.close()
        self._socket = here

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._socket.close()
        try:
            self._server.wait(10)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()

    def start(self, fn, *args, **kwargs):
        """Fork a process that calls `fn`, a function of a module in `PRELOAD`."""
        with self._lock:
            self._count += 1
            log = self._folder / f"child-{self._count}.log"
            mine, theirs = os.pipe()
            try:
                body = pickle.dumps((fn.__module__, fn.__qualname__, args, kwargs, str(log)))
                socket.send_fds(self._socket, [_HEAD.pack(len(body)) + body], [theirs])
            finally:
                os.close(theirs)
            (pid,) = _HEAD.unpack(_exactly(self._socket, _HEAD.size))
            try:
                pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                pidfd = -1  # it has ended already
        return Child(pid, fn.__qualname__, log, _fd=mine, _pidfd=pidfd)

    def run(self, fn, *args, seconds=120.0, **kwargs):
        return self.start(fn, *args, **kwargs).wait(seconds)

    def ranks(self, fn, size, *args, **kwargs):
        """Start `fn(store, rank, size, ...)` once for each rank."""
        store = self._folder / f"store-{self._count}"
        return [self.start(fn, str(store), rank, size, *args, **kwargs) for rank in range(size)]

    def each(self, cases, run):
        """Call `run(case)` for each case, two at a time; the results in order."""
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(run, cases))


_out = -1


def say(value):
    """From inside a job: send a value to the test."""
    _send("said", value)


def _send(kind, value):
    body = pickle.dumps((kind, value))
    os.write(_out, _HEAD.pack(len(body)) + body)


def _exactly(connection, size):
    data = b""
    while len(data) < size:
        chunk = connection.recv(size - len(data))
        if not chunk:
            raise EOFError("the server has gone")
        data += chunk
    return data


def serve(fd):
    """The life of the server: fork a child for each request until the test closes the socket."""
    connection = socket.socket(fileno=fd)
    for name in PRELOAD:
        module = importlib.import_module(name)
        getattr(module, "warm_up", int)()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel
    while True:
        try:
            head, fds, _, _ = socket.recv_fds(connection, _HEAD.size, 1)
            if not head:
                os._exit(0)
            head += _exactly(connection, _HEAD.size - len(head)) if len(head) < _HEAD.size else b""
            body = _exactly(connection, _HEAD.unpack(head)[0])
        except (EOFError, OSError):
            os._exit(0)
        assert len(os.listdir("/proc/self/task")) == 1, "a thread would not survive the fork"
        pid = os.fork()
        if pid == 0:
            connection.close()
            _live(fds[0], body)
        os.close(fds[0])
        connection.sendall(_HEAD.pack(pid))


def _live(out, body):
    global _out
    _out = out
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        module, name, args, kwargs, log = pickle.loads(body)
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(target, 1)
        os.dup2(target, 2)
        fn = getattr(importlib.import_module(module), name)
        _send("value", fn(*args, **kwargs))
        code = 0
    except BaseException:
        _send("failed", traceback.format_exc())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
