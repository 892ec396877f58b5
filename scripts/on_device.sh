#!/usr/bin/env bash
# The device chapter on the accelerator of this machine, and one report about it.
#
#   bash scripts/on_device.sh [--device npu|cuda|cpu] [--share] [--report FILE] [arguments for pytest]
#
# The report says at its top whether the device was real. What wants more devices than there are is
# skipped; with --share the ranks share one CUDA device and talk over gloo. With --device cpu the
# same tests are rehearsed on the CPU: run that first where time on a device is dear.
# PYTHON names the interpreter (default: python3; 3.11 or newer) that holds torch, torch_npu where
# there are NPUs, and the packages in pyproject.toml. The project need not be installed; neither the
# network nor transformers nor torchtitan is needed.
# Under torchrun (torchrun --no-python --nproc-per-node N bash scripts/on_device.sh ...) the first
# rank runs the tests, which start ranks of their own on all devices; the others leave at once.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
report=on_device_report.txt
if [ -n "${TORCHELASTIC_RUN_ID:-}" ]; then
    [ "${RANK:-0}" = 0 ] || exit 0
    unset RANK LOCAL_RANK GROUP_RANK ROLE_RANK ROLE_NAME WORLD_SIZE LOCAL_WORLD_SIZE \
        GROUP_WORLD_SIZE ROLE_WORLD_SIZE MASTER_ADDR MASTER_PORT "${!TORCHELASTIC_@}"
fi
while [ $# -gt 0 ]; do
    case $1 in
        --device) export TORCHTITAN_CKPT_DEVICE=${2:?npu, cuda or cpu} && shift 2 ;;
        --share) export TORCHTITAN_CKPT_SHARE_DEVICE=1 && shift ;;
        --report) report=${2:?a file} && shift 2 ;;
        -h | --help) sed -n '2,/^set/{s/^# \{0,1\}//p}' scripts/on_device.sh && exit 0 ;;
        *) break ;;
    esac
done

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "NO DEVICE: $python is no Python of 3.11 or newer; PYTHON=... names another"
    exit 2
fi

header() {
    "$python" - << 'PY'
import contextlib
import os
import platform
import subprocess
import sys
import tomllib
from pathlib import Path

from torchtitan_ckpt import device
from torchtitan_ckpt.device_failures import installed_version
from torchtitan_ckpt.errors import CheckpointError


def first_line(*command: str) -> str:
    """The first line with a version that a driver's own tool prints, or that there is none."""
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return f"{command[0]} is not there"
    lines = [line.strip(" |+-") for line in text.splitlines() if "ersion" in line]
    return lines[0] if lines else f"{command[0]} says nothing"


def missing() -> list[str]:
    """What pyproject.toml wants and this Python does not have, so that no failure is a riddle."""
    wanted = tomllib.loads(Path("pyproject.toml").read_text())["project"]["dependencies"]
    return [line for line in wanted if installed_version(line.partition(">")[0]) is None]


try:
    found = device.current()
except CheckpointError as error:
    print(f"NO DEVICE\n{error}")
    sys.exit(2)
if found.kind is device.DeviceKind.CPU and not os.environ.get(device.ENV):
    why = "\n".join(str(problem) for problem in found.passed_over)
    print(f"NO DEVICE: torch finds no accelerator on this machine\n{why}".rstrip())
    sys.exit(2)
kind = f"SIMULATED DEVICE: {device.SIMULATED}" if found.simulated else "REAL DEVICE"
if found.kind is device.DeviceKind.CPU:
    kind = "REHEARSAL ON THE CPU: nothing here is about a device"
print(f"{kind}\n{found.describe()}")
if found.shared:
    print("ranks share the device and talk over gloo: nothing here is about NCCL")
if found.kind is not device.DeviceKind.CPU:
    print(f"memory: {found.memory().total / 2**30:.1f} GiB each")
    if found.count == 1 and found.kind is device.DeviceKind.CUDA and not found.shared:
        print("one device: what wants more ranks is skipped; --share lets them share it")
for package in ("torch", "torch_npu", "torchtitan-ckpt", "safetensors", "numpy"):
    print(f"{package}: {installed_version(package) or 'not installed'}")
if absent := missing():
    print(f"MISSING, and some tests will fail for it: {', '.join(absent)}")
if found.kind is device.DeviceKind.NPU:
    cann = "unknown"
    with contextlib.suppress(Exception):
        from torch_npu.npu.utils import get_cann_version

        cann = get_cann_version() or cann
    print(f"CANN: {'simulated' if found.simulated else cann}")
    print(f"driver: {'simulated' if found.simulated else first_line('npu-smi', 'info')}")
elif found.kind is device.DeviceKind.CUDA:
    import torch

    print(f"CUDA: {torch.version.cuda}\ndriver: {first_line('nvidia-smi')}")
print(f"python: {platform.python_version()} on {platform.machine()}, {platform.system()}")
PY
}

if ! top=$(header); then
    printf '%s\n' "${top:-NO DEVICE}"
    exit 2
fi
{
    printf '%s\n\n' "$top"
    "$python" -m pytest tests/device -m "needs_npu_sim and not simulator_only" -rfEs "$@" 2>&1
    code=$?
    printf '\nexit code of pytest: %d\n' "$code"
    [ $code -ne 5 ] || echo "no test ran: this says nothing about the device"
    exit "$code"
} | tee "$report"
code=${PIPESTATUS[0]}
echo "the report is in $report"
exit "$code"
