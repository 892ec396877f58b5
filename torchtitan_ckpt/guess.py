"""Which model family a checkpoint probably is, from its keys alone; a config.json knows better.

Every family's table is asked how many of the keys have the form of one of its names, and how many
of its names occur. Sizes and layer numbers play no part, so no config is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from torchtitan_ckpt import families
from torchtitan_ckpt.mapping.template import tokens

_BRACES = re.compile(r"\{[^{}]*\}")


@dataclass(frozen=True, slots=True)
class Guess:
    """`names` is `hf`, or the native generation. `known` of `keys` keys have a form of the table,
    and `used` of its `forms` forms occur."""

    family: str
    names: str
    known: int
    keys: int
    used: int
    forms: int

    def __str__(self) -> str:
        names = "Hugging Face names" if self.names == "hf" else f"native names ({self.names})"
        return f"{self.family}, {names}: {self.known} of {self.keys} keys fit"


def guess_family(keys: Iterable[str]) -> Guess | None:
    """The family whose names fit best, None when fewer than half of the keys fit any."""
    counts: dict[str, int] = {}
    for key in keys:
        form = tokens(key)[0]
        counts[form] = counts.get(form, 0) + 1
    total = sum(counts.values())
    best: tuple[tuple[float, float], Guess] | None = None
    for name in families.names():
        for names in ("hf", *families.get(name).generations):
            forms = _forms(name, names)
            used = [form for form in counts if form in forms]
            known = sum(counts[form] for form in used)
            if not used or known * 2 < total:
                continue
            rank = (known / total, len(used) / len(forms))
            if best is None or rank > best[0]:
                best = rank, Guess(name, names, known, total, len(used), len(forms))
    return None if best is None else best[1]


@cache
def _forms(family: str, names: str) -> frozenset[str]:
    """The forms (digits removed) of all names of one side of a family."""
    table = families.get(family)
    found = set()
    for row in table.rows:
        texts = row.hf if names == "hf" else row.native(names)
        for text in (texts,) if isinstance(texts, str) else texts or ():
            found.add(tokens(_BRACES.sub("0", text))[0])
    if names == "hf":
        found |= {form.removesuffix("weight") + end for form in found for end in _ENDS}
    return frozenset(found)


# What quantized files add to the names of a table.
_ENDS = ("weight_scale_inv", "scale")
