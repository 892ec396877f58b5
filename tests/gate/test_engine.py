"""`check()`: verdicts, expectations, missing inputs, usage errors, nothing that disappears."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from conformance import Capabilities, Subject, check, contract
from conformance import report_html as html
from conformance import report_junit as junit
from conformance import report_markdown as markdown
from conformance.contract import BY_ID, CONTRACT, LEVELS, RUNS, VERSION, select
from conformance.subjects import resolve
from tests.specimens import right
from tests.specimens.edits import drop, edited, rename
from tests.specimens.right import Right, State
from tests.specimens.specimen import BLIND
from torchtitan_ckpt.errors import ConfigError, NotFoundError

DROPS = edited(before_export=drop(r"moe\.w2$"))


def test_the_contract_is_consistent() -> None:
    assert len(BY_ID) == len(CONTRACT)
    order = [c.id for c in CONTRACT]
    for clause in CONTRACT:
        assert set(clause.after) <= set(BY_ID)
        assert all(order.index(parent) < order.index(clause.id) for parent in clause.after)
        assert clause.level in LEVELS
        assert clause.why.endswith(".")
        assert len(clause.why) <= 72
    assert set(RUNS.values()) <= set(BY_ID)
    assert sorted(CONTRACT, key=lambda c: c.level) == list(CONTRACT)


BAD = right.subject("drops", DROPS, **BLIND)


def test_an_expected_finding_is_an_xfail_with_its_reason() -> None:
    subject = right.subject("drops", DROPS, expect={"keys.total": "issue 7"}, **BLIND)
    report = check(subject, checks=["keys.total"])
    cell = report.cell("keys.total")
    assert (cell.verdict, cell.reason, report.exit_code) == ("xfail", "issue 7", 0)
    assert cell.findings
    assert "issue 7" in report.text()


def test_an_expected_finding_that_no_longer_happens_fails() -> None:
    report = check(right.subject(expect={"keys.total": "issue 7"}, **BLIND), checks=["keys.total"])
    assert report.cell("keys.total").verdict == "xpass"
    assert report.exit_code == 1
    assert "expected to fail and does not: issue 7" in report.text()


def test_unknown_ids_are_errors_with_the_nearest_id() -> None:
    with pytest.raises(ConfigError, match=r"keys\.total"):
        check(right.subject(expect={"keys.totl": "?"}, **BLIND))
    with pytest.raises(ConfigError, match="matches 'valves"):
        check(right.subject(**BLIND), checks=["valves.*"])
    with pytest.raises(ConfigError, match="one name"):
        check([right.subject(**BLIND), right.subject(**BLIND)], checks=["keys.total"])


def test_an_expected_finding_that_could_not_be_looked_for_is_said_to_be_so() -> None:
    """Neither n/a nor blocked forgets the expectation."""
    expect = {"resume.names": "issue 8", "values.provenance": "issue 9"}

    class Raises(Right):
        def to_hf(self, state_dict: State) -> State:
            raise ZeroDivisionError("by design")

    report = check(right.subject("x", Raises, expect=expect, **BLIND), checks=list(expect))
    assert [(c.verdict, c.reason) for c in report.cells if c.check in expect] == [
        ("blocked", "by keys.leaves; expected to fail: issue 9, which was not seen"),
        (
            "n/a",
            "the subject supplies no manager; expected to fail: issue 8, which was not seen",
        ),
    ]


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        ({"expect": {"keys.total": ""}}, "expect gives no reason for keys.total"),
        ({"expect": ["keys.total"]}, "expect is a list, without reasons"),
        ({"native_only": {"*.moe.bias": " "}}, "native_only gives no reason for *.moe.bias"),
        ({"hf_only": {"lm_head.weight": None}}, "hf_only gives no reason for lm_head.weight"),
        ({"lossy": {"norm.weight"}}, "lossy is a set, without reasons"),
        ({"dtypes": {"lm_head.weight": 32}}, "dtypes gives no dtype for lm_head.weight"),
        ({"tied": ["head.weight"]}, "tied is a list, without sources"),
    ],
)
def test_a_declaration_says_why(listed: dict[str, Any], words: str) -> None:
    subject = right.subject("mute", **BLIND)
    if "expect" not in listed:
        listed = {"capabilities": Capabilities(**listed)}
    with pytest.raises(ConfigError) as caught:
        check(replace(subject, **listed), checks=["keys.total"])
    (problem,) = caught.value.problems
    word = next(w for w in ("reason", "dtype", "source") if w in words)
    assert (problem.code, problem.what) == (f"check.no-{word}", words)


def declares(**declared: Any) -> Subject:
    return right.subject("declares", **BLIND | {"capabilities": Capabilities(**declared)})


def test_a_declaration_that_matches_no_key_is_an_error_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        check(
            declares(
                native_only={
                    "layres.*": "a typo",
                    "*.moe.biass": "another",
                    "layers.*": "this one is",
                },
                lossy={"norm.weihgt": "a typo"},
                dtypes={"zzz": "float32"},
                tied={"head.weight": "toc.weight"},
            ),
            checks=["keys.total"],
        )
    found = [(p.code, p.what, p.fix) for p in caught.value.problems]
    unknown = "correct it, or leave it out for this model, which has no such key"
    assert found == [
        ("check.dead-declaration", what, fix)
        for what, fix in (
            ("native_only: no native key matches 'layres.*'", "did you mean layers.*?"),
            ("native_only: no native key matches '*.moe.biass'", "did you mean *.moe.bias?"),
            ("lossy: no native or file key matches 'norm.weihgt'", "did you mean norm.weight?"),
            ("dtypes: no file key matches 'zzz'", unknown),
            ("tied: no native key is called 'toc.weight'", "did you mean tok.weight?"),
        )
    ]
    assert caught.value.problems[0].where == "capabilities of subject declares"


def test_a_declaration_may_name_what_is_written_and_in_no_list() -> None:
    """File keys are those of the list and those that to_hf writes, and `hf_only` may name any."""
    may = declares(
        lossy={"*.down_proj.weight": "a common scale"},
        dtypes={"lm_head.weight": "float32"},
        hf_only={"*.inv_freq": "recomputed"},
    )
    assert check(may, checks=["keys.total"]).ok
    listed = replace(
        may, capabilities=Capabilities(dtypes={"only.listed": "float32"}), hf=["only.listed"]
    )
    assert check(listed, checks=["keys.total"]).ok


def test_what_cannot_be_known_is_not_called_dead() -> None:
    """Of an adapter or a model that raises, the check that tells so is the one to say it."""

    class Raises(Right):
        def to_hf(self, state_dict: State) -> State:
            raise ZeroDivisionError("by design")

    lossy = Capabilities(lossy={"nope.*": "?"})
    subject = right.subject("raises", Raises, **BLIND | {"capabilities": lossy})
    assert check(subject, checks=["keys.leaves"]).cell("keys.leaves").verdict == "fail"
    broken = replace(subject, native=Breaks())
    assert check(broken, checks=["keys.leaves"]).cell("keys.leaves").verdict == "fail"


def test_what_is_declared_is_counted_and_printed_with_its_reason() -> None:
    subject = declares(
        native_only={"layers.*.moe.bias": "no such <file>"},
        lossy={"norm.weight": "rounded", "head.weight": "rounded"},
        hf_only={"*.inv_freq": "recomputed"},
        dtypes={"lm_head.weight": "float32"},
    )
    report = check(subject, checks=["keys.leaves"])
    assert report.notes == (
        "declares: native_only: 2 keys (layers.{1,11}.moe.bias): no such <file>",
        "declares: hf_only: 0 keys (*.inv_freq): recomputed",
        "declares: lossy: 2 keys (norm.weight, head.weight): rounded",
        "declares: dtypes: 1 key (lm_head.weight): float32",
    )
    assert f"note {report.notes[0]}" in report.text()
    assert "layers.{1,11}.moe.bias): no such &lt;file&gt;" in html.render(report)
    assert "layers.{1,11}.moe.bias): no such &lt;file>" in markdown.render(report)
    assert "layers.{1,11}.moe.bias): no such &lt;file&gt;" in junit.render(report)


def test_previews_that_did_not_run_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    later = tuple(
        replace(c, since="2027.03") if c.id in ("shapes.native", "values.load") else c
        for c in CONTRACT
    )
    monkeypatch.setattr(contract, "CONTRACT", later)

    def note(**options: Any) -> list[str]:
        report = check(right.subject(**BLIND), **options)
        said = [n for n in report.notes if "preview" in n]
        assert all(n in junit.render(report) for n in said)
        return said

    assert note(level=1) == ["1 preview of 2027.03 did not run: shapes.native"]
    assert note(level=1, version="2027.03") == []
    held_back = ["1 preview of 2027.03 did not run: shapes.native"]
    assert note(checks=["shapes.*"]) == held_back, "a glob of before names no check of after"
    assert note(checks=["shapes.native"]) == [], "those that are named run"


def test_an_older_contract_than_the_first_is_unknown() -> None:
    with pytest.raises(ConfigError, match=r"no version '2026\.11' of the contract"):
        select(version="2026.11")
    assert select(version=VERSION)


def test_a_subject_that_cannot_be_used_takes_no_other_subjects_cells_along() -> None:
    """The first check that meets it fails, those after it are blocked; the rest runs."""
    bad = replace(right.subject("bad", **BLIND), hf="/nonexistent")
    asked = ["keys.leaves", "keys.exact", "shapes.exact"]
    report = check([bad, right.subject("good", **BLIND)], checks=asked)
    cells = {c.check: c for c in report.cells if c.subject == "bad"}
    assert [cells[c].verdict for c in asked] == ["pass", "fail", "blocked"]
    (finding,) = cells["keys.exact"].findings
    assert (finding.what, finding.coordinate) == (
        "the HF list of a subject does not exist",
        "/nonexistent",
    )
    assert finding.again == "check(subject, checks=['keys.exact'])  # of 'bad'"
    assert cells["shapes.exact"].reason.startswith("by keys.exact: the HF list")
    assert report.cell("keys.leaves", "good").verdict == "pass"
    assert report.exit_code == 1


def test_usage_errors_come_before_the_first_check() -> None:
    """Of the last subject too, and of the options; no cell has run by then."""
    ran: list[str] = []
    bad = right.subject("bad", **BLIND | {"expect": {"keys.totl": "a typo"}})
    with pytest.raises(ConfigError, match=r"keys\.total"):
        check(
            [right.subject(**BLIND), bad],
            checks=["keys.leaves"],
            progress=lambda cell, *_: ran.append(cell),
        )
    assert ran == []
    with pytest.raises(ConfigError, match="not a list of parallel degrees"):
        check(right.subject(**BLIND), checks=["keys.leaves"], degrees=["many"])


def test_what_a_subject_does_not_supply_is_counted_and_said() -> None:
    report = check(Subject("bare", adapter=Right, native=right.native()), level=1)
    missing = {c.check: c.reason for c in report.cells if c.verdict == "n/a"}
    assert missing["keys.exact"] == "the subject supplies no HF key list and no reference"
    assert set(missing) >= {"keys.exact", "shapes.exact", "keys.hf-only"}
    assert "no HF key list" in report.text()
    assert len(report.cells) == len(select(level=1))


def test_nothing_checked_is_exit_code_5() -> None:
    report = check(Subject("empty"))
    assert report.exit_code == 5
    assert {c.verdict for c in report.cells} == {"n/a"}
    assert "nothing was checked: that is not a pass" in report.text()


def test_an_adapter_alone_writes_no_files() -> None:
    """This project's own writer is no subject of theirs."""
    report = check(Subject("only", adapter=Right))
    assert report.exit_code == 5
    assert report.cell("files.index").reason.endswith("neither a codec nor native")


