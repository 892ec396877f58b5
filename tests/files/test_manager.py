"""The manager on one process: what it saves, loads, keeps and refuses, on real files."""

import json
import logging
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn

from tests.files.toy import Job, Toy, bits, same_state
from torchtitan_ckpt import CheckpointManager, folder
from torchtitan_ckpt.errors import (
    CheckpointError,
    ConfigError,
    MismatchError,
    NotFoundError,
    RefusedError,
    SaveError,
)
from torchtitan_ckpt.formats import dcp

MODES = ["disabled", "async", "async_with_pinned_mem"]


def steps(path):
    return sorted(folder.list_steps(path / "checkpoint"))


def manifest(path, step):
    return dcp.read_manifest(str(path / "checkpoint" / f"step-{step}"))


@pytest.mark.parametrize("mode", MODES)
def test_two_resumes_in_a_row_equal_the_run_that_was_never_stopped(tmp_path, mode):
    with Job(tmp_path / "whole", async_mode=mode) as whole:
        expected = whole.train(6)
    with Job(tmp_path / "cut", async_mode=mode) as first:
        losses = first.train(2)
    for until, seed in ((4, 1), (6, 2)):
        with Job(tmp_path / "cut", seed=seed, async_mode=mode) as resumed:
            assert resumed.manager.load()
            losses += resumed.train(until)
    assert losses == expected
    assert same_state(whole, resumed) == []


def test_the_layout_on_disk_is_torchtitans(tmp_path):
    with Job(tmp_path) as job:
        job.train(2)
    keys = manifest(tmp_path, 2).keys
    assert {"embed.weight", "layers.11.bias", "table", "scale_bias"} <= keys
    assert {
        f"optimizer.state.layers.3.weight.{k}" for k in ("step", "exp_avg", "exp_avg_sq")
    } <= keys
    assert "optimizer.param_groups.up.weight.betas" in keys
    assert {"lr_scheduler.last_epoch", "train_state.step"} <= keys
    assert {"dataloader.dp_rank_0", "dataloader.world_size"} <= keys
    assert not any("params" in key.split(".") for key in keys)


def test_when_it_saves(tmp_path):
    with Job(tmp_path, interval=3, enable_first_step_checkpoint=True) as job:
        job.train(7, last=7)
    assert steps(tmp_path) == [1, 3, 6, 7]


def test_load_only_saves_nothing_and_leaves_no_trace(tmp_path):
    with Job(tmp_path, load_only=True, enable_first_step_checkpoint=True) as job:
        job.train(4, last=4)
        assert not job.manager.load()
    assert not (tmp_path / "checkpoint").exists()


def test_disabled_does_nothing(tmp_path):
    with Job(tmp_path, enable=False, initial_load_path="nowhere") as job:
        job.train(2, last=2)
        assert not job.manager.load()
        job.manager.maybe_wait_for_staging()
        job.manager.maybe_wait_for_saving()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_last_save_is_the_model_in_the_export_dtype(tmp_path, dtype):
    with Job(tmp_path, dtype=torch.bfloat16, export_dtype=dtype) as job:
        before = {k: bits(v) for k, v in job.model.state_dict().items()}
        job.train(1, last=1)
        live = {k: v.dtype for k, v in job.model.state_dict().items()}
    entries = manifest(tmp_path, 1).tensors
    assert entries.keys() == before.keys()
    kept = {"table": "int64", "mask": "bool", "scale_bias": "float32"}
    assert {k: e.dtype for k, e in entries.items()} == {k: kept.get(k, dtype) for k in entries}
    assert live["embed.weight"] == torch.bfloat16, "the live model was cast"


def test_a_full_last_save_can_be_resumed(tmp_path):
    with Job(tmp_path, interval=100, last_save_model_only=False, export_dtype="bfloat16") as job:
        job.train(3, last=3)
    with Job(tmp_path, seed=1) as resumed:
        assert resumed.manager.load()
        assert same_state(job, resumed) == []


