"""The fuzzer's targets take their own first inputs, whole and cut; `python -m tests.fuzz` is the
long mode."""

import pytest

from tests.fuzz.targets import FORMATS, target_of


@pytest.mark.parametrize("name", FORMATS)
def test_first_inputs(name, tmp_path):
    target, seeds = target_of(name, tmp_path)
    assert seeds
    for seed in seeds:
        for cut in (len(seed), len(seed) // 2, 3, 0):
            target(seed[:cut])
