"""One safetensors file: its header, read strictly and in bounded time, and written.

The safetensors library reads headers too, but its errors name neither the file nor the tensor, and
it does not say which bytes contradict each other. This module knows the header only: folders and
indexes are in `hf_index`, data in `hf_read` and `hf_file`.

The format: eight bytes of length (little endian), that many bytes of JSON, then the data. The JSON
object maps a name to `dtype`, `shape` and `data_offsets` (relative to the data); `__metadata__`
maps strings to strings. The data of all tensors together must cover the rest of the file exactly.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from torchtitan_ckpt.errors import DamagedError, NotFoundError, Problem, RefusedError
from torchtitan_ckpt.formats.hf_problems import (
    HEADER_LIMIT,
    LENGTH_BYTES,
    bad_length,
    not_json,
    too_short,
)
from torchtitan_ckpt.formats.strangers import open_regular
from torchtitan_ckpt.manifest import ITEM_SIZE

METADATA_KEY = "__metadata__"
SHOWN_PROBLEMS = 20
_INT64_MAX = 2**63 - 1
_MAX_RANK = 64

# The file's dtype names and torch's. F4 counts single values in its shape; torch counts pairs.
TORCH_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "BOOL": "bool",
        "F4": "float4_e2m1fn_x2",
        "U8": "uint8",
        "I8": "int8",
        "F8_E5M2": "float8_e5m2",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E8M0": "float8_e8m0fnu",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "I16": "int16",
        "U16": "uint16",
        "F16": "float16",
        "BF16": "bfloat16",
        "I32": "int32",
        "U32": "uint32",
        "F32": "float32",
        "C64": "complex64",
        "F64": "float64",
        "I64": "int64",
        "U64": "uint64",
    }
)
# The order of TORCH_NAMES is the library's: the widest type goes first in a file, so that every
# tensor lies aligned to its own size.
_RANK = {torch_name: rank for rank, torch_name in enumerate(TORCH_NAMES.values())}
FILE_NAMES: Mapping[str, str] = MappingProxyType({v: k for k, v in TORCH_NAMES.items()})
_ITEM = {name: ITEM_SIZE[torch_name] for name, torch_name in TORCH_NAMES.items()}
_UNSUPPORTED = {"F6_E2M3", "F6_E3M2"}  # legal in the format, without a torch dtype


class Item(NamedTuple):
    """One tensor of a file: torch's dtype name, torch's shape, and its bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Header:
    """A header that was found sound. `items` is in the order of the data."""

    file: str
    size: int
    items: Mapping[str, Item]
    metadata: Mapping[str, str]


