"""The random number generators of this process, as a state that can be saved and restored.

Python's, numpy's global one, torch's on the host and on the accelerator in use, and any generator
that is handed in by name. They differ from rank to rank, so every rank saves its own.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


class RngState:
    """Register it among the states of a job; `generators` are torch generators by name."""

    rank_local = True

    def __init__(self, generators: Mapping[str, torch.Generator] | None = None) -> None:
        self._generators = dict(generators or {})

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=True),
            "torch": torch.get_rng_state(),
        }
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None and torch.accelerator.is_available():
            module = torch.get_device_module(accelerator)
            state[f"device_{accelerator.type}"] = module.get_rng_state().cpu()
        for name, generator in self._generators.items():
            state[f"generator_{name}"] = generator.get_state().cpu()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None and f"device_{accelerator.type}" in state:
            module = torch.get_device_module(accelerator)
            module.set_rng_state(state[f"device_{accelerator.type}"])
        for name, generator in self._generators.items():
            generator.set_state(state[f"generator_{name}"])
