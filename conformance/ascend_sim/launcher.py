"""Run a command on the simulated Ascend device: find torch_npu, build, set the environment.

The libraries must be on LD_LIBRARY_PATH before Python starts, so a command always runs in a fresh
process. Nothing here imports torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from conformance.ascend_sim import build
from torchtitan_ckpt.device import ENV, SIMULATED
from torchtitan_ckpt.device_failures import AUTOLOAD_ENV, release
from torchtitan_ckpt.errors import DeviceError, Problem

PYTHON_ENV = "TORCHTITAN_CKPT_NPU_PYTHON"
_BESIDE_THE_PROJECT = Path(__file__).resolve().parents[2] / ".venv-npu" / "bin" / "python"
_ASK_VERSIONS = (
    "import importlib.metadata as m, importlib.util as u, json, os\n"
    "names = {d.metadata['Name'].replace('-', '_').lower(): d.version for d in m.distributions()}\n"
    "found = {n: names.get(n) for n in ('torch', 'torch_npu')}\n"
    "folder = os.path.dirname(u.find_spec('torch').origin) if found['torch'] else None\n"
    "print(json.dumps({**found, 'folder': folder}))"
)


@dataclass(frozen=True, slots=True)
class Simulator:
    """A Python with torch and torch_npu of one release, and the built libraries."""

    python: str
    versions: Mapping[str, str]
    folder: Path

    def describe(self) -> str:
        torch, npu = self.versions["torch"], self.versions["torch_npu"]
        return f"{SIMULATED}: torch {torch}, torch_npu {npu}"


def find() -> Simulator:
    """Everything a simulated run needs; raises DeviceError, with the remedy, where it is missing.

    The Python is the one that the environment variable names, else this one if it holds torch_npu,
    else `.venv-npu` beside the project (made by scripts/setup_npu_sim.sh).
    """
    tried = []
    candidates = [os.environ.get(PYTHON_ENV), sys.executable, str(_BESIDE_THE_PROJECT)]
    for python in filter(None, candidates):
        versions = _versions(python)
        torch, npu = versions.get("torch"), versions.get("torch_npu")
        if npu is None:
            tried.append(python)
            continue
        if torch is None or release(torch) != release(npu):
            raise DeviceError(
                Problem(
                    code="device.version-mismatch",
                    what="torch_npu and torch are not of the same release",
                    where=python,
                    expected=f"torch {release(npu)} beside torch_npu {npu}",
                    actual=f"torch {torch}",
                    fix="run scripts/setup_npu_sim.sh, which installs a pair that fits",
                )
            )
        libraries = build.build(Path(versions.get("folder") or ""))
        return Simulator(python, {"torch": torch, "torch_npu": npu}, libraries)
    raise DeviceError(
        Problem(
            code="device.sim-no-torch-npu",
            what="the simulated Ascend device wants torch_npu in an environment of its own",
            actual=f"not in {', '.join(tried)}",
            fix=f"run scripts/setup_npu_sim.sh, or name a Python that has it in {PYTHON_ENV}",
        )
    )


def why_not() -> Problem | None:
    """Why no simulated run is possible here, or None. Builds the libraries if it is."""
    try:
        find()
    except DeviceError as error:
        return error.problems[0]
    return None


def environment(
    simulator: Simulator,
    *,
    devices: int = 4,
    memory_mb: int = 2048,
    lazy: bool = False,
    faults: Sequence[tuple[str, int, int]] = (),
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The environment of a simulated process.

    `lazy` lets asynchronous work wait until something waits for it. `faults` are (call, n, code):
    the n-th call of that name fails with that CANN code.
    """
    env = dict(os.environ if base is None else base)
    env.pop(AUTOLOAD_ENV, None)
    libraries = [str(simulator.folder / "lib"), env.get("LD_LIBRARY_PATH", "")]
    home = simulator.folder / "home"
    env |= {
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
        "ASCEND_HOME_PATH": str(home),
        "ASCEND_OPP_PATH": str(home / "opp"),
        # With the task queue torch_npu reports errors late and lets later operators pass.
        "TASK_QUEUE_ENABLE": "0",
        # torch's kernels give the same bits every time only with the same number of threads, and
        # the device's work runs in whichever thread of torch_npu asks for it.
        "OMP_NUM_THREADS": "1",
        "NPUSIM_DEVICES": str(devices),
        "NPUSIM_MEM_MB": str(memory_mb),
        "NPUSIM_LAZY": str(int(lazy)),
        "NPUSIM_FAULT": ",".join(f"{call}:{n}:{code}" for call, n, code in faults),
        PYTHON_ENV: simulator.python,
        ENV: "npu",
    }
    return env


def run(
    argv: Sequence[str],
    *,
    devices: int = 4,
    memory_mb: int = 2048,
    lazy: bool = False,
    faults: Sequence[tuple[str, int, int]] = (),
    timeout: float | None = None,
) -> int:
    """Run a command on the simulated device and return its exit code.

    The word `python` at its start stands for the Python that holds torch_npu. Raises DeviceError
    where the simulator cannot be had: a run that did not happen is never a success.
    """
    simulator = find()
    command = [simulator.python, *argv[1:]] if argv and argv[0] == "python" else list(argv)
    if not command:
        raise ValueError("no command to run")
    env = environment(simulator, devices=devices, memory_mb=memory_mb, lazy=lazy, faults=faults)
    print(f"[{simulator.describe()}]", file=sys.stderr, flush=True)
    return subprocess.run(command, env=env, timeout=timeout, check=False).returncode


def again(module: str, argv: Sequence[str], flag: str, *, lazy: bool = False) -> int:
    """Run `python -m module argv...` on the simulated device, where `flag npu-sim` says `npu`.

    For command lines that offer the simulated device as a choice of their own:
    `again("torchtitan_ckpt", ["check", "qwen3", "--device", "npu-sim"], "--device")`.
    """
    words = [f"{flag}=npu" if word == f"{flag}=npu-sim" else word for word in argv]
    for at, word in enumerate(words[:-1]):
        if word == flag and words[at + 1] == "npu-sim":
            words[at + 1] = "npu"
    return run(["python", "-m", module, *words], lazy=lazy)


def _versions(python: str) -> dict[str, str | None]:
    try:
        answer = subprocess.run(
            [python, "-c", _ASK_VERSIONS], capture_output=True, text=True, check=True
        )
        versions: dict[str, str | None] = json.loads(answer.stdout)
    except (OSError, subprocess.CalledProcessError, ValueError):
        return {}
    return versions
