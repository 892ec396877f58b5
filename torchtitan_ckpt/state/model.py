"""The model's state: one flat dict over all model parts, under canonical names.

Values come from `Module.state_dict`, so hooks that split a fused weight run; loading goes through
`Module.load_state_dict`, so the hooks that merge it run too. Nothing here knows optimizers, files
or Hugging Face names.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_ckpt.errors import MismatchError, Problem, SaveError, list_keys, nearest
from torchtitan_ckpt.state.leaves import why_not_storable
from torchtitan_ckpt.state.names import Canonical, as_parts
from torchtitan_ckpt.state.tensors import distribute, is_emptied, same_bits, same_tensor
from torchtitan_ckpt.state.theirs import state_of

Parts = nn.Module | Iterable[nn.Module]


def model_state_dict(model_parts: Parts) -> dict[str, Any]:
    """The state of all parts together: parameters and persistent buffers, by canonical name.

    Values are the live tensors (or what a state-dict hook made of them), not copies. Both names of
    a tied parameter are kept, bound to one storage. A name that two parts hold is refused unless it
    is the same tensor, or buffers that are equal bit for bit.
    """
    state: dict[str, Any] = {}
    problems: list[Problem] = []
    clashes: list[str] = []
    for part in as_parts(model_parts):
        for key, value in _part_state(part).items():
            if value is None:
                continue
            if key in state and not _may_repeat(key, state[key], value, part):
                clashes.append(key)
            if (why := why_not_storable(value)) is not None:
                problems.append(_unstorable(key, why))
            elif isinstance(value, Tensor) and is_emptied(value) and not value.is_meta:
                problems.append(_unstorable(key, "its storage was emptied (resized to 0 bytes)"))
            state.setdefault(key, value)
    if clashes:
        problems.append(
            Problem(
                code="model.duplicate",
                what=f"two model parts hold different tensors under one name: {list_keys(clashes)}",
                cause="pipeline stages that number their layers each from zero, or a copied module",
                fix="give every stage the names of the whole model",
            )
        )
    if problems:
        raise SaveError(*problems)
    return state


def load_model_state_dict(
    model_parts: Parts,
    state: Mapping[str, Any],
    *,
    ignore_unexpected: Sequence[str] = (),
    cast: bool = False,
) -> None:
    """Load `state` (canonical names) into all parts together; strict, and checked before any copy.

    Missing names, unexpected ones, other shapes, narrowing dtypes and targets on the meta device
    are all reported at once and nothing is changed. A tied parameter may come under any of its
    names; two different values for one tie are refused. `ignore_unexpected` holds glob patterns of
    names that old checkpoints have and this model recomputes (derived buffers). `cast` permits
    floating-point casts that lose digits.
    """
    parts = as_parts(model_parts)
    live = model_state_dict(parts)
    problems = _meta_problems(parts)
    wanted = {key: value for key, value in live.items() if isinstance(value, Tensor)}
    # A module's extra state may be None now and something in the checkpoint.
    known = {key for part in parts for key in _part_state(part)}
    unexpected = sorted(
        key
        for key in state.keys() - known
        if not any(fnmatch.fnmatchcase(key, pattern) for pattern in ignore_unexpected)
    )
    given = {key: value for key, value in state.items() if key in known}
    given.update(_through_ties(wanted, given))
    missing = sorted(live.keys() - given.keys())
    problems += _key_problems(missing, unexpected)
    for key, target in wanted.items():
        if key in given:
            problems += _value_problems(key, given[key], target, cast)
    problems += _tie_problems(wanted, given)
    if problems:
        raise MismatchError(*problems)

    for part in parts:
        values = {}
        canonical = Canonical(part)
        with torch.no_grad():
            for raw, current in part.state_dict().items():
                key = canonical(raw)
                values[raw] = _placed(given[key], current) if key in given else current
        try:
            part.load_state_dict(values, strict=True)
        except Exception as error:
            raise MismatchError(
                Problem(
                    code="model.load",
                    what="the module refused its own names",
                    where=type(part).__name__,
                    actual=f"{type(error).__name__}: {error}",
                    cause="a load hook that is not the inverse of the state-dict hook",
                )
            ) from error


def pinned_fp32(model_parts: Parts) -> frozenset[str]:
    """Names that keep their dtype when the model is exported in a smaller one.

    A module declares them: its attribute `fp32_pinned` holds glob patterns, relative to the module.
    Buffers whose last name begins with `expert_bias` are always among them.
    """
    pinned: set[str] = set()
    for part in as_parts(model_parts):
        canonical = Canonical(part)
        keys = list(_part_state(part))
        for path, module in part.named_modules(remove_duplicate=False):
            base = canonical(path)
            for pattern in getattr(module, "fp32_pinned", ()):
                whole = f"{base}.{pattern}" if base else pattern
                pinned.update(fnmatch.filter(keys, whole))
        for raw, _ in part.named_buffers(remove_duplicate=False):
            key = canonical(raw)
            if key.rpartition(".")[2].startswith("expert_bias") and key in keys:
                pinned.add(key)
    return frozenset(pinned)


def export_state_dict(
    state: Mapping[str, Any], dtype: torch.dtype, keep: Collection[str] = ()
) -> dict[str, Any]:
    """`state` with floating tensors cast to `dtype`; `keep` and all other values stay as they are.

    Tied names stay tied: one tensor is cast once.
    """
    cast: dict[tuple[Any, ...], Tensor] = {}
    out: dict[str, Any] = {}
    for key, value in state.items():
        if key in keep or not isinstance(value, Tensor) or not value.is_floating_point():
            out[key] = value
            continue
        identity = _identity(value)
        if identity not in cast:
            cast[identity] = value.detach().to(dtype)
        out[key] = cast[identity]
    return out


def _part_state(part: nn.Module) -> dict[str, Any]:
    canonical = Canonical(part)
    state: dict[str, Any] = {}
    for raw, value in state_of(part).items():
        key = canonical(raw)
        if key in state and not _may_repeat(key, state[key], value, part):
            raise SaveError(
                Problem(
                    code="model.duplicate",
                    what=f"two tensors of one model part have the name {key}",
                    where=raw,
                    cause="a wrapper's segment hides the difference between them",
                )
            )
        state.setdefault(key, value)
    return state


def _may_repeat(key: str, first: Any, second: Any, part: nn.Module) -> bool:
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return False
    if same_tensor(first, second):
        return True
    canonical = Canonical(part)
    buffers = {canonical(raw) for raw, _ in part.named_buffers(remove_duplicate=False)}
    return key in buffers and same_bits(first, second)


def _unstorable(key: str, why: str) -> Problem:
    return Problem(code="model.unstorable", what=f"{key} cannot be saved", where=key, cause=why)


def _meta_problems(parts: Sequence[nn.Module]) -> list[Problem]:
    """Copying into a meta tensor does nothing and says nothing, so it must not come to that."""
    names = []
    for part in parts:
        canonical = Canonical(part)
        for tensors in (part.named_parameters, part.named_buffers):
            names += [canonical(raw) for raw, tensor in tensors() if tensor.is_meta]
    if not names:
        return []
    return [
        Problem(
            code="model.meta",
            what=f"these are still on the meta device: {list_keys(names)}",
            cause="the model was built on meta and not materialised; a load would do nothing",
            fix="call to_empty(device=...) and the model's init of its buffers before loading",
        )
    ]


def _through_ties(wanted: Mapping[str, Tensor], given: Mapping[str, Any]) -> dict[str, Any]:
    """Values for names that the checkpoint lacks but holds under another name of the same tie."""
    absent = [key for key in wanted if key not in given]
    return {
        key: given[twin]
        for key in absent
        for twin in wanted
        if twin in given and same_tensor(wanted[key], wanted[twin]) and wanted[key].numel()
    }


def _tie_problems(wanted: Mapping[str, Tensor], given: Mapping[str, Any]) -> list[Problem]:
    groups: dict[tuple[Any, ...], list[str]] = {}
    for key, target in wanted.items():
        if key in given and not target.is_meta and target.numel():
            groups.setdefault(_identity(target), []).append(key)
    problems = []
    for keys in groups.values():
        values = [given[key] for key in keys]
        first = values[0]
        if any(v is not first and not same_bits(v, first) for v in values[1:]):
            problems.append(
                Problem(
                    code="model.tie-differs",
                    what=f"one tied parameter, two values: {', '.join(keys)}",
                    cause="the run that saved did not tie them (tied after sharding, or untied)",
                    fix="untie them in this model, or take one of them out of the checkpoint",
                )
            )
    return problems


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    storage = local.untyped_storage()
    return (storage._cdata, local.storage_offset(), tuple(local.shape), local.stride(), local.dtype)


def _key_problems(missing: Sequence[str], unexpected: Sequence[str]) -> list[Problem]:
    problems = []
    if missing:
        near = nearest(missing[0], unexpected)
        problems.append(
            Problem(
                code="model.missing",
                what=f"the checkpoint lacks {list_keys(missing)}",
                cause=f"nearest name that it has: {near}" if near else "",
            )
        )
    if unexpected:
        problems.append(
            Problem(
                code="model.unexpected",
                what=f"the model has no place for {list_keys(unexpected)}",
                fix="excuse them by name if this model recomputes them",
            )
        )
    return problems


def _value_problems(key: str, value: Any, target: Tensor, cast: bool) -> list[Problem]:
    if not isinstance(value, Tensor):
        actual = type(value).__name__
        return [Problem(code="model.type", what=f"{key} is not a tensor", actual=actual)]
    if value.shape != target.shape:
        return [
            Problem(
                code="model.shape",
                what=f"{key} has another shape",
                expected=str(tuple(target.shape)),
                actual=str(tuple(value.shape)),
            )
        ]
    if value.dtype == target.dtype:
        return []
    floats = value.is_floating_point() and target.is_floating_point()
    if floats and (cast or torch.promote_types(value.dtype, target.dtype) == target.dtype):
        return []
    return [
        Problem(
            code="model.dtype",
            what=f"{key} has another dtype",
            expected=str(target.dtype).removeprefix("torch."),
            actual=str(value.dtype).removeprefix("torch."),
            cause="a silent cast would lose digits" if floats else "a silent cast changes values",
            fix="convert the checkpoint, or permit casts between floating dtypes" if floats else "",
        )
    ]


def _placed(value: Any, current: Any) -> Any:
    """`value` laid out as the module's own tensor is; plain values of DTensor targets are cut."""
    if not isinstance(value, Tensor) or not isinstance(current, Tensor):
        return value
    if isinstance(current, DTensor) and not isinstance(value, DTensor):
        moved = value.to(current._local_tensor.device)
        return distribute(moved, current.device_mesh, current.placements)
    if isinstance(value, DTensor) and not isinstance(current, DTensor):
        return value.full_tensor()
    return value
