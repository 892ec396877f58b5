"""Runs every specimen through every check and writes the table specimen x check.

    python -m tests.gate.detection [detection.md]

Exit code 1 when a specimen is not caught by the check named for it, with its key in the finding,
or when some check could be taken away without any specimen living.
"""

from __future__ import annotations

import sys
from pathlib import Path

from conformance.contract import CONTRACT, Check
from conformance.engine import Bench, one_thread
from conformance.verdict import Cell
from tests.specimens.adapters import SPECIMENS as ADAPTERS
from tests.specimens.files import SPECIMENS as FILES
from tests.specimens.forward import SPECIMENS as FORWARD
from tests.specimens.managers import SPECIMENS as MANAGERS
from tests.specimens.specimen import Specimen
from tests.specimens.trainers import SPECIMENS as TRAINERS

# Adapters, managers and trainers are subjects apart: each kind has checks that apply to it alone.
SPECIMENS: tuple[Specimen, ...] = (*ADAPTERS, *FILES, *FORWARD)
HERE = tuple(c for c in CONTRACT if c.level <= 4)
MANAGED = tuple(c for c in CONTRACT if c.needs == ("manager",))
JOBS = tuple(c for c in CONTRACT if c.chapter == "job")
KINDS = ((SPECIMENS, HERE), (MANAGERS, MANAGED), (TRAINERS, JOBS))
EVERY = tuple(specimen for specimens, _ in KINDS for specimen in specimens)


def clauses_for(specimen: Specimen) -> tuple[Check, ...]:
    """The checks that apply to a specimen of its kind."""
    return next(clauses for specimens, clauses in KINDS if specimen in specimens)


def cells_of(specimen: Specimen, without: tuple[str, ...] = ()) -> dict[str, Cell]:
    """Every cell of one specimen."""
    bench = Bench(specimen.subject(), without=without)
    with one_thread():
        return {c.id: bench.run(c) for c in clauses_for(specimen) if c.id not in without}


def named(specimen: Specimen, cell: Cell) -> bool:
    """Whether a finding of the cell names the specimen's key."""
    return any(
        specimen.key in " ".join((*f.keys, f.what, f.expected, f.actual)) for f in cell.findings
    )


def failing(cells: dict[str, Cell]) -> list[str]:
    return [check for check, cell in cells.items() if cell.verdict in ("fail", "error")]


def table(rows: dict[str, dict[str, Cell]]) -> str:
    """The report: what caught what."""
    lines = [
        "# What catches what",
        "",
        f"{len(rows)} specimens, {len(CONTRACT)} checks. Made by `python -m tests.gate.detection`.",
        "**Bold**: the check that a specimen is named for. A specimen in *italics* is seen by that "
        "check alone: taking the check away lets it live.",
        "",
        "| specimen | kinds | caught by | blocked |",
        "|---|---|---|---|",
    ]
    for specimen in EVERY:
        cells = rows[specimen.name]
        caught = failing(cells)
        shown = ", ".join(f"**{c}**" if c == specimen.check else c for c in caught)
        name = f"*{specimen.name}*" if caught == [specimen.check] else specimen.name
        blocked = sum(cell.verdict == "blocked" for cell in cells.values())
        lines.append(f"| {name} | {specimen.kinds} | {shown} | {blocked or ''} |")
    lines += ["", "| check | specimens caught | that it alone catches |", "|---|---|---|"]
    for clause in CONTRACT:
        found = [n for n, cells in rows.items() if clause.id in failing(cells)]
        alone = [n for n in found if failing(rows[n]) == [clause.id]]
        lines.append(f"| {clause.id} | {len(found)} | {len(alone)} |")
    return "\n".join(lines) + "\n"


def problems(rows: dict[str, dict[str, Cell]]) -> list[str]:
    """What is wrong with the gate itself."""
    found = []
    for specimen in EVERY:
        if specimen.name not in rows:
            continue
        cell = rows[specimen.name][specimen.check]
        if cell.verdict != "fail":
            found.append(f"{specimen.name}: {specimen.check} says {cell.verdict} {cell.reason}")
        elif not named(specimen, cell):
            found.append(f"{specimen.name}: no finding of {specimen.check} names {specimen.key}")
        errors = [c for c, x in rows[specimen.name].items() if x.verdict == "error"]
        if errors:
            found.append(f"{specimen.name}: the gate fails in {', '.join(errors)}")
    for clause in CONTRACT:
        seen = [cells for cells in rows.values() if clause.id in cells]
        if seen and not any(failing(cells) == [clause.id] for cells in seen):
            found.append(f"{clause.id}: no specimen lives when it is taken away")
    return found


def main() -> int:
    rows = {}
    for number, specimen in enumerate(EVERY, 1):
        rows[specimen.name] = cells_of(specimen)
        print(f"\r{number}/{len(EVERY)}", end="", file=sys.stderr)
    print(file=sys.stderr)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(table(rows))
    found = problems(rows)
    print("\n".join(found) or f"{len(EVERY)} specimens, all caught by the check named for them")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
