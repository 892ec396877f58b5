"""What a test inside a simulated process can ask the simulator: bytes, calls, planned faults.

Works only where `libascendcl.so` is the simulator; `attached` says whether it is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from torchtitan_ckpt.device import simulated_runtime


def attached() -> bool:
    """Whether this process runs on the simulated device."""
    return simulated_runtime() is not None


def bytes_in_use(device: int = 0) -> int:
    """Device memory that torch_npu's allocator holds, as the runtime counts it."""
    return _number("npusim_bytes_in_use", device)


def peak_bytes(device: int = 0) -> int:
    """The most that `bytes_in_use` has been since the start or `reset_peak`."""
    return _number("npusim_peak_bytes", device)


def reset_peak(device: int = 0) -> None:
    _number("npusim_reset_peak", device)


def pinned_bytes() -> int:
    """Pinned host memory in use."""
    return _number("npusim_pinned_bytes")


def calls(name: str) -> int:
    """How often an entry point of the runtime, an operator (`aclnnAdd`) or `task` was called."""
    return _number("npusim_calls", name.encode())


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


def _number(function: str, *args: object) -> int:
    call = getattr(_library(), function)
    call.restype = ctypes.c_size_t
    return int(call(*args))
