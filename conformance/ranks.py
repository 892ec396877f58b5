"""A pool of rank processes: started once, each call sent to as many of them as it needs.

`RankPool.run(fn, n, *args)` runs an importable function on `n` ranks that share a fresh process
group and returns their results in rank order. A rank that raises, dies or hangs is reported with
its traceback within the time limit; the others are freed, and the next call finds a whole pool.
This module moves functions and results between processes; it knows nothing of checkpoints.
What a rank does between two messages is `conformance/rank_worker.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from conformance import rank_worker

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

T = TypeVar("T")
Kind = Literal["raised", "died", "hung", "waiting"]
_ORDER: dict[str, int] = {"raised": 0, "died": 0, "hung": 1, "waiting": 2}
_TAIL_LINES = 15


@dataclass(frozen=True, slots=True)
class RankFailure:
    """What became of one rank that gave no result.

    `waiting` is a rank that was still inside a collective when the time was over: as a rule the
    victim of another rank. `error` is the exception itself where it could be sent.
    """

    rank: int
    kind: Kind
    summary: str
    traceback: str = ""
    output: str = ""
    error: BaseException | None = None

    def __str__(self) -> str:
        text = f"rank {self.rank} {self.kind}: {self.summary}"
        if self.traceback:
            text += "\n" + self.traceback.rstrip()
        if self.output:
            text += "\n--- the end of its output\n" + self.output.rstrip()
        return text


class RanksFailed(RuntimeError):
    """At least one rank failed; `failures` begins with the first cause."""

    def __init__(self, name: str, world_size: int, failures: Sequence[RankFailure]) -> None:
        self.failures = tuple(failures)
        self.first = self.failures[0]
        head = f"{name} on {world_size} ranks: {len(self.failures)} failed, first cause first"
        shown = [str(self.first)]
        # The victims of one cause say the same thing many times over: one line for each.
        shown += [f"rank {f.rank} {f.kind}: {f.summary}" for f in self.failures[1:]]
        super().__init__("\n".join([head, *shown]))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank returned (`value`), or why it did not (`failure`)."""

    rank: int
    value: Any = None
    failure: RankFailure | None = None


# torch keeps groups of finished calls alive, each with threads that wake a hundred times a second;
# a process that has gathered this many is replaced, which costs less.
_MANY_THREADS = 64
# Seconds for all processes of a call to start; a busy machine imports torch slowly.
_START_LIMIT = 120.0


def _threads_of(process: BaseProcess) -> int:
    try:
        return len(os.listdir(f"/proc/{process.pid}/task"))
    except OSError:
        return 0


@dataclass(slots=True)
class _Worker:
    process: BaseProcess
    connection: Connection
    life: Connection
    log: Path
    log_start: int = 0


