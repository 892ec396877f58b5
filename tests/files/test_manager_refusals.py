"""A load that a state refuses, or that is interrupted, while values are given: all as it was."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler, StepLR

from tests.files.toy import Job, Loader, TrainState, bits
from torchtitan_ckpt.errors import MismatchError
from torchtitan_ckpt.state import rng


class Stepped(Job):
    """A job whose scheduler keeps more than a number."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self.scheduler = StepLR(self.optimizer, 2)
        self.manager._job.lr_schedulers = [self.scheduler]

    def seen(self) -> Any:
        """Everything but the model's tensors, which are filled while they are read."""
        states = self.optimizer.state_dict()
        moments = [
            {key: bits(value) for key, value in own.items()} for own in states["state"].values()
        ]
        objects = (self.scheduler.state_dict(), self.loader.state_dict(), vars(self.progress))
        drawn = (random.getstate(), bits(torch.get_rng_state()))
        return copy.deepcopy((moments, states["param_groups"], objects, drawn))


REFUSING: dict[str, Callable[[Any], tuple[Any, str]]] = {
    "optimizer": lambda job: (type(job.optimizer), "__setstate__"),
    "scheduler": lambda _: (LRScheduler, "load_state_dict"),
    "dataloader": lambda _: (Loader, "load_state_dict"),
    "train state": lambda _: (TrainState, "load_state_dict"),
    "generators": lambda _: (rng.RngState, "load_state_dict"),
}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("what", REFUSING)
def test_everything_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, error: type[BaseException]
) -> None:
    with Stepped(tmp_path, interval=1) as job:
        job.train(1)
    with Stepped(tmp_path, seed=1, load_only=True) as job:
        job.train(3)
        before, calls = job.seen(), []

        def refuse(*_: Any) -> None:
            calls.append(what)
            raise error("no more of this")

        with monkeypatch.context() as patch:
            patch.setattr(*REFUSING[what](job), refuse)
            with pytest.raises(MismatchError if error is RuntimeError else error) as caught:
                job.manager.load()
        assert "no more of this" in str(caught.value)
        assert calls
        assert job.seen() == before
        assert job.manager.load()
        assert job.progress.step == job.scheduler.last_epoch == job.loader.taken == 1
