"""A rank's share of each tensor of a state, told by the rank, and what all ranks' shares make up.

A share is what the tensor's own mesh and placements say, as torch splits by them; that the values
there are right is for the checks. Nothing is gathered.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from conformance.spread import Part, Spread

Box = tuple[tuple[int, ...], tuple[int, ...]]  # start and size
PLAIN, PARTIAL = "a plain tensor, no DTensor", "not summed up over the ranks yet"


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank has of a tensor of `shape`."""

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    words: str = ""


def shares(state: Mapping[str, Any]) -> dict[str, Share]:
    """This rank's share of every tensor; those that lie alike have one and the same."""
    known: dict[Any, Share] = {}
    out = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            lies = (value.device_mesh, value.placements) if isinstance(value, DTensor) else None
            mark = tuple(value.shape), lies
            if mark not in known:
                known[mark] = _share(value)
            out[key] = known[mark]
    return out


def _share(tensor: Tensor) -> Share:
    shape = tuple(tensor.shape)
    whole = ((0,) * len(shape), shape)
    if not isinstance(tensor, DTensor):
        return Share(shape, (whole,), PLAIN)
    if any(placement.is_partial() for placement in tensor.placements):
        return Share(shape, (whole,), PARTIAL)
    sides = [_runs(tensor, dim) for dim in range(len(shape))]
    boxes = tuple(
        (tuple(start for start, _ in box), tuple(size for _, size in box))
        for box in itertools.product(*sides)
    )
    return Share(shape, boxes or (((0,) * len(shape),) * 2,))


def _runs(tensor: DTensor, dim: int) -> list[tuple[int, int]]:
    """Starts and lengths of what lies here along `dim`: of a strided shard, more than one."""
    along = [p if getattr(p, "dim", None) == dim else Replicate() for p in tensor.placements]
    # Numbers that are split as the tensor is: torch's own arithmetic, whatever the placement.
    side = [-1 if d == dim else 1 for d in range(tensor.ndim)]
    mesh = tensor.device_mesh
    numbers = torch.arange(tensor.shape[dim], device=mesh.device_type).view(side)
    split = distribute_tensor(numbers, mesh, along, src_data_rank=None)
    here = split.to_local().flatten().tolist()
    begins = [n for n, at in enumerate(here) if n == 0 or at != here[n - 1] + 1]
    return [(here[n], end - n) for n, end in zip(begins, [*begins[1:], len(here)], strict=False)]


def together(ranks: Mapping[str, Sequence[Share | None]]) -> tuple[Spread, ...]:
    """What every rank has of each tensor, None where it has no such key; like ones are one."""
    alike: dict[tuple[Share | None, ...], list[str]] = {}
    for key, found in ranks.items():
        alike.setdefault(tuple(found), []).append(key)
    return tuple(held for found, keys in alike.items() for held in _forms(tuple(keys), found))


def _forms(keys: tuple[str, ...], found: Sequence[Share | None]) -> Iterator[Spread]:
    """One, unless ranks do not agree about the shape of a tensor or about what it is."""
    forms: dict[tuple[tuple[int, ...], str], dict[Box, list[int]]] = {}
    for rank, share in enumerate(found):
        if share is not None:
            boxes = forms.setdefault((share.shape, share.words), {})
            for box in share.boxes:
                boxes.setdefault(box, []).append(rank)
    for (shape, words), boxes in forms.items():
        parts = tuple(Part(*box, tuple(held)) for box, held in boxes.items())
        yield Spread(shape, parts, keys, words)
    if not forms:
        yield Spread((), (), keys, "on no rank")
