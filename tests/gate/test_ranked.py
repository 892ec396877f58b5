"""Adapters on several ranks: the broken are caught, and what right ones do is not cried about."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from conformance import Subject, check, report_html, shares
from conformance.adapter_lab import DEGREES
from conformance.checks._conversions import _telling
from conformance.contract import BY_ID
from conformance.engine import Bench, one_thread
from conformance.lab import Lab
from conformance.manager_lab import case_of, why_no_rank_starts
from conformance.ranks import shared_pool
from conformance.spread import Spread
from conformance.subjects import families, resolve
from conformance.subjects.configs import CONFIGS
from tests.gate.detection import ON_RANKS, named
from tests.specimens.ranked import SPECIMENS, Edited, subject
from tests.specimens.specimen import Specimen
from torchtitan_ckpt.placement import layout_of, split_of

CHECKS = [clause.id for clause in ON_RANKS]


@pytest.mark.parametrize("specimen", SPECIMENS, ids=lambda s: s.name)
def test_the_named_check_catches_the_specimen_and_names_its_key(specimen: Specimen) -> None:
    bench = Bench(specimen.subject())
    with one_thread():
        cell = bench.run(BY_ID[specimen.check])
    assert cell.verdict == "fail", f"{cell.verdict}: {cell.reason}"
    assert named(specimen, cell), [f.keys for f in cell.findings]
    for finding in cell.findings:
        assert "degrees=" in finding.again
        for part in ("what", "keys", "expected", "actual", "cause", "remedy", "coordinate"):
            assert getattr(finding, part), (part, finding)


def test_each_check_has_a_specimen() -> None:
    assert {s.check for s in SPECIMENS} == set(CHECKS)


class ComesBackWhole(Edited):
    """From each shard the whole, on every rank: memory, and nothing wrong."""

    def imported(self, value: DTensor) -> Any:
        return value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)


class ComesBackPlain(Edited):
    def exported(self, value: DTensor) -> Any:
        return value.full_tensor()


class WritesItsOwnExperts(Edited):
    """As torchtitan's: a rank's dict has the experts that it holds, as plain tensors."""

    config_of = CONFIGS["qwen3_moe"]
    pattern = "inner_experts"
    lay: dict[str, DTensor] = {}  # noqa: RUF012

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        self.lay = {k: v for k, v in state_dict.items() if self.meant(k, v)}
        if not self.lay:
            return super().to_hf(state_dict)
        out = super().to_hf({k: v for k, v in state_dict.items() if k not in self.lay})
        whole = self.mapping.to_hf({k: v.full_tensor() for k, v in self.lay.items()})
        return out | {k: v for k, v in whole.items() if int(k.split(".")[5]) in self.mine()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        if not self.lay:
            return super().from_hf(hf_state_dict)
        other = {k: v for k, v in hf_state_dict.items() if ".mlp.experts." not in k}
        names = {"gate": "w1_EFD", "up": "w3_EFD", "down": "w2_EDF"}
        back = super().from_hf(other)
        for key, native in self.lay.items():
            prefix = f"model.{key.partition('.moe.')[0]}.mlp.experts"
            kind = next(hf for hf, name in names.items() if key.endswith(name))
            part = [hf_state_dict[f"{prefix}.{n}.{kind}_proj.weight"] for n in self.mine()]
            placed = native.device_mesh, native.placements
            back[key] = DTensor.from_local(torch.stack(part), *placed)
        return back

    def mine(self) -> range:
        mesh = next(iter(self.lay.values())).device_mesh
        each = 12 // mesh.size()
        return range(each * mesh.get_local_rank(), each * (mesh.get_local_rank() + 1))


@pytest.mark.parametrize(
    ("adapter", "degrees", "placed"),
    [
        (ComesBackWhole, "fsdp2 x tp2", "pass"),
        (ComesBackPlain, "fsdp4", "n/a"),
        (WritesItsOwnExperts, "fsdp2", "pass"),
    ],
    ids=["whole", "plain", "own-experts"],
)
def test_what_right_adapters_do_on_ranks_passes(
    adapter: type[Edited], degrees: str, placed: str
) -> None:
    report = check(subject("habit", adapter, degrees), checks=CHECKS)
    assert report.ok, report.text()
    assert [c.verdict for c in report.cells] == ["pass", "pass", placed]
    assert ("whole that the model shards" in report.text()) is (adapter is ComesBackWhole)


def test_our_own_adapter_converts_under_every_split() -> None:
    report = check("qwen3_moe", checks=CHECKS)
    assert [c.verdict for c in report.cells] == ["pass"] * 3, report.text()
    (picture,) = {one for c in report.cells for one in c.pictures}
    assert all(c.pictures for c in report.cells)
    assert [row.split for row in picture.rows] == [case_of(one).name for one in DEGREES]
    for row in picture.rows:
        (model,), (files,), (back,) = row.stages
        assert _boxes(model) == _placed(STACK, model.shape, row.split), row.split
        assert back == model
        assert len(files.keys) == model.shape[0] == 12
        assert files.shape == model.shape[1:]
        assert sum(math.prod(part.size) for part in files.parts) == math.prod(files.shape)
    page = report_html.render(report)
    assert page.count("<figure") == 1
    assert len(page) < 1_000_000


STACK = "layers.1.moe.routed_experts.inner_experts.w1_EFD"


def _boxes(held: Spread) -> dict[int, Any]:
    return {rank: (part.start, part.size) for part in held.parts for rank in part.ranks}


def _placed(key: str, shape: tuple[int, ...], split: str) -> dict[int, Any]:
    """Which box each rank holds, by the rules of placement alone."""
    degrees = case_of(split).degrees
    layout = layout_of(split_of(key), shape, degrees)
    ranks = range(degrees.world_size)
    return {rank: layout.box(shape, degrees.coordinate(rank)) for rank in ranks}


def _shown(adapter: type[Edited], degrees: str) -> tuple[tuple[Spread, ...], ...]:
    """What the ranks held at each stage of `reshard.convert`."""
    (cell,) = check(subject("habit", adapter, degrees), checks=["reshard.convert"]).cells
    return cell.pictures[0].rows[0].stages


def test_a_picture_says_what_is_gathered_and_what_is_on_some_ranks_only() -> None:
    (model,), (files,), (back,) = _shown(ComesBackPlain, "fsdp4")
    assert len(model.parts) == 4
    assert files.words == back.words == shares.PLAIN
    assert [part.ranks for part in files.parts] == [(0, 1, 2, 3)]
    _, (first, second), _ = _shown(WritesItsOwnExperts, "fsdp2")
    assert [key.split(".")[5] for key in first.keys] == list(map(str, range(6)))
    assert [part.ranks for held in (first, second) for part in held.parts] == [(0,), (1,)]


def test_a_picture_is_of_the_tensor_that_is_found() -> None:
    found = {s.name: s for s in SPECIMENS}
    for name, key in (("replicas-joined", "wo.weight"), ("views-shards", "qkv_linear.wk.weight")):
        cell = Bench(found[name].subject()).run(BY_ID[found[name].check])
        (picture,) = cell.pictures
        assert picture.title.startswith(f"layers.0.attention.{key}"), picture.title
    (raised,) = picture.rows[0].stages[1]
    assert (raised.parts, raised.words) == ((), "not told: the adapter raised")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        pytest.param(
            "titan:gpt_oss/debugmodel",  # which drops its experts on export
            "layers.0.attention.qkv_linear.wq.weight",
            marks=pytest.mark.needs_titan,
        ),
        ("llama3", "layers.0.attention.qkv_linear.wq.weight"),
        ("gpt_oss", "layers.0.moe.routed_experts.inner_experts.mlp1_weight_EGD"),
    ],
)
def test_without_findings_a_picture_is_of_experts_or_of_a_matrix(name: str, key: str) -> None:
    """Of one that `to_hf` makes something of."""
    if name.startswith("titan:"):
        pytest.importorskip("torchtitan", reason="wants the extra 'titan'")
    assert _telling(Lab(resolve(name), seed=0)) == key


def _strided() -> dict[str, shares.Share]:
    """A strided shard without the axis that it is strided over, and a sum that nobody made."""
    mesh = init_device_mesh("cpu", (2, 2))
    strided = [_StridedShard(0, split_factor=2), Replicate()]
    value = distribute_tensor(torch.zeros(10, 3), mesh, strided, src_data_rank=None)
    partial = DTensor.from_local(torch.zeros(2, 3), mesh, [Partial(), Replicate()])
    uneven = distribute_tensor(torch.zeros(3), mesh, [Shard(0), Shard(0)], src_data_rank=None)
    return shares.shares({"value": value, "partial": partial, "uneven": uneven, "none": 3})


def test_a_share_is_what_torch_gives_even_where_it_is_in_pieces() -> None:
    ranks = shared_pool().run(_strided, 4)
    assert [set(told) for told in ranks] == [{"value", "partial", "uneven"}] * 4
    (value,) = shares.together({"value": [told["value"] for told in ranks]})
    assert {(part.start[0], part.size[0]): part.ranks for part in value.parts} == {
        (0, 3): (0, 1),
        (5, 3): (0, 1),
        (3, 2): (2, 3),
        (8, 2): (2, 3),
    }
    (uneven,) = shares.together({"uneven": [told["uneven"] for told in ranks]})
    assert [part.ranks for part in uneven.parts if not all(part.size)] == [(3,)]
    assert {told["partial"].words for told in ranks} == {shares.PARTIAL}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_converts_under_every_split(name: str) -> None:
    report = check(name, checks=CHECKS)
    assert [c.verdict for c in report.cells] == ["pass"] * 3, report.text()


def _made(adapter: Callable[..., Any], **more: Any) -> Subject:
    made = families.of_config("mine", CONFIGS["llama3"])
    return Subject("mine", adapter=adapter, native=made.native, **more)


def test_what_ranks_cannot_import_is_not_applicable_with_the_way_out() -> None:
    report = check(_made(lambda: Edited()), checks=CHECKS)
    assert {c.verdict for c in report.cells} == {"n/a"}
    assert "at the top of a module" in report.cells[0].reason


def test_a_module_that_only_this_process_has_is_told_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = ModuleType("only_here")
    here.Mine = type("Mine", (Edited,), {"__module__": "only_here"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "only_here", here)
    report = check(_made(here.Mine, degrees=("fsdp2",)), checks=["reshard.convert"])
    assert report.cells[0].verdict == "n/a"
    assert "No module named 'only_here'" in report.cells[0].reason


def test_splits_of_pipelines_only_are_no_splits_of_tensors() -> None:
    report = check(_made(Edited, degrees=("pp2",)), checks=CHECKS)
    assert {c.reason for c in report.cells} == {"the subject's degrees split no tensors"}


def test_a_script_without_a_guard_is_not_run_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    script = tmp_path / "mine.py"
    script.write_text("check(mine)\n")
    main = SimpleNamespace(__file__=str(script), __spec__=None)
    monkeypatch.setattr("sys.modules", {"__main__": main})
    assert "would run the main script again" in why_no_rank_starts()
    script.write_text('if __name__ == "__main__":\n    check(mine)\n')
    assert why_no_rank_starts() == ""
    main.__spec__ = ModuleSpec("pkg.__main__", None)
    script.write_text("check(mine)\n")
    assert why_no_rank_starts() == ""


@pytest.mark.parametrize("asked", ["reshard.shapes", "optimizer.none"])
def test_a_program_on_stdin_is_told_that_ranks_cannot_start(asked: str) -> None:
    """Multiprocessing would look for a file of the name <stdin>, in every rank."""
    subject = "ADAPTER" if asked == "reshard.shapes" else "MANAGER"
    program = (
        "from conformance import Subject, check\n"
        "from tests.specimens.right import Right, native\n"
        "from torchtitan_ckpt import CheckpointManager\n"
        "ADAPTER = Subject('one', Right, native())\n"
        "MANAGER = Subject('two', manager=CheckpointManager)\n"
        f"(cell,) = check({subject}, checks=[{asked!r}]).cells\n"
        "print(cell.verdict, cell.reason)\n"
    )
    done = subprocess.run(
        [sys.executable, "-"],
        input=program,
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.startswith("n/a rank processes import the main script")
    assert "<stdin> is no file" in done.stdout


class RaisesOnOneRank(Edited):
    """One rank raises, the others wait for it in a collective."""

    pattern = "lm_head"

    def given(self, value: DTensor) -> Any:
        if value.device_mesh.get_local_rank() == 1:
            raise ValueError("this rank holds the rest")
        return value.full_tensor()


@pytest.mark.slow
def test_one_that_raises_alone_does_not_hang_the_gate() -> None:
    report = check(subject("alone", RaisesOnOneRank, "fsdp2", "fsdp4"), checks=CHECKS)
    (finding,) = report.findings
    assert finding.coordinate == "fsdp2"
    assert "this rank holds the rest" in finding.actual
    assert finding.actual.endswith("on rank 1 and not on all; of 2 splits 1 not tried")
    assert [c.verdict for c in report.cells] == ["n/a", "fail", "n/a"]
