"""Runs a subject's manager on rank processes, for the chapters about managers.

Keeps what several checks share (saved steps, resharded jobs) and turns a manager that raised, died
or hung into one finding. What ranks do is `conformance/managed.py`; no verdicts here.
"""

from __future__ import annotations

import atexit
import functools
import os
import pickle
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from conformance.degrees import Case
from conformance.lab import AdapterRaised, NotApplicable
from conformance.managed import ManagerRaised, Outcome, Try, opened, start, try_loads
from conformance.ranks import RankPool, RanksFailed, shared_pool
from conformance.subject import Subject
from conformance.verdict import Finding
from torchtitan_ckpt.device import ENV, Device, DeviceKind
from torchtitan_ckpt.errors import ConfigError, Problem

T = TypeVar("T")
DEGREES = ("1", "fsdp2", "tp2", "pp2", "fsdp2 x tp2", "fsdp2 x ep2")
TIMEOUT = 180.0
MOST = 8  # ranks of a pool
# What `saved_steps` holds: the folder of each step, and the number of steps behind its state.
STEPS: Mapping[str, int] = {"step-9": 1, "step-10": 2}
OWN = 3  # steps of a job that tries to load


class ManagerFailed(AdapterRaised):
    """The subject's manager ended a check by raising, dying or hanging."""

    def __init__(self, error: RanksFailed) -> None:
        first = error.first
        cause = first.error
        told = isinstance(cause, ManagerRaised)
        words = str(cause) if told else f"{first.kind}: {first.summary}{_stands(first.traceback)}"
        self.direction, self.error = "manager", error
        Exception.__init__(self, f"the manager failed on rank {first.rank}: {words}")


def _stands(stack: str) -> str:
    """Where a rank that gave no answer stood: the innermost frames of its main thread."""
    main = stack.partition("Current thread")[2]
    frames = re.findall(r'File "[^"]*?([^/"]+)", line (\d+) in (\w+)', main)[:4]
    return "".join(f", in {name} ({file}:{line})" for file, line, name in frames)


class ManagerLab:
    """One subject's manager. Folders live as long as this does; jobs lie on the device."""

    def __init__(self, subject: Subject, device: Device | None = None) -> None:
        assert subject.manager is not None
        self.manager: Any = subject.manager
        self.device = device or Device(DeviceKind.CPU)
        self.pool = pool_on(self.device.kind)
        self.cases = cases_of(subject, self.pool.size)
        self._folder = tempfile.TemporaryDirectory(prefix="ckpt-gate-")
        self._made = 0
        self._once: dict[Any, Any] = {}
        try:
            pickle.dumps(self.manager)
        except Exception as error:
            raise ConfigError(
                Problem(
                    code="check.manager-unnamed",
                    what="rank processes cannot import the subject's manager",
                    where=subject.name,
                    cause=str(error),
                    fix="make it a class at the top of a module",
                )
            ) from error

    def folder(self) -> str:
        """A new, empty output folder."""
        self._made += 1
        path = Path(self._folder.name, str(self._made))
        path.mkdir()
        return str(path)

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """What `make` gives, made when first asked for."""
        if key not in self._once:
            self._once[key] = make()
        return self._once[key]  # type: ignore[no-any-return]

    def run(
        self, fn: Callable[..., T], ranks: int, *args: Any, timeout: float = TIMEOUT
    ) -> list[T]:
        """`fn(manager, *args)` on each rank; ManagerFailed when the manager fails there, or has
        not done in `timeout` seconds."""
        if ranks > self.pool.size:
            raise NotApplicable(f"it wants {ranks} ranks, and there are {self.pool.size} devices")
        try:
            kind = self.device.kind.value
            return self.pool.run(_on, ranks, kind, fn, self.manager, *args, timeout=timeout)
        except RanksFailed as error:
            ours = error.first.kind == "raised" and not isinstance(error.first.error, ManagerRaised)
            if ours:
                raise
            raise ManagerFailed(error) from error

    def findings(self, fn: Callable[..., list[Finding]], ranks: int, *args: Any) -> list[Finding]:
        """The findings of all ranks; those that say the same become one."""
        return merged(finding for found in self.run(fn, ranks, *args) for finding in found)

    def try_loads(self, *tries: Try, known: Sequence[int] = (1, 2)) -> list[Outcome]:
        """What becomes of one job a try, each after `OWN` steps of its own."""
        (found,) = self.run(try_loads, 1, tries, OWN, known)
        return found

    def saved_steps(self) -> str:
        """An output folder of its own with `step-9` and `step-10`, as the manager saved them."""
        original = self.once("steps", self._save_steps)
        folder = self.folder()
        shutil.copytree(original, folder, dirs_exist_ok=True)
        return folder

    def _save_steps(self) -> str:
        folder = self.folder()
        self.run(_save_steps, 1, folder)
        return folder

    @functools.cached_property
    def pairs(self) -> list[tuple[Case, Case]]:
        """Every split once as a source and once as a target."""
        return list(zip(self.cases, (*self.cases[1:], self.cases[0]), strict=True))


