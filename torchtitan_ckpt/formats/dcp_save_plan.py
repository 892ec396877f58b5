"""The plan of a DCP save: torch's planner for a dict that is flat already.

Two things differ from torch's default: values that are dicts or lists are one entry under their own
key instead of being taken apart (a list that grows between save and load would change its keys),
and a DTensor whose local part is several boxes of the whole (uneven strided shards) is written as
those boxes, where torch would describe other rows than it writes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.tensor import DTensor

from torchtitan_ckpt.errors import Problem, SaveError, list_keys
from torchtitan_ckpt.formats.hf_boxes import Box, local_boxes


class FlatSavePlanner(DefaultSavePlanner):
    """See the module. The state comes here and not through `dcp.save`, which writes a log record
    for every key of what it is given."""

    def __init__(self, state: dict[str, Any]) -> None:
        super().__init__()
        self._state = state

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.state_dict = self._state
        self.mappings = {key: (key,) for key in self._state}
        self.is_coordinator = is_coordinator
        self._boxes: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    def create_local_plan(self) -> SavePlan:
        _refuse_emptied(self.state_dict)
        plan = super().create_local_plan()
        self._boxes = {}
        items: list[WriteItem] = []
        for item in plan.items:
            value = self.state_dict[item.index.fqn]
            if isinstance(value, DTensor):
                items += self._shards(item, value)
            else:
                items.append(item)
        self.plan = SavePlan(items, storage_data=plan.storage_data, planner_data=plan.planner_data)
        return self.plan

    def _shards(self, item: WriteItem, value: DTensor) -> list[WriteItem]:
        key = item.index.fqn
        try:
            boxes = [box for box in local_boxes(value) if box.numel]
        except ValueError as error:
            raise SaveError(
                Problem(
                    code="dcp.placement",
                    what=str(error),
                    where=key,
                    fix="redistribute it before the save",
                )
            ) from None
        chunk = item.tensor_data.chunk if item.tensor_data else None
        if chunk is None or not boxes:
            return [item]
        described = (tuple(chunk.offsets), tuple(chunk.sizes))
        if len(boxes) == 1 and (boxes[0].offsets, boxes[0].sizes) == described:
            return [item]
        local = value.to_local()
        return [self._piece(key, value, local, box) for box in boxes]

    def _piece(self, key: str, value: DTensor, local: torch.Tensor, box: Box) -> WriteItem:
        part = local
        for d, n in enumerate(box.sizes):
            part = part.narrow(d, box.local[d], n)
        self._boxes[key, box.offsets] = part
        offsets = torch.Size(box.offsets)
        return WriteItem(
            index=MetadataIndex(key, offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(box.sizes)),
                properties=TensorProperties.create_from_tensor(local),
                size=value.size(),
            ),
        )

    def lookup_object(self, index: MetadataIndex) -> Any:
        if self._boxes and index.offset is not None:
            part = self._boxes.get((index.fqn, tuple(index.offset)))
            if part is not None:
                return part
        return super().lookup_object(index)


def _refuse_emptied(state: dict[str, Any]) -> None:
    """Tensors whose memory lies elsewhere (swapped out, freed) would be saved as garbage."""
    bad = []
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            local = value.to_local() if isinstance(value, DTensor) else value
            if local.is_meta or (local.numel() and _storage_bytes(local) == 0):
                bad.append(key)
    if bad:
        raise SaveError(
            Problem(
                code="dcp.emptied",
                what=f"tensors without memory: {list_keys(bad)}",
                cause="an optimizer that swaps to the host, or a model on the meta device",
                fix="hand over the tensors that hold the values",
            )
        )


def _storage_bytes(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):  # sparse and wrapped tensors have none
        return -1
