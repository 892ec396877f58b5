"""What the pickle reader is made of: what a table may hold, which keys may be hashed, its errors.

No opcodes (`pickle_machine.py`) and no list of what is allowed (`pickles.py`).
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torchtitan_ckpt.errors import DamagedError, Problem, RefusedError

Charge = Callable[[int], None]

_MAX_KEY_ITEMS = 64
_MAX_DEPTH = 200
_MAX_ITEMS = 50_000_000

# Opcodes that exist, and that no writer of checkpoints uses.
REFUSED_OPCODES = {
    0x82: "EXT1",
    0x83: "EXT2",
    0x84: "EXT4",
    0x92: "NEWOBJ_EX",
    0x97: "NEXT_BUFFER",
    0x98: "READONLY_BUFFER",
    ord("P"): "PERSID",
    ord("i"): "INST",
    ord("o"): "OBJ",
    ord("I"): "INT",
    ord("L"): "LONG",
    ord("F"): "FLOAT",
    ord("S"): "STRING",
    ord("T"): "BINSTRING",
    ord("U"): "SHORT_BINSTRING",
    ord("V"): "UNICODE",
    ord("l"): "LIST",
    ord("d"): "DICT",
    ord("g"): "GET",
    ord("p"): "PUT",
    ord("2"): "DUP",
}


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """The collector looks at every container again and again while millions are made and none is
    garbage: without it, reading metadata takes a fifth of the time."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


class Malformed(Exception):
    """Raised by a table's functions for arguments that a real writer never produces."""


class Refused(Exception):
    """Raised by a table's functions for what is readable but not allowed."""


@dataclass(frozen=True, slots=True)
class Function:
    """A global that REDUCE may call: `call(args, charge)`; `charge(bytes)` pays for copies."""

    name: str
    call: Callable[[tuple[Any, ...], Charge], Any]


@dataclass(frozen=True, slots=True, eq=False)
class RecordClass:
    """A global that NEWOBJ may make a `Record` of; the real class is never imported."""

    name: str


class Record:
    """An instance of an allowed class: which one, and the state that the pickle gave it.

    Hashing is by identity, so that a record as the key of a dict costs nothing and compares with
    nothing.
    """

    __slots__ = ("cls", "state")

    def __init__(self, cls: RecordClass) -> None:
        self.cls = cls
        self.state: Any = None


class ByReference:
    """A class that is mentioned, not instantiated by NEWOBJ: an argument of a function."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


@dataclass(frozen=True, slots=True)
class Table:
    """What a pickle may name. `builders` accept BUILD for objects that functions made."""

    names: Mapping[tuple[str, str], Any]
    builders: Mapping[type, Callable[[Any, Any], None]] = field(default_factory=dict)
    persistent: Callable[[Any], Any] | None = None
    trust: bool = False


def check_key(key: Any) -> None:
    """Only what hashes in constant time may be a key or a member of a set."""
    kind = type(key)
    if kind in (str, bool, float, Record, bytes) or key is None:
        return
    if kind is int:
        if -(2**63) <= key < 2**64:
            return
        raise Refused("an integer beyond 64 bits as a key")
    if kind is tuple:
        if len(key) <= _MAX_KEY_ITEMS and not any(type(item) is tuple for item in key):
            for item in key:
                check_key(item)
            return
        raise Refused("a nested or long tuple as a key")
    raise Refused(f"a key of type {describe(key)}")


def describe(value: Any) -> str:
    if isinstance(value, (Function, RecordClass, ByReference)):
        return value.name
    return f"a {type(value).__name__}"


def refused(where: str, offset: int, reason: str) -> RefusedError:
    return RefusedError(
        Problem(
            code="pickle.refused",
            what=f"this pickle is not read: {reason}",
            where=f"{where}, byte {offset}",
            expected="what DCP and torch.save write: tensors, numbers, plain containers",
            cause="written by other code, or made to run code when it is opened",
            fix="if you trust its writer, read with trust=True (--trust); that can run its code",
        )
    )


def damaged(where: str, offset: int, what: str, size: int) -> DamagedError:
    cut = what.endswith("cut")
    return DamagedError(
        Problem(
            code="pickle.cut" if cut else "pickle.malformed",
            what=what,
            where=f"{where}, byte {offset} of {size}",
            cause="an interrupted write or copy" if cut else "not a pickle, or overwritten bytes",
            fix="copy the file again, or use another step",
        )
    )


def check_plain(value: Any, *, where: str) -> None:
    """Refuse values that are harmless to read and harmful to use: bottomless, circular, or a few
    bytes that unfold to billions of items. For objects that are handed to a caller."""
    weights: dict[int, tuple[int, int]] = {}
    open_ids: set[int] = set()
    todo: list[tuple[Any, bool]] = [(value, False)]
    while todo:
        node, done = todo.pop()
        if isinstance(node, dict):
            children = [*node.keys(), *node.values()]
        elif isinstance(node, (list, tuple, set, frozenset, deque)):
            children = list(node)
        else:
            continue
        if done:
            open_ids.discard(id(node))
            below = [weights.get(id(child), (1, 0)) for child in children]
            items = 1 + sum(weight for weight, _ in below)
            depth = 1 + max((deep for _, deep in below), default=0)
            if items > _MAX_ITEMS or depth > _MAX_DEPTH:
                raise refused(where, 0, "it unfolds to a structure too deep or too large to use")
            weights[id(node)] = (items, depth)
        elif id(node) in open_ids:
            raise refused(where, 0, "it contains itself")
        elif id(node) not in weights:
            open_ids.add(id(node))
            todo.append((node, True))
            todo.extend((child, False) for child in children)
