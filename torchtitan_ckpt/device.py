"""Which accelerator this process uses - npu, cuda or cpu - and all that differs between them.

The one place that names `torch.npu` and `torch.cuda`: detection, process-group backends, streams,
pinned host memory, the allocator's cache and its figures, and the sentences that say why an
accelerator cannot be used. It moves no checkpoint data and knows no format.

`import torch` itself fails where torch_npu is installed without CANN, so this module imports torch
only inside functions; `import_torch` turns that failure into one `DeviceError`. What failures mean
is written in `device_failures`.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from torchtitan_ckpt.device_failures import (
    AUTOLOAD_ENV,
    explain_import_error,
    explain_runtime_error,
    installed_version,
    release,
    version_mismatch,
)
from torchtitan_ckpt.errors import ConfigError, DeviceError, Problem, nearest

if TYPE_CHECKING:
    import torch

__all__ = [
    "AUTOLOAD_ENV",
    "ENV",
    "SHARE_ENV",
    "SIMULATED",
    "Device",
    "DeviceKind",
    "Event",
    "Memory",
    "Stream",
    "current",
    "explain_import_error",
    "explain_runtime_error",
    "import_torch",
    "of",
    "simulated_runtime",
    "why_not",
]

ENV = "TORCHTITAN_CKPT_DEVICE"
SHARE_ENV = "TORCHTITAN_CKPT_SHARE_DEVICE"  # to try several ranks where there is one CUDA device

# The words every report uses for the stand-in: it is never called validated.
SIMULATED = "simulated Ascend device (real torch_npu, simulated CANN)"


class DeviceKind(StrEnum):
    """The kinds of device, best first: detection takes the first that is usable."""

    NPU = "npu"
    CUDA = "cuda"
    CPU = "cpu"


_BACKEND = {DeviceKind.NPU: "cpu:gloo,npu:hccl", DeviceKind.CUDA: "cpu:gloo,cuda:nccl"}


class Event(Protocol):
    """A point in a stream. `query` is True once everything before it has run."""

    def synchronize(self) -> Any: ...
    def query(self) -> bool: ...


class Stream(Protocol):
    """A queue of device work; on a CPU it is always empty."""

    def synchronize(self) -> Any: ...
    def wait_stream(self, stream: Any) -> Any: ...
    def record_event(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class _Done:
    """Stream and event of a CPU, where work is finished when the call returns."""

    def synchronize(self) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def record_event(self) -> _Done:
        return self

    def query(self) -> bool:
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one device: held by tensors, at most so far, kept by the allocator, free, all.

    All zero on a CPU, whose memory the operating system counts.
    """

    allocated: int = 0
    peak: int = 0
    reserved: int = 0
    free: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class Device:
    """The accelerator of this process. Made by `current` or `of`, never by hand.

    `passed_over` says for each better kind, in one sentence, why it was not taken; it is empty
    when the kind was asked for.
    """

    kind: DeviceKind
    passed_over: tuple[Problem, ...] = field(default=(), compare=False)

    @property
    def module(self) -> Any:
        """torch's own module of this kind (`torch.npu`, `torch.cuda`, `torch.cpu`)."""
        return _torch().get_device_module(self.kind.value)

    @property
    def backend(self) -> str:
        """What `init_process_group` wants: objects always travel over gloo."""
        return "gloo" if self.shared else _BACKEND.get(self.kind, "gloo")

    @property
    def shared(self) -> bool:
        """Whether ranks may share a device. NCCL and HCCL want one for each, gloo does not."""
        asked = self.kind is DeviceKind.CUDA and os.environ.get(SHARE_ENV) == "1"
        return asked or self.kind is DeviceKind.CPU

    @property
    def count(self) -> int:
        """How many devices this process sees; 1 for a CPU."""
        return 1 if self.kind is DeviceKind.CPU else int(self.module.device_count())

    @property
    def simulated(self) -> bool:
        """Whether the CANN runtime underneath is the stand-in of the conformance suite."""
        return self.kind is DeviceKind.NPU and simulated_runtime() is not None

    @property
    def label(self) -> str:
        """How reports name it: `cpu`, `cuda`, `npu` or `npu-simulated`."""
        return "npu-simulated" if self.simulated else self.kind.value

    def describe(self) -> str:
        """One line for people: name, count, and whether the device is real."""
        if self.kind is DeviceKind.CPU:
            return "cpu"
        text = f"{self.count} x {self.module.get_device_name(0)} ({self.kind.value})"
        return f"{text}, {SIMULATED}" if self.simulated else text

    def at(self, index: int | None = None) -> torch.device:
        """The torch device with this index; without one, the current device of this process."""
        if self.kind is DeviceKind.CPU:
            return _made("cpu")
        chosen = int(self.module.current_device()) if index is None else index
        return _made(f"{self.kind.value}:{chosen}")

    def select(self, local_rank: int) -> torch.device:
        """Make the device of this local rank the current one and return it.

        Raises DeviceError when the node has fewer devices than local ranks.
        """
        if self.kind is DeviceKind.CPU:
            return self.at()
        if self.shared:
            local_rank %= self.count
        if not 0 <= local_rank < self.count:
            raise DeviceError(
                Problem(
                    code="device.no-such-index",
                    what=f"local rank {local_rank} has no {self.kind.value} device of its own",
                    expected=f"at most {self.count} ranks on this node",
                    actual=f"LOCAL_RANK={local_rank}",
                    fix="start fewer ranks a node, or make more devices visible",
                )
            )
        self.module.set_device(local_rank)
        return self.at(local_rank)

    def synchronize(self) -> None:
        """Wait until all work on the current device has run."""
        if self.kind is not DeviceKind.CPU:
            self.module.synchronize()

    def empty_cache(self) -> None:
        """Give the allocator's unused blocks back to the device (`empty_cache_after_save`)."""
        if self.kind is not DeviceKind.CPU:
            self.module.empty_cache()

    def memory(self) -> Memory:
        """Bytes in use on the current device, as the allocator and the driver count them."""
        if self.kind is DeviceKind.CPU:
            return Memory()
        free, total = self.module.mem_get_info()
        return Memory(
            allocated=int(self.module.memory_allocated()),
            peak=int(self.module.max_memory_allocated()),
            reserved=int(self.module.memory_reserved()),
            free=int(free),
            total=int(total),
        )

    def reset_peak(self) -> None:
        """Let `memory().peak` start again from what is allocated now."""
        if self.kind is not DeviceKind.CPU:
            self.module.reset_peak_memory_stats()

    def stream(self) -> Stream:
        """A new side stream. Let it `wait_stream(current_stream())` before it reads anything."""
        if self.kind is DeviceKind.CPU:
            return _Done()
        made: Stream = self.module.Stream()
        return made

    def current_stream(self) -> Stream:
        """The stream on which operators of this thread run now."""
        if self.kind is DeviceKind.CPU:
            return _Done()
        running: Stream = self.module.current_stream()
        return running

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        """Run the operators of the block on `stream`."""
        if self.kind is DeviceKind.CPU:
            yield
        else:
            with self.module.stream(stream):
                yield

    def pin_refusal(self) -> str:
        """Why host memory cannot be pinned here, in words; empty where it can."""
        if self.kind is DeviceKind.CPU:
            return "no accelerator is in use, so there is nothing to pin host memory for"
        return ""

    def host_empty(
        self, shape: Sequence[int], dtype: torch.dtype, *, pin: bool = True
    ) -> torch.Tensor:
        """Uninitialised host memory, pinned where `pin_refusal` is empty.

        torch's own stager asks `torch.cuda.is_available()` and so never pins on an NPU;
        the allocator underneath does.
        """
        made: torch.Tensor = _torch().empty(
            tuple(shape), dtype=dtype, device="cpu", pin_memory=pin and not self.pin_refusal()
        )
        return made


