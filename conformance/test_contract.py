"""What `pytest --pyargs conformance` collects: the cells of the subjects that were named."""

from __future__ import annotations

from typing import Any


def test_contract(ckpt_cell: Any) -> None:
    """One check of the contract on one subject."""
    ckpt_cell()
