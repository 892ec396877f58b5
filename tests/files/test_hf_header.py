"""Headers of safetensors files: the library's own files, and every way in which one can lie."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save

from torchtitan_ckpt.errors import CheckpointError, DamagedError, NotFoundError, RefusedError
from torchtitan_ckpt.formats import hf_header
from torchtitan_ckpt.formats.hf_header import build_header, parse_header, read_header
from torchtitan_ckpt.formats.hf_io import NAMES

DTYPES = [dtype for dtype in NAMES if dtype != torch.complex128]


def tensors() -> dict[str, torch.Tensor]:
    out = {
        f"t.{NAMES[d]}": torch.zeros(6, 2, dtype=torch.uint8).view(d)
        for d in DTYPES
        if d.itemsize == 1
    }
    out |= {
        f"w.{i}.{NAMES[d]}": torch.zeros(i + 1, 3, dtype=d)
        for i, d in enumerate(DTYPES)
        if d.itemsize > 1
    }
    out["scalar"], out["empty"] = torch.tensor(2.5), torch.zeros(0, 7)
    out['quote " and \\ and é and \n'] = torch.zeros(2)
    return out


def header_of(tree: object, data: int, *, raw: bytes | None = None) -> tuple[bytes, int]:
    text = json.dumps(tree).encode() if raw is None else raw
    return text, 8 + len(text) + data


def entry(dtype: str = "F32", shape: object = (2, 3), begin: int = 0, end: int = 24) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}  # type: ignore[call-overload]


def test_equal_to_the_library_in_both_directions(tmp_path: Path) -> None:
    state = tensors()
    for metadata in (None, {"format": "pt"}):
        written = save(state, metadata=metadata)
        ours, items = build_header(
            [(k, NAMES[v.dtype], tuple(v.shape)) for k, v in state.items()], metadata
        )
        assert written.startswith(ours)
        path = tmp_path / "x.safetensors"
        path.write_bytes(written)
        header = read_header(path)
        assert header.items == items
        assert header.metadata == (metadata or {})
        assert {k: (i.dtype, i.shape) for k, i in header.items.items()} == {
            k: (NAMES[v.dtype], tuple(v.shape)) for k, v in state.items()
        }


LIES = {
    "overlap": ({"a": entry(), "b": entry(begin=20, end=44)}, 44, "hf.header-overlap"),
    "hole": ({"a": entry(), "b": entry(begin=28, end=52)}, 52, "hf.header-hole"),
    "hole at the start": ({"a": entry(begin=4, end=28)}, 28, "hf.header-hole"),
    "reversed": ({"a": entry(begin=24, end=0)}, 24, "hf.header-entry"),
    "negative": ({"a": entry(begin=-24, end=0)}, 24, "hf.header-entry"),
    "cut": ({"a": entry()}, 23, "hf.file-cut"),
    "trailing": ({"a": entry()}, 25, "hf.file-trailing"),
    "size": ({"a": entry(shape=(2, 4))}, 24, "hf.header-entry"),
    "overflow": ({"a": entry(shape=(2**32, 2**32), end=0)}, 0, "hf.header-entry"),
    "overflow with zero": ({"a": entry(shape=(0, 2**63), end=0)}, 0, "hf.header-entry"),
    "huge rank": ({"a": entry(shape=(1,) * 65, end=4)}, 4, "hf.header-entry"),
    "negative size": ({"a": entry(shape=(-2, -3))}, 24, "hf.header-entry"),
    "bool size": ({"a": entry(shape=(True, 6))}, 24, "hf.header-entry"),
    "float size": ({"a": entry(shape=(2.0, 3))}, 24, "hf.header-entry"),
    "float offset": ({"a": {**entry(), "data_offsets": [0.0, 24]}}, 24, "hf.header-entry"),
    "unknown dtype": ({"a": entry("F31")}, 24, "hf.header-entry"),
    "dtype no text": ({"a": {**entry(), "dtype": ["F32"]}}, 24, "hf.header-entry"),
    "more fields": ({"a": {**entry(), "x": 1}}, 24, "hf.header-entry"),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 24]}}, 24, "hf.header-entry"),
    "no object": ({"a": 7}, 24, "hf.header-entry"),
    "odd fp4": ({"a": entry("F4", (2, 3), 0, 3)}, 3, "hf.header-entry"),
    "fp4 scalar": ({"a": entry("F4", (), 0, 1)}, 1, "hf.header-entry"),
    "metadata": ({"__metadata__": {"a": 1}, "a": entry()}, 24, "hf.header-metadata"),
    "metadata list": ({"__metadata__": ["x"], "a": entry()}, 24, "hf.header-metadata"),
    "a list": ([], 0, "hf.header-json"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_named(name: str) -> None:
    tree, data, code = LIES[name]
    with pytest.raises(DamagedError) as caught:
        parse_header(*_args(header_of(tree, data)))
    problem = caught.value.problems[0]
    assert problem.code == code
    assert "x.safetensors" in problem.where
    assert problem.fix


def _args(pair: tuple[bytes, int]) -> tuple[bytes, str, int]:
    return pair[0], "x.safetensors", pair[1]


E32 = '{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}'
E16 = '{"dtype":"BF16","shape":[4,3],"data_offsets":[0,24]}'
REST = '"shape":[2,3],"data_offsets":[0,24]'
TWICE = {
    "name": f'{{"a":{E32},"a":{E16}}}',
    "escaped name": f'{{"a":{E32},"\\u0061":{E16}}}',
    "field": '{"a":{"dtype":"BF16","dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}',
    "escaped field": f'{{"a":{{"dtype":"BF16","\\u0064type":"F32",{REST}}}}}',
    "metadata": f'{{"__metadata__":{{"k":"1","k":"2"}},"a":{E32}}}',
    "metadata after brace": f'{{"__metadata__":{{"k":"}}","k":"2"}},"a":{E32}}}',
    "whole metadata": f'{{"__metadata__":{{}},"__metadata__":{{"k":"2"}},"a":{E32}}}',
    "field, a tensor of its name": f'{{"shape":{E32},"a":{{"dtype":"F32","shape":[1],{REST}}}}}',
}


@pytest.mark.parametrize("name", TWICE)
def test_a_name_given_twice_is_refused(name: str) -> None:
    with pytest.raises(DamagedError) as caught:
        parse_header(*_args(header_of(None, 24, raw=TWICE[name].encode())))
    assert caught.value.problems[0].code == "hf.header-duplicate"


NOT_JSON = {
    "not utf-8": b'{"\xff":1}',
    "cut": b'{"a":{"dtype"',
    "blank first": b" {}",
    "deep": b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "surrogate": b'{"\\ud800":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}',
    "long number": b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}',
    "two values": b"{}{}",
}


@pytest.mark.parametrize("name", NOT_JSON)
def test_no_json_is_said(name: str) -> None:
    with pytest.raises(DamagedError) as caught:
        parse_header(*_args(header_of(None, 4, raw=NOT_JSON[name])))
    assert caught.value.problems[0].code == "hf.header-json"


@pytest.mark.parametrize(
    ("start", "code"),
    [
        (b"", "hf.header-cut"),
        (b"\x10\x00\x00", "hf.header-cut"),
        (b"\xff" * 8 + b"{}", "hf.header-length"),
        ((100_000_001).to_bytes(8, "little") + b"{}", "hf.header-length"),
        ((3).to_bytes(8, "little") + b"{}", "hf.header-length"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "hf.header-length"),
    ],
)
def test_an_impossible_length_is_said_at_once(tmp_path: Path, start: bytes, code: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(start)
    begin = time.monotonic()
    with pytest.raises(DamagedError) as caught:
        read_header(path)
    assert caught.value.problems[0].code == code
    assert time.monotonic() - begin < 1


def test_a_header_beyond_the_limit_is_not_even_read(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with open(path, "wb") as file:
        file.write((150_000_000).to_bytes(8, "little"))
        file.truncate(200_000_000)  # sparse: takes no room
    with pytest.raises(DamagedError, match="length of the header"):
        read_header(path)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        read_header(tmp_path / "no.safetensors")
    with pytest.raises(DamagedError, match="cannot be read"):
        read_header(tmp_path)


def test_a_dtype_that_torch_lacks_is_refused_not_called_damaged() -> None:
    tree = {"a": entry("F6_E2M3", (4,), 0, 3)}
    with pytest.raises(RefusedError) as caught:
        parse_header(*_args(header_of(tree, 3)))
    assert caught.value.problems[0].code == "hf.dtype-unsupported"


def test_all_lies_come_at_once_and_not_without_end() -> None:
    tree = {f"t{i}": entry("F31") for i in range(500)}
    with pytest.raises(DamagedError) as caught:
        parse_header(*_args(header_of(tree, 24)))
    assert len(caught.value.problems) == hf_header.SHOWN_PROBLEMS + 1
    assert "480 more" in caught.value.problems[-1].what


def test_a_header_of_many_tensors_is_checked_in_good_time() -> None:
    rows = [(f"layers.{i}.w", "bfloat16", (3, 5)) for i in range(100_000)]
    raw, items = build_header(rows)
    begin = time.process_time()
    header = parse_header(raw[8:], "x.safetensors", len(raw) + 30 * 100_000)
    assert time.process_time() - begin < 3  # 0.3 s on a free machine
    assert header.items == items


GOOD = save(
    {
        "layers.0.w": torch.arange(12.0).view(3, 4),
        "layers.1.w": torch.arange(5, dtype=torch.int64),
        "b": torch.tensor([True, False]),
    },
    metadata={"format": "pt"},
)


def _library_reads(path: Path) -> bool:
    try:
        with safe_open(path, framework="pt") as file:
            list(file.keys())
        return True
    except Exception:
        return False


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damage_gives_an_error_of_ours_or_a_right_reading(data: st.DataObject) -> None:
    """Bits flipped, bytes cut or joined: never a foreign exception, never a lie believed."""
    raw = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["flip", "cut", "insert", "set"]))
        at = data.draw(st.integers(0, max(len(raw) - 1, 0)))
        if kind == "flip" and raw:
            raw[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "cut":
            del raw[at:]
        elif kind == "insert":
            raw[at:at] = data.draw(st.binary(max_size=9))
        elif raw:
            raw[at] = data.draw(st.sampled_from(list(b'{}[]",:0123456789-eE.\\ ')))
    try:
        header = _parse(bytes(raw))
    except CheckpointError:
        return
    end = 8 + int.from_bytes(raw[:8], "little")
    for item in header.items.values():
        assert end <= item.start <= item.start + item.length <= len(raw)
        end = item.start + item.length
    assert end == len(raw)


def _parse(raw: bytes) -> hf_header.Header:
    import tempfile

    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        file.write(raw)
        file.flush()
        header = read_header(Path(file.name))
        assert _library_reads(Path(file.name)), "we read what the library refuses"
        return header


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
near_entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "F4", "BOOL", "F8_E8M0", "I64"]) | json_values,
        "shape": st.lists(st.integers(-1, 9), max_size=4) | json_values,
        "data_offsets": st.lists(st.integers(-1, 99), max_size=3) | json_values,
    },
)


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(st.text(max_size=6), near_entries | json_values, max_size=4), st.integers(0, 99)
)
def test_any_json_gives_an_error_of_ours_or_a_right_reading(tree: dict, data: int) -> None:
    text, size = header_of(tree, data)
    try:
        header = parse_header(text, "x.safetensors", size)
    except CheckpointError:
        return
    assert sum(item.length for item in header.items.values()) == data


@pytest.mark.slow
@settings(max_examples=100_000, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 50))
def test_any_bytes_long(raw: bytes, data: int) -> None:
    with pytest.raises(CheckpointError):
        parse_header(b"{" + raw, "x.safetensors", 8 + 1 + len(raw) + data + 1)