def read_header(path: Path, name: str | None = None) -> Header:
    """Read and check the header of one file; `name` is what messages call it.

    Raises NotFoundError, DamagedError or RefusedError with everything that is wrong.
    """
    shown = name or path.name
    try:
        with open(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(LENGTH_BYTES)
            if len(start) < LENGTH_BYTES:
                raise DamagedError(too_short(shown, size))
            length = int.from_bytes(start, "little")
            if length > HEADER_LIMIT or length + LENGTH_BYTES > size:
                raise DamagedError(bad_length(shown, length, size))
            raw = file.read(length)
    except FileNotFoundError as error:
        raise NotFoundError(
            Problem(
                code="hf.file-missing",
                what="a safetensors file does not exist",
                where=str(path),
                fix="check the path; copy the checkpoint again if the file should be there",
            )
        ) from error
    except OSError as error:
        raise DamagedError(
            Problem(
                code="hf.file-unreadable",
                what="a safetensors file cannot be read",
                where=str(path),
                actual=error.strerror or str(error),
                fix="check the permissions and the disk",
            )
        ) from error
    return parse_header(raw, shown, size)


def parse_header(raw: bytes, file: str, size: int) -> Header:
    """Check the JSON part `raw` of a file of `size` bytes."""
    tree = _load_json(raw, file)
    metadata, problems = _metadata(tree, file)
    data_start = LENGTH_BYTES + len(raw)
    items: list[tuple[int, int, str, Item]] = []
    unsupported: list[Problem] = []
    item_size = _ITEM
    torch_names = TORCH_NAMES
    for key, value in tree.items():
        if key == METADATA_KEY:
            continue
        try:
            name = value["dtype"]
            dims = value["shape"]
            begin, end = value["data_offsets"]
            width = item_size[name]
            shape = tuple(dims)
            sound = len(value) == 3 and type(begin) is int and type(end) is int
            for dim in shape:
                sound = sound and type(dim) is int and 0 <= dim <= _INT64_MAX
            if name == "F4":
                sound = sound and shape[-1] % 2 == 0
                shape = (*shape[:-1], shape[-1] // 2)
            count = math.prod(shape)
            if not sound or count * width != end - begin or begin < 0 or len(shape) > _MAX_RANK:
                raise ValueError
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            problem = _explain_entry(key, value, file)
            (unsupported if problem.code == "hf.dtype-unsupported" else problems).append(problem)
            continue
        items.append(
            (begin, end, key, Item(torch_names[name], shape, data_start + begin, end - begin))
        )
    if not problems and not unsupported:
        items.sort(key=lambda row: row[:2])
        problems = _check_cover(items, file, size, data_start)
    if problems:
        raise DamagedError(*capped(problems, file))
    if unsupported:
        raise RefusedError(*capped(unsupported, file))
    return Header(file, size, {key: item for _, _, key, item in items}, metadata)


def build_header(
    entries: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, Item]]:
    """The first bytes of a file with these (key, torch dtype, torch shape), and where data go.

    Equal, byte for byte, to what the safetensors library writes for the same tensors (with more
    than one metadata entry the library's order is arbitrary; here it is sorted).
    """
    ordered = sorted(entries, key=lambda entry: (-_RANK[entry[1]], entry[0]))
    tree: dict[str, Any] = {}
    if metadata:
        tree[METADATA_KEY] = {key: metadata[key] for key in sorted(metadata)}
    place: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    begin = 0
    for key, dtype, shape in ordered:
        length = math.prod(shape) * ITEM_SIZE[dtype]
        stored = (*shape[:-1], shape[-1] * 2) if dtype == "float4_e2m1fn_x2" else shape
        tree[key] = {
            "dtype": FILE_NAMES[dtype],
            "shape": list(stored),
            "data_offsets": [begin, begin + length],
        }
        place[key] = (dtype, shape, begin, length)
        begin += length
    text = json.dumps(tree, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = LENGTH_BYTES + len(text)
    items = {
        key: Item(dtype, shape, start + at, length)
        for key, (dtype, shape, at, length) in place.items()
    }
    return len(text).to_bytes(LENGTH_BYTES, "little") + text, items


# --- JSON ---------------------------------------------------------------------------------------


def _load_json(raw: bytes, file: str) -> dict[str, Any]:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DamagedError(
            not_json(file, f"byte {error.start + LENGTH_BYTES} is not UTF-8")
        ) from error
    if not text.startswith("{"):
        raise DamagedError(not_json(file, f"it begins with {text[:12]!r}, not with '{{'"))
    try:
        # Duplicate names vanish in a dict. Counting the words finds them without the slow hook;
        # escapes could hide a word from the count, so any backslash takes the slow way.
        tree = json.loads(text)
        if isinstance(tree, dict) and not _words_match(text, tree):
            tree = json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, file))
            for key in tree:
                key.encode("utf-8")  # a lone surrogate is no name
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise DamagedError(not_json(file, reason)) from error
    if not isinstance(tree, dict):
        raise DamagedError(not_json(file, "it is not an object"))
    return tree


def _words_match(text: str, tree: dict[str, Any]) -> bool:
    if "\\" in text or text.count(f'"{METADATA_KEY}"') != (METADATA_KEY in tree):
        return False
    metadata = tree.get(METADATA_KEY)
    if metadata is not None and (not isinstance(metadata, dict) or len(metadata) > 1):
        return False
    if metadata and text.count(f'"{next(iter(metadata))}"') != 1:
        return False
    count = len(tree) - (METADATA_KEY in tree)
    return all(text.count(word) == count for word in ('"data_offsets"', '"dtype"', '"shape"'))


def _unique(pairs: list[tuple[str, Any]], file: str) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = [key for key, count in counts.items() if count > 1]
        raise DamagedError(
            Problem(
                code="hf.header-duplicate",
                what=f"the header names {', '.join(map(repr, twice[:5]))} more than once",
                where=file,
                cause="readers differ in which one they take; no library writes such a file",
                fix="write the file again from its source",
            )
        )
    return tree


