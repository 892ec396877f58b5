"""`python -m conformance.ascend_sim [--lazy] [--devices N] [--memory-mb N] -- COMMAND ...`

`--why-not` prints why no simulated run is possible and exits with 1, or exits with 0.
"""

from __future__ import annotations

import argparse
import sys

from conformance.ascend_sim import run, why_not
from torchtitan_ckpt.errors import DeviceError


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.ascend_sim", description=__doc__)
    parser.add_argument("--lazy", action="store_true")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--memory-mb", type=int, default=2048)
    parser.add_argument("--why-not", action="store_true")
    parser.add_argument("command", nargs="*")
    args = parser.parse_args(argv)
    if args.why_not:
        problem = why_not()
        if problem is not None:
            print(f"{problem.what}; {problem.fix}")
        return int(problem is not None)
    if not args.command:
        parser.error("no command to run")
    try:
        return run(args.command, devices=args.devices, memory_mb=args.memory_mb, lazy=args.lazy)
    except DeviceError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
