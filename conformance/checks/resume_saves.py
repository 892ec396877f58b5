"""Chapter `resume`, what saves write: in the background, under `keep_latest_k`, at the end.

A part of `conformance/checks/resume.py`; on one rank.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from conformance.jobs import STATES
from conformance.lab import Lab, NotApplicable
from conformance.managed import ManagerRaised, Try, known, opened, start, tiny_table
from conformance.manager_lab import ManagerLab, states, takes
from conformance.verdict import Finding

MARKER = ".metadata"
IN_BACKGROUND = (1, 4)


def async_(lab: Lab) -> Iterator[Finding]:
    """What a background save writes is the state at the call, whatever the job does meanwhile."""
    _needs_async(lab.managers)
    folder = lab.managers.folder()
    lab.managers.run(_save_in_background, 1, folder)
    tries = [Try(folder, step) for step in IN_BACKGROUND]
    outcomes = lab.managers.try_loads(*tries, known=IN_BACKGROUND)
    for step, outcome in zip(IN_BACKGROUND, outcomes, strict=True):
        words = f"an async save of step {step} does not hold the state at the call"
        yield from states(outcome, dict.fromkeys(STATES, step), what=words)


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
            remedy="wait for the save before looking for a step",
        )


def retention(lab: Lab) -> Iterator[Finding]:
    """`keep_latest_k` removes the oldest steps, and nothing else."""
    if not takes(lab.managers.manager, "keep_latest_k"):
        raise NotApplicable("the manager has no option keep_latest_k")
    folder = lab.managers.folder()
    steps = Path(folder, "checkpoint")
    foreign = ("notes.txt", "step-x", "old-step-50")
    for name in foreign:
        (steps / name).mkdir(parents=True)
    lab.managers.run(_save_four, 1, folder)
    left = {path.name for path in steps.iterdir()}
    for what, names, wrong in (
        ("steps that keep_latest_k=2 should have kept are gone", ("step-3", "step-4"), True),
        ("steps older than keep_latest_k=2 are still there", ("step-1", "step-2"), False),
        ("the seed was removed with the old steps", ("step-0",), True),
        ("what is no step was removed with the old steps", foreign, True),
    ):
        found = tuple(name for name in names if (name not in left) is wrong)
        if found:
            yield Finding(
                what=what,
                keys=found,
                expected="step-0, step-3, step-4, and what is no step",
                actual=", ".join(sorted(left)),
            )


def export_dtype(lab: Lab) -> Iterator[Finding]:
    """The last, model-only save has the dtype asked for; integers and the live model do not."""
    folder = lab.managers.folder()
    (live,) = lab.managers.run(_export_in_bf16, 1, folder)
    step = Path(folder, "checkpoint", "step-2")
    if not (step / MARKER).is_file():
        raise NotApplicable("the manager's steps are not DCP folders")
    entries = FileSystemReader(step).read_metadata().state_dict_metadata
    for key, leaf in tiny_table().items():
        want = "bfloat16" if leaf.dtype == "float32" else leaf.dtype
        entry = entries.get(key)
        have = (
            str(entry.properties.dtype).removeprefix("torch.")
            if isinstance(entry, TensorStorageMetadata)
            else "nothing"
        )
        for where, expected, actual in (("file", want, have), ("model", leaf.dtype, live[key])):
            if expected != actual:
                yield Finding(
                    what=f"export_dtype=bfloat16 leaves a tensor of the {where} in another dtype",
                    keys=(key,),
                    expected=expected,
                    actual=actual,
                )


def _needs_async(lab: ManagerLab) -> None:
    if not takes(lab.manager, "async_mode"):
        raise NotApplicable("the manager has no option async_mode")


# --- on the ranks -------------------------------------------------------------------------------


def _save_in_background(manager: Any, folder: str) -> None:
    job = start()
    with opened(manager, job, folder, interval=1, async_mode="async") as found:
        for step in IN_BACKGROUND:
            job.train(step - job.step)
            found.save(step)
            found.wait("staging")
            job.train()


def _save_into_nothing(manager: Any, folder: str) -> bool:
    """Whether a save whose folder has become a file was never complained about."""
    job = start(1)
    try:
        with opened(manager, job, folder, interval=1, async_mode="async") as found:
            target = Path(folder, "checkpoint")
            shutil.rmtree(target, ignore_errors=True)
            target.write_text("not a folder")
            found.save(1)
    except ManagerRaised:
        return False
    return True


def _load_while_saving(manager: Any, folder: str) -> dict[str, int | None]:
    job = start()
    with opened(manager, job, folder, interval=1, async_mode="async") as found:
        for step in (1, 2):
            found.wait("saving")
            job.train()
            found.save(step)
        found.wait("staging")
        job.train()
        found.load()
    return known(job, (1, 2, 3))


def _save_four(manager: Any, folder: str) -> None:
    job = start()
    with opened(manager, job, folder, create_seed_checkpoint=True) as found:
        found.save(0, last_step=True)
    with opened(manager, job, folder, interval=1, keep_latest_k=2) as found:
        for step in range(1, 5):
            job.train()
            found.save(step)


def _export_in_bf16(manager: Any, folder: str) -> dict[str, str]:
    job = start(2)
    with opened(manager, job, folder, interval=99, export_dtype="bfloat16") as found:
        found.save(2, last_step=True)
    model = job.state("model")
    return {key: str(value.dtype).removeprefix("torch.") for key, value in model.items()}
