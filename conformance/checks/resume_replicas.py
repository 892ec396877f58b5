"""Part of chapter `resume`: replicas of a job, as TorchFT runs them.

Each keeps a record of its own data at every step, one of them saves the whole job now and then, so
records of later steps than the newest full one are what a job finds after each failure.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from conformance.jobs import STATES
from conformance.lab import Lab, NotApplicable
from conformance.managed import differences, opened, start
from conformance.verdict import Finding

FULL, LAST = 2, 3  # the newest full step, and the newest step that replicas have a record of


@dataclass(frozen=True, slots=True)
class Member:
    """One replica, as a manager's `replica=` gets it: the one that ranks 0 saves the whole job."""

    id: str
    rank: int

    def participating_rank(self) -> int:
        return self.rank

    @property
    def ahead(self) -> int:
        """How much further than the first replica it has read: each has data of its own."""
        return 100 * self.rank


MEMBERS = (Member("a", 0), Member("b", 1))


def replicas(lab: Lab) -> Iterator[Finding]:
    """The step of the full checkpoint decides: a newer record of the data does not belong to it."""
    manager = lab.managers.manager
    if "replica" not in inspect.signature(manager).parameters:
        raise NotApplicable("the manager's constructor has no argument replica")
    yield from lab.managers.findings(_train_and_load, 1, lab.managers.folder())


# --- on the ranks -------------------------------------------------------------------------------


def _train_and_load(manager: Any, folder: str) -> list[Finding]:
    with ExitStack() as stack:
        running = []
        for member in MEMBERS:
            job = start()
            job.position += member.ahead
            managed = opened(manager, job, folder, replica=member, interval=FULL)
            running.append((job, stack.enter_context(managed)))
        for step in range(1, LAST + 1):
            for job, found in running:
                job.train()
                found.save(step)
                found.wait("saving")
    return [finding for member in MEMBERS for finding in _loaded(manager, folder, member)]


def _loaded(manager: Any, folder: str, member: Member) -> list[Finding]:
    """What a restarted replica has that is not of the full step."""
    job = start(1)
    with opened(manager, job, folder, replica=member, load_only=True) as found:
        found.load()
    job.position -= member.ahead
    where = f"replica {member.id}, full step {FULL}, records up to step {LAST}"
    return differences(
        job,
        dict.fromkeys(STATES, FULL),
        coordinate=where,
        cause="the newest record was taken, whatever step the full checkpoint has",
        remedy="seek a replica's record at the step that the full checkpoint has",
    )
