#!/usr/bin/env bash
# Make .venv-npu: torch and torch_npu of one release, the CPU build of torch, and this project.
# torch_npu gets an environment of its own because it breaks plain `import torch` where no CANN is.
# Safe to run again: it does nothing when the environment is complete.
set -euo pipefail
cd "$(dirname "$0")/.."

release=2.13.0
target=${1:-.venv-npu}
python=${PYTHON:-}
if [ -z "$python" ]; then
    # torch_npu has wheels for 3.10 to 3.13; the project wants 3.11 or newer.
    for candidate in .venv/bin/python python3.11 python3 python; do
        if command -v "$candidate" > /dev/null; then python=$candidate && break; fi
    done
fi

complete() {
    TORCH_DEVICE_BACKEND_AUTOLOAD=0 "$target/bin/python" - "$release" << 'PY' 2> /dev/null
import importlib.metadata as m, sys
assert all(m.version(p).startswith(sys.argv[1]) for p in ("torch", "torch_npu"))
import conformance, fsspec, hypothesis, numpy, pytest, rich, safetensors, tyro, xxhash, yaml, torch
PY
}

if complete; then
    echo "$target is complete (torch and torch_npu $release)"
    exit 0
fi
"$python" -m venv "$target"
"$target/bin/python" -m pip install --quiet \
    "torch==$release" "torch_npu==$release" \
    'safetensors>=0.6' 'tyro>=0.9' 'rich>=13' 'xxhash>=3' 'zlib-ng>=0.5' 'fsspec>=2024.6' \
    numpy 'pytest>=8' 'pytest-xdist>=3.6' 'hypothesis>=6.100' pyyaml
"$target/bin/python" -m pip install --quiet --no-deps --editable .
if ! complete; then
    echo "$target was made, but does not import torch and this project" >&2
    exit 1
fi
echo "$target made (torch and torch_npu $release)"
