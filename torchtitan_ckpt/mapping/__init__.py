"""The mapping engine: tables of rules between native and Hugging Face checkpoints.

`Mapping` converts and proves, `compose` derives a migration, ops and entries are what tables are
written in. Families of models are in `torchtitan_ckpt.families`.
"""

from torchtitan_ckpt.mapping.mapping import LeftOut, Mapping
from torchtitan_ckpt.mapping.ops import (
    Cast,
    Deinterleave,
    Fuse,
    Interleave,
    Op,
    Regroup,
    RopeToHalf,
    RopeToInterleaved,
    Split,
    Squeeze,
    Stack,
    Transpose,
    Unsqueeze,
    Unstack,
)
from torchtitan_ckpt.mapping.rule import HF, NATIVE, HfOnly, NativeOnly, Rule, Tied

__all__ = [
    "HF",
    "NATIVE",
    "Cast",
    "Deinterleave",
    "Fuse",
    "HfOnly",
    "Interleave",
    "LeftOut",
    "Mapping",
    "NativeOnly",
    "Op",
    "Regroup",
    "RopeToHalf",
    "RopeToInterleaved",
    "Rule",
    "Split",
    "Squeeze",
    "Stack",
    "Tied",
    "Transpose",
    "Unsqueeze",
    "Unstack",
]
