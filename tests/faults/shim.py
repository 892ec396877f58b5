"""The file system fault shim: built once, and its controls for the process that has it preloaded.

`arm` makes the n-th counted call under a folder fail, write short or kill the process; `disarm`
returns how many calls were counted and `calls` names them. `fsfault.c` does the work. A process has
the shim when it was started with `environment()`; without a C compiler there is none.
"""

import ctypes
import errno
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from enum import IntEnum
from pathlib import Path

SOURCE = Path(__file__).with_name("fsfault.c")
FLAGS = ("-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
NO_COMPILER = "not run: the file system fault shim wants gcc or g++ (apt-get install gcc)"

# What can be counted; the order is that of the C source.
KINDS = (
    *("open-read", "open-write", "read", "write", "fsync", "rename"),
    *("mkdir", "unlink", "rmdir", "truncate", "close"),
)
READS = ("open-read", "read")
WRITES = tuple(kind for kind in KINDS if kind != "read")

# On a full disk names can be removed, files cannot grow; a read-only folder refuses both.
FULL = ("open-write", "write", "mkdir", "truncate", "close")
SHUT = ("open-write", "rename", "mkdir", "unlink", "rmdir")


class Action(IntEnum):
    NOTHING = 0
    FAIL = 1  # this call
    FAIL_FROM = 2  # this call, and all later ones of the kinds in `failing`
    SHORT = 3  # a write of half the bytes, which is no error
    DIE = 4  # SIGKILL before the call,
    DIE_AFTER = 5  # after it,
    DIE_TORN = 6  # or after half of it


def compiler():
    """The C compiler of the environment, None when there is none."""
    return next((c for c in (os.environ.get("CC"), "gcc", "cc", "g++") if c and _found(c)), None)


def _found(command):
    return shutil.which(command) is not None


@functools.cache
def library():
    """The path of the built shim; None without a compiler."""
    found = compiler()
    if found is None:
        return None
    text = SOURCE.read_bytes() + " ".join((found, *FLAGS)).encode()
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    done = base / "torchtitan-ckpt-fsfault" / f"{hashlib.sha256(text).hexdigest()[:16]}.so"
    if not done.exists():
        done.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=done.parent) as folder:
            built = Path(folder) / "shim.so"
            command = [found, "-x", "c", *FLAGS, "-o", str(built), str(SOURCE), "-ldl", "-lpthread"]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode:
                raise RuntimeError(f"the shim does not build:\n{result.stderr}")
            os.replace(built, done)
    return done


def environment():
    """The environment of a process that is to have the shim."""
    preload = ":".join(filter(None, (str(library() or ""), os.environ.get("LD_PRELOAD"))))
    return {**os.environ, "LD_PRELOAD": preload}


@functools.cache
def _shim():
    shim = ctypes.CDLL(None)
    shim.fsfault_disarm.restype = ctypes.c_long
    shim.fsfault_record.restype = shim.fsfault_last.restype = ctypes.c_char_p
    return shim


def present():
    """Whether this process has the shim preloaded."""
    return hasattr(ctypes.CDLL(None), "fsfault_arm")


def arm(folder, at=0, action=Action.NOTHING, error="", *, kinds=WRITES, failing=KINDS):
    """Count calls of `kinds` under `folder`; do `action` at call number `at` (from 1; 0: never)."""
    number = getattr(errno, error) if error else 0
    root = os.fsencode(os.path.realpath(folder))
    _shim().fsfault_arm(root, _mask(kinds), _mask(failing), ctypes.c_long(at), int(action), number)


def disarm():
    """Let every call pass again; returns how many were counted."""
    return int(_shim().fsfault_disarm())


def calls():
    """What was counted since `arm`: "kind path-inside-the-folder" each."""
    return _shim().fsfault_record().decode(errors="replace").splitlines()


def struck():
    """The call that the action met, as in `calls`; empty when it was never reached."""
    return _shim().fsfault_last().decode(errors="replace")


def no_exchange(on):
    """Behave like NFS and others, which cannot swap two names in one step."""
    _shim().fsfault_no_exchange(int(on))


def _mask(kinds):
    return sum(1 << KINDS.index(kind) for kind in kinds)
