"""The error tree: every failure says what, where, expected and actual, the cause and the next step.

A failure is one `CheckpointError` that carries one or many `Problem`s, so that everything that is
wrong is said at once. `Problem.code` is stable: it changes only with a line in CHANGELOG.md.
This module formats errors; it never decides what is one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong. `code` is `area.kind`, e.g. `dcp.metadata-cut`."""

    code: str
    what: str
    where: str = ""
    expected: str = ""
    actual: str = ""
    cause: str = ""
    fix: str = ""

    def __str__(self) -> str:
        lines = [f"[{self.code}] {printable(self.what, lines=True)}"]
        for label in ("where", "expected", "actual", "cause", "fix"):
            text = printable(getattr(self, label), lines=True)
            if text:
                lines.append(f"  {label:<9}{text}".replace("\n", f"\n{'':<11}"))
        return "\n".join(lines)


class CheckpointError(Exception):
    """Base of all errors meant for users; `exit_code` is what the command line returns."""

    exit_code: ClassVar[int] = 4
    problems: tuple[Problem, ...]

    def __init__(self, *problems: Problem) -> None:
        if not problems:
            raise TypeError("a CheckpointError needs at least one Problem")
        self.problems = problems
        super().__init__(*problems)

    def __str__(self) -> str:
        body = "\n".join(str(problem) for problem in self.problems)
        return body if len(self.problems) == 1 else f"{len(self.problems)} problems\n{body}"


class ConfigError(CheckpointError, ValueError):
    """Options that contradict each other or have no such value; nothing was read yet."""

    exit_code = 2


class MappingError(CheckpointError, ValueError):
    """A rule table that is not a bijection, or keys that no rule covers."""

    exit_code = 3


class InputError(CheckpointError):
    """What lies on disk cannot be used. Base of the three below."""

    exit_code = 3


class NotFoundError(InputError, FileNotFoundError):
    """A folder, file, step or key that was named does not exist."""


class DamagedError(InputError):
    """Cut, contradictory or lying files."""


class RefusedError(InputError):
    """Readable, but not safe or not meant to be loaded this way."""


class MismatchError(CheckpointError):
    """The checkpoint and what it should be loaded into differ; nothing was changed."""

    exit_code = 1


class SaveError(CheckpointError):
    """A save did not complete; what lay there before is still valid."""

    exit_code = 3


class DeviceError(CheckpointError, RuntimeError):
    """The accelerator that was asked for cannot be used, or a call into it failed."""

    exit_code = 2


class RankError(CheckpointError):
    """Ranks disagree, or another rank failed; every rank raises this."""

    exit_code = 3


# What moves the cursor, colours, hides or turns round what a terminal shows; and lone surrogates
# (names of files that are not UTF-8), which no stream takes.
_MOVES = (
    "\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff"
)
_UNPRINTABLE = re.compile(f"[\n{_MOVES}]")
_UNPRINTABLE_IN_LINES = re.compile(f"[{_MOVES}]")


def printable(text: str, *, lines: bool = False) -> str:
    """A name out of a file as people may see it: what would steer a terminal is escaped.

    >>> print(printable("w\\x1b[2J"))
    w\\x1b[2J
    """
    pattern = _UNPRINTABLE_IN_LINES if lines else _UNPRINTABLE
    return pattern.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` was probably meant to be, or None."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return match[0] if match else None


_NUMBER = re.compile(r"(?<![0-9A-Za-z_])[0-9]+(?![0-9A-Za-z_])")


def key_template(key: str) -> str:
    """What a key has in common with those of its group: every whole number taken out."""
    return _NUMBER.sub("\0", key)


def group_keys(keys: Iterable[str]) -> list[tuple[str, int]]:
    """Group keys that differ only in whole numbers: `layers.{0..3}.w1` with a count.

    >>> group_keys(["layers.0.w", "layers.1.w", "norm"])
    [('layers.{0..1}.w', 2), ('norm', 1)]
    """
    groups: dict[str, list[tuple[int, ...]]] = {}
    for key in keys:
        numbers = tuple(int(n) for n in _NUMBER.findall(key))
        groups.setdefault(key_template(key), []).append(numbers)
    out = []
    for template, rows in groups.items():
        text = template
        for column in zip(*rows, strict=True):
            text = text.replace("\0", _span(column), 1)
        out.append((printable(text), len(rows)))
    return out


def _span(column: Sequence[int]) -> str:
    values = sorted(set(column))
    if len(values) == 1:
        return str(values[0])
    if values == list(range(values[0], values[-1] + 1)):
        return f"{{{values[0]}..{values[-1]}}}"
    shown = ",".join(str(v) for v in values[:6])
    return f"{{{shown}{',…' if len(values) > 6 else ''}}}"


def list_keys(keys: Iterable[str], limit: int = 8) -> str:
    """Keys for a message: grouped, counted, at most `limit` groups."""
    groups = group_keys(keys)
    parts = [key if count == 1 else f"{key} ({count})" for key, count in groups[:limit]]
    if len(groups) > limit:
        parts.append(f"… and {len(groups) - limit} more groups")
    return ", ".join(parts)
