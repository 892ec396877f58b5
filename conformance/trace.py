"""Which inputs each output of a conversion was made from, without any data.

Runs on meta tensors, so a model of 671B parameters is traced in a second: a dispatch mode sees
every torch operation and passes the names of its inputs on to the storages of its outputs. It
knows keys, not elements; elements are `fingerprint.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.fingerprint import Positions, State, blank, same_bits
from conformance.raised import AdapterRaised
from conformance.template import Leaf, leaf_of

_aten = torch.ops.aten
_NONE = frozenset[str]()


@dataclass(frozen=True, slots=True)
class Trace:
    """Outputs of one conversion: their leaves, and the input keys each was made from."""

    leaves: Mapping[str, Leaf]
    sources: Mapping[str, frozenset[str]]
    odd: Mapping[str, str]  # leaves that are not tensors: key -> what they are
    # False where the run was on meta tensors, on which copies may be left out, and some output
    # shows no source: then what it was made from is not known.
    known: bool = True

    def used(self) -> frozenset[str]:
        """Input keys that reach some output."""
        return frozenset().union(*self.sources.values()) if self.sources else frozenset()

    def targets(self) -> dict[str, list[str]]:
        """Input key -> output keys made from it."""
        found: dict[str, list[str]] = {}
        for key, sources in self.sources.items():
            for source in sources:
                found.setdefault(source, []).append(key)
        return found


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, remembers for each storage the input keys that flowed into it."""

    def __init__(self, inputs: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sources: dict[int, frozenset[str]] = {}
        # Kept alive: a freed storage's address may be reused by the next one.
        self._alive: list[torch.UntypedStorage] = []
        for key, tensor in inputs.items():
            self._flow(tensor, frozenset((key,)))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch imports its compiler, to keep it off what nothing here compiles."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = _EASY.get(func, func)(*args, **kwargs)
        inputs = _tensors((*args, *kwargs.values()))
        sources = _NONE.union(*map(self._known, inputs))
        for value in _tensors((out,)):
            self._flow(value, sources)
        return out

    def _known(self, value: torch.Tensor) -> frozenset[str]:
        return self._sources.get(value.untyped_storage()._cdata, _NONE)

    def _flow(self, value: torch.Tensor, sources: frozenset[str]) -> None:
        storage = value.untyped_storage()
        before = self._sources.get(storage._cdata)
        if before is None:
            self._alive.append(storage)
            self._sources[storage._cdata] = sources
        elif not sources <= before:
            self._sources[storage._cdata] = before | sources

    def result(self, outputs: Mapping[str, Any]) -> Trace:
        """The trace of a conversion's returned dict."""
        leaves, sources, odd = {}, {}, {}
        for key, value in outputs.items():
            leaf = leaf_of(value) if _dense(value) else None
            if leaf is None or not isinstance(key, str):
                odd[str(key)] = _what(value) if isinstance(key, str) else "a key that is no str"
                continue
            leaves[key] = leaf
            sources[key] = self._known(value)
        return Trace(leaves, sources, odd)


def _stacked(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """`torch.stack`, whose meta kernel looks at each tensor in Python, several times.

    Of plain tensors that are alike, the first tells all that there is to know of the result.
    """
    alike = len(tensors) > 0 and all(
        type(one) is torch.Tensor
        and one.is_meta
        and one.shape == tensors[0].shape
        and one.dtype == tensors[0].dtype
        and one.is_contiguous()
        for one in tensors
    )
    if not alike or not 0 <= dim <= tensors[0].dim():
        return _aten.stack.default(tensors, dim)  # type: ignore[no-any-return]
    shape = tensors[0].shape
    return tensors[0].new_empty((*shape[:dim], len(tensors), *shape[dim:]))


_EASY = {_aten.stack.default: _stacked}


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """The dense tensors among an operation's arguments or results, some of which are lists."""
    found = []
    for value in values:
        if _dense(value):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def traced(
    convert: Callable[[State], dict[Any, Any]],
    leaves: Mapping[str, Leaf],
    *,
    zeros: bool,
    values: bool,
    constant: Container[str] = (),
) -> Trace:
    """The trace of a conversion of meta tensors, or of zeros where those fail.

    Zeros also where an output shows no source, unless it is a known `constant`: an adapter may
    leave out copies on meta tensors. What even those do not show, as another thread's work, values
    do. `zeros` and `values` say whether there is room for them.
    """
    first: AdapterRaised | None = None
    found: Trace | None = None
    for device in ("meta", "cpu") if zeros else ("meta",):
        state = blank(leaves, device)
        tracer = Tracer(state)
        try:
            with tracer:
                out = convert(dict(state))
        except AdapterRaised as error:
            first = error
            continue
        found = replace(tracer.result(out), known=device == "cpu")
        if all(sources or key in constant for key, sources in found.sources.items()):
            return replace(found, known=True)
    if found is None:
        assert first is not None
        raise first
    return _by_values(convert, Positions(leaves), found, out) if found.known and values else found


def _by_values(
    convert: Callable[[State], dict[Any, Any]],
    positions: Positions,
    found: Trace,
    zeros: Mapping[Any, Any],
) -> Trace:
    """The trace with sources of what showed none, from whose numbers its elements are.

    What is the same of `zeros` as of numbers is a constant: no input went into it.
    """
    try:
        passes = [convert(positions.state(which)) for which in range(positions.passes)]
    except AdapterRaised:
        return found
    seen = {}
    for key in (key for key, sources in found.sources.items() if not sources):
        digits: list[Any] = [out.get(key) for out in passes]
        if all(_dense(value) and value.shape == zeros[key].shape for value in digits) and not all(
            same_bits(zeros[key], value) for value in digits
        ):
            seen[key] = frozenset(positions.owners(positions.decode(digits)))
    return replace(found, sources={**found.sources, **seen})


def _dense(value: Any) -> bool:
    """Whether a value is a tensor with a storage; sparse ones have none."""
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def _what(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.layout} tensor"
    return type(value).__name__
