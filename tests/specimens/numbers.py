"""Specimens of the chapter `keys`: numbers, and parts of a model."""

from __future__ import annotations

import re
from typing import Any

import torch

from tests.specimens.edits import (
    back,
    edited,
    renumber,
    text,
)
from tests.specimens.right import Right, State
from tests.specimens.specimen import BLIND, HEAD, Specimen


def numbers() -> list[Specimen]:
    experts, layers = r"\.experts\.", r"layers\."

    def both(pattern: str, place: int, there: Any, again: Any) -> type:
        return edited(
            renumber(pattern, place, there), before_import=renumber(pattern, place, again)
        )

    class FromFirst(Right):
        """Counts layers from the first one that is there."""

        def to_hf(self, state_dict: State) -> State:
            out = super().to_hf(state_dict)
            numbers = [int(m[1]) for k in out if (m := re.match(r"model\.layers\.(\d+)\.", k))]
            first = min(numbers, default=0)
            return renumber(r"^model\.layers", 0, lambda i: i - first)(out)

    class NeedsEmbedding(Right):
        def from_hf(self, hf_state_dict: State) -> State:
            assert "model.embed_tokens.weight" in hf_state_dict
            return super().from_hf(hf_state_dict)

    class MakesHead(Right):
        def to_hf(self, state_dict: State) -> State:
            out = super().to_hf(state_dict)
            out.setdefault(HEAD, torch.zeros(13, 10))
            return out

    def shift(i: int) -> int:
        return i + 1

    def exchange(i: int) -> int:
        return {3: 4, 4: 3}.get(i, i)

    return [
        Specimen(
            "experts-sorted-as-text",
            "keys.high-numbers",
            "experts.11",
            both(experts, 1, text(12), back(12)),
            "EXP-02",
            True,
            BLIND,
        ),
        Specimen(
            "layers-sorted-as-text",
            "keys.high-numbers",
            "layers.",
            both(layers, 0, text(12), back(12)),
            "EXP-02, STP-06",
            False,
            BLIND,
        ),
        Specimen(
            "layers-reversed",
            "keys.high-numbers",
            "layers.",
            both(layers, 0, lambda i: 11 - i if i < 12 else i, lambda i: 11 - i if i < 12 else i),
            "EXP-02",
            False,
            BLIND,
        ),
        Specimen(
            "one-weight-a-layer-off",
            "keys.layers",
            "o_proj",
            both("o_proj", 0, shift, lambda i: i - 1),
            "NAM-05",
            True,
            BLIND,
        ),
        Specimen(
            "two-layers-exchanged",
            "keys.layers",
            "o_proj",
            both("o_proj", 0, exchange, exchange),
            "EXP-02",
            False,
            BLIND,
        ),
        Specimen(
            "norm-a-layer-off",
            "keys.layers",
            "q_norm",
            both("q_norm", 0, shift, lambda i: i - 1),
            "TIE-06",
            False,
            BLIND,
        ),
        Specimen(
            "layers-counted-from-first",
            "keys.partial",
            "layers.",
            FromFirst,
            "OPT-18",
            False,
            BLIND,
        ),
        Specimen(
            "embedding-taken-for-granted",
            "keys.partial",
            "layers.",
            NeedsEmbedding,
            "BUF-03",
            True,
            BLIND,
        ),
        Specimen("head-made-up", "keys.partial", HEAD, MakesHead, "TIE-06", False, BLIND),
    ]
