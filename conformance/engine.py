"""Runs subjects through the contract: `check()`. What becomes of each check is `bench.py`'s."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from conformance.bench import SEED, Bench, one_thread, seldom_collected
from conformance.contract import VERSION, known, previews, select
from conformance.lab import MAX_ELEMENTS
from conformance.manager_lab import case_of
from conformance.subject import Subject, place_of
from conformance.verdict import Cell, Report
from conformance.versions import versions
from torchtitan_ckpt.device import ENV, Device, current
from torchtitan_ckpt.errors import ConfigError, Problem

Progress = Callable[[str, int, int], None]
# Checks that draw cases; each repeats one of them.
SEARCHING = ("values.drawn", "files.reread")


def check(
    subjects: Subject | str | Iterable[Subject | str],
    *,
    checks: Sequence[str] = (),
    level: int | None = None,
    seed: int = SEED,
    max_elements: int = MAX_ELEMENTS,
    version: str = VERSION,
    without: Sequence[str] = (),
    degrees: Sequence[Any] = (),
    device: str | None = None,
    example: str = "",
    progress: Progress | None = None,
) -> Report:
    """Run subjects through the contract and return every cell.

    checks    globs of ids; level: the highest level; without: ids that are left out
    version   of the contract: checks that came with a later one are previews, and run when named
              by their whole id
    degrees   parallel degrees for the chapter reshard, in place of the subjects' own
    device    cpu, npu or cuda: where the tensors of conversions and files lie; None is the
              environment variable TORCHTITAN_CKPT_DEVICE, else cpu
    example   the one case that a searching check is to repeat, as its finding printed it
    progress  called before each cell with its id, its number from 0, and how many there are
    Raises ConfigError for ids that are not in the contract and for declarations without a reason
    or a key, DeviceError for a device that is not usable. What a subject supplies and cannot be
    used is a failure of the first check that meets it.
    """
    from conformance.subjects import resolve, spread

    given = [subjects] if isinstance(subjects, Subject | str) else list(subjects)
    found = [one for s in given for one in (spread(s) if isinstance(s, str) else (s,))]
    called = [s if isinstance(s, str) else place_of(s) for s in found]
    resolved = [resolve(s) if isinstance(s, str) else s for s in found]
    known(without, "without")
    chosen = [c for c in select(checks, level=level, version=version) if c.id not in without]
    if max_elements < 1:
        raise ConfigError(
            Problem(
                code="check.no-elements",
                what="values cannot be checked on no element",
                expected="a number above 0",
                actual=str(max_elements),
            )
        )
    if example and [c.id for c in chosen if c.id not in SEARCHING]:
        raise ConfigError(
            Problem(
                code="check.no-example",
                what="--example repeats a case of a check that searches, and of no other",
                expected=" or ".join(f"--check {check_id}" for check_id in SEARCHING),
            )
        )
    names = [s.name for s in resolved]
    if len(set(names)) != len(names):
        raise ConfigError(
            Problem(
                code="check.same-name", what="two subjects have one name", actual=", ".join(names)
            )
        )
    where = device_under_test(device)
    for words in degrees:
        case_of(words)
    # Every usage error comes before the first check.
    benches = [
        Bench(
            replace(subject, degrees=tuple(degrees)) if degrees else subject,
            seed=seed,
            max_elements=max_elements,
            without=without,
            device=where,
            example=example,
            called=words,
        )
        for subject, words in zip(resolved, called, strict=True)
    ]
    cells: list[Cell] = []
    notes: list[str] = []
    while benches:  # a bench that is done gives back its memory
        bench = benches.pop(0)
        mine: dict[str, Cell] = {}
        for clause in chosen:
            if progress:
                at = f"{bench.subject.name}::{clause.id}"
                progress(at, len(cells) + len(mine), len(resolved) * len(chosen))
            with one_thread(), seldom_collected():
                mine[clause.id] = bench.run(clause)
        # A run is not clean where what it asked for waits for a check that fails.
        mine |= {one.check: one for cell in [*mine.values()] for one in bench.behind(cell)}
        cells += mine.values()
        notes += bench.notes
    return Report(
        cells=tuple(cells),
        seed=seed,
        contract=version,
        device=where.label,
        versions=versions(),
        notes=(*notes, *previews(checks, level=level, version=version)),
    )


def device_under_test(force: str | None = None) -> Device:
    """The device of `force`, else of the environment variable, else the CPU.

    Unlike a job, a check takes no accelerator that nobody asked for: it shares the machine.
    """
    return current(force or (None if os.environ.get(ENV) else "cpu"))
