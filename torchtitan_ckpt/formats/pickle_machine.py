"""A small pickle interpreter that runs no code: every global must be in a table handed to it.

Python's own unpickler stays unsafe in the hands of strangers even with `find_class` overridden: ten
bytes make its memo take gigabytes (LONG_BINPUT), a nested tuple as a key of a dict overflows the C
stack or hashes for ever, and BUILD writes into any class that the table lets through. This one
knows the binary opcodes of protocols 2 to 5 only, keeps classes as plain records, checks
keys before they are hashed, and says at which byte it stopped. For the `.metadata` of a large
checkpoint it is as fast as `pickle.load` of the same file (tests/benchmarks/dcp_small_tensors.py).

What is allowed, and what a global means, is decided in `pickles.py`, not here.
"""

from __future__ import annotations

import importlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from struct import error as StructError
from struct import unpack_from
from typing import Any

from torchtitan_ckpt.errors import CheckpointError
from torchtitan_ckpt.formats.pickle_parts import (
    REFUSED_OPCODES,
    ByReference,
    Charge,
    Function,
    Malformed,
    Record,
    RecordClass,
    Refused,
    Table,
    check_key,
    damaged,
    describe,
    garbage_collection_paused,
    refused,
)

_MAX_INT_BYTES = 8192
# Bytes of an argument after its first, where they are read one by one.
_ARGUMENT = {0x6A: 3, 0x4D: 1}


class _Cut(Exception):
    """The data ends inside an opcode."""


def interpret(data: bytes, table: Table, *, where: str) -> Any:
    """The value that a pickle describes. Raises `RefusedError` or `DamagedError`, nothing else."""
    budget = 64 * 2**20 + 16 * len(data)

    def charge(size: int) -> None:
        nonlocal budget
        budget -= size
        if budget < 0:
            raise Refused("it would unfold to many times its own size")

    with garbage_collection_paused():
        return _run(data, table, charge, where)


