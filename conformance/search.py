"""Search by Hypothesis behind the deterministic cases: parts of a model, orders, shapes, dtypes.

Derandomized and without a database: a run with the same seed draws the same cases.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence


def subsets(
    components: Sequence[frozenset[str]], seed: int, number: int = 8
) -> Iterator[tuple[str, set[str]]]:
    """Parts of a model that convert by themselves: `number` draws, small ones first."""
    if len(components) < 3:
        return
    draw = random.Random(seed)
    for index in range(number):
        size = 1 if index == 0 else draw.randint(1, len(components) - 1)
        keys = set().union(*draw.sample(list(components), size))
        yield f"a drawn part of {len(keys)} keys (seed {seed}, draw {index})", keys
