#!/usr/bin/env bash
# Run the main job on real input and print a report. Arguments go to `torchtitan-ckpt check`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$(bash scripts/setup.sh)
exec env TORCH_DEVICE_BACKEND_AUTOLOAD="${TORCH_DEVICE_BACKEND_AUTOLOAD:-0}" \
    "$python" -m torchtitan_ckpt check "$@"