@pytest.mark.parametrize(
    ("direction", "teller"), [("to_hf", "keys.leaves"), ("from_hf", "keys.import")]
)
def test_a_direction_that_raises_fails_whatever_was_asked_for(direction: str, teller: str) -> None:
    """The check that tells it was not asked for: its failure is told, and the run is no pass."""

    def raises(self: Right, state: State) -> State:
        raise ZeroDivisionError("by design")

    adapter = type("Raises", (Right,), {direction: raises})
    report = check(right.subject("raises", adapter, **BLIND), checks=["values.load"])
    assert report.cell("values.load").reason == f"by {teller}"
    assert report.exit_code == 1
    assert "ZeroDivisionError: by design" in report.cell(teller).findings[0].what


def test_without_the_check_that_tells_it_others_say_that_a_direction_raises() -> None:
    class Raises(Right):
        def from_hf(self, hf_state_dict: State) -> State:
            raise ZeroDivisionError("by design")

    subject = right.subject("raises", Raises, **BLIND)
    report = check(subject, checks=["values.load"], without=["keys.import"])
    assert report.cell("values.load").verdict == "fail"


def test_a_class_of_models_is_a_factory() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(3, bias=False)

    report = check(Subject("class", adapter=Right, native=Model), checks=["keys.leaves"])
    assert report.cell("keys.leaves").verdict == "pass", report.text()


