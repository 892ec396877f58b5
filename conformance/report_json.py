"""The report for machines: every cell and finding, with the versions and the seed."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from conformance.verdict import Report

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
