"""Chapter `resume`, saves in the background: what they hold, and what counts while they run.

A part of `conformance/checks/resume.py`; on one rank. Writers in threads are made slow, so that
what the job does meanwhile comes before the first byte is written.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from conformance.disk import copy_of, stalled
from conformance.jobs import STATES, Job
from conformance.lab import Lab, NotApplicable
from conformance.managed import Held, ManagerRaised, Try, known, opened, start
from conformance.manager_lab import ManagerFailed, ManagerLab, states, takes
from conformance.verdict import Finding
from torchtitan_ckpt.device import current

ASYNC, PINNED = "async", "async_with_pinned_mem"
MODES = ("disabled", ASYNC, PINNED)
IN_BACKGROUND = (1, 4)


@dataclass(frozen=True)
class Plain:
    """A dataclass in a state."""

    number: int = 7


# What a state may hold besides tensors and numbers; what the first is told of is the control.
LEAVES: Mapping[str, Any] = {
    "a number": 1.5,
    "a class": dict,
    "a function": repr,
    "a lambda": lambda: 7,
    "a dataclass": Plain(),
    "a numpy number": np.float32(1.5),
    "a list that holds a dict": [{"a": (1, "two", None)}],
}


def async_(lab: Lab) -> Iterator[Finding]:
    """What a background save writes is the state at the call, whatever the job does meanwhile."""
    _needs_async(lab.managers)
    yield from _state_at_the_call(lab.managers, ASYNC)


def pinned(lab: Lab) -> Iterator[Finding]:
    """The same with the copies in pinned memory, made while the job goes on."""
    _needs_async(lab.managers)
    try:
        yield from _state_at_the_call(lab.managers, PINNED)
    except ManagerFailed as failed:
        if _accelerated():
            raise
        words = f"without an accelerator the manager refuses {PINNED}: {failed}"
        raise NotApplicable(words) from failed


def modes(lab: Lab) -> Iterator[Finding]:
    """A state that one mode saves every mode saves: a copy is no reason to refuse a value."""
    _needs_async(lab.managers)
    (refused,) = lab.managers.run(_refused, 1, lab.managers.folder())
    control = next(iter(LEAVES))
    usable = [mode for mode in MODES if control not in refused[mode] or mode != PINNED]
    for leaf in LEAVES:
        words = {mode: refused[mode].get(leaf, "") for mode in usable}
        if any(words.values()) and not all(words.values()):
            yield Finding(
                what=f"some modes save a state that holds {leaf}, and others refuse it",
                keys=("extra.value",),
                coordinate="async_mode",
                expected="every mode saves it, or every mode refuses it",
                actual="; ".join(f"{m}: {w[:120] or 'saved'}" for m, w in words.items()),
                cause="the copy that one mode makes of a state knows fewer kinds of values",
                remedy="decide what can be saved before the mode is looked at",
            )


def async_error(lab: Lab) -> Iterator[Finding]:
    """A save that failed in the background is raised by the next save, wait or close."""
    _needs_async(lab.managers)
    (silent,) = lab.managers.run(_save_into_nothing, 1, lab.managers.folder())
    if silent:
        yield Finding(
            what="a save that failed in the background was never raised",
            keys=("async_mode",),
            expected="an error from save, maybe_wait_for_saving or close",
            actual="all of them returned, and there is no checkpoint",
            cause="nobody looks at what became of the save",
            remedy="keep the future of the save, and ask it for its result",
        )


def async_load(lab: Lab) -> Iterator[Finding]:
    """A load that comes while a save is under way waits for it, or takes the complete step."""
    _needs_async(lab.managers)
    (at,) = lab.managers.run(_load_while_saving, 1, lab.managers.folder())
    if set(at.values()) not in ({1}, {2}):
        yield Finding(
            what="a load during a save in the background loads neither that step nor the last",
            keys=tuple(name for name, steps in at.items() if steps not in (1, 2)),
            expected="all of step 1, which is complete, or all of step 2, which is being saved",
            actual=", ".join(f"{name} after {steps} steps" for name, steps in at.items()),
            cause="a step that is being written is taken, or hides the one before",
            remedy="wait for the save before looking for a step",
        )


def begun(lab: Lab) -> Iterator[Finding]:
    """While step 4 is being written, over what a killed job left of it, only 1 and 2 are there."""
    _needs_async(lab.managers)
    folder, killed = lab.managers.folder(), lab.managers.folder()
    ((reached, failure),) = lab.managers.run(_begin_a_third, 1, folder, killed)
    if not reached and not failure:
        raise NotApplicable("the manager writes where this process cannot see it")
    gone = tuple(n for n in ("step-1", "step-2") if not Path(killed, "checkpoint", n).is_dir())
    if gone:
        yield Finding(
            what="an old step was removed when its successor had only been begun",
            keys=gone,
            coordinate="keep_latest_k=2, while step-4 is being written",
            expected="step-1 and step-2: two complete steps at any time",
            actual=", ".join(sorted(p.name for p in Path(killed, "checkpoint").iterdir())),
            cause="a step counts as soon as its folder is there",
            remedy="count and remove steps when the save has completed",
        )
    during, after = lab.managers.try_loads(Try(killed), Try(folder), known=(1, 2, 4))
    steps = {"step-1": 1, "step-2": 2, "step-4": 4}
    for outcome, step, words, cause in (
        (during, 2, "a job that is killed while step-4 is saved does not resume from step-2", ""),
        (after, 4, "step-4 is not there when its save is over", failure),
    ):
        at = dict.fromkeys(STATES, step)
        remedy = "let a step count when its save has completed, and its predecessors stay till then"
        yield from states(outcome, at, steps=steps, what=words, cause=cause, remedy=remedy)


def _state_at_the_call(lab: ManagerLab, mode: str) -> Iterator[Finding]:
    folder = lab.folder()
    lab.run(_save_in_background, 1, folder, mode)
    tries = [Try(folder, step) for step in IN_BACKGROUND]
    outcomes = lab.try_loads(*tries, known=IN_BACKGROUND)
    for step, outcome in zip(IN_BACKGROUND, outcomes, strict=True):
        words = f"an async save of step {step} does not hold the state at the call"
        yield from states(
            outcome,
            dict.fromkeys(STATES, step),
            steps={},
            what=words,
            coordinate=f"async_mode={mode}",
            cause="the writer is given, or reads too late, what the job goes on to change",
            remedy="copy every state before save or maybe_wait_for_staging returns",
        )


def _needs_async(lab: ManagerLab) -> None:
    if not takes(lab.manager, "async_mode"):
        raise NotApplicable("the manager has no option async_mode")


def _accelerated() -> bool:
    return current().kind.value != "cpu"


# --- on the ranks -------------------------------------------------------------------------------


def _save_in_background(manager: Any, folder: str, mode: str) -> None:
    """Two saves; the job trains before the first byte of the first, and is spoiled at the end."""
    job, (first, second) = start(), IN_BACKGROUND
    with (
        opened(manager, job, folder, interval=1, async_mode=mode) as found,
        stalled(folder) as writer,
    ):
        job.train(first)
        found.save(first)
        found.wait("staging")
        job.train(second - first)
        writer.end_in(0.2)
        found.save(second)
        found.wait("staging")
        _spoil(job)


def _spoil(job: Job) -> None:
    """What a job may do when a save has returned: overwrite, replace and forget."""
    with torch.no_grad():
        for part in job.parts:
            for value in part.parameters():
                value.fill_(float("nan"))
            for module in part.modules():
                for name, buffer in list(module.named_buffers(recurse=False)):
                    buffer.zero_()
                    setattr(module, name, torch.ones_like(buffer))
        for optimizer in job.optimizers:
            for state in optimizer.state.values():
                for value in state.values():
                    value.fill_(-1)
            optimizer.state.clear()
            optimizer.param_groups[0]["lr"] = 1.0
    job.step = job.position = 0


def _refused(manager: Any, folder: str) -> dict[str, dict[str, str]]:
    """For each mode, the leaves that it refuses and its words."""
    out: dict[str, dict[str, str]] = {}
    for mode in MODES:
        out[mode] = {}
        for number, (name, leaf) in enumerate(LEAVES.items()):
            extra = {"extra": Held(leaf)}
            base, options = f"{folder}/{mode}/{number}", {"interval": 1, "async_mode": mode}
            try:
                with opened(manager, start(), base, states=extra, **options) as found:
                    found.save(1)
            except ManagerRaised as error:
                out[mode][name] = error.words
    return out


def _save_into_nothing(manager: Any, folder: str) -> bool:
    """Whether a save whose folder has become a file was never complained about."""
    job = start(1)
    try:
        with opened(manager, job, folder, interval=1, async_mode=ASYNC) as found:
            target = Path(folder, "checkpoint")
            shutil.rmtree(target, ignore_errors=True)
            target.write_text("not a folder")
            found.save(1)
    except ManagerRaised:
        return False
    return True


def _load_while_saving(manager: Any, folder: str) -> dict[str, int | None]:
    job = start()
    with opened(manager, job, folder, interval=1, async_mode=ASYNC) as found:
        for step in (1, 2):
            found.wait("saving")
            job.train()
            found.save(step)
        found.wait("staging")
        job.train()
        found.load()
    return known(job, (1, 2, 3))


def _begin_a_third(manager: Any, folder: str, killed: str) -> tuple[bool, str]:
    """Whether the third save was seen to begin, and what was raised after `killed` was copied."""
    options = {"keep_latest_k": 2} if takes(manager, "keep_latest_k") else {}
    job, steps, reached, failure = start(), Path(folder, "checkpoint"), False, ""
    try:
        with opened(manager, job, folder, interval=1, async_mode=ASYNC, **options) as found:
            for step in (1, 2):
                job.train()
                found.save(step)
                found.wait("saving")
            job.train(2)
            (steps / "step-4").mkdir()
            with stalled(folder) as writer:
                found.save(4)
                reached = writer.begun()
                patience = time.monotonic() + 0.5  # steps are removed in threads
                while (steps / "step-1").is_dir() and time.monotonic() < patience:
                    time.sleep(0.02)
                copy_of(folder, killed)
    except ManagerRaised as error:
        failure = str(error)
    return reached, failure
