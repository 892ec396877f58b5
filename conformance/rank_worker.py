"""What a rank process does: wait for a job, run it in a fresh process group, answer.

The other side is `conformance/ranks.py`. Nothing here imports torch until the process serves.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import os
import pickle
import random
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

RELEASE = b"release"
READY = b"ready"
# First byte of the answer of a rank whose function raised; no pickle begins with it.
FAILED = b"!"
# Frames that say a rank is waiting for others rather than busy with itself.
COLLECTIVE_MARKS = ("distributed_c10d.py", "_functional_collectives.py", "in barrier")


@dataclass(frozen=True, slots=True)
class Job:
    """One call for one rank. `payload` is the pickled function and its arguments."""

    rank: int
    world_size: int
    backend: str
    prefix: str
    timeout: float
    path: tuple[str, ...]
    payload: bytes


@dataclass(frozen=True, slots=True)
class Done:
    """The function's result."""

    value: Any


@dataclass(frozen=True, slots=True)
class Raised:
    """The function's exception: always as text, and as itself where it can be pickled."""

    summary: str
    traceback: str
    pickled: bytes | None

    def error(self) -> BaseException | None:
        """The exception, or None where it could not be sent."""
        if self.pickled is None:
            return None
        with contextlib.suppress(Exception):
            value = pickle.loads(self.pickled)
            return value if isinstance(value, BaseException) else None
        return None


def serve(
    connection: Connection,
    life: Connection,
    port: int,
    log: str,
    threads: int,
    path: tuple[str, ...],
    env: Mapping[str, str],
) -> None:
    """The life of a rank process. Its output goes to `log`; so does its stack on SIGUSR1."""
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    # A terminal's Ctrl-C is the parent's business: it closes the pool.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(life,), daemon=True).start()
    os.environ.clear()
    os.environ.update(env)
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        # Without it gloo asks for the host's name, which many sandboxes cannot resolve.
        names = {name for _, name in socket.if_nameindex()}
        for loopback in ("lo", "lo0"):
            if loopback in names:
                os.environ["GLOO_SOCKET_IFNAME"] = loopback
    sys.path[:] = path
    import torch
    from torch._C._distributed_c10d import TCPStore

    torch.set_num_threads(threads)
    # One connection for life: made anew for each call, now and then one took five seconds.
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    connection.send_bytes(READY)
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        if message == RELEASE:
            _leave_group()
            continue
        answer = _run(pickle.loads(message), store)
        with contextlib.suppress(BrokenPipeError):
            connection.send_bytes(answer)
        if answer.startswith(FAILED):
            # As in a job, who fails ends: only that surely closes the connections its peers wait
            # on. Leaving the group does not, while anything still refers to it.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


def _run(job: Job, store: TCPStore) -> bytes:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    try:
        sys.path[:] = job.path
        os.environ.update(
            RANK=str(job.rank), WORLD_SIZE=str(job.world_size), LOCAL_RANK=str(job.rank)
        )
        fn, args, kwargs = pickle.loads(job.payload)
        torch.manual_seed(0)
        random.seed(0)
        limit = timedelta(seconds=job.timeout)
        store.set_timeout(limit)
        dist.init_process_group(
            job.backend,
            store=PrefixStore(job.prefix, store),
            rank=job.rank,
            world_size=job.world_size,
            timeout=limit,
        )
        return pickle.dumps(Done(fn(*args, **kwargs)))
    # DCP's CheckpointException is a BaseException.
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        summary = "".join(traceback.format_exception_only(error)).strip()
        return FAILED + pickle.dumps(Raised(summary, text, _pickled(error)))


def _pickled(error: BaseException) -> bytes | None:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    return data


def _leave_group() -> None:
    import torch.distributed as dist

    with contextlib.suppress(Exception):
        if dist.is_initialized():
            dist.destroy_process_group()
    _forget_meshes()


def _forget_meshes() -> None:
    """Empty torch's caches that are keyed by device meshes.

    Meshes of two calls can be equal, and what is cached for the first names groups that are gone.
    """
    if "torch.distributed.tensor" in sys.modules:
        debug: Any = importlib.import_module("torch.distributed.tensor.debug")
        with contextlib.suppress(Exception):  # private, and absent in other versions of torch
            debug._clear_sharding_prop_cache()
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed"):
            for value in list(vars(module).values()):
                # Not isinstance: it asks the value for its class, and deprecated ones warn of that.
                if type(value) is functools._lru_cache_wrapper:
                    value.cache_clear()


def _end_with_parent(life: Connection) -> None:
    """End this process when the pool's has gone, even from within a collective.

    Nothing is ever sent over `life`: its other end closes when the pool's process ends. The
    process id of the parent would not do, since the fork server lives as long as its children.
    """
    with contextlib.suppress(EOFError, OSError):
        life.recv_bytes()
    os._exit(1)
