"""What a test inside a simulated process can ask the simulator: bytes, calls, planned faults.

Works only where `libascendcl.so` is the simulator; `attached` says whether it is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from torchtitan_ckpt.device import simulated_runtime

_HOST = -1  # as the simulator numbers the devices


class _Use(ctypes.Structure):
    """Bytes of one device; the simulator counts in place."""

    _fields_ = (("now", ctypes.c_size_t), ("peak", ctypes.c_size_t))


def attached() -> bool:
    """Whether this process runs on the simulated device."""
    return simulated_runtime() is not None


def bytes_in_use(device: int = 0) -> int:
    """Device memory that torch_npu's allocator holds, as the runtime counts it."""
    return int(_use(device).now)


def peak_bytes(device: int = 0) -> int:
    """The most that `bytes_in_use` has been since the start or `reset_peak`."""
    return int(_use(device).peak)


def reset_peak(device: int = 0) -> None:
    use = _use(device)
    use.peak = use.now


def pinned_bytes() -> int:
    """Pinned host memory in use."""
    return bytes_in_use(_HOST)


def calls(name: str) -> int:
    """How often an entry point of the runtime, an operator (`aclnnAdd`) or `task` was called."""
    count = _library().npusim_calls
    count.restype = ctypes.c_long
    return int(count(name.encode()))


@contextmanager
def fault(call: str, nth: int, code: int) -> Iterator[None]:
    """Let the n-th call from now on fail with a CANN code; `Hccl*` names all that begin so.

    `task` is the execution of asynchronous work: the error shows when something waits for it.
    """
    library = _library()
    library.npusim_inject(call.encode(), ctypes.c_long(nth), code)
    try:
        yield
    finally:
        library.npusim_clear_faults()


def _library() -> ctypes.CDLL:
    library = simulated_runtime()
    if library is None:
        raise RuntimeError("this process does not run on the simulated Ascend device")
    return library


def _use(device: int) -> _Use:
    find = _library().npusim_use
    find.restype = ctypes.POINTER(_Use)
    use: _Use = find(device).contents
    return use
