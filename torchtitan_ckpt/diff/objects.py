"""Compare what two checkpoints hold besides tensors: counters, options, states of data loaders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from torchtitan_ckpt.convert.source import Source
from torchtitan_ckpt.mapping.apply import same_bytes

_SHOWN = 60


def compare_objects(
    a: Source, b: Source, keys_a: Iterable[str], keys_b: Iterable[str]
) -> tuple[list[tuple[str, str, str]], list[str], list[str]]:
    """((key, verdict, detail) of the shared ones, keys only in A, keys only in B)."""
    mine, theirs = list(keys_a), list(keys_b)
    shared = sorted(set(mine) & set(theirs))
    values_a, values_b = a.objects(shared), b.objects(shared)
    found = []
    for key in shared:
        one, two = values_a[key], values_b[key]
        same = same_value(one, two)
        detail = "" if same else f"a {_short(one)}; b {_short(two)}"
        found.append((key, "equal" if same else "different", detail))
    other, own = set(theirs), set(mine)
    return found, [k for k in mine if k not in other], [k for k in theirs if k not in own]


def same_value(a: Any, b: Any) -> bool:
    """Whether two values are the same: types, contents, and bits of tensors; NaN is itself."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        return both and same_bytes(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(same_value(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same_value, a, b))
    if hasattr(a, "tobytes"):  # numpy arrays and scalars
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, float):
        return repr(a) == repr(b)
    try:
        return bool(a == b)
    except Exception:
        return repr(a) == repr(b)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({type(value).__name__})"
