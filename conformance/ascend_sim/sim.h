// A small stand-in for the CANN runtime, so that the real torch_npu runs on a machine without NPUs.
//
//   runtime.cpp    devices, settings, planned faults, and what is not simulated, by name
//   memory.cpp     device memory, pinned memory, copies
//   streams.cpp    streams, events, lazy mode
//   hccl.cpp       collectives between processes
//   values.h, .cpp what torch_npu hands to an operator
//   operators.cpp  a table of operators
//
// Only the names of the C interface and the layout of its arguments are CANN's, and torch's CPU
// kernels do the arithmetic. What is left is what torch lacks: memory that the host cannot read,
// work that waits until somebody waits for it, ranks that read each other's memory, and the names
// that torch_npu looks up, two hundred of them, none of which may make up an answer. Everywhere:
//   * what is not simulated fails with its own name;
//   * an entry point is an ENTRY, which counts the call and injects planned faults, and whatever
//     cannot be served throws, which ENTRY turns into a code of CANN;
//   * what is global is never destroyed: threads of torch may run while the process exits;
//   * no lock is held while a task runs, so that a collective that waits for another rank stalls
//     its own stream and nothing else.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

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

struct Failure {
  int code = kSuccess;
  std::string text;
};
[[noreturn]] void fail(int code, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Runs `body` under the name of a call, and returns what it throws: a Failure, or torch's words.
// It is printed, and its text begins with the name of the call. NPUSIM_ABORT=1 aborts here.
Failure attempt(const char* call, const std::function<void()>& body);
// The same for a C function: returns the code, and aclGetRecentErrMsg has the text.
int guarded(const char* call, const std::function<void()>& body);
const char* current_call();  // of this thread

// Counts a call, and fails if a fault is planned for it.
void enter(const char* call);

// A C function that torch_npu looks up.
#define API extern "C" __attribute__((visibility("default")))
#define ENTRY(name, params, ...)           \
  API int name params {                    \
    return ::sim::guarded(#name, [&] {     \
      ::sim::enter(#name);                 \
      __VA_ARGS__                          \
    });                                    \
  }
// The same function under another name. Further arguments that CANN gives it change nothing here.
#define ALIAS(name, of) API decltype(of) name __attribute__((alias(#of)));

// An integer from the environment.
long setting(const char* name, long otherwise);

// ---- devices
constexpr int kMaxDevices = 16;
extern const int device_count;
int current_device();  // of this thread; -1 before aclrtSetDevice

// ---- memory
// Where the simulator may read and write [pointer, pointer + bytes); null unless that lies in one
// allocation of device memory, or of host memory registered with the device.
char* view(const void* pointer, size_t bytes);
// Where another process finds what this one has a view of: a file of this process, and an offset.
std::pair<int, off_t> place_of(const char* viewed);

// ---- streams
using Task = std::function<void()>;
// Runs `task` on a stream, in order. `waits` marks tasks that wait for other streams or ranks:
// nobody who submits one waits for it.
void submit(void* stream, Task task, bool waits = false);
// Waits for all work of all streams of this process; fails with their first error.
void finish_all();
extern const bool lazy;

}  // namespace sim
