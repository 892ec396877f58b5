"""The chapters about managers: ours passes, torchtitan's is told what is wrong, the broken fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance import Subject, check
from conformance.checks import reshard
from conformance.contract import BY_ID
from conformance.engine import Bench, one_thread
from conformance.lab import Lab
from conformance.manager_lab import DEGREES, ManagerLab, cases_of
from conformance.subjects import resolve
from conformance.subjects.managers import TITAN
from tests.gate.detection import MANAGED, named
from tests.specimens.managers import SPECIMENS
from tests.specimens.specimen import Specimen
from torchtitan_ckpt import CheckpointManager
from torchtitan_ckpt.errors import ConfigError

pytest_plugins = ["pytester"]
MINE = """
import torchtitan_ckpt

class MyManager:
    Config = torchtitan_ckpt.CheckpointManager.Config

    def __init__(self, config, **job):
        known = {"optimizer", "lr_scheduler", "dataloader", "train_state"}
        names = [name for name in config.exclude_from_loading if name in known]
        config = torchtitan_ckpt.CheckpointManager.Config(
            **{**vars(config), "exclude_from_loading": names}
        )
        inner = torchtitan_ckpt.CheckpointManager(config, **job)
        self.save, self.load, self.close = inner.save, inner.load, inner.close
"""
TEST = """
from conformance import Subject, parametrize
from my_manager import MyManager

MINE = Subject("mine", manager=MyManager, degrees=("1", "fsdp2", "fsdp2 x tp2"))

@parametrize(MINE, checks=["exclude.*", "resume.load-step"])
def test_my_manager(cell):
    cell()
