"""Which device is chosen, what each offers, and the sentences that say why one is not usable.

The sentences that need torch_npu are tested by reading its errors, not by provoking them; the real
ones are provoked on the simulated device (tests/device).
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from conformance.ascend_sim import build, launcher
from torchtitan_ckpt import device, device_failures
from torchtitan_ckpt.errors import ConfigError, DeviceError

ON_CPU = pytest.mark.skipif(
    device.current().kind is not device.DeviceKind.CPU, reason="about a machine without accelerator"
)
TORCH = Path(torch.__file__).parent
# A build of torch for CUDA says that it sees no device; a build for CPUs has nothing to say.
CUDA_BUILD = [] if torch.version.cuda is None else ["device.none-visible"]


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch):
    """Pretend that these packages are installed."""

    def pretend(**installed: str | None) -> None:
        monkeypatch.setattr(device_failures, "installed_version", installed.get)
        monkeypatch.setattr(device, "installed_version", installed.get)

    return pretend


# ------------------------------------------------------------------ choosing


@ON_CPU
def test_the_cpu_is_taken_where_there_is_nothing_better():
    found = device.current()
    assert (found.kind, found.label, found.backend, found.count) == ("cpu", "cpu", "gloo", 1)
    assert found.describe() == "cpu"
    assert [p.code for p in found.passed_over] == CUDA_BUILD
    assert not found.simulated


@ON_CPU
def test_a_device_that_is_asked_for_and_missing_is_an_error(monkeypatch: pytest.MonkeyPatch):
    for kind in ("npu", "cuda"):
        with pytest.raises(DeviceError) as caught:
            device.current(kind)
        assert caught.value.exit_code == 2
        assert caught.value.problems[0].fix
        monkeypatch.setenv(device.ENV, kind)
        with pytest.raises(DeviceError):
            device.current()
        # What is asked for in the call wins over the environment.
        assert device.current("cpu").kind == "cpu"


def test_an_unknown_kind_is_told_the_nearest(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="did you mean npu") as caught:
        device.current("nppu")
    assert caught.value.problems[0].code == "device.unknown-kind"
    assert "--device" in str(caught.value)
    monkeypatch.setenv(device.ENV, "gpu")
    with pytest.raises(ConfigError, match=device.ENV):
        device.current()


def test_case_and_blanks_do_not_matter():
    assert device.current(" CPU ").kind is device.DeviceKind.CPU


@ON_CPU
def test_better_kinds_that_were_not_usable_are_named(versions):
    versions(torch=torch.__version__, torch_npu="2.13.0")
    # torch_npu "is installed", torch has no npu: its autoload did not happen.
    versions(torch="2.13.0", torch_npu="2.13.0")
    found = device.current()
    assert found.kind == "cpu"
    assert [p.code for p in found.passed_over] == ["device.autoload-off", *CUDA_BUILD]


def test_the_device_of_a_tensor():
    assert device.of(torch.ones(2)).kind == "cpu"
    assert device.of(torch.device("npu" if hasattr(torch, "npu") else "cuda", 1)).kind != "cpu"
    assert device.of("cuda:3").kind == "cuda"
    assert device.of(torch.ones(2, device="meta")).kind == "cpu"


def test_backends():
    assert device.Device(device.DeviceKind.NPU).backend == "cpu:gloo,npu:hccl"
    assert device.Device(device.DeviceKind.CUDA).backend == "cpu:gloo,cuda:nccl"


def test_ranks_share_one_cuda_device_only_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    chosen: list[int] = []
    module = SimpleNamespace(device_count=lambda: 2, set_device=chosen.append)
    monkeypatch.setattr(device.Device, "module", module)
    cuda, npu = (device.Device(device.DeviceKind(kind)) for kind in ("cuda", "npu"))
    monkeypatch.setattr(device, "_made", str)
    monkeypatch.setenv(device.SHARE_ENV, "1")
    assert [cuda.select(rank) for rank in range(4)] == ["cuda:0", "cuda:1"] * 2
    assert (cuda.backend, chosen) == ("gloo", [0, 1, 0, 1])
    assert npu.backend == "cpu:gloo,npu:hccl", "gloo moves no tensors of NPUs"
    monkeypatch.delenv(device.SHARE_ENV)
    assert device.Device(device.DeviceKind.CPU).shared, "a CPU always is"
    assert cuda.backend == "cpu:gloo,cuda:nccl"
    for found in (cuda, npu):
        with pytest.raises(DeviceError, match="local rank 2 has no"):
            found.select(2)


# ------------------------------------------------------------------ what a cpu offers


def test_everything_can_be_called_on_a_cpu():
    found = device.current("cpu")
    found.synchronize()
    found.empty_cache()
    found.reset_peak()
    assert found.memory() == device.Memory()
    assert found.at(3) == torch.device("cpu")
    assert found.select(7) == torch.device("cpu")
    stream = found.stream()
    stream.wait_stream(found.current_stream())
    with found.use(stream):
        event = stream.record_event()
    event.synchronize()
    assert event.query()
    stream.synchronize()


def test_host_memory_says_why_it_is_not_pinned():
    found = device.current("cpu")
    assert "no accelerator" in found.pin_refusal()
    made = found.host_empty((3, 5), torch.bfloat16)
    assert (made.shape, made.dtype, made.is_pinned()) == ((3, 5), torch.bfloat16, False)
    assert device.Device(device.DeviceKind.NPU).pin_refusal() == ""


# ------------------------------------------------------------------ why not: the sentences


def failed_import(reason: str) -> RuntimeError:
    """What torch raises when an autoloaded backend cannot be loaded."""
    error = RuntimeError(
        "Failed to load the backend extension: torch_npu. You can disable extension auto-loading "
        "with TORCH_DEVICE_BACKEND_AUTOLOAD=0."
    )
    error.__cause__ = ImportError(reason)
    return error


def test_torch_npu_without_cann(versions):
    versions(torch="2.13.0+cpu", torch_npu="2.13.0")
    missing = "libhccl.so: cannot open shared object file: No such file or directory"
    problem = device.explain_import_error(failed_import(missing))
    assert problem is not None
    assert problem.code == "device.no-cann"
    assert problem.where == "libhccl.so"
    assert "set_env.sh" in problem.fix
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in problem.fix
    # `import torch_npu` alone raises the bare ImportError.
    assert device.explain_import_error(ImportError(missing)) == problem


def test_a_version_pair_that_does_not_fit_is_said_first(versions):
    versions(torch="2.13.0+cpu", torch_npu="2.12.0.post1")
    problem = device.explain_import_error(failed_import("undefined symbol: _ZN3c10"))
    assert problem is not None
    assert problem.code == "device.version-mismatch"
    assert problem.actual == "torch_npu 2.12.0.post1"
    assert "pip install torch_npu==2.13.0" in problem.fix


def test_torch_npu_that_fails_for_another_reason(versions):
    versions(torch="2.13.0", torch_npu="2.13.0")
    problem = device.explain_import_error(failed_import("Duplicated key 'x'\nmore"))
    assert problem is not None
    assert problem.code == "device.torch-npu-broken"
    assert problem.actual == "Duplicated key 'x'"


def test_no_torch_at_all():
    problem = device.explain_import_error(ModuleNotFoundError("No module", name="torch"))
    assert problem is not None
    assert problem.code == "device.no-torch"


@pytest.mark.parametrize(
    "error", [ImportError("libjpeg.so.9: cannot open shared object file"), ValueError("no")]
)
def test_other_import_errors_are_not_explained(error: Exception):
    assert device.explain_import_error(error) is None


def test_the_failed_import_is_remembered(tmp_path: Path):
    """A second import of a half-loaded torch can crash: it must not happen."""
    (tmp_path / "torch.py").write_text(
        "print('imported')\n"
        "raise RuntimeError('Failed to load the backend extension: torch_npu.') "
        "from ImportError('libhccl.so: cannot open shared object file')\n"
    )
    code = textwrap.dedent("""
        from torchtitan_ckpt import device
        for ask in (device.current, lambda: device.current("cpu"), device.import_torch):
            try: ask()
            except device.DeviceError as error: print(error.problems[0].code)
    """)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}", "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    codes = done.stdout.split()
    assert codes[0] == "imported"
    assert codes.count("imported") == 1
    assert len(codes) == 4
    assert len(set(codes[1:])) == 1


def test_npus_that_are_not_visible(versions, monkeypatch: pytest.MonkeyPatch):
    versions(torch="2.13.0", torch_npu="2.13.0")
    fake = SimpleNamespace(npu=SimpleNamespace(device_count=lambda: 0))
    monkeypatch.setattr(device, "_torch", lambda: fake)
    problem = device.why_not(device.DeviceKind.NPU)
    assert problem is not None
    assert problem.code == "device.none-visible"
    assert "ASCEND_RT_VISIBLE_DEVICES" in problem.fix


def test_cuda_builds_without_a_device(monkeypatch: pytest.MonkeyPatch):
    fake = SimpleNamespace(
        cuda=SimpleNamespace(is_available=lambda: False),
        version=SimpleNamespace(cuda="12.8"),
        __version__="2.13.0+cu128",
    )
    monkeypatch.setattr(device, "_torch", lambda: fake)
    problem = device.why_not(device.DeviceKind.CUDA)
    assert problem is not None
    assert problem.code == "device.none-visible"


# ------------------------------------------------------------------ errors of device calls

CANN_TEXT = (
    "copy_between_host_and_device_opapi:CopyKernelOpApi.cpp:89 NPU function error: aclrtMemcpy, "
    "error code is 507018\n"
    "[ERROR] 2026-11-29-16:37:01 (PID:1, Device:0, RankID:-1) ERR00100 PTA call acl api failed"
)


def test_cann_codes_are_named():
    problem = device.explain_runtime_error(RuntimeError(CANN_TEXT))
    assert problem is not None
    assert problem.code == "device.cann-error"
    assert problem.what == "aclrtMemcpy failed with CANN error 507018 (an AI CPU task failed)"
    assert "plog" in problem.fix


def test_causes_are_followed_into_what_dcp_raises():
    inner = torch.OutOfMemoryError("NPU out of memory. Tried to allocate 2.00 GiB")

    class CheckpointException(BaseException):
        failures = {0: (inner, None)}  # noqa: RUF012 - the shape of DCP's own

    problem = device.explain_runtime_error(CheckpointException())
    assert problem is not None
    assert problem.code == "device.out-of-memory"
    wrapped = ValueError("a save failed")
    wrapped.__cause__ = RuntimeError(CANN_TEXT)
    assert device.explain_runtime_error(wrapped) is not None


def test_other_errors_are_not_explained():
    assert device.explain_runtime_error(ValueError("the shape is (3, 5)")) is None
    looped = ValueError("x")
    looped.__cause__ = looped
    assert device.explain_runtime_error(looped) is None


# ------------------------------------------------------------------ the launcher of the simulator


@pytest.fixture
def pythons(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A launcher that sees only Pythons which answer with these versions."""

    def pretend(*answers: dict[str, str | None]) -> None:
        paths = []
        for i, answer in enumerate(answers):
            path = tmp_path / f"python{i}"
            path.write_text(f"#!/bin/sh\necho '{json.dumps({**answer, 'folder': '.'})}'\n")
            path.chmod(0o755)
            paths.append(str(path))
        monkeypatch.setenv(launcher.PYTHON_ENV, paths[0])
        monkeypatch.setattr(launcher.sys, "executable", paths[-1])
        monkeypatch.setattr(launcher, "_BESIDE_THE_PROJECT", tmp_path / "none" / "python")
        monkeypatch.setattr(build, "build", lambda torch: tmp_path)

    return pretend