@pytest.mark.parametrize("most", [0, -5])
def test_values_on_no_elements_are_a_usage_error(most: int) -> None:
    with pytest.raises(ConfigError, match="values cannot be checked on no element"):
        check(right.subject(**BLIND), max_elements=most)


def test_the_command_that_repeats_a_finding_has_the_size_that_it_was_found_with() -> None:
    for given, again in (
        (right.subject("drops", DROPS, **BLIND), "checks=['keys.total'], max_elements=1000000)"),
        (f"{__name__}:BAD", f"check {__name__}:BAD --check keys.total --max-elements 1000000"),
    ):
        (finding,) = check(given, checks=["keys.total"], max_elements=10**6).findings
        assert again in finding.again


def test_a_subject_that_no_command_can_name_is_checked_again_by_a_call() -> None:
    """One that is made in a function; a shipped one has its name wherever it was made."""
    report = check(right.subject("in here", DROPS, **BLIND), checks=["keys.total"], seed=3)
    assert (
        report.findings[0].again == "check(subject, checks=['keys.total'], seed=3)  # of 'in here'"
    )
    report = check(right.subject("zero", DROPS, **BLIND), checks=["keys.total"], seed=0)
    assert "seed=0" in report.findings[0].again
    shipped = replace(resolve("llama3"), adapter=DROPS)
    report = check(shipped, checks=["keys.leaves"])
    assert report.findings[0].again == "torchtitan-ckpt check llama3 --check keys.leaves"


