"""A plan in words, as JSON, and as a picture: who writes which bytes, who reads from whom."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from torchtitan_ckpt.errors import Problem
from torchtitan_ckpt.plan.plans import LoadPlan, SavePlan, share

_SHOWN = 16
_CELLS = 96
_CAPTION = 260  # pixels that the words under a picture need


def save_text(plan: SavePlan, *, every_rank: bool = False) -> str:
    """The save in words; ranks that are alike share a line, and `every_rank` has one for each."""
    writers = plan.writers
    least, most, _ = share([w.stored for w in writers])
    few, many, _ = share([w.items for w in writers])
    largest = max(writers, key=lambda w: w.largest)
    files = sum(w.items > 0 for w in writers)
    method = "DCP's planners, rank by rank" if plan.method == "dcp" else "DCP's rules, replayed"
    lines = [
        f"save under {plan.degrees.label}: {_ranks(len(writers))}",
        f"  state     {size(plan.nbytes)} in {plan.tensors:,} tensors, cut into {plan.chunks:,} "
        f"items with {plan.objects:,} objects",
        f"  held      {size(plan.held)} by all ranks together; {size(plan.duplicated)} of it are "
        "replicas that another rank writes",
        f"  files     {files} of {size(least)} to {size(most)}, imbalance {plan.imbalance:.3f}, "
        f"and .metadata of {size(plan.metadata)}",
        f"  items     {few:,} to {many:,} a rank; largest {size(largest.largest)} "
        f"({largest.largest_key})",
        _coverage(plan),
        f"  planned   with {method}, in {plan.seconds:.1f} s",
        "",
        f"  {'ranks':<14}{'items':>9}{'payload':>12}{'file':>12}{'holds':>12}  largest item",
    ]
    rows = [(w.items, w.payload, w.stored, w.held, w.largest, w.largest_key) for w in writers]
    lines += _grouped(
        rows,
        lambda r: (
            f"{r[0]:>9,}{size(r[1]):>12}{size(r[2]):>12}{size(r[3]):>12}  {size(r[4])} {r[5]}"
        ),
        every_rank,
    )
    return "\n".join([*lines, *_faults(plan.problems)])


def load_text(plan: LoadPlan, *, every_rank: bool = False) -> str:
    """The load in words."""
    readers = plan.readers
    least, most, _ = share([r.needed for r in readers])
    few, many, _ = share([r.files for r in readers])
    total = sum(r.needed for r in readers)
    by_dcp, by_ours = sum(r.by_dcp for r in readers), sum(r.by_ours for r in readers)
    lines = [
        f"load under {plan.degrees.label}: {_ranks(len(readers))}",
        f"  needs     {size(least)} to {size(most)} a rank, {size(total)} by all",
        f"  files     {few} to {many} of {plan.reads.reads_from.shape[1]} a rank",
        f"  DCP's reader fetches {size(by_dcp)}, {plan.amplification('by_dcp'):.2f} times what is "
        f"needed; this package's {size(by_ours)}, {plan.amplification('by_ours'):.2f} times",
        f"  planned   in {plan.seconds:.1f} s",
        "",
        f"  {'ranks':<14}{'files':>9}{'parts':>9}{'needs':>12}{'DCP':>12}{'ours':>12}",
    ]
    rows = [(r.files, r.parts, r.needed, r.by_dcp, r.by_ours) for r in readers]
    lines += _grouped(
        rows,
        lambda r: f"{r[0]:>9,}{r[1]:>9,}{size(r[2]):>12}{size(r[3]):>12}{size(r[4]):>12}",
        every_rank,
    )
    return "\n".join([*lines, *_faults(plan.problems)])


def as_json(save: SavePlan, load: LoadPlan | None = None) -> dict[str, Any]:
    """Everything, for machines: bytes as integers, one entry a rank."""
    out: dict[str, Any] = {
        "save": {
            "degrees": save.degrees.options,
            "ranks": len(save.writers),
            "tensors": save.tensors,
            "objects": save.objects,
            "items": save.chunks,
            "bytes": save.nbytes,
            "held_bytes": save.held,
            "duplicated_bytes": save.duplicated,
            "stored_bytes": save.stored,
            "metadata_bytes": save.metadata,
            "imbalance": save.imbalance,
            "covered": not any(p.code == "plan.coverage" for p in save.problems),
            "method": save.method,
            "seconds": save.seconds,
            "problems": [asdict(problem) for problem in save.problems],
            "per_rank": [asdict(writer) for writer in save.writers],
        }
    }
    if load is not None:
        reads = load.reads.reads_from
        out["load"] = {
            "degrees": load.degrees.options,
            "ranks": len(load.readers),
            "amplification_dcp": load.amplification("by_dcp"),
            "amplification_ours": load.amplification("by_ours"),
            "seconds": load.seconds,
            "problems": [asdict(problem) for problem in load.problems],
            "per_rank": [
                asdict(reader) | {"writers": np.flatnonzero(reads[reader.rank]).tolist()}
                for reader in load.readers
            ],
        }
    return out


def as_html(save: SavePlan, load: LoadPlan | None = None) -> str:
    """A page of its own: bars of bytes a rank, and a map of who reads whose file."""
    parts = [
        f"<h1>Checkpoint plan: {html.escape(save.degrees.label)}</h1>",
        picture([w.stored for w in save.writers], "bytes written, by rank"),
        f"<pre>{html.escape(save_text(save))}</pre>",
    ]
    if load is not None:
        parts += [
            f"<h2>Loaded under {html.escape(load.degrees.label)}</h2>",
            picture([r.needed for r in load.readers], "bytes needed, by rank"),
            read_map(load),
            f"<pre>{html.escape(load_text(load))}</pre>",
        ]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Checkpoint plan</title>'
        "<style>body{font:14px sans-serif;margin:2em}svg{display:block;margin:1em 0}"
        "rect{fill:#36c}rect.o{fill:none;stroke:#999}</style>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def picture(numbers: Sequence[int], title: str) -> str:
    """Bars, one a rank; SVG for any report."""
    top = max(numbers) or 1
    width = max(2.0, min(24.0, 960 / len(numbers)))
    bars = "".join(
        f'<rect x="{n * width:.1f}" y="{100 - 100 * value / top:.1f}" width="{width * 0.9:.1f}" '
        f'height="{100 * value / top:.1f}"><title>rank {n}: {size(value)}</title></rect>'
        for n, value in enumerate(numbers)
    )
    ranks = "".join(
        f'<text x="{(n + 0.45) * width:.1f}" y="113" font-size="11" text-anchor="middle">{n}</text>'
        for n in range(len(numbers) if width > 16 else 0)
    )
    return (
        f'<svg width="{max(_CAPTION, len(numbers) * width):.0f}" height="134" role="img" '
        f'aria-label="{html.escape(title)}">{bars}{ranks}<text x="0" y="129" font-size="12">'
        f"{html.escape(title)}, at most {size(top)}</text></svg>"
    )


def read_map(load: LoadPlan) -> str:
    """A square for every pair (reader down, writer across) in which bytes flow, binned if large."""
    reads = load.reads.reads_from
    rows, columns = (min(_CELLS, n) for n in reads.shape)
    down = np.arange(reads.shape[0]) * rows // reads.shape[0]
    across = np.arange(reads.shape[1]) * columns // reads.shape[1]
    cells = {(int(down[r]), int(across[w])) for r, w in zip(*np.nonzero(reads), strict=True)}
    step = max(6, min(20, 100 // max(rows, columns)))
    squares = "".join(
        f'<rect x="{column * step}" y="{row * step}" width="{step - 1}" height="{step - 1}"/>'
        for row, column in sorted(cells)
    )
    return (
        f'<svg width="{max(_CAPTION, columns * step + 2)}" height="{rows * step + 22}" role="img" '
        f'aria-label="which rank reads whose file"><rect class="o" x="0" y="0" '
        f'width="{columns * step}" height="{rows * step}"/>{squares}<text x="0" '
        f'y="{rows * step + 16}" font-size="12">readers down, writers\' files across</text></svg>'
    )


def size(count: int) -> str:
    """Bytes in decimal units, three digits."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    raise AssertionError("the last unit takes everything")


def _ranks(count: int) -> str:
    return f"{count:,} rank" + ("s" if count != 1 else "")


def _coverage(plan: SavePlan) -> str:
    if any(problem.code == "plan.coverage" for problem in plan.problems):
        return "  coverage  NOT complete, see below"
    return f"  coverage  every element of {plan.tensors:,} tensors is written exactly once"


def _grouped(rows: Sequence[Any], text: Any, every_rank: bool) -> list[str]:
    """Rows with their ranks; neighbours that are alike share a line."""
    runs: list[tuple[int, int, Any]] = []
    for rank, row in enumerate(rows):
        if runs and not every_rank and runs[-1][2] == row:
            runs[-1] = (runs[-1][0], rank, row)
        else:
            runs.append((rank, rank, row))
    shown = runs if every_rank else runs[:_SHOWN]
    lines = [
        f"  {f'{first}..{last}' if last > first else first!s:<14}{text(row)}"
        for first, last, row in shown
    ]
    if len(runs) > len(shown):
        lines.append(f"  … and {len(runs) - len(shown)} more lines (--every-rank shows all)")
    return lines


def _faults(problems: Sequence[Problem]) -> list[str]:
    return ["", *(f"FAIL {problem}" for problem in problems)] if problems else []
