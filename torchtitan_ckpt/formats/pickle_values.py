"""The functions that a pickle may call: each takes exactly what real writers pass to it.

Every function gets its arguments and a `charge` to pay for what it copies, so that a small file
cannot unfold to a large memory. Which global means which function is the business of `pickles.py`.
"""

from __future__ import annotations

import datetime
import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

from torchtitan_ckpt.formats.pickle_parts import (
    ByReference,
    Charge,
    Function,
    Malformed,
    Refused,
    check_key,
)


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62


def dims(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or len(value) > 64 or not all(map(is_count, value)):
        raise Malformed("a shape or stride that is no tuple of counts")
    return value


def _size(args: tuple[Any, ...], charge: Charge) -> tuple[int, ...]:
    if len(args) != 1:
        raise Malformed("torch.Size of other than one tuple")
    value = args[0]
    return tuple(value) if type(value) is list and len(value) <= 64 else dims(value)


def _only_text(args: tuple[Any, ...], charge: Charge) -> str:
    if len(args) != 1 or type(args[0]) is not str:
        raise Malformed("a layout without a name")
    return args[0]


def memory_format(args: tuple[Any, ...], charge: Charge) -> int:
    if args not in ((0,), (1,), (2,)):
        raise Malformed("an unknown memory format")
    return int(args[0])


def _path(args: tuple[Any, ...], charge: Charge) -> str:
    if len(args) > 4096 or not all(type(part) is str for part in args):
        raise Malformed("a path of other than names")
    charge(sum(map(len, args)))
    return "/".join(args).replace("//", "/", 1)


def _encode(args: tuple[Any, ...], charge: Charge) -> bytes:
    if len(args) != 2 or type(args[0]) is not str or args[1] not in ("latin1", "latin-1"):
        raise Refused("_codecs.encode for other than bytes")
    charge(len(args[0]))
    return args[0].encode("latin1")


def _bytes(args: tuple[Any, ...], charge: Charge) -> bytes:
    if args:
        raise Refused("bytes() with arguments")
    return b""


def _bytearray(args: tuple[Any, ...], charge: Charge) -> bytearray:
    if not args:
        return bytearray()
    if len(args) == 2:
        args = (_encode(args, charge),)
    if len(args) != 1 or type(args[0]) is not bytes:
        raise Malformed("bytearray of other than bytes")
    charge(len(args[0]))
    return bytearray(args[0])


def _items(args: tuple[Any, ...], charge: Charge) -> list[Any]:
    if not args:
        return []
    if len(args) != 1 or type(args[0]) is not list:
        raise Malformed("a container of other than a list")
    charge(64 * len(args[0]))
    return args[0]


def _set(args: tuple[Any, ...], charge: Charge) -> set[Any]:
    items = _items(args, charge)
    for item in items:
        check_key(item)
    return set(items)


def _frozenset(args: tuple[Any, ...], charge: Charge) -> frozenset[Any]:
    return frozenset(_set(args, charge))


def _ordered(args: tuple[Any, ...], charge: Charge) -> OrderedDict[Any, Any]:
    made: OrderedDict[Any, Any] = OrderedDict()
    for pair in _items(args, charge):
        if type(pair) not in (list, tuple) or len(pair) != 2:
            raise Malformed("an OrderedDict of other than pairs")
        check_key(pair[0])
        made[pair[0]] = pair[1]
    return made


def _defaultdict(args: tuple[Any, ...], charge: Charge) -> defaultdict[Any, Any]:
    if len(args) > 1:
        raise Malformed("a defaultdict with contents")
    factory = args[0] if args else None
    known = {"dict": dict, "list": list, "int": int, "float": float, "set": set}
    if isinstance(factory, (ByReference, Function)) and factory.name in known:
        return defaultdict(known[factory.name])
    if factory is None:
        return defaultdict(None)
    raise Refused("a defaultdict with a factory of its own")


def _deque(args: tuple[Any, ...], charge: Charge) -> deque[Any]:
    if len(args) > 2 or (args and args[0] not in ((), [])):
        raise Malformed("a deque with contents")
    limit = args[1] if len(args) == 2 else None
    if limit is not None and not is_count(limit):
        raise Malformed("a deque of negative length")
    return deque(maxlen=limit)


def _complex(args: tuple[Any, ...], charge: Charge) -> complex:
    if len(args) != 2 or not all(type(part) is float for part in args):
        raise Malformed("a complex number of other than two floats")
    return complex(*args)


def _datetime(args: tuple[Any, ...], charge: Charge) -> datetime.datetime:
    if not 1 <= len(args) <= 2 or type(args[0]) is not bytes or len(args[0]) != 10:
        raise Malformed("a datetime of other than ten bytes")
    if len(args) == 2 and not isinstance(args[1], datetime.tzinfo):
        raise Malformed("a datetime with something else for its zone")
    return datetime.datetime(*args)


def _date(args: tuple[Any, ...], charge: Charge) -> datetime.date:
    if len(args) != 1 or type(args[0]) is not bytes or len(args[0]) != 4:
        raise Malformed("a date of other than four bytes")
    return datetime.date(args[0])  # type: ignore[call-arg,arg-type]  # the pickled form


def _timedelta(args: tuple[Any, ...], charge: Charge) -> datetime.timedelta:
    if len(args) > 3 or not all(type(part) is int for part in args):
        raise Malformed("a timedelta of other than numbers")
    return datetime.timedelta(*args)


def _timezone(args: tuple[Any, ...], charge: Charge) -> datetime.timezone:
    if len(args) != 1 or type(args[0]) is not datetime.timedelta:
        raise Malformed("a timezone of other than a timedelta")
    return datetime.timezone(args[0])


def _device(args: tuple[Any, ...], charge: Charge) -> Any:
    import torch

    if not 1 <= len(args) <= 2 or type(args[0]) is not str or len(args[0]) > 32:
        raise Malformed("a device without a name")
    if len(args) == 2 and not is_count(args[1]):
        raise Malformed("a device with a negative number")
    return torch.device(*args)


def _np_dtype(args: tuple[Any, ...], charge: Charge) -> Any:
    import numpy as np

    if not 1 <= len(args) <= 3 or type(args[0]) is not str or len(args[0]) > 12:
        raise Malformed("a numpy dtype without a name")
    charge(256)
    made = np.dtype(args[0])
    if made.kind not in "biufcSU":
        raise Refused(f"a numpy dtype of kind {made.kind}")
    return np.dtype(made, copy=True)


def _np_dtype_state(target: Any, state: Any) -> None:
    if type(state) is not tuple or not 8 <= len(state) <= 9 or state[1] not in ("<", ">", "|", "="):
        raise Malformed("a numpy dtype of unknown form")
    if any(part is not None for part in state[2:5]) or not all(
        type(part) is int for part in state[5:8]
    ):
        raise Refused("a structured numpy dtype")
    if state[5:8] not in ((-1, -1, 0),) and target.kind not in "SU":
        raise Malformed("a numpy dtype with a size of its own")
    if state[1] in ("<", ">"):
        target.__setstate__((3, state[1], None, None, None, state[5], state[6], 0))


def _np_empty(args: tuple[Any, ...], charge: Charge) -> Any:
    import numpy as np

    if len(args) != 3 or not isinstance(args[0], ByReference) or args[0].name != "numpy.ndarray":
        raise Refused("a numpy array of a class of its own")
    charge(256)
    return np.empty(0, dtype="b")


def _np_array_state(target: Any, state: Any) -> None:
    import numpy as np

    if type(state) is not tuple or len(state) != 5 or not isinstance(state[2], np.dtype):
        raise Malformed("a numpy array of unknown form")
    shape, raw = dims(state[1]), state[4]
    if state[2].kind not in "biufcSU" or type(raw) is not bytes:
        raise Refused("a numpy array of objects")
    if math.prod(shape) * state[2].itemsize != len(raw) or len(shape) > 32:
        raise Malformed("a numpy array whose bytes do not fit its shape")
    target.__setstate__((1, shape, state[2], state[3] is True, raw))


def _np_frombuffer(args: tuple[Any, ...], charge: Charge) -> Any:
    import numpy as np

    if len(args) != 4 or not isinstance(args[1], np.dtype) or args[3] not in ("C", "F"):
        raise Malformed("a numpy array of unknown form")
    raw = bytes(args[0]) if type(args[0]) is bytearray else args[0]
    made = _np_empty((ByReference("numpy.ndarray"), None, None), charge)
    charge(len(raw))
    _np_array_state(made, (1, args[2], args[1], args[3] == "F", raw))
    return made


def _np_scalar(args: tuple[Any, ...], charge: Charge) -> Any:
    import numpy as np

    if len(args) != 2 or not isinstance(args[0], np.dtype) or type(args[1]) is not bytes:
        raise Malformed("a numpy scalar of unknown form")
    if args[0].kind not in "biufcSU" or len(args[1]) != args[0].itemsize or not args[1]:
        raise Malformed("a numpy scalar whose bytes do not fit its type")
    charge(64 + len(args[1]))
    return np.frombuffer(args[1], dtype=args[0])[0]


def _attributes(target: Any, state: Any) -> None:
    """`_metadata` of a module's state dict: versions of modules, of no use here."""
    if not isinstance(state, dict) or set(state) - {"_metadata"}:
        raise Refused("it sets attributes of an OrderedDict")


class _Builders(dict[type, Callable[[Any, Any], None]]):
    """Builders by type; numpy's are added when a numpy object first asks, to keep its import out
    of the way of those who only read metadata."""

    def get(self, kind: Any, default: Any = None) -> Any:
        if getattr(kind, "__module__", "").startswith("numpy"):
            import numpy as np

            if kind is np.ndarray:
                return _np_array_state
            if issubclass(kind, np.dtype):
                return _np_dtype_state
        return super().get(kind, default)


BUILDERS = _Builders({OrderedDict: _attributes})

FUNCTIONS: dict[str, Callable[[tuple[Any, ...], Charge], Any]] = {
    "torch Size": _size,
    "torch device": _device,
    "torch.serialization _get_layout": _only_text,
    "collections OrderedDict": _ordered,
    "collections defaultdict": _defaultdict,
    "collections deque": _deque,
    "_codecs encode": _encode,
    "builtins bytes": _bytes,
    "builtins bytearray": _bytearray,
    "builtins set": _set,
    "builtins frozenset": _frozenset,
    "builtins complex": _complex,
    "datetime datetime": _datetime,
    "datetime date": _date,
    "datetime timedelta": _timedelta,
    "datetime timezone": _timezone,
    "numpy dtype": _np_dtype,
    **{
        f"{core}.{name}": call
        for core in ("numpy.core", "numpy._core")
        for name, call in (
            ("multiarray _reconstruct", _np_empty),
            ("multiarray scalar", _np_scalar),
            ("numeric _frombuffer", _np_frombuffer),
        )
    },
    **{
        f"{module} {name}": _path
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}
