"""How far a job has come: step, tokens, and the random stream. The manager's `train_state`."""

from __future__ import annotations

from typing import Any

import torch


class TrainState:
    """`step` and `ntokens_seen` are plain numbers, as in torchtitan; the RNG is a byte tensor.

    Every rank draws from the CPU's stream equally often, so one copy serves all of them.
    """

    def __init__(self) -> None:
        self.step = 0
        self.ntokens_seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "ntokens_seen": self.ntokens_seen,
            "rng_cpu": torch.get_rng_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])
        self.ntokens_seen = int(state["ntokens_seen"])
        torch.set_rng_state(state["rng_cpu"].cpu())
