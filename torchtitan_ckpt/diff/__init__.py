"""Compare two checkpoints of any formats, dtypes and splits, in bounded memory."""

from torchtitan_ckpt.diff.compare import diff
from torchtitan_ckpt.diff.options import Options
from torchtitan_ckpt.diff.report import Difference, Group

__all__ = ["Difference", "Group", "Options", "diff"]
