"""The verbs `check` and `checks`: options, exit codes, files, words on stdout and stderr."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from conformance import Subject
from conformance.contract import CONTRACT, VERSION
from tests.specimens import right
from tests.specimens.edits import drop, edited
from tests.specimens.specimen import BLIND
from torchtitan_ckpt.cli import main

GOOD = right.subject("good", **BLIND)
BAD = right.subject("bad", edited(before_export=drop("hash")), **BLIND)
PRINTS = right.subject("prints", edited(lambda out: print("converting") or out), **BLIND)
EMPTY = right.subject("empty", **BLIND)
BOTH = [GOOD, BAD]
NONE: list[Subject] = []
MIXED = [GOOD, "good"]
HERE = "tests.gate.test_cli"


def test_clean_is_0_and_findings_are_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{HERE}:GOOD", "--check", "keys.total"]) == 0
    assert "1 cell (1 subject x 1 check, cpu): 1 pass" in capsys.readouterr().out
    assert main(["check", f"{HERE}:BAD", "--check", "keys.total", "--check", "keys.layers"]) == 1
    out = capsys.readouterr().out
    assert "to_hf dropped 1 of 108 native tensors" in out
    assert "2 cells" in out


def test_a_failing_check_that_nobody_asked_for_is_told_where_it_blocks_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Clean beside blocked would be a pass of what nobody has looked at."""
    asked = ("--check", "values.drawn", "--check", "keys.layers")
    assert main(["check", f"{HERE}:BAD", *asked]) == 1
    out = capsys.readouterr().out
    assert "FAIL keys.total" in out
    assert "1 pass · 1 fail · 1 blocked" in out


