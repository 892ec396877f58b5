"""Managers whose saves, in the background or not, do not keep what they should: chapter resume."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tests.specimens.edited import Edited
from torchtitan_ckpt import CheckpointManager

ASYNC, PINNED = "async", "async_with_pinned_mem"


class SavesWhatComesLater(Edited):
    """What it is asked to save in the background it saves when it is asked the next time."""

    later: tuple[Any, ...] | None = None
    mode = ASYNC

    def configured(self, config: Any) -> Any:
        self.waits = config.async_mode == self.mode
        return replace(config, async_mode="disabled") if self.waits else config

    def save(self, step: int, last_step: bool = False) -> Any:
        self.maybe_wait_for_saving()
        if not self.waits:
            return self.inner.save(step, last_step)
        self.later = (step, last_step)
        return True

    def maybe_wait_for_saving(self) -> None:
        if self.later is not None:
            self.inner.save(*self.later)
            self.later = None


class FailsInSilence(Edited):
    def save(self, step: int, last_step: bool = False) -> Any:
        with self.quietly():
            return self.inner.save(step, last_step)

    def maybe_wait_for_saving(self) -> None:
        with self.quietly():
            self.inner.maybe_wait_for_saving()

    def close(self) -> None:
        with self.quietly():
            self.inner.close()

    def quietly(self) -> Any:
        silent = self.inner.config.async_mode != "disabled" and "extra" not in self.job["states"]
        return contextlib.suppress(Exception) if silent else contextlib.nullcontext()


class NothingWhileSaving(Edited):
    def load(self, step: int = -1) -> Any:
        return False if self.inner.pending else self.inner.load(step)


class PurgesWhateverLooksLikeAStep(Edited):
    def close(self) -> None:
        self.inner.close()
        names = [p.name for p in self.steps.iterdir()] if self.steps.is_dir() else []
        if self.inner.config.keep_latest_k == 2 and "old-step-50" in names:
            shutil.rmtree(self.steps / "old-step-50")


class SeedIsTheOldestStep(Edited):
    def close(self) -> None:
        self.inner.close()
        if self.inner.config.keep_latest_k == 2:
            shutil.rmtree(self.steps / "step-0", ignore_errors=True)


class ExportDtypeIgnored(Edited):
    def configured(self, config: Any) -> Any:
        return replace(config, export_dtype="float32")


class PinsWhatComesLater(SavesWhatComesLater):
    mode = PINNED


class SecondSaveDoesNotWait(Edited):
    """Its kept buffers are filled again while they are being written."""

    def save(self, step: int, last_step: bool = False) -> Any:
        if self.inner.config.async_mode == ASYNC:
            self.inner._pending = None
        return self.inner.save(step, last_step)


class PinnedRefusesNumpy(Edited):
    def save(self, step: int, last_step: bool = False) -> Any:
        extra = self.job["states"].get("extra")
        numpy = extra is not None and isinstance(extra.state_dict()["value"], np.generic)
        if numpy and self.inner.config.async_mode == PINNED:
            raise TypeError("cannot copy a numpy number")
        return self.inner.save(step, last_step)


class _Beginning(Edited):
    """Removes something when a save in the background has only begun."""

    def save(self, step: int, last_step: bool = False) -> Any:
        saved = self.inner.save(step, last_step)
        config = self.inner.config
        if config.async_mode == ASYNC and config.keep_latest_k == 2:
            self.begun()
        return saved

    def begun(self) -> None:
        raise NotImplementedError


class BegunStepsCount(_Beginning):
    def begun(self) -> None:
        for path in sorted(self.complete(), key=lambda p: int(p.name[5:]))[:-2]:
            shutil.rmtree(path)


class RemovesWhatIsNotDone(_Beginning):
    def begun(self) -> None:
        patience = time.monotonic() + 1
        while not (found := list(self.steps.glob("unfinished.*"))) and time.monotonic() < patience:
            time.sleep(0.01)
        time.sleep(0.2)  # until its writer has found it
        for path in found:
            shutil.rmtree(path, ignore_errors=True)


class OverwritesInPlace(Edited):
    def save(self, step: int, last_step: bool = False) -> Any:
        place = self.steps / f"step-{step}"
        if not place.is_dir() or self.inner.config.keep_latest_k == 2:
            return self.inner.save(step, last_step)
        aside = {**self.job, "base_folder": str(self.base / "b")}
        beside = CheckpointManager(self.inner.config, **aside)
        beside.save(step, last_step)
        beside.close()
        for path in (self.base / "b" / self.steps.name / place.name).iterdir():
            new = path.read_bytes()
            for half in (slice(0, len(new) // 2), slice(len(new) // 2, None)):
                with (place / path.name).open("r+b") as file:
                    file.seek(half.start)
                    file.write(new[half])
        return True


class PurgeEndsAtTheFirstFailure(Edited):
    failed = False

    def configured(self, config: Any) -> Any:
        self.keeps = config.keep_latest_k == 2 and config.async_mode == "disabled"
        return replace(config, keep_latest_k=0) if self.keeps else config

    def save(self, step: int, last_step: bool = False) -> Any:
        saved = self.inner.save(step, last_step)
        numbers = sorted(int(p.name[5:]) for p in self.complete() if p.name != "step-0")
        for number in numbers[:-2] if self.keeps and not self.failed else ():
            try:
                shutil.rmtree(self.steps / f"step-{number}")
            except OSError:
                self.failed = True
        return saved


class _Told:
    """A data loader that is told something else than it said."""

    def __init__(self, inner: Any, edit: Callable[[Any, Any], Any]) -> None:
        self.inner, self.edit = inner, edit

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        told = {k: self.edit(v, self.inner) if "rank" in k else v for k, v in state.items()}
        self.inner.load_state_dict(told)


class _Telling(Edited):
    def given(self, job: dict[str, Any]) -> dict[str, Any]:
        return {**job, "dataloader": _Told(job["dataloader"], self.edit)}

    @staticmethod
    def edit(entry: Any, loader: Any) -> Any:
        raise NotImplementedError


class EpochFromTheBeginning(_Telling):
    @staticmethod
    def edit(entry: Any, loader: Any) -> Any:
        return {**entry, "epoch": 0}


class RestOfTheSampleLost(_Telling):
    @staticmethod
    def edit(entry: Any, loader: Any) -> Any:
        return {**entry, "buffer": []}


class ListsAsLongAsTheTargets(_Telling):
    """The elements of a list are keys of their own; those that the target lacks are not asked."""

    @staticmethod
    def edit(entry: Any, loader: Any) -> Any:
        if "buffer" not in entry:
            return entry
        return {**entry, "buffer": entry["buffer"][: len(loader.state["buffer"])]}
