"""Adapters broken on purpose: each a small edit of the right one, named for its check.

`SPECIMENS` is the registry: its entries are in the modules of the chapters beside this one.
"""

from __future__ import annotations

from tests.specimens import (
    calls,
    index,
    keys,
    numbers,
    pinned,
    purity,
    refused,
    shapes,
    unseen,
    values,
)
from tests.specimens.specimen import Specimen

SPECIMENS: tuple[Specimen, ...] = (
    *keys.leaves(),
    *keys.total(),
    *keys.exact(),
    *keys.imports_(),
    *refused.accepted(),
    *refused.refused(),
    *numbers.numbers(),
    *index.index(),
    *shapes.shapes(),
    *shapes.dtypes(),
    *pinned.pinned(),
    *values.values(),
    *values.tied(),
    *values.flow(),
    *purity.purity(),
    *calls.calls(),
    *unseen.unseen(),
)
