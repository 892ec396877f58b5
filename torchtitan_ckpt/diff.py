"""Compare two checkpoints of any formats, dtypes and splits, in bounded memory.

`diff_pairs` says what corresponds to what, `diff_values` compares windows, `diff_causes` looks for
the reason of what differs; this module runs them and groups what they found.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from torchtitan_ckpt.config import TRAINING_STATES
from torchtitan_ckpt.convert_source import open_source
from torchtitan_ckpt.convert_units import Adapted
from torchtitan_ckpt.diff_causes import Signature, Signing, exchanged, explain
from torchtitan_ckpt.diff_objects import compare_objects
from torchtitan_ckpt.diff_pairs import Alignment, Pair, Side, align
from torchtitan_ckpt.diff_values import Spot, Tally, Tolerance, Window
from torchtitan_ckpt.errors import ConfigError, Problem, group_keys, key_template
from torchtitan_ckpt.formats import detect, read_manifest
from torchtitan_ckpt.formats.hf_boxes import Ints
from torchtitan_ckpt.formats.quantized import is_quantized
from torchtitan_ckpt.manifest import ITEM_SIZE, TensorEntry
from torchtitan_ckpt.mapping.apply import dtype_of

WINDOW = 2 * 2**20
_PARTS = ("model", *TRAINING_STATES)
_CAUSE_BYTES = 2**36
_Box = tuple[Pair, Ints, Ints]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to compare and how; the command line explains each field."""

    a: str
    b: str
    family: str | None = None
    config: str | None = None
    adapter: str | None = None
    generation: str | None = None
    only: tuple[str, ...] = ()
    ulps: int = 4
    atol: float = 0.0
    causes: bool = True
    threads: int | None = None
    window: int = WINDOW
    trust: bool = False


