"""Read a job's command line in the guide's own flags: used by the job and by `explain`.

tyro parses; this module adds the guide's conventions and says them where they were missed: a bool
is turned off by `--section.no-flag`, a list is one comma-separated value, a registry's defaults
stay until a flag overrides them. It needs no torch and looks at no disk.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_type_hints

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from torchtitan_ckpt import usage
from torchtitan_ckpt.errors import CheckpointError, ConfigError, Problem, nearest
from torchtitan_ckpt.train import registry
from torchtitan_ckpt.train.config import JobConfig

SCRIPT = "run_train.sh"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command line taken apart: what the environment said, and the flags."""

    ngpu: int
    module: str
    config: str
    flags: tuple[str, ...]


def parse_job(
    argv: Sequence[str], module: str | None = None, config: str | None = None
) -> JobConfig:
    """The job that a command line describes: the registry's defaults, then the flags.

    `argv` may be the flags alone or a whole command of the guide (`NGPU=16 MODULE=… CONFIG=… bash
    scripts/run_train.sh --…`). `module` and `config` count where the command names none.
    Raises ConfigError with every mistake at once; `--help` prints and exits, as tyro does.
    """
    command = split_command(argv, module=module, config=config)
    return parse_flags(command.flags, registry.load(command.module, command.config))


