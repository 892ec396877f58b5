"""Chapter `exclude`: what `exclude_from_loading` leaves out stays as it is, and the rest is loaded.

On one rank; the states are those of every training job.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from conformance.jobs import STATES
from conformance.lab import Lab
from conformance.managed import Try
from conformance.manager_lab import OWN, STEPS, states
from conformance.verdict import Finding

TRAINING = tuple(name for name in STATES if name != "model")
UNKNOWN = (["data_loader"], ["optimiser"], ["optimizer,lr_scheduler"], ["model"])


def subsets(lab: Lab) -> Iterator[Finding]:
    """Every subset but those that name the optimizer without its scheduler."""
    folder, saved = lab.managers.saved_steps(), STEPS["step-10"]
    chosen = [
        excluded
        for count in range(len(TRAINING) + 1)
        for excluded in combinations(TRAINING, count)
        if "optimizer" not in excluded or "lr_scheduler" in excluded
    ]
    tries = [Try(folder, options={"exclude_from_loading": list(one)}) for one in chosen]
    for excluded, outcome in zip(chosen, lab.managers.try_loads(*tries), strict=True):
        wanted = {name: OWN if name in excluded else saved for name in STATES}
        words = "a load does not leave out what is excluded, and it only"
        where = f"exclude_from_loading={','.join(excluded) or 'nothing'}"
        remedy = "load each state by its own name, and leave those that are named as they are"
        yield from states(outcome, wanted, what=words, coordinate=where, remedy=remedy)


def unknown(lab: Lab) -> Iterator[Finding]:
    """A name that is none is refused, not ignored: whoever typed it means a state."""
    folder = lab.managers.saved_steps()
    tries = [Try(folder, options={"exclude_from_loading": names}) for names in UNKNOWN]
    for names, outcome in zip(UNKNOWN, lab.managers.try_loads(*tries), strict=True):
        if not outcome.words:
            yield Finding(
                what="a name that no state has was accepted in exclude_from_loading",
                keys=tuple(names),
                expected="an error that lists the states",
                actual=str(outcome),
                cause="names are looked up among the states, and those not found are dropped",
                remedy="compare the names with the states of the job when it is configured",
            )


def coupled(lab: Lab) -> Iterator[Finding]:
    """A scheduler restored onto a fresh optimizer drives it with another run's rates."""
    folder = lab.managers.saved_steps()
    for excluded in (["optimizer"], ["optimizer", "dataloader"]):
        (outcome,) = lab.managers.try_loads(Try(folder, options={"exclude_from_loading": excluded}))
        if not outcome.words:
            yield Finding(
                what="the optimizer was left out of a load that restores its scheduler",
                keys=("optimizer", "lr_scheduler"),
                coordinate=f"exclude_from_loading={','.join(excluded)}",
                expected="an error: the two are left out together",
                actual=str(outcome),
                cause="each name is looked at by itself",
                remedy="refuse optimizer without lr_scheduler when it is configured",
            )
