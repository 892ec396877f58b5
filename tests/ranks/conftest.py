"""One pool of rank processes for the whole session (one for each xdist worker)."""

from __future__ import annotations

import pytest

from conformance.ranks import RankPool, shared_pool


@pytest.fixture(scope="session")
def pool() -> RankPool:
    return shared_pool()
