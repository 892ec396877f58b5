"""A subject's adapter on the ranks of a split model: what each rank of a pool runs.

The tensors of the model are DTensors that lie as torch would lay them out under the degrees. What
comes of them is compared, without gathering anything, with what plain tensors gave on one rank.
What that means for the adapter is for `conformance/checks`; processes are `adapter_lab`'s.
"""

from __future__ import annotations

import functools
import os
import pickle
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from conformance.fingerprint import State, same_bits
from conformance.lab import Direction, Lab
from conformance.raised import AdapterRaised, not_a_dict
from conformance.shares import Share, shares
from conformance.subject import Subject
from torchtitan_ckpt.device import ENV, current
from torchtitan_ckpt.parallel import Meshes, ParallelDegrees, build_meshes
from torchtitan_ckpt.placement import Split, layout_of, layout_problems, split_of

# Seconds that a rank waits for one that may hang in a collective which it has left by raising.
PATIENCE = 30


@dataclass(frozen=True, slots=True)
class Wrong:
    """One tensor of one direction that is not what it should be, on one rank."""

    direction: Direction
    key: str
    expected: str
    actual: str


@dataclass(frozen=True, slots=True)
class Told:
    """What one rank tells of one split.

    `raised` says why there is no more. `given` are the keys of each direction: a rank may export
    only what it holds. `ways` counts how `from_hf` hands back what was a DTensor: "as it lay",
    "whole" (on every rank of an axis that shards it), "plain". `held` is this rank's share of the
    tensors of each stage that it came to: "model", "to_hf", "from_hf".
    """

    raised: tuple[Wrong, ...] = ()
    given: Mapping[Direction, frozenset[str]] = field(default_factory=dict)
    shapes: tuple[Wrong, ...] = ()
    values: tuple[Wrong, ...] = ()
    placements: tuple[Wrong, ...] = ()
    ways: Counter[str] = field(default_factory=Counter)
    held: Mapping[str, Mapping[str, Share]] = field(default_factory=dict)


@dataclass(frozen=True)
class Truth:
    """What one rank has: a model and its export; the files that are imported, and the import."""

    native: State
    hf: State
    files: State
    back: State

    def write(self, path: str) -> None:
        torch.save(vars(self), path)

    @classmethod
    def read(cls, path: str) -> Truth:
        """Mapped, so that the ranks share the pages."""
        return cls(**torch.load(path, mmap=True, weights_only=True))


@dataclass(frozen=True, slots=True)
class NotFound:
    """A rank cannot import the subject, and why."""

    why: str


class RaisedAlone(Exception):
    """The adapter raised here, and other ranks wait for this one in a collective."""


def convert(ticket: bytes, truth: str, degrees: ParallelDegrees, kind: str) -> Told | NotFound:
    """Both directions of the ticket's adapter, on this rank's part of a model split by `degrees`.

    As in a trainer, one adapter exports, and imports what a reader put into tensors that lie as its
    own outputs do.
    """
    os.environ[ENV] = kind
    device = current(kind)
    where = device.select(int(os.environ["LOCAL_RANK"]))
    subject = _subject(ticket)
    if isinstance(subject, NotFound):
        return subject
    lab, known = Lab(subject, seed=0), Truth.read(truth)
    # A group apart: whoever raised can still ask who else did.
    aside = dist.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE))
    meshes = build_meshes(degrees, device.kind.value)
    placed = {key: _place(key, value, meshes, where) for key, value in known.native.items()}
    adapter, held = lab.adapter(), {"model": shares(placed)}
    out, raised = _call(lab, "to_hf", placed, adapter, aside)
    if raised:
        return Told(raised=raised, held=held)
    held["to_hf"] = shares(out)
    shapes, values = _compared("to_hf", known.hf, out)
    files = {key: value.to(where) for key, value in known.files.items() if key in out}
    filled = {key: _filled(out[key], value) for key, value in files.items()}
    back, raised = _call(lab, "from_hf", filled, adapter, aside)
    if raised:
        return Told(raised, {"to_hf": frozenset(out)}, shapes, values, held=held)
    held["from_hf"] = shares(back)
    more = _compared("from_hf", known.back, back)
    ways: Counter[str] = Counter()
    moved = tuple(_moved(placed, back, ways))
    given: dict[Direction, frozenset[str]] = {"to_hf": frozenset(out), "from_hf": frozenset(back)}
    return Told((), given, shapes + more[0], values + more[1], moved, ways, held)


@functools.lru_cache(maxsize=4)
def _subject(ticket: bytes) -> Subject | NotFound:
    """The subject that was sent, or that has the name that was sent."""
    from conformance.subjects import resolve

    try:
        found = pickle.loads(ticket)
        return resolve(found) if isinstance(found, str) else found
    except Exception as error:
        return NotFound(f"{type(error).__name__}: {error}")


def _place(key: str, value: Tensor, meshes: Meshes, where: torch.device) -> Tensor:
    """A tensor as it lies in a model that torch has split.

    Buffers are plain. What torch could not split, or would split otherwise than it says, is whole.
    """
    value = value.to(where)
    role = split_of(key) if value.is_floating_point() and value.ndim else Split.BUFFER
    shape = tuple(value.shape)
    layout = layout_of(role, shape, meshes.degrees)
    if not layout.axes:
        return value
    mesh = (meshes.sparse if layout.sparse else meshes.dense)[layout.axes]  # type: ignore[index]
    whole = layout_problems(key, role, shape, meshes.degrees)
    placements = [Replicate()] * mesh.ndim if whole else list(layout.placements)
    return distribute_tensor(value, mesh, placements, src_data_rank=None)


