"""What a subject declares: refused where it says no reason or concerns no key, else counted.

Whether the adapter keeps to it is for the checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from conformance.checks._words import count
from conformance.lab import Lab
from conformance.raised import AdapterRaised, NotApplicable
from conformance.subject import Subject, matches, template_of
from torchtitan_ckpt.errors import CheckpointError, Problem, group_keys, nearest

# What an entry of each list says of its key. dtypes, ties and older spellings explain themselves.
_SAYS = {
    "native_only": "reason",
    "hf_only": "reason",
    "lossy": "reason",
    "dtypes": "dtype",
    "tied": "source",
    "also_reads": "spelling",
}
# Whose keys the patterns of a list are.
_SIDES = {"native_only": ("native",), "hf_only": ("file",), "lossy": ("native", "file")}
_SIDES |= {"dtypes": ("file",), "tied": ("native",)}
_GROUPS = 2


def without_reason(subject: Subject) -> Iterator[Problem]:
    """Entries that do not say why, or what; of `expect` and of each list of the capabilities."""
    lists = {name: getattr(subject.capabilities, name) for name in _SAYS}
    for name, entries in {"expect": subject.expect, **lists}.items():
        word = _SAYS.get(name, "reason")
        if not isinstance(entries, Mapping):
            yield _wordless(subject, word, f"{name} is a {type(entries).__name__}, without {word}s")
            continue
        for key, value in entries.items():
            if not isinstance(value, str) or not value.strip():
                yield _wordless(subject, word, f"{name} gives no {word} for {key}")


def _wordless(subject: Subject, word: str, what: str) -> Problem:
    return Problem(
        code=f"check.no-{word}",
        what=what,
        where=f"subject {subject.name}",
        expected=f'{{"a key": "its {word}"}}',
        fix=f"say the {word}, or leave the entry out",
    )


def dead(lab: Lab) -> Iterator[Problem]:
    """Declarations that concern no key of this model or of its files.

    `hf_only` may name what older files hold and no list does. What is not known, because the model
    or the adapter raises, is not judged: the checks tell of that.
    """
    for name in ("native_only", "lossy", "dtypes"):
        for pattern in getattr(lab.may, name):
            if _concerned(lab, name, pattern) == []:
                sides = _SIDES[name]
                what = f"{name}: no {' or '.join(sides)} key matches {pattern!r}"
                yield _dead(lab, what, pattern, [k for s in sides for k in _keys(lab, s) or ()])
    if lab.may.tied and (native := _keys(lab, "native")) is not None:
        for key in (name for pair in lab.may.tied.items() for name in pair):
            if key not in native:
                yield _dead(lab, f"tied: no native key is called {key!r}", key, native)


def _dead(lab: Lab, what: str, pattern: str, keys: Iterable[str]) -> Problem:
    near = _nearest(pattern, keys)
    return Problem(
        code="check.dead-declaration",
        what=what,
        where=f"capabilities of subject {lab.subject.name}",
        fix=f"did you mean {near}?"
        if near
        else "correct it, or leave it out for this model, which has no such key",
    )


def notes(lab: Lab) -> list[str]:
    """A line for each thing that is declared: how many keys it concerns, and why."""
    lines = []
    for name in _SAYS:
        entries: Mapping[str, str] = getattr(lab.may, name)
        for value in dict.fromkeys(entries.values()):
            patterns = [pattern for pattern in entries if entries[pattern] == value]
            found = [_concerned(lab, name, pattern) for pattern in patterns]
            keys = list(dict.fromkeys(key for some in found for key in some or ()))
            counted = "" if None in found else f"{count(len(keys), 'key')} "
            lines.append(f"{name}: {counted}({_shown(keys or patterns)}): {value}")
    return lines


def _shown(keys: Iterable[str]) -> str:
    groups = [key for key, _ in group_keys(keys)]
    more = f" … and {len(groups) - _GROUPS} more groups" if len(groups) > _GROUPS else ""
    return ", ".join(groups[:_GROUPS]) + more


def _concerned(lab: Lab, name: str, pattern: str) -> list[str] | None:
    """The keys that an entry of a list is about; None where that is not known."""
    if name not in _SIDES:  # a spelling that no model and no list has
        return [pattern]
    found = []
    for side in _SIDES[name]:
        keys = _keys(lab, side)
        if keys is None:
            return None
        found += [key for key in keys if matches(key, (pattern,))]
    return found


def _keys(lab: Lab, side: str) -> Mapping[str, Any] | None:
    """The model's keys, or those that its files are known to hold or `to_hf` writes."""
    try:
        return lab.native if side == "native" else {**lab.listed, **lab.export.leaves}
    except (NotApplicable, AdapterRaised, CheckpointError):
        return None


def _nearest(pattern: str, keys: Iterable[str]) -> str | None:
    """The start or the end of a key, of as many words, that a pattern was probably meant to be."""
    words = pattern.count(".") + 1
    known = {template_of(key).replace("{}", "*") for key in keys}
    if "*" not in pattern:
        known.update(keys)
    split = [key.split(".") for key in sorted(known)]
    return nearest(
        pattern, {".".join(part) for key in split for part in (key[:words], key[-words:])}
    )
