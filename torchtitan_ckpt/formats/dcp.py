"""DCP on disk: read its manifest, load from it, save to it. The doors; the work is behind them."""

from torchtitan_ckpt.formats.dcp_checksums import check_file, read_checksums
from torchtitan_ckpt.formats.dcp_load import load
from torchtitan_ckpt.formats.dcp_manifest import read_manifest, survey
from torchtitan_ckpt.formats.dcp_save import save

__all__ = ["check_file", "load", "read_checksums", "read_manifest", "save", "survey"]
