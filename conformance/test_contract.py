"""What `pytest --pyargs conformance` collects: the cells of the subjects that were named."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def device_in_the_report(record_testsuite_property: Any, pytestconfig: pytest.Config) -> None:
    """JUnit files say where the checks ran."""
    if pytestconfig.getoption("--ckpt-device") is not None:
        from conformance.engine import device_under_test

        device = device_under_test(pytestconfig.getoption("--ckpt-device"))
        record_testsuite_property("device", device.describe())


def test_contract(ckpt_cell: Any) -> None:
    """One check of the contract on one subject."""
    ckpt_cell()