"""

# One of each chapter by default; with all of the chapter reshard it is half a minute.
QUICK = {
    "reshard.replicas": "RanksNotCompared",
    "seed.fresh": "SeedWithPosition",
    "resume.half-deleted": "MarkerIsEnough",
    "exclude.subsets": "CounterLoadedAnyway",
    "optimizer.none-over-moments": "NoneOverMoments",
}


def quick(specimen: Specimen) -> bool:
    return specimen.name.replace("-", "") == QUICK.get(specimen.check, "").lower()


@pytest.mark.parametrize(
    "specimen",
    [
        pytest.param(s, marks=() if quick(s) else pytest.mark.slow, id=f"{s.check}-{s.name}")
        for s in SPECIMENS
    ],
)
def test_the_named_check_catches_the_manager_and_says_what(specimen: Specimen) -> None:
    with one_thread():
        cell = Bench(specimen.subject()).run(BY_ID[specimen.check])
    assert cell.verdict == "fail", f"{cell.verdict}: {cell.reason}"
    assert named(specimen, cell), cell.findings
    assert all(finding.remedy for finding in cell.findings), cell.findings


def test_every_check_of_managers_has_a_specimen_that_it_alone_should_catch() -> None:
    assert {s.check for s in SPECIMENS if s.alone} == {c.id for c in MANAGED}
    assert sum(map(quick, SPECIMENS)) == len(QUICK)
    assert {c.chapter for c in MANAGED} == {c.partition(".")[0] for c in QUICK}


@pytest.mark.slow
def test_ours_passes_everything() -> None:
    report = check("manager:ours", checks=[c.id for c in MANAGED])
    assert report.counts["pass"] == len(MANAGED), report.text()


def test_ours_passes_what_one_rank_can_show() -> None:
    report = check("manager:ours", checks=["resume.*", "exclude.*", "optimizer.*"])
    assert report.counts["pass"] == len(report.cells), report.text()


@pytest.mark.needs_titan
@pytest.mark.slow
def test_torchtitans_manager_fails_where_it_is_expected_to_and_nowhere_else() -> None:
    pytest.importorskip("torchtitan", reason="wants the extra 'titan'")
    report = check("manager:titan", checks=[c.id for c in MANAGED])
    assert {c.check for c in report.cells if c.verdict == "xfail"} == set(TITAN)
    unseen = {c.check for c in report.cells if c.verdict == "n/a"}
    assert unseen == {"resume.pinned"}  # it pins only where there is an accelerator
    assert report.counts["pass"] == len(MANAGED) - len(TITAN) - len(unseen), report.text()


@pytest.mark.needs_titan
def test_the_silent_face_of_none_is_told_with_its_cause() -> None:
    pytest.importorskip("torchtitan", reason="wants the extra 'titan'")
    (cell,) = check("manager:titan", checks=["optimizer.none-over-moments"]).cells
    assert cell.verdict == "xfail"
    assert cell.findings[0].keys == ("optimizer.state.layers.11.attention.wo.weight.exp_avg",)
    assert "DCP pickles a None" in cell.findings[0].cause


def test_without_torchtitan_its_manager_is_not_applicable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    report = check("manager:titan", checks=["resume.newest"])
    assert report.cells[0].verdict == "n/a"
    assert report.exit_code == 5
    assert "torchtitan is not installed" in report.text()


def test_an_adapter_alone_makes_the_chapters_not_applicable() -> None:
    report = check("llama3", checks=["resume.newest", "reshard.full"])
    assert {c.verdict for c in report.cells} == {"n/a"}
    assert {c.reason for c in report.cells} == {"the subject supplies no manager"}


def test_managers_are_found_by_name() -> None:
    assert resolve("manager:ours").manager is CheckpointManager
    with pytest.raises(ConfigError, match="did you mean manager:ours"):
        resolve("manager:our")


def test_a_manager_that_ranks_cannot_import_is_refused_in_words() -> None:
    class Local(CheckpointManager):
        """Has no name that another process could import it by."""

    report = check(Subject("local", manager=Local), checks=["resume.newest"])
    assert report.exit_code == 1
    assert "make it a class at the top of a module" in report.text()


def test_degrees_are_the_subjects_or_those_asked_for() -> None:
    def names(*degrees: str) -> list[str]:
        return [c.name for c in cases_of(Subject("m", manager=CheckpointManager, degrees=degrees))]

    assert names() == list(DEGREES)
    assert names("fsdp2", "tp=2", "tp2") == ["fsdp2", "tp2"]
    assert names("fsdp4") == ["1", "fsdp4"]
    with pytest.raises(ConfigError, match="needs 16 ranks"):
        names("fsdp16")
    with pytest.raises(ConfigError, match="not a list of parallel degrees"):
        names("many")


def test_every_degree_is_a_source_and_a_target() -> None:
    pairs = ManagerLab(Subject("m", manager=CheckpointManager)).pairs
    assert [a.name for a, _ in pairs] == list(DEGREES)
    assert {b.name for _, b in pairs} == set(DEGREES)
    assert all(a != b for a, b in pairs)


def test_pictures_have_what_each_rank_held_before_and_after() -> None:
    """Positions and values; no check of resharding is without a picture."""
    lab = Lab(Subject("m", manager=CheckpointManager), seed=0)
    assert [*reshard.dataloader(lab), *reshard.replicas(lab)] == []
    (positions,) = lab.pictures["reshard.dataloader"]
    (values,) = lab.pictures["reshard.replicas"]
    told = {
        row.split: [[part.value for part in held.parts] for (held,) in row.stages]
        for row in (*positions.rows, *values.rows)
    }
    assert told == {
        "fsdp2 to 1": [["6", "8"], ["refused"]],
        "1 to fsdp2": [["6"], ["refused", "refused"]],
        "fsdp2": [["1", "2"], ["refused", "refused"]],
    }
    (refusal,) = positions.rows[0].stages[1]
    assert "saved at another data-parallel degree" in refusal.words


def test_a_picture_has_what_a_manager_lost() -> None:
    found = {s.name: s for s in SPECIMENS}
    lab = Lab(found["ranks-not-compared"].subject(), seed=0)
    (finding,) = reshard.replicas(lab)
    (row,) = lab.pictures["reshard.replicas"][0].rows
    after = [part.value for part in row.stages[1][0].parts]
    assert len(set(after)) == 1
    assert finding.actual == ", ".join(f"rank {n}: {float(v)}" for n, v in enumerate(after))
    lab = Lab(found["position-dropped"].subject(), seed=0)
    assert len(list(reshard.dataloader(lab))) == 2
    rows = lab.pictures["reshard.dataloader"][0].rows
    after = [[part.value for part in row.stages[1][0].parts] for row in rows]
    assert after == [["0"], ["0", "0"]]


def test_findings_of_degrees_are_repeated_under_the_same_degrees() -> None:
    broken = next(s for s in SPECIMENS if s.check == "reshard.full").subject()
    report = check(broken, checks=["reshard.full"], degrees=["fsdp2"])
    assert report.findings[0].again.startswith(
        "check(subject, checks=['reshard.full'], degrees=['fsdp2'])"
    )
    assert {f.coordinate for f in report.findings} == {"saved under 1, loaded under fsdp2"}


def test_a_third_party_puts_its_manager_through_the_gate(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The README's example, in a project that is not ours."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    pytester.makepyfile(my_manager=MINE, test_mine=TEST)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-v")
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(
        ["*::exclude.unknown? FAILED*", "*was accepted in exclude_from_loading*"]
    )
