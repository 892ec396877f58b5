"""The plan's numbers against what eight real ranks write, file by file and byte by byte."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.degrees import CASES, Case
from conformance.jobs import Job, small_table
from conformance.ranks import RankPool
from torchtitan_ckpt.formats import dcp
from torchtitan_ckpt.manifest import TensorEntry
from torchtitan_ckpt.plan import plan_load, plan_save
from torchtitan_ckpt.plan.items import object_item_bytes
from torchtitan_ckpt.plan.state import ADAMW_GROUP, full_entries


def save_and_list(case: Case, folder: str) -> list[tuple[str, Any]]:
    """Save with the manager; the rank's keys in order, objects with their stored size."""
    job = Job.start(small_table(), case.degrees, chunks=case.chunks)
    job.train(1)
    manager = job.manager(folder, interval=1)
    flat = manager._job.collect()
    manager.save(1)
    manager.close()
    return [
        (key, 0 if isinstance(value, torch.Tensor) else object_item_bytes(value))
        for key, value in flat.items()
    ]


def names_in_metadata(path: Path) -> int:
    """What the folder's own name takes in `.metadata`: each part is a text of its own."""
    return sum(len(part) + 3 for part in path.parts[1:])


BY_DCP = ("fsdp8", "fsdp8 x ep2", "fsdp2 x tp2 x pp2")
RUNS = [(case, "repeat") for case in CASES if case.ranks == 8 or "hsdp" in case.name]
RUNS += [(case, "dcp") for case in CASES if case.name in BY_DCP]


@pytest.mark.parametrize(
    ("case", "method"), RUNS, ids=lambda value: value if isinstance(value, str) else value.name
)
def test_planned_files_are_the_real_ones(
    pool: RankPool, tmp_path: Path, case: Case, method: Any
) -> None:
    listed = pool.run(save_and_list, case.ranks, case, str(tmp_path))
    order: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for keys in listed:
        for key, size in keys:
            order.setdefault(key, len(order))
            sizes[key] = size
    native = {k: TensorEntry(k, leaf.shape, leaf.dtype) for k, leaf in small_table().items()}
    # The job does not choose `fused`, so its optimizer has none; torchtitan's always does.
    group = {name: value for name, value in ADAMW_GROUP.items() if name != "fused"}
    entries = full_entries(native, case.degrees, chunks=case.chunks, group=group)
    assert {entry.key for entry in entries} == order.keys()
    entries = [
        entry if entry.is_tensor else replace(entry, nbytes=sizes[entry.key]) for entry in entries
    ]
    entries.sort(key=lambda entry: order[entry.key])
    plan = plan_save(entries, case.degrees, method=method)
    assert not plan.problems
    folder = tmp_path / "checkpoint" / "step-1"
    real = {path.name: path.stat().st_size for path in folder.glob("*.distcp")}
    assert {f"__{w.rank}_0.distcp": w.stored for w in plan.writers if w.items} == real
    described = (folder / ".metadata").stat().st_size - names_in_metadata(folder)
    assert abs(plan.metadata - described) < 100 + described / 2000
    manifest = dcp.read_manifest(folder)
    assert plan.nbytes == manifest.nbytes
    shards = [shard for tensor in manifest.tensors.values() for shard in tensor.shards]
    # The manifest leaves out the empty items of ranks with nothing.
    planned = [box for kind in plan.written.kinds for box in kind.boxes if 0 not in box[1]]
    assert len(planned) == len(shards) + len(manifest.objects)
    assert sum(w.payload for w in plan.writers) == manifest.nbytes
    load = plan_load(plan, entries, case.degrees)
    assert not load.problems
    assert load.amplification("by_dcp") >= 1
