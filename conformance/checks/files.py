"""Chapter `files`: what lies on disk is what was exported, all of it and nothing else."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from conformance import codec as codecs
from conformance.checks._words import by_words, count, first_difference, unfilled
from conformance.checks.files_quantized import quantized
from conformance.checks.files_readers import reader
from conformance.fingerprint import State, noise, same_bits, torch_dtype
from conformance.lab import AdapterRaised, Lab, NotApplicable, theirs
from conformance.search import smallest, state_of_text, states, text_of_state
from conformance.subject import Codec
from conformance.template import Leaf
from conformance.verdict import Finding

__all__ = ["index", "quantized", "reader", "reexport", "reread"]

# What writers get wrong: integers, booleans, scalars, empty tensors, one-byte floats.
_HARD = {
    "hard.int64": Leaf((7, 3), "int64"),
    "hard.bool": Leaf((5,), "bool"),
    "hard.scalar": Leaf((), "float32"),
    "hard.scalar_bf16": Leaf((), "bfloat16"),
    "hard.empty": Leaf((0, 4), "float32"),
    "hard.uint8": Leaf((3, 4), "uint8"),
    "hard.fp8": Leaf((4, 6), "float8_e4m3fn"),
    "hard.fp64": Leaf((2, 3), "float64"),
    "hard.ones": Leaf((9,), "float32"),
    "layers.1.weight": Leaf((3, 11), "bfloat16"),
    "layers.11.weight": Leaf((3, 11), "bfloat16"),
}


def _codec(lab: Lab) -> Codec:
    if lab.subject.codec is not None:
        return lab.subject.codec
    for need in ("adapter", "native"):
        if getattr(lab.subject, need) is None:
            raise NotApplicable(f"the subject writes no files: it has neither a codec nor {need}")
    return codecs.Own()


def _state(lab: Lab) -> State:
    leaves: dict[str, Leaf] = dict(_HARD)
    if lab.subject.adapter is not None and lab.subject.native is not None:
        small = sorted(lab.value_hf.items(), key=lambda item: item[1].numel)
        leaves |= dict(small[:40])
    state = noise(leaves, lab.seed)
    state["hard.ones"] = torch.ones(9)
    return state


def _files(state: Mapping[str, Any], number: int) -> dict[str, int]:
    return {key: i % number + 1 for i, key in enumerate(state)}


def _saved(lab: Lab, state: State, folder: str, number: int) -> Iterator[Finding]:
    """Save through the subject's codec; a refusal is a finding."""
    writer = _codec(lab)
    try:
        with theirs("save"):
            writer.save(lab.on_device(state), folder, _files(state, number))
    except AdapterRaised as error:
        bad = next((k for k in state if k in str(error.error)), "")
        yield Finding(
            what="the writer raises",
            keys=(bad,) if bad else tuple(k for k in state if k.startswith("hard."))[:3],
            expected="every dtype and shape of the format written",
            actual=str(error),
            cause="a dtype, a shape or a kind of tensor that the writer does not know",
            remedy="write whatever the format holds",
            oracle=writer.name,
        )


def index(lab: Lab) -> Iterator[Finding]:
    """The folder of the subject, or one that its codec writes now."""
    given = lab.subject.hf
    if isinstance(given, str | Path) and Path(given).is_dir():
        yield from inspect(Path(given), None)
        return
    state = _state(lab)
    with tempfile.TemporaryDirectory() as folder:
        refused = list(_saved(lab, state, folder, 3))
        yield from refused or inspect(Path(folder), state)


