"""Training jobs broken on purpose: the reference job, each with one small edit.

    python -m tests.specimens.trainers counter_restarts --config ...

runs the job with the edit of that name. An edit is a function that replaces one of this project's
own before the job starts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from conformance import Subject
from tests.specimens.specimen import Specimen

ASSETS = Path(__file__).parents[2] / "fixtures" / "qwen3" / "dense-untied"


def exports_through_bf16() -> None:
    """What is exported as float32 has been rounded on the way (DTY-01)."""
    from torchtitan_ckpt import export

    right = export.hf_model

    def rounded(*args: Any) -> dict[str, Any]:
        return {key: v.bfloat16().to(v.dtype) for key, v in right(*args).items()}

    export.hf_model = rounded


def optimizer_before_the_flags() -> None:
    """The optimizer is built from what the job would be without its flags (OPT-11)."""
    from torchtitan_ckpt.train import trainer
    from torchtitan_ckpt.train.config import OptimizerConfig

    right = trainer.make_optimizer
    trainer.make_optimizer = lambda model, _: right(model, OptimizerConfig())


def counter_restarts() -> None:
    """A resumed job counts its tokens from zero (DAT-07)."""
    from torchtitan_ckpt.train.progress import TrainState

    right = TrainState.load_state_dict

    def restarted(self: TrainState, state: dict[str, Any]) -> None:
        right(self, state)
        self.ntokens_seen = 0

    TrainState.load_state_dict = restarted  # type: ignore[method-assign]


def exports_what_it_began_with() -> None:
    """The export is of the weights that the job had after its load (REF-04)."""
    from torchtitan_ckpt.manager import CheckpointManager

    load, save = CheckpointManager.load, CheckpointManager.save

    def remembered(self: Any, step: int = -1) -> bool:
        loaded = load(self, step)
        self.first = {k: v.detach().clone() for k, v in self._job.model_state().items()}
        return loaded

    def stale(self: Any, step: int, last_step: bool = False) -> bool:
        live = self._job.model_state()
        if last_step and self.config.last_save_in_hf:
            with torch.no_grad():
                for key, value in self.first.items():
                    live[key].copy_(value)
        return save(self, step, last_step)

    CheckpointManager.load = remembered  # type: ignore[method-assign]
    CheckpointManager.save = stale  # type: ignore[method-assign]


def dies_on_resume() -> None:
    """A job that finds a checkpoint of its own ends with an error."""
    from torchtitan_ckpt.errors import NotFoundError, Problem
    from torchtitan_ckpt.train.progress import TrainState

    def ended(self: TrainState, state: dict[str, Any]) -> None:
        raise NotFoundError(Problem(code="specimen.dies", what="no way back"))

    TrainState.load_state_dict = ended  # type: ignore[method-assign]


_ROWS = (
    ("job.unchanged", exports_through_bf16, "values differ", "DTY-01", True),
    ("job.unchanged", optimizer_before_the_flags, "values differ", "OPT-11", True),
    ("job.resume", counter_restarts, "train_state.ntokens_seen", "DAT-07", True),
    ("job.export", exports_what_it_began_with, "model.layers.0", "REF-04", True),
    ("job.resume", dies_on_resume, "no way back", "ASY-06", False),
)


def _subject(edit: Callable[[], None]) -> Subject:
    trainer = ("-m", "tests.specimens.trainers", edit.__name__)
    return Subject(_name(edit), job=str(ASSETS), trainer=trainer)


def _name(edit: Callable[[], None]) -> str:
    return edit.__name__.replace("_", "-")


SPECIMENS = tuple(
    Specimen(_name(edit), check, key, kinds=kinds, alone=alone, make=partial(_subject, edit))
    for check, edit, key, kinds, alone in _ROWS
)


def main(name: str, *flags: str) -> int:
    """Run the job with the edit of that name."""
    from torchtitan_ckpt.train.__main__ import main

    next(edit for _, edit, *_ in _ROWS if edit.__name__ == name)()
    return main(flags)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
