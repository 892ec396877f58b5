"""Read tensors of a `.pt` file box by box, for tools that stream; nothing is kept but the file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

import torch

from torchtitan_ckpt.errors import NotFoundError, Problem, nearest
from torchtitan_ckpt.formats.box_reads import read_tasks
from torchtitan_ckpt.formats.dcp_plan import Job
from torchtitan_ckpt.formats.torch_file import OpenedFile
from torchtitan_ckpt.manifest import Shard


class TorchReader:
    """An open `.pt` file. Use it as a context to close it."""

    def __init__(self, path: str | os.PathLike[str], *, trust: bool = False) -> None:
        self._opened = OpenedFile(path).__enter__()
        self.manifest = self._opened.manifest(trust=trust)

    def fill(self, key: str, offsets: tuple[int, ...], out: torch.Tensor) -> None:
        """Fill a plain CPU tensor, casting to its dtype, with the box that begins at `offsets`."""
        entry = self.manifest.tensors.get(key)
        if entry is None:
            raise NotFoundError(
                Problem(
                    code="torch.no-key",
                    what=f"the file has no tensor {key!r}",
                    where=self.manifest.path,
                    actual=f"nearest: {nearest(key, self.manifest.tensors)}",
                )
            )
        if not out.numel():
            return
        shard = Shard((0,) * len(entry.shape), entry.shape, "", 0, 0)
        job = Job(key, entry.dtype, shard, offsets, tuple(out.shape), out)
        with torch.no_grad():
            for task in read_tasks(self._opened.file, 0, self._opened.payloads[key], job):
                task()

    def objects(self, keys: Iterable[str]) -> Mapping[str, Any]:
        """The values of these keys that are no tensors."""
        wanted = set(keys)
        return {k: v for k, v in self._opened.values().items() if k in wanted} if wanted else {}

    def close(self) -> None:
        self._opened.__exit__()

    def __enter__(self) -> TorchReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
