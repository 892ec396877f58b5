"""One tensor of a checkpoint, for people: where it lies, statistics of its values, and a corner of
it. Reads that tensor in windows and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchtitan_ckpt.errors import InputError, NotFoundError, Problem
from torchtitan_ckpt.errors import nearest as nearest_name
from torchtitan_ckpt.formats import read_manifest
from torchtitan_ckpt.formats.quantized import detect as detect_quantized
from torchtitan_ckpt.formats.quantized import is_quantized
from torchtitan_ckpt.manifest import ITEM_SIZE, Manifest
from torchtitan_ckpt.scan import Stats, Values, coordinate

WINDOW = 8 * 2**20


@dataclass(frozen=True, slots=True)
class TensorLook:
    """One tensor: where it lies, what its values are like, and a corner of it."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    shards: tuple[str, ...]
    values: Values
    corner: tuple[tuple[float, ...], ...]
    note: str = ""

    @property
    def first_bad(self) -> tuple[int, ...] | None:
        """The coordinate of the first NaN or Inf."""
        place = self.values.first_bad
        return None if place is None else coordinate(place, self.shape)


def look_at_tensor(
    path: str,
    key: str,
    *,
    rows: int = 4,
    columns: int = 6,
    trust: bool = False,
    progress: Callable[[int], None] | None = None,
) -> TensorLook:
    """Read one tensor in windows. Raises `NotFoundError` with the nearest key."""
    import torch

    from torchtitan_ckpt.convert.source import open_source
    from torchtitan_ckpt.formats.hf_boxes import split_box
    from torchtitan_ckpt.formats.tensor_bytes import memory

    manifest = read_manifest(path, trust=trust)
    entry = manifest.tensors.get(key)
    if entry is None:
        near = nearest_name(key, [*manifest.tensors, *manifest.objects])
        an_object = key in manifest.objects
        raise NotFoundError(
            Problem(
                code="inspect.no-tensor",
                what=f"{key!r} is an object, not a tensor"
                if an_object
                else f"the checkpoint has no tensor {key!r}",
                where=path,
                actual="" if an_object or near is None else f"nearest: {near}",
                fix="`inspect` without --tensor lists what there is",
            )
        )
    values = Values(entry.dtype, stats=Stats())
    source = open_source(path, raw=True, trust=trust)
    dtype = getattr(torch, entry.dtype)
    zero = (0,) * len(entry.shape)
    try:
        limit = WINDOW // ITEM_SIZE[entry.dtype]
        at = 0
        for offsets, sizes in split_box(entry.shape, zero, entry.shape, limit):
            part = torch.empty(sizes, dtype=dtype)
            if part.numel():
                source.fill(key, offsets, part)
                values.add(memory(part), at)
            at += part.numel()
            if progress is not None:
                progress(part.numel() * part.element_size())
        corner = _corner(source, key, entry.shape, dtype, rows, columns)
    finally:
        source.close()
    return TensorLook(
        key=key,
        shape=entry.shape,
        dtype=entry.dtype,
        nbytes=entry.nbytes,
        shards=tuple(
            f"{s.file} bytes {s.byte_offset}+{s.byte_length}: {list(s.offsets)} {list(s.sizes)}"
            for s in entry.shards
        ),
        values=values,
        corner=corner,
        note="codes of a quantized tensor, not its values" if is_code(manifest, key) else "",
    )


def is_code(manifest: Manifest, key: str) -> bool:
    """Whether a tensor holds quantized codes or their scales."""
    if manifest.format != "hf" or not is_quantized(manifest):
        return False
    try:
        found = detect_quantized(manifest).values()
    except InputError:
        return False
    return any(key in (item.weight.key, item.scale.key) for item in found)


def _corner(
    source: Any, key: str, shape: tuple[int, ...], dtype: Any, rows: int, columns: int
) -> tuple[tuple[float, ...], ...]:
    """The first rows and columns of the last two dimensions, at 0 of those before."""
    import torch

    if not shape:
        sizes: tuple[int, ...] = ()
    elif len(shape) == 1:
        sizes = (min(shape[0], columns),)
    else:
        lead = (min(1, n) for n in shape[:-2])
        sizes = (*lead, min(shape[-2], rows), min(shape[-1], columns))
    part = torch.empty(sizes, dtype=dtype)
    if not part.numel():
        return ()
    source.fill(key, (0,) * len(shape), part)
    if str(dtype).endswith("_x2") or part.is_complex():
        part = part.view(torch.uint8) if str(dtype).endswith("_x2") else part.real
    wide = part.to(torch.float64).reshape(-1, part.shape[-1] if part.dim() else 1)
    return tuple(tuple(float(x) for x in row) for row in wide)
