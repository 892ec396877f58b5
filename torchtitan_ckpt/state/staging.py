"""A copy of a flat state on the host that nothing later can change: what a background save writes.

Buffers are kept and used again from the second snapshot on. Tensors that share bytes share their
copy. Device copies run together and are waited for once. What cannot be stored is refused here, the
same set in every mode; this module writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from torchtitan_ckpt.errors import Problem, SaveError
from torchtitan_ckpt.state.leaves import why_not_storable
from torchtitan_ckpt.state.tensors import is_emptied, like, local_of


class CopyDevice(Protocol):
    """What a stager asks of a device to copy beside the training's own work."""

    def stream(self) -> Any: ...
    def current_stream(self) -> Any: ...
    def use(self, stream: Any) -> AbstractContextManager[None]: ...


def require_storable(flat: Mapping[str, Any]) -> None:
    """Refuse what no file holds, before anything is copied or written. Raises `SaveError`."""
    problems = []
    for key, value in flat.items():
        why = (
            "None is left out of a state, not put in" if value is None else why_not_storable(value)
        )
        if why is None and isinstance(value, Tensor) and is_emptied(value):
            why = "it has elements and no storage"
        if why is not None:
            problems.append(
                Problem(
                    code="state.unstorable", what=f"{key} cannot be saved", where=key, cause=why
                )
            )
    if problems:
        raise SaveError(*problems)


class Stager:
    """Takes snapshots. `pin` keeps the buffers in pinned memory where an accelerator is in use.

    One snapshot is alive at a time: the next one overwrites its buffers, so wait for its writer
    first, or hand the writer's future to `written_by`, and `snapshot` waits for it. With `device`
    the copies run on a stream of their own and `snapshot` returns at once; call `wait` before the
    parameters change, and before the snapshot is read.
    """

    def __init__(self, pin: bool = False, *, device: CopyDevice | None = None) -> None:
        self._pin = pin and torch.accelerator.is_available()
        self._device = device
        self._stream: Any = None
        self._running = False
        self._writer: Future[Any] | None = None
        self._buffers: dict[str, Tensor] = {}

    def written_by(self, writer: Future[Any]) -> None:
        """The last snapshot is in use until `writer` is done."""
        self._writer = writer

    def snapshot(self, flat: Mapping[str, Any]) -> dict[str, Any]:
        """The values of `flat` as they are now, on the host. Raises `SaveError`.

        DTensors keep mesh and placements and have their local part on the host.
        """
        require_storable(flat)
        self.wait()
        if self._writer is not None:
            self._writer.exception()  # a failed write frees the buffers too; its error is its own
            self._writer = None
        plan = _Plan(self._buffers, self._pin)
        copied = {key: plan.add(key, value) for key, value in flat.items()}
        self._buffers = plan.used
        if plan.from_device and self._device is not None:
            self._stream = self._stream or self._device.stream()
            self._stream.wait_stream(self._device.current_stream())
            with self._device.use(self._stream):
                plan.copy()
            self._running = True
        else:
            plan.copy()
            if plan.from_device:
                torch.accelerator.synchronize()
        return copied

    def wait(self) -> None:
        """Return when the last snapshot is complete: the training may change its tensors."""
        if self._running:
            self._stream.synchronize()
            self._running = False

    def close(self) -> None:
        """Wait for copies and give the buffers back."""
        self.wait()
        self._buffers = {}


@dataclass(slots=True)
class _Plan:
    """The copies of one snapshot: where each tensor goes, then all copies together."""

    buffers: Mapping[str, Tensor]
    pin: bool
    used: dict[str, Tensor] = field(default_factory=dict)
    seen: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)
    sources: list[Tensor] = field(default_factory=list)
    targets: list[Tensor] = field(default_factory=list)
    from_device: bool = False

    def add(self, key: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return like(value, self._tensor(key, local_of(value)))
        return _copied(value)

    def _tensor(self, key: str, part: Tensor) -> Tensor:
        identity = (
            part.untyped_storage()._cdata,
            part.storage_offset(),
            tuple(part.shape),
            part.stride(),
            part.dtype,
        )
        if identity in self.seen and part.numel():
            return self.seen[identity]
        target = self._buffer(key, part)
        self.seen[identity] = target
        self.sources.append(part)
        self.targets.append(target)
        self.from_device |= part.device.type != "cpu"
        return target

    def _buffer(self, key: str, part: Tensor) -> Tensor:
        held = self.buffers.get(key)
        stride = (
            part.stride() if _is_dense(part) else torch.empty(part.shape, device="meta").stride()
        )
        fits = held is not None and held.dtype == part.dtype and held.shape == part.shape
        if held is None or not fits or held.stride() != stride:
            size, dtype = tuple(part.shape), part.dtype
            held = torch.empty_strided(size, stride, dtype=dtype, pin_memory=self.pin)
        self.used[key] = held
        return held

    def copy(self) -> None:
        with torch.no_grad():
            for source, target in zip(self.sources, self.targets, strict=True):
                target.copy_(source, non_blocking=True)


def _is_dense(part: Tensor) -> bool:
    """Whether its elements fill their memory without gaps or overlaps, in whatever order."""
    if part.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(part.stride(), part.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _copied(value: Any) -> Any:
    """A storable value of its own, tensors inside it on the host."""
    if isinstance(value, Tensor):
        return local_of(value).to("cpu", copy=True)
    if isinstance(value, np.ndarray | np.generic):
        return value.copy()
    if isinstance(value, dict):
        pairs = ((_copied(k), _copied(v)) for k, v in value.items())
        return type(value)(pairs)
    if isinstance(value, list | set | frozenset) or type(value) is tuple:
        return type(value)(_copied(item) for item in value)
    if isinstance(value, bytearray):
        return bytearray(value)
    return value
