"""GitHub Actions: annotations on stdout and a step summary, when a workflow runs the check."""

import os
from collections.abc import Mapping
from pathlib import Path

from conformance import report_markdown
from conformance.verdict import Report
from torchtitan_ckpt.errors import list_keys

# GitHub shows at most ten annotations of a kind for a step; the summary holds the rest.
_LIMIT = 10


def active(environment: Mapping[str, str] | None = None) -> bool:
    """Whether this process runs as a step of a workflow."""
    return (environment or os.environ).get("GITHUB_ACTIONS") == "true"


def annotations(report: Report) -> str:
    """Workflow commands, one a failed cell."""
    lines = []
    for cell in [c for c in report.cells if c.bad][:_LIMIT]:
        first = cell.findings[0] if cell.findings else None
        text = cell.reason or "expected to fail and does not"
        if first is not None:
            more = f" (and {len(cell.findings) - 1} more)" if len(cell.findings) > 1 else ""
            text = "\n".join(
                filter(
                    None, (first.what + more, list_keys(first.keys, 3), first.cause, first.again)
                )
            )
        lines.append(f"::error title={_escape(cell.id, name=True)}::{_escape(text)}")
    return "\n".join(lines)


def write_summary(report: Report, environment: Mapping[str, str] | None = None) -> str:
    """Append Markdown to the step summary; returns its path, or an empty string."""
    path = (environment or os.environ).get("GITHUB_STEP_SUMMARY", "")
    if path:
        with Path(path).open("a", encoding="utf-8") as stream:
            stream.write(report_markdown.render(report) + "\n")
    return path


def _escape(text: str, *, name: bool = False) -> str:
    out = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return out.replace(":", "%3A").replace(",", "%2C") if name else out