def current(force: str | None = None) -> Device:
    """The device to use: `force`, else the environment variable, else the best usable kind.

    Raises ConfigError for a kind that does not exist and DeviceError, with the remedy, when the
    kind that was asked for cannot be used.
    """
    asked, source = (force, "--device") if force else (os.environ.get(ENV, ""), ENV)
    if asked:
        kind = _parse(asked, source)
        problem = why_not(kind)
        if problem is not None:
            raise DeviceError(problem)
        return Device(kind)
    passed_over: list[Problem] = []
    for kind in DeviceKind:
        problem = why_not(kind)
        if problem is None:
            return Device(kind, tuple(p for p in passed_over if p.code != "device.not-installed"))
        passed_over.append(problem)
    raise DeviceError(passed_over[-1])  # even the CPU: `import torch` itself fails


def of(where: torch.Tensor | torch.device | str) -> Device:
    """The device that a tensor lies on. A kind without its own code here counts as a CPU."""
    kind = str(getattr(where, "device", where)).partition(":")[0]
    return Device(DeviceKind(kind) if kind in set(DeviceKind) else DeviceKind.CPU)


def why_not(kind: DeviceKind) -> Problem | None:
    """Why a kind of device cannot be used in this process: one sentence and the remedy, or None."""
    if kind is DeviceKind.NPU:
        return _why_not_npu()
    try:
        torch = _torch()
    except DeviceError as error:
        return error.problems[0]
    if kind is DeviceKind.CPU or torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return Problem(
            code="device.not-installed",
            what=f"torch {torch.__version__} is built without CUDA",
            fix="install a CUDA build of torch",
        )
    return Problem(
        code="device.none-visible",
        what=f"torch {torch.__version__} is built for CUDA and sees no CUDA device",
        fix="run nvidia-smi, and check CUDA_VISIBLE_DEVICES and the driver",
    )