@functools.cache
def pool_on(kind: DeviceKind) -> RankPool:
    """The ranks of this process on a kind of device; on an accelerator each has one of its own.

    Raises `NotApplicable` where none could start.
    """
    if why := why_no_rank_starts():
        raise NotApplicable(why)
    if kind is DeviceKind.CPU:
        return shared_pool()
    device = Device(kind)
    count = min(MOST, device.count)
    pool = RankPool(count, backend=device.backend, start_method="spawn")
    atexit.register(pool.close)
    return pool


def why_no_rank_starts() -> str:
    """What is wrong with the main script, which every new process imports, or an empty string."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    # `python -m package` is left alone by multiprocessing.
    if path is None or getattr(main.__spec__, "name", "").endswith("__main__"):
        return ""
    if not os.path.isfile(path):
        return f"rank processes import the main script, and {path} is no file: write it into one"
    if b"__name__" not in Path(path).read_bytes():
        return 'rank processes would run the main script again: it has no if __name__ == "__main__"'
    return ""


def _on(kind: str, fn: Callable[..., T], *args: Any) -> T:
    """`fn` in a rank whose jobs lie on a kind of device."""
    os.environ[ENV] = kind
    return fn(*args)


def _save_steps(manager: Any, folder: str) -> None:
    job = start()
    with opened(manager, job, folder, interval=1) as found:
        for name in STEPS:
            job.train()
            found.save(int(name.removeprefix("step-")))


def cases_of(subject: Subject, ranks: int = MOST) -> list[Case]:
    """The subject's parallel degrees, else those that there are ranks for; one alone goes to a
    single rank and back."""
    usual = [one for one in map(case_of, DEGREES) if one.ranks <= ranks]
    found = [case_of(one, ranks) for one in subject.degrees or usual]
    distinct = list({case.name: case for case in found}.values())
    if len(distinct) == 1:
        distinct = [case_of("1"), *(case for case in distinct if case.ranks > 1)]
    return distinct


def case_of(degrees: Any, ranks: int = MOST) -> Case:
    """Degrees as words, `ParallelDegrees` or a `Case`; ConfigError if they want more ranks."""
    if isinstance(degrees, str):
        degrees = Case.parse(degrees)
    case = degrees if isinstance(degrees, Case) else Case(degrees)
    case = replace(case, degrees=case.degrees.resolve())
    if case.ranks > ranks:
        raise ConfigError(
            Problem(
                code="check.too-many-ranks",
                what=f"{case.name} needs {case.ranks} ranks",
                expected=f"at most {ranks} ranks, in processes of this machine",
                fix="torchtitan-ckpt plan answers for larger jobs",
            )
        )
    return case


def takes(manager: Any, option: str) -> bool:
    """Whether the manager's config knows an option."""
    try:
        manager.Config(**{option: None})
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Any other error: it knows the option, and wants another value.
        return not isinstance(error, TypeError) or option not in str(error)
    return True


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Findings that say the same of several ranks as one, with the keys of all."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.what, finding.coordinate), []).append(finding)
    return [
        replace(group[0], keys=tuple(dict.fromkeys(key for one in group for key in one.keys)))
        for group in groups.values()
    ]


def states(
    outcome: Outcome,
    wanted: Mapping[str, int],
    *,
    what: str,
    remedy: str,
    cause: str = "",
    coordinate: str = "",
    steps: Mapping[str, int] = STEPS,
) -> Iterator[Finding]:
    """A finding if a job was refused, loaded nothing, or has other states than `wanted`.

    `steps` are the folders that it could load, and the number of steps behind each.
    """
    names = {number: name for name, number in steps.items()} | {OWN: "the job's own"}

    def told(at: int | None) -> str:
        return "no step" if at is None else names.get(at, f"{at} steps")

    wrong = [name for name, at in wanted.items() if outcome.at[name] != at]
    if wrong or outcome.words or not outcome.loaded:
        yield Finding(
            what=what,
            keys=tuple(wrong),
            coordinate=coordinate,
            expected="; ".join(f"{name} of {told(wanted[name])}" for name in wrong) or "a load",
            actual=str(outcome)
            if outcome.words or not outcome.loaded
            else "; ".join(f"{name} of {told(outcome.at[name])}" for name in wrong),
            cause=cause,
            remedy=remedy,
        )
