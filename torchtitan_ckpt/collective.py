"""What the ranks of a job do together: one value for all, and one failure for all.

A step that several ranks take is wrapped in `Ranks.together`, so that it returns on every rank or
raises on every rank with the first cause, and nothing waits for a rank that has given up. Objects
travel over a process group that moves CPU data; without an initialised group a job is one rank.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from torchtitan_ckpt import errors
from torchtitan_ckpt.device_failures import lost_rank, own_error
from torchtitan_ckpt.errors import CheckpointError, Problem, RankError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the ranks of a job. `group` is None for a job of one process."""

    group: dist.ProcessGroup | None
    rank: int
    size: int

    @classmethod
    def current(cls, group: dist.ProcessGroup | None = None) -> Ranks:
        """The ranks of `group`, or of the default group when one is initialised."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls(None, 0, 1)
        group = group or dist.group.WORLD
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    @property
    def are_gone(self) -> bool:
        """Whether the process group was destroyed while these ranks were still in use."""
        return self.group is not None and not dist.is_initialized()

    def fork(self) -> Ranks:
        """The same ranks over a group of their own (gloo), for use on another thread."""
        return self if self.group is None else Ranks.current(_gloo_group(self.group))

    def on_cpu(self) -> Ranks:
        """The same ranks over a group that moves CPU memory; one is made where theirs cannot."""
        if self.group is None:
            return self
        backends = str(dist.get_backend_config(self.group))
        if "cpu:" in backends or backends == "gloo":
            return self
        if self.group not in _cpu_groups:
            _cpu_groups[self.group] = _gloo_group(self.group)
        return Ranks.current(_cpu_groups[self.group])

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in rank order, on every rank."""
        if self.group is None:
            return [value]
        out: list[Any] = [None] * self.size
        with _peers_answer():
            dist.all_gather_object(out, value, group=self.group)
        return out

    def broadcast(self, value: T) -> T:
        """Rank 0's value on every rank."""
        if self.group is None:
            return value
        box, first = [value], dist.get_global_rank(self.group, 0)
        with _peers_answer():
            dist.broadcast_object_list(box, src=first, group=self.group)
        return box[0]

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Run a block on every rank; if it fails on one, every rank raises the first cause.

        The block must not wait for other ranks: a rank that raises inside never gets there.
        What a device call raised becomes a DeviceError.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = own_error(caught)
        if self.group is None:
            if error is not None:
                raise error
            return
        failures = self.gather(None if error is None else _pack(error))
        first = next(((r, f) for r, f in enumerate(failures) if f is not None), None)
        if first is None:
            return
        rank, packed = first
        if error is not None and rank == self.rank:
            raise error
        raise _unpack(packed, rank, what, sum(f is not None for f in failures)) from error


_cpu_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


def _gloo_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A gloo group of the same ranks that waits for a lost one as long as the given group does.

    Torch would give it the default of half an hour, whatever the job has chosen.
    """
    backends = [group._get_backend(kind) for kind in group._device_types]
    options = [one.options for one in backends if hasattr(one, "options")]
    own: dist.ProcessGroup = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=options[0]._timeout if options else None,
        backend="gloo",
        use_local_synchronization=True,
    )
    return own


@contextlib.contextmanager
def own_group(backend: str) -> Iterator[int]:
    """A process group for the ranks of this launch (torchrun's variables), left in order.

    Yields this process's rank and keeps nothing else.
    A group's threads end only when nothing refers to it any more, and a failure's traceback refers
    to every frame that it came through. One that outlives the interpreter aborts the process, with
    the wrong exit code; so the frames of a failure are cleared here.
    """
    with _quiet():
        dist.init_process_group(backend)
    try:
        yield dist.get_rank()
    except Exception as error:
        _clear_frames(error)
        raise
    finally:
        dist.destroy_process_group()
        gc.collect()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Send to stderr what C++ prints: torch 2.10's gloo greets on stdout, where JSON may go."""
    if sys.stdout is not None:  # a program that was started without one
        sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _clear_frames(error: BaseException) -> None:
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            waiting += (one.__cause__, one.__context__)


@contextlib.contextmanager
def _peers_answer() -> Iterator[None]:
    """Turn what a collective raises when a rank has gone into a RankError."""
    try:
        yield
    except RuntimeError as error:
        raise lost_rank(error) from error


def _pack(error: Exception) -> tuple[str, tuple[Problem, ...]]:
    """An exception as (class name, problems): foreign exceptions may not travel."""
    if isinstance(error, CheckpointError):
        return type(error).__name__, error.problems
    text = f"{type(error).__name__}: {error}"
    return "RankError", (Problem(code="ranks.failed", what=text),)


def _unpack(
    packed: tuple[str, tuple[Problem, ...]], rank: int, what: str, count: int
) -> CheckpointError:
    name, problems = packed
    kind = getattr(errors, name, RankError)
    others = f" ({count} ranks failed)" if count > 1 else ""
    note = Problem(
        code="ranks.other-failed",
        what=f"Rank {rank} failed first while the ranks were {what}{others}.",
        fix="see the problem above; it is that rank's",
    )
    error: CheckpointError = kind(*problems, note)
    return error
