"""Which rank held what, as plain data: what a check shows of a reshard beside its findings.

Told by the ranks themselves; a report keeps it, `pictures.py` draws it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor, the ranks that hold it and, of something small, the value there."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    ranks: tuple[int, ...]
    value: str = ""


@dataclass(frozen=True, slots=True)
class Spread:
    """Tensors of one shape that lie alike. An empty box says which ranks have a tensor without
    elements; no parts at all, that there is nothing to draw, and `words` why."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    keys: tuple[str, ...] = ()
    words: str = ""

    @classmethod
    def each(cls, values: Sequence[str], words: str) -> Spread:
        """A value of its own on every rank."""
        parts = tuple(Part((n,), (1,), (n,), value) for n, value in enumerate(values))
        return cls((len(values),), parts, words=words)


@dataclass(frozen=True, slots=True)
class Row:
    """One way to split the job, and what was held at each stage."""

    split: str
    stages: tuple[tuple[Spread, ...], ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """What was held before and after, split by split; `heads` name the stages."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[Row, ...]