def test_a_model_only_last_save_is_refused_for_resume_with_remedies_that_work(tmp_path):
    with Job(tmp_path, interval=100) as job:
        job.train(3, last=3)
    with Job(tmp_path, seed=1) as resumed, pytest.raises(RefusedError, match="nothing-resumable"):
        resumed.manager.load()
    everything = ["optimizer", "lr_scheduler", "dataloader", "train_state"]
    with Job(tmp_path, seed=1, exclude_from_loading=everything) as resumed:
        assert resumed.manager.load()
        assert bits(resumed.model.up.weight) == bits(job.model.up.weight)
    source = str(tmp_path / "checkpoint" / "step-3")
    with Job(tmp_path / "new", seed=1, initial_load_path=source) as started:
        assert started.manager.load()
        assert bits(started.model.up.weight) == bits(job.model.up.weight)
        assert started.progress.step == 0


def test_an_older_step_is_chosen_loudly(tmp_path, caplog):
    with Job(tmp_path) as job:
        job.train(5, last=5)
    (tmp_path / "checkpoint" / "step-9").mkdir()
    caplog.set_level(logging.WARNING)
    with Job(tmp_path, seed=1) as resumed:
        assert resumed.manager.load()
    assert resumed.progress.step == 4
    assert "step-9 is newer and is passed over" in caplog.text
    assert "step-5 is newer and is passed over" in caplog.text


def test_a_step_with_a_file_missing_is_passed_over(tmp_path):
    with Job(tmp_path) as job:
        job.train(4)
    os.remove(tmp_path / "checkpoint" / "step-4" / "__0_0.distcp")
    with Job(tmp_path, seed=1) as resumed:
        assert resumed.manager.load()
    assert resumed.progress.step == 2


def test_load_step_names_one(tmp_path):
    with Job(tmp_path) as job:
        job.train(4)
    with Job(tmp_path, seed=1, load_step=2) as resumed:
        assert resumed.manager.load()
    assert resumed.progress.step == 2
    with Job(tmp_path, seed=1) as resumed:
        assert resumed.manager.load(step=2)
        assert resumed.progress.step == 2
    with (
        Job(tmp_path, load_step=3) as resumed,
        pytest.raises(NotFoundError, match="step-2, step-4"),
    ):
        resumed.manager.load()


def test_relative_paths_are_legal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Job("./outputs/x") as job:
        job.train(2)
    with Job("./outputs/y", seed=1, initial_load_path="./outputs/x/checkpoint/step-2") as started:
        assert started.manager.load()
    assert bits(started.model.down.weight) == bits(job.model.down.weight)
    assert not started.optimizer.state, "only the model is wanted"


STATES = ["optimizer", "lr_scheduler", "dataloader", "train_state"]


@pytest.mark.parametrize(
    "excluded",
    [[s for i, s in enumerate(STATES) if mask >> i & 1] for mask in range(16)],
    ids=lambda names: "-".join(names) or "nothing",
)
def test_exclusion_of_every_subset(tmp_path, excluded):
    with Job(tmp_path) as job:
        job.train(2)
    if "optimizer" in excluded and "lr_scheduler" not in excluded:
        with pytest.raises(ConfigError, match="exclude-coupled"):
            Job(tmp_path, exclude_from_loading=excluded)
        return
    with Job(tmp_path / "other", seed=1) as other:
        other.train(1)
    with Job(tmp_path, seed=1, exclude_from_loading=excluded) as resumed:
        resumed.manager.enable = False
        resumed.train(1)
        resumed.manager.enable = True
        assert resumed.manager.load()
        parts = {
            "optimizer": lambda j: [
                (k, bits(v)) for s in j.optimizer.state.values() for k, v in sorted(s.items())
            ],
            "lr_scheduler": lambda j: j.scheduler.last_epoch,
            "dataloader": lambda j: j.loader.taken,
            "train_state": lambda j: j.progress.state_dict(),
        }
        for name, part in parts.items():
            source = other if name in excluded else job
            assert part(resumed) == part(source), name
        assert bits(resumed.model.up.weight) == bits(job.model.up.weight)


