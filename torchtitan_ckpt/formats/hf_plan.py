"""Who writes what in a save by several ranks: pure planning over what the ranks say they hold.

Every rank describes its state dict; `merge` makes one picture of it and finds what contradicts;
`assign` gives files to owners; `rounds` cuts the exchange into steps in which no rank sends or
receives more than a window. The same input gives the same plan, so every rank computes it alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torchtitan_ckpt.errors import Problem, list_keys
from torchtitan_ckpt.formats.hf_boxes import (
    Ints,
    UnevenStrided,
    boxes_of,
    find_gap_or_overlap,
    intersect,
    split_box,
)
from torchtitan_ckpt.manifest import ITEM_SIZE, TensorEntry

# How a DTensor is laid out: the ranks of its mesh (row-major), the mesh's shape, its placements.
Spec = tuple[Ints, Ints, tuple[tuple[int, int], ...]]


@dataclass(frozen=True, slots=True)
class Described:
    """One tensor as one rank holds it; `spec` is None for a plain tensor."""

    key: str
    shape: Ints
    dtype: str
    spec: Spec | None


@dataclass(frozen=True, slots=True)
class Held:
    """A box of a tensor and the ranks that hold it."""

    offsets: Ints
    sizes: Ints
    ranks: Ints


@dataclass(frozen=True, slots=True)
class Picture:
    """All tensors of all ranks. `copies` are plain tensors that several ranks hold."""

    entries: Mapping[str, TensorEntry]
    held: Mapping[str, tuple[Held, ...]]
    copies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """A dense stretch of one tensor, and which rank gives which box of it."""

    key: str
    offsets: Ints
    sizes: Ints
    nbytes: int
    owner: int
    pieces: tuple[tuple[int, Ints, Ints], ...]


def merge(views: Sequence[Sequence[Described]], of_rank: Sequence[int]) -> Picture | list[Problem]:
    """One picture from the distinct descriptions; rank r gave `views[of_rank[r]]`."""
    seen: dict[str, dict[Described, list[int]]] = {}
    members: list[list[int]] = [[] for _ in views]
    for rank, number in enumerate(of_rank):
        members[number].append(rank)
    for number, view in enumerate(views):
        for item in view:
            seen.setdefault(item.key, {}).setdefault(item, []).extend(members[number])
    entries: dict[str, TensorEntry] = {}
    held: dict[str, tuple[Held, ...]] = {}
    copies: list[str] = []
    problems: list[Problem] = []
    clashes: dict[str, list[str]] = {}
    gaps: dict[str, list[str]] = {}
    for key, variants in seen.items():
        items = list(variants)
        first = items[0]
        if any((i.shape, i.dtype) != (first.shape, first.dtype) for i in items) or (
            len({item.spec is None for item in items}) > 1
        ):
            clashes.setdefault(_clash(variants), []).append(key)
            continue
        entries[key] = TensorEntry(key, first.shape, first.dtype)
        if first.spec is None:
            ranks = tuple(sorted(rank for group in variants.values() for rank in group))
            held[key] = (Held((0,) * len(first.shape), first.shape, ranks),)
            if len(ranks) > 1:
                copies.append(key)
            continue
        said = tuple(sorted((item.spec, tuple(sorted(r))) for item, r in variants.items()))
        boxes, fault = _held(first.shape, said)
        if fault:
            gaps.setdefault(fault, []).append(key)
        held[key] = boxes
    problems += [_disagreement(text, keys) for text, keys in clashes.items()]
    problems += [_gap(text, keys) for text, keys in gaps.items()]
    return problems or Picture(entries, held, tuple(copies))


@lru_cache(maxsize=4096)
def _held(shape: Ints, said: tuple[tuple[Spec, Ints], ...]) -> tuple[tuple[Held, ...], str]:
    """Boxes with their holders, over all meshes on which a tensor of this name lies."""
    found: dict[tuple[Ints, Ints], list[int]] = {}
    for (mesh_ranks, mesh_shape, placements), speakers in said:
        speaking = set(speakers)
        for position, rank in enumerate(mesh_ranks):
            if rank not in speaking:
                return (), f"rank {rank} belongs to the tensor's mesh and does not have it"
            try:
                boxes = boxes_of(shape, mesh_shape, _coordinate(position, mesh_shape), placements)
            except UnevenStrided as error:
                return (), str(error)
            for box in boxes:
                found.setdefault((box.offsets, box.sizes), []).append(rank)
    fault = find_gap_or_overlap(shape, list(found)) if math.prod(shape) else ""
    held = tuple(Held(o, n, tuple(sorted(set(r)))) for (o, n), r in sorted(found.items()))
    return held, fault


def _coordinate(position: int, mesh_shape: Ints) -> Ints:
    out = []
    for size in reversed(mesh_shape):
        out.append(position % size)
        position //= size
    return tuple(reversed(out))


def assign(
    files: Mapping[str, Sequence[TensorEntry]], picture: Picture, ranks: int
) -> dict[str, int]:
    """An owner for every file: the rank with least to write, among those most of its own bytes."""
    load = [0] * ranks
    owners = {}
    sizes = {name: sum(entry.nbytes for entry in entries) for name, entries in files.items()}
    for name in sorted(files, key=lambda n: (-sizes[n], n)):
        local: Counter[int] = Counter()
        for entry in files[name]:
            width = ITEM_SIZE[entry.dtype]
            for part in picture.held[entry.key]:
                for rank in part.ranks:
                    local[rank] += math.prod(part.sizes) * width
        owner = min(range(ranks), key=lambda r: (load[r] + sizes[name] - local[r], -local[r], r))
        owners[name] = owner
        load[owner] += sizes[name]
    return owners


def choose_givers(picture: Picture, ranks: int) -> dict[str, tuple[tuple[int, Ints, Ints], ...]]:
    """For each box one holder, so that all give about the same (for writing by byte ranges)."""
    given = [0] * ranks
    out = {}
    for key, entry in picture.entries.items():
        width = ITEM_SIZE[entry.dtype]
        rows = []
        for part in picture.held[key]:
            if not math.prod(part.sizes):
                continue
            giver = min(part.ranks, key=lambda r: (given[r], r))
            given[giver] += math.prod(part.sizes) * width
            rows.append((giver, part.offsets, part.sizes))
        out[key] = tuple(rows)
    return out


def segments(
    entries: Sequence[TensorEntry], picture: Picture, owner: int, window: int, given: list[int]
) -> Iterator[Segment]:
    """The tensors of one file, in the order given, cut into stretches of at most a window."""
    for entry in entries:
        width = ITEM_SIZE[entry.dtype]
        if not entry.numel:
            continue
        zero = (0,) * len(entry.shape)
        limit = max(window // width, 1)
        for offsets, sizes in split_box(entry.shape, zero, entry.shape, limit):
            pieces = []
            for part in picture.held[entry.key]:
                common: tuple[Ints, Ints] | None = (part.offsets, part.sizes)
                if sizes != entry.shape:
                    common = intersect((offsets, sizes), (part.offsets, part.sizes))
                if common is None:
                    continue
                giver = owner
                if owner not in part.ranks:
                    giver = min(part.ranks, key=lambda r: (given[r], r))
                    given[giver] += math.prod(common[1]) * width
                pieces.append((giver, *common))
            nbytes = math.prod(sizes) * width
            yield Segment(entry.key, offsets, sizes, nbytes, owner, tuple(pieces))


def rounds(queues: Mapping[int, Sequence[Segment]], window: int) -> Iterator[list[Segment]]:
    """Steps of the exchange: what each rank receives, and sends, fits into a window.

    `queues` has each owner's segments in the order of its files.
    """
    cursor = dict.fromkeys(queues, 0)
    turn = 0
    owners = sorted(queues)
    while any(cursor[o] < len(queues[o]) for o in owners):
        step: list[Segment] = []
        sent: Counter[int] = Counter()
        for owner in owners[turn % len(owners) :] + owners[: turn % len(owners)]:
            received = 0
            while cursor[owner] < len(queues[owner]):
                segment = queues[owner][cursor[owner]]
                out: Counter[int] = Counter()
                share = segment.nbytes // max(math.prod(segment.sizes), 1)
                for giver, _, sizes in segment.pieces:
                    if giver != owner:
                        out[giver] += math.prod(sizes) * share
                full = received and received + segment.nbytes > window
                if full or (step and any(sent[r] + n > window for r, n in out.items())):
                    break
                step.append(segment)
                sent.update(out)
                received += segment.nbytes
                cursor[owner] += 1
        turn += 1
        yield step


# --- messages -----------------------------------------------------------------------------------


def _clash(variants: Mapping[Described, list[int]]) -> str:
    said = []
    for item, ranks in variants.items():
        kind = "plain" if item.spec is None else "sharded"
        shown = ", ".join(map(str, sorted(ranks)[:4])) + (" …" if len(ranks) > 4 else "")
        said.append(f"rank {shown}: {item.dtype} {list(item.shape)} {kind}")
    return "; ".join(sorted(said)[:4])


def _disagreement(text: str, keys: list[str]) -> Problem:
    return Problem(
        code="ranks.disagree",
        what=f"ranks disagree about {len(keys)} tensors",
        where=list_keys(keys),
        expected="one shape, one dtype and one kind on all ranks that have the tensor",
        actual=text,
        cause="local shards under global names, or models built from different configurations",
        fix="give sharded tensors as DTensors, and build the model alike on every rank",
    )


def _gap(text: str, keys: list[str]) -> Problem:
    return Problem(
        code="ranks.coverage",
        what=f"the ranks together do not hold {len(keys)} tensors exactly once",
        where=list_keys(keys),
        actual=text,
        cause="a rank left the tensor out of its state dict, or its sharding is uneven and strided",
        fix="give every rank of the mesh the same keys; divide the rows evenly",
    )