@torch.no_grad()
def _filled(target: Any, value: Tensor) -> Tensor:
    """What `to_hf` returned, with `value` read into it; `value` itself where it cannot be."""
    if not isinstance(target, Tensor) or target.shape != value.shape or _partial(target):
        return value.clone()
    part = _like(target, value)
    try:
        _local(target).copy_(_local(part))
    except RuntimeError:  # several elements share one place, or an uneven part has another shape
        return part
    return target


def _like(target: Tensor, value: Tensor) -> Tensor:
    """`value` where `target` lies."""
    if not isinstance(target, DTensor):
        return value.clone()
    return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _call(
    lab: Lab, direction: Direction, state: Mapping[str, Any], adapter: Any, aside: Any
) -> tuple[Mapping[str, Any], tuple[Wrong, ...]]:
    """What one direction returns, or what it raised on every rank; RaisedAlone where not on all."""
    out, told = _tried(lab, direction, state, adapter, aside)
    rank = next((rank for rank, words in enumerate(told) if words), None)
    if rank is None:
        return out, ()
    key = _blamed(lab, direction, state, told, aside) if all(told) else next(iter(state))
    words = told[rank] if all(told) else f"on rank {rank} of {len(told)}, {told[rank]}"
    return {}, (Wrong(direction, key, "what one rank gives", words),)


def _tried(
    lab: Lab, direction: Direction, state: Mapping[str, Any], adapter: Any, aside: Any
) -> tuple[Mapping[str, Any], list[str]]:
    """What one direction returns, and for each rank the words of what it raised."""
    out, words = {}, ""
    try:
        out = lab.call(direction, dict(state), adapter)
        if not isinstance(out, Mapping):
            raise not_a_dict(direction, out)
    except AdapterRaised as error:
        words = " ".join(str(error).split())
    told: list[str] = [""] * dist.get_world_size()
    try:
        dist.all_gather_object(told, words, group=aside)
    except RuntimeError as alone:
        if not words:
            raise
        raise RaisedAlone(f"{words}, on rank {dist.get_rank()} and not on all") from alone
    return out, told


def _blamed(
    lab: Lab, direction: Direction, state: Mapping[str, Any], told: list[str], aside: Any
) -> str:
    """The first key that raises the same by itself; else the first of all."""
    for key, value in state.items():
        if _tried(lab, direction, {key: value}, lab.adapter(), aside)[1] == told:
            return key
    return next(iter(state))


def _compared(
    direction: Direction, wanted: State, have: Mapping[str, Any]
) -> tuple[tuple[Wrong, ...], tuple[Wrong, ...]]:
    """What of `have` has another shape, and what has other values."""
    shapes, values = [], []
    for key, got in have.items():
        value = wanted.get(key)
        if not isinstance(got, Tensor) or got.layout != torch.strided:
            values.append(Wrong(direction, key, "a tensor", type(got).__name__))
        elif value is None:
            values.append(Wrong(direction, key, "no such key", "a new key"))
        elif got.shape != value.shape:
            expected = f"shape {tuple(value.shape)}"
            shapes.append(Wrong(direction, key, expected, f"shape {tuple(got.shape)}"))
        elif words := _differs(value, got):
            values.append(Wrong(direction, key, "the value that one rank gives", words))
    return tuple(shapes), tuple(values)


def _differs(value: Tensor, got: Tensor) -> str:
    """How this rank's part of `got` differs from its part of `value`."""
    rank = dist.get_rank()
    if isinstance(got, DTensor) and _partial(got):
        got = got.redistribute(placements=[Replicate()] * got.device_mesh.ndim)
    value, got = _local(_like(got, value.to(got.device))), _local(got)
    if got.shape != value.shape:
        return f"rank {rank} holds {tuple(got.shape)} where its placement says {tuple(value.shape)}"
    return "" if same_bits(value, got) else f"rank {rank} holds another value"


def _partial(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and any(p.is_partial() for p in tensor.placements)


def _moved(
    placed: Mapping[str, Tensor], back: Mapping[str, Any], ways: Counter[str]
) -> Iterator[Wrong]:
    """What came back in other parts than the model has; whole on every rank is no fault."""
    for key, native in placed.items():
        got = back.get(key)
        if not isinstance(native, DTensor) or not isinstance(got, Tensor):
            continue
        if not isinstance(got, DTensor):
            ways["plain"] += 1
        elif got.device_mesh == native.device_mesh and got.placements == native.placements:
            ways["as it lay"] += 1
        elif _whole(native, got):
            ways["whole"] += 1
        else:
            yield Wrong("from_hf", key, _lies(native), _lies(got))


def _whole(native: DTensor, got: DTensor) -> bool:
    """Whether `got` is split along no axis otherwise than the model is."""
    if all(placement.is_replicate() for placement in got.placements):
        return True
    pairs = zip(native.placements, got.placements, strict=False)
    same_mesh = got.device_mesh == native.device_mesh
    return same_mesh and all(one == two or two.is_replicate() for one, two in pairs)


def _lies(tensor: DTensor) -> str:
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    axes = zip(names, mesh.shape, tensor.placements, strict=True)
    return ", ".join(f"{name}{size}: {placement}" for name, size, placement in axes)
