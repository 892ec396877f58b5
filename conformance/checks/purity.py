"""Chapter `purity`: a conversion is a function of its argument and of nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from conformance.checks._words import by_words, count
from conformance.checks.purity_calls import (
    ORDER,
    assets,
    compare,
    first_call,
    repeat,
    settings,
    sides,
)
from conformance.fingerprint import EDGES, State, bits, same_bits
from conformance.lab import Lab
from conformance.verdict import Finding

__all__ = [
    "aliasing",
    "assets",
    "contiguous_when_saved",
    "input_unchanged",
    "order",
    "repeat",
    "settings",
    "stateless",
]


def input_unchanged(lab: Lab) -> Iterator[Finding]:
    """The caller's dict keeps its keys and its tensors, and the tensors keep their bytes."""
    for direction, state in sides(lab, 10):
        before, state = state, lab.on_device(state)
        given = dict(state)
        lab.call(direction, given)
        wrong = {
            k: "its bytes are overwritten" for k in state if not same_bits(before[k], state[k])
        }
        if not lab.may.consumes_input:
            wrong |= {k: "added to the caller's dict" for k in given if k not in state}
            wrong |= {k: "removed from the caller's dict" for k in state if k not in given}
            wrong |= {
                k: "replaced in the caller's dict"
                for k in given
                if k in state and given[k] is not state[k]
            }
        for words, keys in by_words(wrong):
            yield Finding(
                what=f"{direction} changes its argument",
                keys=tuple(keys),
                expected="the caller's dict as it was",
                actual=words,
                cause="the adapter works in what belongs to its caller",
                remedy="work on a copy of the dict, and never write into a tensor",
            )


def stateless(lab: Lab) -> Iterator[Finding]:
    """What another instance, or the other direction, saw before does not matter."""
    export, load = sides(lab, 11)
    export_two, load_two = sides(lab, 12)
    yield from _kept(lab, export[1], export_two[1])
    for what, before, side in (
        ("from_hf after to_hf of another model", export_two, load),
        ("to_hf after from_hf of other files", load_two, export),
    ):
        adapter = lab.adapter()
        lab.convert(*before, adapter)
        after = lab.convert(*side, adapter)
        yield from compare(lab, what, side, first_call(lab, side), after)


def _kept(lab: Lab, native: State, native_two: State) -> Iterator[Finding]:
    """Two instances, two models: what is equal although all it is made from differs was kept."""
    one, two = lab.convert("to_hf", native), lab.convert("to_hf", native_two)
    kept = [
        key
        for key, value in one.items()
        # The first elements of noise are always the same few edge values.
        if value.numel() > EDGES + 1
        and value.dtype != torch.bool
        and key in two
        and value.shape == two[key].shape
        and lab.export.sources.get(key)
        and same_bits(value, two[key])
    ]
    if kept:
        yield Finding(
            what=f"{count(len(kept), 'tensor')} of another instance's model came out",
            keys=tuple(kept),
            expected="this model's values",
            actual="the values of the model that an earlier instance converted",
            cause="something is kept on the class or in the module",
            remedy="keep nothing between calls",
        )


def order(lab: Lab) -> Iterator[Finding]:
    """Shuffled and reversed dicts give the same tensors."""
    for side in sides(lab, 15):
        direction, state = side
        wanted = first_call(lab, side)
        shuffled = list(state)
        random.Random(lab.seed).shuffle(shuffled)
        for name, keys in (("reversed", list(state)[::-1]), ("shuffled", shuffled)):
            out = lab.convert(direction, {k: state[k] for k in keys})
            found = list(compare(lab, f"{direction} of a {name} dict", side, wanted, out, ORDER))
            yield from found
            if found:
                break


def aliasing(lab: Lab) -> Iterator[Finding]:
    """No two outputs share an element; sharing a storage without overlap is fine."""
    for direction, state in sides(lab, 16):
        out = lab.convert(direction, state)
        tied = {*lab.may.tied, *lab.may.tied.values(), *lab.hf_tied, *lab.hf_tied.values()}
        storages: dict[int, list[str]] = {}
        for key, value in out.items():
            if value.numel() and value.layout == torch.strided:
                storages.setdefault(value.untyped_storage().data_ptr(), []).append(key)
        for keys in storages.values():
            pair = _overlap(out, keys)
            if pair and not (pair[0] in tied and pair[1] in tied):
                yield Finding(
                    what=f"two tensors that {direction} returns share elements",
                    keys=pair,
                    expected="each element in one output",
                    actual="writing one changes the other; safetensors refuses to save them",
                    cause="one tensor under two names, or overlapping views",
                    remedy="return one of them, or a copy; declare tied names (tied)",
                )


def _overlap(out: Mapping[str, torch.Tensor], keys: list[str]) -> tuple[str, str] | None:
    if len(keys) < 2:
        return None
    owner: dict[int, str] = {}
    size = max(_end(out[k]) for k in keys)
    marks = torch.zeros(size, dtype=torch.int32)
    for number, key in enumerate(keys, 1):
        value = out[key]
        width = value.element_size()
        if value.storage_offset() * width % width:
            return None
        view = marks.as_strided(value.shape, value.stride(), value.storage_offset())
        if bool((view != 0).any()):
            return owner[int(view[view != 0].reshape(-1)[0])], key
        view.fill_(number)
        owner[number] = key
    return None


def _end(value: torch.Tensor) -> int:
    span = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    return int(value.storage_offset() + span + 1)


def contiguous_when_saved(lab: Lab) -> Iterator[Finding]:
    """Saved through safetensors as a writer does it, an output holds its values, and no more."""
    from safetensors.torch import load as read
    from safetensors.torch import save as write

    out = lab.convert("to_hf", lab.noise(lab.value_native, 17))
    wrong: dict[str, tuple[str, str]] = {}
    for key, value in out.items():
        if value.layout != torch.strided or value.device.type == "meta":
            wrong[key] = ("a dense tensor", f"{value.layout} on {value.device.type}")
            continue
        try:
            saved = read(write({key: _as_writer(value)}))[key]
        except (RuntimeError, ValueError, KeyError) as error:
            wrong[key] = ("a tensor that safetensors saves", str(error).splitlines()[0][:120])
            continue
        if not torch.equal(bits(saved), bits(value)):
            wrong[key] = ("the values of the output", _why(value))
    for (expected, actual), keys in by_words(wrong):
        yield Finding(
            what=f"{count(len(keys), 'output')} of to_hf cannot be saved as is",
            keys=tuple(keys),
            expected=expected,
            actual=actual,
            cause="the tensor's memory does not hold its values",
            remedy="return ordinary tensors (clone a lazily negated or conjugated view)",
        )


def _as_writer(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    return value if value.is_contiguous() else value.contiguous()


def _why(value: Any) -> str:
    return "the sign is lost: a lazily negated view" if value.is_neg() else "other bytes"
