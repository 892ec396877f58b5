"""Run one rule on plain tensors in memory: the big tensor to the small ones and back.

Outputs are views of the inputs where that is free and contiguous where it is not; two outputs never
share an element. Nothing here knows keys beyond the numbers that an op consumes; DTensors are
handled in `dtensor.py`, which calls this on local tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch

from torchtitan_ckpt.mapping.rule import NATIVE, Rule
from torchtitan_ckpt.mapping.view import Link, Ranges, Shape, ShapeError, Side

# A small tensor's place in its group: (index of its template, values of the consumed names).
Part = tuple[int, Shape]


def strided(tensor: torch.Tensor, side: Side, box: Ranges, origin: Shape) -> torch.Tensor:
    """The elements at a box of positions, as a view; `tensor` begins at `origin`.

    Axes that are no coordinate of this side must have length 1 and appear with stride 0.
    """
    stride = tensor.stride()
    offset = tensor.storage_offset()
    for dim, first in enumerate(side.first):
        offset += (first - origin[dim]) * stride[dim]
    sizes: list[int] = []
    steps: list[int] = []
    for (low, high), (dim, step) in zip(box, side.terms, strict=True):
        along = stride[dim] * step if dim >= 0 else 0
        sizes.append(high - low)
        steps.append(along)
        offset += low * along
    return tensor.as_strided(sizes, steps, offset)


def coordinates(link: Link) -> Iterator[Shape]:
    """The values of the consumed placeholders, counted from 0, in numeric order."""
    count = len(link.names)
    return itertools.product(*(range(n) for n in link.extents[:count]))


def full(link: Link, coords: Shape) -> Ranges:
    """All positions of the small tensor with these key coordinates."""
    fixed = tuple((c, c + 1) for c in coords)
    return (*fixed, *((0, n) for n in link.extents[len(coords) :]))


def take(rule: Rule, big: torch.Tensor) -> dict[Part, torch.Tensor]:
    """The small tensors of a big one. Raises ShapeError."""
    big = plain(big)
    if rule.identity:
        return {(0, ()): big}
    dtype = _cast(rule, to_small=True)
    out: dict[Part, torch.Tensor] = {}
    for index, link in enumerate(rule.links(tuple(big.shape))):
        origin = (0,) * len(link.big.shape)
        for coords in coordinates(link):
            view = strided(big, link.big, full(link, coords), origin)
            small = view.reshape(link.small.shape).contiguous()
            out[index, coords] = small if dtype is None else small.to(dtype)
    return out


def join(rule: Rule, parts: Mapping[Part, torch.Tensor], counts: Mapping[str, int]) -> torch.Tensor:
    """The big tensor of all its parts. Raises ShapeError, also for parts that differ in shape."""
    if rule.identity:
        return plain(parts[0, ()])
    shape = rule.big_shape(part_shapes(rule, parts), counts)
    first = next(iter(parts.values()))
    dtype = _cast(rule, to_small=False) or first.dtype
    big = torch.empty(shape, dtype=dtype, device=first.device)
    if big.device.type == "meta":
        return big
    for index, link in enumerate(rule.links(shape)):
        origin = (0,) * len(link.big.shape)
        zeros = (0,) * len(link.small.shape)
        for coords in coordinates(link):
            box = full(link, coords)
            source = strided(plain(parts[index, coords]), link.small, box, zeros)
            strided(big, link.big, box, origin).copy_(source)
    return big


def part_shapes(rule: Rule, parts: Mapping[Part, torch.Tensor]) -> list[Shape]:
    """The one shape of each template's tensors; ShapeError where they differ, or dtypes do."""
    shapes: dict[int, Shape] = {}
    for (index, coords), tensor in parts.items():
        shape = tuple(tensor.shape)
        if shapes.setdefault(index, shape) != shape:
            raise ShapeError(
                f"parts differ in shape: {list(shapes[index])} and {list(shape)} "
                f"(at {list(coords)})"
            )
    dtypes = {tensor.dtype for tensor in parts.values()}
    if len(dtypes) > 1:
        raise ShapeError(f"parts differ in dtype: {', '.join(sorted(map(str, dtypes)))}")
    return [shapes[index] for index in sorted(shapes)]


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, without its autograd history or Parameter class."""
    if tensor.requires_grad or isinstance(tensor, torch.nn.Parameter):
        return tensor.detach()
    return tensor


def _cast(rule: Rule, *, to_small: bool) -> torch.dtype | None:
    """The dtype that the rule's last cast gives in this direction, or None."""
    if not rule.casts:
        return None
    to_hf = to_small == (rule.big == NATIVE)
    name = rule.casts[-1].after if to_hf else rule.casts[0].before
    return dtype_of(name)


def dtype_of(name: str) -> torch.dtype:
    """torch's dtype for a manifest's dtype name."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ShapeError(f"torch {torch.__version__} has no dtype {name}")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def expected_dtype(rule: Rule, side: int) -> str | None:
    """The dtype that the rule's casts want on a side, or None where they want none."""
    if not rule.casts:
        return None
    return rule.casts[0].before if side == NATIVE else rule.casts[-1].after


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits (NaN equals itself); tensors on meta are equal."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.device.type == "meta" or b.device.type == "meta":
        return True
    if a.data_ptr() == b.data_ptr() and a.stride() == b.stride():
        return True
    return bool(torch.equal(_bytes(a), _bytes(b.to(a.device))))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # A tensor of one element counts as contiguous with any stride, which view() refuses.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def parts_in_order(rule: Rule, counts: Sequence[int]) -> Iterator[Part]:
    """Every part that a complete group has, given the count of each consumed name."""
    for index in range(len(rule.sides[1 - rule.big])):
        for coords in itertools.product(*(range(n) for n in counts)):
            yield index, coords
