"""Memory of the tools against the size of the model: four times the bytes, the same peak."""

import tracemalloc
from pathlib import Path

import pytest
import torch

from tests.files.dcp_lab import torch_save
from tests.files.memory_lab import TOOLS, peaks
from torchtitan_ckpt.formats import read_manifest
from torchtitan_ckpt.verify.deep import read_deep

WINDOW = 8 * 2**20  # in three pieces: how many are in flight at once is a matter of timing


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return peaks(tmp_path_factory.mktemp("flat"))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("tool", TOOLS)
def test_peak_is_flat(tool, found):
    small, deep, wide = found[tool]  # of 29, 113 and 113 MB
    assert max(deep, wide) < small + WINDOW, (small, deep, wide)
    assert max(deep, wide) < 2 * WINDOW


def test_what_a_deep_verification_keeps_does_not_depend_on_bytes(tmp_path):
    """It holds its buffers and what it knows of each tensor: two kilobytes each, of any size."""

    def peak(count, rows):
        state = {f"layers.{i}.w": torch.full((rows, 512), i + 0.5) for i in range(count)}
        folder = torch_save(state, tmp_path / f"{count}x{rows}")
        tracemalloc.start()
        read_deep(read_manifest(folder), threads=1)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(11, 600)  # imports
    small, many, large = peak(11, 600), peak(44, 600), peak(11, 2400)  # 13, 54 and 54 MB
    assert large < small + 2**16, (small, large)
    assert many < small + 2**16 + 33 * 2**11, (small, many)