_failed_import: list[Problem] = []


def import_torch() -> Any:
    """`import torch`, with its failures as one DeviceError that says the remedy.

    The first failure is kept: a second import of a half-loaded torch can crash the process.
    """
    if _failed_import:
        raise DeviceError(*_failed_import)
    try:
        return importlib.import_module("torch")
    except Exception as error:
        problem = explain_import_error(error)
        if problem is None:
            raise
        _failed_import.append(problem)
        raise DeviceError(problem) from error


def simulated_runtime() -> ctypes.CDLL | None:
    """The stand-in for the CANN runtime, if that is what `libascendcl.so` is here; else None."""
    try:
        library = ctypes.CDLL("libascendcl.so")
    except OSError:
        return None
    return library if hasattr(library, "npusim_version") else None


def _torch() -> Any:
    return import_torch()


def _made(text: str) -> torch.device:
    made: torch.device = _torch().device(text)
    return made


def _parse(text: str, source: str) -> DeviceKind:
    try:
        return DeviceKind(text.strip().lower())
    except ValueError:
        known = [kind.value for kind in DeviceKind]
        guess = nearest(text, known)
        raise ConfigError(
            Problem(
                code="device.unknown-kind",
                what=f"{source} names a kind of device that does not exist",
                expected=", ".join(known),
                actual=text,
                fix=f"did you mean {guess}?" if guess else f"choose one of {', '.join(known)}",
            )
        ) from None


def _why_not_npu() -> Problem | None:
    if installed_version("torch_npu") is None:
        return Problem(
            code="device.not-installed",
            what="torch_npu is not installed",
            fix=f"pip install torch_npu=={release(installed_version('torch') or '')} --no-deps, "
            "in an environment with CANN",
        )
    try:
        torch = _torch()
    except DeviceError as error:
        return error.problems[0]
    if not hasattr(torch, "npu"):
        return version_mismatch() or Problem(
            code="device.autoload-off",
            what=f"torch_npu is installed and {AUTOLOAD_ENV}=0 keeps torch from loading it",
            fix=f"unset {AUTOLOAD_ENV}, or import torch_npu before this package is used",
        )
    if torch.npu.device_count() == 0:
        return Problem(
            code="device.none-visible",
            what="torch_npu and CANN are loaded, and no NPU is visible",
            fix="run npu-smi info; check ASCEND_RT_VISIBLE_DEVICES, the driver, and that the "
            "container was given the /dev/davinci* devices",
        )
    return None