@pytest.mark.parametrize("leaves", ["os._exit(0)", "sys.exit(0)"])
def test_an_adapter_that_ends_the_process_is_a_failure_of_it(leaves: str) -> None:
    class Ends(Right):
        def to_hf(self, state_dict: State) -> State:
            exec(leaves, {"os": os, "sys": sys})
            return {}

    right_one = os._exit
    report = check(right.subject("ends", Ends, **BLIND), checks=["keys.leaves"])
    assert report.exit_code == 1
    assert "SystemExit" in report.findings[0].what
    assert os._exit is right_one


def test_what_a_subject_says_steers_no_terminal_and_ends_no_report() -> None:
    class Odd(Right):
        def to_hf(self, state_dict: State) -> State:
            return {**super().to_hf(state_dict), "\x1b[2J\ud800": torch.zeros(3)}

    report = check(right.subject("odd\x07", Odd, listed=True), checks=["keys.exact", "keys.total"])
    assert report.exit_code == 1
    for text in (report.text(), junit.render(report), html.render(report), markdown.render(report)):
        assert "\x1b" not in text
        assert text.encode("utf-8")
    ElementTree.fromstring(junit.render(report))


def test_a_level_below_what_was_asked_for_is_a_usage_error() -> None:
    with pytest.raises(ConfigError, match=r"ask for level 5"):
        select(["reshard.*"], level=3)


