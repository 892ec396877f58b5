"""What a person reads when a save or a load of the manager goes wrong."""

import logging
import re
import subprocess
import sys

import pytest
import torch

from tests.files.toy import Job, bits
from torchtitan_ckpt import owner, saving
from torchtitan_ckpt.errors import DamagedError, MismatchError, RefusedError, SaveError

# --- damage that only reading finds


def flip(step, key):
    """Change a byte in the middle of a tensor's data, as a bad disk does."""
    from torchtitan_ckpt.formats import dcp

    shard = dcp.read_manifest(step).tensors[key].shards[0]
    at = shard.byte_offset + shard.byte_length // 2
    with open(step / shard.file, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("named", [{}, {"load_step": 6}])
def test_damage_in_the_payload_names_the_older_step_and_the_option(tmp_path, named):
    with Job(tmp_path) as job:
        job.train(6)
    checkpoints = tmp_path / "checkpoint"
    flip(checkpoints / "step-6", "layers.3.weight")
    (checkpoints / "step-4" / "__0_0.distcp").unlink()
    with Job(tmp_path, seed=1, **named) as resumed, pytest.raises(DamagedError) as caught:
        resumed.manager.load()
    assert str(caught.value.problems[-1]) == (
        "[load.older-step] step-6 was not loaded; step-2 is the newest older one that a job can "
        f"resume.\n  where    {checkpoints}/step-2\n  fix      --checkpoint.load_step 2"
    )
    assert caught.value.problems[0].where.endswith("__0_0.distcp: layers.3.weight")
    with Job(tmp_path, seed=1, load_step=2) as resumed:
        assert resumed.manager.load()
        assert resumed.progress.step == 2


def test_damage_without_an_older_step_says_so(tmp_path):
    with Job(tmp_path) as job:
        job.train(2)
    flip(tmp_path / "checkpoint" / "step-2", "up.weight")
    with Job(tmp_path, seed=1) as resumed, pytest.raises(DamagedError) as caught:
        resumed.manager.load()
    assert caught.value.problems[-1].code == "load.no-older-step"
    assert caught.value.problems[-1].what == (
        "step-2 was not loaded, and no older step can be resumed."
    )


def test_a_missing_shard_is_said_in_one_short_line(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    with Job(tmp_path) as job:
        job.train(4)
    (tmp_path / "checkpoint" / "step-4" / "__0_0.distcp").unlink()
    with Job(tmp_path, seed=1) as resumed:
        assert resumed.manager.load()
    line = next(m for m in caplog.messages if m.startswith("step-4"))
    assert re.fullmatch(
        r"step-4 is newer and is passed over: it holds no complete checkpoint "
        r"\(file __0_0\.distcp is missing \(\d+ keys\) \[dcp\.file-missing\]\)",
        line,
    ), line
    with pytest.raises(RefusedError) as caught, Job(tmp_path, seed=1, load_step=4) as resumed:
        resumed.manager.load()
    assert re.search(r"actual +file __0_0\.distcp is missing", str(caught.value))


def test_a_cut_metadata_is_named_by_its_file(tmp_path):
    with Job(tmp_path) as job:
        job.train(2)
    marker = tmp_path / "checkpoint" / "step-2" / ".metadata"
    marker.write_bytes(marker.read_bytes()[:100])
    with pytest.raises(RefusedError) as caught, Job(tmp_path, load_step=2) as resumed:
        resumed.manager.load()
    assert re.search(r"actual +\.metadata", str(caught.value)), caught.value


def all_but_the_model(job):
    moments = {
        index: {key: bits(value) for key, value in state.items()}
        for index, state in job.optimizer.state_dict()["state"].items()
    }
    scheduler = {k: v for k, v in job.scheduler.state_dict().items() if k != "lr_lambdas"}
    groups = job.optimizer.state_dict()["param_groups"]
    return moments, groups, scheduler, job.loader.state_dict(), job.progress.state_dict()


def test_damage_in_the_model_leaves_the_training_state_as_it_was(tmp_path):
    with Job(tmp_path) as job:
        job.train(4)
    flip(tmp_path / "checkpoint" / "step-4", "layers.3.weight")
    with Job(tmp_path, seed=1, load_only=True) as other:
        other.train(3)
        before = all_but_the_model(other)
        with pytest.raises(DamagedError):
            other.manager.load()
        assert all_but_the_model(other) == before


def test_another_data_parallel_degree_is_refused_before_the_model_is_read(tmp_path):
    with Job(tmp_path) as job:
        job.train(2)
    with Job(tmp_path, seed=1) as other:
        other.loader.size = 2
        before = {key: bits(value) for key, value in other.model.state_dict().items()}
        with pytest.raises(MismatchError, match="another data-parallel degree"):
            other.manager.load()
        assert {key: bits(value) for key, value in other.model.state_dict().items()} == before
        assert all_but_the_model(other)[0] == {}


# --- a loss that is no number


class Losses:
    def __init__(self, **values):
        self.values = values

    def state_dict(self):
        return {"step": 2, **self.values}

    def load_state_dict(self, state):
        self.values = state


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"loss": float("nan")}, "train_state.loss = nan"),
        ({"global_avg_losses": [1.5, float("inf")]}, "train_state.global_avg_losses = inf"),
        ({"loss": torch.tensor(float("-inf"))}, "train_state.loss = -inf"),
        ({"loss": 1.25, "best_loss": float("inf"), "temperature": float("nan")}, ""),
        ({"losses": [float("nan"), 1.0], "loss_scale": 7}, ""),
        ({"losses": [], "loss": torch.empty(0)}, ""),
        ({}, ""),
    ],
)
def test_a_loss_that_is_no_number_is_said_in_one_line(tmp_path, caplog, values, named):
    caplog.set_level(logging.WARNING)
    with Job(tmp_path, keep_latest_k=3) as job:
        job.manager._job.objects["train_state"] = Losses(**values)
        job.manager.save(2)
    assert (tmp_path / "checkpoint" / "step-2" / ".metadata").exists()
    expected = (
        f"step 2 is saved with {named}: the model has probably diverged; keep_latest_k=3 goes on "
        "removing the older, sound steps, so stop and resume from before it with "
        "--checkpoint.load_step N"
    )
    assert caplog.messages == ([expected] if named else [])


