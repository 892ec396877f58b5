// A small stand-in for the CANN runtime, so that the real torch_npu runs on a machine without NPUs.
//
// Shared by memory.cpp (device and pinned memory, copies), streams.cpp (streams, events, lazy mode),
// runtime.cpp (devices, settings, faults, everything that is not simulated), operators.cpp and
// hccl.cpp. Only the names of the C interface and the layout of its arguments are CANN's.
//
// Rules that every file keeps:
//   * what is not simulated fails with its own name; no call makes up data;
//   * every entry point calls `enter` first: it counts the call and injects planned faults;
//   * no lock is held while a task runs, so that a collective that waits for another rank stalls
//     its own stream and nothing else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

// Every entry point that torch_npu looks up is C.
#define API extern "C" __attribute__((visibility("default")))

namespace sim {

// Error codes of ACL and aclnn, as torch_npu prints them.
enum Code : int {
  kSuccess = 0,
  kInvalidParam = 100000,
  kOpNotFound = 100024,
  kRuntimeParam = 107000,
  kNoSuchDevice = 107001,
  kNoContext = 107002,
  kAclnnNull = 161001,
  kAclnnParam = 161002,
  kOutOfMemory = 207001,
  kNotSimulated = 500000,  // internal error: torch_npu turns 207000 into a mere warning
};

// An integer from the environment.
long setting(const char* name, long otherwise);

// Record an error for aclGetRecentErrMsg, print it, and return `code`. NPUSIM_ABORT=1 aborts here.
int fail(int code, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Count a call; non-zero is the code of an injected fault, which the caller returns.
int enter(const char* call);
#define ENTER(call) \
  if (int injected = ::sim::enter(call)) return injected

// ---- devices
constexpr int kMaxDevices = 16;
int device_count();
int current_device();  // of this thread; -1 before aclrtSetDevice

// ---- memory
// Where a pointer lies. Host memory registered with the device counts as device memory.
bool on_device(const void* pointer);
// Whether [pointer, pointer + bytes) lies inside one live allocation.
bool inside_allocation(const void* pointer, size_t bytes);
// The address under which the simulator itself may read and write what `pointer` names.
char* view(const void* pointer);

// ---- streams
using Task = std::function<int()>;
// Run `task` on a stream, in order. `waits` marks tasks that wait for other streams or ranks:
// they never run in the thread that submits them.
int submit(void* stream, Task task, bool waits = false);
// Wait for all work of all streams of this process; the first error of them.
int finish_all();
bool lazy();

}  // namespace sim