def _metadata(tree: dict[str, Any], file: str) -> tuple[dict[str, str], list[Problem]]:
    metadata = tree.get(METADATA_KEY, {})
    if isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values()):
        return metadata, []
    return {}, [
        Problem(
            code="hf.header-metadata",
            what="the header's __metadata__ does not map strings to strings",
            where=file,
            actual=f"{metadata!r:.80}",
            fix="write the file again with string values",
        )
    ]


# --- messages -----------------------------------------------------------------------------------


def _explain_entry(key: str, value: Any, file: str) -> Problem:
    """The slow way: what exactly is wrong with one entry of a header."""
    where = f"{file}, tensor {key!r}"
    fix = "copy or download the file again; if it stays so, write it again from its source"

    def bad(what: str, expected: str, actual: object) -> Problem:
        return Problem(
            code="hf.header-entry",
            what=what,
            where=where,
            expected=expected,
            actual=f"{actual!r:.120}",
            cause="the header was damaged or made by a faulty writer",
            fix=fix,
        )

    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        return bad("an entry of the header is malformed", "dtype, shape and data_offsets", value)
    name, dims, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if isinstance(name, str) and name in _UNSUPPORTED:
        return Problem(
            code="hf.dtype-unsupported",
            what=f"dtype {name} is legal in safetensors, but torch has no such dtype",
            where=where,
            fix="convert the tensor with the tool that wrote it",
        )
    if not isinstance(name, str) or name not in _ITEM:
        return bad("unknown dtype", ", ".join(sorted(_ITEM)), name)
    if not isinstance(dims, list) or not all(type(d) is int and 0 <= d <= _INT64_MAX for d in dims):
        return bad("the shape is not a list of sizes", "integers from 0 to 2**63 - 1", dims)
    if len(dims) > _MAX_RANK:
        return bad("the shape has too many dimensions", f"at most {_MAX_RANK}", len(dims))
    if name == "F4" and (not dims or dims[-1] % 2):
        return bad("a row of F4 values does not fill whole bytes", "an even last size", dims)
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(type(offset) is int for offset in offsets)
    ):
        return bad("data_offsets is not a pair of integers", "[begin, end]", offsets)
    begin, end = offsets
    if not 0 <= begin <= end:
        return bad("data_offsets are reversed or negative", "0 <= begin <= end", offsets)
    width = math.prod(dims) * _ITEM[name] // (2 if name == "F4" else 1)
    if width > _INT64_MAX:
        return bad("the sizes multiply to more than 2**63 bytes", "a tensor that can exist", dims)
    return bad(
        "the shape and the offsets disagree",
        f"{width} bytes for {name} {dims}",
        f"{end - begin} bytes from offset {begin} to {end}",
    )


def _check_cover(
    items: list[tuple[int, int, str, Item]], file: str, size: int, data_start: int
) -> list[Problem]:
    """Whether the data, in order, cover the rest of the file: no hole, no overlap, no more."""
    problems = []
    reached, before = 0, "the header"
    for begin, end, key, _ in items:
        if begin != reached:
            kind = "overlap" if begin < reached else "leave a hole"
            problems.append(
                Problem(
                    code="hf.header-overlap" if begin < reached else "hf.header-hole",
                    what=f"the data of {before!r} and {key!r} {kind}",
                    where=f"{file}, data offset {min(begin, reached)}",
                    expected=f"{key!r} to begin at {reached}",
                    actual=f"it begins at {begin}",
                    cause="the header was damaged, or made to hide bytes",
                    fix="do not use the file; get it again from its source",
                )
            )
        reached, before = max(reached, end), key
    data = size - data_start
    if reached != data and not problems:
        cut = reached > data
        last = next((key for begin, end, key, _ in items if end > data), before)
        problems.append(
            Problem(
                code="hf.file-cut" if cut else "hf.file-trailing",
                what="the file is shorter than its header says"
                if cut
                else "bytes follow the data that the header describes",
                where=f"{file}, tensor {last!r}" if cut else file,
                expected=f"{data_start + reached} bytes",
                actual=f"{size} bytes",
                cause="an interrupted copy or download, or a full disk"
                if cut
                else "two files joined, or bytes that were hidden",
                fix="copy or download the file again",
            )
        )
    return problems


def capped(problems: list[Problem], file: str) -> list[Problem]:
    if len(problems) <= SHOWN_PROBLEMS:
        return problems
    rest = len(problems) - SHOWN_PROBLEMS
    more = Problem(code="hf.more", what=f"and {rest} more entries are wrong", where=file)
    return [*problems[:SHOWN_PROBLEMS], more]
