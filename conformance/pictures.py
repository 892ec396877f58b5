"""Pictures for the HTML report: which rank held what of a job, before and after it was resharded.

Drawn from the parallel degrees alone, with the rules that place tensors (`torchtitan_ckpt.plan`);
nothing is read from a run. Numbers say which rank; colours only help, so a page prints in grey.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from conformance.degrees import Case
from conformance.reference import Leaf
from torchtitan_ckpt.errors import group_keys
from torchtitan_ckpt.manifest import TensorEntry
from torchtitan_ckpt.plan import plan_load, plan_save
from torchtitan_ckpt.plan.state import model_entries
from torchtitan_ckpt.plan.text import picture, read_map
from torchtitan_ckpt.plan.write import Kind, kinds_of

_COLOURS = ("#cfe2ff", "#ffe2b8", "#cdeccd", "#f6cfe0", "#e3d5f7", "#c9eef0", "#f5efb0", "#e2d6c8")
_WIDE, _HIGH, _THIN = 180, 64, 22
_ROWS = 8


def resharding(table: Mapping[str, Leaf], before: Case, after: Case) -> str:
    """One figure: the tensors of `table` under both splits, and who moves which bytes."""
    native = {key: TensorEntry(key, leaf.shape, leaf.dtype) for key, leaf in table.items()}
    kinds = [dict(zip(native, _kinds(native, case), strict=True)) for case in (before, after)]
    groups: dict[object, list[str]] = {}
    for key in native:
        groups.setdefault(tuple(_signature(kind[key]) for kind in kinds), []).append(key)
    largest = sorted(groups.values(), key=len, reverse=True)
    rows = [
        f"<tr><td>{_names(keys)}</td>"
        + "".join(f"<td>{_split(native[keys[0]].shape, kind[keys[0]])}</td>" for kind in kinds)
        + "</tr>"
        for keys in largest[:_ROWS]
    ]
    if len(largest) > _ROWS:
        rest = sum(map(len, largest[_ROWS:]))
        rows.append(f'<tr><td colspan="3">and {rest} tensors cut in other ways</td></tr>')
    head = "".join(
        f'<th scope="col">{when} under {escape(case.name)}<br>'
        f"<small>{_ranks(case.ranks)}</small></th>"
        for when, case in (("saved", before), ("loaded", after))
    )
    return (
        f'<table class="split"><thead><tr><th scope="col">tensors cut alike</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>{_bytes(native, before, after)}"
    )


def _kinds(native: Mapping[str, TensorEntry], case: Case) -> list[Kind]:
    return kinds_of(model_entries(native, case.degrees, chunks=case.chunks), case.degrees)


def _bytes(native: Mapping[str, TensorEntry], before: Case, after: Case) -> str:
    """The plan: what each rank writes, what each needs, and whose files it opens for that."""
    save = plan_save(native, before.degrees, chunks=before.chunks, method="repeat")
    load = plan_load(save, native, after.degrees, chunks=after.chunks)
    return (
        '<div class="plan">'
        + picture([w.stored for w in save.writers], "bytes written, by rank")
        + picture([r.needed for r in load.readers], "bytes needed, by rank")
        + read_map(load)
        + "</div>"
    )


def _signature(kind: Kind) -> object:
    """How a tensor is cut and held, whatever its size."""
    whole = [(box, held) for box, held in zip(kind.boxes, kind.holders, strict=True) if _full(box)]
    starts = [sorted({box[0][d] for box, _ in whole}) for d in range(len(kind.boxes[0][0]))]
    return tuple(
        (tuple(starts[d].index(at) for d, at in enumerate(box[0])), tuple(sorted(held)))
        for box, held in whole
    )


def _full(box: tuple[Sequence[int], Sequence[int]]) -> bool:
    return all(box[1])


def _split(shape: tuple[int, ...], kind: Kind) -> str:
    """A tensor as a rectangle, cut as it is; each piece says which ranks hold it."""
    boxes = list(zip(kind.boxes, kind.holders, strict=True))
    cut = [d for d in range(len(shape)) if len({box[0][d] for box, _ in boxes}) > 1]
    # Rows go down and columns across, as people write matrices: at most two dimensions are cut.
    down = next((d for d in cut if d < len(shape) - 1), None)
    across = next((d for d in cut if d != down), None)
    high = _THIN if len(shape) < 2 else _HIGH
    pieces, idle = [], set[int]()
    for (start, size), held in boxes:
        if not all(size):
            idle |= held
            continue
        x, w = _span(shape, start, size, across, _WIDE)
        y, h = _span(shape, start, size, down, high)
        pieces.append(_piece(x, y, w, h, sorted(held)))
    label = f"{' x '.join(map(str, shape)) or 'scalar'}"
    empty = f" · nothing on rank {', '.join(map(str, sorted(idle)))}" if idle else ""
    return (
        f'<svg width="{_WIDE + 2}" height="{high + 2}" viewBox="-1 -1 {_WIDE + 2} {high + 2}" '
        f'role="img" aria-label="{label}">{"".join(pieces)}</svg>'
        f'<div class="meta">{label}{empty}</div>'
    )


def _span(
    shape: Sequence[int], start: Sequence[int], size: Sequence[int], dim: int | None, pixels: int
) -> tuple[float, float]:
    if dim is None:
        return 0, pixels
    return start[dim] * pixels / shape[dim], size[dim] * pixels / shape[dim]


def _piece(x: float, y: float, w: float, h: float, held: list[int]) -> str:
    text = _numbers(held)
    fits = w > 7 * len(text) + 4 and h > 11
    words = f'<text x="{x + w / 2:.1f}" y="{y + h / 2 + 4:.1f}">{text}</text>' if fits else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" '
        f'fill="{_COLOURS[held[0] % len(_COLOURS)]}"><title>rank {text}</title></rect>{words}'
    )


def _numbers(ranks: Iterable[int]) -> str:
    """`0-3` where ranks follow each other, else `0,2`."""
    found = list(ranks)
    if len(found) > 2 and found[-1] - found[0] == len(found) - 1:
        return f"{found[0]}-{found[-1]}"
    return ",".join(map(str, found))


def _names(keys: Sequence[str]) -> str:
    groups = group_keys(keys)
    shown = "<br>".join(f"<code>{escape(key)}</code>" for key, _ in groups[:2])
    more = len(keys) - sum(number for _, number in groups[:2])
    return shown + (f"<br>and {more} more" if more else "")


def _ranks(count: int) -> str:
    return f"{count} rank" + ("s" if count > 1 else "")
