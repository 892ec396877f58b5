"""Published checkpoints at full size: `published:DeepSeek-V3.2`, `published:Qwen3-0.6B`, ...

Keys, shapes and dtypes are those of the files on the hub (`fixtures/published`, no weights); the
model is that of the published config, on the meta device. They pin what small configs cannot: that
every one of 92,425 names is right. Found in a checkout, not in an installed package.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from conformance.subject import Subject
from conformance.subjects import families
from conformance.subjects.written import FACTS
from conformance.template import FileList, Leaf
from torchtitan_ckpt.errors import NotFoundError, Problem, nearest

_DTYPES = {
    "F32": "float32",
    "BF16": "bfloat16",
    "I64": "int64",
    "I8": "int8",
    "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
}
# Tensors that say how others are quantized: an adapter sees those others dequantized.
_SCALES = (".weight_scale_inv", ".scale", "_scales")


def names() -> tuple[str, ...]:
    """The published checkpoints whose files are listed here; none in an installed package."""
    return tuple(_facts("keys")) if (FACTS / "keys.json").is_file() else ()


def subject(name: str) -> Subject:
    """The Subject of a `published:` name."""
    published = name.removeprefix("published:")
    if published not in names():
        near = nearest(published, names())
        raise NotFoundError(
            Problem(
                code="check.no-subject",
                what=f"no published checkpoint {published!r} is listed here",
                where=str(FACTS),
                expected=", ".join(names()) or "a checkout of this project",
                fix=f"did you mean {near}?" if near else "name one of them",
            )
        )
    leaves = _logical(published)
    stored = () if leaves.keys() == tensors(published).keys() else tuple(tensors(published))
    files = FileList(leaves, f"the published files of {published}", stored)
    return families.of_config(name, _facts("configs")[published]["config"], files=files)


@cache
def tensors(name: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Every tensor of a published checkpoint as it is stored: key -> shape, dtype."""
    facts = _facts("keys")[name]
    out = dict(_expanded(facts["patterns"]))
    assert len(out) == facts["tensors"], name
    return out


def _expanded(
    patterns: list[list[Any]],
) -> Iterator[tuple[str, tuple[tuple[int, ...], str]]]:
    """Rows are `[pattern, count, shape, dtype, layers, mtp]`; experts are counted from 0."""
    for pattern, count, shape, dtype, layers, mtp in patterns:
        places = {"layer": _numbers(layers), "mtp": _numbers(mtp)}
        found = {name: numbers for name, numbers in places.items() if f"{{{name}}}" in pattern}
        if "{expert}" in pattern:
            blocks = len(list(itertools.product(*found.values())))
            found["expert"] = list(range(count // blocks))
        for numbers in itertools.product(*found.values()):
            key = pattern.format(**dict(zip(found, numbers, strict=True)))
            yield key, (tuple(shape), _DTYPES[dtype])


def _numbers(text: str) -> list[int]:
    """`0-2,5` as 0, 1, 2, 5."""
    parts = [part.partition("-") for part in text.split(",") if part]
    return [n for first, _, last in parts for n in range(int(first), int(last or first) + 1)]


def _logical(name: str) -> dict[str, Leaf]:
    """What an adapter reads and writes of it: tensors by their names before quantization."""
    return {
        key.removesuffix("_blocks"): Leaf(shape, dtype)
        for key, (shape, dtype) in tensors(name).items()
        if not key.endswith(_SCALES)
    }


@cache
def _facts(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FACTS / f"{name}.json").read_text())
    return found
