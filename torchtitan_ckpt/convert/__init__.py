"""Convert checkpoints between DCP, Hugging Face and `.pt`.

`options` is what is asked for, `source` what is read, `names` and `layouts` how keys of the two
sides meet, `units` the pieces of work, `plan` the decision, `run` and `sink` the work, `workspace`
what outlives a kill, `engine` all of it in order. `diff` and `inspect` read through `source` and
`units` too, so that every tool understands the same checkpoints.
"""

from torchtitan_ckpt.convert.engine import Progress, Result, convert
from torchtitan_ckpt.convert.options import Options

__all__ = ["Options", "Progress", "Result", "convert"]
