"""Where a conversion reads from: one checkpoint of any format, or the average of several.

A source fills any tensor with any box of a stored one, casting to the tensor's dtype; nothing is
kept but open files.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from torchtitan_ckpt.errors import MismatchError, Problem, list_keys
from torchtitan_ckpt.formats import detect, hf
from torchtitan_ckpt.formats.dcp_stream_read import DcpReader
from torchtitan_ckpt.formats.hf_reader import HfReader
from torchtitan_ckpt.formats.torch_file_read import TorchReader
from torchtitan_ckpt.manifest import Manifest, is_floating
from torchtitan_ckpt.mapping.apply import same_bytes


class Source(Protocol):
    """An open checkpoint. `manifest` is what can be read (dequantized where that was asked)."""

    @property
    def manifest(self) -> Manifest: ...

    def fill(self, key: str, offsets: tuple[int, ...], out: torch.Tensor) -> None: ...

    def objects(self, keys: Iterable[str]) -> Mapping[str, Any]: ...

    def close(self) -> None: ...


class _Hf:
    """HfReader with the two methods that only other formats need."""

    def __init__(self, reader: HfReader) -> None:
        self.reader = reader
        self.manifest = reader.manifest

    def fill(self, key: str, offsets: tuple[int, ...], out: torch.Tensor) -> None:
        self.reader.fill(key, offsets, out)

    def objects(self, keys: Iterable[str]) -> Mapping[str, Any]:
        return {}

    def close(self) -> None:
        self.reader.__exit__(None, None, None)


def open_source(
    path: str | os.PathLike[str],
    *,
    dequantize: bool = False,
    raw: bool = False,
    trust: bool = False,
) -> Source:
    """Open a checkpoint of any format. `raw` lets codes and scales of quantized files through."""
    found = detect(path)
    if found.format == "dcp":
        return DcpReader(path, trust=trust)
    if found.format == "torch":
        return TorchReader(path, trust=trust)
    if found.format == "hf":
        text = os.fspath(path).removeprefix("file://")
        return _Hf(hf.open_reader(text, dequantize=dequantize, raw=raw and not dequantize))
    raise found.error()


class Average:
    """The weighted mean of several checkpoints with the same model tensors, in float32.

    Float64 tensors are averaged in float64. Tensors that are no floats must be equal.
    """

    def __init__(self, sources: Sequence[Source], weights: Sequence[float]) -> None:
        self._sources, self._weights = tuple(sources), tuple(weights)
        first = sources[0].manifest
        self._compare(first)
        self.manifest = replace(first, objects={})

    def fill(self, key: str, offsets: tuple[int, ...], out: torch.Tensor) -> None:
        dtype = self.manifest.tensors[key].dtype
        if not is_floating(dtype):
            self._equal(key, dtype, offsets, out)
            return
        wide = torch.float64 if dtype == "float64" else torch.float32
        total = torch.zeros(out.shape, dtype=wide)
        part = torch.empty(out.shape, dtype=wide)
        for source, weight in zip(self._sources, self._weights, strict=True):
            source.fill(key, offsets, part)
            total.add_(part, alpha=weight)
        out.copy_(total)

    def objects(self, keys: Iterable[str]) -> Mapping[str, Any]:
        return {}

    def close(self) -> None:
        for source in self._sources:
            source.close()

    def _equal(self, key: str, dtype: str, offsets: tuple[int, ...], out: torch.Tensor) -> None:
        mine = torch.empty(out.shape, dtype=getattr(torch, dtype))
        self._sources[0].fill(key, offsets, mine)
        for source in self._sources[1:]:
            other = torch.empty_like(mine)
            source.fill(key, offsets, other)
            if not same_bytes(mine, other):
                raise MismatchError(
                    Problem(
                        code="convert.average-int",
                        what="a tensor that is no float differs between the checkpoints",
                        where=f"{key} ({dtype})",
                        actual=source.manifest.path,
                        fix="such values have no average; average checkpoints that agree in them",
                    )
                )
        out.copy_(mine)

    def _compare(self, first: Manifest) -> None:
        problems = []
        for source in self._sources[1:]:
            other = source.manifest
            mine, theirs = dict(first.tensors), dict(other.tensors)
            apart = sorted(set(mine) ^ set(theirs))
            shapes = [k for k in mine if k in theirs and mine[k].shape != theirs[k].shape]
            kinds = [
                k
                for k in mine
                if k in theirs and is_floating(mine[k].dtype) != is_floating(theirs[k].dtype)
            ]
            for keys, what in (
                (apart, "keys that only one of them has"),
                (shapes, "tensors of another shape"),
                (kinds, "floats in one, integers in the other"),
            ):
                if keys:
                    problems.append(
                        Problem(
                            code="convert.average-differs",
                            what=f"checkpoints cannot be averaged: {what}",
                            where=f"{first.path} and {other.path}",
                            actual=list_keys(keys),
                            fix="average checkpoints of one model under one set of names",
                        )
                    )
        if not math.isfinite(sum(self._weights)) or sum(self._weights) == 0:
            problems.append(
                Problem(
                    code="convert.weights",
                    what="the weights have no finite sum other than 0",
                    where="--weights",
                )
            )
        if problems:
            raise MismatchError(*problems)


class Part:
    """A source with fewer keys: the model only, or without some states."""

    def __init__(self, source: Source, keys: Iterable[str]) -> None:
        self._source = source
        kept = frozenset(keys)
        whole = source.manifest
        self.manifest = replace(
            whole,
            tensors={k: v for k, v in whole.tensors.items() if k in kept},
            objects={k: v for k, v in whole.objects.items() if k in kept},
        )
        self.fill = source.fill
        self.objects = source.objects
        self.close = source.close
