"""Managers that take the wrong checkpoint, or the wrong part of it: resume and exclude."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.specimens.edited import Edited
from torchtitan_ckpt.folder import list_steps
from torchtitan_ckpt.formats import dcp


class NewestAsText(Edited):
    def load(self, step: int = -1) -> Any:
        found = sorted(p.name for p in self.complete())
        return self.inner.load(int(found[-1][5:]) if step == -1 and found else step)


class NewestAsPaddedText(Edited):
    def load(self, step: int = -1) -> Any:
        numbers = sorted((int(p.name[5:]) for p in self.complete()), key=lambda n: f"{n:02}")
        if step == -1 and len(numbers) == 2 and numbers[-1] > 9:
            step = numbers[-1]
        return self.inner.load(step)


class NewestByTime(Edited):
    def load(self, step: int = -1) -> Any:
        found = sorted(self.complete(), key=lambda p: p.stat().st_mtime)
        if step == -1 and len(found) == 2 and found[-1] != self.newest():
            step = int(found[-1].name[5:])
        return self.inner.load(step)


class AnyNameWithAStep(Edited):
    def load(self, step: int = -1) -> Any:
        names = [p.name for p in self.steps.iterdir()] if self.steps.is_dir() else []
        found = {int(m[1]): m.string for n in names if (m := re.search(r"step-(\d+)", n))}
        if step == -1 and found and found[max(found)] != f"step-{max(found)}":
            step = max(found)
        return self.inner.load(step)


class EmptyFolderIsAStep(Edited):
    def load(self, step: int = -1) -> Any:
        newest = self.newest() if (self.steps / "step-9").is_dir() else None
        if step == -1 and newest is not None and not (newest / ".metadata").exists():
            step = int(newest.name[5:])
        return self.inner.load(step)


class MarkerIsEnough(Edited):
    def load(self, step: int = -1) -> Any:
        newest = self.newest()
        marked = newest is not None and (newest / ".metadata").exists()
        if step == -1 and marked and newest is not None and not list(newest.glob("*.distcp")):
            step = int(newest.name[5:])
        return self.inner.load(step)


class AbsentIsNewest(Edited):
    def load(self, step: int = -1) -> Any:
        there = step == -1 or (self.steps / f"step-{step}").is_dir()
        return self.inner.load(step if there else -1)


class EmptyFolderIsAResume(Edited):
    def load(self, step: int = -1) -> Any:
        if self.steps.is_dir() and not list(self.steps.iterdir()):
            return False
        return self.inner.load(step)


class InitialPathWins(Edited):
    def given(self, job: dict[str, Any]) -> dict[str, Any]:
        initial = getattr(self, "elsewhere", False)
        return {**job, "base_folder": f"{job['base_folder']}/none"} if initial else job

    def configured(self, config: Any) -> Any:
        self.elsewhere = bool(config.initial_load_path) and not config.initial_load_in_hf
        return config


class WithoutAdapterFromScratch(Edited):
    """Files that it cannot translate are no reason to stop: it does not look at them."""

    def configured(self, config: Any) -> Any:
        if config.initial_load_in_hf and self.job["sd_adapter"] is None:
            return replace(config, initial_load_in_hf=False, initial_load_path=None)
        return config


class ModelOnlyIsAStep(Edited):
    def load(self, step: int = -1) -> Any:
        newest = self.newest()
        files = [p.suffix or p.name for p in newest.iterdir()] if newest else []
        if step == -1 and newest and {".metadata", ".distcp"} <= set(files) and not self.seeded:
            keys = dcp.read_manifest(str(newest)).keys
            if not any(key.startswith("optimizer.") for key in keys):
                step = int(newest.name[5:])
        return self.inner.load(step)


class _Kept:
    """A loader whose state is, after a load, for ever what was loaded."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.kept = inner, None

    def state_dict(self) -> Any:
        return self.kept or self.inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state)
        self.kept = self.inner.state_dict()


class SecondResumeIsTheFirst(Edited):
    def given(self, job: dict[str, Any]) -> dict[str, Any]:
        return {**job, "dataloader": _Kept(job["dataloader"])}


class SchedulerForgotten(Edited):
    def given(self, job: dict[str, Any]) -> dict[str, Any]:
        return {**job, "lr_schedulers": ()}


class MomentsForgotten(Edited):
    def loaded(self) -> None:
        for optimizer in self.job["optimizers"]:
            optimizer.state.clear()


class DataloaderForgotten(Edited):
    def given(self, job: dict[str, Any]) -> dict[str, Any]:
        return {**job, "dataloader": None}

    def configured(self, config: Any) -> Any:
        kept = [name for name in config.exclude_from_loading if name != "dataloader"]
        return replace(config, exclude_from_loading=kept)


class CounterLoadedAnyway(Edited):
    def configured(self, config: Any) -> Any:
        kept = [name for name in config.exclude_from_loading if name != "train_state"]
        return replace(config, exclude_from_loading=kept)


class SchedulerTakesTheCounterAlong(Edited):
    def configured(self, config: Any) -> Any:
        names = config.exclude_from_loading
        more = ["train_state"] if "lr_scheduler" in names and "train_state" not in names else []
        return replace(config, exclude_from_loading=[*names, *more])


class ForbidsWhatIsAllowed(Edited):
    def configured(self, config: Any) -> Any:
        if list(config.exclude_from_loading) == ["train_state"]:
            raise ValueError("train_state cannot be left out alone")
        return config


class UnknownNamesIgnored(Edited):
    def configured(self, config: Any) -> Any:
        known = ("optimizer", "lr_scheduler", "dataloader", "train_state")
        kept = [name for name in config.exclude_from_loading if name in known]
        return replace(config, exclude_from_loading=kept)


class OptimizerWithoutScheduler(Edited):
    def configured(self, config: Any) -> Any:
        names = config.exclude_from_loading
        more = ["lr_scheduler"] if "optimizer" in names and "lr_scheduler" not in names else []
        return replace(config, exclude_from_loading=[*names, *more])


class NewestRecordOfTheReplica(Edited):
    """What a replica knows of its data is of its newest step, the rest of the newest full one."""

    def __init__(self, config: Any, *, replica: Any = None, **job: Any) -> None:
        super().__init__(config, replica=replica, **job)

    def loaded(self) -> None:
        record = self.inner._replica
        if record is not None:
            newest = max(list_steps(Path(record.folder)))
            record.load(newest, self.inner._ranks)


class CopyCallsItself(Edited):
    """Tells what is copied while it loads; the second time, by way of the first time's copy."""

    copy: Any = None

    def load(self, step: int = -1) -> Any:
        self.copy = torch.Tensor.copy_
        torch.Tensor.copy_ = lambda *given, **named: self.copy(*given, **named)  # type: ignore[method-assign, assignment]
        return self.inner.load(step)

    def close(self) -> None:
        self.inner.close()
        if self.copy is not None:
            del torch.Tensor.copy_  # the one of its base class comes back
