#!/usr/bin/env bash
# The reference training job, as the guide starts it:
#
#   NGPU=2 MODULE=torchtitan_ckpt.train CONFIG=qwen3_debug bash scripts/run_train.sh --flags…
#
# NGPU    ranks on this node (default 1: one plain process, no process group)
# MODULE  importable module with configs (default torchtitan_ckpt.train)
# CONFIG  one of its functions (default qwen3_debug)
# PYTHON  interpreter (default: an active or local virtual environment's, else python3)
#
# Several nodes: set NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT as for torchrun.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
NGPU=${NGPU:-1}
MODULE=${MODULE:-torchtitan_ckpt.train}
CONFIG=${CONFIG:-qwen3_debug}
if [ -z "${PYTHON:-}" ]; then
    if [ -n "${VIRTUAL_ENV:-}" ]; then
        PYTHON=$VIRTUAL_ENV/bin/python
    elif [ -x "$root/.venv/bin/python" ]; then
        PYTHON=$root/.venv/bin/python
    else
        PYTHON=python3
    fi
fi
export NGPU MODULE CONFIG PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

if [ "$NGPU" = 1 ] && [ "${NNODES:-1}" = 1 ]; then
    # What an outer launcher left in the environment would make this process wait for others.
    exec env -u RANK -u LOCAL_RANK -u WORLD_SIZE -u GROUP_RANK -u LOCAL_WORLD_SIZE \
        -u MASTER_ADDR -u MASTER_PORT -u TORCHELASTIC_RUN_ID \
        "$PYTHON" -m torchtitan_ckpt.train "$@"
fi
exec "$PYTHON" -m torchtitan_ckpt.train.launch "$@"
