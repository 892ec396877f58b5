"""The report for machines: every cell and finding, with the versions and the seed."""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from conformance.verdict import Cell, Report

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
    for cell in known["cells"]:
        del cell["id"]  # subject and check
    return Report(
        cells=tuple(_read(Cell, cell) for cell in known["cells"]),
        notes=tuple(known["notes"]),
        **{name: known[name] for name in ("seed", "contract", "device", "versions")},
    )


def _read(kind: Any, plain: Any) -> Any:
    """Plain data as the `kind` that it was: JSON knows no dataclasses and no tuples."""
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{name: _read(hints[name], value) for name, value in plain.items()})
    if get_origin(kind) is tuple:
        return tuple(_read(get_args(kind)[0], one) for one in plain)
    return plain
