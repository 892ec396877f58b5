"""`python -m torchtitan_ckpt` is the command line."""

import sys

from torchtitan_ckpt.cli import program

sys.exit(program())
