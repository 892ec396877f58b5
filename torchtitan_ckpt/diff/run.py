"""Run a comparison: windows of paired tensors on several threads, then causes of what differs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

import torch

from torchtitan_ckpt.convert.units import Adapted
from torchtitan_ckpt.diff.bulk import equal_pairs
from torchtitan_ckpt.diff.causes import Signature, Signing, exchanged, explain
from torchtitan_ckpt.diff.options import Options
from torchtitan_ckpt.diff.pairs import Alignment, Pair, Side
from torchtitan_ckpt.diff.report import One
from torchtitan_ckpt.diff.values import Tally, Tolerance, Window, narrower
from torchtitan_ckpt.formats.hf_boxes import Ints
from torchtitan_ckpt.manifest import ITEM_SIZE, TensorEntry
from torchtitan_ckpt.mapping.apply import dtype_of

_CAUSE_BYTES = 2**36
_Box = tuple[Pair, Ints, Ints]


class Run:
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
        threads = self.options.threads or min(os.cpu_count() or 1, 8)
        tallies = self._equal(threads)
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

            for job in self._jobs(frozenset(tallies)):
                waiting.add(pool.submit(self._job, job))
                collect(8 * threads)
            collect(0)
        ones = [self._one(pair, tallies) for pair in self.found.pairs]
        ones += self._bulk()
        return self._explained(ones) if self.options.causes else ones

    def _equal(self, threads: int) -> dict[str, Tally]:
        tallies = {}
        for pair in equal_pairs(self.found.pairs, self.right.source.manifest, threads):
            tallies[pair.key] = Tally(*self._dtypes(pair), count=pair.made.numel)
            self._count(pair.made.nbytes + pair.entry.nbytes)
        return tallies

    def _jobs(self, proved: Container[str]) -> Iterator[list[_Box]]:
        """Boxes to compare, several in a job: the windows of one tensor, or many small tensors."""
        boxes: list[_Box] = []
        size = 0
        for pair in self.found.pairs:
            if not pair.same_shape or pair.key in proved:
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
        return [replace(o, cause=causes[o.key]) if o.key in causes else o for o in ones]

    def _signatures(self, pair: Pair) -> tuple[Signature, Signature]:
        """Of both sides, in the narrower dtype."""
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
