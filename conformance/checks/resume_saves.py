"""Chapter `resume`, what saves write and remove: old steps, the last one, one saved again.

A part of `conformance/checks/resume.py`; on one rank.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from conformance.disk import Deed, Kills, watched
from conformance.lab import Lab, NotApplicable
from conformance.managed import Try, opened, start, tiny_table
from conformance.manager_lab import takes
from conformance.verdict import Finding

MARKER = ".metadata"


def retention(lab: Lab) -> Iterator[Finding]:
    """`keep_latest_k` removes the oldest steps and nothing else, even after a removal that failed.

    Of the first removal of all something may be left, or the next one finishes it.
    """
    if not takes(lab.managers.manager, "keep_latest_k"):
        raise NotApplicable("the manager has no option keep_latest_k")
    foreign = ("notes.txt", "step-x", "old-step-50")
    for failing in (False, True):
        folder = lab.managers.folder()
        steps = Path(folder, "checkpoint")
        for name in foreign:
            (steps / name).mkdir(parents=True)
        lab.managers.run(_save_four, 1, folder, failing)
        left = {path.name for path in steps.iterdir()}
        for what, names, wrong, remedy in (
            (
                "steps that keep_latest_k=2 should have kept are gone",
                ("step-3", "step-4"),
                True,
                "count complete steps, the seed not among them",
            ),
            (
                "steps older than keep_latest_k=2 are still there",
                ("step-1", "step-2"),
                False,
                "after a removal that failed, go on with the next one",
            ),
            (
                "the seed was removed with the old steps",
                ("step-0",),
                True,
                "never remove step-0: jobs of other splits start from it",
            ),
            (
                "what is no step was removed with the old steps",
                foreign,
                True,
                "remove folders that are called step-<number>, from first to last letter",
            ),
        ):
            found = tuple(name for name in names if (name not in left) is wrong)
            if found and not (failing and found == ("step-1",)):
                yield Finding(
                    what=what,
                    keys=found,
                    coordinate="the first removal fails" if failing else "",
                    expected="step-0, step-3, step-4, and what is no step",
                    actual=", ".join(sorted(left)),
                    remedy=remedy,
                )


def overwrite(lab: Lab) -> Iterator[Finding]:
    """A step is saved again: whenever that is cut short, all of an old step or of the new loads."""
    folder, copies = lab.managers.folder(), lab.managers.folder()
    (moments,) = lab.managers.run(_save_again, 1, folder, copies)
    if not moments:
        raise NotApplicable("the manager writes where this process cannot see it")
    tries = [Try(copy) for copy, _ in moments]
    outcomes = lab.managers.try_loads(*tries, known=(1, 2, 4))
    wrong = [
        (moment, outcome)
        for (_, moment), outcome in zip(moments, outcomes, strict=True)
        if not outcome.loaded or set(outcome.at.values()) not in ({1}, {2}, {4})
    ]
    if wrong:
        moment, outcome = wrong[0]
        yield Finding(
            what=f"a step that is saved again is neither old nor new at {len(wrong)} of "
            f"{len(moments)} moments at which a kill may come",
            keys=("step-2",),
            coordinate=f"at the {moment}",
            expected="all of step-1, of the old step-2 or of the new one",
            actual=f"{outcome}: {dict(outcome.at)}" if outcome.loaded else str(outcome),
            cause="files are replaced under a marker that stays valid",
            remedy="write beside the old step and swap the two, or remove its marker first",
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
                    remedy="cast floats, and only them, in the copy that is written",
                )


# --- on the ranks -------------------------------------------------------------------------------


def _save_four(manager: Any, folder: str, failing: bool) -> None:
    job, removed = start(), list[Path]()

    def fail_once(deed: Deed) -> None:
        if failing and deed.event == "shutil.rmtree" and not removed:
            removed.append(deed.path)
            raise PermissionError(errno.EACCES, "refused once, by the gate", str(deed.path))

    with opened(manager, job, folder, create_seed_checkpoint=True) as found:
        found.save(0, last_step=True)
    options = {"interval": 1, "keep_latest_k": 2}
    with watched(folder, fail_once), opened(manager, job, folder, **options) as found:
        for step in range(1, 5):
            job.train()
            found.save(step)


def _save_again(manager: Any, folder: str, copies: str) -> list[tuple[str, str]]:
    job, kills = start(), Kills(folder, copies)
    with opened(manager, job, folder, interval=1) as found:
        for step in (1, 2):
            job.train()
            found.save(step)
    job.train(2)
    with opened(manager, job, folder, interval=1) as found, watched(folder, kills):
        found.save(2)
    return kills.moments


def _export_in_bf16(manager: Any, folder: str) -> dict[str, str]:
    job = start(2)
    with opened(manager, job, folder, interval=99, export_dtype="bfloat16") as found:
        found.save(2, last_step=True)
    model = job.state("model")
    return {key: str(value.dtype).removeprefix("torch.") for key, value in model.items()}
