"""Small edits that break a right adapter: what comes out of one direction, or goes into it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tests.specimens.right import Right, State

Dicts = Callable[[State], State]
Values = Callable[[Any], Any]


def edited(
    export: Dicts | None = None,
    imports: Dicts | None = None,
    *,
    before_export: Dicts | None = None,
    before_import: Dicts | None = None,
    base: type = Right,
) -> type:
    """The adapter with its results, or its arguments, changed by a function of the dict."""

    class Edited(base):  # type: ignore[misc, valid-type]
        def to_hf(self, state_dict: State) -> State:
            given = before_export(dict(state_dict)) if before_export else state_dict
            out = super().to_hf(given)
            out = export(out) if export else out
            if self.listed:
                self.fqn_to_index_mapping = {k: v for k, v in self.listed.items() if k in out}
            return out

        def from_hf(self, hf_state_dict: State) -> State:
            given = before_import(dict(hf_state_dict)) if before_import else hf_state_dict
            out = super().from_hf(given)
            return imports(out) if imports else out

    return Edited


def drop(pattern: str) -> Dicts:
    return lambda state: {k: v for k, v in state.items() if not re.search(pattern, k)}


def rename(old: str, new: str) -> Dicts:
    return lambda state: {re.sub(old, new, k): v for k, v in state.items()}


def renames(pattern: str, names: Mapping[str, str]) -> Dicts:
    """Give what matches the other name of a pair, whether the pair is there or not."""
    words = re.compile("|".join(names))

    def one(key: str) -> str:
        return words.sub(lambda m: names[m[0]], key) if re.search(pattern, key) else key

    return lambda state: {one(k): v for k, v in state.items()}


def value(pattern: str, change: Values) -> Dicts:
    return lambda state: {k: change(v) if re.search(pattern, k) else v for k, v in state.items()}


def swap(one: str, two: str) -> Dicts:
    """Exchange the values of keys that differ in `one` and `two`."""

    def run(state: State) -> State:
        out = dict(state)
        for key in state:
            if one in key and key.replace(one, two) in state:
                other = key.replace(one, two)
                out[key], out[other] = state[other], state[key]
        return out

    return run


def add(key: str, make: Callable[[State], Any], when: str = "") -> Dicts:
    """Add a key, where `when` (or nothing) is there."""
    return lambda state: {**state, key: make(state)} if not when or when in state else state


def renumber(pattern: str, place: int, change: Callable[[int], int]) -> Dicts:
    """Change the number at `place` of the keys that match."""

    def one(key: str) -> str:
        if not re.search(pattern, key):
            return key
        parts = key.split(".")
        at = [i for i, part in enumerate(parts) if part.isdigit()]
        if len(at) > place:
            parts[at[place]] = str(change(int(parts[at[place]])))
        return ".".join(parts)

    return lambda state: {one(k): v for k, v in state.items()}


def text(count: int) -> Callable[[int], int]:
    """Where number i lands when numbers are sorted as text."""
    order = sorted(range(count), key=str)
    return lambda i: order[i] if i < count else i


def back(count: int) -> Callable[[int], int]:
    order = sorted(range(count), key=str)
    return lambda i: order.index(i) if i < count else i


def via(dtype: torch.dtype) -> Values:
    """A cast there and back."""
    return lambda v: v.to(dtype).to(v.dtype)


def interleaved_to_stacked(v: Any) -> Any:
    """w13 whose halves are taken as even and odd rows."""
    return torch.cat([v[:, 0::2], v[:, 1::2]], dim=1)


def stacked_to_interleaved(v: Any) -> Any:
    first, second = v.chunk(2, dim=1)
    return torch.stack([first, second], dim=2).reshape(v.shape)


def looked_at(state: State) -> State:
    """The dict, after a look at a value of each tensor: meta tensors have none, and raise."""
    for v in state.values():
        if v.numel():
            bool(v.flatten()[0])
    return state
