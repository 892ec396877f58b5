"""An optimizer with every odd kind of value in its state, for the chapter `optimizer`.

Swapped moments are in `conformance/swap.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


class Mixed(Optimizer):
    """State in other dtypes than its parameter's, and steps as a number, an int and 0-d tensors."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.25})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(
                        step=0,
                        rate=1.0,
                        count=torch.tensor(0, dtype=torch.int64),
                        low=torch.zeros_like(p, dtype=torch.bfloat16),
                        high=torch.full_like(p, 1 + 2.0**-40, dtype=torch.float64),
                        code=torch.zeros_like(p, dtype=torch.uint8),
                    )
                state["step"] += 1
                state["rate"] *= 0.5
                state["count"] += 3
                state["low"].mul_(0.5).add_(p.grad)
                state["high"].add_(p.grad)
                state["code"].add_(7)
                p.add_(state["low"].to(p.dtype), alpha=-group["lr"])
