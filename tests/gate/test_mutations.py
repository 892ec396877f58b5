"""Every mutant that is not equivalent to the right adapter is caught."""

from __future__ import annotations

import pytest

from conformance.contract import CONTRACT
from conformance.engine import Bench, one_thread
from tests.gate.mutations import KINDS, SIDES, Mutant, equivalent, mutants
from tests.specimens import right
from tests.specimens.edits import edited

# Cheapest first; the chapters that a mutant of keys or values can fail.
CHECKS = [c for c in CONTRACT if c.level <= 2 and c.chapter in ("keys", "shapes", "dtypes")] + [
    c for c in CONTRACT if c.chapter == "values"
]


def caught_by(mutant: Mutant) -> str:
    """The first check that fails on a mutant, or an empty string."""
    bench = Bench(right.subject("mutant", mutant.adapter))
    with one_thread():
        for clause in CHECKS:
            if bench.run(clause).verdict in ("fail", "error"):
                return clause.id
    return ""


def survivors(seed: int, number: int) -> list[str]:
    return [
        f"{m.side}: {m.words}"
        for m in mutants(seed, number)
        if not equivalent(m) and not caught_by(m)
    ]


def test_all_non_equivalent_mutants_are_caught() -> None:
    assert survivors(1, len(KINDS) * len(SIDES)) == []


@pytest.mark.slow
def test_all_of_many_mutants_are_caught() -> None:
    assert survivors(2, 600) == []


def test_a_mutant_that_changes_nothing_is_recognised() -> None:
    assert equivalent(Mutant("nothing", "both", edited()))
    assert not equivalent(mutants(1, 1)[0])


def test_mutants_are_the_same_for_a_seed() -> None:
    assert [m.words for m in mutants(5, 20)] == [m.words for m in mutants(5, 20)]
    assert len({m.words for m in mutants(5, 40)}) > 20
