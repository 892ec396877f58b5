"""Synthetic data that can be resumed: what a batch holds follows from its number alone.

A rank's stream depends on the seed, its data-parallel rank and the data-parallel size. The state is
how many batches were taken, laid out like torchtitan's: one bytes value a data-parallel rank
(`dp_rank_0`), and the size.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from torchtitan_ckpt.errors import DamagedError, MismatchError, Problem


class SyntheticDataLoader:
    """Endless batches of tokens (batch, seq_len + 1): noisy arithmetic that a model can learn."""

    def __init__(
        self,
        *,
        vocab_size: int,
        seq_len: int,
        batch_size: int,
        seed: int,
        dp_rank: int = 0,
        dp_world_size: int = 1,
    ) -> None:
        self.vocab_size = vocab_size
        self.shape = (batch_size, seq_len + 1)
        self.seed = seed
        self.dp_rank = dp_rank
        self.dp_world_size = dp_world_size
        self.taken = 0

    def __iter__(self) -> SyntheticDataLoader:
        return self

    def __next__(self) -> Tensor:
        stream = (self.seed * 1_000_003 + self.taken) * self.dp_world_size + self.dp_rank
        generator = torch.Generator().manual_seed(stream)
        start = torch.randint(self.vocab_size, (self.shape[0], 1), generator=generator)
        noise = torch.randint(3, self.shape, generator=generator)
        rows = [start[:, 0]]
        for column in range(1, self.shape[1]):
            rows.append((rows[-1] * 5 + 3 + noise[:, column]) % self.vocab_size)
        self.taken += 1
        return torch.stack(rows, dim=1)

    def state_dict(self) -> dict[str, Any]:
        """This rank's progress under its own key, and the data-parallel size."""
        progress = json.dumps({"batches": self.taken}).encode()
        return {f"dp_rank_{self.dp_rank}": progress, "world_size": self.dp_world_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last batch that was taken. An empty state changes nothing.

        Raises MismatchError when the state was saved by another number of data-parallel ranks:
        which rank saw what cannot be dealt out anew.
        """
        if not state:
            return
        if state.get("world_size") != self.dp_world_size:
            raise MismatchError(
                Problem(
                    code="train.dataloader-degree",
                    what="the dataloader's progress was saved by another number of data-parallel "
                    "ranks",
                    expected=f"{self.dp_world_size}",
                    actual=f"{state.get('world_size')}",
                    fix="resume with the same data-parallel degrees, or leave the progress out: "
                    "--checkpoint.exclude_from_loading dataloader",
                )
            )
        key = f"dp_rank_{self.dp_rank}"
        try:
            self.taken = int(json.loads(state[key])["batches"])
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(
                Problem(
                    code="train.dataloader-state",
                    what="the dataloader's progress cannot be read",
                    where=f"dataloader.{key}",
                    cause=repr(error),
                    fix="--checkpoint.exclude_from_loading dataloader starts the data afresh",
                )
            ) from error
