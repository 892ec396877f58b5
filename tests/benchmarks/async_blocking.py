"""How long training stands still for an asynchronous save, beside copies and `dcp.async_save`.

    python tests/benchmarks/async_blocking.py [--gigabytes 1] [--rounds 5] [--tensors 96] [--json]
                                              [--device cpu|cuda|npu]

All figures are medians of the rounds of one run, on the same tensors:

- `clone`: `clone()` of every tensor, the price of memory that nobody touched before
- `copy`: `copy_` into memory that was touched, the price of moving the bytes
- `first`: the first snapshot of a new stager (at most 1.2 times `clone`)
- `later`: a snapshot of a stager that has its buffers (at most 2 times `copy`)
- `dcp.async_save`: the call's own time, as torchtitan makes it in `async` mode: one stager that is
  kept, no pinning, no sharing; and `dcp.async_save default`: with a stager of its own each time

With a device the state lies on it: `clone` is a copy to new memory of the host, `copy` one to
pinned memory, our stagers pin (`async_with_pinned_mem`), and `beside` is how long a snapshot on a
stream of its own keeps the training's thread, which goes on while the copy runs.

Exit status 1 where a limit is passed. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from torchtitan_ckpt import device
from torchtitan_ckpt.state.staging import Stager

FIRST_LIMIT, LATER_LIMIT = 1.2, 2.0


def make_state(gigabytes: float, tensors: int, where: torch.device) -> dict[str, Any]:
    """Tensors of one size and, as in an optimizer, one 0-d step and a few objects beside each."""
    numel = int(gigabytes * 2**30 / 4 / tensors)
    state: dict[str, Any] = {}
    for index in range(tensors):
        moment = torch.full((numel,), float(index), device=where)
        state[f"optimizer.state.layers.{index}.weight.exp_avg"] = moment
        state[f"optimizer.state.layers.{index}.weight.step"] = torch.tensor(float(index))
        state[f"optimizer.param_groups.layers.{index}.weight.lr"] = 1e-3
        state[f"optimizer.param_groups.layers.{index}.weight.betas"] = (0.9, 0.95)
    return state


def seconds(work: Callable[[], Any]) -> float:
    gc.collect()
    device.current().synchronize()
    start = time.perf_counter()
    result = work()
    taken = time.perf_counter() - start
    del result
    return taken


def measure(state: dict[str, Any], rounds: int, folder: Path) -> dict[str, list[float]]:
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    found = device.current()
    pin = found.kind is not device.DeviceKind.CPU
    touched = [found.host_empty(tensor.shape, tensor.dtype, pin=pin) for tensor in tensors]
    kept, beside = Stager(pin), Stager(pin, device=found)
    kept.snapshot(state)
    times: dict[str, list[float]] = {}

    def note(name: str, work: Callable[[], Any]) -> None:
        times.setdefault(name, []).append(seconds(work))

    def copy() -> None:
        for target, source in zip(touched, tensors, strict=True):
            target.copy_(source, non_blocking=True)
        found.synchronize()

    copy()

    # As torchtitan's `async`: the call that the training loop waits for.
    def async_save(name: str, stager: DefaultStager | None) -> None:
        futures: list[Any] = []

        def call() -> None:
            place = folder / f"{name}-{len(times.get(name, []))}".replace(" ", "-")
            futures.append(dcp.async_save(dict(state), checkpoint_id=place, async_stager=stager))

        note(name, call)
        response = futures[0]
        getattr(response, "upload_completion", response).result()

    stager = DefaultStager(StagingOptions(False, False, False, False))
    async_save("warm-up", stager)
    for _ in range(rounds):  # interleaved, so that a busy moment hits all of them
        note("clone", lambda: [tensor.to("cpu", copy=True) for tensor in tensors])
        note("first", lambda: Stager(pin).snapshot(state))
        note("copy", copy)
        note("later", lambda: kept.snapshot(state))
        if pin:
            beside.snapshot(state)
            beside.wait()
            note("beside", lambda: beside.snapshot(state))
            beside.wait()
        async_save("dcp.async_save", stager)
        async_save("dcp.async_save default", None)
    stager.close()
    del times["warm-up"]
    return times


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tensors", type=int, default=96)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as name:
        store = f"file://{os.path.join(name, 'store')}"
        os.environ[device.ENV] = options.device
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        state = make_state(options.gigabytes, options.tensors, device.current().at())
        times = measure(state, options.rounds, Path(name))
        dist.destroy_process_group()
    median = {name: statistics.median(values) for name, values in times.items()}
    first = median["first"] / median["clone"]
    later = median["later"] / median["copy"]
    if options.json:
        print(json.dumps({"seconds": times, "median": median, "first": first, "later": later}))
    else:
        threads = torch.get_num_threads()
        where = device.current().describe()
        print(f"{options.gigabytes} GB in {options.tensors} tensors on {where}, {threads} threads")
        for label, value in median.items():
            spread = f"{min(times[label]):.3f} to {max(times[label]):.3f}"
            print(f"  {label:<24}{value:7.3f} s   ({spread})")
        print(f"  first / clone {first:.2f} (limit {FIRST_LIMIT})")
        print(f"  later / copy  {later:.2f} (limit {LATER_LIMIT})")
    return int(first > FIRST_LIMIT or later > LATER_LIMIT)


if __name__ == "__main__":
    sys.exit(main())
