"""One pool of rank processes for the whole session (one for each xdist worker), and tables."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from conformance.ranks import RankPool, shared_pool

_TABLES: list[Callable[[], str]] = []


@pytest.fixture(scope="session")
def pool() -> RankPool:
    return shared_pool()


@pytest.fixture(scope="session")
def tables() -> list[Callable[[], str]]:
    """Functions whose text is printed when all tests have run."""
    return _TABLES


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for table in _TABLES:
        terminalreporter.write("\n" + table() + "\n")
