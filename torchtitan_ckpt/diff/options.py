"""What `diff` is asked for, and the contradictions in it. Reads nothing."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan_ckpt.config import TRAINING_STATES
from torchtitan_ckpt.errors import ConfigError, Problem

WINDOW = 2 * 2**20
_PARTS = ("model", *TRAINING_STATES)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to compare and how; the command line explains each field."""

    a: str
    b: str
    family: str | None = None
    config: str | None = None
    adapter: str | None = None
    generation: str | None = None
    only: tuple[str, ...] = ()
    ulps: int = 4
    atol: float = 0.0
    causes: bool = True
    threads: int | None = None
    window: int = WINDOW
    trust: bool = False


def check(options: Options) -> None:
    """Raise one ConfigError with every contradiction."""
    problems = [
        Problem(
            code="diff.only",
            what=f"no part {part!r}",
            where="--only",
            expected=", ".join(_PARTS),
        )
        for part in options.only
        if part not in _PARTS
    ]
    if options.threads is not None and options.threads < 1:
        problems.append(Problem(code="diff.threads", what="no thread", where="--threads"))
    if options.ulps < 0 or not options.atol >= 0:
        problems.append(
            Problem(code="diff.tolerance", what="a negative tolerance", where="--ulps, --atol")
        )
    if options.family and options.adapter:
        problems.append(
            Problem(
                code="diff.two-tables", what="a family and an adapter", where="--family, --adapter"
            )
        )
    if problems:
        raise ConfigError(*problems)