def inspect(folder: Path, state: State | None) -> Iterator[Finding]:
    """Compare index, headers and files of a folder, and with what was saved if that is known."""
    present: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            present[path.name] = codecs.headers(path)
        except Exception as error:
            yield Finding(
                what="a file cannot be opened",
                keys=(path.name,),
                expected="a safetensors file",
                actual=f"{path.stat().st_size} bytes: {str(error)[:120]}",
                cause="a file made for keys that never came, or a file cut short",
                remedy="write a file only for keys that are written",
            )
            present[path.name] = {}
    where: dict[str, list[str]] = {}
    for name, keys in present.items():
        for key in keys:
            where.setdefault(key, []).append(name)
    path = folder / codecs.INDEX
    if not path.exists():
        if len(present) != 1 or state is not None:
            yield Finding(
                what=f"{count(len(present), 'file')} and no index",
                keys=tuple(where)[:1],
                expected=codecs.INDEX,
                actual=", ".join(sorted(p.name for p in folder.iterdir()))[:120],
                cause="the writer makes no index, or makes it elsewhere",
                remedy="write the index last",
            )
        weight_map = {key: names[0] for key, names in where.items()}
    else:
        try:
            content = json.loads(path.read_text())
            weight_map = {str(key): str(name) for key, name in content["weight_map"].items()}
            stated = (content.get("metadata") or {}).get("total_size")
        except Exception as error:
            yield Finding(
                what="the index cannot be read",
                keys=(path.name,),
                expected='JSON: {"metadata": {...}, "weight_map": {key: file, ...}}',
                actual=f"{path.stat().st_size} bytes: {type(error).__name__}: {str(error)[:120]}",
                cause="cut short, or put together by hand",
                remedy="write the index in one go, last, under its final name",
            )
            return
        yield from _index_against_files(weight_map, where, present)
        yield from _total_size(stated, weight_map, present)
    if state is not None:
        yield from _lists(
            "the files lack",
            [k for k in state if k not in where],
            expected="every key saved",
            actual="in no file",
            cause="the writer leaves keys out",
        )
        yield from _lists(
            "the files hold keys nobody saved:",
            [k for k in where if k not in state],
            expected="the keys saved, and no other",
            actual=", ".join(
                sorted({n for k, names in where.items() if k not in state for n in names})
            ),
            cause="an older file stayed in the folder, or a key is made up",
        )


def _index_against_files(
    weight_map: Mapping[str, str], where: Mapping[str, list[str]], present: Mapping[str, Any]
) -> Iterator[Finding]:
    gone = sorted({name for name in weight_map.values() if name not in present})
    for name in gone:
        yield Finding(
            what=f"the index names a file that is not there: {name}",
            keys=tuple(k for k, v in weight_map.items() if v == name),
            expected=name,
            actual=", ".join(sorted(present))[:120],
            cause="the file was not written, or was removed after the index was",
            remedy="the weights of this file stay uninitialised: export again",
        )
    stale = [k for k, v in weight_map.items() if v in present and v not in where.get(k, ())]
    yield from _lists(
        "the index lists keys that its file does not hold:",
        stale,
        expected="each key in the file that the index names",
        actual="not there",
        cause="the index is made from another list than the files",
    )
    yield from _lists(
        "the index does not list",
        [k for k in where if k not in weight_map],
        expected="an entry for each key that a file holds",
        actual="in a file, not in the index",
        cause="the index is made from another list than the files",
    )
    twice = [k for k, names in where.items() if len(names) > 1]
    if twice:
        yield Finding(
            what=f"{count(len(twice), 'key')} in two files",
            keys=tuple(twice),
            expected="one file for a key; the index is the authority",
            actual=", ".join(where[twice[0]]),
            cause="an older file stayed in the folder; some readers take its values",
            remedy="export into a fresh folder",
        )
    stray = [n for n in present if n not in weight_map.values() and present[n]]
    for name in stray:
        yield Finding(
            what=f"a file that the index does not name: {name}",
            keys=tuple(present[name]),
            expected="only files of the index",
            actual=f"{count(len(present[name]), 'key')}",
            cause="an older file stayed in the folder",
            remedy="export into a fresh folder",
        )


def _total_size(
    stated: Any, weight_map: Mapping[str, str], present: Mapping[str, Any]
) -> Iterator[Finding]:
    have = 0
    for key, name in weight_map.items():
        entry = present.get(name, {}).get(key)
        if entry is None:
            return
        have += entry["data_offsets"][1] - entry["data_offsets"][0]
    if stated is not None and stated != have:
        yield Finding(
            what="the index states another total size than its files hold",
            keys=tuple(weight_map)[:1],
            expected=f"{have} bytes",
            actual=f"{stated} bytes",
            cause="counted from another list, or for another dtype",
            remedy="count the bytes of the tensors written",
        )


def _lists(
    what: str, keys: list[str], *, expected: str, actual: str, cause: str
) -> Iterator[Finding]:
    if keys:
        yield Finding(
            what=f"{what} {count(len(keys), 'key')}",
            keys=tuple(keys),
            expected=expected,
            actual=actual,
            cause=cause,
            remedy="make files and index from one list",
        )


