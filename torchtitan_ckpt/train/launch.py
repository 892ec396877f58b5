"""Start the ranks of a job through torchrun, after its command line was found good.

torchrun itself would start all ranks first, say a mistake once a rank, and end in a traceback with
exit code 1. Here the mistake is said once, and the job ends with the exit code of the rank that
failed.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence

from torchtitan_ckpt.device import import_torch
from torchtitan_ckpt.errors import CheckpointError
from torchtitan_ckpt.train.cli_args import parse_flags, report, split_command
from torchtitan_ckpt.train.registry import load
from torchtitan_ckpt.train.rules import check_job

# Several nodes: torchrun's own names for where they meet.
NODES = {
    "NNODES": "--nnodes",
    "NODE_RANK": "--node-rank",
    "MASTER_ADDR": "--master-addr",
    "MASTER_PORT": "--master-port",
}


def main(argv: Sequence[str]) -> int:
    """Check the command line, run it on NGPU ranks, return the exit code."""
    try:
        command = split_command(argv, environ=os.environ)
        job = parse_flags(command.flags, load(command.module, command.config))
        check_job(job, command.ngpu * int(os.environ.get("NNODES") or "1"))
        import_torch()
    except CheckpointError as error:
        report(error, argv)
        return error.exit_code
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    words = [f"--nproc-per-node={command.ngpu}"]
    if int(os.environ.get("NNODES") or "1") > 1:
        given = {name: flag for name, flag in NODES.items() if name in os.environ}
        words += [f"{flag}={os.environ[name]}" for name, flag in given.items()]
    else:
        words.append("--standalone")
    words += ["-m", "torchtitan_ckpt.train"]
    words += [f"--module={command.module}", f"--config={command.config}", *command.flags]
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun would set it, and say so at length
    if not job.debug:  # what ended is said below, and in the rank's own words before it
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run.main(words)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        print(f"rank {rank} of the job ended first, {how}", file=sys.stderr)
        return code if code > 0 else 128 - code
    except SignalException as stop:  # Ctrl-C, or a scheduler that wants the nodes back
        print(f"the job was stopped by {stop.sigval.name}", file=sys.stderr)
        return 128 + stop.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