def split_command(
    argv: Sequence[str],
    *,
    module: str | None = None,
    config: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Command:
    """Take a command apart: `NAME=value` in front, the script's name, --module, --config, flags.

    The command's own words come first, then the arguments here, then `environ` (which is empty
    unless given), then the defaults.
    """
    words = list(argv)
    given = dict(environ or {})
    asked = {"MODULE": module, "CONFIG": config}
    given.update({name: value for name, value in asked.items() if value})
    while words and re.match(r"[A-Za-z_][A-Za-z0-9_]*=", words[0]):
        name, _, value = words.pop(0).partition("=")
        given[name] = value
    for index, word in enumerate(words):
        if word.startswith("-"):
            break
        if os.path.basename(word) == SCRIPT:
            words = words[index + 1 :]
            break
    flags: list[str] = []
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if name not in ("--module", "--config"):
            flags.append(word)
            continue
        if not equals and (not words or words[0].startswith("-")):
            raise ConfigError(_problem("no-value", f"{name} lacks a value", fix=f"{name} NAME"))
        given[name[2:].upper()] = value if equals else words.pop(0)
    return Command(
        ngpu=_ngpu(given.get("NGPU") or "1"),
        module=given.get("MODULE") or registry.DEFAULT_MODULE,
        config=given.get("CONFIG") or registry.DEFAULT_CONFIG,
        flags=tuple(flags),
    )


def parse_flags(flags: Sequence[str], job: JobConfig) -> JobConfig:
    """`job` with the fields that `flags` name changed."""
    if not any(flag in ("-h", "--help") for flag in flags):
        problems = list(_misuse(flags, _known()))
        if problems:
            raise ConfigError(*problems)
    return usage.read(
        JobConfig,
        flags,
        prog=f"scripts/{SCRIPT}",
        help=f"bash scripts/{SCRIPT} --help",
        default=job,
        registry=_comma_lists(),
    )


def report(error: CheckpointError, argv: Sequence[str], rank: int = 0) -> None:
    """Say an error on stderr, with its traceback if the command line asks for it (--debug).

    What every rank finds alike - its options - is said by the first only.
    """
    if "--debug" in argv:
        traceback.print_exception(error)
    elif rank == 0:
        print(error, file=sys.stderr, flush=True)
    elif not isinstance(error, ConfigError):
        print(f"[rank {rank}] {error}", file=sys.stderr, flush=True)


def _ngpu(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            _problem("ngpu", f"NGPU cannot be {text!r}", fix="NGPU=1, or the number of ranks")
        )
    return int(text)


def _known() -> dict[str, Any]:
    """Every flag of a job, with underscores and without its dashes, and the type of its value."""
    return dict(_flags(JobConfig, ""))


def _flags(kind: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    hints = get_type_hints(kind)
    for item in fields(kind):
        if is_dataclass(hints[item.name]):
            yield from _flags(hints[item.name], f"{prefix}{item.name}.")
        elif item.name != "model":  # the registry's affair, like torchtitan's model spec
            yield f"{prefix}{item.name}", hints[item.name]


def _misuse(flags: Sequence[str], known: Mapping[str, Any]) -> Iterator[Problem]:
    """What breaks a convention, each with the form that was meant."""
    groups: list[tuple[str, list[str]]] = []
    for word in flags:
        if word.startswith("--"):
            groups.append((word, []))
        elif groups:
            groups[-1][1].append(word)
        else:
            yield _problem("stray", f"{word!r} belongs to no flag", fix="put a flag before it")
    for word, values in groups:
        text, equals, value = word[2:].partition("=")
        name = text.replace("-", "_")
        if equals:
            values = [value, *values]
        yield from _one(f"--{text}", name, values, known)


def _one(
    flag: str, name: str, values: Sequence[str], known: Mapping[str, Any]
) -> Iterator[Problem]:
    off = re.fullmatch(r"(.*\.)?no_([^.]+)", name)
    if off and name not in known and f"{off[1] or ''}{off[2]}" in known:
        name = f"{off[1] or ''}{off[2]}"
        if known[name] is not bool:
            yield _problem("not-bool", f"{flag} turns off what is no bool", fix=f"--{name} VALUE")
        elif values:
            yield _bool_value(flag, name, values, negated=True)
    elif name not in known:
        yield _unknown(flag, name, known)
    elif known[name] is bool:
        if values:
            yield _bool_value(flag, name, values, negated=False)
    elif not values:
        yield _problem("no-value", f"{flag} lacks a value", fix=f"--{name} VALUE")
    elif known[name] == list[str]:
        parts = [part for value in values for part in value.split(",") if part]
        if len(values) > 1:
            yield _problem(
                "list-form",
                f"{flag} takes one comma-separated value, not several words",
                actual=" ".join([flag, *values]),
                fix=f"--{name} {','.join(parts)}",
            )
    elif len(values) > 1:
        yield _problem(
            "stray",
            f"{flag} takes one value",
            actual=" ".join([flag, *values]),
            fix=f"--{name} {values[0]}",
        )


def _bool_value(flag: str, name: str, values: Sequence[str], *, negated: bool) -> Problem:
    word = values[0].lower()
    meant = {"true": True, "1": True, "yes": True, "on": True}.get(word)
    meant = False if word in ("false", "0", "no", "off") else meant
    forms = {True: f"--{name}", False: _off_form(name)}
    if meant is None or len(values) > 1:
        fix = f"remove {' '.join(values)}"
    else:
        fix = forms[meant is not negated]
    return _problem(
        "bool-form",
        f"{flag} takes no value: {forms[True]} turns it on, {forms[False]} turns it off",
        actual=" ".join([flag, *values]),
        fix=fix,
    )


def _off_form(name: str) -> str:
    section, dot, leaf = name.rpartition(".")
    return f"--{section}{dot}no-{leaf.replace('_', '-')}"


def _unknown(flag: str, name: str, known: Mapping[str, Any]) -> Problem:
    front = name.removeprefix("no_")
    if front != name and front in known:
        return _problem(
            "bool-form",
            f"{flag} is not how a bool is turned off: the 'no-' stands after the section",
            actual=flag,
            fix=_off_form(front) if known[front] is bool else f"--{front} VALUE",
        )
    guess = nearest(name, known)
    return _problem(
        "unknown-flag",
        f"there is no flag {flag}",
        fix=f"did you mean --{guess}?" if guess else f"bash scripts/{SCRIPT} --help lists them",
    )


def _problem(kind: str, what: str, *, actual: str = "", fix: str) -> Problem:
    return Problem(code=f"cli.{kind}", what=what, where="the command line", actual=actual, fix=fix)


def _comma_lists() -> ConstructorRegistry:
    found = ConstructorRegistry()

    @found.primitive_rule
    def comma(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[list[str]] | None:
        if info.type != list[str]:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="NAME,NAME,...",
            instance_from_str=lambda args: [part for part in args[0].split(",") if part],
            is_instance=lambda value: isinstance(value, list),
            str_from_instance=lambda value: [",".join(value)],
        )

    return found
