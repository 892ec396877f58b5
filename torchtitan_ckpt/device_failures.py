"""What failures of torch_npu, CANN and HCCL mean, in words: a Problem with its remedy.

Reads the texts of exceptions and the versions of installed packages; imports no torch and touches
no device, so that it can explain a failed `import torch`.
"""

from __future__ import annotations

import importlib.metadata
import re

from torchtitan_ckpt.errors import CheckpointError, DeviceError, Problem, RankError

AUTOLOAD_ENV = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def explain_import_error(error: BaseException) -> Problem | None:
    """What a failed `import torch` means, or None when it says nothing about devices.

    torch wraps the failure of an autoloaded backend in a RuntimeError; the reason is its cause.
    """
    chain = [str(error)]
    cause = error.__cause__ or error.__context__
    while cause is not None:
        chain.append(str(cause))
        cause = cause.__cause__ or cause.__context__
    text = "\n".join(chain)
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return Problem(
            code="device.no-torch",
            what="PyTorch is not installed in this environment",
            fix="pip install torch, or activate the environment that holds it",
        )
    library = re.search(r"(lib[\w.+-]+\.so[\w.]*): cannot open shared object file", text)
    if "torch_npu" not in text and not (library and _is_cann(library[1])):
        return None
    mismatch = version_mismatch()
    if mismatch is not None:
        return mismatch
    if library is not None:
        return Problem(
            code="device.no-cann",
            what="torch_npu is installed, and the CANN runtime that it needs is not found",
            where=library[1],
            cause="torch loads torch_npu at import, so that even CPU work fails here",
            fix="source CANN's set_env.sh (ascend-toolkit/set_env.sh), "
            f"or set {AUTOLOAD_ENV}=0 to work without NPUs",
        )
    return Problem(
        code="device.torch-npu-broken",
        what="torch_npu fails while it is loaded",
        actual=chain[-1].splitlines()[0] if chain[-1] else type(error).__name__,
        fix=f"run `python -c 'import torch_npu'` for its own words; {AUTOLOAD_ENV}=0 leaves it out",
    )


def explain_runtime_error(error: BaseException) -> Problem | None:
    """What an exception out of a device call means: memory, a CANN or HCCL code; None if neither.

    Follows the causes of `error`, since DCP wraps what a rank raised.
    """
    seen: set[int] = set()
    stack: list[BaseException] = [error]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        problem = _device_failure(item)
        if problem is not None:
            return problem
        stack += [e for e in (item.__cause__, item.__context__) if e is not None]
        # DCP keeps the exception of each rank as (exception, traceback).
        failures = getattr(item, "failures", None)
        if isinstance(failures, dict):
            stack += [e[0] for e in failures.values() if isinstance(e[0], BaseException)]
    return None


def own_error(error: Exception) -> Exception:
    """A DeviceError for what a device call raised; any other exception, and our own, as it is."""
    if isinstance(error, CheckpointError):
        return error
    problem = explain_runtime_error(error)
    if problem is None:
        return error
    ours = DeviceError(problem)
    ours.__cause__ = error
    return ours


def lost_rank(error: BaseException, where: str = "") -> CheckpointError:
    """What a collective raised because a rank has gone: a RankError, or the DeviceError behind it.

    gloo's text begins with the place in its own sources, which helps nobody here.
    """
    problem = explain_runtime_error(error)
    if problem is not None:
        return DeviceError(problem)
    text = re.sub(r"^\[\S+\.(cc|cpp|h):\d+\] ", "", _first_line(str(error)))
    return RankError(
        Problem(
            code="ranks.lost",
            what="Another rank has gone, or does not answer.",
            where=where,
            actual=text.partition(" This is typically caused")[0],
            cause="its process ended or was killed, or the network between the nodes fails",
            fix="look for the first error in the logs of the other ranks",
        )
    )


_CODE = re.compile(r"error code is (\d{3,6})|\bERR\d{5}\b")
_CANN_CODES = {
    100000: "invalid parameter: often a tensor whose storage was emptied",
    100024: "operator not found",
    107000: "invalid parameter",
    107002: "no context on this thread",
    207000: "feature not supported",
    207001: "out of device memory",
    507011: "the model or stream failed on the device",
    507014: "an AI Core task timed out",
    507015: "an AI Core task failed",
    507018: "an AI CPU task failed",
    507035: "a vector core task failed",
    507053: "uncorrectable memory error (device RAS)",
    507054: "uncorrectable memory error in a task",
}


def _device_failure(error: BaseException) -> Problem | None:
    text = str(error)
    if type(error).__name__ == "OutOfMemoryError" or "out of memory" in text.lower():
        return Problem(
            code="device.out-of-memory",
            what="the device ran out of memory",
            actual=_first_line(text),
            fix="free or swap out tensors first, or save with a smaller staging window",
        )
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        return Problem(
            code="device.host-memory",
            what="this host ran out of memory",
            actual=_first_line(text),
            fix="give the job more, or stage less: checkpoint.async_mode disabled keeps no copy of "
            "the state",
        )
    found = _CODE.search(text)
    if not found or isinstance(error, DeviceError):
        return None
    code = int(found[1]) if found[1] else 0
    line = next((x for x in text.splitlines() if found[0] in x), text)
    name = re.search(r"call (\w+)|\b(acl\w+|Hccl\w+)\b", text)
    call = (name[1] or name[2]) if name else "a call into CANN"
    meaning = _CANN_CODES.get(code, "")
    return Problem(
        code="device.cann-error",
        what=f"{call} failed with {f'CANN error {code}' if code else found[0]}"
        + (f" ({meaning})" if meaning else ""),
        actual=line.strip()[:300],
        fix="look for the first error in the plog files (~/ascend/log); later ones follow from it",
    )


def version_mismatch() -> Problem | None:
    """torch_npu is built against one torch release and breaks in obscure ways on any other."""
    torch, npu = installed_version("torch"), installed_version("torch_npu")
    if torch is None or npu is None or release(torch) == release(npu):
        return None
    return Problem(
        code="device.version-mismatch",
        what="torch_npu and torch are not of the same release",
        expected=f"torch_npu {release(torch)} beside torch {torch}",
        actual=f"torch_npu {npu}",
        fix=f"pip install torch_npu=={release(torch)} --no-deps, or the torch that "
        f"torch_npu {npu} was built for ({release(npu)})",
    )


def installed_version(package: str) -> str | None:
    """The version that pip knows, without importing the package; None when it is absent."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def release(version: str) -> str:
    """`2.13.0` of `2.13.0+cpu`, `2.13.0.post1` and `2.13.0rc1`."""
    found = re.match(r"\d+\.\d+\.\d+", version)
    return found[0] if found else version


def _is_cann(library: str) -> bool:
    names = ("ascend", "acl", "hccl", "ge_", "graph", "runtime", "opapi", "torch_npu")
    return any(name in library for name in names)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:300]
