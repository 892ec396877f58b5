"""Every mutant that is not equivalent to the right adapter is caught."""

from __future__ import annotations

import pytest

from tests.gate.mutations import KINDS, SIDES, Mutant, equivalent, judged, mutants
from tests.specimens.edits import edited


def test_all_non_equivalent_mutants_are_caught() -> None:
    assert judged(1, len(KINDS) * len(SIDES))["alive"] == []


@pytest.mark.slow
def test_all_of_many_mutants_are_caught() -> None:
    assert judged(2, 600)["alive"] == []


def test_a_mutant_that_changes_nothing_is_recognised() -> None:
    assert equivalent(Mutant("nothing", "both", edited()))
    assert not equivalent(mutants(1, 1)[0])


def test_mutants_are_the_same_for_a_seed() -> None:
    assert [m.words for m in mutants(5, 20)] == [m.words for m in mutants(5, 20)]
    assert len({m.words for m in mutants(5, 40)}) > 20
