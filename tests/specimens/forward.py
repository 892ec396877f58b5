"""Adapters of real families that are wrong in both directions alike: only a forward pass knows.

Keys, shapes and both round trips are right. There is no second conversion to compare with, as for
the adapter of a new model.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from conformance import Subject
from conformance.subjects import resolve
from conformance.subjects.configs import CONFIGS
from tests.specimens.right import State, half, interleave
from tests.specimens.specimen import Specimen

Turn = Callable[[Any], Any]


def turned(name: str, family: str, pattern: str, there: Turn, again: Turn) -> Callable[[], Subject]:
    """A family's adapter whose file tensors of a pattern are turned on export, back on import."""

    def change(state: State, turn: Turn) -> State:
        return {k: turn(v) if re.search(pattern, k) else v for k, v in state.items()}

    class Turned:
        def __init__(self, hf_assets_path: str | None = None) -> None:
            made = resolve(family).adapter
            assert made is not None
            self.right = made(hf_assets_path)

        def to_hf(self, state_dict: State) -> State:
            return change(self.right.to_hf(state_dict), there)

        def from_hf(self, hf_state_dict: State) -> State:
            return self.right.from_hf(change(hf_state_dict, again))

        def __getattr__(self, attribute: str) -> Any:
            return getattr(self.right, attribute)

    return lambda: replace(resolve(family), name=name, adapter=Turned, reference=None)


HEADS = CONFIGS["llama3"]["num_attention_heads"]
_SIZES = CONFIGS["deepseek_v3"]
PLAIN, ROPE = _SIZES["qk_nope_head_dim"], _SIZES["qk_rope_head_dim"]


def _rope_part(turn: Turn) -> Turn:
    """Turn the rotary rows of every head, which follow its other rows."""
    import torch

    def run(value: Any) -> Any:
        heads = value.reshape(-1, PLAIN + ROPE, value.shape[1])
        parts = [heads[:, :PLAIN], turn(heads[:, PLAIN:].transpose(1, 2)).transpose(1, 2)]
        return torch.cat(parts, dim=1).reshape(value.shape)

    return run


def _halves(value: Any) -> Any:
    """What alternates in the last dimension, as two halves."""
    return value.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def _alternating(value: Any) -> Any:
    return value.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


TURNED = (
    (
        "llama3-rope-as-the-model-has-it",
        "llama3",
        r"\.q_proj\.weight$",
        lambda v: interleave(v, HEADS),
        lambda v: half(v, HEADS),
        "LAY-08",
    ),
    (
        "deepseek-rope-half-split",
        "deepseek_v3",
        r"\.q_b_proj\.weight$",
        _rope_part(_halves),
        _rope_part(_alternating),
        "LAY-08",
    ),
    (
        "gpt-oss-gate-then-up",
        "gpt_oss",
        r"\.gate_up_proj(_bias)?$",
        _halves,
        _alternating,
        "EXP-01",
    ),
)
_INSTALLED = all(find_spec(name) for name in ("torchtitan", "triton", "transformers"))
SPECIMENS = tuple(
    Specimen(
        name,
        "forward.logits",
        name,
        kinds=kinds,
        alone=True,
        make=turned(name, family, pattern, there, again),
    )
    for name, family, pattern, there, again, kinds in (TURNED if _INSTALLED else ())
)
