"""What ends a check early, in words: an input that is missing, or code of the subject that failed.

Each says what happened, where in the subject's own code, why it may be, and what to do. No
verdicts; `bench.py` turns these into cells.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from torchtitan_ckpt.errors import CheckpointError

_LONGEST = 240


class NotApplicable(Exception):
    """The subject lacks what a check needs; the text is the reason."""


class AdapterRaised(Exception):
    """The subject's own code raised."""

    keys: tuple[str, ...] = ()
    expected = actual = ""
    cause = "the subject's own code raised"
    remedy = "see the place named above"

    def __init__(self, direction: str, error: BaseException) -> None:
        self.direction, self.error = direction, error
        super().__init__(f"{direction} raised {told(error)}")


class AdapterReturned(AdapterRaised):
    """The subject's own code returned what no caller can use."""

    def __init__(self, direction: str, found: str, *, cause: str, remedy: str) -> None:
        self.direction, self.error = direction, TypeError(found)
        self.cause, self.remedy = cause, remedy
        Exception.__init__(self, f"{direction} returned {found}")


class Kept(AdapterReturned):
    """A call gave back what an earlier call was given: the finding of `purity.stateless`."""

    expected, actual = "tensors of what it was given", "on meta"

    def __init__(self, direction: str, keys: Iterable[str]) -> None:
        self.keys = tuple(keys)
        number = "1 tensor" if len(self.keys) == 1 else f"{len(self.keys)} tensors"
        super().__init__(
            direction,
            f"{number} without data, though all that it was given has data",
            cause="an earlier call, on meta tensors, is kept: in a default argument, on the class, "
            "in the module or in a cache",
            remedy="keep nothing between calls",
        )


def not_a_dict(direction: str, value: object) -> AdapterReturned:
    """What to raise for a conversion that returned no mapping."""
    kind = "None" if value is None else f"a {type(value).__name__}"
    return AdapterReturned(
        direction,
        f"{kind}, not a dict",
        cause="no `return`" if value is None else "pairs are listed or yielded, not collected",
        remedy="return a dict of tensors",
    )


@contextmanager
def theirs(doing: str, *, reads: bool = False) -> Iterator[None]:
    """The subject's own code runs: what it raises is `AdapterRaised`, an exit from Python too.

    Where this project `reads` what the subject names, it may refuse that in its own words.
    """
    try:
        with _no_way_out():
            yield
    except (KeyboardInterrupt, GeneratorExit, NotApplicable, AdapterRaised):
        raise
    except BaseException as error:  # torch's CheckpointException is not an Exception
        if reads and isinstance(error, CheckpointError):
            raise
        raise AdapterRaised(doing, error) from error


@contextmanager
def _no_way_out() -> Iterator[None]:
    """`os._exit` would end the run as clean, with nothing judged; children of a fork may use it."""
    right, owner = os._exit, os.getpid()

    def refused(status: int) -> NoReturn:
        if os.getpid() != owner:
            right(status)
        raise SystemExit(f"os._exit({status})")

    os._exit = refused
    try:
        yield
    finally:
        os._exit = right


def told(error: BaseException) -> str:
    """An error on one line of some length, and the place in the subject's own code."""
    words = words_of(error)
    if len(words) > _LONGEST:
        words = words[:_LONGEST].rpartition(" ")[0] + " …"
    return words + _place(_innermost(error))


def words_of(error: BaseException) -> str:
    """An error's class and text in one line; of DCP's, which holds one a rank, the first."""
    error = _innermost(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines])


def _innermost(error: BaseException) -> BaseException:
    failures = getattr(error, "failures", None)
    if not isinstance(failures, dict) or not failures:
        return error
    inner: BaseException = next(iter(failures.values()))[0]
    return inner


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    places = [(Path(f.filename).parts, f.lineno) for f in frames]
    # Neither the gate, which called, nor torch, which was called.
    own = [p for p in places if "conformance" not in p[0][-2:] and "torch" not in p[0]]
    return f" at {own[-1][0][-1]}:{own[-1][1]}" if own else ""
