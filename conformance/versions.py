"""The versions that a report names, so that it can be repeated. Imports none of the packages."""

from __future__ import annotations

import functools
import platform
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("torch", "torch_npu", "torchtitan", "transformers", "safetensors", "torchtitan-ckpt")


@functools.cache
def versions() -> dict[str, str]:
    """Python's, and those of the packages that are installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
