"""What only drawn cases find is found each time, and the printed command repeats it."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance import Report, Subject, check, codec
from conformance.checks import values_drawn
from conformance.fills import FILLS, HOLDS, filled
from conformance.fingerprint import noise, same_bits
from conformance.lab import Lab
from conformance.search import Case, cases, listed, smallest, state_of_text, states, text_of_state
from conformance.subjects import configs, families
from conformance.template import Leaf, leaf_of
from tests.specimens import drawn, right
from tests.specimens.right import State
from tests.specimens.specimen import HEAD, TIED, Specimen, TiedRight
from torchtitan_ckpt.cli import main
from torchtitan_ckpt.errors import ConfigError

ROOT = Path(__file__).parents[2]


class Flat:
    """Writes a tensor of four dimensions with its last element lost: no listed case has four."""

    name = "a codec that knows three dimensions"

    def save(self, state_dict: dict[str, Any], folder: str, files: Mapping[str, int]) -> None:
        for value in state_dict.values():
            if value.dim() == 4 and value.numel():
                value.view(-1)[-1] = 0
        codec.write(state_dict, folder, files)

    def load(self, folder: str, targets: dict[str, Any]) -> None:
        found = codec.read_indexed(folder)
        for key, target in targets.items():
            target.copy_(found[key])


HERE = "tests.gate.test_search"
SUBJECT = Subject(f"{HERE}:SUBJECT", codec=Flat())
FROM_BEHIND, ODD, DTYPES, EQUAL, VIEWS = (
    replace(specimen.subject(), name=f"{HERE}:{name}")
    for name, specimen in (
        (name, next(s for s in drawn.SPECIMENS if s.name == specimen))
        for name, specimen in (
            ("FROM_BEHIND", "three-layers-from-behind"),
            ("ODD", "odd-experts"),
            ("DTYPES", "two-dtypes-by-name"),
            ("EQUAL", "equal-experts-once"),
            ("VIEWS", "views-wanted"),
        )
    )
)
FOUND = {
    "SUBJECT": ("files.reread", r"a\.a=float64\[1,1,1,1\]|.*=\w+\[\d,\d,\d,\d\]"),
    "FROM_BEHIND": ("values.drawn", r"part=layers\.\d+,layers\.\d+,layers\.\d+ order=reversed .*"),
    "ODD": ("values.drawn", "experts=3 order=own dtypes=own"),
    "DTYPES": ("values.drawn", "order=by-name dtypes=dealt-0"),
    "EQUAL": ("values.drawn", "order=own dtypes=own values=equal-slices"),
    "VIEWS": ("values.drawn", "order=own dtypes=own as=offset"),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_is_found_is_made_small_and_its_command_repeats_it_without_a_search(
    name: str, tmp_path: Path
) -> None:
    check_id, example = FOUND[name]
    subject = globals()[name]
    finding = _found(subject, check_id).findings[0]
    assert re.fullmatch(example, finding.example), finding.example
    assert finding.again == (
        f"torchtitan-ckpt check {HERE}:{name} --check {check_id} "
        f"--example {shlex.quote(finding.example)}"
    )
    words = [*shlex.split(finding.again)[1:], "--json", str(tmp_path / "r.json")]
    # Another process, other hashes, no Hypothesis: what is repeated is the case, not the search.
    (tmp_path / "hypothesis.py").write_text("raise ImportError('this run searches nothing')")
    done = subprocess.run(
        [sys.executable, "-m", "torchtitan_ckpt", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTHONHASHSEED": "7"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    again = json.loads((tmp_path / "r.json").read_text())["cells"][0]["findings"][0]
    same = ("what", "coordinate", "expected", "actual", "example", "again")
    assert {k: again[k] for k in same} == {k: getattr(finding, k) for k in same}
    assert again["keys"] == list(finding.keys)


def _found(subject: Subject, check_id: str, **options: Any) -> Report:
    """A run in which nothing that is written down fails."""
    report = check(subject, checks=[check_id], **options)
    assert report.cells[0].verdict == "fail", report.text()
    return report


def test_another_seed_draws_other_cases_and_the_same_seed_the_same() -> None:
    def drawn_by(seed: int) -> list[str]:
        seen: list[str] = []
        smallest(cases(["layers.0", "norm"], {"heads": (2, 4)}, 2), seen_by(seen), seed=seed,
                 number=20)  # fmt: skip
        return seen

    def seen_by(seen: list[str]) -> Any:
        return lambda case: seen.append(str(case)) or []

    assert drawn_by(1) == drawn_by(1)
    assert drawn_by(1) != drawn_by(2)
    assert {word.partition("=")[0] for text in drawn_by(1) for word in text.split()} == {
        "heads",
        "part",
        "order",
        "dtypes",
        "values",
        "as",
    }
    report = _found(SUBJECT, "files.reread", seed=2)
    assert all(finding.again.endswith("--seed 2") for finding in report.findings)


def test_what_else_a_process_has_imported_changes_no_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hypothesis import strategies as st

    def drawn() -> list[int]:
        seen: list[int] = []
        smallest(st.integers(0, 1000), lambda n: seen.append(n) or [], seed=3, number=200)
        return seen

    before = drawn()
    (tmp_path / "somebody_elses.py").write_text(f"NUMBERS = {list(range(200, 900, 3))}")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("somebody_elses")
    assert drawn() == before


def test_the_smallest_case_is_told_and_a_search_without_findings_ends() -> None:
    from hypothesis import strategies as st

    found = smallest(st.integers(0, 1000), lambda n: [n] * (n > 37), seed=3, number=50)
    assert found == (38, [38])
    assert smallest(st.integers(0, 1000), lambda n: [], seed=3, number=50) is None


def test_texts_of_cases_are_read_back() -> None:
    sizes, part = (("layers", 3), ("heads", 2)), ("layers.1", "n.w")
    kinds = [Case(values=values, held=held) for values in FILLS for held in HOLDS]
    for case in (Case(), Case(sizes, part, "shuffled-4"), *kinds):
        assert Case.read(str(case)) == case
    smallest(states(), lambda s: [] if state_of_text(text_of_state(s)) == s else [s], seed=1,
             number=50)  # fmt: skip
    for text in ("order=upside-down", "layers=many", "nothing", "values=odd", "as=you-like"):
        with pytest.raises(ConfigError, match="copy it from the finding"):
            Case.read(text)


@pytest.mark.parametrize(
    ("specimen", "seed"),
    [
        pytest.param(
            s, seed, marks=[] if (i + seed) % 5 == 0 else pytest.mark.slow, id=f"{s.name}-{seed}"
        )
        for i, s in enumerate(drawn.SPECIMENS)
        for seed in range(1, 6)
    ],
)
def test_each_specimen_is_found_whatever_the_seed(specimen: Specimen, seed: int) -> None:
    findings = list(values_drawn.drawn(Lab(specimen.subject(), seed=seed)))
    assert any(specimen.key in key for finding in findings for key in finding.keys)


def test_every_run_has_each_kind_and_each_layer_alone_before_anything_is_drawn() -> None:
    units = [*(f"layers.{n}" for n in range(5)), "norm.weight"]
    found = list(listed(units, {"heads": (2, 4)}, 2, 64))
    assert {case.values for case in found} == set(FILLS)
    assert {case.held for case in found} == set(HOLDS)
    alone = {case.part for case in found if len(case.part) == 1}
    assert alone == {(unit,) for unit in units}
    # A layer is converted once alone and a few times with others, however many there are.
    assert sum(len(case.part) for case in found) == len(units) + 2 + 3 + 4


@pytest.mark.parametrize("kind", FILLS)
def test_values_keep_shapes_dtypes_and_what_a_tie_may_be_checked_with(kind: str) -> None:
    dtypes = ("float32", "bfloat16", "int64", "bool", "complex64", "float8_e4m3fn")
    leaves = {f"{d}{s}": Leaf(s, d) for d in dtypes for s in ((), (0, 3), (1,), (5, 4), (3, 2, 4))}
    state = noise(leaves, 1)
    out = filled(kind, state, {"float32(5, 4)"})
    assert {k: leaf_of(v) for k, v in out.items()} == leaves
    assert not out["float32(5, 4)"].isnan().any()
    assert all(same_bits(v, noise(leaves, 1)[k]) for k, v in state.items())


@pytest.mark.parametrize("kind", HOLDS)
def test_tensors_held_otherwise_are_equal_and_held_as_said(kind: str) -> None:
    dtypes = ("float32", "int64", "bool", "complex64", "float8_e4m3fn")
    leaves = {f"{d}{s}": Leaf(s, d) for d in dtypes for s in ((), (0, 3), (5, 4), (3, 2, 4))}
    state = {**noise(leaves, 1), "again": noise(leaves, 1)["float32(5, 4)"]}
    out = HOLDS[kind].make(dict(state))
    assert list(out) == list(state)
    assert all(same_bits(v, state[k]) for k, v in out.items())
    matrix = out["float32(5, 4)"]
    held = {
        "ordered": type(out) is OrderedDict and hasattr(out, "_metadata"),
        "parameters": isinstance(matrix, torch.nn.Parameter) and matrix.requires_grad,
        "frozen": isinstance(matrix, torch.nn.Parameter) and not matrix.requires_grad,
        "transposed": matrix.stride() == (1, 5),
        "offset": matrix.storage_offset() > 0 and not matrix.is_contiguous(),
        "shared": matrix.data_ptr() == out["again"].data_ptr(),
    }
    assert [name for name, so in held.items() if so] == ([kind] if kind in held else [])


def test_a_refused_tensor_is_named() -> None:
    (finding,) = _found(VIEWS, "values.drawn").findings
    assert finding.keys == ("layers.0.attn.wq.weight",)
    assert "memory is read in its own order" in finding.cause


def test_one_name_of_a_tied_pair_is_enough_where_both_are_one_tensor() -> None:
    class OnceByPlace(TiedRight):
        """Writes a head of its own memory, which every reader takes."""

        def to_hf(self, state_dict: State) -> State:
            out = super().to_hf(state_dict)
            head, tok = state_dict.get("head.weight"), state_dict.get("tok.weight")
            if head is not None and (
                tok is None or head.is_meta or head.data_ptr() != tok.data_ptr()
            ):
                out[HEAD] = head
            return out

    subject = right.subject("once-by-place", OnceByPlace, **TIED)
    report = check(subject, checks=["values.drawn"])
    assert report.counts["pass"] == 1, report.text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--check", "keys.total", "--example", "order=own"], "a check that searches"),
        (["--check", "values.drawn", "--example", "part=layers.77"], "layers.77"),
        (["--check", "values.drawn", "--example", "dtypes=dealt-99"], "dealt-99"),
        (["--check", "values.drawn", "--example", "widths=3"], "widths"),
        (["--check", "files.reread", "--example", "a=b"], "a.w=float32"),
    ],
)
def test_an_example_that_is_none_is_a_usage_error(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", f"{HERE}:ODD", *words]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("name", configs.CONFIGS)
def test_every_size_that_a_family_offers_is_one_that_it_has(name: str) -> None:
    """One value of each size at a time, on meta tensors, against the other implementation."""
    subject = families.subject(name)
    assert subject.resized is not None
    whole = len(subject.native)
    for size, values in subject.sizes.items():
        other = subject.resized(**{size: values[0]})
        assert len(other.native) < whole or {
            key: leaf for key, leaf in other.native.items() if subject.native[key] != leaf
        }
        report = check(replace(other, name=size), level=1, checks=["keys.exact", "shapes.exact"])
        assert report.counts["pass"] == 2, report.text()


def test_a_copy_that_waits_for_what_it_is_a_part_of_is_no_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DeepSeek-V3.2's files repeat the main norm in the MTP layer, if that is there."""
    from conformance.checks import keys_groups

    alone = check("deepseek_v32", checks=["values.drawn"], example="part=norm.weight")
    assert alone.counts["pass"] == 1, alone.text()
    monkeypatch.setattr(keys_groups, "subsets", lambda *_: [("the norm", {"norm.weight"})])
    report = check("deepseek_v32", checks=["keys.partial"])
    assert report.counts["pass"] == 1, report.text()


def test_a_subject_of_one_size_is_searched_at_that_size() -> None:
    subject = replace(ODD, sizes={}, resized=None)
    assert check(subject, checks=["values.drawn"]).counts["pass"] == 1
