"""DCP on disk: read its manifest, load from it, save to it. The doors; the work is behind them."""

from torchtitan_ckpt.formats.dcp_load import load
from torchtitan_ckpt.formats.dcp_manifest import read_manifest

__all__ = ["load", "read_manifest"]
