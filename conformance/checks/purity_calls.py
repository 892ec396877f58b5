"""Chapter `purity`, second part: what a call knows of other calls, of assets and of the process."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from conformance import codec
from conformance.checks._words import Otherwise, count, differences, otherwise
from conformance.checks.keys_groups import components
from conformance.fingerprint import State
from conformance.lab import AdapterRaised, Direction, Lab, NotApplicable
from conformance.settings import SETTINGS, Changed, seeded, under
from conformance.verdict import Finding, Told

Side = tuple[Direction, State]
Why = tuple[str, str]
KEPT: Why = ("something is kept on the adapter or its class", "keep nothing between calls")
ORDER: Why = ("the order of the dict is used", "find members by number, not by position")
_ASSETS: Why = (
    "the conversion asks whether there is an assets folder, or goes by what lies in it",
    "let `hf_assets_path` decide about files, never about values",
)
_SETTING: Why = (
    "a tensor is made, or cast, without a dtype of its own",
    "take dtypes and devices from the tensors that are given",
)
_UNSTEADY: Why = (
    "no two calls agree: random numbers, or memory that nobody wrote to (torch.empty)",
    "fill what no file holds with a constant",
)


def sides(lab: Lab, salt: int) -> list[Side]:
    """A model and files of random values, for each direction its own."""
    return [
        ("to_hf", lab.noise(lab.value_native, salt)),
        ("from_hf", lab.noise(lab.value_hf, salt)),
    ]


def first_call(lab: Lab, side: Side) -> State:
    """What a fresh adapter gives; in it, memory that nobody writes to is NaN."""
    with _filled():
        return lab.convert(*side)


@contextmanager
def _filled() -> Iterator[None]:
    """Memory that torch hands out holds NaN, or the largest integer, until it is written."""
    before = torch.get_deterministic_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        # `use_deterministic_algorithms` does the same, and imports the compiler for it.
        torch.set_deterministic_debug_mode("warn")
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(before)


def again(lab: Lab, side: Side, adapter: Any) -> State | AdapterRaised:
    """A call of an adapter that is there already; what it raises is for `compare` to tell."""
    try:
        return lab.convert(*side, adapter)
    except AdapterRaised as error:
        return error


def compare(
    lab: Lab, what: str, side: Side, wanted: State, have: State | AdapterRaised, why: Why = KEPT
) -> Iterator[Finding]:
    """A call against the first one of a fresh adapter, which gave `wanted`."""
    if isinstance(have, AdapterRaised):
        yield _raised(what, wanted, have, why)
        return
    found = list(differences(wanted, have))
    repeated = lab.convert(*side) if found else {}
    unsteady = {k for one in differences(wanted, repeated) for k in one.keys} if found else set()
    for one in found:
        cause, remedy = _UNSTEADY if unsteady.issuperset(one.keys) else why
        yield Finding(
            what=f"{what} gives {count(len(one.keys), 'tensor')} otherwise",
            keys=one.keys,
            coordinate=one.coordinate,
            expected="what a first call of a fresh adapter gives in the model's order",
            actual=one.actual,
            cause=cause,
            remedy=remedy,
        )


def _raised(what: str, wanted: State, error: AdapterRaised, why: Why) -> Finding:
    return Finding(
        what=f"{what} fails",
        keys=error.keys or tuple(list(wanted)[:1]),
        expected="what a first call of a fresh adapter gives in the model's order",
        actual=str(error),
        cause=why[0],
        remedy=why[1],
    )


def repeat(lab: Lab) -> Iterator[Finding]:
    """A call gives what a first call gives, whatever came before, and leaves that as it was."""
    for side, (_, others) in zip(sides(lab, 13), sides(lab, 14), strict=True):
        wanted = first_call(lab, side)
        for name, earlier in _earlier(lab, side, others):
            found = list(_after(lab, name, earlier, side, wanted))
            yield from found
            if found:
                break


def _earlier(lab: Lab, side: Side, others: State) -> Iterator[tuple[str, list[State]]]:
    """What an instance may have been asked for before."""
    direction, state = side
    yield "two calls", [others, state]
    if part := _part(lab, others):
        yield "a part of the model", [part]
    yield "other dtypes", [recast(others)]
    empty = lab.blank(direction)
    yield "a model without values", [empty]
    yield "an unknown key", [empty | {"gate_probe.weight": torch.ones(3, 5)}]


def _part(lab: Lab, state: State) -> State:
    """Of a model, or of its files, the first keys that convert without the others."""
    if not lab.may.partial:
        return {}
    targets = lab.export.targets()
    for group in components(lab):
        keys = group.union(*(targets.get(key, ()) for key in group))
        if part := {k: v for k, v in state.items() if k in keys}:
            return part
    return {}


def recast(state: State) -> State:
    """In bf16 what has a wide float dtype, and in fp32 what is bf16."""
    return {
        k: v.to(torch.float32 if v.dtype == torch.bfloat16 else torch.bfloat16)
        if v.is_floating_point() and v.element_size() > 1
        else v
        for k, v in state.items()
    }


def _after(
    lab: Lab, name: str, earlier: list[State], side: Side, wanted: State
) -> Iterator[Finding]:
    """The last of several calls of one instance, and what the earlier ones returned."""
    direction = side[0]
    adapter = lab.adapter()
    returned: list[tuple[Any, State]] = []
    for given in earlier:
        with contextlib.suppress(AdapterRaised):  # others ask whether it may refuse
            out = lab.call(direction, lab.on_device(given), adapter)
            returned.append((out, {k: v.clone() for k, v in _real(lab, direction, out).items()}))
    have = again(lab, side, adapter)
    yield from compare(lab, f"{direction} after {name}", side, wanted, have)
    for out, before in returned:
        yield from _overwritten(direction, list(differences(before, _real(lab, direction, out))))


def _overwritten(direction: Direction, changed: list[Otherwise]) -> Iterator[Finding]:
    """One root cause, however many tensors it concerns."""
    keys = tuple(key for one in changed for key in one.keys)
    if keys:
        yield Finding(
            what=f"a later {direction} changes {count(len(keys), 'tensor')} of an earlier one",
            keys=keys,
            coordinate=changed[0].coordinate,
            expected="the earlier values: the caller may hold them, as a save in the background",
            actual=changed[0].actual,
            cause="a workspace, or the dict that was returned, is used again at the next call",
            remedy="return new tensors, or views of the argument, in a new dict at each call",
        )


def _real(lab: Lab, direction: Direction, out: Any) -> State:
    return {k: v for k, v in lab.tensors(direction, out).items() if not v.is_meta}


def assets(lab: Lab) -> Iterator[Finding | Told]:
    """An adapter that is built on a folder of assets, as in every job, gives the same values."""
    if not lab.takes_assets:
        raise NotApplicable("the subject's adapter factory takes no hf_assets_path")
    with tempfile.TemporaryDirectory() as folder:
        codec.write_index(folder, dict.fromkeys([*lab.export.leaves, *lab.listed], 1))
        for side in sides(lab, 18):
            wanted, what = first_call(lab, side), f"{side[0]} of an adapter with an assets folder"
            try:
                adapter = lab.adapter(folder)
            except AdapterRaised as error:
                yield Told(_raised(what, wanted, error, _ASSETS), by="keys.index")
                return
            yield from compare(lab, what, side, wanted, again(lab, side, adapter), _ASSETS)


def settings(lab: Lab) -> Iterator[Finding]:
    """The process's settings are left as they were, and have no say in the values."""
    lab.adapter()
    yield from _changed("the adapter's factory", list(lab.native), lab.left)
    for side in sides(lab, 19):
        direction, state = side
        with seeded(1) as one:
            wanted, left = first_call(lab, side), lab.left
        adapter = lab.adapter()
        with seeded(2) as two, under(*SETTINGS):
            have = again(lab, side, adapter)
        left = lab.left | left
        again(lab, (direction, recast(state)), None)  # `dtypes.policy` asks what comes of it
        yield from _changed(direction, list(state), lab.left | left)
        yield from _reseeded(direction, list(state), [k for k in one if one[k] == two[k]])
        if isinstance(have, AdapterRaised) or otherwise(wanted, have):
            yield from _followed(lab, side, wanted)


