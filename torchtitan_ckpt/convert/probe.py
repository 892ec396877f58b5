"""Hand-written adapters, streamed: which outputs need which inputs, found on meta tensors.

The adapter runs once on meta tensors of the whole model while every operation is watched: what an
output was computed from is known exactly, without data. Inputs and outputs fall into components;
each component is converted on its own when the adapter makes the same of it alone (on meta tensors,
too). Where that cannot be shown, the whole model is one component, and the caller is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from torchtitan_ckpt.adapter import StateDictAdapter
from torchtitan_ckpt.convert.source import Source
from torchtitan_ckpt.convert.units import Adapted, Unit
from torchtitan_ckpt.errors import MappingError, Problem
from torchtitan_ckpt.manifest import TensorEntry, is_floating
from torchtitan_ckpt.mapping.apply import dtype_name, dtype_of

Convert = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Found:
    units: tuple[Unit, ...]
    notes: tuple[str, ...] = ()
    fallback_bytes: int = 0


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers, by storage, which named inputs the values in it come from."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.origin: dict[int, frozenset[str]] = {}
        self.kept: list[torch.Tensor] = []  # storages must not be freed: their ids would come back

    def name(self, tensor: torch.Tensor, key: str) -> None:
        self.origin[_id(tensor)] = frozenset((key,))
        self.kept.append(tensor)

    def of(self, tensor: torch.Tensor) -> frozenset[str]:
        return self.origin.get(_id(tensor), frozenset())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        union = frozenset().union(*(self.of(t) for t in before))
        out = func(*args, **kwargs)
        mutated = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        for tensor in tree_flatten((out, mutated))[0]:
            if isinstance(tensor, torch.Tensor):
                self.origin[_id(tensor)] = self.of(tensor) | union
                self.kept.append(tensor)
        return out


def _id(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def adapted_units(
    adapter: StateDictAdapter,
    tensors: Mapping[str, TensorEntry],
    source: Source,
    *,
    to_hf: bool,
    dtype: str | None = None,
) -> Found:
    """Units for every output of the adapter. Raises MappingError where it fails on the whole model.

    `dtype` is that of floating outputs; None keeps what the adapter makes.
    """
    run: Convert = adapter.to_hf if to_hf else adapter.from_hf

    def entry(key: str, value: torch.Tensor) -> TensorEntry:
        kind = dtype_name(value.dtype)
        kind = dtype if dtype is not None and is_floating(kind) else kind
        return TensorEntry(key, tuple(value.shape), kind)

    try:
        outputs, needs = _probe(run, tensors)
        parts = list(_components(needs))
        reason = _differs(run, tensors, outputs, parts)
    except Exception as error:  # whatever a foreign adapter raises
        reason = f"{type(error).__name__}: {error}"
    else:
        if not reason:
            units = tuple(
                Adapted(source, inputs, tuple(entry(k, outputs[k]) for k in made), run)
                for inputs, made in parts
            )
            unused = sorted(set(tensors) - {k for inputs, _ in parts for k in inputs})
            largest = max((unit.nbytes for unit in units), default=0)
            notes = [f"the adapter runs in {len(units)} parts, the largest {largest} bytes"]
            if unused:
                notes.append(f"the adapter makes nothing of {len(unused)} keys: {unused[0]} …")
            return Found(units, tuple(notes))
    whole = _whole(run, tensors, source, entry)
    note = (
        f"the adapter cannot be run in parts ({reason}): the whole model is converted in memory, "
        f"{whole.nbytes} bytes"
    )
    return Found((whole,), (note,), whole.nbytes)


def _meta(tensors: Mapping[str, TensorEntry]) -> dict[str, torch.Tensor]:
    return {
        key: torch.empty(entry.shape, dtype=dtype_of(entry.dtype), device="meta")
        for key, entry in tensors.items()
    }


def _probe(
    run: Convert, tensors: Mapping[str, TensorEntry]
) -> tuple[dict[str, torch.Tensor], dict[str, frozenset[str]]]:
    """The outputs on meta tensors and the inputs of each."""
    state = _meta(tensors)
    watch = _Watch()
    for key, tensor in state.items():
        watch.name(tensor, key)
    with torch.no_grad(), watch:
        made = run(dict(state))
    outputs = {key: value for key, value in made.items() if isinstance(value, torch.Tensor)}
    return outputs, {key: watch.of(value) for key, value in outputs.items()}


def _components(
    needs: Mapping[str, frozenset[str]],
) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """(inputs, outputs) that are connected, in the order of the outputs."""
    parent: dict[str, str] = {}

    def root(key: str) -> str:
        while parent.setdefault(key, key) != key:
            parent[key] = parent[parent[key]]
            key = parent[key]
        return key

    for inputs in needs.values():
        first, *rest = sorted(inputs) or [""]
        for other in rest:
            parent[root(other)] = root(first)
    groups: dict[str, tuple[dict[str, None], list[str]]] = {}
    for key, inputs in needs.items():
        slot = root(min(inputs)) if inputs else ""
        own, made = groups.setdefault(slot, ({}, []))
        own.update(dict.fromkeys(sorted(inputs)))
        made.append(key)
    for own, made in groups.values():
        yield tuple(own), tuple(made)


def _differs(
    run: Convert,
    tensors: Mapping[str, TensorEntry],
    outputs: Mapping[str, torch.Tensor],
    parts: list[tuple[tuple[str, ...], tuple[str, ...]]],
) -> str:
    """Why the adapter does not make the same of the parts alone; empty when it does."""
    if any(not inputs for inputs, _ in parts):
        return "some outputs come from no input"
    for inputs, made in parts:
        alone = run(_meta({key: tensors[key] for key in inputs}))
        if set(alone) != set(made):
            return f"it makes {len(alone)} tensors of {inputs[0]} alone, {len(made)} were expected"
        for key in made:
            value, whole = alone[key], outputs[key]
            if value.shape != whole.shape or value.dtype != whole.dtype:
                return f"{key} has another form when it is made alone"
    return ""


def _whole(
    run: Convert,
    tensors: Mapping[str, TensorEntry],
    source: Source,
    entry: Callable[[str, torch.Tensor], TensorEntry],
) -> Adapted:
    """The whole model as one unit. The outputs' forms come from meta tensors, else from zeros."""
    try:
        made = run(_meta(tensors))
    except Exception:
        state = {
            key: torch.zeros(one.shape, dtype=dtype_of(one.dtype)) for key, one in tensors.items()
        }
        try:
            made = run(state)
        except Exception as error:
            raise MappingError(
                Problem(
                    code="convert.adapter-fails",
                    what="the adapter fails on the checkpoint's keys and shapes",
                    where=source.manifest.path,
                    actual=f"{type(error).__name__}: {error}",
                    cause="an adapter of another model or another generation of names",
                    fix="check it with `torchtitan-ckpt check`",
                )
            ) from error
    outputs = tuple(entry(k, v) for k, v in made.items() if isinstance(v, torch.Tensor))
    return Adapted(source, tuple(tensors), outputs, run)