def test_an_environment_without_torch_npu_is_a_reason(pythons):
    pythons({"torch": "2.13.0", "torch_npu": None}, {"torch": "2.13.0", "torch_npu": None})
    problem = launcher.why_not()
    assert problem is not None
    assert problem.code == "device.sim-no-torch-npu"
    assert "setup_npu_sim.sh" in problem.fix
    with pytest.raises(DeviceError):
        launcher.run(["true"])


def test_a_pair_that_does_not_fit_is_a_reason(pythons):
    pythons({"torch": "2.13.0+cpu", "torch_npu": "2.12.0"})
    problem = launcher.why_not()
    assert problem is not None
    assert problem.code == "device.version-mismatch"


def test_no_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(DeviceError) as caught:
        build.build(TORCH)
    assert caught.value.problems[0].code == "device.sim-no-compiler"


@pytest.mark.skipif(build.compiler() is None, reason="there is no g++")
def test_code_that_does_not_compile_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "broken.cpp").write_text("int main( {")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(DeviceError) as caught:
        build.build(TORCH)
    assert caught.value.problems[0].code == "device.sim-build-failed"
    assert "broken.cpp" in caught.value.problems[0].actual
    # Nothing half-made is left behind, and nothing that looks built.
    assert not list((tmp_path / "cache").rglob("*.so"))


