"""Compile the stand-in for the CANN runtime once, and keep it by a hash of its sources.

One shared library under the seven names that torch_npu asks for. It links against the torch that is
beside torch_npu, whose CPU kernels do its arithmetic; it knows nothing of Python.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from torchtitan_ckpt.errors import DeviceError, Problem

SOURCES = Path(__file__).parent
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-Wall")

# The names under which torch_npu links or opens the CANN runtime.
_LIBRARIES = (
    "libascendcl.so",
    "libacl_op_compiler.so",
    "libacl_tdt_channel.so",
    "libge_runner.so",
    "libgraph.so",
    "libhccl.so",
    "libopapi.so",
)


def compiler() -> str | None:
    """The C++ compiler: the environment's CXX, else g++."""
    return shutil.which(os.environ.get("CXX") or "g++")


def cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "torchtitan-ckpt" / "ascend-sim"


def build(torch: Path) -> Path:
    """A folder with `lib/` (the libraries) and `home/` (an empty CANN tree).

    `torch` is the folder of the package. Compiles only when it, sources, flags or compiler changed.
    Several processes may call this at once: each compiles in a folder of its own, and the first
    rename wins.

    Raises DeviceError when there is no compiler or it fails.
    """
    cxx = compiler()
    if cxx is None:
        raise DeviceError(
            Problem(
                code="device.sim-no-compiler",
                what="the simulated Ascend device wants g++, and there is none",
                fix="install g++ (apt-get install g++), or set CXX",
            )
        )
    done = cache_root() / _fingerprint(cxx, torch)
    if (done / "lib").is_dir():
        return done
    done.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=done.parent, prefix="building-") as scratch:
        _compile(cxx, torch, Path(scratch))
        try:
            Path(scratch, "out").rename(done)
        except OSError:
            if not (done / "lib").is_dir():
                raise
    return done


def _fingerprint(cxx: str, torch: Path) -> str:
    version = subprocess.run([cxx, "--version"], capture_output=True, text=True, check=False)
    digest = hashlib.sha256(f"{FLAGS} {_LIBRARIES} {version.stdout} {torch}".encode())
    digest.update((torch / "version.py").read_bytes())
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _compile(cxx: str, torch: Path, scratch: Path) -> None:
    out = scratch / "out"
    for folder in ("lib", "home/runtime", "home/compiler", "home/opp"):
        (out / folder).mkdir(parents=True)
    objects = []
    running = []
    # The slowest file first; all of them side by side.
    for source in sorted(SOURCES.glob("*.cpp"), key=lambda path: -path.stat().st_size):
        target = scratch / f"{source.stem}.o"
        objects.append(str(target))
        command = [cxx, *FLAGS, "-isystem", str(torch / "include")]
        command += ["-c", str(source), "-o", str(target)]
        running.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    errors = [process.communicate()[1] for process in running if process]
    failed = [text for process, text in zip(running, errors, strict=True) if process.returncode]
    library = out / "lib" / _LIBRARIES[0]
    if not failed:
        link = [cxx, "-shared", "-o", str(library), *objects]
        link += [f"-Wl,-soname,{_LIBRARIES[0]},--as-needed,-rpath,{torch / 'lib'}"]
        link += [f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", "-lpthread"]
        linked = subprocess.run(link, stderr=subprocess.PIPE, text=True, check=False)
        failed = [linked.stderr] if linked.returncode else []
    if failed:
        raise DeviceError(
            Problem(
                code="device.sim-build-failed",
                what="the simulated CANN runtime does not compile",
                actual=failed[0].strip().splitlines()[0] if failed[0].strip() else "no message",
                cause=f"compiler: {cxx}",
                fix="use a g++ that knows C++17 (9 or newer)",
            )
        )
    for name in _LIBRARIES[1:]:
        (out / "lib" / name).symlink_to(_LIBRARIES[0])
