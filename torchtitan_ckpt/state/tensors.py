"""What every state needs to know of one tensor: its local part, its layout, whether it has storage.

DTensors are built here and nowhere else in `state/`, by their constructor, because
`DTensor.from_local` would move a host copy back to the mesh's device. No file and no format is
touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, without autograd; any other tensor itself."""
    if isinstance(tensor, DTensor):
        return tensor._local_tensor
    return tensor.detach() if tensor.requires_grad else tensor


def local_bytes(values: Mapping[str, Any]) -> int:
    """Bytes that this rank holds of the tensors among `values`."""
    return sum(local_of(value).nbytes for value in values.values() if isinstance(value, Tensor))


def wrap_local(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """`local` as this rank's part of a tensor of the global `shape`, wherever `local` lives.

    The mesh stays the training job's own: torch's staging does the same, and DCP asks a DTensor
    only for its mesh coordinates and its local tensor.
    """
    stride = torch.empty(tuple(shape), device="meta").stride()
    spec = DTensorSpec(
        mesh,
        tuple(placements),
        tensor_meta=TensorMeta(torch.Size(shape), stride, local.dtype),
    )
    build: Callable[..., DTensor] = DTensor
    return build(local, spec, requires_grad=False)


def like(tensor: Tensor, local: Tensor) -> Tensor:
    """`local` in the place of `tensor`'s local part: same mesh, placements and global shape."""
    if not isinstance(tensor, DTensor):
        return local
    return wrap_local(local, tensor.device_mesh, tensor.placements, tensor.shape)


def empty_like(
    tensor: Tensor, dtype: torch.dtype, device: torch.device | str | None = None
) -> Tensor:
    """An uninitialised tensor laid out as `tensor` is, in another dtype or on another device."""
    local = local_of(tensor)
    return like(tensor, torch.empty(local.shape, dtype=dtype, device=device or local.device))


def distribute(full: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """This rank's part of `full`, which every rank holds; nothing is communicated."""
    plain = wrap_local(full, mesh, [Replicate()] * mesh.ndim, full.shape)
    part: DTensor = plain.redistribute(mesh, tuple(placements))
    return wrap_local(local_of(part).clone(), mesh, placements, full.shape)


def is_emptied(tensor: Tensor) -> bool:
    """Elements without bytes behind them: storage resized to zero, or a meta tensor."""
    part = local_of(tensor)
    if part.numel() == 0 or part.layout is not torch.strided:
        return False
    if part.is_meta:
        return True
    last = sum((size - 1) * step for size, step in zip(part.shape, part.stride(), strict=True))
    needed = (part.storage_offset() + last + 1) * part.element_size()
    return part.untyped_storage().nbytes() < needed


def is_plain_kind(value: Any) -> bool:
    """Whether this package knows how to copy and store this tensor: dense, and no wrapper."""
    if type(value) is not Tensor and not isinstance(value, torch.nn.Parameter | DTensor):
        return isinstance(value, torch.nn.Buffer)
    return local_of(value).layout is torch.strided and not local_of(value).is_quantized


def same_tensor(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors show the same bytes in the same way (a tie), without comparing them."""
    x, y = local_of(a), local_of(b)
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and x.device == y.device
        and x.stride() == y.stride()
        and x.storage_offset() == y.storage_offset()
        and x.untyped_storage()._cdata == y.untyped_storage()._cdata
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality of bytes: NaN equals itself, and 0.0 differs from -0.0."""
    x, y = local_of(a), local_of(b)
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    return torch.equal(_as_bytes(x), _as_bytes(y.to(x.device)))


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
