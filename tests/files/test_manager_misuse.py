"""A manager that is called wrongly, or interrupted: refused in words, early, with nothing lost."""

from __future__ import annotations

import os
from concurrent.futures import thread
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.files.toy import Job, Toy, same_state
from torchtitan_ckpt import CheckpointManager
from torchtitan_ckpt.errors import CheckpointError, ConfigError, MismatchError, SaveError
from torchtitan_ckpt.formats import dcp_save, hf


def manager(folder: Path, model: nn.Module | None = None, **states: Any) -> CheckpointManager:
    return CheckpointManager(
        CheckpointManager.Config(enable=True, interval=1),
        model_parts=[model or nn.Linear(3, 2)],
        dataloader=states.pop("dataloader", None),
        states=states.pop("states", states),
        base_folder=str(folder),
    )


class Late(nn.Module):
    """A model with modules that are called like states."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer, self.mine = nn.Linear(3, 2), nn.Linear(2, 5)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"states": {"model": {}}}, ["'model'"]),
        ({"states": {"optimizer": {}}}, ["'optimizer'"]),
        ({"states": {"lr_scheduler": {}}}, ["'lr_scheduler'"]),
        ({"states": {"a.b": {}, "": {}}}, ["'a.b'", "''"]),
        ({"states": {"weight": {}}}, ["'weight'"]),
        ({"states": {"dataloader": {}}, "dataloader": {}}, ["'dataloader'"]),
        ({"model": Late(), "states": {"mine": {}}}, ["'mine'", "'optimizer'"]),
    ],
)
def test_names_that_cannot_be_told_apart_on_disk_are_refused_at_once(
    tmp_path: Path, arguments: dict[str, Any], named: list[str]
) -> None:
    """Such a step would be saved for days, look whole, and fit no job any more."""
    with pytest.raises(ConfigError) as caught:
        manager(tmp_path, **arguments)
    problems = caught.value.problems
    assert [p.code for p in problems] == ["config.state-name"] * len(named)
    assert all(name in p.what for p, name in zip(problems, named, strict=True))
    assert not any(tmp_path.iterdir())


def test_one_loader_may_come_as_a_state(tmp_path: Path) -> None:
    manager(tmp_path, states={"dataloader": {}, "mine": {"a": 1}}).close()


@pytest.mark.parametrize("value", [5, None, nn.Linear])
def test_a_state_without_methods_is_refused_at_once(tmp_path: Path, value: Any) -> None:
    if value is nn.Linear:
        value = type("Half", (), {"state_dict": dict})()
    with pytest.raises(ConfigError, match="state_dict and load_state_dict") as caught:
        manager(tmp_path, mine=value)
    assert [p.code for p in caught.value.problems] == ["config.state-methods"]


@pytest.mark.parametrize("part", ["optimizers", "lr_schedulers"])
@pytest.mark.parametrize("value", [[5], 5])
def test_optimizers_and_schedulers_are_looked_at_at_once_too(
    tmp_path: Path, part: str, value: Any
) -> None:
    config = CheckpointManager.Config(enable=True)
    with pytest.raises(ConfigError, match=r"config\.state-methods"):
        CheckpointManager(
            config, model_parts=nn.Linear(3, 2), base_folder=str(tmp_path), **{part: value}
        )


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("interval", "5", "a whole number"),
        ("keep_latest_k", 2.5, "a whole number"),
        ("exclude_from_loading", "optimizer", "a list of texts"),
        ("excuse_mismatch", [5], "a list of texts"),
        ("folder", None, "text"),
        ("initial_load_path", Path("x"), "text, or None"),
        ("enable_first_step_checkpoint", "false", "True or False"),
    ],
)
def test_an_option_of_another_type_is_refused(
    tmp_path: Path, option: str, value: Any, rule: str
) -> None:
    config = CheckpointManager.Config(enable=True, **{option: value})
    with pytest.raises(ConfigError) as caught:
        CheckpointManager(config, model_parts=nn.Linear(3, 2), base_folder=str(tmp_path))
    (problem,) = caught.value.problems
    assert (problem.code, problem.expected) == ("config.type", rule)
    assert option in problem.what


def test_the_base_folder_may_be_a_path(tmp_path: Path) -> None:
    config = CheckpointManager.Config(enable=True, interval=1)
    mine = CheckpointManager(config, model_parts=nn.Linear(3, 2), base_folder=tmp_path / "a b")
    assert mine.save(1)
    mine.close()
    assert (tmp_path / "a b/checkpoint/step-1").is_dir()


@pytest.mark.parametrize("step", [10.0, "10", None, torch.tensor(2.5)])
def test_a_step_that_is_no_whole_number_is_refused(tmp_path: Path, step: Any) -> None:
    mine = manager(tmp_path)
    for call in (mine.save, mine.load):
        with pytest.raises(ConfigError) as caught:
            call(step)
        assert [p.code for p in caught.value.problems] == ["config.step"]
    mine.close()


@pytest.mark.parametrize("step", [np.int64(7), torch.tensor(7), 2**63 + 9])
def test_any_whole_number_is_a_step(tmp_path: Path, step: Any) -> None:
    mine = manager(tmp_path)
    assert mine.save(step)
    assert (tmp_path / f"checkpoint/step-{int(step)}/.metadata").exists()
    mine.close()


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_closed_manager_saves_no_more_and_says_so(tmp_path: Path, mode: str) -> None:
    job = Job(tmp_path, async_mode=mode)
    job.train(2)
    job.manager.close()
    with pytest.raises(SaveError, match=r"save\.closed"):
        job.train(4)
    assert job.manager.load(2)
    assert sorted(os.listdir(tmp_path / "checkpoint")) == ["step-2"]


def test_a_link_whose_end_is_away_is_not_to_be_removed(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").symlink_to(tmp_path / "not mounted")
    with pytest.raises(SaveError, match="mount it") as caught:
        manager(tmp_path)
    assert caught.value.problems[0].code == "save.lost-link"
    assert str(tmp_path / "not mounted") in caught.value.problems[0].actual


def test_a_save_at_the_end_of_the_interpreter_is_made_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from `atexit`, when no thread can be started any more."""
    with Job(tmp_path, async_mode="async") as job:
        job.train(2)
        job.manager.maybe_wait_for_saving()
        monkeypatch.setattr(thread, "_shutdown", True)
        job.train(4)
        assert job.manager.pending is None
        assert (tmp_path / "checkpoint/step-4/.metadata").exists()
        monkeypatch.undo()