def _run(data: bytes, table: Table, charge: Charge, where: str) -> Any:
    stack: list[Any] = []
    marks: list[int] = []
    memo: list[Any] = []
    push, pop, memoize = stack.append, stack.pop, memo.append
    i = start = op = 0
    value: Any
    try:
        while True:
            start = i
            op = data[i]
            i += 1
            if op == 0x94:  # MEMOIZE; the chain is ordered by how often .metadata uses an opcode
                memoize(stack[-1])
            elif op == 0x68:  # BINGET
                push(memo[data[i]])
                i += 1
            elif op == 0x6A:  # LONG_BINGET
                push(memo[data[i] | data[i + 1] << 8 | data[i + 2] << 16 | data[i + 3] << 24])
                i += 4
            elif op == 0x4B:  # BININT1
                push(data[i])
                i += 1
            elif op == 0x29:  # EMPTY_TUPLE, and the NEWOBJ that nearly always follows
                cls = stack[-1] if stack else None
                if data[i] == 0x81 and type(cls) is RecordClass:
                    stack[-1] = value = Record(cls)
                    i += 1
                    if data[i] == 0x94:
                        memoize(value)
                        i += 1
                else:
                    push(())
            elif op == 0x28:  # MARK
                marks.append(len(stack))
            elif op == 0x62:  # BUILD
                state = pop()
                target = stack[-1]
                if type(target) is Record:
                    target.state = state
                else:
                    _build(target, state, table)
            elif op == 0x75:  # SETITEMS
                mark = marks.pop()
                items = stack[mark:]
                del stack[mark:]
                target = stack[-1]
                if type(target) is dict and len(items) == 2 and type(items[0]) is str:
                    target[items[0]] = items[1]
                else:
                    _set_items(target, items)
            elif op == 0x7D:  # EMPTY_DICT
                value = {}
                push(value)
                if data[i] == 0x94:  # most are remembered: a MEMOIZE taken along
                    memoize(value)
                    i += 1
            elif op == 0x85:  # TUPLE1
                stack[-1] = value = (stack[-1],)
                if data[i] == 0x94:
                    memoize(value)
                    i += 1
            elif op == 0x52:  # REDUCE
                args = pop()
                function = stack[-1]
                if type(args) is not tuple:
                    raise Malformed("REDUCE without a tuple of arguments")
                if type(function) is Function:
                    stack[-1] = function.call(args, charge)
                elif table.trust and callable(function):
                    stack[-1] = function(*args)
                else:
                    raise Refused(f"it calls {describe(function)}")
            elif op == 0x86:  # TUPLE2
                last = pop()
                stack[-1] = value = (stack[-1], last)
                if data[i] == 0x94:
                    memoize(value)
                    i += 1
            elif op == 0x89:  # NEWFALSE
                push(False)
            elif op == 0x8C:  # SHORT_BINUNICODE
                end = i + 1 + data[i]
                if end > len(data):
                    raise _Cut
                push(data[i + 1 : end].decode("utf-8", "surrogatepass"))
                i = end
            elif op == 0x71:  # BINPUT
                _put(memo, data[i], stack[-1], start)
                i += 1
            elif op == 0x58:  # BINUNICODE
                end = i + 4 + unpack_from("<I", data, i)[0]
                push(_text(data, i + 4, end))
                i = end
            elif op == 0x4D:  # BININT2
                push(data[i] | data[i + 1] << 8)
                i += 2
            elif op == 0x5D:  # EMPTY_LIST
                push([])
            elif op == 0x61:  # APPEND
                item = pop()
                _extend(stack[-1], (item,))
            elif op == 0x74:  # TUPLE
                mark = marks.pop()
                row = tuple(stack[mark:])
                del stack[mark:]
                push(row)
            elif op == 0x4A:  # BININT
                push(unpack_from("<i", data, i)[0])
                i += 4
            elif op == 0x88:  # NEWTRUE
                push(True)
            elif op == 0x4E:  # NONE
                push(None)
            elif op == 0x87:  # TUPLE3
                c = pop()
                b = pop()
                stack[-1] = (stack[-1], b, c)
            elif op == 0x47:  # BINFLOAT
                push(unpack_from(">d", data, i)[0])
                i += 8
            elif op == 0x95:  # FRAME
                if i + 8 > len(data):
                    raise _Cut
                i += 8
            elif op == 0x63:  # GLOBAL
                middle = _line(data, i)
                end = _line(data, middle + 1)
                push(_find(table, _text(data, i, middle), _text(data, middle + 1, end)))
                i = end + 1
            elif op == 0x93:  # STACK_GLOBAL
                name = pop()
                module = stack[-1]
                if type(name) is not str or type(module) is not str:
                    raise Malformed("STACK_GLOBAL without two names")
                stack[-1] = _find(table, module, name)
            elif op == 0x81:  # NEWOBJ
                args = pop()
                cls = stack[-1]
                if type(cls) is RecordClass and args == ():
                    stack[-1] = Record(cls)
                elif table.trust and isinstance(cls, type):
                    stack[-1] = cls.__new__(cls, *args)
                else:
                    raise Refused(f"it makes an instance of {describe(cls)} with arguments")
            elif op == 0x51:  # BINPERSID
                if table.persistent is None:
                    raise Refused("it refers to something outside of itself (BINPERSID)")
                stack[-1] = table.persistent(stack[-1])
            elif op == 0x65:  # APPENDS
                mark = marks.pop()
                items = stack[mark:]
                del stack[mark:]
                _extend(stack[-1], items)
            elif op == 0x73:  # SETITEM
                value = pop()
                key = pop()
                _set_items(stack[-1], [key, value])
            elif op == 0x72:  # LONG_BINPUT
                _put(memo, unpack_from("<I", data, i)[0], stack[-1], start)
                i += 4
            elif op == 0x8A:  # LONG1
                end = i + 1 + data[i]
                push(int.from_bytes(_bytes(data, i + 1, end), "little", signed=True))
                i = end
            elif op in _SIZED:
                size, width, make = _SIZED[op]
                end = i + width + unpack_from(size, data, i)[0]
                push(make(_bytes(data, i + width, end)))
                i = end
            elif op == 0x8F:  # EMPTY_SET
                push(set())
            elif op == 0x90:  # ADDITEMS
                mark = marks.pop()
                items = stack[mark:]
                del stack[mark:]
                if type(stack[-1]) is not set:
                    raise Malformed("ADDITEMS on something that is no set")
                for item in items:
                    check_key(item)
                stack[-1].update(items)
            elif op == 0x91:  # FROZENSET
                mark = marks.pop()
                items = stack[mark:]
                del stack[mark:]
                for item in items:
                    check_key(item)
                push(frozenset(items))
            elif op == 0x30:  # POP
                pop()
            elif op == 0x31:  # POP_MARK
                del stack[marks.pop() :]
            elif op == 0x80:  # PROTO
                if not 2 <= data[i] <= 5:
                    raise Refused(f"it is written in pickle protocol {data[i]}")
                i += 1
            elif op == 0x2E:  # STOP
                if len(stack) != 1 or marks:
                    raise Malformed("it ends with other than one value")
                return stack[0]
            elif op in REFUSED_OPCODES:
                raise Refused(f"it uses the opcode {REFUSED_OPCODES[op]}")
            else:
                raise Malformed(f"0x{op:02x} is no pickle opcode")
    except CheckpointError:
        raise
    except Refused as error:
        raise refused(where, start, str(error)) from None
    except UnicodeDecodeError:
        what = "a name or text that is not UTF-8"
        raise damaged(where, start, what, len(data)) from None
    except (_Cut, StructError, IndexError) as error:
        if not isinstance(error, IndexError) or i + _ARGUMENT.get(op, 0) >= len(data):
            raise damaged(where, start, "the pickle is cut", len(data)) from None
        what = "the pickle contradicts itself"
        raise damaged(where, start, what, len(data)) from None
    except Exception as error:  # whatever a mangled file leads to ends in the error tree
        if table.trust and not isinstance(error, Malformed):
            raise damaged(where, start, f"{type(error).__name__}: {error}", len(data)) from error
        what = str(error) if isinstance(error, Malformed) else "the pickle contradicts itself"
        raise damaged(where, start, what, len(data)) from None