# --- two jobs, and a folder that cannot be written


def test_the_first_job_learns_of_the_second_at_its_next_save(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    code = (
        "import sys\nfrom tests.files.toy import Job\njob = Job(sys.argv[1])\n"
        "print('ready', flush=True)\nsys.stdin.read()\n"
    )
    with Job(tmp_path) as first:
        first.train(2)
        assert caplog.messages == []
        with subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as second:
            assert second.stdout.readline() == "ready\n"
            first.train(4)
            record = owner.myself()
            assert caplog.messages == [
                f"another job (process {second.pid} on {record.host}) has begun to save into "
                f"{tmp_path}/checkpoint: steps of the two replace each other; stop one of them"
            ]
            second.kill()
        caplog.clear()
        first.train(8)
        assert caplog.messages == []


def test_a_failed_write_says_what_was_expected_and_which_step_is_untouched(tmp_path):
    def failing(folder):
        with pytest.raises(SaveError) as caught, saving.os_errors_as_save_error("here", folder):
            raise PermissionError(13, "Permission denied")
        return str(caught.value)

    words = (
        "[save.os] The checkpoint could not be written.\n"
        "  where    here\n"
        "  expected a folder in which this process can create and write files\n"
        "  actual   EACCES: Permission denied\n"
        "  cause    no permission\n"
        "  fix      correct the permissions of the file and its folder, or run as their owner"
    )
    assert failing(tmp_path) == words
    with Job(tmp_path) as job:
        job.train(4)
    assert failing(tmp_path / "checkpoint") == f"{words}; step-4 is untouched"
