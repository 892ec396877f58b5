"""Search by Hypothesis behind the deterministic cases: parts of a model, orders, shapes, dtypes.

Derandomized and without a database: a run with the same seed draws the same cases.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from conformance.template import Leaf


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


_DTYPES = ("float32", "bfloat16", "float16", "int64", "int32", "int8", "uint8", "bool", "float64")


def shapes_and_dtypes(seed: int, number: int = 12) -> Iterator[tuple[str, dict[str, Leaf]]]:
    """State dicts to be written to files, drawn by Hypothesis: shapes, dtypes, keys, orders."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded
    from hypothesis import strategies as st

    drawn: list[dict[str, Leaf]] = []
    leaf = st.builds(
        Leaf,
        st.lists(st.integers(0, 5), max_size=4).map(tuple),
        st.sampled_from(_DTYPES),
    )
    key = st.from_regex(r"[a-z]{1,3}(\.[0-9]{1,2}){0,2}\.[a-z_]{1,8}", fullmatch=True)

    @seeded(seed)
    @settings(
        max_examples=number,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.dictionaries(key, leaf, min_size=1, max_size=6))
    def draw(leaves: dict[str, Leaf]) -> None:
        drawn.append(leaves)

    draw()
    for index, leaves in enumerate(drawn):
        yield f"drawn state {index} (seed {seed})", leaves
