"""Runs every specimen through every check and writes the table specimen x check.

    python -m tests.gate.detection [detection.md [GLOB ...]]

With globs only the specimens of such names run, and the other rows are those of the page.
Exit code 1 when a specimen is not caught by the check named for it, with its key in the finding,
or when some check could be taken away without any specimen living.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from conformance.contract import BY_ID, CONTRACT, Check
from conformance.engine import Bench, one_thread
from conformance.verdict import Cell
from tests.specimens.adapters import SPECIMENS as ADAPTERS
from tests.specimens.drawn import SPECIMENS as DRAWN
from tests.specimens.files import SPECIMENS as FILES
from tests.specimens.forward import SPECIMENS as FORWARD
from tests.specimens.managers import SPECIMENS as MANAGERS
from tests.specimens.ranked import SPECIMENS as RANKED
from tests.specimens.readers import SPECIMENS as READERS
from tests.specimens.specimen import Specimen
from tests.specimens.trainers import SPECIMENS as TRAINERS

# Adapters, managers and trainers are subjects apart: each kind has checks that apply to it alone.
SPECIMENS: tuple[Specimen, ...] = (*ADAPTERS, *DRAWN, *FILES, *READERS, *FORWARD)
HERE = tuple(c for c in CONTRACT if c.level <= 4)
MANAGED = tuple(c for c in CONTRACT if c.needs == ("manager",))
JOBS = tuple(c for c in CONTRACT if c.chapter == "job")
ON_RANKS = tuple(c for c in CONTRACT if c.level == 5 and c.needs == ("adapter", "native"))
KINDS = (
    (SPECIMENS, HERE),
    (MANAGERS, MANAGED),
    (TRAINERS, JOBS),
    (RANKED, (*HERE, *ON_RANKS)),
)
EVERY = tuple(specimen for specimens, _ in KINDS for specimen in specimens)


def clauses_for(specimen: Specimen) -> tuple[Check, ...]:
    """The checks that apply to a specimen of its kind."""
    return next(clauses for specimens, clauses in KINDS if specimen in specimens)


def cells_of(specimen: Specimen) -> dict[str, Cell]:
    """Every cell of one specimen."""
    bench = Bench(specimen.subject())
    with one_thread():
        return {c.id: bench.run(c) for c in clauses_for(specimen)}


def lives(specimen: Specimen) -> bool:
    """Whether a specimen that one check alone sees passes when that check is taken away.

    It may not: checks that come after that one were blocked by it, and are not any more.
    """
    bench = Bench(specimen.subject(), without=(specimen.check,))
    with one_thread():
        cells = {c.id: bench.run(c) for c in clauses_for(specimen) if _follows(c, specimen.check)}
    return not failing(cells)


def _follows(clause: Check, check: str) -> bool:
    return any(parent == check or _follows(BY_ID[parent], check) for parent in clause.after)


def named(specimen: Specimen, cell: Cell) -> bool:
    """Whether a finding of the cell names the specimen's key."""
    return any(
        specimen.key in " ".join((*f.keys, f.what, f.expected, f.actual)) for f in cell.findings
    )


def failing(cells: dict[str, Cell]) -> list[str]:
    return [check for check, cell in cells.items() if cell.verdict in ("fail", "error")]


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one specimen: the checks that fail, and how many were blocked."""

    caught: list[str]
    blocked: int

    @classmethod
    def of(cls, cells: Mapping[str, Cell]) -> Row:
        return cls(failing(dict(cells)), sum(c.verdict == "blocked" for c in cells.values()))


_ROW = re.compile(r"\| \*?([\w-]+?)\*? \| [^|]* \| ([^|]*\w[^|]*) \| (\d*) \|")


def read(page: str) -> dict[str, Row]:
    """The rows of a page by specimen, those that there still are."""
    found = {m[1]: m for m in map(_ROW.fullmatch, page.splitlines()) if m}
    return {
        specimen.name: Row(m[2].replace("*", "").split(", "), int(m[3] or 0))
        for specimen in EVERY
        if (m := found.get(specimen.name))
    }


def table(rows: Mapping[str, Row]) -> str:
    """The report: what caught what."""
    lines = [
        "# What catches what",
        "",
        f"{len(rows)} specimens, {len(CONTRACT)} checks. Made by `python -m tests.gate.detection`.",
        "**Bold**: the check that a specimen is named for. A specimen in *italics* is seen by that "
        "check alone. Of those of each check one at least lives when the check is taken away, "
        "whatever it had blocked.",
        "",
        "| specimen | kinds | caught by | blocked |",
        "|---|---|---|---|",
    ]
    for specimen in EVERY:
        if (row := rows.get(specimen.name)) is None:
            continue
        shown = ", ".join(f"**{c}**" if c == specimen.check else c for c in row.caught)
        name = f"*{specimen.name}*" if row.caught == [specimen.check] else specimen.name
        lines.append(f"| {name} | {specimen.kinds} | {shown} | {row.blocked or ''} |")
    lines += ["", "| check | specimens caught | that it alone catches |", "|---|---|---|"]
    for clause in CONTRACT:
        found = [name for name, row in rows.items() if clause.id in row.caught]
        alone = [name for name in found if rows[name].caught == [clause.id]]
        lines.append(f"| {clause.id} | {len(found)} | {len(alone)} |")
    return "\n".join(lines) + "\n"


def problems(rows: dict[str, dict[str, Cell]]) -> list[str]:
    """What is wrong with the gate itself; `rows` are whole kinds of specimens."""
    return missed(rows) + idle(rows)


def missed(rows: dict[str, dict[str, Cell]]) -> list[str]:
    """Specimens that the check named for them does not catch, or not by their key."""
    found = []
    for specimen in EVERY:
        if specimen.name not in rows:
            continue
        cell = rows[specimen.name][specimen.check]
        if cell.verdict != "fail":
            found.append(f"{specimen.name}: {specimen.check} says {cell.verdict} {cell.reason}")
        elif not named(specimen, cell):
            found.append(f"{specimen.name}: no finding of {specimen.check} names {specimen.key}")
        seen = failing(rows[specimen.name])
        if specimen.alone and seen != [specimen.check]:
            found.append(f"{specimen.name}: not {specimen.check} alone, but {', '.join(seen)}")
        errors = [c for c, x in rows[specimen.name].items() if x.verdict == "error"]
        if errors:
            found.append(f"{specimen.name}: the gate fails in {', '.join(errors)}")
    return found


def idle(rows: dict[str, dict[str, Cell]]) -> list[str]:
    """Checks that specimens are named for, and that could be taken away."""
    here = [specimen for specimen in EVERY if specimen.name in rows]
    due = {specimen.check for specimen in here}
    for specimen in here:
        alone = failing(rows[specimen.name]) == [specimen.check]
        if alone and specimen.check in due and lives(specimen):
            due.remove(specimen.check)
    return [f"{check}: no specimen lives when it is taken away" for check in sorted(due)]


def main(page: str = "", *globs: str) -> int:
    chosen = [s for s in EVERY if not globs or any(fnmatchcase(s.name, g) for g in globs)]
    rows = {}
    for number, specimen in enumerate(chosen, 1):
        rows[specimen.name] = cells_of(specimen)
        print(f"\r{number}/{len(chosen)}", end="", file=sys.stderr)
    print(file=sys.stderr)
    if page:
        kept = read(Path(page).read_text()) if globs else {}
        Path(page).write_text(table(kept | {name: Row.of(cells) for name, cells in rows.items()}))
    found = missed(rows) if globs else problems(rows)
    print("\n".join(found) or f"{len(chosen)} specimens, all caught by the check named for them")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
