"""Which values may lie in a state, and how a nested one becomes flat and comes back exactly.

The set of storable values is one for every save mode and equals what the reader accepts without
running code: numbers, text, bytes, plain containers of them, dense tensors, numpy scalars and
arrays. Everything else is refused before anything is written.

Nesting: a dict, list or tuple that holds a tensor somewhere becomes one flat key a leaf, joined by
dots, so that DCP can shard the tensors. One that holds none is a single leaf (a list that grows
between save and load would change the keys otherwise). A `Node` describes the structure wherever
flat names alone would not bring it back.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_ckpt.errors import Problem, SaveError, list_keys
from torchtitan_ckpt.state.tensors import is_plain_kind

# A structure as plain containers: ("none",), ("leaf", name), ("dict", [[key, node], ...]),
# ("odict", ...), ("list", [node, ...]), ("tuple", ...).
Node = tuple[Any, ...]


class Unread:
    """The placeholder for a value that the file stores as an object and that is not read yet."""

    def __repr__(self) -> str:
        return "UNREAD"


UNREAD = Unread()

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray})
_TORCH_ATOMS = (torch.dtype, torch.device, torch.Size)
_SEQUENCES = (list, tuple, set, frozenset)
_CONTAINERS: Mapping[type, str] = {dict: "dict", OrderedDict: "odict", list: "list", tuple: "tuple"}
_TOO_DEEP = "it is nested too deeply, or holds itself"


def why_not_storable(value: Any) -> str | None:
    """The reason why `value` cannot lie in a checkpoint, or None."""
    try:
        return _why_not(value)
    except RecursionError:
        return _TOO_DEEP


def _why_not(value: Any) -> str | None:
    if type(value) in _ATOMS:
        return None
    if isinstance(value, Tensor):
        if is_plain_kind(value):
            return None
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        return f"a tensor of kind {kind} ({value.layout}) is not a dense torch tensor"
    if isinstance(value, _TORCH_ATOMS):
        return None
    if isinstance(value, np.generic | np.ndarray):
        return "a numpy array of objects" if value.dtype.hasobject else None
    if type(value) in _SEQUENCES:
        return next((why for item in value if (why := _inside(item))), None)
    if type(value) in (dict, OrderedDict):
        items = (part for pair in value.items() for part in pair)
        return next((why for item in items if (why := _inside(item))), None)
    kind = (
        type(value).__qualname__ if not isinstance(value, type) else f"class {value.__qualname__}"
    )
    return f"a {kind} cannot be read back without running code"


def _inside(value: Any) -> str | None:
    if isinstance(value, DTensor):
        return "a DTensor inside a list, tuple or dict that is stored as one object"
    return _why_not(value)


def holds_tensor(value: Any) -> bool:
    """Whether a tensor lies in `value`, at any depth of plain containers."""
    if isinstance(value, Tensor):
        return True
    if isinstance(value, Mapping):
        return any(holds_tensor(v) for v in value.values())
    return type(value) in (list, tuple) and any(holds_tensor(v) for v in value)


def flatten(
    tree: Mapping[Any, Any], *, dicts: bool = True, reserved: Iterable[str] = ()
) -> tuple[dict[str, Any], Node]:
    """A nested state as flat `{name: leaf}` and the `Node` that brings it back.

    Lists and tuples are flattened only where a tensor lies in them; so are nested dicts, unless
    `dicts` asks for all of them (optimizer state: torch and torchtitan write it so). None never
    becomes a leaf: it lives in the node alone. `reserved` are flat names that mean something else.
    """
    flat: dict[str, Any] = {}
    taken = set(reserved)
    try:
        children = [[key, _flatten(v, str(key), flat, taken, dicts)] for key, v in tree.items()]
    except RecursionError:
        what = f"a state cannot be saved: one of {list_keys(str(key) for key in tree)}"
        raise SaveError(Problem(code="state.unstorable", what=what, cause=_TOO_DEEP)) from None
    return flat, ("dict", children)


def _flatten(value: Any, wanted: str, flat: dict[str, Any], taken: set[str], dicts: bool) -> Node:
    if value is None:
        return ("none",)
    name = wanted
    while name in taken:  # {"a.b": 1} beside {"a": {"b": 2}}, or keys 1 and "1"
        name += "~"
    taken.add(name)
    kind = _CONTAINERS.get(type(value))
    if kind in ("dict", "odict") and (dicts or holds_tensor(value)):
        pairs = [[k, _flatten(v, f"{name}.{k}", flat, taken, dicts)] for k, v in value.items()]
        return (kind, pairs)
    if kind in ("list", "tuple") and holds_tensor(value):
        items = enumerate(value)
        return (kind, [_flatten(v, f"{name}.{i}", flat, taken, dicts) for i, v in items])
    flat[name] = value
    return ("leaf", name)


def default_node(names: Mapping[str, Any]) -> Node:
    """The structure that flat names alone stand for: dicts with text keys, split at the dots."""
    tree: dict[str, Any] = {}
    for name in names:
        parts = name.split(".")
        here = tree
        for part in parts[:-1]:
            here = here.setdefault(part, {})
            if not isinstance(here, dict):
                break
        if isinstance(here, dict):
            here[parts[-1]] = name
    return _default_node(tree)


def _default_node(tree: dict[str, Any]) -> Node:
    children = [
        [k, _default_node(v) if isinstance(v, dict) else ("leaf", v)] for k, v in tree.items()
    ]
    return ("dict", children)


def rebuild(node: Node, leaf: Callable[[str], Any]) -> Any:
    """The nested value that `node` describes; `leaf(name)` supplies each flat value."""
    kind = node[0]
    if kind == "none":
        return None
    if kind == "leaf":
        return leaf(node[1])
    if kind in ("dict", "odict"):
        pairs = [(key, rebuild(child, leaf)) for key, child in node[1]]
        return dict(pairs) if kind == "dict" else OrderedDict(pairs)
    if kind not in ("list", "tuple"):
        raise ValueError(f"no such kind of node: {kind!r}")
    items = [rebuild(child, leaf) for child in node[1]]
    return items if kind == "list" else tuple(items)


def leaf_names(node: Node) -> Iterator[str]:
    """The flat names that `node` refers to."""
    if node[0] == "leaf":
        yield node[1]
    elif node[0] in ("dict", "odict"):
        for _, child in node[1]:
            yield from leaf_names(child)
    elif node[0] in ("list", "tuple"):
        for child in node[1]:
            yield from leaf_names(child)


def equal(a: Any, b: Any) -> bool:
    """Equality of two storable values: same type, same value; NaN equals itself."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and bool((a == b).all())
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, np.ndarray):
        return bool(np.array_equal(a, b))
    return bool(a == b)
