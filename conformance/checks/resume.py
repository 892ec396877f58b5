"""Chapter `resume`: which checkpoint a restarted job takes, and that it goes on as before.

On one rank. Folders are doctored copies of what the manager itself saved: `step-9` and `step-10`.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from conformance.checks.resume_async import async_, async_error, async_load, begun, modes, pinned
from conformance.checks.resume_replicas import replicas
from conformance.checks.resume_saves import MARKER, export_dtype, overwrite, retention
from conformance.checks.resume_stream import stream
from conformance.jobs import STATES, value_of
from conformance.lab import Lab
from conformance.managed import Try, differences, opened, start, tiny_table
from conformance.manager_lab import OWN, STEPS, ManagerLab, states, takes
from conformance.verdict import Finding

NEWEST = STEPS["step-10"]
_WHOLE_NAME = "take for a step what is a folder and called step-<number>, from first to last letter"

__all__ = [
    "again",
    "async_",
    "async_error",
    "async_load",
    "begun",
    "export_dtype",
    "half_deleted",
    "initial",
    "load_step",
    "model_only",
    "modes",
    "names",
    "newest",
    "overwrite",
    "pinned",
    "replicas",
    "retention",
    "stream",
    "unfinished",
    "uninterrupted",
]


def newest(lab: Lab) -> Iterator[Finding]:
    """Steps are numbers: 10 comes after 9, 100 after 99, whichever was written last."""
    for nine, ten in (("step-9", "step-10"), ("step-99", "step-100")):
        folder = lab.managers.saved_steps()
        steps = Path(folder, "checkpoint")
        if nine != "step-9":
            (steps / "step-9").rename(steps / nine)
            (steps / "step-10").rename(steps / ten)
        later = time.time() + 60
        os.utime(steps / nine, (later, later))
        words = f"of {nine} and {ten}, {ten} was not resumed from"
        yield from _is_newest(lab.managers, folder, ten, words, "compare steps as numbers")


def names(lab: Lab) -> Iterator[Finding]:
    """Only `step-<number>` is a step; copies, leftovers and files with such a name are not."""
    for decoy in ("step-11.tmp", "old-step-50", "step-12-copy"):
        folder = lab.managers.saved_steps()
        steps = Path(folder, "checkpoint")
        shutil.copytree(steps / "step-9", steps / decoy)
        words = f"a folder called {decoy} changes what is resumed from"
        yield from _is_newest(lab.managers, folder, decoy, words, _WHOLE_NAME)
    folder = lab.managers.saved_steps()
    Path(folder, "checkpoint", "step-13").write_text("notes")
    words = "a file called step-13 changes what is resumed from"
    yield from _is_newest(lab.managers, folder, "step-13", words, _WHOLE_NAME)


def unfinished(lab: Lab) -> Iterator[Finding]:
    """A step that was never completed: nothing in it, or everything but the marker."""
    empty = lab.managers.saved_steps()
    Path(empty, "checkpoint", "step-11").mkdir()
    words = "an empty step folder keeps a job from its newest complete step"
    remedy = "write one file last, and take a step without it for unfinished"
    yield from _is_newest(lab.managers, empty, "step-11", words, remedy)
    if _marked(lab.managers):
        folder = lab.managers.saved_steps()
        _copy_without(folder, MARKER)
        words = f"a step without {MARKER} keeps a job from its newest complete step"
        yield from _is_newest(lab.managers, folder, "step-11", words, remedy)


def half_deleted(lab: Lab) -> Iterator[Finding]:
    """A newer step that lacks any one of its files, as a purge or a copy cut short leaves it.

    It may be passed over, or be loaded whole where that file was not needed; nothing else.
    """
    original = Path(lab.managers.saved_steps(), "checkpoint", "step-9")
    for file in sorted(p.name for p in original.iterdir() if p.name != MARKER):
        folder = lab.managers.saved_steps()
        _copy_without(folder, file)
        (found,) = lab.managers.try_loads(Try(folder))
        if set(found.at.values()) == {STEPS["step-9"]}:
            continue
        words = f"a step that lacks {file} keeps a job from its newest complete step"
        yield from states(
            found,
            dict.fromkeys(STATES, NEWEST),
            what=words,
            coordinate="step-11",
            cause="the marker is there, and a file that it speaks of is not",
            remedy="compare a step's files with its metadata before it counts",
        )


def load_step(lab: Lab) -> Iterator[Finding]:
    """A named step is that step; one that is not there is refused, never replaced by another."""
    folder = lab.managers.saved_steps()
    older, absent, nothing = lab.managers.try_loads(
        Try(folder, 9), Try(folder, 7), Try(lab.managers.folder(), 7)
    )
    due, words = dict.fromkeys(STATES, STEPS["step-9"]), "load(9) did not load step-9"
    yield from states(older, due, what=words, remedy="load the step that is named")
    for outcome, where in ((absent, "which is not there"), (nothing, "and there is no folder")):
        if not outcome.words or set(outcome.at.values()) != {OWN}:
            yield Finding(
                what=f"load(7), {where}, was not refused",
                keys=("step-7",),
                expected="an error, and the job as it was",
                actual=str(outcome),
                cause="another step, or none, is taken where the one that was named is not found",
                remedy="raise where the step that was named is not there",
            )


def initial(lab: Lab) -> Iterator[Finding]:
    """`initial_load_path` starts a job whose own folder is empty; its own checkpoints win."""
    other, own = lab.managers.saved_steps(), lab.managers.saved_steps()
    shutil.rmtree(Path(own, "checkpoint", "step-9"))
    path = f"{other}/checkpoint/step-9"
    empty = lab.managers.folder()
    Path(empty, "checkpoint").mkdir()
    options = {"initial_load_path": path}
    everything = {**options, "initial_load_model_only": False}
    fresh, existing, whole, ignored = lab.managers.try_loads(
        Try(lab.managers.folder(), options=options),
        Try(empty, options=options),
        Try(lab.managers.folder(), options=everything),
        Try(own, options=everything),
    )
    first, model_only = STEPS["step-9"], {"model": STEPS["step-9"]}
    rest = dict.fromkeys((name for name in STATES if name != "model"), OWN)
    where = f"initial_load_path={path[-17:]}"
    for outcome, wanted, words, remedy in (
        (
            fresh,
            model_only | rest,
            "initial_load_path did not give the model, and it only",
            "load the model from there where the job has no step of its own",
        ),
        (
            existing,
            model_only | rest,
            "an existing, empty folder turns initial_load_path off",
            "look for steps in the folder: that it is there says nothing",
        ),
        (
            whole,
            dict.fromkeys(STATES, first),
            "initial_load_model_only=False left states out",
            "load every state from initial_load_path where this is asked for",
        ),
        (
            ignored,
            dict.fromkeys(STATES, NEWEST),
            "initial_load_path won over the job's own step",
            "look for the job's own steps first",
        ),
    ):
        yield from states(outcome, wanted, what=words, coordinate=where, remedy=remedy)
    yield from _without_adapter(lab.managers)


def _without_adapter(lab: ManagerLab) -> Iterator[Finding]:
    """Hugging Face files and nobody to translate them: who starts anyway starts at random."""
    if not takes(lab.manager, "initial_load_in_hf"):
        return
    source = lab.folder()
    model = {key: value_of(key, leaf) for key, leaf in tiny_table().items()}
    save_file(model, f"{source}/model.safetensors")
    options = {"initial_load_in_hf": True, "initial_load_path": source}
    (outcome,) = lab.try_loads(Try(lab.folder(), options=options))
    if not outcome.words:
        yield Finding(
            what="a job without an adapter was told to start from Hugging Face files, and did not",
            keys=("initial_load_in_hf",),
            expected="an error",
            actual=str(outcome),
            cause="the option is dropped where there is nobody to translate the files",
            remedy="raise where initial_load_in_hf is on and there is no adapter",
        )


def model_only(lab: Lab) -> Iterator[Finding]:
    """A last step that holds only the model hides no full one, and is never resumed from."""
    folder = lab.managers.folder()
    lab.managers.run(_full_then_model_only, 1, folder)
    (outcome,) = lab.managers.try_loads(Try(folder))
    if set(outcome.at.values()) != {1}:
        yield Finding(
            what="a model-only last step keeps a job from the full step before it",
            keys=("step-2",),
            expected="step-1, the newest that can be resumed",
            actual=str(outcome) if outcome.words else f"{outcome}: {dict(outcome.at)}",
            cause="the newest step of any kind was taken for one that can be resumed",
            remedy="take the newest full step, and say which newer ones were passed over",
        )


def uninterrupted(lab: Lab) -> Iterator[Finding]:
    """Stopped and resumed twice, a job equals the one that was never stopped."""
    yield from lab.managers.findings(_stop_twice, 1, lab.managers.folder())


def again(lab: Lab) -> Iterator[Finding]:
    """One manager loads one step after another, as a trainer does that goes back."""
    yield from lab.managers.findings(_load_one_after_another, 1, lab.managers.saved_steps())


def _is_newest(
    lab: ManagerLab, folder: str, name: str, what: str, remedy: str
) -> Iterator[Finding]:
    """A job over this folder resumes from the newest complete step, whatever `name` is."""
    (outcome,) = lab.try_loads(Try(folder))
    due = dict.fromkeys(STATES, NEWEST)
    yield from states(outcome, due, what=what, coordinate=name, remedy=remedy)


def _marked(lab: ManagerLab) -> bool:
    return Path(lab.saved_steps(), "checkpoint", "step-9", MARKER).is_file()


def _copy_without(folder: str, file: str) -> None:
    """`step-11`: the older step without one of its files."""
    steps = Path(folder, "checkpoint")
    shutil.copytree(steps / "step-9", steps / "step-11", ignore=shutil.ignore_patterns(file))


# --- on the ranks -------------------------------------------------------------------------------


def _full_then_model_only(manager: Any, folder: str) -> None:
    job = start()
    with opened(manager, job, folder, interval=1) as found:
        job.train()
        found.save(1)
        job.train()
        found.save(2, last_step=True)


def _load_one_after_another(manager: Any, folder: str) -> list[Finding]:
    job = start(OWN)
    remedy = "leave nothing behind after a load that a second one would meet"
    with opened(manager, job, folder, load_only=True) as found:
        for step in ("step-10", "step-9", "step-10"):
            found.load(int(step.removeprefix("step-")))
            due = dict.fromkeys(STATES, STEPS[step])
            if out := differences(job, due, coordinate=step, remedy=remedy):
                return out
    return []


def _stop_twice(manager: Any, folder: str) -> list[Finding]:
    out = []
    for stop in (2, 4, 6):
        # A restarted process begins with other weights than those it will load.
        job = start(0 if stop == 2 else 1)
        with opened(manager, job, folder, interval=2) as found:
            if stop > 2:
                found.load()
            words = f"when stopped at step {stop}"
            remedy = "save and load every state of the job, and give back what was saved last"
            job.train(2)
            out += differences(job, dict.fromkeys(STATES, stop), what=words, remedy=remedy)
            found.save(stop)
        if out:
            break
    return out
