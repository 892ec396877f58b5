"""Hugging Face safetensors: the door of the format.

`read_manifest` and `survey` say what a folder or file holds, `load` fills tensors and DTensors,
`save` writes them from all ranks; `open_reader` and `open_writer` stream from one process. The
work is in the `hf_*` modules beside this one, quantized weights in `quantized` and
`quantized_math`.
"""

from __future__ import annotations

from torchtitan_ckpt.formats.hf_index import Survey, read_manifest, survey
from torchtitan_ckpt.formats.hf_read import load
from torchtitan_ckpt.formats.hf_reader import HfReader, open_reader
from torchtitan_ckpt.formats.hf_save import save
from torchtitan_ckpt.formats.hf_writer import HfWriter, open_writer

__all__ = [
    "HfReader",
    "HfWriter",
    "Survey",
    "load",
    "open_reader",
    "open_writer",
    "read_manifest",
    "save",
    "survey",
]
