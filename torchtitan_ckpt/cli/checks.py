"""List the checks of the contract.

Reads the contract's table only; nothing is imported that checks anything.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Args:
    """Options of `torchtitan-ckpt checks`."""

    json: bool = False
    """Print the table as JSON."""


def run(args: Args) -> int:
    """Print every check: id, level, the contract version it came with, and why it is there."""
    from conformance.contract import CONTRACT, LEVELS, VERSION

    if args.json:
        print(json.dumps({"contract": VERSION, "checks": [asdict(c) for c in CONTRACT]}, indent=1))
        return 0
    width = max(len(check.id) for check in CONTRACT)
    level = 0
    for check in CONTRACT:
        if check.level != level:
            level = check.level
            print(f"level {level}: {LEVELS[level]}")
        preview = f"  (preview, {check.since})" if check.since > VERSION else ""
        print(f"  {check.id:<{width}}  {check.why}{preview}")
    print(f"{len(CONTRACT)} checks, contract {VERSION}")
    return 0
