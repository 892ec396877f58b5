"""Every family's own names and shapes under parallel degrees: DCP and Hugging Face, by the manager.

The modules are generated from the family's native manifest and split by torch; the files of the
export are the family's own, through its table.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from conformance.degrees import CASES, Case
from conformance.jobs import Job, comparable, truth
from conformance.ranks import RankPool
from conformance.reference import Leaf
from conformance.subjects.configs import CONFIGS
from torchtitan_ckpt import families
from torchtitan_ckpt.adapter import MappingAdapter
from torchtitan_ckpt.formats import hf

TIED = " tied"
BY_NAME = {case.name: case for case in CASES}
PAIRS = {
    "llama3": ("fsdp2 x tp2", "fsdp4"),
    "qwen3": ("tp4", "fsdp2 x tp2"),
    "qwen3 tied": ("fsdp2 x tp2", "fsdp4"),
    "qwen3_moe": ("fsdp4 x ep2", "fsdp2 x tp2"),
    "deepseek_v3": ("fsdp2 x tp2 x ep2 x etp2", "fsdp4 x ep4"),
    "deepseek_v32": ("fsdp4 x ep4", "fsdp2 x tp2 x ep2 x etp2"),
    "deepseek_v4": ("pp2 (2 chunks a rank)", "fsdp4 x ep2"),
    "gpt_oss": ("hsdp2x2 x ep2", "pp2 (2 chunks a rank)"),
}
RUNS = [
    pytest.param(name, generation, marks=[pytest.mark.slow] if number else [])
    for name in PAIRS
    for number, generation in enumerate(families.get(name.removesuffix(TIED)).generations)
]


def adapter_of(name: str, generation: str) -> MappingAdapter:
    family = name.removesuffix(TIED)
    config = {**CONFIGS[family], "tie_word_embeddings": name.endswith(TIED)}
    return MappingAdapter(config, family=family, generation=generation)


def table_of(name: str, adapter: MappingAdapter) -> dict[str, Leaf]:
    entries = adapter.native_entries("float32")
    table = {key: Leaf(entry.shape, entry.dtype) for key, entry in entries.items()}
    if name.endswith(TIED):
        (head,) = table.keys() & {"lm_head.weight", "output.weight"}
        table[head] = replace(table[head], tied="tok_embeddings.weight")
    return table


def save(case: Case, name: str, generation: str, folder: str) -> None:
    adapter = adapter_of(name, generation)
    job = Job.start(table_of(name, adapter), case.degrees, chunks=case.chunks)
    job.train()
    manager = job.manager(f"{folder}/full", interval=1)
    assert manager.save(1)
    manager.close()
    manager = job.manager(f"{folder}/last", sd_adapter=adapter, last_save_in_hf=True)
    assert manager.save(1, last_step=True)
    manager.close()


def load(case: Case, name: str, generation: str, folder: str) -> list[str]:
    adapter = adapter_of(name, generation)
    table = table_of(name, adapter)
    job = Job.start(table, case.degrees, chunks=case.chunks, empty=True)
    manager = job.manager(f"{folder}/full", load_only=True, exclude_from_loading=["dataloader"])
    assert manager.load()
    manager.close()
    expected = truth(table, 1)
    wrong = job.differences(expected, comparable(expected, job.state()))
    job.train()
    expected = truth(table, 2)
    wrong += [f"trained: {k}" for k in job.differences(expected, comparable(expected, job.state()))]

    fresh = Job.start(table, case.degrees, chunks=case.chunks, empty=True)
    manager = fresh.manager(
        f"{folder}/new",
        sd_adapter=adapter,
        load_only=True,
        initial_load_path=f"{folder}/last/checkpoint/step-1",
        initial_load_in_hf=True,
    )
    assert manager.load()
    manager.close()
    expected = truth(table, 1)
    lost = {key for item in adapter.left_out(table) for key in item.keys}
    keys = [key for key in fresh.state("model") if key not in lost]
    wrong += [f"hf: {key}" for key in fresh.differences(expected, keys)]
    return wrong


@pytest.mark.parametrize(("name", "generation"), RUNS)
def test_a_family_moves_between_splits(
    pool: RankPool, tmp_path: Path, name: str, generation: str
) -> None:
    source, target = (BY_NAME[split] for split in PAIRS[name])
    pool.run(save, source.ranks, source, name, generation, str(tmp_path))
    exported = hf.read_manifest(tmp_path / "last" / "checkpoint" / "step-1")
    assert exported.tensors.keys() == adapter_of(name, generation).hf_entries().keys()
    wrong = pool.run(load, target.ranks, target, name, generation, str(tmp_path))
    assert wrong == [[]] * target.ranks


def test_every_family_has_a_pair() -> None:
    assert {name.removesuffix(TIED) for name in PAIRS} == set(families.names())
