"""A DCP storage reader over Hugging Face files, for jobs that load through `dcp.load`.

It gives torchtitan's own manager what this project reads: every dtype, quantized weights unpacked,
only the ranges that a rank needs. Reading itself is `formats/hf.py`; nothing is written here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from torchtitan_ckpt.errors import Problem, RefusedError
from torchtitan_ckpt.formats import hf
from torchtitan_ckpt.formats.quantized import logical_manifest
from torchtitan_ckpt.manifest import Manifest
from torchtitan_ckpt.mapping.apply import dtype_of


class HFReader(StorageReader):
    """Reads the tensors that a load plan asks for, in place, from a folder of safetensors."""

    def __init__(self, path: str | os.PathLike[str], *, dequantize: bool = False) -> None:
        self.path = Path(path)
        self.dequantize = dequantize
        self._manifest: Manifest | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id)
        self._manifest = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the files hold, as a consumer sees it: unpacked shapes and no scales."""
        self._manifest = manifest = hf.read_manifest(self.path)
        logical = logical_manifest(manifest) if self.dequantize else manifest
        entries: dict[str, Any] = {}
        for key, entry in logical.tensors.items():
            size = torch.Size(entry.shape)
            origin = torch.Size((0,) * len(size))
            entries[key] = TensorStorageMetadata(
                properties=TensorProperties(dtype=dtype_of(entry.dtype)),
                size=size,
                chunks=[ChunkStorageMetadata(offsets=origin, sizes=size)],
            )
        return Metadata(state_dict_metadata=entries)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, **_: Any) -> None:
        return None

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors, sharded or not, casting floats to their dtypes."""
        targets = getattr(planner, "state_dict", None)
        keys = {item.storage_index.fqn for item in plan.items}
        if targets is None or any(key not in targets for key in keys):
            raise RefusedError(
                Problem(
                    code="hf.planner",
                    what="this load planner does not show its state dict",
                    where=type(planner).__name__,
                    expected="torch's DefaultLoadPlanner or one that keeps `state_dict`",
                    fix="load with the default planner",
                )
            )
        manifest = self._manifest or hf.read_manifest(self.path)
        logical = logical_manifest(manifest) if self.dequantize else manifest
        hf.load(
            self.path,
            {key: targets[key] for key in sorted(keys)},
            manifest=manifest,
            dequantize=self.dequantize,
            widen=True,
            narrow=True,
            expected_keys=list(logical.tensors),
        )
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Path(checkpoint_id).exists()