class Wider(Toy):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 11, bias=False)
        self.down = nn.Linear(11, 6, bias=False)
        self.extra = nn.Linear(2, 3)


def test_a_mismatch_says_everything_at_once_and_changes_nothing(tmp_path):
    with Job(tmp_path) as job:
        job.train(2)
    torch.manual_seed(5)
    with Job(tmp_path, model=Wider()) as other:
        before = {k: bits(v) for k, v in other.model.state_dict().items()}
        with pytest.raises(MismatchError) as caught:
            other.manager.load()
        text = str(caught.value)
        for word in ("extra.weight", "up.weight", "down.weight"):
            assert word in text
        assert "[10, 6]" in text or "(10, 6)" in text
        assert {k: bits(v) for k, v in other.model.state_dict().items()} == before
        assert not other.optimizer.state
        assert other.progress.step == 0


class Narrower(Toy):
    def __init__(self):
        super().__init__()
        del self.layers[11]


def test_keys_that_have_no_place_are_an_error_unless_excused(tmp_path, caplog):
    with Job(tmp_path) as job:
        job.train(2)
    source = str(tmp_path / "checkpoint" / "step-2")
    new = {"initial_load_path": source, "seed": 1}
    with (
        Job(tmp_path / "a", model=Narrower(), **new) as other,
        pytest.raises(MismatchError, match=r"layers\.11"),
    ):
        other.manager.load()
    caplog.set_level(logging.INFO)
    with Job(tmp_path / "b", model=Narrower(), excuse_mismatch=["layers.11.*"], **new) as other:
        assert other.manager.load()
    assert "layers.11" in caplog.text
    assert bits(other.model.up.weight) == bits(job.model.up.weight)


