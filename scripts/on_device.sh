#!/usr/bin/env bash
# The device chapter on the accelerator of this machine, and one report about it.
#
#   bash scripts/on_device.sh [--device npu|cuda] [--share] [--report FILE] [arguments for pytest]
#
# The report says at its top whether the device was real. What wants more devices than there are is
# skipped; with --share the ranks share one CUDA device and talk over gloo. PYTHON names the
# interpreter (default: python3) that holds torch, torch_npu where there are NPUs, and this project.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
report=on_device_report.txt
while [ $# -gt 0 ]; do
    case $1 in
        --device) export TORCHTITAN_CKPT_DEVICE=$2 && shift 2 ;;
        --share) export TORCHTITAN_CKPT_SHARE_DEVICE=1 && shift ;;
        --report) report=$2 && shift 2 ;;
        *) break ;;
    esac
done

header() {
    "$python" - << 'PY'
import contextlib
import platform
import subprocess
import sys

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


try:
    found = device.current()
except CheckpointError as error:
    print(f"NO DEVICE\n{error}")
    sys.exit(2)
if found.kind is device.DeviceKind.CPU:
    why = "\n".join(str(problem) for problem in found.passed_over)
    print(f"NO DEVICE: torch finds no accelerator on this machine\n{why}".rstrip())
    sys.exit(2)
kind = f"SIMULATED DEVICE: {device.SIMULATED}" if found.simulated else "REAL DEVICE"
print(f"{kind}\n{found.describe()}")
if found.shared:
    print("ranks share the device and talk over gloo: nothing here is about NCCL")
memory = found.memory()
print(f"memory: {memory.total / 2**30:.1f} GiB each")
for package in ("torch", "torch_npu", "torchtitan-ckpt", "safetensors", "numpy"):
    print(f"{package}: {installed_version(package) or 'not installed'}")
if found.kind is device.DeviceKind.NPU:
    cann = "unknown"
    with contextlib.suppress(Exception):
        from torch_npu.npu.utils import get_cann_version

        cann = get_cann_version() or cann
    print(f"CANN: {'simulated' if found.simulated else cann}")
    print(f"driver: {'simulated' if found.simulated else first_line('npu-smi', 'info')}")
else:
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
