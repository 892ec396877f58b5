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

# What a buffer was made for (shape, stride, dtype of its source), and the buffer.
_Buffer = tuple[tuple[Any, ...], Tensor]


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
    """Takes snapshots. `pin` keeps what comes from an accelerator in pinned memory.

    One snapshot is alive at a time: the next one overwrites its buffers, so wait for its writer
    first, or hand the writer's future to `written_by`, and `snapshot` waits for it. With `device`
    the copies run on a stream of their own and `snapshot` returns at once; call `wait` before the
    parameters change, and before the snapshot is read.
    """

    def __init__(self, pin: bool = False, *, device: CopyDevice | None = None) -> None:
        self._pin = pin
        self._device = device
        self._stream: Any = None
        self._running = False
        # Tensors made for the snapshot alone must outlive copies on a stream of their own: the
        # allocator would hand their memory out again, and the copy would read what came after.
        self._sources: list[Tensor] = []
        self._writer: Future[Any] | None = None
        self._buffers: dict[str, _Buffer] = {}

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
        if plan.afar and self._device is not None:
            self._stream = self._stream or self._device.stream()
            self._stream.wait_stream(self._device.current_stream())
            with self._device.use(self._stream):
                plan.copy()
            self._running, self._sources = True, [source for _, source in plan.afar]
        else:
            plan.copy()
            if plan.afar:
                torch.accelerator.synchronize()
        return copied

    def wait(self) -> None:
        """Return when the last snapshot is complete: the training may change its tensors."""
        if self._running:
            self._stream.synchronize()
            self._running, self._sources = False, []

    def close(self) -> None:
        """Wait for copies and give the buffers back."""
        self.wait()
        self._buffers = {}


@dataclass(slots=True)
class _Plan:
    """The copies of one snapshot: where each tensor goes, then all copies together."""

    buffers: Mapping[str, _Buffer]
    pin: bool
    used: dict[str, _Buffer] = field(default_factory=dict)
    seen: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)
    here: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    afar: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def add(self, key: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return like(value, self._tensor(key, local_of(value)))
        return _copied(value)

    def _tensor(self, key: str, part: Tensor) -> Tensor:
        layout = (part.shape, part.stride(), part.dtype)
        identity = (part.data_ptr(), part.device, *layout)
        if identity in self.seen and part.numel():
            return self.seen[identity]
        held = self.buffers.get(key)
        if held is None or held[0] != layout:
            # Dense in any order keeps its strides; gaps and overlaps are left out. What lies on the
            # host is never pinned: that would wake an accelerator which the job does not use.
            pin = self.pin and part.device.type != "cpu"
            held = layout, torch.empty_like(part, device="cpu", pin_memory=pin)
        self.used[key] = held
        self.seen[identity] = held[1]
        (self.here if part.device.type == "cpu" else self.afar).append((held[1], part))
        return held[1]

    def copy(self) -> None:
        with torch.no_grad():
            if self.here:
                torch._foreach_copy_([t for t, _ in self.here], [s for _, s in self.here])
            for target, source in self.afar:
                target.copy_(source, non_blocking=True)


def _copied(value: Any) -> Any:
    """A storable value of its own, tensors inside it on the host."""
    if type(value) in (int, float, bool, str, bytes):
        return value
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
