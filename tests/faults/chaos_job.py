"""A whole training script for an outside judge: load, train to step 6, save every second step.

python -m tests.faults.chaos_job OUT
"""

import sys
from pathlib import Path

from tests.faults import jobs


def main(out):
    with jobs.job(out, interval=2, keep_latest_k=0) as job:
        job.manager.load()
        print(f"resumed from step {job.progress.step}", flush=True)
        job.train(6)
        Path(out, "final.txt").write_text(jobs.digest(job))


if __name__ == "__main__":
    main(sys.argv[1])
