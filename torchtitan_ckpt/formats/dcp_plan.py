"""What a load from a DCP reads: targets compared with the manifest, then cut into reads.

All differences are found before any byte is read. Each target's own boxes are intersected with the
shards of the file; no rank needs to hear from another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchtitan_ckpt.errors import MismatchError, Problem, list_keys, nearest
from torchtitan_ckpt.formats.hf_boxes import intersect, local_boxes, local_tensor
from torchtitan_ckpt.manifest import Manifest, Shard, TensorEntry

# Floats that hold every value of the named ones.
_WIDER = {
    "float16": {"float32", "float64"},
    "bfloat16": {"float32", "float64"},
    "float32": {"float64"},
}


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One shard, or a box of it, and the part of a local tensor that takes it.

    `offsets` and `sizes` are the box inside the shard. `target` has the shape `sizes`, is detached,
    and shares the memory of what the caller handed in.
    """

    key: str
    dtype: str
    shard: Shard
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    target: torch.Tensor

    @property
    def is_whole(self) -> bool:
        return self.sizes == self.shard.sizes


def compare(state: Mapping[str, Any], manifest: Manifest, *, widen: bool) -> None:
    """Raise one `MismatchError` with everything in `state` that the manifest cannot serve.

    What the file has and `state` lacks is no difference here: a pipeline stage asks for its part.
    A target that is None asks for nothing, and stays None when the file has nothing under its key.
    """
    faults: dict[tuple[str, str], list[tuple[str, str, str]]] = {}

    def fault(code: str, what: str, key: str, expected: str = "", actual: str = "") -> None:
        faults.setdefault((code, what), []).append((key, expected, actual))

    for key, target in state.items():
        entry = manifest.tensors.get(key)
        if isinstance(target, torch.Tensor):
            if entry is None:
                if key in manifest.objects:
                    fault("dcp.kind", "not tensors in the checkpoint", key, "a tensor", "an object")
                else:
                    fault("dcp.missing", "not in the checkpoint", key)
                continue
            if tuple(target.shape) != entry.shape:
                fault(
                    "dcp.shape",
                    "of another shape",
                    key,
                    f"{list(target.shape)} (target)",
                    f"{list(entry.shape)} (checkpoint)",
                )
            dtype = str(target.dtype)[6:]
            if dtype != entry.dtype and not (widen and dtype in _WIDER.get(entry.dtype, ())):
                fault(
                    "dcp.dtype",
                    "of another dtype",
                    key,
                    f"{dtype} (target)",
                    f"{entry.dtype} (checkpoint)",
                )
            problem = _unusable(target)
            if problem:
                fault("dcp.target", problem, key)
        elif entry is not None:
            fault(
                "dcp.kind", "tensors in the checkpoint", key, _kind(target), "a tensor of the file"
            )
        elif key not in manifest.objects and target is not None:
            fault("dcp.missing", "not in the checkpoint", key)
    if faults:
        raise MismatchError(*(_problem(*head, rows, manifest) for head, rows in faults.items()))


def _kind(target: Any) -> str:
    return "None" if target is None else f"a value of type {type(target).__name__}"


def _unusable(target: torch.Tensor) -> str:
    if target.layout is not torch.strided:
        return f"targets with the layout {str(target.layout).removeprefix('torch.')}"
    local = target.to_local() if isinstance(target, DTensor) else target
    if local.is_conj() or local.is_neg():
        return "targets that are lazy views (conjugate or negative)"
    if local.device.type == "meta":
        return "targets on the meta device, which have no memory"
    if local.numel() and local.untyped_storage().nbytes() == 0:
        return "targets whose storage has been emptied (swapped out, or freed by FSDP)"
    return ""


def _problem(code: str, what: str, rows: list[tuple[str, str, str]], manifest: Manifest) -> Problem:
    keys = [key for key, _, _ in rows]
    cause = fix = ""
    if code == "dcp.missing":
        nones = set(manifest.info.get("none_keys", "").split("\n"))
        near = nearest(keys[0], manifest.keys)
        if nones.intersection(keys):
            cause = "the file holds a pickled None for some of them, which counts as absent"
        elif near:
            cause = f"renamed? The checkpoint has {near}"
        elif any(name.startswith(f"{keys[0]}.") for name in manifest.keys):
            cause = f"the checkpoint has it flattened, as {keys[0]}.*"
    elif code == "dcp.dtype":
        fix = "load into the stored dtype, or allow widening of floats (widen=True)"
    return Problem(
        code=code,
        what=f"{what}: {list_keys(keys)}",
        where=manifest.path,
        expected=rows[0][1],
        actual=rows[0][2],
        cause=cause,
        fix=fix,
    )


def plan(state: Mapping[str, Any], manifest: Manifest) -> Iterator[Job]:
    """The reads for every tensor of `state`."""
    problems = []
    for key, target in state.items():
        if not isinstance(target, torch.Tensor):
            continue
        entry = manifest.tensors[key]
        if not isinstance(target, DTensor) and len(entry.shards) == 1:
            shard = entry.shards[0]
            yield Job(key, entry.dtype, shard, shard.offsets, shard.sizes, target.detach())
            continue
        try:
            yield from _parts(key, entry, target)
        except ValueError as error:
            problems.append(
                Problem(
                    code="dcp.placement", what=str(error), where=key, cause="see its placements"
                )
            )
    if problems:
        raise MismatchError(*problems)


def _parts(key: str, entry: TensorEntry, target: torch.Tensor) -> Iterator[Job]:
    local = local_tensor(target)
    for box in local_boxes(target):
        for shard in entry.shards:
            common = intersect((box.offsets, box.sizes), (shard.offsets, shard.sizes))
            if common is None:
                continue
            offsets, sizes = common
            part = local
            for d, n in enumerate(sizes):
                start = offsets[d] - box.offsets[d] + box.local[d]
                if n != part.shape[d]:
                    part = part.narrow(d, start, n)
            inside = tuple(o - s for o, s in zip(offsets, shard.offsets, strict=True))
            yield Job(key, entry.dtype, shard, inside, sizes, part)
