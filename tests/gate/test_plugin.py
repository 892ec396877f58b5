"""The pytest plugin in a project that is not ours: no conftest, -k, junit, xdist, collection."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest_plugins = ["pytester"]

THIRD_PARTY = """
from conformance import Subject, parametrize
from tests.specimens import right
from tests.specimens.edits import drop, edited

SUBJECTS = [
    Subject("good", adapter=right.Right, native=right.native()),
    Subject("bad", adapter=edited(before_export=drop("hash")), native=right.native(),
            expect={"keys.exact": "unused here"}),
]

@parametrize(SUBJECTS, checks=["keys.total", "keys.exact", "shapes.*"])
def test_contract(cell):
    cell()
"""
ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makepyfile(test_mine=THIRD_PARTY)
    return pytester


def run(project: pytest.Pytester, *args: str) -> pytest.RunResult:
    return project.runpytest_subprocess("-p", "no:cacheprovider", "-rs", *args)


def test_cells_are_tests_of_the_third_partys_own_file(project: pytest.Pytester) -> None:
    result = run(project, "-v", "--junitxml=out.xml")
    result.assert_outcomes(passed=3, failed=1, skipped=4)
    result.stdout.fnmatch_lines(
        [
            "*::test_contract?good::keys.total? PASSED*",
            "*::test_contract?bad::keys.total? FAILED*",
            "*to_hf dropped 1 of 108 native tensors*",
            "*hash.table*",
            "*again  torchtitan-ckpt check test_mine:SUBJECTS.1 --check keys.total",
            "SKIPPED*n/a: the subject supplies no HF key list and no reference*",
        ]
    )
    cases = ElementTree.parse(project.path / "out.xml").getroot().iter("testcase")
    assert "test_contract[good::keys.total]" in {case.get("name") for case in cases}


def test_what_a_subject_is_called_on_a_command_line(project: pytest.Pytester) -> None:
    """A subject of a module by its place, whatever it calls itself; and no folder is left."""
    project.makepyfile(
        mine="from tests.specimens import right\nfrom tests.specimens.drawn import PairsExperts\n"
        "BAD = right.subject('odd', PairsExperts, sizes=right.SIZES)\n",
        test_mine="from conformance import parametrize\nfrom mine import BAD\n"
        "@parametrize(BAD, checks=['values.drawn'])\ndef test_contract(cell):\n    cell()\n",
    )
    again = "*again  torchtitan-ckpt check mine:BAD --check values.drawn --example 'experts=3 *'*"
    result = run(project, "test_mine.py")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([again])
    words = ("--ckpt-subject", "mine:BAD", "--ckpt-check", "values.drawn")
    result = run(project, "--pyargs", "conformance", *words)
    result.stdout.fnmatch_lines([again])
    assert not list(project.path.glob(".hypothesis/*"))


def test_a_subject_made_inside_a_call_is_repeated_by_its_test(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_mine=THIRD_PARTY.replace("SUBJECTS = [", "HERE = {'all': [")
        .replace("\n]\n", "\n]}\n")
        .replace("(SUBJECTS,", "(HERE['all'],")
    )
    result = run(project, "-k", "bad and total")
    result.assert_outcomes(failed=1, deselected=7)
    result.stdout.fnmatch_lines(["*again  pytest 'test_mine.py::test_contract?bad::keys.total?'*"])


def test_a_list_of_subjects_is_named_as_one(project: pytest.Pytester) -> None:
    words = ("--ckpt-subject", "test_mine:SUBJECTS", "--ckpt-check", "keys.total")
    result = run(project, "--pyargs", "conformance", "-v", *words)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*?test_mine:SUBJECTS.0::keys.total?*PASSED*",
            "*?test_mine:SUBJECTS.1::keys.total?*FAILED*",
            "*again  torchtitan-ckpt check test_mine:SUBJECTS.1 --check keys.total",
        ]
    )


@pytest.mark.parametrize("workers", ["0", "2"])
def test_what_waits_for_a_failing_check_is_no_pass(project: pytest.Pytester, workers: str) -> None:
    """Nobody asked for the check that fails; those that were asked for did not run for it."""
    project.makepyfile(
        test_mine=THIRD_PARTY.replace('"keys.total", "keys.exact", ', '"values.*", ')
    )
    result = run(project, "-k", "bad", "-n", workers)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    outcomes = result.parseoutcomes()
    assert outcomes.get("failed", 0) == 0
    assert outcomes["skipped"] > 0
    result.stdout.fnmatch_lines(["*FAIL keys.total*", "*hash.table*"])
    assert result.stdout.str().count("FAIL keys.total") == 1


def test_k_selects_by_check_and_subject(project: pytest.Pytester) -> None:
    run(project, "-k", "good and total").assert_outcomes(passed=1, deselected=7)


def test_workers_share_nothing_and_agree(project: pytest.Pytester) -> None:
    run(project, "-n", "2").assert_outcomes(passed=3, failed=1, skipped=4)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_what_a_green_line_does_not_say_is_said_below(
    workers: str, project: pytest.Pytester
) -> None:
    """What did not run and why, what is noted, and the counts; workers hand it over."""
    project.makepyfile(
        test_mine=THIRD_PARTY.replace(
            "native=right.native()),",
            "native=right.native(), notes=('keys from the hub',)),",
            1,
        )
    )
    result = run(project, "-n", workers, "--junitxml=out.xml")
    result.assert_outcomes(passed=3, failed=1, skipped=4)
    no_list = "the subject supplies no HF key list and no reference"
    result.stdout.fnmatch_lines(
        [
            "*= checkpoint conformance =*",
            f"n/a     bad  keys.exact: {no_list}; expected to fail: unused here, which was not*",
            f"n/a     bad  shapes.exact: {no_list}",
            f"n/a     good  keys.exact, shapes.exact: {no_list}",
            "note good: keys from the hub",
            "8 cells (2 subjects x 4 checks, cpu): 3 pass · 1 fail · 4 n/a",
            "contract 2026.12 · seed 20261201 · python * torch *",
        ]
    )
    text = result.stdout.str()
    assert text.count("keys from the hub") == text.count("8 cells (") == 1
    # JUnit has a place of its own for words: the cells that travel are not repeated there.
    assert "properties" not in {
        child.tag
        for case in ElementTree.parse(project.path / "out.xml").getroot().iter("testcase")
        for child in case
    }


def test_a_long_list_below_is_cut_unless_asked_for(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_mine=THIRD_PARTY.replace(
            "native=right.native()),",
            "native=right.native(), notes=tuple(f'note {n}' for n in range(40))),",
            1,
        )
    )
    told = ("-k", "good and total")
    for more, words in (
        ((), ["note good: note 26", "… and 20 more lines (-v)", "1 cell (*"]),
        (("-v",), ["note good: note 9", "1 cell (*"]),
        (("-q",), ["contract *"]),
    ):
        result = run(project, *told, *more)
        result.stdout.fnmatch_lines(words)
    result.stdout.no_fnmatch_line("note good*")


def test_github_gets_annotations_and_a_summary(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = project.path / "summary.md"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    result = run(project, "-n", "2", "-k", "total")
    result.stdout.fnmatch_lines(["::error title=bad%3A%3Akeys.total::to_hf dropped 1 of 108*"])
    written = summary.read_text()
    assert "| keys.total | ❌ fail | ✅ pass |" in written
    assert written.count("| keys.total |") == 1, "workers write none of their own"


def test_a_project_that_does_not_use_it_hears_nothing(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(pytester.path / "summary.md"))
    pytester.makepyfile("def test_light():\n    pass\n")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)
    assert "conformance" not in result.stdout.str().partition("plugins:")[2].partition("\n")[2]
    assert not (pytester.path / "summary.md").exists()


def test_the_suite_runs_on_a_subject_named_on_the_command_line(project: pytest.Pytester) -> None:
    result = run(
        project,
        "--pyargs",
        "conformance",
        "--ckpt-subject",
        "tests.gate.test_engine:SUBJECT",
        "--ckpt-check",
        "keys.total",
        "--ckpt-check",
        "shapes.native",
        "-v",
    )
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*?tests.gate.test_engine:SUBJECT::keys.total?*PASSED*"])


def test_unknown_subjects_and_globs_are_told_in_words(project: pytest.Pytester) -> None:
    suite = ("--pyargs", "conformance", "-rs")
    result = run(project, *suite, "--ckpt-subject", "qwen", "--ckpt-check", "keys.*t*")
    told = 1 + result.parseoutcomes().get("skipped", 0)
    result.assert_outcomes(failed=1, skipped=told - 1)
    assert told > 1
    result.stdout.fnmatch_lines(["*no subject is called 'qwen'*", "*blocked: by keys.total: no*"])
    for option, value, said in (
        ("--ckpt-check", "kez", "*matches 'kez'*"),
        ("--ckpt-contract", "2099.01", "*no version '2099.01' of the contract*"),
        ("--ckpt-level", "0", "*the contract has no level 0*"),
    ):
        result = run(project, "--pyargs", "conformance", "--ckpt-subject", "x", option, value)
        assert result.ret in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.USAGE_ERROR)
        result.stdout.fnmatch_lines([said])


def test_a_run_without_a_subject_is_no_pass(project: pytest.Pytester) -> None:
    result = run(project, "--pyargs", "conformance")
    assert result.ret in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.USAGE_ERROR)
    result.stdout.fnmatch_lines(["*nothing would be checked: name a subject with --ckpt-subject*"])


def test_cells_that_are_all_not_applicable_are_no_pass(project: pytest.Pytester) -> None:
    chosen = ("--ckpt-subject", "tests.gate.test_engine:SUBJECT", "--ckpt-check", "resume.*")
    result = run(project, "--pyargs", "conformance", *chosen)
    assert result.ret == 5
    result.stdout.fnmatch_lines(["nothing was checked: that is not a pass"])
    assert result.stdout.str().count("nothing was checked") == 1


def test_an_expected_id_that_the_contract_does_not_have_fails(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_mine="from conformance import Subject, parametrize\n"
        "@parametrize(Subject('odd', expect={'keys.totl': 'a typo'}), checks=['keys.leaves'])\n"
        "def test_contract(cell):\n    cell()\n"
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*did you mean keys.total*"])


def test_collecting_an_unrelated_project_imports_no_torch(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "import sys\ndef test_light():\n    assert 'torch' not in sys.modules\n"
        "    assert 'conformance.plugin' in sys.modules\n"
    )
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


def test_a_device_is_named_in_the_header_and_an_absent_simulator_in_words(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(project, "--ckpt-device", "cpu", "-k", "good and total")
    result.assert_outcomes(passed=1, deselected=7)
    result.stdout.fnmatch_lines(["checkpoint conformance on: cpu"])
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TORCHTITAN_CKPT_NPU_PYTHON", "")
    result = run(project, "--ckpt-device", "npu-sim")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.re_match_lines([".*(wants g\\+\\+|wants torch_npu).*"])
    result.stdout.no_fnmatch_line("*passed*")
