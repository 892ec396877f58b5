"""Memory of the tools against the size of the model: four times the layers, the same peak."""

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
    small, large = found[tool]  # of 29 and of 113 MB
    assert large < 1.1 * small + PIECE, (small, large)
    assert large < 12 * 2**20