def test_an_adapter_that_raises_is_told_once() -> None:
    class Raises(Right):
        def to_hf(self, state_dict: State) -> State:
            raise ZeroDivisionError("by design")

    report = check(right.subject("raises", Raises, **BLIND), level=2)
    assert report.cell("keys.leaves").verdict == "fail"
    assert "to_hf raised ZeroDivisionError: by design at test_engine.py:" in report.text()
    assert [c.check for c in report.cells if c.bad] == ["keys.leaves"]
    assert {c.reason for c in report.cells if c.verdict == "blocked"} == {"by keys.leaves"}


def test_the_place_of_an_error_is_the_subjects_own_not_torchs() -> None:
    class Raises(Right):
        def to_hf(self, state_dict: State) -> State:
            return torch.nn.Linear(1, 1).load_state_dict({"odd": torch.zeros(1)})

    report = check(right.subject("raises", Raises, **BLIND), checks=["keys.leaves"])
    assert " at test_engine.py:" in report.findings[0].what


def test_an_import_that_raises_leaves_the_checks_of_export_running() -> None:
    class Raises(Right):
        def from_hf(self, hf_state_dict: State) -> State:
            raise BaseException("torch's CheckpointException is one of these")

    report = check(right.subject("raises", Raises), level=2)
    assert [c.check for c in report.cells if c.bad] == ["keys.import"]
    assert report.cell("values.pinned-export").verdict == "pass"
    assert report.cell("values.pinned-import").reason == "by keys.import"


def test_an_adapter_that_leaves_python_does_not_end_the_run_as_clean() -> None:
    class Leaves(Right):
        def to_hf(self, state_dict: State) -> State:
            sys.exit(0)

    report = check(right.subject("leaves", Leaves, **BLIND), level=1)
    assert report.exit_code == 1
    assert "to_hf raised SystemExit: 0" in report.text()


class Breaks:
    """A reference, and whatever else a subject supplies, that raises."""

    name = "theirs"

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("by design")

    to_hf = from_hf = __call__


@pytest.mark.parametrize(
    ("supplied", "check_id", "words"),
    [
        ("adapter", "keys.leaves", "the adapter's factory raised RuntimeError: by design"),
        ("native", "keys.leaves", "the subject's native raised RuntimeError: by design"),
        ("hf", "keys.exact", "the subject's hf raised RuntimeError: by design"),
        ("reference", "values.pinned-export", "to_hf of the reference theirs raised RuntimeError"),
        ("forward", "forward.logits", "the forward pass raised RuntimeError: by design"),
    ],
)
def test_what_a_subject_supplies_may_raise_and_is_named(
    supplied: str, check_id: str, words: str
) -> None:
    subject = replace(right.subject("breaks", **BLIND), **{supplied: Breaks()})
    report = check(subject, level=4)
    assert report.cell(check_id).verdict == "fail"
    assert words in report.text()
    assert "fault of the gate" not in report.text()