def _changed(what: str, keys: list[str], left: Changed) -> Iterator[Finding]:
    for name, (before, after) in left.items():
        yield Finding(
            what=f"{what} leaves the process with another {name}",
            keys=tuple(keys[:1]),
            expected=f"{before}, as before the call",
            actual=str(after),
            cause="a setting of the whole process is written, and the training that goes on has it",
            remedy="leave it alone, or put it back when the call ends, however it ends",
        )


def _reseeded(direction: Direction, keys: list[str], generators: list[str]) -> Iterator[Finding]:
    for name in generators:
        yield Finding(
            what=f"{direction} seeds {name} random numbers",
            keys=tuple(keys[:1]),
            expected="random numbers that depend on those drawn before",
            actual="the same ones after each call",
            cause="a seed is set: dropout and the order of the data repeat from each save on",
            remedy="draw from a generator of the adapter's own",
        )


def _followed(lab: Lab, side: Side, wanted: State) -> Iterator[Finding]:
    """The first setting that changes the values by itself, else all of them together."""
    for chosen in (*zip(SETTINGS, strict=True), SETTINGS):
        adapter = lab.adapter()
        with under(*chosen):
            have = again(lab, side, adapter)
        names = ", ".join(f"{s.name} {s.other}" for s in chosen)
        found = list(compare(lab, f"{side[0]} under {names}", side, wanted, have, _SETTING))
        yield from found
        if found:
            return
