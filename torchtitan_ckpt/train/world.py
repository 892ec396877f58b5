"""Where this process stands among the ranks: device, process group, meshes, its share of the data.

A single process has no process group and no mesh; its tensors stay plain.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan_ckpt import device as devices
from torchtitan_ckpt.collective import own_group
from torchtitan_ckpt.parallel import Meshes, ParallelDegrees, build_meshes


@dataclass(frozen=True, slots=True)
class Place:
    """What the launcher said: this rank, its number on the node, and how many there are."""

    rank: int
    local_rank: int
    size: int


def place() -> Place:
    """Read torchrun's environment; alone without it."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    rank, local_rank, size = (int(os.environ.get(name, "0")) for name in names)
    return Place(rank, local_rank, max(size, 1))


@dataclass(frozen=True, slots=True)
class World:
    """The ranks of a running job; `meshes` is None for a single process."""

    place: Place
    device: torch.device
    meshes: Meshes | None = None

    def coordinate(self, axis: str) -> int:
        """This rank's number along an axis of the dense mesh."""
        return 0 if self.meshes is None else self.meshes.dense.get_local_rank(axis)

    def size(self, axis: str) -> int:
        """The number of ranks along an axis of the dense mesh."""
        return 1 if self.meshes is None else self.meshes.degrees.sizes[axis]

    @property
    def dp_rank(self) -> int:
        return self.coordinate("dp_replicate") * self.size("fsdp") + self.coordinate("fsdp")

    @property
    def dp_size(self) -> int:
        return self.size("dp_replicate") * self.size("fsdp")

    def total(self, value: Tensor, *axes: str) -> Tensor:
        """Sum `value` in place over the ranks along these axes and return it."""
        for axis in axes:
            if self.meshes is not None and self.size(axis) > 1:
                group = self.meshes.dense.get_group(axis)
                torch.distributed.all_reduce(value, group=group)
        return value


@contextmanager
def enter(degrees: ParallelDegrees, *, device: str | None) -> Iterator[World]:
    """Join the ranks, build the meshes, and leave at the end, also after an error."""
    here = place()
    kind = devices.current(device)
    chosen = kind.select(here.local_rank)
    if here.size == 1:
        yield World(here, chosen)
        return
    with own_group(kind.backend):
        yield World(here, chosen, build_meshes(degrees, kind.kind.value))
