"""`inspect`: what does a checkpoint hold?

torchtitan-ckpt inspect outputs/x/checkpoint            # its steps
torchtitan-ckpt inspect outputs/x/checkpoint/step-500
torchtitan-ckpt inspect ./Qwen3-0.6B --tensor model.norm.weight
"""

from __future__ import annotations

import json as json_module
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from torchtitan_ckpt.errors import printable

if TYPE_CHECKING:
    from rich.table import Table
    from rich.tree import Tree

    from torchtitan_ckpt.decision import StepFolder
    from torchtitan_ckpt.inspection import Group, Inspection
    from torchtitan_ckpt.tensor_look import TensorLook


_OBJECTS = 24  # groups of objects that are listed


@dataclass(frozen=True)
class Args:
    """Options of `torchtitan-ckpt inspect`."""

    path: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
    """A step folder, a folder of steps, a folder or file of safetensors, or a .pt file."""

    tensor: str | None = None
    """Read this tensor: statistics and a corner."""

    tree: bool = False
    """Show the tensors as a tree instead of a table."""

    all: bool = False
    """One line for every tensor instead of groups."""

    files: bool = False
    """List every file, however many there are."""

    trust: bool = False
    """Unpickle whatever the file names. Never for files from strangers."""

    json: bool = False
    """Print JSON."""


def run(args: Args) -> int:
    """0 when it could be shown, 1 when it is damaged, 3 not readable or refused."""
    from torchtitan_ckpt import inspection
    from torchtitan_ckpt.errors import DamagedError
    from torchtitan_ckpt.formats import detect
    from torchtitan_ckpt.progress import waiting

    if args.tensor is not None:
        from torchtitan_ckpt.tensor_look import look_at_tensor

        look = look_at_tensor(args.path, args.tensor, trust=args.trust)
        print(json_module.dumps(_look_json(look), indent=1) if args.json else _look_text(look))
        return 0
    if detect(args.path).kind == "steps":
        return _steps(args)
    try:
        with waiting("reading the metadata"):
            found = inspection.inspect(args.path, trust=args.trust)
    except DamagedError:
        return _damaged(args)
    if args.json:
        out = asdict(found)
        if args.all:
            out["keys"] = _keys(args)
        print(json_module.dumps(out, indent=1))
        return 0
    _print(_head(found, args.files))
    if args.tree:
        _print(_tree(found))
    elif args.all:
        _print(_all(args))
    else:
        _print(_table(found))
    if found.objects:
        print(_objects(found))
    return 0


def _damaged(args: Args) -> int:
    """The findings of `verify`, whose exit code this shares; raises what cannot be read at all."""
    from torchtitan_ckpt.verify import check_structure

    problems = check_structure(args.path, trust=args.trust).problems
    if args.json:
        print(
            json_module.dumps(
                {"path": args.path, "problems": [asdict(p) for p in problems]}, indent=1
            )
        )
    else:
        for problem in problems:
            print(problem)
        print(f"damaged: {args.path}: torchtitan-ckpt verify says what else is wrong")
    return 1


def _steps(args: Args) -> int:
    from torchtitan_ckpt import survey
    from torchtitan_ckpt.decision import KIND_WORDS

    view = survey.look_at_output(args.path)
    steps: list[StepFolder] = [survey.classify(s.path, s.step) for s in view.steps]
    steps.sort(key=lambda step: -step.step)
    if args.json:
        rows = [{"step": s.step, "path": s.path, "kind": str(s.kind), "why": s.why} for s in steps]
        print(
            json_module.dumps(
                {"path": args.path, "format": None, "kind": "steps", "steps": rows,
                 "others": list(view.others)},
                indent=1,
            )
        )  # fmt: skip
        return 0
    print(f"{args.path}: {len(steps)} steps")
    for step in steps:
        print(f"  step-{step.step:<8} {KIND_WORDS[step.kind]}{f' ({step.why})' * bool(step.why)}")
    for name in view.others:
        print(f"  {name:<13} only resembles a step")
    print("name one of them to see what it holds")
    return 0


def _head(found: Inspection, every_file: bool) -> str:
    from torchtitan_ckpt.inspection import size_text

    rows = [f"{found.path}: {found.kind}"]
    rows += [f"  not {name:<8} {why}" for name, why in found.refused.items()]
    shares = ", ".join(f"{name} {size_text(n)}" for name, n in found.dtypes.items())
    rows.append(
        f"  tensors      {found.tensors}, {found.numel} elements, {size_text(found.nbytes)}"
        + (f" ({shares})" if shares else "")
    )
    for label, text in (
        ("step", found.step),
        ("states", ", ".join(found.states)),
        ("family", found.family),
        ("quantized", found.quantization),
    ):
        if text:
            rows.append(f"  {label:<12} {text}")
    rows += [f"  note         {note}" for note in found.notes]
    rows += _file_rows(found, every_file)
    return "\n".join(rows)


def _objects(found: Inspection) -> str:
    """What is no tensor, below the tensors."""
    rows = [f"objects        {sum(count for _, count in found.objects)}"] if found.objects else []
    for name, count in found.objects[:_OBJECTS]:
        rows.append(f"  {name}" + (f" ({count})" if count > 1 else ""))
    if len(found.objects) > _OBJECTS:
        rows.append(f"  … and {len(found.objects) - _OBJECTS} more groups (--json lists them)")
    return "\n".join(rows)