def reread(lab: Lab) -> Iterator[Finding]:
    """Written by the codec, read by safetensors and by the codec's own reader; then searched."""

    def judge(leaves: dict[str, Leaf]) -> list[Finding]:
        text = text_of_state(leaves)
        found = _reread(lab, noise(leaves, lab.seed))
        return [replace(one, coordinate=f"drawn state {text}", example=text) for one in found]

    if lab.example:
        yield from judge(state_of_text(lab.example))
        return
    listed = list(_reread(lab, _state(lab)))
    yield from listed
    # A writer that gets the listed ones wrong is not searched as well.
    found = None if listed else smallest(states(), judge, seed=lab.seed, number=12)
    yield from found[1] if found else ()


def _reread(lab: Lab, state: State) -> Iterator[Finding]:
    writer = _codec(lab)
    with tempfile.TemporaryDirectory() as folder:
        refused = list(_saved(lab, state, folder, 2))
        if refused:
            yield from refused
            return
        try:
            found = codecs.read_indexed(folder)
        except Exception as error:
            yield Finding(
                what="safetensors cannot read what was written",
                keys=tuple(state)[:1],
                expected="files that safetensors opens",
                actual=str(error)[:160],
                cause="a header that does not fit its bytes, or an index that names other files",
                remedy="write with safetensors, and the index last",
            )
            return
        yield from _equal("the files hold", state, found, writer.name)
        targets = lab.on_device({k: _hole(v) for k, v in state.items()})
        try:
            with theirs("load"):
                writer.load(folder, targets)
        except AdapterRaised as error:
            yield Finding(
                what="the codec cannot read what it wrote",
                keys=tuple(k for k in state if k in str(error.error))[:2] or tuple(state)[:1],
                expected="what was written, read back",
                actual=str(error),
                cause="the reader wants something that the writer does not write",
                remedy="read every file that the codec itself writes",
                oracle=writer.name,
            )
            return
        yield from _equal("the codec reads", state, targets, writer.name)


def _hole(value: torch.Tensor) -> torch.Tensor:
    if value.is_floating_point() and value.element_size() > 1:
        return torch.full_like(value, float("nan"))
    return torch.zeros_like(value)


def _equal(what: str, want: State, have: State, oracle: str) -> Iterator[Finding]:
    wrong: dict[str, tuple[str, str]] = {}
    for key, value in want.items():
        if key not in have:
            wrong[key] = ("the key", "not there")
        elif have[key].dtype != value.dtype or have[key].shape != value.shape:
            wrong[key] = (_leaf(value), _leaf(have[key]))
        elif not same_bits(value, have[key]):
            nan = unfilled(value, have[key])
            wrong[key] = ("the bytes saved", "NaN: never filled" if nan else "other bytes")
    for (expected, actual), keys in by_words(wrong):
        one = have.get(keys[0])
        at, was, now = ("", "", "") if one is None else first_difference(want[keys[0]], one)
        yield Finding(
            what=f"{what} something else than was saved for {count(len(keys), 'key')}",
            keys=tuple(keys),
            coordinate=at,
            expected=f"{expected}: {was}" if at else expected,
            actual=f"{actual}: {now}" if at else actual,
            cause="a cast, a view of other bytes, or a place never written",
            remedy="write and read every dtype byte for byte",
            oracle=oracle,
        )


def _leaf(value: torch.Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


def reexport(lab: Lab) -> Iterator[Finding]:
    """Three files, then new values of half the keys in one file, into the same folder."""
    state = _state(lab)
    fewer = dict(list(noise({k: _leaf_of(v) for k, v in state.items()}, lab.seed + 1).items())[::2])
    with tempfile.TemporaryDirectory() as folder:
        refused = list(_saved(lab, state, folder, 3))
        if refused:
            yield from refused
            return
        # A writer may refuse a folder that is taken; then the first export must be whole.
        if list(_saved(lab, fewer, folder, 1)):
            fewer = state
        stale = list(inspect(Path(folder), fewer))
        if stale:
            yield from stale
            return
        found = codecs.read_indexed(folder)
        old = [
            k
            for k, v in fewer.items()
            if fewer is not state
            and k in found
            and v.numel() >= 8
            and same_bits(found[k], state[k])
        ]
        if old:
            yield Finding(
                what=f"{count(len(old), 'key')} of a second export hold the first one's values",
                keys=tuple(old),
                expected="the values exported last",
                actual="those exported first",
                cause="an older file stayed in the folder",
                remedy="export into a fresh folder",
            )


def _leaf_of(value: torch.Tensor) -> Leaf:
    dtype = str(value.dtype).removeprefix("torch.")
    assert torch_dtype(dtype) == value.dtype
    return Leaf(tuple(value.shape), dtype)
