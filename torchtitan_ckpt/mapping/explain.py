"""What a key corresponds to, through which ops: the data behind `torchtitan-ckpt map KEY`."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan_ckpt.mapping.index import raise_all
from torchtitan_ckpt.mapping.mapping import Mapping
from torchtitan_ckpt.mapping.rule import (
    HF,
    NATIVE,
    SIDES,
    HfOnly,
    NativeOnly,
    Rule,
    Tied,
    describe,
)


@dataclass(frozen=True, slots=True)
class Explanation:
    """One reading of a key. `others` are keys of the other side, ranges as `{expert}`."""

    key: str
    side: str
    entry: str
    others: tuple[str, ...]
    ops: tuple[str, ...]
    note: str = ""

    def __str__(self) -> str:
        other = "hf" if self.side == "native" else "native"
        lines = [f"{self.side} {self.key}"]
        lines += [f"  {other} {key}" for key in self.others]
        lines += [f"  op {op}" for op in self.ops]
        if self.note:
            lines.append(f"  note {self.note}")
        return "\n".join(lines)


def explain(mapping: Mapping, key: str, side: str | None = None) -> tuple[Explanation, ...]:
    """Every reading of a key, native and Hugging Face. Raises MappingError when there is none."""
    out = []
    wanted = (NATIVE, HF) if side is None else (SIDES.index(side),)
    for place in wanted:
        match = mapping.index(place).match(key)
        if match is None:
            continue
        entry = mapping.entries[match.entry]
        if isinstance(entry, Rule):
            others = tuple(t.partial(match.binding) for t in entry.sides[1 - place])
            ops = entry.ops if place == NATIVE else tuple(o.inverse for o in reversed(entry.ops))
            notes = [entry.dtype and f"{entry.dtype} on disk" + (", pinned" * entry.pinned)]
            text = "; ".join(note for note in notes if note)
            found = Explanation(
                key, SIDES[place], str(entry), others, tuple(map(describe, ops)), text
            )
        else:
            found = _single(mapping, key, place, entry)
        out.append(found)
    if not out:
        raise_all(mapping.index(wanted[0]).unknown([key]))
    return tuple(out)


def _single(
    mapping: Mapping, key: str, place: int, entry: NativeOnly | HfOnly | Tied
) -> Explanation:
    if isinstance(entry, Tied):
        written = "written" if mapping.emits(entry) else "not written"
        note = f"{entry.why}; {written} (group {entry.group or '-'}); equals {entry.to}"
    else:
        note = f"no counterpart: {entry.why}"
    return Explanation(key, SIDES[place], f"{type(entry).__name__}({entry.key})", (), (), note)