def _file_rows(found: Inspection, every: bool) -> list[str]:
    from torchtitan_ckpt.inspection import size_text

    data = [file for file in found.files if file.items]
    rows = []
    if len(data) > 1:
        sizes = sorted(file.data_bytes for file in data)
        rows.append(
            f"  split        {len(data)} files of {size_text(sizes[0])} to {size_text(sizes[-1])} "
            f"of data, median {size_text(int(median(sizes)))}"
        )
    shown = found.files if every or len(found.files) <= 16 else found.files[:16]
    for file in shown:
        items = f", {file.items} items" if file.items else ""
        rows.append(f"  file         {printable(file.name)}  {size_text(file.nbytes)}{items}")
    if len(shown) < len(found.files):
        rows.append(f"  files        … and {len(found.files) - len(shown)} more (--files)")
    return rows


def _cells(group: Group) -> tuple[str, ...]:
    from torchtitan_ckpt.inspection import size_text

    low, high = group.shards
    return (
        str(group.count),
        group.dtype,
        str(list(group.shape)),
        size_text(group.nbytes),
        str(low) if low == high else f"{low} to {high}",
        str(group.files),
    )


def _empty_table() -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("tensors", overflow="fold")
    for name in ("count", "dtype", "shape", "bytes", "shards", "files"):
        table.add_column(name, justify="left" if name in ("dtype", "shape") else "right")
    return table


def _table(found: Inspection) -> Table:
    from rich.text import Text

    table = _empty_table()
    for group in found.groups:
        table.add_row(Text(group.name), *map(Text, _cells(group)))
    return table


def _all(args: Args) -> Table:
    from rich.text import Text

    from torchtitan_ckpt.inspection import size_text

    table = _empty_table()
    for key, row in _keys(args).items():
        cells = ("1", row["dtype"], str(row["shape"]), size_text(row["nbytes"]), row["shards"])
        table.add_row(Text(printable(key)), *(Text(str(c)) for c in cells), str(len(row["files"])))
    return table


def _keys(args: Args) -> dict[str, dict[str, Any]]:
    from torchtitan_ckpt.formats import read_manifest

    return {
        key: {
            "shape": list(entry.shape),
            "dtype": entry.dtype,
            "nbytes": entry.nbytes,
            "shards": len(entry.shards),
            "files": sorted({shard.file for shard in entry.shards}),
        }
        for key, entry in read_manifest(args.path, trust=args.trust).tensors.items()
    }


def _tree(found: Inspection) -> Tree:
    from rich.text import Text
    from rich.tree import Tree

    root = Tree(Text("tensors"))
    nodes: dict[tuple[str, ...], Tree] = {(): root}
    for group in found.groups:
        # A range such as {0..3} is one step of the path although it has dots in it.
        path = tuple(part.replace("\0", "..") for part in group.name.replace("..", "\0").split("."))
        for depth in range(1, len(path)):
            if path[:depth] not in nodes:
                nodes[path[:depth]] = nodes[path[: depth - 1]].add(Text(path[depth - 1]))
        count, dtype, shape, size, *_ = _cells(group)
        times = f" x {count}" if group.count > 1 else ""
        nodes[path[:-1]].add(Text(f"{path[-1]}  {dtype} {shape}{times}  {size}"))
    return root


def _print(thing: object) -> None:
    """Through rich only where it draws: text passes unwrapped and as it is."""
    if isinstance(thing, str):
        print(thing)
        return
    import sys

    from rich.console import Console

    width = None if sys.stdout.isatty() else 200
    Console(width=width, highlight=False).print(thing)


def _look_json(look: TensorLook) -> dict[str, Any]:
    stats = look.values.stats
    assert stats is not None

    def plain(value: float) -> float | None:
        return value if value - value == 0 else None

    return {
        "key": look.key,
        "shape": list(look.shape),
        "dtype": look.dtype,
        "nbytes": look.nbytes,
        "shards": list(look.shards),
        "note": look.note,
        "nan": look.values.nans,
        "inf": look.values.infs,
        "first_bad": None if look.first_bad is None else list(look.first_bad),
        "constant": look.values.constant,
        "zeros": stats.zeros,
        "denormals": stats.denormals,
        "min": plain(stats.smallest),
        "max": plain(stats.largest),
        "mean": plain(stats.mean),
        "std": plain(stats.std),
        "exponents": {str(e): n for e, n in sorted(stats.exponents.items())},
        "corner": [[plain(x) for x in row] for row in look.corner],
    }


def _look_text(look: TensorLook) -> str:
    from torchtitan_ckpt.inspection import size_text

    stats, values = look.values.stats, look.values
    assert stats is not None
    rows = [f"{printable(look.key)}: {look.dtype} {list(look.shape)}, {size_text(look.nbytes)}"]
    if look.note:
        rows.append(f"  note       {look.note}")
    rows += [f"  shard      {shard}" for shard in look.shards[:16]]
    if len(look.shards) > 16:
        rows.append(f"  shards     … and {len(look.shards) - 16} more")
    finite = " of finite elements" if values.nans or values.infs else ""
    rows.append(f"  values     min {stats.smallest:g}, max {stats.largest:g}{finite}")
    rows.append(f"             mean {stats.mean:g}, std {stats.std:g}")
    rows.append(
        f"  counts     {stats.zeros} zeros, {stats.denormals} denormals, {values.nans} NaN, "
        f"{values.infs} Inf"
    )
    if look.first_bad is not None:
        rows.append(f"             the first NaN or Inf at {list(look.first_bad)}")
    if values.constant:
        rows.append(f"  constant   every element is {values.value()}")
    if look.corner:
        rows.append("  corner")
        rows += ["    " + " ".join(f"{x:>12.6g}" for x in row) for row in look.corner]
    return "\n".join(rows)