def test_widening_is_said_and_narrowing_wants_an_option(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    with Job(tmp_path / "bf16", dtype=torch.bfloat16) as small:
        small.train(2)
    source = str(tmp_path / "bf16" / "checkpoint" / "step-2")
    with Job(tmp_path / "a", seed=1, initial_load_path=source) as wide:
        assert wide.manager.load()
    assert wide.model.up.weight.dtype == torch.float32
    assert torch.equal(wide.model.up.weight, small.model.up.weight.float())
    assert "bfloat16" in caplog.text

    with Job(tmp_path / "fp32") as large:
        large.train(2)
    source = str(tmp_path / "fp32" / "checkpoint" / "step-2")
    options = {"seed": 1, "dtype": torch.bfloat16, "initial_load_path": source}
    with (
        Job(tmp_path / "b", **options) as narrow,
        pytest.raises(MismatchError, match="allow_narrowing"),
    ):
        narrow.manager.load()
    with Job(tmp_path / "c", allow_narrowing=True, **options) as narrow:
        assert narrow.manager.load()
    assert torch.equal(narrow.model.up.weight, large.model.up.weight.bfloat16())


def test_a_resume_never_casts(tmp_path):
    with Job(tmp_path, dtype=torch.bfloat16) as job:
        job.train(2)
    with Job(tmp_path, seed=1, allow_narrowing=True) as other, pytest.raises(MismatchError):
        other.manager.load()


def test_retention_keeps_the_newest_and_the_seed(tmp_path):
    with Job(tmp_path, create_seed_checkpoint=True) as seed:
        assert seed.manager.save(0, last_step=True)
    (tmp_path / "checkpoint" / "step-1.bak").mkdir()
    with Job(tmp_path, interval=1, keep_latest_k=2) as job:
        job.train(5)
    assert steps(tmp_path) == [0, 4, 5]
    assert (tmp_path / "checkpoint" / "step-1.bak").exists()


def test_a_seed_is_the_model_alone_in_its_own_dtypes_and_starts_a_job(tmp_path):
    with Job(tmp_path, dtype=torch.bfloat16, create_seed_checkpoint=True) as seed:
        assert not seed.manager.save(5)
        assert seed.manager.save(0, last_step=True)
    entries = manifest(tmp_path, 0)
    assert not any(key.startswith("optimizer") for key in entries.keys)
    assert entries.tensors["up.weight"].dtype == "bfloat16"
    with Job(tmp_path, seed=1, dtype=torch.bfloat16) as job:
        assert job.manager.load()
        assert bits(job.model.up.weight) == bits(seed.model.up.weight)
        assert not job.optimizer.state
        assert job.progress.step == 0


@torch.no_grad()
def _overwritten(job):
    for tensor in job.model.state_dict().values():
        tensor.zero_()
    for state in job.optimizer.state.values():
        for value in state.values():
            value.fill_(7)


def _stepped(job):
    for parameter in job.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    job.optimizer.step()
    job.scheduler.step()
    job.progress.history.append("later")


def _reassigned(job):
    for parameter in job.model.parameters():
        parameter.data = torch.zeros_like(parameter)
    for name, value in list(job.model.named_buffers()):
        setattr(job.model, name, torch.zeros_like(value))
    for state in job.optimizer.state.values():
        state.update({key: torch.zeros_like(value) for key, value in state.items()})


def _loaded(job):
    with Job("unused", seed=9, enable=False) as other:
        other.train(1)
    job.model.load_state_dict(other.model.state_dict())
    job.optimizer.load_state_dict(other.optimizer.state_dict())


def _freed(job):
    for tensor in job.model.state_dict().values():
        tensor.untyped_storage().resize_(0)
    job.optimizer.state.clear()


@pytest.mark.parametrize("event", [_overwritten, _stepped, _reassigned, _loaded, _freed])
@pytest.mark.parametrize("mode", MODES)
def test_a_save_holds_what_was_there_at_the_call(tmp_path, mode, event, monkeypatch):
    """Whatever becomes of the state after it: the writer begins only when that has happened."""
    real, happened = dcp.save, threading.Event()

    def late(*args, **kwargs):
        assert mode == "disabled" or happened.wait(30)
        real(*args, **kwargs)

    monkeypatch.setattr(dcp, "save", late)
    with Job(tmp_path / "quiet", enable=False) as expected:
        expected.train(2)
    with Job(tmp_path, async_mode=mode) as job:
        job.train(2)
        job.manager.maybe_wait_for_staging()
        event(job)
        happened.set()
    with Job(tmp_path, seed=1) as resumed:
        assert resumed.manager.load()
    assert same_state(expected, resumed) == []


def test_a_save_that_is_asked_for_while_another_runs_waits_for_it(tmp_path, monkeypatch):
    real, running, overlaps = dcp.save, [], []

    def slow(*args, **kwargs):
        overlaps.extend(running)
        running.append(1)
        time.sleep(0.1)
        real(*args, **kwargs)
        running.pop()

    monkeypatch.setattr(dcp, "save", slow)
    with Job(tmp_path, async_mode="async", interval=1) as job:
        losses = job.train(3)
    assert overlaps == []
    assert steps(tmp_path) == [1, 2, 3], "close waits for the last"
    with Job(tmp_path, seed=1) as resumed:
        assert resumed.manager.load()
        assert resumed.progress.history == losses


def test_a_failed_background_save_is_said_at_once_raised_at_the_next_call_and_leaves_nothing(
    tmp_path, monkeypatch, caplog
):
    with Job(tmp_path, async_mode="async") as job:
        job.train(2)
        job.manager.maybe_wait_for_saving()
        real, gate = dcp.save, threading.Event()

        def fail(*args, **kwargs):
            gate.wait(10)
            raise SaveError(*_problem("no space"))

        monkeypatch.setattr("torchtitan_ckpt.formats.dcp.save", fail)
        job.train(4)
        gate.set()
        job.manager.pending.exception(10)
        (said,) = (record for record in caplog.records if record.levelname == "ERROR")
        assert "step 4 could not be saved" in said.getMessage()
        assert "no space" in said.getMessage()
        with pytest.raises(SaveError, match="no space"):
            job.manager.save(6)
        monkeypatch.setattr("torchtitan_ckpt.formats.dcp.save", real)
        assert steps(tmp_path) == [2]
        assert folder.leftovers(tmp_path / "checkpoint") == ([], [])
        assert job.manager.save(6)
    assert steps(tmp_path) == [2, 6]


def _problem(text):
    from torchtitan_ckpt.errors import Problem

    return (Problem(code="test.failure", what=text),)


def test_a_failure_in_the_background_is_raised_by_close_and_by_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "torchtitan_ckpt.formats.dcp.save",
        lambda *a, **k: (_ for _ in ()).throw(SaveError(*_problem("no space"))),
    )
    job = Job(tmp_path, async_mode="async")
    job.train(2)
    with pytest.raises(SaveError, match="no space"):
        job.manager.maybe_wait_for_saving()
    job.train(4)
    with pytest.raises(SaveError, match="no space"):
        job.manager.close()
    job.manager.close()


