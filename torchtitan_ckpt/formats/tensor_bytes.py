"""The memory of a CPU tensor as bytes, without a copy and for every dtype."""

from __future__ import annotations

import ctypes

import torch


def memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor. Valid only while the tensor lives."""
    if not tensor.is_cpu or not tensor.is_contiguous():
        raise ValueError("only a contiguous CPU tensor is a run of bytes")
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(bytearray())
    if tensor.untyped_storage().nbytes() < size:
        raise ValueError("the storage of this tensor has been emptied")
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values as an ordinary contiguous CPU tensor; itself when it is one."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.cpu().contiguous()