@pytest.mark.skipif(build.compiler() is None, reason="there is no g++")
def test_a_build_is_made_once_and_again_when_a_source_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    source = tmp_path / "one.cpp"
    source.write_text('extern "C" int one() { return 1; }')
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = build.build(TORCH)
    made = (first / "lib" / "libascendcl.so").stat().st_mtime_ns
    assert build.build(TORCH) == first
    assert (first / "lib" / "libascendcl.so").stat().st_mtime_ns == made
    assert (first / "lib" / "libopapi.so").resolve() == first / "lib" / "libascendcl.so"
    source.write_text('extern "C" int one() { return 2; }')
    assert build.build(TORCH) != first


def test_the_environment_of_a_run(tmp_path: Path):
    simulator = launcher.Simulator("python", {"torch": "1", "torch_npu": "1"}, tmp_path)
    env = launcher.environment(
        simulator,
        lazy=True,
        devices=3,
        faults=[("aclrtMemcpy", 2, 507018), ("task", 1, 9)],
        base={"LD_LIBRARY_PATH": "/elsewhere", device.AUTOLOAD_ENV: "0"},
    )
    assert env["LD_LIBRARY_PATH"] == f"{tmp_path / 'lib'}:/elsewhere"
    assert env["NPUSIM_FAULT"] == "aclrtMemcpy:2:507018,task:1:9"
    assert (env["NPUSIM_LAZY"], env["NPUSIM_DEVICES"]) == ("1", "3")
    assert (env["TASK_QUEUE_ENABLE"], env["OMP_NUM_THREADS"]) == ("0", "1")
    assert device.AUTOLOAD_ENV not in env
    assert env[device.ENV] == "npu"


def test_the_exit_code_of_the_command_is_handed_on(pythons):
    pythons({"torch": "2.13.0", "torch_npu": "2.13.0"})
    assert launcher.run(["sh", "-c", "exit 7"]) == 7
    with pytest.raises(ValueError, match="no command"):
        launcher.run([])


def test_a_command_line_is_run_again_with_the_device_that_it_finds_there(
    monkeypatch: pytest.MonkeyPatch,
):
    seen: list[list[str]] = []
    monkeypatch.setattr(launcher, "run", lambda argv, lazy: seen.append(list(argv)) or 3)
    assert (
        launcher.again("m", ["check", "x", "--device", "npu-sim", "--seed", "1"], "--device") == 3
    )
    assert launcher.again("m", ["--device=npu-sim", "npu-sim"], "--device") == 3
    assert seen == [
        ["python", "-m", "m", "check", "x", "--device", "npu", "--seed", "1"],
        ["python", "-m", "m", "--device=npu", "npu-sim"],
    ]
