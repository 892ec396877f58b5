"""What the simulated device promises: loud refusals, guarded memory, failures on demand."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from conformance.ascend_sim import probe
from conformance.ranks import RankPool
from torchtitan_ckpt import device
from torchtitan_ckpt.errors import DeviceError

pytestmark = pytest.mark.simulator_only

NPU = "npu"


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """A fresh process on the simulated device."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


# ------------------------------------------------------------------ nothing is made up


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("Sort", lambda x: torch.sort(x)),
        ("Cumsum", lambda x: torch.cumsum(x, 0)),
        ("Erf", lambda x: torch.erf(x)),
        ("Gelu", lambda x: torch.nn.functional.gelu(x)),
    ],
)
def test_an_operator_that_is_not_simulated_fails_at_the_call_with_its_name(name, call):
    x = torch.ones(3, 4, device=NPU)
    with pytest.raises(RuntimeError, match=f"operator {name} is not simulated"):
        call(x)
    # Nothing is left over: the next operator works.
    assert torch.equal((x + 1).cpu(), torch.full((3, 4), 2.0))


def test_the_first_refusal_does_not_let_the_next_one_pass():
    x = torch.ones(3, device=NPU)
    for call in (torch.sort, lambda t: torch.cumsum(t, 0), torch.sort):
        with pytest.raises(RuntimeError, match="is not simulated"):
            call(x)


def test_a_data_type_that_is_not_simulated_is_refused():
    with pytest.raises(RuntimeError, match=r"data type \d+ is not simulated"):
        torch.zeros(3, dtype=torch.complex64, device=NPU).clone()


def test_a_runtime_call_that_is_not_simulated_fails_with_its_name():
    first = torch.npu.Event(enable_timing=True)
    first.record()
    first.synchronize()
    with pytest.raises(RuntimeError, match="aclrtEventElapsedTime"):
        first.elapsed_time(first)


def test_arguments_of_the_wrong_kind_are_refused_by_name():
    runtime = device.simulated_runtime()
    assert runtime is not None
    runtime.aclCreateIntArray.restype = ctypes.c_void_p
    runtime.aclGetRecentErrMsg.restype = ctypes.c_char_p
    array = ctypes.c_void_p(runtime.aclCreateIntArray((ctypes.c_int64 * 2)(1, 2), 2))
    size, executor = ctypes.c_uint64(), ctypes.c_void_p()
    code = runtime.aclnnAddGetWorkspaceSize(
        array, array, array, array, ctypes.byref(size), ctypes.byref(executor)
    )
    assert code == 161002
    assert executor.value is None
    message = runtime.aclGetRecentErrMsg().decode()
    assert "aclnnAdd: an argument is not an acl" in message
    # A newer macro of torch_npu ignores the first phase's result: then the second one fails.
    assert runtime.aclnnAdd(None, ctypes.c_uint64(0), executor, None) == 161001


def test_an_output_that_does_not_fit_is_refused():
    """torch_npu never makes one; if it did, a part of it would keep what lay there before."""
    runtime = device.simulated_runtime()
    assert runtime is not None
    runtime.aclCreateTensor.restype = ctypes.c_void_p

    def made(tensor: torch.Tensor) -> ctypes.c_void_p:
        sizes, strides = (ctypes.c_int64 * 1)(len(tensor)), (ctypes.c_int64 * 1)(1)
        one, none = ctypes.c_uint64(1), ctypes.c_int64(0)
        at = ctypes.c_void_p(tensor.data_ptr())
        return ctypes.c_void_p(
            runtime.aclCreateTensor(sizes, one, 0, strides, none, 2, sizes, one, at)
        )

    def launched(out: torch.Tensor) -> int:
        size, plan = ctypes.c_uint64(), ctypes.c_void_p()
        runtime.aclnnSqrtGetWorkspaceSize(
            made(x), made(out), ctypes.byref(size), ctypes.byref(plan)
        )
        return int(runtime.aclnnSqrt(None, size, plan, None))

    x = torch.full((3,), 9.0, device=NPU)
    out = torch.zeros(4, device=NPU)
    torch.npu.synchronize()
    assert launched(out) == 161002
    assert launched(out[:2]) == 161002
    assert launched(out[:3]) == 0
    assert out.tolist() == [3.0, 3.0, 3.0, 0.0]


# ------------------------------------------------------------------ memory


def test_the_host_cannot_read_device_memory():
    code = (
        "import ctypes, torch\n"
        "x = torch.ones(4, device='npu')\n"
        "torch.npu.synchronize()\n"
        "ctypes.string_at(x.data_ptr(), 4)\n"
    )
    assert run_python(code).returncode == -11


def test_fresh_memory_is_poisoned():
    torch.npu.empty_cache()
    # Larger than any block that the allocator may have kept.
    x = torch.empty(30 << 20, dtype=torch.uint8, device=NPU)
    assert bool((x == 0xFF).all())


