"""The report for machines: every cell and finding, with the versions and the seed."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from conformance.verdict import Cell, Finding, Report

SCHEMA = 1


def content(report: Report) -> dict[str, Any]:
    """Plain data; `schema` changes when a field changes its meaning."""
    return {
        "schema": SCHEMA,
        "contract": report.contract,
        "seed": report.seed,
        "device": report.device,
        "versions": report.versions,
        "exit_code": report.exit_code,
        "counts": report.counts,
        "notes": list(report.notes),
        "cells": [{"id": cell.id, **asdict(cell)} for cell in report.cells],
    }


def render(report: Report) -> str:
    return json.dumps(content(report), indent=1, ensure_ascii=False)


def parse(text: str) -> Report:
    """The report that `render` wrote."""
    known = json.loads(text)
    return Report(
        cells=tuple(_cell(**cell) for cell in known["cells"]),
        notes=tuple(known["notes"]),
        **{name: known[name] for name in ("seed", "contract", "device", "versions")},
    )


def _cell(*, id: str, findings: list[Any], pairs: list[Any], **plain: Any) -> Cell:
    found = tuple(Finding(**{**one, "keys": tuple(one["keys"])}) for one in findings)
    return Cell(findings=found, pairs=tuple((source, target) for source, target in pairs), **plain)
