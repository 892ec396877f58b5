"""Chapter `seed`: `step-0`, made by one process and loaded by a job of any split."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from conformance.degrees import Case
from conformance.jobs import Job, small_table
from conformance.lab import Lab
from conformance.managed import ManagerRaised, brief, differences, opened
from conformance.manager_lab import TIMEOUT, ManagerLab, case_of
from conformance.reference import Leaf
from conformance.verdict import Finding

ALONE = 30.0  # seconds; a seed of this size takes a tenth of one
_NORM, _EXTRA = "layers.4.attention.q_norm.weight", "layers.3.extra.weight"


def alone(lab: Lab) -> Iterator[Finding]:
    """One process makes a seed without the set-up of a job on many: nobody is there to wait for.

    A manager that waits longer than `ALONE` has failed.
    """
    made = Path(_seed(lab.managers, ALONE), "checkpoint", "step-0")
    if not made.is_dir():
        yield Finding(
            what="one process was told to make a seed, and made none",
            keys=("create_seed_checkpoint",),
            expected="the folder checkpoint/step-0",
            actual=", ".join(sorted(p.name for p in made.parent.glob("*"))) or "nothing",
            cause="the option is dropped, or the step is not due",
            remedy="save step 0 where create_seed_checkpoint is on, whatever the interval",
        )


def ranks(lab: Lab) -> Iterator[Finding]:
    """The seed's model on every rank, and its first step that of a job on one rank."""
    for case in lab.managers.cases:
        if case.ranks > 1:
            where = f"loaded under {case.name}"
            yield from lab.managers.findings(_load, case.ranks, _seed(lab.managers), case, where)


def fresh(lab: Lab) -> Iterator[Finding]:
    """A seed is the model only: the optimizer, the scheduler, the data and the counters start."""
    (found,) = lab.managers.run(_training_state, 1, _seed(lab.managers))
    if found:
        yield Finding(
            what="a job that starts from a seed does not start at its beginning",
            keys=tuple(found),
            expected="a fresh optimizer, and every counter 0",
            actual=", ".join(f"{key}: {value}" for key, value in found.items()),
            cause="step-0 was loaded as a full step",
            remedy="load only the model from step-0",
        )


def one_rank(lab: Lab) -> Iterator[Finding]:
    """Made on several ranks, a seed would depend on how many there were."""
    if not all(lab.managers.run(_refused_to_make, 2, lab.managers.folder())):
        yield Finding(
            what="a seed checkpoint was made by 2 ranks",
            keys=("create_seed_checkpoint",),
            expected="a refusal",
            actual="step-0 was saved",
            cause="the number of ranks is not looked at",
            remedy="raise where create_seed_checkpoint is on and there is more than one rank",
        )


def other_model(lab: Lab) -> Iterator[Finding]:
    """The seed of a model with other options is refused before any tensor has changed."""
    found = lab.managers.run(_load_others, 1, _seed(lab.managers))[0]
    for words, key, outcome in found:
        if outcome:
            yield Finding(
                what=f"a seed was loaded into a model with {words}",
                keys=(key,),
                expected="a refusal, and the model as it was",
                actual=outcome,
                cause="the keys, shapes and dtypes of the file are not compared with the model's",
                remedy="compare both sides before any data is read",
            )


def _seed(lab: ManagerLab, timeout: float = TIMEOUT) -> str:
    def make() -> str:
        folder = lab.folder()
        lab.run(_make, 1, folder, timeout=timeout)
        return folder

    return lab.once("seed", make)


# --- on the ranks -------------------------------------------------------------------------------


def _make(manager: Any, folder: str) -> None:
    job = Job.start(small_table(), case_of("1").degrees)
    job.position = 5  # not that of a fresh job, so that a load of it shows
    with opened(manager, job, folder, create_seed_checkpoint=True) as found:
        found.save(0, last_step=True)


def _load(manager: Any, folder: str, case: Case, where: str) -> list[Finding]:
    job = Job.start(small_table(), case.degrees, chunks=case.chunks, empty=True)
    with opened(manager, job, folder, load_only=True) as found:
        found.load()
    remedy = "give each rank its part of step-0, by its place in the whole tensor"
    loaded = differences(job, {"model": 0}, coordinate=where, remedy=remedy)
    job.train()  # on every rank, whatever this one has found: it is collective
    at = dict.fromkeys(("model", "optimizer", "lr_scheduler"), 1)
    words = {"what": "after the first step", "remedy": "refresh second copies after a load"}
    return loaded or differences(job, at, coordinate=where, **words)


def _training_state(manager: Any, folder: str) -> dict[str, str]:
    """Whatever is not as in a fresh job."""
    job = Job.start(small_table(), case_of("1").degrees)
    before = job.state("lr_scheduler", "train_state")
    with opened(manager, job, folder, load_only=True) as found:
        found.load()
    state = job.state("optimizer", "lr_scheduler", "train_state")
    out = {k: brief(state[k]) for k, v in before.items() if not _equal(state[k], v)}
    moments = {k: v for k, v in state.items() if k.startswith("optimizer.state.")}
    out |= {k: brief(v) for k, v in moments.items() if bool((v != 0).any())}
    if job.position:
        out["dataloader"] = f"position {job.position}"
    return out


def _equal(one: Any, two: Any) -> bool:
    return bool(one == two)


def _refused_to_make(manager: Any, folder: str) -> bool:
    job = Job.start(small_table(), case_of("fsdp2").degrees)
    try:
        with opened(manager, job, folder, create_seed_checkpoint=True) as found:
            found.save(0, last_step=True)
    except ManagerRaised:
        return True
    return False


def _load_others(manager: Any, folder: str) -> list[tuple[str, str, str]]:
    """For each other model: which, the key, and what happened where it was not refused."""
    out = []
    for words, key, table in _others():
        job = Job.start(table, case_of("1").degrees)
        before = {name: value.detach().clone() for name, value in job.state("model").items()}
        refused = False
        try:
            with opened(manager, job, folder, load_only=True) as found:
                found.load()
        except ManagerRaised:
            refused = True
        after = job.state("model")
        moved = [name for name, value in before.items() if not bool((after[name] == value).all())]
        changed = f"{len(moved)} tensors changed" if moved else ""
        out.append((words, key, changed if refused else changed or "it was not refused"))
    return out


def _others() -> list[tuple[str, str, dict[str, Leaf]]]:
    table = small_table()
    gate = "layers.10.moe.router.gate.weight"
    return [
        ("another shape", gate, {**table, gate: replace(table[gate], shape=(12, 26))}),
        ("a tensor that the seed lacks", _EXTRA, {**table, _EXTRA: Leaf((5, 3))}),
        ("one tensor fewer", _NORM, {k: v for k, v in table.items() if k != _NORM}),
        ("another dtype", _NORM, {**table, _NORM: replace(table[_NORM], dtype="bfloat16")}),
    ]
