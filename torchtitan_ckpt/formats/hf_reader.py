"""Reading a Hugging Face checkpoint tensor by tensor or slice by slice, for tools that stream.

`hf_read.load` fills a model; this hands out single tensors, or boxes of them, as new CPU tensors,
dequantized where that was asked for. Nothing is kept between the calls but open files.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch

from torchtitan_ckpt.errors import NotFoundError, Problem, nearest
from torchtitan_ckpt.formats.hf_compare import refuse_quantized_as_plain
from torchtitan_ckpt.formats.hf_index import read_manifest
from torchtitan_ckpt.formats.hf_io import DTYPES, Files
from torchtitan_ckpt.formats.hf_read import fill
from torchtitan_ckpt.formats.quantized import Quantized, detect, logical_manifest
from torchtitan_ckpt.manifest import Manifest, TensorEntry


def open_reader(
    path: str | Path,
    *,
    manifest: Manifest | None = None,
    dequantize: bool = False,
    dtype: str = "bfloat16",
    raw: bool = False,
    progress: Callable[[int], None] | None = None,
) -> HfReader:
    """A reader of a folder or file.

    dequantize: quantized tensors appear under their plain keys, in `dtype`; unquantized ones stay
        as they are (a checkpoint without quantized tensors is legal here). Without it, quantized
        checkpoints are refused, unless `raw` asks for codes and scales.
    """
    physical = read_manifest(path) if manifest is None else manifest
    found = detect(physical) if dequantize else {}
    if not dequantize and not raw:
        refuse_quantized_as_plain(physical)
    logical = logical_manifest(physical, dtype, found=found) if found else physical
    return HfReader(logical, found, Files(Path(physical.path), progress))


class HfReader:
    """See `open_reader`. `manifest` is what can be read; use it as a context to close the files."""

    def __init__(self, manifest: Manifest, quantized: dict[str, Quantized], files: Files) -> None:
        self.manifest = manifest
        self._quantized, self._files = quantized, files

    def read(
        self,
        key: str,
        offsets: tuple[int, ...] | None = None,
        sizes: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        """A tensor, or the box of it at `offsets` of `sizes`; only its bytes are read."""
        entry = self._entry(key)
        offsets = (0,) * len(entry.shape) if offsets is None else offsets
        rows = zip(entry.shape, offsets, strict=True)
        sizes = tuple(size - at for size, at in rows) if sizes is None else sizes
        out = torch.empty(sizes, dtype=DTYPES[entry.dtype])
        self.fill(key, offsets, out)
        return out

    def fill(self, key: str, offsets: tuple[int, ...], out: torch.Tensor) -> None:
        """Fill a plain tensor, casting to its dtype, with the box that begins at `offsets`."""
        entry = self._entry(key)
        with torch.no_grad():
            fill(self._files, self._quantized.get(key) or entry, offsets, out)

    def _entry(self, key: str) -> TensorEntry:
        entry = self.manifest.tensors.get(key)
        if entry is None:
            raise NotFoundError(
                Problem(
                    code="hf.no-key",
                    what=f"the checkpoint has no tensor {key!r}",
                    where=self.manifest.path,
                    actual=f"nearest: {nearest(key, self.manifest.tensors)}",
                    fix="check the key; `inspect` lists all",
                )
            )
        return entry

    def __enter__(self) -> HfReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.__exit__()
