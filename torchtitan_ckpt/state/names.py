"""Canonical names (FQNs) of parameters and buffers, whatever wraps the module.

Activation checkpointing, `torch.compile`, FSDP1 and DDP put segments of their own into the names;
a checkpoint never holds them. Which of a tied parameter's names is written is decided here too:
the first in registration order; the others are aliases that a load accepts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.nn.parallel import DistributedDataParallel

WRAPPER_SEGMENTS = frozenset({"_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module"})


@dataclass(frozen=True, slots=True)
class Names:
    """The names of one parameter: `canonical` is written, any of `aliases` is accepted."""

    canonical: str
    aliases: tuple[str, ...] = field(default=())

    @property
    def all(self) -> tuple[str, ...]:
        return (self.canonical, *self.aliases)


class Canonical:
    """Turns the raw names of one model part into canonical ones."""

    def __init__(self, part: nn.Module) -> None:
        # "module" is a wrapper only below a DDP module; a user may call a child so elsewhere.
        self._ddp = {
            tuple(filter(None, name.split(".")))
            for name, module in part.named_modules(remove_duplicate=False)
            if isinstance(module, DistributedDataParallel)
        }

    def __call__(self, name: str) -> str:
        raw = name.split(".")
        kept = [
            segment
            for i, segment in enumerate(raw)
            if segment not in WRAPPER_SEGMENTS
            and not (segment == "module" and tuple(raw[:i]) in self._ddp)
        ]
        return ".".join(kept)


def strip_segments(name: str) -> str:
    """`name` without wrapper segments, where the module itself is not at hand (no DDP)."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_SEGMENTS)


def parameter_names(model_parts: Sequence[nn.Module]) -> dict[int, Names]:
    """Names of every parameter of every part, by the parameter's identity."""
    found: dict[int, list[str]] = {}
    for part in model_parts:
        canonical = Canonical(part)
        for raw, parameter in part.named_parameters(remove_duplicate=False):
            name = canonical(raw)
            known = found.setdefault(id(parameter), [])
            if name not in known:
                known.append(name)
    return {key: Names(names[0], tuple(names[1:])) for key, names in found.items()}


def as_parts(model_parts: nn.Module | Iterable[nn.Module]) -> list[nn.Module]:
    """A list of modules, from one or many."""
    return [model_parts] if isinstance(model_parts, nn.Module) else list(model_parts)
