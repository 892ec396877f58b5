#!/usr/bin/env bash
# Make or refresh the project's own virtual environment; prints the path of its Python.
#
#   VENV=.venv      where it lies (a relative path is taken from the root of the checkout)
#   PYTHON=python3  which Python makes it: 3.11 or newer
#   EXTRAS=...      extras besides the base; default "dev,hf,titan,faults"; "" for none
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${VENV:-.venv}
extras=${EXTRAS-dev,hf,titan,faults}
python=${PYTHON:-python3}

"$python" - <<'PY' || exit 3
import sys
if sys.version_info < (3, 11):
    sys.exit(f"Python 3.11 or newer is needed; {sys.executable} is {sys.version.split()[0]}. "
             "Name another one with PYTHON=...")
PY

# A finished set-up is stamped with what it was made from, so that a second run costs nothing.
stamp="$venv/.ready"
want="$(cat pyproject.toml scripts/setup.sh | sha256sum | cut -d' ' -f1) $extras"
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$want" ]; then
    say() { printf '%6d s  set-up: %s\n' "$SECONDS" "$*" >&2; }
    # pip is asked to be quiet; a line now and then says that it is at work.
    (while sleep 20; do say "still at it"; done) >/dev/null &
    trap "kill $! 2>/dev/null" EXIT
    say "$venv is made or brought up to date (extras: ${extras:-none})"
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv" >&2
    # Torch first and pinned: a range would let another package choose a build of several GB.
    say "torch 2.13.0, some 200 MB where it is not there yet"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 >&2
    say "the package and what it needs"
    package() {
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
            -e ".${1:+[$1]}" torch==2.13.0 >&2
    }
    if ! package "$extras"; then
        # An index may lack the outside judge of the faults; its tests then say that they want it.
        [ "${extras%,faults}" != "$extras" ] || exit 1
        say "once more without the extra 'faults'"
        package "${extras%,faults}"
    fi
    printf '%s' "$want" >"$stamp"
    say "done"
fi
case "$venv" in
    /*) echo "$venv/bin/python" ;;
    *) echo "$PWD/$venv/bin/python" ;;
esac
