"""The random number generators of this process, as a state that can be saved and restored.

Python's, numpy's global one, torch's on the host and on the accelerator that the job computes on,
and any generator that is handed in by name. They differ from rank to rank, so every rank saves its
own, as one value. A job with a `train_state` has them saved beside it without asking (`job`).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

# Where a job's generators lie on disk: with `train_state`, under a name that nothing else has.
PREFIX = "train_state.@rng."


def is_key(key: str) -> bool:
    """Whether `key` of a checkpoint belongs to a job's generators."""
    return key.startswith(PREFIX)


def is_value(key: str) -> bool:
    """Whether `key` holds a rank's generators, which are one value and never taken apart."""
    return is_key(key) and key.endswith(".state")


class RngState:
    """This rank's generators; `generators` are further torch generators by name.

    `split` says in words how the job is split: rank 3 of one split is not rank 3 of another.
    `accelerator` is the kind of device whose generator is among them (`accelerator_of`). Without
    one no device is touched: a job on the CPU of a machine with accelerators leaves them alone.
    """

    rank_local = True

    def __init__(
        self,
        generators: Mapping[str, torch.Generator] | None = None,
        *,
        split: str = "",
        accelerator: str = "",
    ) -> None:
        self._generators = dict(generators or {})
        self.split = split
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        version, numbers, next_gauss = random.getstate()
        name, words, position, has_gauss, gauss = np.random.get_state(legacy=True)
        held: dict[str, Any] = {
            "split": self.split,
            "python": (version, _packed(numbers), next_gauss),
            "numpy": (name, _packed(words), int(position), has_gauss, gauss),
            "torch": _bytes(torch.get_rng_state()),
        }
        if self._accelerator:
            module = torch.get_device_module(self._accelerator)
            held[f"device_{self._accelerator}"] = _bytes(module.get_rng_state())
        for key, generator in self._generators.items():
            held[f"generator_{key}"] = _bytes(generator.get_state())
        return {"state": held}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        held = state["state"]
        version, numbers, next_gauss = held["python"]
        name, words, *rest = held["numpy"]
        random.setstate((version, tuple(_unpacked(numbers).tolist()), next_gauss))
        np.random.set_state((name, _unpacked(words), *rest))
        torch.set_rng_state(_tensor(held["torch"]))
        if self._accelerator and f"device_{self._accelerator}" in held:
            module = torch.get_device_module(self._accelerator)
            module.set_rng_state(_tensor(held[f"device_{self._accelerator}"]))
        for key, generator in self._generators.items():
            generator.set_state(_tensor(held[f"generator_{key}"]))

    def unfit(self, values: Mapping[str, Any], size: int) -> str:
        """Why what lies in a file cannot be this rank's, of `size`; empty when it can."""
        if "world_size" not in values:
            return "the checkpoint has none, as those of torchtitan"
        if values["world_size"] != size:
            return f"they were saved by {values['world_size']} ranks, and here are {size}"
        held = next((value for key, value in values.items() if key.endswith(".state")), None)
        saved = held.get("split") if isinstance(held, Mapping) else None
        if saved != self.split:
            return f"the job that saved was split otherwise ({saved}; now {self.split})"
        return ""


def split_in_words(tensors: Iterable[Any]) -> str:
    """The device meshes that a rank's tensors lie on, and how many tensors it holds."""
    count, meshes = 0, set()
    for tensor in tensors:
        count += 1
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            names = mesh.mesh_dim_names or range(mesh.ndim)
            meshes.add(" x ".join(f"{n} {s}" for n, s in zip(names, mesh.shape, strict=True)))
    return f"{count} tensors on {', '.join(sorted(meshes)) or 'no mesh'}"


def accelerator_of(tensors: Iterable[Any]) -> str:
    """The kind of device that a rank's tensors are computed on; empty when that is the host.

    Parameters that are offloaded to the host lie on a mesh that knows better.
    """
    for tensor in tensors:
        mesh = [tensor.device_mesh.device_type] if isinstance(tensor, DTensor) else []
        for kind in (tensor.device.type, *mesh):
            if kind not in ("cpu", "meta"):
                return str(kind)
    return ""


def _packed(numbers: Any) -> bytes:
    return np.asarray(numbers, "<u4").tobytes()


def _unpacked(data: bytes) -> NDArray[np.uint32]:
    return np.frombuffer(data, "<u4")


def _bytes(state: Tensor) -> bytes:
    return state.cpu().numpy().tobytes()


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