class RankPool:
    """Up to `size` rank processes, started when first needed and kept until `close`.

    `start_method="forkserver"` imports torch once for all ranks; `"spawn"` is for accelerators
    whose runtimes do not survive a fork. `backend` is what `init_process_group` gets. Each call
    has a process group of its own, and ranks run torch with `threads` threads. After a rank has
    failed, its peers have `grace` seconds to end by themselves.
    """

    def __init__(
        self,
        size: int = 8,
        *,
        backend: str = "gloo",
        start_method: Literal["forkserver", "spawn"] = "forkserver",
        threads: int = 1,
        grace: float = 10.0,
    ) -> None:
        self.size = size
        self.backend = backend
        self._context = multiprocessing.get_context(start_method)
        self._start_method = start_method
        self._threads = threads
        self._grace = grace
        self._workers: list[_Worker | None] = [None] * size
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self._store: TCPStore | None = None
        self._calls = 0
        self._started = 0
        self._owner = os.getpid()

    def run(
        self, fn: Callable[..., T], n: int, *args: Any, timeout: float = 180.0, **kwargs: Any
    ) -> list[T]:
        """Call `fn(*args, **kwargs)` on `n` ranks; the results in rank order.

        `fn` is sent by reference, so it must be importable by name; arguments and results are
        pickled by value. `timeout` is in seconds and covers the whole call, its start excepted.
        Raises RanksFailed.
        """
        outcomes = self.outcomes(fn, n, *args, timeout=timeout, **kwargs)
        failures = [o.failure for o in outcomes if o.failure is not None]
        if failures:
            name = getattr(fn, "__qualname__", repr(fn))
            raise RanksFailed(name, n, self._by_cause(failures))
        return [o.value for o in outcomes]

    def outcomes(
        self, fn: Callable[..., Any], n: int, *args: Any, timeout: float = 180.0, **kwargs: Any
    ) -> list[Outcome]:
        """As `run`, but failures are returned, not raised: for tests about failing ranks."""
        if not 1 <= n <= self.size:
            raise ValueError(f"asked for {n} ranks of a pool of {self.size}")
        payload = pickle.dumps((fn, args, kwargs))
        with self._lock:
            workers = self._ready(n)
            self._calls += 1
            for rank, worker in enumerate(workers):
                worker.log_start = worker.log.stat().st_size
                job = rank_worker.Job(
                    rank=rank,
                    world_size=n,
                    backend=self.backend,
                    prefix=f"call{self._calls}",
                    timeout=timeout,
                    path=tuple(sys.path),
                    payload=payload,
                )
                worker.connection.send_bytes(pickle.dumps(job))
            outcomes = self._collect(workers, timeout)
            if any(o.failure for o in outcomes):
                # A process in which a call failed half way is not worth trusting.
                for slot in range(n):
                    self._discard(slot)
            else:
                for slot, worker in enumerate(workers):
                    if _threads_of(worker.process) > _MANY_THREADS:
                        self._discard(slot)
                    else:
                        worker.connection.send_bytes(rank_worker.RELEASE)
            return outcomes

    @property
    def started(self) -> int:
        """How many processes were started so far: shows what failures cost."""
        return self._started

    def close(self) -> None:
        """End the processes. A closed pool may be used again: it starts anew."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            for slot in range(self.size):
                self._discard(slot)
            self._store = None
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ processes

    def _ready(self, n: int) -> list[_Worker]:
        fresh = []
        for slot in range(n):
            worker = self._workers[slot]
            if worker is None or not worker.process.is_alive():
                self._discard(slot)
                self._workers[slot] = self._start(slot)
                fresh.append(slot)
        deadline = time.monotonic() + _START_LIMIT
        workers = [worker for worker in self._workers[:n] if worker is not None]
        for slot in fresh:
            worker = workers[slot]
            fault = "ended at its start"
            with contextlib.suppress(EOFError, ConnectionResetError):
                if worker.connection.poll(max(0.0, deadline - time.monotonic())):
                    worker.connection.recv_bytes()
                    continue
                fault = f"did not start in {_START_LIMIT:g} s"
            text = f"rank process {slot} {fault}: {self._output(worker)}"
            # One that is only late would greet the next call, which would take that for an answer.
            for started in fresh:
                self._discard(started)
            raise RuntimeError(text)
        return workers

    def _start(self, slot: int) -> _Worker:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        if self._start_method == "forkserver":
            # torch is imported once and shared; so is pytest, which a child would else import
            # because it is the main module.
            wanted = [m for m in ("pytest",) if m in sys.modules]
            self._context.set_forkserver_preload(["conformance.rank_preload", *wanted])
        port = self._require_store().port
        self._started += 1
        log = self._folder / f"rank{slot}-{self._started}.log"
        log.touch()
        ours, theirs = self._context.Pipe()
        life_theirs, life_ours = self._context.Pipe(duplex=False)
        process = self._context.Process(  # type: ignore[attr-defined]
            target=rank_worker.serve,
            args=(
                theirs,
                life_theirs,
                port,
                str(log),
                self._threads,
                tuple(sys.path),
                dict(os.environ),
            ),
            name=f"rank{slot}",
            daemon=True,
        )
        process.start()
        theirs.close()
        life_theirs.close()
        return _Worker(process, ours, life_ours, log)

    def _require_store(self) -> TCPStore:
        if self._store is None:
            from torch._C._distributed_c10d import TCPStore

            # Port 0: the system picks a free one, so pools of several test processes never meet.
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return self._store

    def _discard(self, slot: int) -> None:
        worker = self._workers[slot]
        self._workers[slot] = None
        if worker is None:
            return
        worker.connection.close()
        worker.life.close()
        if worker.process.is_alive():
            worker.process.kill()
        worker.process.join(10)

    # ------------------------------------------------------------------ results

    def _collect(self, workers: list[_Worker], timeout: float) -> list[Outcome]:
        found: dict[int, Outcome] = {}
        end = time.monotonic() + timeout
        waiting = {w.connection: rank for rank, w in enumerate(workers)}
        while waiting:
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                found[rank] = self._receive(rank, workers[rank])
            if any(o.failure for o in found.values()):
                # Its peers wait for it in vain, as a rule: give them a moment to say so.
                end = min(end, time.monotonic() + self._grace)
        if waiting:
            late = sorted(waiting.values())
            failed = any(o.failure for o in found.values())
            found |= self._interrupt(late, workers, timeout, failed)
        # Python keeps insertion order, so the first cause can be told from the dict.
        self._arrival = list(found)
        return [found[rank] for rank in range(len(workers))]

    def _receive(self, rank: int, worker: _Worker) -> Outcome:
        try:
            message = pickle.loads(worker.connection.recv_bytes().removeprefix(rank_worker.FAILED))
        except (EOFError, ConnectionResetError):
            worker.process.join(5)
            code = worker.process.exitcode
            name = f"exit code {code}"
            if code is not None and code < 0:
                with contextlib.suppress(ValueError):
                    name = f"killed by {signal.Signals(-code).name}"
            output = self._output(worker)
            return Outcome(rank, failure=RankFailure(rank, "died", name, output=output))
        except Exception as error:
            text = f"its result could not be read: {error!r}"
            return Outcome(rank, failure=RankFailure(rank, "raised", text))
        if isinstance(message, rank_worker.Done):
            return Outcome(rank, value=message.value)
        return Outcome(
            rank,
            failure=RankFailure(
                rank,
                "raised",
                message.summary,
                message.traceback,
                self._output(worker),
                message.error(),
            ),
        )

    def _interrupt(
        self, ranks: list[int], workers: list[_Worker], timeout: float, failed: bool
    ) -> dict[int, Outcome]:
        """Ask ranks that gave no answer in time for their stacks."""
        before = {rank: workers[rank].log.stat().st_size for rank in ranks}
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(workers[rank].process.pid or 0, signal.SIGUSR1)
        time.sleep(0.3)
        out = {}
        for rank in ranks:
            data = workers[rank].log.read_bytes()
            stack = data[before[rank] :].decode(errors="replace")
            output = self._output(workers[rank], before[rank])
            inside = any(mark in stack for mark in rank_worker.COLLECTIVE_MARKS)
            kind: Kind = "waiting" if inside else "hung"
            why = "no answer after another rank failed" if failed else f"no answer in {timeout:g} s"
            out[rank] = Outcome(rank, failure=RankFailure(rank, kind, why, stack, output))
        return out

    def _output(self, worker: _Worker, end: int | None = None) -> str:
        with contextlib.suppress(OSError):
            data = worker.log.read_bytes()[worker.log_start : end]
            lines = data.decode(errors="replace").strip().splitlines()
            return "\n".join(lines[-_TAIL_LINES:])
        return ""

    def _by_cause(self, failures: list[RankFailure]) -> list[RankFailure]:
        arrival = {rank: place for place, rank in enumerate(self._arrival)}
        return sorted(failures, key=lambda f: (_ORDER[f.kind], arrival[f.rank]))


_shared: RankPool | None = None


def shared_pool() -> RankPool:
    """The one pool of this process, of up to 8 ranks, closed at exit.

    Use it in a session fixture; under xdist each worker process has one of its own.
    """
    global _shared
    if _shared is None or _shared._owner != os.getpid():
        _shared = RankPool(8)
        atexit.register(_shared.close)
    return _shared
