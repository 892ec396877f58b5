"""What pytest says of the cells below its own lines: reasons, notes and counts, and on GitHub too.

A cell travels with the report of its test, so that xdist's workers hand it over. Nothing happens
in a run without one.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conformance.verdict import Cell, Report

# What the test which runs now has made: reports of its cell, and of the failures that block it.
_RAN: list[str] = []
# More lines than these above the counts are for `-v`.
_LINES = 20


def ran(report: Report) -> None:
    """Keep the report of a cell for the test that ran it."""
    from conformance import report_json

    _RAN.append(report_json.render(report))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if _RAN:
        # An attribute of ours, for JUnit files repeat `user_properties`; text, as xdist sends it.
        vars(report)["ckpt_cells"] = [*_RAN]
        _RAN.clear()
    return report


def unasked(terminalreporter: Any) -> list[Cell]:
    """Cells that fail and were no test of this run, and block one that was."""
    reports = _found(terminalreporter)
    asked = {report.cells[0].id for report in reports}
    behind = {cell.id: cell for report in reports for cell in report.cells[1:]}
    return [cell for cell_id, cell in behind.items() if cell_id not in asked]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    reports = _found(terminalreporter)
    if not reports or hasattr(config, "workerinput"):  # a worker of xdist knows its share only
        return
    from conformance import report_github, report_text

    found = _joined(reports)
    terminalreporter.section("checkpoint conformance")
    for cell in unasked(terminalreporter):
        terminalreporter.write_line(report_text.cell_text(cell))
    verbose = config.get_verbosity()
    lines = report_text.unsaid(found, verbose=verbose > 0) if verbose >= 0 else []
    if verbose == 0 and len(lines) > _LINES:
        lines[_LINES:] = [f"… and {len(lines) - _LINES} more lines (-v)"]
    for line in (*lines, *report_text.summary(found).splitlines()):
        terminalreporter.write_line(line)
    if report_github.active():
        terminalreporter.write_line(report_github.annotations(found))
        report_github.write_summary(found)


def _found(terminalreporter: Any) -> list[Report]:
    """The reports of the cells that ran, in their order: a test's own cell is the first."""
    tests = [one for kind in terminalreporter.stats.values() for one in kind]
    texts = [text for one in tests for text in getattr(one, "ckpt_cells", ())]
    if not texts:
        return []
    from conformance import report_json

    return [report_json.parse(text) for text in texts]


def _joined(reports: Iterable[Report]) -> Report:
    """One report of all, in an order that does not depend on who ran what first."""
    from conformance.contract import BY_ID

    every = list(reports)
    order = {check_id: number for number, check_id in enumerate(BY_ID)}
    cells = {cell.id: cell for one in every for cell in one.cells}.values()
    notes = {note for one in every for note in one.notes}
    return replace(
        every[0],
        cells=tuple(sorted(cells, key=lambda cell: (cell.subject, order[cell.check]))),
        notes=tuple(sorted(notes)),
    )
