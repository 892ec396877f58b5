"""Read options with tyro, and say what it refuses in this project's form.

tyro prints a box and exits; here the box becomes `Problem`s, by the table below, and what the table
does not know is said in tyro's own sentence. Imports tyro and never torch.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from typing import Any, TypeVar, get_type_hints

import tyro

from torchtitan_ckpt.errors import ConfigError, Problem, nearest

T = TypeVar("T")
_TYPES = {"INT": "a whole number", "FLOAT": "a number"}


def read(kind: type[T], argv: Sequence[str], *, prog: str, help: str, **options: Any) -> T:
    """An instance of the dataclass `kind` from a command line; `options` are those of `tyro.cli`.

    `help` is the command that lists all flags. Raises ConfigError for what cannot be read; `--help`
    prints and exits, as tyro does.
    """
    talk = io.StringIO()
    try:
        with contextlib.redirect_stderr(talk):
            found: T = tyro.cli(kind, args=list(argv), prog=prog, **options)
            return found
    except SystemExit as stop:
        if not stop.code:
            raise
    raise ConfigError(*_problems(talk.getvalue(), _flags(kind), f"{help} lists flags and values"))


def _flags(kind: Any) -> list[str]:
    """The flags of a flat dataclass; of a nested one its reader knows more than this."""
    if not is_dataclass(kind):
        return []
    hints = get_type_hints(kind, include_extras=True)
    names = [
        item.name
        for item in fields(kind)
        if tyro.conf.Positional not in getattr(hints[item.name], "__metadata__", ())
    ]
    return [f"--{name.replace('_', '-')}" for name in names]


@dataclass(frozen=True, slots=True)
class _Refusal:
    """What a pattern of the table found in the lines of a box, and what there is to propose."""

    match: re.Match[str]
    lines: Sequence[str]
    flags: Sequence[str]
    help: str


def _problems(box: str, flags: Sequence[str], help: str) -> list[Problem]:
    lines = _inside(box)
    text = " ".join(line.strip() for line in lines).partition(" For full helptext")[0]
    for pattern, words in _TABLE:
        match = re.search(pattern, text)
        if match:
            return words(_Refusal(match, lines, flags, help))
    return [_problem("value", text or "the command line cannot be read", fix=help)]


def _inside(box: str) -> list[str]:
    """The lines of tyro's message, without its title, its rulers, and its frame of either kind."""
    lines = [re.sub(r"^[│ ] (.*?)[│ ]*$", r"\1", line) for line in box.splitlines()[1:]]
    return [line for line in lines if line.strip("╭╮╰╯─- ")]


def _wrong_value(said: _Refusal) -> list[Problem]:
    flag, why = _spelled(said.match[1]), said.match[2]
    given = re.findall(r"'((?:[^'\\]|\\.)*)'", why.partition(" Got errors")[0])
    shown = " ".join(given) or "this"
    form = next((b for a, b in pairwise(said.lines) if a == "Argument helptext:"), "").strip()
    kind = next((text for name, text in _TYPES.items() if re.search(rf"\b{name}\b", why)), form)
    what = f"{flag} cannot be {shown!r}"
    return [_problem("value", what, expected=kind, actual=repr(shown), fix=said.help)]


def _wrong_choice(said: _Refusal) -> list[Problem]:
    value, flag = said.match[1], _spelled(said.match[2])
    choices = sorted(c for c in re.findall(r"'([^']*)'", said.match[3]) if c != "None")
    guess = nearest(value, choices)
    return [
        _problem(
            "value",
            f"{flag} cannot be {value!r}",
            expected=f"one of {', '.join(choices)}",
            actual=repr(value),
            fix=f"did you mean {flag} {guess}?" if guess else said.help,
        )
    ]


def _no_value(said: _Refusal) -> list[Problem]:
    flag = _spelled(said.match[1])
    what = f"{flag} lacks a value"
    return [_problem("no-value", what, expected=f"{flag} VALUE", actual=flag, fix=said.help)]


def _missing(said: _Refusal) -> list[Problem]:
    named = [re.fullmatch(r" {4}(\S+)", line) for line in said.lines]
    names = [match[1] for match in named if match is not None]
    lacking = " and ".join(names)
    what = f"{lacking} {'is' if len(names) == 1 else 'are'} missing"
    return [_problem("missing", what, expected=lacking, actual="nothing", fix=said.help)]


def _unknown(said: _Refusal) -> list[Problem]:
    problems = []
    after_flag = False
    for word in said.match[1].split(", "):
        if word.startswith("-"):
            after_flag = True
            name = word.partition("=")[0]
            guess = nearest(name.replace("_", "-"), said.flags)
            problems.append(
                _problem(
                    "unknown-flag",
                    f"there is no flag {name}",
                    expected=f"one of {', '.join(said.flags)}" if len(said.flags) <= 8 else "",
                    actual=word,
                    fix=f"did you mean {guess}?" if guess else said.help,
                )
            )
        elif not after_flag:  # what follows an unknown flag is its value
            problems.append(
                _problem(
                    "stray",
                    f"{word!r} belongs to no flag",
                    expected="options, and no further word",
                    actual=word,
                    fix=f"leave {word} out",
                )
            )
    return problems


_TABLE: tuple[tuple[str, Callable[[_Refusal], list[Problem]]], ...] = (
    (r"Error parsing (\S+): (.*)", _wrong_value),
    (r"invalid choice '(.*?)' for argument '(\S+)'\. Expected one of \((.*?)\)", _wrong_choice),
    (r"Missing value for argument '(\S+?)'", _no_value),
    (r"Missing from ", _missing),
    (r"Unrecognized (?:or misplaced )?options: (.*?)(?: Perhaps you meant|$)", _unknown),
)


def _spelled(flag: str) -> str:
    """A job's flags as the guide spells them, a verb's as its --help does; both are read."""
    return "--" + flag[2:].replace("-", "_") if "." in flag else flag


def _problem(kind: str, what: str, *, expected: str = "", actual: str = "", fix: str) -> Problem:
    return Problem(
        code=f"cli.{kind}",
        what=what,
        where="the command line",
        expected=expected,
        actual=actual,
        fix=fix,
    )
