"""Training with FSDP2 on devices: saved, resumed, and equal to the run that was never stopped."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path
from typing import Any

import npu_job
import pytest
import torch
import torch.distributed as dist
from npu_job import moments

from conformance import swap
from conformance.ranks import RankPool
from torchtitan_ckpt import device
from torchtitan_ckpt.errors import CheckpointError
from torchtitan_ckpt.state.tensors import local_of

NPU_ONLY = pytest.mark.skipif(
    device.why_not(device.DeviceKind.NPU) is not None, reason="swapped memory is torch_npu's"
)
KINDS = [
    *("for-loop", "foreach", "fused", "swap"),
    pytest.param("mapped", marks=NPU_ONLY),
    pytest.param("mapped, speaking", marks=NPU_ONLY),
]
MODES = ["disabled", "async", "async_with_pinned_mem"]

Bits = dict[str, Any]


def _uninterrupted(folder: str, kind: str, options: dict[str, Any]) -> Bits:
    job = npu_job.start(folder, kind, **options)
    job.train(5)
    job.manager.close()
    return job.bits()


def _resumed(folder: str, kind: str, options: dict[str, Any], step: int = 4) -> Bits:
    """Another seed, so that nothing of the first run is there but what the checkpoint brings."""
    job = npu_job.start(folder, kind, seed=99, **options)
    assert job.manager.load(), "nothing was loaded"
    assert job.steps.position == step
    job.train(5)
    job.manager.close()
    return job.bits()


def differences(first: list[Bits], second: list[Bits]) -> list[str]:
    wrong = []
    for rank, (a, b) in enumerate(zip(first, second, strict=True)):
        assert len(a) > 30, "the comparison is empty"
        wrong += [f"rank {rank}: {key}" for key in a.keys() | b.keys() if a.get(key) != b.get(key)]
    return wrong


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_equals_the_uninterrupted_one(ranks: RankPool, tmp_path: Path, kind: str):
    first = ranks.run(_uninterrupted, 2, str(tmp_path), kind, {}, timeout=120)
    second = ranks.run(_resumed, 2, str(tmp_path), kind, {}, timeout=120)
    assert differences(first, second) == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["fused", "swap"])
def test_all_modes_in_lazy_mode(lazy_ranks: RankPool, tmp_path: Path, kind: str, mode: str):
    options = {"async_mode": mode}
    first = lazy_ranks.run(_uninterrupted, 2, str(tmp_path), kind, options, timeout=120)
    second = lazy_ranks.run(_resumed, 2, str(tmp_path), kind, options, timeout=120)
    assert differences(first, second) == []


def test_lazy_mode_changes_no_bit(ranks: RankPool, lazy_ranks: RankPool, tmp_path: Path):
    """Two lazy runs could be wrong alike; this one is compared with an eager run."""
    eager = ranks.run(_uninterrupted, 2, str(tmp_path / "eager"), "swap", {}, timeout=120)
    lazy = lazy_ranks.run(_uninterrupted, 2, str(tmp_path / "lazy"), "swap", {}, timeout=120)
    assert differences(eager, lazy) == []


@NPU_ONLY
def test_mapped_moments_in_lazy_mode(lazy_ranks: RankPool, tmp_path: Path):
    options = {"async_mode": "async_with_pinned_mem"}
    first = lazy_ranks.run(_uninterrupted, 2, str(tmp_path), "mapped", options, timeout=120)
    second = lazy_ranks.run(_resumed, 2, str(tmp_path), "mapped", options, timeout=120)
    assert differences(first, second) == []


def _whole(folder: str, kind: str, load: bool) -> dict[str, torch.Tensor]:
    """Every parameter and moment, whole, as the ranks hold them together."""
    job = npu_job.start(folder, kind, seed=99 if load else 0)
    if load:
        assert job.manager.load()
        assert job.steps.position == 4
    else:
        job.train(4)
    if isinstance(job.optimizer, swap.SwapAdamW):
        job.optimizer.finish()
    out = {}
    for name, parameter in job.model.named_parameters():
        out[name] = parameter.full_tensor().detach().cpu()
        for key, value in moments(job.optimizer, parameter).items():
            # Host copies of a swapping optimizer are plain shards: put together by hand.
            shards: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(shards, local_of(value).cpu())
            out[f"{name}.{key}"] = torch.cat(shards)
    job.manager.close()
    return out


@pytest.mark.parametrize("kind", ["fused", "swap"])
def test_four_ranks_to_two_and_back(ranks: RankPool, tmp_path: Path, kind: str):
    saved = ranks.run(_whole, 4, str(tmp_path), kind, False, timeout=120)[0]
    assert len(saved) == 36
    for world in (2, 4):
        for found in ranks.run(_whole, world, str(tmp_path), kind, True, timeout=120):
            assert found.keys() == saved.keys()
            assert [k for k in saved if not torch.equal(found[k], saved[k])] == []


# ------------------------------------------------------------------ swapping optimizers


def _silent_swap(folder: str) -> str:
    """A swapping optimizer that does not say where its moments are: refused before any write."""
    job = npu_job.start(folder, "swap, silent")
    try:
        job.train(2)
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_a_swapping_optimizer_that_says_nothing_is_refused_before_anything_is_written(
    ranks: RankPool, tmp_path: Path
):
    for text in ranks.run(_silent_swap, 2, str(tmp_path)):
        assert "optimizer.emptied" in text, text
        assert "layers." in text
        assert "CheckpointableState" in text
    assert not [p for p in tmp_path.rglob("*") if p.suffix == ".distcp" or p.name == ".metadata"]


def _stays_swapped(folder: str) -> tuple[bool, bool]:
    """Whether the moments are off the device after training and, again, after a load."""
    job = npu_job.start(folder, "swap")
    job.train(2)
    emptied = _moments_are_empty(job)
    job.manager.close()
    again = npu_job.start(folder, "swap", seed=99)
    assert again.manager.load()
    return emptied, _moments_are_empty(again)


def _moments_are_empty(job: npu_job.Job) -> bool:
    states = [job.optimizer.state[p] for p in job.model.parameters()]
    storages = [local_of(s[k]).untyped_storage() for s in states for k in ("exp_avg", "exp_avg_sq")]
    return len(storages) == 24 and all(storage.nbytes() == 0 for storage in storages)


def test_swapped_moments_stay_off_the_device(ranks: RankPool, tmp_path: Path):
    assert ranks.run(_stays_swapped, 2, str(tmp_path)) == [(True, True)] * 2


def _mapped_after_a_load(folder: str, kind: str) -> tuple[int, int]:
    """Device memory of a job with mapped moments: after training, and after a load elsewhere."""
    found = device.current()
    taken = []
    for load in (False, True):
        job = npu_job.start(folder, kind, width=300, seed=99 if load else 0)
        if load:
            assert job.manager.load()
        else:
            job.train(2)
        found.synchronize()
        taken.append(found.memory().allocated)
        job.manager.close()
        del job
        gc.collect()
    return taken[0], taken[1]


@NPU_ONLY
def test_mapped_moments_stay_off_the_device_if_the_optimizer_says_where_they_belong(
    ranks: RankPool, tmp_path: Path
):
    for trained, loaded in ranks.run(_mapped_after_a_load, 2, str(tmp_path), "mapped, speaking"):
        assert loaded < 1.2 * trained


@NPU_ONLY
def test_mapped_moments_of_an_optimizer_that_says_nothing_come_back_to_the_device(
    ranks: RankPool, tmp_path: Path
):
    """The values are right; the memory that swapping saves is lost. docs/ascend.md says so."""
    for trained, loaded in ranks.run(_mapped_after_a_load, 2, str(tmp_path), "mapped"):
        assert loaded > 2 * trained


# ------------------------------------------------------------------ faults


def _fault_while_saving(folder: str, call: str, code: int, mode: str) -> tuple[str, list[str]]:
    from conformance.ascend_sim import probe

    job = npu_job.start(folder, "fused", interval=100, async_mode=mode)
    job.train(2)
    before = job.bits()
    text = "saved"
    job.manager.config = job.manager.Config(
        enable=True, interval=1, sync_files=False, async_mode=mode
    )
    dist.barrier()
    try:
        if dist.get_rank() == 1:
            with probe.fault(call, 3, code):
                job.manager.save(3)
                job.manager.maybe_wait_for_saving()
        else:
            job.manager.save(3)
            job.manager.maybe_wait_for_saving()
    except CheckpointError as error:
        text = str(error)
    after = job.bits()
    return text, [key for key in before if before[key] != after[key]]


@pytest.mark.simulator_only
@pytest.mark.parametrize("mode", MODES)
def test_a_device_that_fails_during_a_save(ranks: RankPool, tmp_path: Path, mode: str):
    outcome = ranks.run(_fault_while_saving, 2, str(tmp_path), "aclrtMemcpy*", 507018, mode)
    for text, changed in outcome:
        assert "507018" in text, text
        assert changed == [], "a failed save changed the job"
    assert not list(tmp_path.rglob("step-3")), "a failed save left a step"


def _fault_while_loading(folder: str, what: str) -> tuple[str, list[str]]:
    """What a load says when the device of rank 1 fails, or when every device is full."""
    from conformance.ascend_sim import probe

    job = npu_job.start(folder, "fused", seed=99, width=300)
    job.train(1)  # the optimizer has states that a failed load must not touch
    before = {k: v for k, v in job.bits().items() if ".exp_avg" in k or k in ("step", "schedule")}
    dist.barrier()
    text = "loaded"
    filler = []
    try:
        if what == "full":
            filler += _fill_up(job.where)
            job.manager.load()
        elif dist.get_rank() == 1:
            with probe.fault("aclrtMemcpy*", 30, 507018):
                job.manager.load()
        else:
            job.manager.load()
    except CheckpointError as error:
        text = f"{type(error).__name__} {error}"
    filler.clear()
    after = job.bits()
    return text, [key for key, value in before.items() if after[key] != value]


def _fill_up(where: torch.device) -> list[torch.Tensor]:
    """Take all memory of the device, also the gaps between what is in use."""
    device.current().empty_cache()
    taken = []
    for kib in (512 << 10, 64 << 10, 8 << 10, 2 << 10, 256, 16):
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                taken.append(torch.empty(kib << 10, dtype=torch.uint8, device=where))
    return taken


def _saved_wide(folder: str) -> None:
    job = npu_job.start(folder, "fused", width=300)
    job.train(2)
    job.manager.close()


@pytest.mark.simulator_only
@pytest.mark.parametrize(
    ("what", "words"),
    [("fault", "CANN error 507018"), ("full", "device.out-of-memory")],
)
def test_a_device_that_fails_during_a_load(ranks: RankPool, tmp_path: Path, what: str, words: str):
    ranks.run(_saved_wide, 2, str(tmp_path), timeout=120)
    for text, changed in ranks.run(_fault_while_loading, 2, str(tmp_path), what, timeout=120):
        assert words in text, text
        assert changed == [], "a failed load changed optimizer or progress"


# ------------------------------------------------------------------ memory


def _growth(folder: str, what: str) -> tuple[int, int]:
    """Bytes of state on this device, and by how much its peak rises during a save or a load."""
    found = device.current()
    job = npu_job.start(folder, "fused", width=300, interval=1)
    job.train(1)
    tensors = [local_of(p) for p in job.model.parameters()]
    tensors += [v for s in job.optimizer.state.values() for v in s.values()]
    state = sum(local_of(t).nbytes for t in tensors)
    found.synchronize()
    found.empty_cache()
    found.reset_peak()
    before = found.memory().allocated
    if what == "save":
        job.manager.save(2)
    else:
        assert job.manager.load()
    found.synchronize()
    return state, found.memory().peak - before


def test_a_save_needs_no_device_memory_of_its_own(ranks: RankPool, tmp_path: Path):
    for state, growth in ranks.run(_growth, 2, str(tmp_path), "save", timeout=120):
        assert state > 4 << 20
        assert growth < state // 10


def test_a_load_needs_at_most_the_optimizer_again(ranks: RankPool, tmp_path: Path):
    """They are read into tensors of their own, so that a failed load changes nothing."""
    for state, growth in ranks.run(_growth, 2, str(tmp_path), "load", timeout=120):
        assert growth < state