def test_a_load_waits_for_the_save_in_flight(tmp_path, monkeypatch):
    with Job(tmp_path, async_mode="async") as job:
        real, gate = dcp.save, threading.Event()

        def slow(*args, **kwargs):
            gate.wait(10)
            real(*args, **kwargs)

        monkeypatch.setattr("torchtitan_ckpt.formats.dcp.save", slow)
        job.train(2)
        threading.Timer(0.2, gate.set).start()
        assert job.manager.load()
        assert job.progress.step == 2


def test_saving_a_step_again_replaces_it_whole_or_not_at_all(tmp_path, monkeypatch):
    with Job(tmp_path) as job:
        job.train(2)
        old = bits(job.model.up.weight)
        with torch.no_grad():
            job.model.up.weight.fill_(3)
        real = dcp.save

        def half(flat, path, **options):
            real(flat, path, **options)
            raise SaveError(*_problem("died late"))

        monkeypatch.setattr("torchtitan_ckpt.formats.dcp.save", half)
        with pytest.raises(SaveError, match="died late"):
            job.manager.save(2)
        monkeypatch.setattr("torchtitan_ckpt.formats.dcp.save", real)
        with Job(tmp_path, seed=1) as resumed:
            assert resumed.manager.load()
            assert bits(resumed.model.up.weight) == old
        assert job.manager.save(2)
    with Job(tmp_path, seed=1) as resumed:
        assert resumed.manager.load()
        assert (resumed.model.up.weight == 3).all()


def test_a_file_called_like_a_step_is_refused_before_any_training(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "step-2").write_text("mine")
    with pytest.raises(SaveError, match=r"save\.step-is-file"):
        Job(tmp_path)
    assert (tmp_path / "checkpoint" / "step-2").read_text() == "mine"


def test_a_file_in_place_of_the_folder_is_said(tmp_path):
    (tmp_path / "checkpoint").touch()
    with pytest.raises(SaveError, match="a file lies where a folder should be"):
        Job(tmp_path)


@pytest.mark.parametrize("below", ["", "checkpoint"])
def test_a_jobs_folder_named_as_source_gets_its_step_suggested(tmp_path, below):
    with Job(tmp_path / "x") as job:
        job.train(2)
    source = str(tmp_path / "x" / below)
    with (
        Job(tmp_path / "y", initial_load_path=source) as other,
        pytest.raises(
            RefusedError, match=r"--checkpoint\.initial_load_path .*/x/checkpoint/step-2"
        ),
    ):
        other.manager.load()


