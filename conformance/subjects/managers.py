"""Shipped managers: `manager:ours` and `manager:titan`, torchtitan's own, unchanged.

What is expected of torchtitan's manager to fail, and why, is in `TITAN`: each is a finding that
really happens in version 0.3.0.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from conformance.subject import Subject
from torchtitan_ckpt.errors import ConfigError, Problem, nearest
from torchtitan_ckpt.manager import CheckpointManager

NAMES = ("manager:ours", "manager:titan")
_FRESH = "init_optim_state steps once with zero gradients, to learn what state to expect: "
TITAN: Mapping[str, str] = {
    "reshard.replicas": "DCP writes one rank's copy of a plain tensor and compares none",
    "reshard.hf": "torch's consolidation asks finfo of every dtype: integers end the export",
    "seed.one-rank": "torchtitan's trainer asserts it, its manager does not",
    "seed.other-model": "DCP is silent about keys that only the file has, and casts dtypes",
    "resume.names": "step-(\\d+) is searched anywhere in a folder's name",
    "resume.half-deleted": "a folder with .metadata in it counts as complete",
    "resume.model-only": "the newest step of any kind is taken, and its load then fails",
    "resume.replicas": "TorchFT's manager takes the newest record of the data, of whichever step",
    "resume.stream": "each element of a list is a key, and a fresh loader's list has none",
    "resume.begun": "for keep_latest_k a step counts as soon as its folder is there",
    "resume.overwrite": "files are written over those of the old step, whose marker stays",
    "resume.retention": "any name with step-(\\d+) in it is counted, the seed among them",
    "exclude.coupled": "no rule couples the optimizer and its scheduler",
    "optimizer.none-over-moments": "a pickled None replaces the tensor, as DCP hands it over",
    "optimizer.gradients": _FRESH + "with gradients set it does not, and nothing is loaded",
    "optimizer.dtypes": "Optimizer.load_state_dict casts all state but step to the parameter's",
    "optimizer.tied": "state lies under the name that comes first, and is sought under another",
    "optimizer.groups": "hyperparameters lie under parameters' names: an empty group has none",
    "optimizer.older-file": "DCP misses every key that the file lacks, and ends the load",
    "optimizer.no-gradient": _FRESH + "DCP then misses the state that the file never had",
    "optimizer.frozen": _FRESH + "a frozen parameter gets none, and its moments are dropped",
    "optimizer.swapped": "placeholders without storage are written, which ends the process",
    "optimizer.emptied": "placeholders without storage are written, which ends the process",
}


def subject(name: str) -> Subject:
    """The Subject of a `manager:` name."""
    if name == "manager:ours":
        return Subject(name, manager=CheckpointManager)
    if name == "manager:titan":
        if importlib.util.find_spec("torchtitan") is None:
            return Subject(name, notes=("torchtitan is not installed: there is no manager",))
        return Subject(name, manager=TitanManager, expect=TITAN)
    near = nearest(name, NAMES)
    raise ConfigError(
        Problem(
            code="check.no-subject",
            what=f"no manager is called {name!r}",
            expected=", ".join(NAMES),
            fix=f"did you mean {near}?" if near else "name one of them",
        )
    )


class TitanManager:
    """torchtitan's manager, given its own containers around the optimizers and the schedulers.

    With a replica it is the manager of torchtitan's experiment with TorchFT, which itself is not
    needed for it.
    """

    def __init__(self, config: Any, *, replica: Any = None, **job: Any) -> None:
        from torchtitan.components.checkpoint import CheckpointManager as Theirs

        job["optimizers"] = _optimizers(job["optimizers"], job["model_parts"])
        job["lr_schedulers"] = _schedulers(job["lr_schedulers"])
        if replica is None:
            self._manager = Theirs(config, **job)
        else:
            self._manager = _replicated(config, replica, job)

    @staticmethod
    def Config(**options: Any) -> Any:
        from torchtitan.components.checkpoint import CheckpointManager as Theirs

        return Theirs.Config(**options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


def _replicated(config: Any, replica: Any, job: dict[str, Any]) -> Any:
    from torchtitan.experiments.torchft.checkpoint import TorchFTCheckpointManager as Theirs

    inner = SimpleNamespace(
        participating_rank=replica.participating_rank, set_state_dict_fns=lambda *functions: None
    )
    torchft: Any = SimpleNamespace(enabled=True, manager=inner, replica_id=replica.id)
    options = {field.name: getattr(config, field.name) for field in fields(config)}
    return Theirs(Theirs.Config(**options), **job, ft_manager=torchft)


def _optimizers(optimizers: Sequence[Optimizer], parts: Sequence[nn.Module]) -> Any:
    """torchtitan's container around optimizers that exist; it would else build its own."""
    from torchtitan.components.optimizer import OptimizersContainer

    names = {id(p): name for part in parts for name, p in part.named_parameters()}
    parameters = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["param_names"] = [names[id(p)] for p in group["params"]]
            parameters += group["params"]
    container: Any = OptimizersContainer.__new__(OptimizersContainer)
    container.optimizers, container.model_parts = list(optimizers), list(parts)
    container._post_init(parameters)
    return container


def _schedulers(schedulers: Sequence[Any]) -> Any:
    from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer

    container: Any = LRSchedulersContainer.__new__(LRSchedulersContainer)
    container.schedulers = list(schedulers)
    return container
