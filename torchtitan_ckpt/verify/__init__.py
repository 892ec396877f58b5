"""Whether a checkpoint on disk is whole and sound.

`structure` looks at names, sizes and headers, `completeness` compares with what should be there,
`deep` reads every byte and `values` judges what it read.
"""

from torchtitan_ckpt.verify.structure import (
    Progress,
    Structure,
    check_structure,
    has_checksums,
    local_path,
)

__all__ = ["Progress", "Structure", "check_structure", "has_checksums", "local_path"]
