"""`python -m torchtitan_ckpt.train [--module M] [--config C] --flags…`: one rank of a job."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from torchtitan_ckpt import streams
from torchtitan_ckpt.errors import CheckpointError
from torchtitan_ckpt.train.cli_args import parse_flags, report, split_command
from torchtitan_ckpt.train.registry import load
from torchtitan_ckpt.train.rules import check_job


def main(argv: Sequence[str]) -> int:
    """Run the job and return the exit code: 0, or that of the error, said without a traceback."""
    rank = int(os.environ.get("RANK", "0"))
    streams.settle()
    _talk(rank)
    # cuBLAS repeats its sums only with a workspace of its own; it must be set before CUDA starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        command = split_command(argv, environ=os.environ)
        job = parse_flags(command.flags, load(command.module, command.config))
        check_job(job, int(os.environ.get("WORLD_SIZE", "1")))  # a slip is said before torch loads
        from torchtitan_ckpt.device import import_torch

        import_torch()
        from torchtitan_ckpt.train.trainer import run

        run(job)
    except CheckpointError as error:
        report(error, argv, rank)
        return error.exit_code
    except KeyboardInterrupt:
        logging.getLogger("torchtitan_ckpt.train").error("interrupted")
        return 130
    return 0


def _talk(rank: int) -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO if rank == 0 else logging.ERROR,
        format="%(levelname)s %(name)s: %(message)s" if rank == 0 else f"[rank {rank}] %(message)s",
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
