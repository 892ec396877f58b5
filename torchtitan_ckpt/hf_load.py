"""Loading a Hugging Face checkpoint into native tensors by plan: each rank reads its own boxes.

Where `to_hf`, a load and `from_hf` build Hugging Face tensors first, this reads for every local
shard exactly the boxes of the files that it is made of, into place. Nothing is exchanged between
ranks and no rank reads another's experts. Comparing the whole model with the file is the caller's
business; what this rank needs is compared here, before data moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from torchtitan_ckpt.adapter import MappingAdapter
from torchtitan_ckpt.errors import MismatchError, Problem, list_keys
from torchtitan_ckpt.formats import hf
from torchtitan_ckpt.formats.hf_boxes import local_boxes, local_tensor
from torchtitan_ckpt.manifest import Manifest, TensorEntry
from torchtitan_ckpt.mapping.apply import dtype_name
from torchtitan_ckpt.mapping.plan import Plan, PlanGroup, Region
from torchtitan_ckpt.mapping.rule import HF

WINDOW = 256 << 20  # bytes of one tile and its largest source box


def load_native(
    adapter: MappingAdapter,
    folder: str | Path,
    native: Mapping[str, torch.Tensor],
    *,
    dequantize: bool = False,
    manifest: Manifest | None = None,
    window: int = WINDOW,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Fill `native` tensors and DTensors in place from a folder, casting floats to their dtypes.

    Native keys that files have no name for get the constant that the table declares. `progress` is
    told the bytes read. Raises MappingError for keys that the table does not know, MismatchError
    for keys or shapes that the file does not have.
    """
    wanted = {k: TensorEntry(k, tuple(t.shape), dtype_name(t.dtype)) for k, t in native.items()}
    plan = adapter.plan_load(wanted)
    with (
        hf.open_reader(
            folder, manifest=manifest, dequantize=dequantize, dtype="float32", progress=progress
        ) as reader,
        torch.no_grad(),
    ):
        _compare(adapter, plan, reader.manifest)
        for group in plan.groups:
            for entry in group.targets:
                local = local_tensor(native[entry.key])
                for box in local_boxes(native[entry.key]):
                    at = tuple(slice(o, o + n) for o, n in zip(box.local, box.sizes, strict=True))
                    region = Region(entry.key, box.offsets, box.sizes)
                    _fill(group, entry, region, local[at], reader.read, window)


def _fill(
    group: PlanGroup,
    entry: TensorEntry,
    region: Region,
    target: torch.Tensor,
    read: Callable[[str, tuple[int, ...], tuple[int, ...]], torch.Tensor],
    window: int,
) -> None:
    if group.fill is not None:
        target.fill_(group.fill)
        return
    for tile in group.tiles_of(entry, region.offsets, region.sizes, window):
        for move in tile.moves:
            source = move.source
            move.copy(read(source.key, source.offsets, source.sizes), target, region.offsets)


def _compare(adapter: MappingAdapter, plan: Plan, manifest: Manifest) -> None:
    """Whether the file has what the plan reads; and knows no key that the table does not."""
    unknown = [k for k in manifest.tensors if adapter.mapping.index(HF).match(k) is None]
    problems = adapter.mapping.index(HF).unknown(unknown)
    missing: list[str] = []
    shapes: list[tuple[str, str]] = []
    for key, shape in _sources(plan):
        entry = manifest.tensors.get(key)
        if entry is None:
            missing.append(key)
        elif entry.shape != shape:
            shapes.append((key, f"{list(entry.shape)} in the file, {list(shape)} wanted"))
    if missing:
        problems.append(
            Problem(
                code="load.missing",
                what=f"{len(missing)} tensors are not in the checkpoint",
                where=manifest.path,
                expected=list_keys(missing),
                fix="load the model that the files belong to, or one without these layers",
            )
        )
    if shapes:
        problems.append(
            Problem(
                code="load.shape",
                what=f"{len(shapes)} tensors have another shape in the checkpoint",
                where=list_keys([key for key, _ in shapes]),
                actual=shapes[0][1],
                fix="use the configuration that the checkpoint was saved with",
            )
        )
    if problems:
        raise MismatchError(*problems)


def _sources(plan: Plan) -> Iterator[tuple[str, tuple[int, ...]]]:
    for group in plan.groups:
        if group.fill is None:
            yield from group.source_shapes()
