#!/usr/bin/env bash
# The device chapter on the simulated Ascend device (real torch_npu, simulated CANN).
#
# Makes .venv-npu if it is missing. Where that or g++ cannot be had it prints `not run: <reason>` and
# exits with 0: a chapter that did not run is neither passed nor failed. Arguments go to pytest.
set -uo pipefail
cd "$(dirname "$0")/.."

not_run() {
    echo "not run: the device chapter on the simulated Ascend device: $1"
    exit 0
}

command -v "${CXX:-g++}" > /dev/null || not_run "there is no g++"
if ! log=$(bash scripts/setup_npu_sim.sh 2>&1); then
    not_run "no environment with torch_npu ($(tail -n 1 <<< "$log"))"
fi
# The launcher needs no NPU; torch_npu would be loaded with torch and fail outside the simulator.
export TORCH_DEVICE_BACKEND_AUTOLOAD=0
# The launcher's own look: the version pair fits, the library compiles.
if ! reason=$(.venv-npu/bin/python -m conformance.ascend_sim --why-not); then
    not_run "${reason:-the launcher does not start}"
fi
exec .venv-npu/bin/python -m conformance.ascend_sim -- \
    python -m pytest tests/device -m needs_npu_sim "$@"
