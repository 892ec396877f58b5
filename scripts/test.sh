#!/usr/bin/env bash
# Set up, lint, type-check, and run the whole test suite chapter by chapter.
# Arguments go to `scripts/run_tests.py` (`--only unit`, `--slow`, ...).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$(bash scripts/setup.sh)
export TORCH_DEVICE_BACKEND_AUTOLOAD="${TORCH_DEVICE_BACKEND_AUTOLOAD:-0}"
exec "$python" scripts/run_tests.py "$@"