def test_without_the_caching_allocator_recycled_memory_is_poisoned_too():
    code = (
        "import torch\n"
        "x = torch.ones(1000, device='npu'); at = x.data_ptr(); del x\n"
        "y = torch.empty(1000, device='npu')\n"
        "assert y.data_ptr() == at, 'the block was not used again'\n"
        "assert bool((y != y).all()), y[:4]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTORCH_NO_NPU_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_memory_is_finite_and_the_allocator_says_so():
    total = device.current().memory().total
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(total + (1 << 20), dtype=torch.uint8, device=NPU)
    problem = device.explain_runtime_error(caught.value)
    assert problem is not None
    assert problem.code == "device.out-of-memory"
    # Half of it still fits, and is given back.
    before = probe.bytes_in_use()
    block = torch.empty(total // 4, dtype=torch.uint8, device=NPU)
    assert probe.bytes_in_use() - before >= total // 4
    del block
    torch.npu.empty_cache()
    assert probe.bytes_in_use() <= before


def test_bytes_in_use_and_peak_can_be_read():
    found = device.current()
    found.empty_cache()
    probe.reset_peak()
    found.reset_peak()
    base, allocated = probe.bytes_in_use(), found.memory().allocated
    x = torch.empty(64 << 20, dtype=torch.uint8, device=NPU)
    assert probe.bytes_in_use() >= base + (64 << 20)
    assert found.memory().allocated - allocated >= 64 << 20
    del x
    found.empty_cache()
    assert probe.bytes_in_use() <= base
    assert probe.peak_bytes() >= base + (64 << 20)
    assert found.memory().peak - allocated >= 64 << 20


def test_pinned_memory_is_pinned():
    before = probe.pinned_bytes()
    x = device.current().host_empty((1 << 20, 5), torch.float32)
    assert x.is_pinned()
    assert probe.pinned_bytes() - before >= 20 << 20
    assert not device.current().host_empty((3,), torch.float32, pin=False).is_pinned()


def test_a_copy_beyond_an_allocation_is_refused():
    runtime = device.simulated_runtime()
    x = torch.ones(16, device=NPU)
    torch.npu.synchronize()
    host = ctypes.create_string_buffer(1 << 30)
    size = ctypes.c_size_t(1 << 30)
    code = runtime.aclrtMemcpy(host, size, ctypes.c_void_p(x.data_ptr()), size, 2)
    assert code == 107000


# ------------------------------------------------------------------ planned faults


def test_the_nth_call_fails_with_the_chosen_code():
    x = torch.ones(5, device=NPU)
    with probe.fault("aclnnAdds", 2, 507015):
        assert (x + 1).cpu()[0] == 2
        with pytest.raises(RuntimeError, match="507015") as caught:
            x + 1
        assert (x + 1).cpu()[0] == 2
    problem = device.explain_runtime_error(caught.value)
    assert problem is not None
    assert problem.code == "device.cann-error"
    assert "507015" in problem.what
    assert "AI Core" in problem.what


def test_a_fault_of_a_copy_and_of_an_allocation():
    x = torch.ones(5, device=NPU)
    with probe.fault("aclrtMemcpy*", 1, 507018), pytest.raises(RuntimeError, match="507018"):
        x.cpu()
    torch.npu.empty_cache()
    with probe.fault("aclrtMalloc*", 1, 207001), probe.fault("aclrtMallocAlign32", 1, 207001):
        # torch_npu frees its cache and asks again: the second call succeeds.
        assert torch.empty(40 << 20, dtype=torch.uint8, device=NPU).numel() == 40 << 20


def test_faults_come_through_the_environment_too():
    code = (
        "import torch\n"
        "x = torch.ones(3, device='npu')\n"
        "try: x * 2\n"
        "except RuntimeError as error: print('507014' in str(error))\n"
    )
    env = {**os.environ, "NPUSIM_FAULT": "aclnnMuls:1:507014"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip().endswith("True"), done.stderr


def test_calls_are_counted():
    before = probe.calls("aclnnMuls")
    (torch.ones(3, device=NPU) * 3).cpu()
    assert probe.calls("aclnnMuls") == before + 1


# ------------------------------------------------------------------ several devices


def _asked_beyond_the_devices() -> str:
    try:
        device.current().select(99)
    except DeviceError as error:
        return error.problems[0].code
    return "nothing"


def test_a_rank_without_a_device_is_told():
    assert _asked_beyond_the_devices() == "device.no-such-index"
    with pytest.raises(RuntimeError, match=r"107001|invalid"):
        torch.npu.set_device(99)


def _copy_while_a_collective_waits(late: bool) -> tuple[float, float]:
    """Rank 1 comes late to an all-reduce; meanwhile a thread of rank 0 copies."""
    import torch.distributed as dist

    rank = dist.get_rank()
    device.current().select(rank)
    dist.all_reduce(torch.ones(1, device=NPU))  # makes the communicator
    torch.npu.synchronize()
    x = torch.ones(1000, device=NPU)
    took: list[float] = []

    def copy() -> None:
        torch.npu.set_device(rank)
        begin = time.monotonic()
        stream = torch.npu.Stream()
        with torch.npu.stream(stream):
            assert x.to("cpu", non_blocking=True) is not None
        stream.synchronize()
        took.append(time.monotonic() - begin)

    if rank == 1:
        time.sleep(1.5)
    begin = time.monotonic()
    work = dist.all_reduce(x, async_op=True)
    thread = threading.Thread(target=copy)
    thread.start()
    thread.join()
    work.wait()
    torch.npu.synchronize()
    return took[0], time.monotonic() - begin


def test_a_waiting_collective_stalls_its_own_stream_only(ranks: RankPool):
    copied, waited = ranks.run(_copy_while_a_collective_waits, 2, True)[0]
    assert waited > 1.0, "rank 1 was not late: the test shows nothing"
    assert copied < 0.5