def test_a_list_is_all_of_its_subjects(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{HERE}:BOTH", "--check", "keys.total"]) == 1
    out = capsys.readouterr().out
    assert "2 cells (2 subjects x 1 check, cpu)" in out
    assert f"check {HERE}:BOTH.1 --check keys.total" in out
    assert main(["check", f"{HERE}:BOTH.0", "--check", "keys.total"]) == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NONE", "NONE is an empty list"),
        ("MIXED", "MIXED.1 is not a Subject"),
        ("BOTH.2", "has no 'BOTH.2'"),
        ("GOOD.0", "has no 'GOOD.0'"),
    ],
)
def test_what_is_no_list_of_subjects(
    name: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", f"{HERE}:{name}", "--check", "keys.total"]) in (2, 3)
    assert words in capsys.readouterr().err


def test_usage_errors_are_2_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{HERE}:GOOD", "--check", "keys.totel"]) == 2
    captured = capsys.readouterr()
    assert "did you mean keys.total?" in captured.err
    assert captured.out == ""


def test_nothing_checked_is_5(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{HERE}:GOOD", "--check", "forward.*"]) == 5
    assert "nothing was checked" in capsys.readouterr().out


def test_reports_are_written_where_they_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"--json": "r.json", "--junit": "r.xml", "--html": "r.html", "--markdown": "r.md"}
    options = [part for k, v in names.items() for part in (k, str(tmp_path / v))]
    assert main(["check", f"{HERE}:BAD", "--check", "keys.total", *options]) == 1
    assert {p.name for p in tmp_path.iterdir()} == set(names.values())
    assert json.loads((tmp_path / "r.json").read_text())["exit_code"] == 1
    capsys.readouterr()
    assert main(["check", f"{HERE}:BAD", "--check", "keys.total", "--json=-"]) == 1
    assert json.loads(capsys.readouterr().out)["counts"]["fail"] == 1


def test_what_a_subject_prints_is_no_part_of_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", f"{HERE}:PRINTS", "--check", "keys.total", "--json=-"])
    captured = capsys.readouterr()
    assert json.loads(captured.out)["counts"]["pass"] == 1
    assert "converting" in captured.err


def test_a_report_that_cannot_be_written_costs_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without its folder it is refused before the checks; later, what was found is said first."""
    for name, ran in (("no/r.html", False), (".", True)):
        path = str(tmp_path / name)
        assert main(["check", f"{HERE}:BAD", "--check", "keys.total", "--html", path]) == 2
        said = capsys.readouterr()
        assert "cannot be written" in said.err
        assert ("FAIL keys.total" in said.out) is ran


def test_github_gets_annotations_and_a_summary_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    assert main(["check", f"{HERE}:BAD", "--check", "keys.total"]) == 1
    assert "::error title=bad%3A%3Akeys.total::" in capsys.readouterr().out
    assert "keys.total" in (tmp_path / "summary.md").read_text()


def test_checks_lists_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checks"]) == 0
    out = capsys.readouterr().out
    assert all(check.id in out and check.why in out for check in CONTRACT)
    assert f"{len(CONTRACT)} checks, contract {VERSION}" in out
    assert main(["checks", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [c["id"] for c in listed["checks"]] == [c.id for c in CONTRACT]


def test_a_later_version_of_the_contract_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from conformance import contract

    later = tuple(
        replace(c, since="2027.03") if c.id == "shapes.native" else c for c in contract.CONTRACT
    )
    monkeypatch.setattr(contract, "CONTRACT", later)
    words = ["check", f"{HERE}:GOOD", "--level", "1", "--json=-"]

    def ran(*more: str) -> tuple[str, bool]:
        assert main([*words, *more]) == 0
        said = json.loads(capsys.readouterr().out)
        return said["contract"], "good::shapes.native" in {c["id"] for c in said["cells"]}

    assert ran() == (VERSION, False), "a preview runs when it is named"
    assert ran("--check", "shapes.native") == (VERSION, True)
    assert ran("--contract", "2027.03") == ("2027.03", True)
    assert main([*words, "--contract", "2027.04"]) == 2
    assert "2026.12 to 2027.03" in capsys.readouterr().err
    assert main(["checks"]) == 0
    assert "(preview, 2027.03)" in capsys.readouterr().out


def test_a_folder_is_a_subject(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"a.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    assert main(["check", str(tmp_path)]) == 0
    save_file({"a.weight": torch.ones(2)}, tmp_path / "other.safetensors")
    assert main(["check", str(tmp_path)]) == 1
    assert "2 files and no index" in capsys.readouterr().out


# ------------------------------------------------------------------ the device


def test_npu_sim_starts_the_same_command_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a fresh process whose libraries are the simulator's, with `npu` for the device."""
    from conformance.ascend_sim import launcher

    started: list[list[str]] = []
    monkeypatch.setattr(launcher, "run", lambda argv, **_: started.append(list(argv)) or 1)
    words = ["check", f"{HERE}:GOOD", "qwen3", "--check", "keys.*", "--level", "2", "--verbose"]
    assert main([*words, "--json", "-", "--device", "npu-sim"]) == 1
    assert started == [
        [
            *("python", "-m", "torchtitan_ckpt", "check", f"{HERE}:GOOD", "qwen3"),
            *("--check=keys.*", "--level=2", "--device=npu", "--json=-", "--verbose"),
        ]
    ]


@pytest.mark.parametrize(
    ("missing", "remedy"),
    [("wheel", "run scripts/setup_npu_sim.sh"), ("compiler", "install g++")],
)
def test_without_wheel_or_compiler_one_sentence_says_so(
    missing: str, remedy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from conformance.ascend_sim import build, launcher

    found = {} if missing == "wheel" else {"torch": "2.13.0", "torch_npu": "2.13.0"}
    monkeypatch.setattr(launcher, "_versions", lambda _: found)
    monkeypatch.setattr(build, "compiler", lambda: None)
    assert main(["check", f"{HERE}:GOOD", "--device", "npu-sim"]) not in (0, 1)
    captured = capsys.readouterr()
    assert remedy in captured.err
    assert captured.out == "", "what did not run reports nothing"


def test_a_device_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{HERE}:GOOD", "--device", "npu"]) not in (0, 1)
    assert "torch_npu is not installed" in capsys.readouterr().err


def test_a_repeating_command_names_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from conformance import engine
    from conformance.contract import BY_ID
    from torchtitan_ckpt.device import Device

    monkeypatch.setattr(Device, "label", property(lambda _: "npu-simulated"))
    bench = engine.Bench(BAD, called="mine:BAD")
    cell = bench.run(BY_ID["keys.total"])
    assert cell.findings[0].again.endswith("--check keys.total --device npu-sim")


# ------------------------------------------------------------------ progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_for_terminals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["check", f"{HERE}:GOOD", "--check", "keys.total", "--check", "shapes.native"]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert "\x1b" not in captured.err
    assert "\r" not in captured.err
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    assert main(words) == 0
    assert "/2" in terminal.getvalue()
    assert "good::shapes.native" in terminal.getvalue()
    assert capsys.readouterr().out == captured.out
