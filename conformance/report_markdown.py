"""Markdown: the summary table and the findings, for pull requests and step summaries."""

from __future__ import annotations

from conformance.report_text import cell_text, summary
from conformance.verdict import Report

MARKS = {
    "pass": "✅",
    "fail": "❌",
    "xfail": "☑️",
    "xpass": "❗",
    "n/a": "–",
    "blocked": "⛔",
    "error": "💥",
}


def render(report: Report) -> str:
    subjects = report.subjects
    lines = [
        f"## Checkpoint conformance: {'clean' if report.ok else 'findings'}",
        "",
        "| check | " + " | ".join(_cell(s) for s in subjects) + " |",
        "|---" * (len(subjects) + 1) + "|",
    ]
    by_id = {cell.id: cell for cell in report.cells}
    for check in report.checks:
        row = [by_id.get(f"{subject}::{check}") for subject in subjects]
        shown = [f"{MARKS[c.verdict]} {c.verdict}" if c else "" for c in row]
        lines.append(f"| {check} | " + " | ".join(shown) + " |")
    lines += ["", *(f"    {line}" for line in summary(report).splitlines()), ""]
    for cell in report.cells:
        if cell.bad:
            text = cell_text(cell).replace("```", "'''")
            lines += [
                f"<details><summary>{_cell(cell.id)}: {cell.verdict}</summary>",
                "",
                "```text",
                text,
                "```",
                "",
                "</details>",
                "",
            ]
    lines += [*(f"- note: {_cell(note)}" for note in report.notes), ""] if report.notes else []
    quiet = [c for c in report.cells if c.verdict in ("n/a", "blocked", "xfail")]
    if quiet:
        lines += ["<details><summary>Not passed and not failed</summary>", ""]
        lines += [f"- {_cell(c.id)}: {c.verdict}: {_cell(c.reason)}" for c in quiet]
        lines += ["", "</details>", ""]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
