"""Finds a subject by its name.

`pkg.mod:NAME`, a shipped family, `titan:<model>/<flavor>`, `main:<fixture>`, `manager:ours`, or a
folder. `pkg.mod:NAMES` of a list is all that it holds, `pkg.mod:NAMES.0` the first of them.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from conformance.subject import Subject
from torchtitan_ckpt.errors import ConfigError, NotFoundError, Problem, nearest

_PREFIXES = ("titan:", "main:", "published:", "manager:")


def names() -> tuple[str, ...]:
    """Shipped subjects: one for each model family of this project."""
    from torchtitan_ckpt import families

    return tuple(families.names())


def is_name(name: str) -> bool:
    """Whether a name by itself may be that of a subject: a shipped one, or a folder."""
    return name.startswith(_PREFIXES) or name in names() or os.path.isdir(name)


def spread(name: str) -> tuple[str, ...]:
    """The name, or a name for each subject where it is that of a list."""
    if ":" not in name or name.startswith(_PREFIXES):
        return (name,)
    found = _imported(name)
    if not isinstance(found, list | tuple):
        return (name,)
    if not found:
        raise ConfigError(
            Problem(
                code="check.bad-subject",
                what=f"{name} is an empty list",
                expected="at least one conformance.Subject",
            )
        )
    return tuple(f"{name}.{n}" for n in range(len(found)))


def resolve(name: str) -> Subject:
    """The Subject of a name. Raises ConfigError or NotFoundError with what was tried."""
    if name.startswith("titan:"):
        from conformance.subjects import titan

        return titan.subject(name)
    if name.startswith("main:"):
        from conformance.subjects import main

        return main.subject(name)
    if name.startswith("published:"):
        from conformance.subjects import published

        return published.subject(name)
    if name.startswith("manager:"):
        from conformance.subjects import managers

        return managers.subject(name)
    if ":" in name:
        return _as_subject(_imported(name), name)
    if os.path.isdir(name):
        return Subject(name=name, hf=name)
    from conformance.subjects import families

    shipped = names()
    if name not in shipped:
        near = nearest(name, shipped)
        raise ConfigError(
            Problem(
                code="check.no-subject",
                what=f"no subject is called {name!r}",
                expected=f"pkg.mod:NAME, titan:<model>/<flavor>, a folder, or {', '.join(shipped)}",
                fix=f"did you mean {near}?"
                if near
                else "name a Subject in a module of yours as pkg.mod:NAME",
            )
        )
    return families.subject(name)


def _imported(name: str) -> Any:
    module_name, _, attribute = name.partition(":")
    # `python -m` puts the working folder on the path; an installed script does not.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a script without a guard may even leave Python
        raise _not_imported(name, module_name, error) from error
    for part in attribute.split("."):
        if isinstance(found, list | tuple) and part.isdecimal() and int(part) < len(found):
            found = found[int(part)]
            continue
        if not hasattr(found, part):
            near = nearest(part, vars(found)) if hasattr(found, "__dict__") else None
            raise NotFoundError(
                Problem(
                    code="check.no-subject",
                    what=f"{module_name} has no {attribute!r}",
                    fix=f"did you mean {near}?" if near else "correct the name",
                )
            )
        found = getattr(found, part)
    return found


def _as_subject(found: Any, name: str) -> Subject:
    if callable(found) and not isinstance(found, Subject):
        found = found()
    if not isinstance(found, Subject):
        raise ConfigError(
            Problem(
                code="check.bad-subject",
                what=f"{name} is not a Subject",
                actual=type(found).__name__,
                expected="conformance.Subject",
            )
        )
    return found


def _not_imported(name: str, module: str, error: BaseException) -> NotFoundError:
    fix = 'correct it; what it does as a script belongs under `if __name__ == "__main__":`'
    absent = error.name if isinstance(error, ModuleNotFoundError) else None
    if absent is not None:
        own = f"{module}.".startswith(f"{absent}.")
        fix = "run from the folder that holds it" if own else f"install {absent}, which it imports"
    return NotFoundError(
        Problem(
            code="check.no-module",
            what=f"module {module!r} cannot be imported",
            where=name,
            cause=f"{type(error).__name__}: {error}",
            fix=fix,
        )
    )
