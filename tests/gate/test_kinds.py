"""Each kind of fault is caught by a check that a specimen is named for."""

from __future__ import annotations

import re
from collections import Counter

from tests.gate.detection import EVERY
from tests.gate.kinds import PAGE, rows

TEXT = PAGE.read_text()
ROWS = {row.id: row for row in rows(TEXT)}
# How many there are of each family in the collection of faults that the gate goes back to.
FAMILIES = """
NAM 10 EXP 5 FUS 6 TIE 7 LAY 7 GEO 11 DTY 4 FP8 7 HFS 7
OPT 19 REF 4 ASY 8 STP 5 PRG 4 SEL 8 DAT 7 BUF 2 STR 4
"""


def test_every_kind_has_its_row() -> None:
    due = {family: int(count) for family, count in re.findall(r"(\S+) (\d+)", FAMILIES)}
    assert Counter(row.partition("-")[0] for row in ROWS) == due
    assert len(rows(TEXT)) == len(ROWS)


def test_every_kind_has_a_specimen_and_the_page_names_its_checks() -> None:
    for row in ROWS.values():
        assert row.checks, f"{row.id}: no specimen is of this kind"
        assert row.named == row.checks, f"{row}: run `python -m tests.gate.kinds`"


def test_kinds_that_specimens_name_are_on_the_page() -> None:
    assert {kind for s in EVERY for kind in s.kinds.split(", ") if kind} <= set(ROWS)