def _text(data: bytes, start: int, end: int) -> str:
    if end > len(data):
        raise _Cut
    # As Python's own unpickler: names of files that are not UTF-8 are text with lone surrogates.
    return data[start:end].decode("utf-8", "surrogatepass")


def _line(data: bytes, start: int) -> int:
    """Where the line that starts there ends; names of modules and classes are short."""
    end = data.find(b"\n", start, start + 1024)
    if end < 0:
        raise _Cut if start + 1024 > len(data) else Malformed("a name without an end")
    return end


def _bytes(data: bytes, start: int, end: int) -> bytes:
    if end > len(data):
        raise _Cut
    return data[start:end]


def _integer(raw: bytes) -> int:
    if len(raw) > _MAX_INT_BYTES:
        raise Refused(f"it holds an integer of {len(raw)} bytes")
    return int.from_bytes(raw, "little", signed=True)


def _utf8(raw: bytes) -> str:
    return _text(raw, 0, len(raw))


# Opcodes with a length in front: struct code of the length, its width, what the bytes become.
_SIZED: Mapping[int, tuple[str, int, Callable[[bytes], Any]]] = {
    0x43: ("<B", 1, bytes),
    0x42: ("<I", 4, bytes),
    0x8E: ("<Q", 8, bytes),
    0x8D: ("<Q", 8, _utf8),
    0x96: ("<Q", 8, bytearray),
    0x8B: ("<I", 4, _integer),
}


def _put(memo: list[Any], index: int, value: Any, position: int) -> None:
    if index == len(memo):
        memo.append(value)
    elif index < len(memo):
        memo[index] = value
    elif (
        index <= position
    ):  # writers number their memos; a gap is legal, one beyond the file is not
        memo.extend([None] * (index - len(memo)))
        memo.append(value)
    else:
        raise Malformed(f"memo number {index} in a pickle of {position} bytes so far")


def _set_items(target: Any, items: list[Any]) -> None:
    kind = type(target)
    if kind is not dict and kind is not OrderedDict and kind is not defaultdict:
        raise Malformed(f"items for {describe(target)}, which is no dict")
    if len(items) & 1:
        raise Malformed("a key without a value")
    keys = items[::2]
    for key in keys:
        if type(key) is not str:
            check_key(key)
    target.update(zip(keys, items[1::2], strict=True))


def _extend(target: Any, items: Any) -> None:
    if type(target) is not list and type(target) is not deque:
        raise Malformed(f"an item for {describe(target)}, which is no list")
    target.extend(items)


def _build(target: Any, state: Any, table: Table) -> None:
    builder = table.builders.get(type(target))
    if builder is not None:
        builder(target, state)
    elif table.trust and not isinstance(target, (Function, RecordClass, ByReference)):
        if hasattr(target, "__setstate__"):
            target.__setstate__(state)
        else:
            target.__dict__.update(state)
    else:
        raise Refused(f"it sets the state of {describe(target)}")


def _find(table: Table, module: str, name: str) -> Any:
    try:
        return table.names[module, name]
    except KeyError:
        if not table.trust:
            raise Refused(f"it needs {module}.{name}") from None
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found