def test_a_fault_of_the_gate_is_an_error_not_a_finding_of_the_subject(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import conformance.checks.keys as keys

    def broken(lab: Any) -> Any:
        raise ValueError("ours")

    monkeypatch.setattr(keys, "total", broken)
    report = check(right.subject(**BLIND), checks=["keys.total"])
    cell = report.cell("keys.total")
    assert cell.verdict == "error"
    assert "the gate failed" in cell.findings[0].what
    assert report.exit_code == 1


def test_all_findings_are_reported_and_grouped() -> None:
    out = edited(drop("lm_head"), before_export=drop(r"moe\.w2$"))
    report = check(right.subject("two", out, **BLIND), checks=["keys.total"])
    (finding,) = report.findings
    assert finding.what == "to_hf dropped 3 of 108 native tensors"
    assert "layers.{1,11}.moe.w2" in report.text()


@pytest.mark.parametrize(
    "native",
    [
        lambda: {
            k: torch.zeros(s, dtype=getattr(torch, d), device="meta")
            for k, (s, d) in right.native().items()
        },
        lambda: right.native,
        lambda: right.native(),
    ],
    ids=["state-dict", "factory", "pairs"],
)
def test_native_is_taken_in_several_forms(native: Any) -> None:
    assert check(Subject("n", adapter=Right, native=native()), checks=["keys.total"]).ok


@pytest.mark.parametrize(
    "make",
    [
        lambda tmp: list(right.files()),
        lambda tmp: right.files(),
        lambda tmp: {"weight_map": dict.fromkeys(right.files(), "model.safetensors")},
        lambda tmp: _index(tmp),
    ],
    ids=["keys", "pairs", "index", "index-file"],
)
def test_hf_is_taken_in_several_forms(make: Any, tmp_path: Any) -> None:
    hf = make(tmp_path)
    misnamed = edited(rename("lm_head", "head"), before_import=rename("^head", "lm_head"))
    assert check(Subject("h", Right, right.native(), hf), checks=["keys.exact"]).ok
    report = check(Subject("h", misnamed, right.native(), hf), checks=["keys.exact"])
    assert [f.keys for f in report.findings] == [("lm_head.weight",), ("head.weight",)]


def _index(folder: Any) -> str:
    import json

    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": dict.fromkeys(right.files(), "m.safetensors")}))
    return str(path)


def test_calls_can_be_wrapped_for_adapters_that_want_more_arguments() -> None:
    class Wants(Right):
        def to_hf(self, state_dict: State, *, device_mesh: Any) -> State:  # type: ignore[override]
            return super().to_hf(state_dict)

    subject = right.subject(
        "wants", Wants, to_hf=lambda a, s: a.to_hf(s, device_mesh=None), **BLIND
    )
    assert check(subject, level=1).ok


def test_a_model_too_large_for_values_is_checked_on_some_layers_and_says_so() -> None:
    report = check(right.subject(**BLIND), max_elements=7000, level=2)
    assert report.ok, report.text()
    assert any("values are checked on layers.0" in note for note in report.notes)
    tiny = check(right.subject(**BLIND), max_elements=100, level=2)
    assert "values are checked on up to 0M" in tiny.cell("values.provenance").reason
    assert tiny.cell("keys.total").verdict == "pass"


def test_subjects_are_found_by_name() -> None:
    assert check("tests.gate.test_engine:SUBJECT", checks=["keys.total"]).ok
    for name, words in (
        ("tests.gate.test_engine:SUBJET", "did you mean SUBJECT"),
        ("no.such.module:X", "cannot be imported"),
    ):
        with pytest.raises(NotFoundError, match=words):
            check(name)
    with pytest.raises(ConfigError, match="did you mean qwen3"):
        check("qwen")
    with pytest.raises(ConfigError, match="not a Subject"):
        check("tests.gate.test_engine:DROPS.__name__")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import no_such_library", "install no_such_library, which it imports"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("1 +", "SyntaxError: "),
    ],
)
def test_a_module_that_cannot_be_imported_is_told_with_the_cause(
    source: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_module.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(NotFoundError, match="cannot be imported") as caught:
        check("odd_module:SUBJECT")
    assert words in str(caught.value)


SUBJECT = right.subject("by-name", **BLIND)


def test_importing_the_package_or_listing_the_contract_imports_no_torch() -> None:
    code = (
        "import sys, conformance, conformance.contract, conformance.plugin;"
        "from conformance import Subject, Finding, Report, Capabilities;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_capabilities_are_frozen_and_default_to_nothing() -> None:
    empty = Capabilities()
    assert not any((empty.native_only, empty.hf_only, empty.lossy, empty.tied, empty.dtypes))
    with pytest.raises(AttributeError):
        empty.partial = False  # type: ignore[misc]
