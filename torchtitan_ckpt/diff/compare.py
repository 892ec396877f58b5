"""Compare two checkpoints of any formats, dtypes and splits, in bounded memory.

`pairs` says what corresponds to what, `values` compares windows, `causes` looks for
the reason of what differs; this module runs them and groups what they found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any

from torchtitan_ckpt.config import TRAINING_STATES
from torchtitan_ckpt.convert.source import open_source
from torchtitan_ckpt.diff.objects import compare_objects
from torchtitan_ckpt.diff.options import Options, check
from torchtitan_ckpt.diff.pairs import Side, align
from torchtitan_ckpt.diff.report import Difference, Group, One, grouped
from torchtitan_ckpt.diff.run import Run
from torchtitan_ckpt.formats import detect, read_manifest
from torchtitan_ckpt.formats.quantized import is_quantized

__all__ = ["Difference", "Group", "Options", "diff"]


def diff(options: Options, progress: Callable[[int, int], None] | None = None) -> Difference:
    """Compare two checkpoints. `progress` is told bytes done and in all.

    Raises what the readers and the tables raise; never for what only differs.
    """
    check(options)
    raw = _raw(options)
    with closing(_open(options, options.a, raw)) as a, closing(_open(options, options.b, raw)) as b:
        sides = [
            Side(path, str(detect(path).format), source, _keys(source.manifest.tensors, options))
            for path, source in ((options.a, a), (options.b, b))
        ]
        found = align(
            *sides,
            family=options.family,
            config=options.config,
            adapter=options.adapter,
            generation=options.generation,
        )
        run = Run(options, found, sides[0 if found.swapped else 1], progress)
        ones = run.compare()
        out = Difference(options.a, options.b, found.route, bytes_read=run.bytes_read)
        out.only_a, out.only_b = found.only_left, found.only_right
        if found.swapped:
            out.only_a, out.only_b = out.only_b, out.only_a
        out.left_out, out.notes = found.left_out, found.notes
        if found.objects:
            keys = [_keys(side.source.manifest.objects, options) for side in sides]
            objects, only_a, only_b = compare_objects(a, b, *keys)
            ones += [One(k, v, "object", "object", detail=detail) for k, v, detail in objects]
            out.only_a += only_a
            out.only_b += only_b
        out.groups = list(grouped(ones))
        return out


def _raw(options: Options) -> bool:
    """Whether codes and scales are compared as they are: both sides have them by the same keys."""
    found = []
    for path in (options.a, options.b):
        seen = detect(path)
        if seen.format is None:
            raise seen.error()
        found.append(seen)
    if all(seen.format != "hf" for seen in found):
        return False
    manifests = [read_manifest(path, trust=options.trust) for path in (options.a, options.b)]
    pairs = zip(found, manifests, reversed(manifests), strict=True)
    return all(
        set(mine.tensors) <= set(other.tensors)
        for seen, mine, other in pairs
        if seen.format == "hf" and is_quantized(mine)
    )


def _open(options: Options, path: str, raw: bool) -> Any:
    return open_source(path, dequantize=not raw, raw=raw, trust=options.trust)


def _keys(keys: Iterable[str], options: Options) -> tuple[str, ...]:
    if not options.only:
        return tuple(keys)

    def part(key: str) -> str:
        head = key.partition(".")[0]
        return head if head in TRAINING_STATES else "model"

    return tuple(key for key in keys if part(key) in options.only)
