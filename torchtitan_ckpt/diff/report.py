"""What `diff` found, tensor by tensor and grouped for people and machines. Compares nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torchtitan_ckpt.diff.values import Spot, Tally
from torchtitan_ckpt.errors import group_keys, key_template


@dataclass(frozen=True, slots=True)
class One:
    """One tensor or object that was compared, under B's key. `verdict` is equal, dtype, close,
    different or shape; `left` is A's key where it has another."""

    key: str
    verdict: str
    a: str
    b: str
    other_key: str = ""
    tally: Tally | None = None
    cause: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors whose keys differ in numbers only, with one verdict and one pair of dtypes."""

    name: str
    verdict: str
    count: int
    a: str
    b: str
    keys: tuple[str, ...]
    elements: int = 0
    differing: int = 0
    max_abs: float = 0.0
    max_ulps: int = 0
    one_nan: int = 0
    exact: bool = True
    first: tuple[str, Spot] | None = None
    worst: tuple[str, Spot] | None = None
    causes: tuple[str, ...] = ()
    detail: str = ""


@dataclass(slots=True)
class Difference:
    """Everything that `diff` found. `only_a` and `only_b` are keys that the other side lacks."""

    a: str
    b: str
    route: str
    groups: list[Group] = field(default_factory=list)
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bytes_read: int = 0

    @property
    def compared(self) -> int:
        return sum(group.count for group in self.groups)

    def count(self, *verdicts: str) -> int:
        return sum(group.count for group in self.groups if group.verdict in verdicts)


def grouped(ones: list[One]) -> Iterator[Group]:
    """Group what was compared by the form of its key, its verdict and its dtypes."""
    groups: dict[tuple[str, str, str, str], list[One]] = {}
    for one in ones:
        kinds = one.a.partition(" ")[0], one.b.partition(" ")[0]
        groups.setdefault((key_template(one.key), one.verdict, *kinds), []).append(one)
    for (_, verdict, *_), members in groups.items():
        tallies = [(one.key, one.tally) for one in members if one.tally is not None]
        keys = tuple(one.key for one in members)
        firsts = [(key, t.first) for key, t in tallies if t.first is not None]
        worst = [(key, t.worst) for key, t in tallies if t.worst is not None]
        texts = [{one.a for one in members}, {one.b for one in members}]
        a, b = (next(iter(t)) if len(t) == 1 else sorted(t)[0].partition(" ")[0] for t in texts)
        yield Group(
            name=group_keys(keys)[0][0],
            verdict=verdict,
            count=len(members),
            a=a,
            b=b,
            keys=keys,
            elements=sum(t.count for _, t in tallies),
            differing=sum(t.differing for _, t in tallies),
            max_abs=max((t.max_abs for _, t in tallies), default=0.0),
            max_ulps=max((t.max_ulps for _, t in tallies), default=0),
            one_nan=sum(t.one_nan for _, t in tallies),
            exact=all(t.exact for _, t in tallies),
            first=firsts[0] if firsts else None,
            worst=max(worst, key=lambda pair: pair[1].apart) if worst else None,
            causes=tuple(_causes(members)),
            detail=next((one.detail for one in members if one.detail), ""),
        )


def _causes(members: list[One]) -> Iterator[str]:
    """Each cause once, with the number of tensors where it is not that of all."""
    counts: dict[str, list[str]] = {}
    for one in members:
        if one.cause:
            counts.setdefault(one.cause, []).append(one.key)
    for cause, keys in list(counts.items())[:6]:
        yield (
            cause
            if len(keys) == len(members)
            else f"{cause} ({keys[0]}" + (f" and {len(keys) - 1} more)" if len(keys) > 1 else ")")
        )
    if len(counts) > 6:
        yield f"… and {len(counts) - 6} more causes"
