"""Sharded safetensors as torch's DCP writes them without consolidation.

Every rank writes files `shard-<rank>-model-<n>-of-<m>.safetensors`; a file's metadata gives, per
tensor, where its part begins in the whole. The whole shape is written nowhere: it is what the
parts add up to, so a gap inside is an error here, and a missing tail shows when the shape is
compared with what is wanted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from torchtitan_ckpt.errors import DamagedError, Problem
from torchtitan_ckpt.formats.hf_boxes import find_gap_or_overlap
from torchtitan_ckpt.formats.hf_header import Header
from torchtitan_ckpt.manifest import Shard, TensorEntry

_NAME = re.compile(r"^shard-(\d+)-model-(\d+)-of-(\d+)\.safetensors$")
_INFO_KEY = "DCP_SHARDING_INFO"


def is_sharded(name: str) -> bool:
    """Whether a file name is one of DCP's sharded writer."""
    return _NAME.match(name) is not None


def sharding_info(header: Header) -> dict[str, tuple[int, ...]] | None:
    """Key to offsets of a file of DCP's writer; None for any other file."""
    text = header.metadata.get(_INFO_KEY)
    if text is None:
        return None
    try:
        tree = json.loads(text)
        info = {key: tuple(value["saved_offsets"]) for key, value in tree.items()}
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(_bad_info(header.file, f"{text[:80]}")) from error
    for key, offsets in info.items():
        item = header.items.get(key)
        sound = all(type(offset) is int and 0 <= offset < 2**62 for offset in offsets)
        if item is None or len(offsets) != len(item.shape) or not sound:
            raise DamagedError(_bad_info(header.file, f"{key!r}: {offsets}"))
    return info


def missing_shards(root: Path, names: Iterable[str]) -> list[Problem]:
    """Numbers that are absent between the first and the last shard file."""
    numbers = sorted({int(match[1]) for name in names if (match := _NAME.match(name))})
    absent = sorted(set(range(1, numbers[-1] + 1)) - set(numbers)) if numbers else []
    if not absent:
        return []
    return [
        Problem(
            code="hf.shard-absent",
            what="shard files are missing from the sequence",
            where=str(root),
            expected=f"shards 1 to {numbers[-1]}",
            actual=f"without {', '.join(map(str, absent[:10]))}",
            cause="an incomplete copy, or a rank that did not finish its save",
            fix="copy the missing files, or save again",
        )
    ]


def sharded_tensors(
    headers: Mapping[str, Header],
) -> tuple[dict[str, TensorEntry], list[Problem]]:
    """The tensors that the parts make up, each covered exactly once."""
    parts: dict[str, list[tuple[str, Shard]]] = {}
    problems: list[Problem] = []
    for name, header in headers.items():
        try:
            info = sharding_info(header)
        except DamagedError as error:
            problems.extend(error.problems)
            continue
        for key, item in header.items.items():
            offsets = (info or {}).get(key)
            if offsets is None:
                problems.append(_bad_info(name, f"nothing about {key!r}"))
                continue
            shard = Shard(offsets, item.shape, name, item.start, item.length)
            parts.setdefault(key, []).append((item.dtype, shard))
    tensors = {}
    for key, rows in parts.items():
        dtypes = sorted({dtype for dtype, _ in rows})
        ranks = {len(shard.sizes) for _, shard in rows}
        if len(dtypes) > 1 or len(ranks) > 1:
            problems.append(_disagree(key, ", ".join(dtypes)))
            continue
        shards = tuple(sorted((shard for _, shard in rows), key=lambda s: s.offsets))
        corners = [tuple(map(sum, zip(s.offsets, s.sizes, strict=True))) for s in shards]
        shape = tuple(max(column) for column in zip(*corners, strict=True))
        filled = tuple(s for s in shards if 0 not in s.sizes)
        fault = find_gap_or_overlap(shape, [(s.offsets, s.sizes) for s in filled])
        if fault:
            problems.append(_cover(key, shape, fault, [s.file for s in shards]))
            continue
        tensors[key] = TensorEntry(key, shape, dtypes[0], filled)
    return tensors, problems


def _bad_info(file: str, actual: str) -> Problem:
    return Problem(
        code="hf.sharding-info",
        what=f"{_INFO_KEY} of the file does not place every part",
        where=file,
        actual=actual,
        cause="the header was damaged or made by a faulty writer",
        fix="save again",
    )


def _disagree(key: str, dtypes: str) -> Problem:
    return Problem(
        code="hf.shards-disagree",
        what=f"the parts of {key!r} have several dtypes or ranks",
        actual=dtypes,
        cause="shard files of two saves lie in one folder",
        fix="keep the files of one save only",
    )


def _cover(key: str, shape: tuple[int, ...], fault: str, files: list[str]) -> Problem:
    return Problem(
        code="hf.shards-cover",
        what=f"the parts of {key!r} do not cover it exactly once",
        where=", ".join(files[:4]),
        expected=f"every element of {list(shape)} once",
        actual=fault,
        cause="a shard file is missing, or files of two saves lie in one folder",
        fix="copy the missing files, or save again",
    )
