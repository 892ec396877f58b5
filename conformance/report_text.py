"""The report as a person reads it in a terminal. Plain text, no colours of its own."""

from __future__ import annotations

from conformance.verdict import Cell, Finding, Report
from torchtitan_ckpt.errors import group_keys

_INDENT = " " * 5
_GROUPS = 2


def render(report: Report, *, verbose: bool = False) -> str:
    """All findings, then what did not run and why, then the counts."""
    lines = [line for cell in report.cells if cell.bad for line in _cell(cell)]
    return "\n".join([*lines, *unsaid(report, verbose=verbose), summary(report)])


def unsaid(report: Report, *, verbose: bool = False) -> list[str]:
    """Lines on what has neither passed nor failed, with the reasons, and the notes."""
    verdicts = ("xfail", "n/a", "blocked")
    lines = [line for verdict in verdicts for line in _others(report, verdict, verbose)]
    return [*lines, *(f"note {note}" for note in report.notes)]


def cell_text(cell: Cell) -> str:
    """One bad cell, for a test that fails."""
    return "\n".join(_cell(cell))


def _cell(cell: Cell) -> list[str]:
    if cell.verdict == "xpass":
        return [_head("XPASS", cell, cell.reason), f"{_INDENT}fix    remove it from `expect`"]
    word = "ERROR" if cell.verdict == "error" else "FAIL"
    return [
        line
        for finding in cell.findings
        for line in (_head(word, cell, finding.what), *_finding(finding))
    ]


def _head(word: str, cell: Cell, text: str) -> str:
    return f"{f'{word} {cell.check}':<21} {cell.subject:<22} {text}"


def _finding(finding: Finding) -> list[str]:
    """What is below the head."""
    lines: list[str] = []
    groups = group_keys(finding.keys)
    if groups:
        more = len(groups) - _GROUPS
        for index, (key, number) in enumerate(groups[:_GROUPS]):
            last = index == min(_GROUPS, len(groups)) - 1
            tail = f"   … and {more} more groups" if last and more > 0 else ""
            count = f"   ({number})" if number > 1 else ""
            lines.append(f"{_INDENT}{key}{count}{tail}")
    for label, text in (
        ("at", finding.coordinate),
        ("want", finding.expected),
        ("have", finding.actual),
        ("by", finding.oracle),
    ):
        if text:
            lines.append(f"{_INDENT}{label:<6} {text}")
    if finding.cause:
        lines.append(f"{_INDENT}{finding.cause}")
    if finding.remedy:
        lines.append(f"{_INDENT}fix    {finding.remedy}")
    if finding.again:
        lines.append(f"{_INDENT}again  {finding.again}")
    return lines


def _others(report: Report, verdict: str, verbose: bool) -> list[str]:
    groups: dict[tuple[str, str], list[str]] = {}
    for cell in report.cells:
        if cell.verdict == verdict:
            groups.setdefault((cell.subject, cell.reason), []).append(cell.check)
    lines = []
    for (subject, reason), checks in groups.items():
        names = (
            ", ".join(checks)
            if verbose or len(checks) <= 4
            else (", ".join(checks[:3]) + f", … {len(checks) - 3} more")
        )
        lines.append(f"{verdict:<8}{subject}  {names}: {reason}")
    return lines


def summary(report: Report) -> str:
    """Counts of cells, subjects, checks, the device, the seed and the contract's version."""
    counts = " · ".join(f"{n} {verdict}" for verdict, n in report.counts.items() if n)
    versions = " ".join(f"{k} {v}" for k, v in report.versions.items())
    simulated = f"\n{report.device_words}" if report.device_words != report.device else ""
    text = (
        f"{_plural(len(report.cells), 'cell')} ({_plural(len(report.subjects), 'subject')} x "
        f"{_plural(len(report.checks), 'check')}, {report.device}): {counts}\n"
        f"contract {report.contract} · seed {report.seed} · {versions}{simulated}"
    )
    return text if report.ran else text + "\nnothing was checked: that is not a pass"


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
