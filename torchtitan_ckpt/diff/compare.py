"""Compare two checkpoints of any formats, dtypes and splits, in bounded memory.

`pairs` says what corresponds to what, `values` compares windows, `causes` looks for
the reason of what differs; this module runs them and groups what they found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack

from torchtitan_ckpt.config import TRAINING_STATES
from torchtitan_ckpt.convert.source import Source, open_source
from torchtitan_ckpt.diff.objects import compare_objects
from torchtitan_ckpt.diff.options import Options, check
from torchtitan_ckpt.diff.pairs import Side, align
from torchtitan_ckpt.diff.report import Difference, Group, One, grouped
from torchtitan_ckpt.diff.run import Run
from torchtitan_ckpt.errors import InputError
from torchtitan_ckpt.formats.collector import collector_paused
from torchtitan_ckpt.formats.quantized import describe, is_quantized
from torchtitan_ckpt.formats.quantized import detect as detect_quantized
from torchtitan_ckpt.manifest import Manifest

__all__ = ["Difference", "Group", "Options", "diff"]


def diff(options: Options, progress: Callable[[int, int], None] | None = None) -> Difference:
    """Compare two checkpoints. `progress` is told bytes done and in all.

    Raises what the readers and the tables raise; never for what only differs.
    """
    check(options)
    with ExitStack() as stack:
        with collector_paused():
            a, b, notes = _open(options, stack)
            sides = [
                Side(path, source.manifest.format, source, _keys(source.manifest.tensors, options))
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
        out.left_out, out.notes = found.left_out, notes + found.notes
        if found.objects:
            keys = [_keys(side.source.manifest.objects, options) for side in sides]
            objects, only_a, only_b = compare_objects(a, b, *keys)
            ones += [One(k, v, "object", "object", detail=detail) for k, v, detail in objects]
            out.only_a += only_a
            out.only_b += only_b
        with collector_paused():
            out.groups = list(grouped(ones))
        return out


def _open(options: Options, stack: ExitStack) -> tuple[Source, Source, list[str]]:
    """Both sides, and notes. Codes and scales of quantized files are compared as they are where
    both sides have them by the same keys, else by the values that they stand for."""

    def opened(path: str, dequantize: bool) -> Source:
        source = open_source(path, dequantize=dequantize, raw=True, trust=options.trust)
        stack.callback(source.close)
        return source

    notes: list[str] = []
    sides = [opened(path, False) for path in (options.a, options.b)]
    manifests = [side.manifest for side in sides]
    codes = [_codes(manifest, notes) for manifest in manifests]
    if codes[0] <= manifests[1].tensors.keys() and codes[1] <= manifests[0].tensors.keys():
        return sides[0], sides[1], notes
    for manifest, found in zip(manifests, codes, strict=True):
        if found:
            scheme = describe(detect_quantized(manifest).values())
            notes.append(f"{manifest.path}: {scheme}, compared by the values they stand for")
    return opened(options.a, bool(codes[0])), opened(options.b, bool(codes[1])), notes


def _codes(manifest: Manifest, notes: list[str]) -> set[str]:
    """Keys of the codes and scales that stand for values; none where no values can be made."""
    if manifest.format != "hf" or not is_quantized(manifest):
        return set()
    try:
        found = detect_quantized(manifest).values()
    except InputError as error:
        why = error.problems[0].what
        notes.append(f"{manifest.path}: quantized tensors are compared by their codes: {why}")
        return set()
    return {part.key for item in found for part in (item.weight, item.scale)}


def _keys(keys: Iterable[str], options: Options) -> tuple[str, ...]:
    if not options.only:
        return tuple(keys)

    def part(key: str) -> str:
        head = key.partition(".")[0]
        return head if head in TRAINING_STATES else "model"

    return tuple(key for key in keys if part(key) in options.only)