def test_a_second_manager_of_one_process_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two models, two managers, one default folder: each would replace the other's steps."""

    def told() -> int:
        return sum("another manager of this process" in text for text in caplog.messages)

    first = manager(tmp_path)
    assert told() == 0
    second = manager(tmp_path)
    assert told() == 1
    first.close()
    second.close()
    manager(tmp_path).close()
    assert told() == 1


@pytest.mark.parametrize("keep", [0, 10])
def test_a_remote_folder_keeps_every_step_and_says_so(
    caplog: pytest.LogCaptureFixture, keep: int
) -> None:
    config = CheckpointManager.Config(enable=True, keep_latest_k=keep)
    CheckpointManager(config, model_parts=nn.Linear(3, 2), base_folder="memory://kept").close()
    assert [text for text in caplog.messages if "every step stays" in text] == [
        "keep_latest_k does nothing in a remote folder: every step stays"
    ] * bool(keep)


def test_names_that_are_not_utf8_come_back(tmp_path: Path) -> None:
    """The path lies in the metadata, and a loader's state may name files."""
    name = os.fsdecode(b"bad\xff")
    position = {"file": name, "line": 3}
    with Job(tmp_path / name) as job:
        job.manager._job.objects["files"] = position
        job.manager._job.names += ("files",)
        job.train(2)
    found: dict[str, Any] = {"file": "", "line": 0}
    with Job(tmp_path / name, seed=1) as again:
        again.manager._job.objects["files"] = found
        again.manager._job.names += ("files",)
        assert again.manager.load()
        assert found == position
        assert same_state(job, again) == []
        with pytest.raises(CheckpointError) as caught:
            again.manager.load(9)
    str(caught.value).encode()  # a terminal takes it


class Large(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(700, 500))


@pytest.mark.parametrize("model", [Toy, Large])
@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interruption_stays_one_and_leaves_nothing(
    tmp_path: Path, model: type[Toy], stop: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that goes on after failed saves must still end at Ctrl-C."""
    job = Job(tmp_path, model=model())
    job.train(2)
    real = dcp_save.ItemWriter.write

    def write(self: Any, tensor: torch.Tensor, sink: Any) -> int:
        def interrupted(data: Any) -> None:
            raise stop

        return real(self, tensor, interrupted if tensor.numel() in (17 * 6, 700 * 500) else sink)

    with monkeypatch.context() as patch:
        patch.setattr(dcp_save.ItemWriter, "write", write)
        with pytest.raises(stop):
            job.train(4)
    assert sorted(os.listdir(tmp_path / "checkpoint")) == [".owner.json", "step-2"]
    job.train(6)
    job.manager.close()
    assert sorted(os.listdir(tmp_path / "checkpoint")) == ["step-2", "step-6"]


def test_states_of_the_caller_are_restored_before_ours(tmp_path: Path) -> None:
    """They may still refuse; the optimizer and the scheduler are then as they were."""
    with Job(tmp_path) as job:
        job.train(2)
    with Job(tmp_path, seed=1) as again:
        again.progress.load_state_dict = lambda state: [][0]  # type: ignore[method-assign]
        with pytest.raises(MismatchError, match="TrainState refused its state"):
            again.manager.load()
        assert again.scheduler.last_epoch == 0
        assert not again.optimizer.state


def test_safetensors_hold_no_name_that_is_not_utf8(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="a key that is no text"):
        hf.save({os.fsdecode(b"w\xff"): torch.ones(2), "w": torch.ones(3)}, tmp_path / "hf")
    assert not (tmp_path / "hf").exists() or not any((tmp_path / "hf").iterdir())