@dataclass(frozen=True, slots=True)
class One:
    """One tensor or object that was compared, under B's key. `verdict` is equal, dtype, close,
    different or shape; `left` is A's key where it has another."""

    key: str
    verdict: str
    a: str
    b: str
    other_key: str = ""
    tally: Tally | None = None
    cause: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors whose keys differ in numbers only, with one verdict and one pair of dtypes."""

    name: str
    verdict: str
    count: int
    a: str
    b: str
    keys: tuple[str, ...]
    elements: int = 0
    differing: int = 0
    max_abs: float = 0.0
    max_ulps: int = 0
    exact: bool = True
    first: tuple[str, Spot] | None = None
    worst: tuple[str, Spot] | None = None
    causes: tuple[str, ...] = ()
    detail: str = ""


@dataclass(slots=True)
class Difference:
    """Everything that `diff` found. `only_a` and `only_b` are keys that the other side lacks."""

    a: str
    b: str
    route: str
    groups: list[Group] = field(default_factory=list)
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bytes_read: int = 0

    @property
    def compared(self) -> int:
        return sum(group.count for group in self.groups)

    def count(self, *verdicts: str) -> int:
        return sum(group.count for group in self.groups if group.verdict in verdicts)


def diff(options: Options, progress: Callable[[int, int], None] | None = None) -> Difference:
    """Compare two checkpoints. `progress` is told bytes done and in all.

    Raises what the readers and the tables raise; never for what only differs.
    """
    _check(options)
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
        run = _Run(options, found, sides[0 if found.swapped else 1], progress)
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
        out.groups = list(_grouped(ones))
        return out


def _check(options: Options) -> None:
    problems = [
        Problem(
            code="diff.only",
            what=f"no part {part!r}",
            where="--only",
            expected=", ".join(_PARTS),
        )
        for part in options.only
        if part not in _PARTS
    ]
    if options.threads is not None and options.threads < 1:
        problems.append(Problem(code="diff.threads", what="no thread", where="--threads"))
    if options.ulps < 0 or not options.atol >= 0:
        problems.append(
            Problem(code="diff.tolerance", what="a negative tolerance", where="--ulps, --atol")
        )
    if options.family and options.adapter:
        problems.append(
            Problem(
                code="diff.two-tables", what="a family and an adapter", where="--family, --adapter"
            )
        )
    if problems:
        raise ConfigError(*problems)


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


class _Run:
    """Compares the pairs of an alignment on several threads."""

    def __init__(
        self,
        options: Options,
        found: Alignment,
        right: Side,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.options, self.found, self.right, self.progress = options, found, right, progress
        self.bytes_read = 0
        self.total = sum(p.made.nbytes + p.entry.nbytes for p in found.pairs)
        self._lock = threading.Lock()
        self._local = threading.local()
        self._window = Window(Tolerance(options.ulps, options.atol))

    def compare(self) -> list[One]:
        tallies: dict[str, Tally] = {}
        threads = self.options.threads or min(os.cpu_count() or 1, 8)
        with ThreadPoolExecutor(threads, thread_name_prefix="diff") as pool:
            waiting: set[Future[list[tuple[str, Tally]]]] = set()

            def collect(limit: int) -> None:
                nonlocal waiting
                while len(waiting) > limit:
                    done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    for key, tally in (pair for future in done for pair in future.result()):
                        known = tallies.get(key)
                        if known is None:
                            tallies[key] = tally
                        else:
                            known.merge(tally)

            for job in self._jobs():
                waiting.add(pool.submit(self._job, job))
                collect(8 * threads)
            collect(0)
        ones = [self._one(pair, tallies) for pair in self.found.pairs]
        ones += self._bulk()
        return self._explained(ones) if self.options.causes else ones

    def _jobs(self) -> Iterator[list[_Box]]:
        """Boxes to compare, several in a job: the windows of one tensor, or many small tensors."""
        boxes: list[_Box] = []
        size = 0
        for pair in self.found.pairs:
            if not pair.same_shape:
                continue
            for offsets, sizes in pair.boxes(self.options.window):
                boxes.append((pair, offsets, sizes))
                size += _numel(sizes) * ITEM_SIZE[pair.made.dtype]
                if size >= 8 * self.options.window or len(boxes) >= 256:
                    yield boxes
                    boxes, size = [], 0
        if boxes:
            yield boxes

    def _job(self, boxes: list[_Box]) -> list[tuple[str, Tally]]:
        found: dict[str, Tally] = {}
        nbytes = 0
        for pair, offsets, sizes in boxes:
            left = pair.read_left(offsets, sizes, self._buffer("left"))
            right = self._right(pair.key, offsets, sizes, pair.entry)
            nbytes += sum(t.numel() * t.element_size() for t in (left, right))
            a, b = (right, left) if self.found.swapped else (left, right)
            tally = self._window.add(a, b, offsets)
            if pair.key in found:
                found[pair.key].merge(tally)
            else:
                found[pair.key] = tally
        self._count(nbytes)
        return list(found.items())

    def _dtypes(self, pair: Pair) -> tuple[str, str]:
        found = (pair.made.dtype, pair.entry.dtype)
        return (found[1], found[0]) if self.found.swapped else found

    def _right(self, key: str, offsets: Ints, sizes: Ints, entry: TensorEntry) -> torch.Tensor:
        out = self._buffer("right")(sizes, dtype_of(entry.dtype))
        if out.numel():
            self.right.source.fill(key, offsets, out)
        return out

    def _buffer(self, name: str) -> Callable[[Ints, torch.dtype], torch.Tensor]:
        """Tensors in memory that the thread uses again and again."""

        def make(sizes: Ints, dtype: torch.dtype) -> torch.Tensor:
            size = _numel(sizes) * dtype.itemsize
            held: torch.Tensor | None = getattr(self._local, name, None)
            if held is None or held.numel() < size:
                held = torch.empty(max(size, self.options.window), dtype=torch.uint8)
                setattr(self._local, name, held)
            return held[:size].view(dtype).view(sizes)

        return make

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.bytes_read += nbytes
            done = self.bytes_read
        if self.progress is not None:
            self.progress(done, self.total)

    def _one(self, pair: Pair, tallies: dict[str, Tally]) -> One:
        a, b = (f"{e.dtype} {list(e.shape)}" for e in (pair.made, pair.entry))
        if self.found.swapped:
            a, b = b, a
        other = pair.left if pair.left != pair.key else ""
        if not pair.same_shape:
            return One(pair.key, "shape", a, b, other)
        tally = tallies.get(pair.key) or Tally(*self._dtypes(pair))
        return One(pair.key, tally.verdict, a, b, other, tally)

    # An adapter's outputs

    def _bulk(self) -> list[One]:
        out = []
        for unit in self.found.bulk:
            for piece in unit.pieces(self.options.window):
                for key, _, made in piece.make():
                    entry = self.right.source.manifest.tensors.get(key)
                    if entry is not None:
                        out.append(self._whole(unit, key, made, entry))
        return out

    def _whole(self, unit: Adapted, key: str, made: torch.Tensor, entry: TensorEntry) -> One:
        mine = TensorEntry(key, tuple(made.shape), str(made.dtype).removeprefix("torch."))
        a, b = (f"{e.dtype} {list(e.shape)}" for e in (mine, entry))
        dtypes = (mine.dtype, entry.dtype)
        if self.found.swapped:
            a, b, dtypes = b, a, (dtypes[1], dtypes[0])
        if mine.shape != entry.shape:
            return One(key, "shape", a, b, unit.keys[0])
        tally = Tally(*dtypes)
        pair = Pair(key, key, _Held(made, mine), entry)  # type: ignore[arg-type]
        for offsets, sizes in pair.boxes(self.options.window):
            box = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
            left, right = made[box].contiguous(), self._right(key, offsets, sizes, entry)
            self._count(left.numel() * left.element_size() + right.numel() * right.element_size())
            one, two = (right, left) if self.found.swapped else (left, right)
            tally.merge(self._window.add(one, two, offsets))
        return One(key, tally.verdict, a, b, unit.keys[0], tally)

    # Causes

    def _explained(self, ones: list[One]) -> list[One]:
        pairs = {pair.key: pair for pair in self.found.pairs}
        wrong = [one for one in ones if one.verdict in ("different", "shape") and one.key in pairs]
        rounded = {one.key: _rounding(one.tally) for one in ones if one.tally is not None}
        wrong = [one for one in wrong if not rounded.get(one.key)]
        left: dict[str, Signature] = {}
        right: dict[str, Signature] = {}
        read = 0
        for one in wrong:
            pair = pairs[one.key]
            read += pair.made.nbytes + pair.entry.nbytes
            if read > _CAUSE_BYTES:
                self.found.notes.append("causes were looked for in the first 64 GiB only")
                break
            left[one.key], right[one.key] = self._signatures(pair)
        a, b = (right, left) if self.found.swapped else (left, right)
        causes = {key: why for key, why in rounded.items() if why}
        causes |= {key: explain(a[key], b[key]) for key in left}
        for key, other in exchanged(a, b):
            causes[key] = f"it is a's {other}"
        return [replace(one, cause=causes.get(one.key, "")) for one in ones]

    def _signatures(self, pair: Pair) -> tuple[Signature, Signature]:
        """Of both sides, in the narrower dtype."""
        from torchtitan_ckpt.diff_values import narrower

        dtype = dtype_of(narrower(*self._dtypes(pair)))
        one, two = Signing(pair.made.shape), Signing(pair.entry.shape)
        for offsets, sizes in pair.boxes(self.options.window):
            one.add(pair.read_left(offsets, sizes, self._buffer("left")).to(dtype), offsets)
        mirror = Pair(pair.key, pair.key, _Held(torch.empty(0), pair.entry), pair.entry)  # type: ignore[arg-type]
        for offsets, sizes in mirror.boxes(self.options.window):
            two.add(self._right(pair.key, offsets, sizes, pair.entry).to(dtype), offsets)
        return one.result(), two.result()


@dataclass(frozen=True, slots=True)
class _Held:
    """A tensor in memory in the place of a unit."""

    tensor: torch.Tensor
    entry: TensorEntry


def _rounding(tally: Tally | None) -> str:
    """The cause where one side is the other, rounded; of equal dtypes."""
    if tally is None or not tally.rounded or tally.dtype_a != tally.dtype_b:
        return ""
    dtype, side = sorted(tally.rounded, key=lambda pair: -ITEM_SIZE[pair[0]])[0]
    other = "a" if side == "b" else "b"
    return f"{side} is {other} rounded to {dtype} and widened again"


def _numel(sizes: Sequence[int]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count


def _grouped(ones: list[One]) -> Iterator[Group]:
    groups: dict[tuple[str, str, str, str], list[One]] = {}
    for one in ones:
        kinds = one.a.partition(" ")[0], one.b.partition(" ")[0]
        groups.setdefault((key_template(one.key), one.verdict, *kinds), []).append(one)
    for (_, verdict, *_), members in groups.items():
        tallies = [(one.key, one.tally) for one in members if one.tally is not None]
        keys = tuple(one.key for one in members)
        firsts = [(key, t.first) for key, t in tallies if t.first is not None]
        worst = [(key, t.worst) for key, t in tallies if t.worst is not None]
        texts = [{one.a for one in members}, {one.b for one in members}]
        a, b = (next(iter(t)) if len(t) == 1 else sorted(t)[0].partition(" ")[0] for t in texts)
        yield Group(
            name=group_keys(keys)[0][0],
            verdict=verdict,
            count=len(members),
            a=a,
            b=b,
            keys=keys,
            elements=sum(t.count for _, t in tallies),
            differing=sum(t.differing for _, t in tallies),
            max_abs=max((t.max_abs for _, t in tallies), default=0.0),
            max_ulps=max((t.max_ulps for _, t in tallies), default=0),
            exact=all(t.exact for _, t in tallies),
            first=firsts[0] if firsts else None,
            worst=max(worst, key=lambda pair: pair[1].apart) if worst else None,
            causes=tuple(_causes(members)),
            detail=next((one.detail for one in members if one.detail), ""),
        )


def _causes(members: list[One]) -> Iterator[str]:
    """Each cause once, with the number of tensors where it is not that of all."""
    counts: dict[str, list[str]] = {}
    for one in members:
        if one.cause:
            counts.setdefault(one.cause, []).append(one.key)
    for cause, keys in list(counts.items())[:6]:
        yield (
            cause
            if len(keys) == len(members)
            else f"{cause} ({keys[0]}" + (f" and {len(keys) - 1} more)" if len(keys) > 1 else ")")
        )
    if len(counts) > 6:
        yield f"… and {len(counts) - 6} more causes"