def test_a_folder_that_cannot_be_written_is_said_in_words(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SaveError, match="a part of the path is a file"):
        Job(tmp_path / "file")


def test_a_full_disk_is_said_and_loses_nothing(tmp_path):
    """A process whose files may not grow past a limit: the kernel itself refuses the write."""
    with Job(tmp_path) as job:
        job.train(2)
    code = (
        "import resource, signal, sys\n"
        "from tests.files.toy import Job\n"
        "from torchtitan_ckpt.errors import SaveError\n"
        "job = Job(sys.argv[1], seed=1); job.manager.load()\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try:\n    job.train(4)\n"
        "except SaveError as error:\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1)) if 0 else None\n"
        "    print(error); sys.exit(7)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 7, run.stderr
    assert "File too large" in run.stdout or "EFBIG" in run.stdout
    assert steps(tmp_path) == [2]
    assert folder.leftovers(tmp_path / "checkpoint") == ([], [])
    with Job(tmp_path, seed=1) as resumed:
        assert resumed.manager.load()
    assert same_state(job, resumed) == []


def test_a_second_job_on_the_folder_is_told(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    code = (
        "import sys, time\nfrom tests.files.toy import Job\njob = Job(sys.argv[1])\n"
        "print('ready', flush=True)\nsys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as first:
        assert first.stdout.readline() == "ready\n"
        with Job(tmp_path):
            assert f"process {first.pid}" in caplog.text
        first.kill()
    caplog.clear()
    with Job(tmp_path) as restarted:
        restarted.train(2)
    assert "another job" not in caplog.text


def test_further_states_are_saved_loaded_and_excluded_by_name(tmp_path):
    class Counter:
        value = 3

        def state_dict(self):
            return {"value": self.value, "names": ["a", {"b": 1}], "nothing": None}

        def load_state_dict(self, state):
            self.value, self.names = state["value"], state["names"]
            assert state["nothing"] is None

    def job(path, counter, **options):
        torch.manual_seed(0)
        config = CheckpointManager.Config(enable=True, interval=1, **options)
        return CheckpointManager(
            config, model_parts=[nn.Linear(2, 3)], states={"ema": counter}, base_folder=str(path)
        )

    first = Counter()
    first.value = 8
    manager = job(tmp_path, first)
    manager.save(1)
    manager.close()
    second = Counter()
    manager = job(tmp_path, second)
    assert manager.load()
    assert (second.value, second.names) == (8, ["a", {"b": 1}])
    third = Counter()
    manager = job(tmp_path, third, exclude_from_loading=["ema"])
    assert manager.load()
    assert third.value == 3


def test_a_model_left_on_meta_is_refused(tmp_path):
    with Job(tmp_path) as job:
        job.train(2)
    with torch.device("meta"):
        model = Toy()
    with Job(tmp_path, model=model) as other, pytest.raises(CheckpointError, match="meta"):
        other.manager.load()


def test_remote_folders_work_for_dcp(tmp_path):
    import fsspec

    fsspec.filesystem("memory").rm("/ckpt", recursive=True) if fsspec.filesystem("memory").exists(
        "/ckpt"
    ) else None
    with Job("memory://ckpt/x") as job:
        job.train(4)
        job.manager.save(4)
    with Job("memory://ckpt/x", seed=1) as resumed:
        assert resumed.manager.load()
        assert same_state(job, resumed) == []


def test_the_owner_record_and_its_heartbeat_go_with_the_job(tmp_path):
    with Job(tmp_path) as job:
        record = json.loads((tmp_path / "checkpoint" / ".owner.json").read_text())
        assert record["pid"] == os.getpid()
        heart = job.manager._heartbeat._thread
        assert heart.is_alive()
        assert heart.daemon, "a job that never closes must still end"
    assert not heart.is_alive()
    assert not (tmp_path / "checkpoint" / ".owner.json").exists()
