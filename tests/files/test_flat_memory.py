"""Memory of the tools against the size of the model: four times the bytes, the same peak."""

from pathlib import Path

import pytest

from tests.files.memory_lab import TOOLS, peaks

PIECE = 8 * 2**20 // 3  # of the window of 8 MiB: how many are in flight is a matter of timing


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return peaks(tmp_path_factory.mktemp("flat"))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("tool", TOOLS)
def test_peak_is_flat(tool, found):
    small, deep, wide = found[tool]  # of 29, 113 and 113 MB
    assert deep < 1.1 * small + PIECE, (small, deep)
    assert wide < 1.1 * small + PIECE, (small, wide)
    assert max(deep, wide) < 12 * 2**20


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's /proc")
def test_what_a_deep_verification_keeps_does_not_depend_on_bytes(found):
    """It holds one buffer and what it knows of each tensor: a kilobyte each, whatever its size."""
    small, deep, wide = found["verify --deep"]
    assert wide < 1.1 * small + 2**17, (small, wide)
    assert deep < 1.1 * small + 9 * 11 * 2**10 + 2**17, (small, deep)
