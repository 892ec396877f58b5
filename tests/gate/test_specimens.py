"""The judge is tested: every specimen is caught by the check named for it, and by key."""

from __future__ import annotations

import pytest

from conformance.contract import BY_ID
from conformance.engine import Bench, one_thread
from tests.gate.detection import HERE, KINDS, SPECIMENS, cells_of, named, problems
from tests.specimens.specimen import Specimen


@pytest.mark.parametrize("specimen", SPECIMENS, ids=lambda s: s.name)
def test_the_named_check_catches_the_specimen_and_names_its_key(specimen: Specimen) -> None:
    bench = Bench(specimen.subject())
    with one_thread():
        cell = bench.run(BY_ID[specimen.check])
    assert cell.verdict == "fail", f"{cell.verdict}: {cell.reason}"
    assert named(specimen, cell), [f.keys for f in cell.findings]
    for finding in cell.findings:
        assert specimen.check in finding.again
        # What a person needs at 3 a.m.: which key, what was expected, what is there, why, what now.
        for part in ("what", "keys", "expected", "actual", "cause", "remedy"):
            assert getattr(finding, part), (part, finding)


def test_there_is_a_specimen_that_each_check_alone_is_said_to_catch() -> None:
    alone = {s.check for s in SPECIMENS if s.alone}
    # The whole matrix, `test_removing_any_check_lets_a_specimen_live`, finds the others.
    assert len(SPECIMENS) >= 80
    assert len({s.name for s in SPECIMENS}) == len(SPECIMENS)
    assert {s.check for s in SPECIMENS} == {c.id for c in HERE}
    assert alone <= {c.id for c in HERE}


@pytest.mark.slow
@pytest.mark.parametrize("specimens", [specimens for specimens, _ in KINDS])
def test_removing_any_check_lets_a_specimen_live(specimens: tuple[Specimen, ...]) -> None:
    assert problems({specimen.name: cells_of(specimen) for specimen in specimens}) == []
