"""What only the search finds is found each time, and the printed command repeats it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conformance import Subject, check, codec
from conformance.search import shapes_and_dtypes

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


SUBJECT = Subject("tests.gate.test_search:SUBJECT", codec=Flat())


def test_a_found_example_is_printed_as_a_command_that_repeats_it(tmp_path: Path) -> None:
    report = check(SUBJECT, checks=["files.reread"])
    finding = report.findings[0]
    assert finding.coordinate.startswith("drawn state"), "the listed cases come first and pass"
    assert finding.again == f"torchtitan-ckpt check {SUBJECT.name} --check files.reread"
    words = [*shlex.split(finding.again)[1:], "--json", str(tmp_path / "r.json")]
    done = subprocess.run(
        [sys.executable, "-m", "torchtitan_ckpt", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 1
    again = json.loads((tmp_path / "r.json").read_text())["cells"][0]["findings"][0]
    same = ("what", "coordinate", "expected", "actual")
    assert {k: again[k] for k in same} == {k: getattr(finding, k) for k in same}
    assert again["keys"] == list(finding.keys)


def test_another_seed_draws_other_cases_and_says_so() -> None:
    assert list(shapes_and_dtypes(1)) == list(shapes_and_dtypes(1))
    assert list(shapes_and_dtypes(1)) != list(shapes_and_dtypes(2))
    report = check(SUBJECT, checks=["files.reread"], seed=2)
    assert all(finding.again.endswith("--seed 2") for finding in report.findings)
    assert report.findings
