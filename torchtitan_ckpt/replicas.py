"""TorchFT: each replica's dataloader state, apart from the full checkpoint.

Replicas see different data and fail one by one, so each saves how far it has read, at every step,
under its own id: `ft-replica-<id>/step-N` beside the full steps. On a load the step of the full
checkpoint decides: a replica's record of a later step is not used. TorchFT itself is not needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torchtitan_ckpt import folder as folders
from torchtitan_ckpt import saving
from torchtitan_ckpt.collective import Ranks
from torchtitan_ckpt.config import DATALOADER, CheckpointConfig, is_remote
from torchtitan_ckpt.errors import ConfigError, Problem
from torchtitan_ckpt.formats import dcp
from torchtitan_ckpt.job import JobState


@dataclass(frozen=True, slots=True)
class Replica:
    """This process's TorchFT replica. `participating_rank` is that of TorchFT's manager: the
    replica with 0 saves the full checkpoint."""

    id: str
    participating_rank: Callable[[], int]


class ReplicaStates:
    """Saves and loads one replica's dataloader state."""

    def __init__(
        self, replica: Replica, folder: str, job: JobState, config: CheckpointConfig
    ) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_]+", replica.id):
            raise ConfigError(
                Problem(
                    code="config.replica-id",
                    what="A replica's id becomes the name of a folder.",
                    expected="letters, digits and underscores",
                    actual=repr(replica.id),
                    fix="rename the replica",
                )
            )
        self.enabled = config.enable_ft_dataloader_checkpoints and DATALOADER in job.names
        self.folder = f"{folder}/ft-replica-{replica.id}"
        self._main = folder
        self._replica = replica
        self._job = job
        self._sync = config.sync_files

    @property
    def participates(self) -> bool:
        """Whether this replica is the one that saves the full checkpoint."""
        return self._replica.participating_rank() == 0

    def save(self, step: int, ranks: Ranks) -> None:
        """Save the dataloader state of this step, and let go of those that no load can want."""
        with ranks.together(f"collecting the dataloader state of step {step}"):
            flat = self._job.state_dict_of(DATALOADER)

        def write(path: str) -> None:
            dcp.save(flat, path, process_group=ranks.group, sync_files=self._sync)

        saving.write_step(ranks, self.folder, step, write, sync=self._sync)
        if ranks.rank == 0 and not is_remote(self.folder):
            self._forget(step)

    def load(self, step: int, ranks: Ranks) -> list[str]:
        """Load the dataloader state that belongs to a full step. Returns notes for the log."""
        path = f"{self.folder}/{folders.step_name(step)}"
        found = ranks.broadcast(_exists(path))
        if not found:
            return [f"no dataloader state of this replica for step {step}: its data start afresh"]
        with ranks.together("reading the dataloader state"):
            wanted = self._job.targets((DATALOADER,), dcp.read_manifest(path))
            self._job.restore((DATALOADER,), dcp.load(path, wanted))
        return [f"dataloader state of this replica loaded from {path}"]

    def _forget(self, step: int) -> None:
        """Keep this step, the one before, and those for which a full step exists."""
        full = folders.list_steps(Path(self._main))
        mine = folders.list_steps(Path(self.folder))
        for n in sorted(mine)[:-2]:
            if n != step and n not in full:
                folders.remove(mine[n])


def _exists(path: str) -> bool:
    if not is_remote(path):
        return folders.has_marker(Path(path))
    import fsspec

    filesystem, inside = fsspec.core.url_to_fs(path)
    return bool(filesystem.exists(f"{inside}/.metadata"))
