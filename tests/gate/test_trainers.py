"""The chapter `job`: training jobs that are broken on purpose are caught by the check named."""

from __future__ import annotations

import pytest

from conformance import Subject, check
from conformance.contract import BY_ID
from conformance.engine import Bench
from tests.gate.detection import JOBS, named
from tests.specimens.specimen import Specimen
from tests.specimens.trainers import ASSETS, SPECIMENS


@pytest.mark.slow
@pytest.mark.parametrize("specimen", SPECIMENS, ids=lambda s: f"{s.check}-{s.name}")
def test_the_named_check_catches_the_trainer_and_says_what(specimen: Specimen) -> None:
    cell = Bench(specimen.subject()).run(BY_ID[specimen.check])
    assert cell.verdict == "fail", f"{cell.verdict}: {cell.reason}"
    assert named(specimen, cell), cell.findings
    assert all(finding.remedy for finding in cell.findings), cell.findings


def test_every_check_of_jobs_has_a_specimen_that_it_alone_should_catch() -> None:
    assert {s.check for s in SPECIMENS if s.alone} == {c.id for c in JOBS}


def test_a_job_that_ends_with_an_error_is_a_finding_with_its_last_words() -> None:
    trainer = ("-c", "raise SystemExit('no training today')")
    report = check(
        Subject("tired", job=str(ASSETS), trainer=trainer), checks=["job.unchanged", "job.resume"]
    )
    assert [cell.verdict for cell in report.cells] == ["fail", "fail"]
    words = report.findings[0].what
    assert words.startswith("a training job ended with exit code 1: no training today (-c ")
    assert "--hf_assets_path" in words
