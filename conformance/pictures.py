"""Pictures for the HTML report: which rank held what, before and after it was resharded.

A manager's job is drawn from the parallel degrees alone, with the rules that place tensors
(`torchtitan_ckpt.plan`); all else as the ranks told it. Numbers say which rank; colours only help,
so a page prints in grey.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from conformance.degrees import Case
from conformance.reference import Leaf
from conformance.spread import Part, Picture, Row, Spread
from torchtitan_ckpt.errors import group_keys
from torchtitan_ckpt.manifest import TensorEntry
from torchtitan_ckpt.plan import plan_load, plan_save
from torchtitan_ckpt.plan.state import model_entries
from torchtitan_ckpt.plan.text import picture, read_map
from torchtitan_ckpt.plan.write import Kind, kinds_of

_COLOURS = ("#cfe2ff", "#ffe2b8", "#cdeccd", "#f6cfe0", "#e3d5f7", "#c9eef0", "#f5efb0", "#e2d6c8")
_WIDE, _HIGH, _THIN = 180, 64, 22
_LINE = 14  # pixels that a number needs
_ROWS, _FORMS = 8, 4


def told(shown: Picture) -> str:
    """One figure: what the ranks held at each stage, one row a split."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in shown.heads)
    return (
        f'<table class="split"><thead><tr><th scope="col">split</th>{head}</tr></thead>'
        f"<tbody>{''.join(map(_row, shown.rows))}</tbody></table>"
    )


def _row(row: Row) -> str:
    cells = "".join(f"<td>{_stage(held)}</td>" for held in row.stages)
    return f'<tr><th scope="row">{escape(row.split)}</th>{cells}</tr>'


def _stage(held: Sequence[Spread]) -> str:
    rest = sum(len(one.keys) for one in held[_FORMS:])
    return "".join(
        f'<div class="form">{_names(one.keys)}{_split(one)}</div>' for one in held[:_FORMS]
    ) + (f"and {rest} tensors held in other ways" if rest else "")


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
        + "".join(f"<td>{_split(_spread(native[keys[0]], kind[keys[0]]))}</td>" for kind in kinds)
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


def _spread(tensor: TensorEntry, kind: Kind) -> Spread:
    boxes = zip(kind.boxes, kind.holders, strict=True)
    return Spread(tensor.shape, tuple(Part(*box, tuple(sorted(held))) for box, held in boxes))


def _split(held: Spread) -> str:
    """A tensor as a rectangle, cut as it is; each piece says which ranks hold it."""
    shape, full = held.shape, [part for part in held.parts if all(part.size)]
    cut = [d for d in range(len(shape)) if len({(p.start[d], p.size[d]) for p in full}) > 1]
    # Rows go down and columns across, as people write matrices.
    down = next((d for d in cut if d < len(shape) - 1), None)
    across = next((d for d in cut if d != down), None)
    least = 1.0 if down is None else min(part.size[down] / shape[down] for part in full)
    high = _THIN if len(shape) < 2 else max(_HIGH, min(round(_LINE / least), 4 * _HIGH))
    pieces = [
        _piece(*_span(shape, part, across, _WIDE), *_span(shape, part, down, high), part)
        for part in full
    ]
    label = " x ".join(map(str, shape)) or "scalar"
    idle = sorted(rank for part in held.parts if not all(part.size) for rank in part.ranks)
    words = [
        "" if not held.parts or any(part.value for part in held.parts) else label,
        f"nothing on rank {', '.join(map(str, idle))}" if idle else "",
        "cut along three dimensions: not drawn" if len(cut) > 2 else "",
        escape(held.words),
    ]
    drawn = (
        f'<svg width="{_WIDE + 2}" height="{high + 2}" viewBox="-1 -1 {_WIDE + 2} {high + 2}" '
        f'role="img" aria-label="{label}">{"".join(pieces)}</svg>'
        if held.parts and len(cut) <= 2
        else ""
    )
    return f'{drawn}<div class="meta">{" · ".join(filter(None, words))}</div>'


def _span(shape: Sequence[int], part: Part, dim: int | None, pixels: int) -> tuple[float, float]:
    if dim is None:
        return 0, pixels
    return part.start[dim] * pixels / shape[dim], part.size[dim] * pixels / shape[dim]


def _piece(x: float, w: float, y: float, h: float, part: Part) -> str:
    ranks = _numbers(part.ranks)
    text = f"{ranks}: {escape(part.value)}" if part.value else ranks
    fits = w > 7 * len(text) + 4 and h > 11
    words = f'<text x="{x + w / 2:.1f}" y="{y + h / 2 + 4:.1f}">{text}</text>' if fits else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" '
        f'fill="{_COLOURS[part.ranks[0] % len(_COLOURS)]}"><title>rank {text}</title></rect>{words}'
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
