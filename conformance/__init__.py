"""conformance: the acceptance gate for state-dict adapters and checkpoint managers.

    from conformance import Subject, check
    report = check(Subject("mine", adapter=MyAdapter, native=state_dict, hf="folder"))
    print(report.text())

Importing this package imports no torch; the first check does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from conformance.subject import Capabilities, Subject
from conformance.verdict import Cell, Finding, Report

if TYPE_CHECKING:
    from conformance.engine import check
    from conformance.pytest_support import parametrize

__all__ = ["Capabilities", "Cell", "Finding", "Report", "Subject", "check", "parametrize"]


def __getattr__(name: str) -> Any:
    if name == "check":
        from conformance.engine import check

        return check
    if name == "parametrize":
        from conformance.pytest_support import parametrize

        return parametrize
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
