"""Expert formats of a model-only checkpoint: w1 and w3 apart (`standard`) or fused as w13 (`gmm`).

The conversion is the family's own tables composed, so it works on whole tensors, sharded or not;
nothing is ever fused shard by shard. A full, resumable step keeps the format that the job trains
in, because its optimizer state does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan_ckpt.adapter import MappingAdapter, StateDictAdapter
from torchtitan_ckpt.errors import ConfigError, Problem
from torchtitan_ckpt.mapping import Mapping as KeyMapping
from torchtitan_ckpt.mapping.compose import compose

_FUSED = ".w13"


@dataclass(frozen=True, slots=True)
class OtherFormat:
    """From the format a job trains in to the one that a checkpoint is stored in, and back."""

    stored: str
    table: KeyMapping
    forward: bool

    def convert(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state dict of the job's format in the stored one."""
        return self.table.to_hf(state) if self.forward else self.table.from_hf(state)

    def back(self, state: dict[str, Any], *, like: dict[str, Any]) -> dict[str, Any]:
        """The way back; DTensors get the placements of `like`."""
        if self.forward:
            return self.table.from_hf(state, like=like)
        return self.table.to_hf(state)


def format_of(keys: Collection[str]) -> str:
    """The expert format that a model's keys are in; a model without experts is `standard`."""
    return "gmm" if any(key.endswith(_FUSED) for key in keys) else "standard"


def other_format(
    adapter: StateDictAdapter | None, live: Mapping[str, Any], stored: Collection[str]
) -> OtherFormat | None:
    """How to get from a job's format to a checkpoint's; None where they are the same."""
    return _between(adapter, format_of(live), format_of(stored))


def in_format(
    adapter: StateDictAdapter | None, state: dict[str, Any], wanted: str
) -> dict[str, Any]:
    """A model's state dict in `wanted`; unchanged where it is in that format or has no experts.

    Raises ConfigError where the adapter's family has no such format.
    """
    other = _between(adapter, format_of(state), wanted)
    return state if other is None else other.convert(state)


def _between(adapter: StateDictAdapter | None, live: str, stored: str) -> OtherFormat | None:
    if live == stored:
        return None
    if not isinstance(adapter, MappingAdapter):
        raise ConfigError(
            Problem(
                code="config.expert-format",
                what=f"Experts are to be converted from {live} to {stored}, and the job's adapter "
                "cannot do that.",
                expected="torchtitan_ckpt.adapter.MappingAdapter",
                actual=type(adapter).__name__,
                fix="use MappingAdapter, or convert the checkpoint with torchtitan-ckpt convert "
                "--save-expert-format",
            )
        )
    tables = {
        name: adapter.family.mapping(adapter.config, adapter.generation, experts=name)
        for name in ("standard", "gmm")
    }
    table = compose(tables["standard"], tables["gmm"])
    return OtherFormat(stored, table, forward=stored == "gmm")
