// Devices, settings, errors, counted calls and planned faults; and, at the end, everything that
// torch_npu links against and that is not simulated: those calls fail with their own name.
#include <c10/util/Exception.h>
#include <fnmatch.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <sstream>

#include "sim.h"

namespace sim {
namespace {

thread_local int this_thread_device = -1;
thread_local const char* this_thread_call = "nothing";
thread_local std::string this_thread_error = "no error recorded";
std::atomic<bool> used[kMaxDevices];
char contexts[kMaxDevices];  // a context is the address of its device's byte

struct Fault {
  std::string call;  // a name, or a pattern as for files
  long countdown;
  int code;
};

// NPUSIM_FAULT is a list of call:n:code, for processes that a test cannot reach into.
std::vector<Fault> planned_outside() {
  const char* const text = std::getenv("NPUSIM_FAULT");
  std::istringstream list(text ? text : "");
  std::vector<Fault> faults;
  char mark;
  for (Fault fault; std::getline(list, fault.call, ':'); list >> mark) {
    if (!(list >> fault.countdown >> mark >> fault.code)) {
      std::fprintf(stderr, "[npusim] NPUSIM_FAULT wants call:n:code, not '%s'\n", text);
      std::abort();
    }
    faults.push_back(fault);
  }
  return faults;
}

struct Book {
  std::mutex lock;
  std::map<std::string, long> calls;
  std::vector<Fault> faults = planned_outside();
};
Book& book = *new Book;

}  // namespace

long setting(const char* name, long otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::atol(text) : otherwise;
}

void fail(int code, const char* format, ...) {
  char text[512];
  va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof text, format, args);
  va_end(args);
  throw Failure{code, text};
}

Failure attempt(const char* call, const std::function<void()>& body) {
  const char* const outer = std::exchange(this_thread_call, call);
  Failure failure;
  try {
    body();
  } catch (const Failure& thrown) {
    failure = thrown;
  } catch (const c10::Error& error) {
    failure = {kAclnnParam, error.what_without_backtrace()};
  } catch (const std::exception& error) {  // none may leave a C function
    failure = {kNotSimulated, error.what()};
  }
  this_thread_call = outer;
  if (!failure.code) return failure;
  failure.text = call + (": " + failure.text);
  std::fprintf(stderr, "[npusim] error %d: %s\n", failure.code, failure.text.c_str());
  if (setting("NPUSIM_ABORT", 0)) std::abort();
  return failure;
}

int guarded(const char* call, const std::function<void()>& body) {
  const Failure failure = attempt(call, body);
  if (failure.code) this_thread_error = "npusim: " + failure.text;
  return failure.code;
}

const char* current_call() { return this_thread_call; }

void enter(const char* call) {
  static const bool trace = setting("NPUSIM_TRACE", 0) != 0;
  if (trace) std::fprintf(stderr, "[npusim] %s\n", call);
  int code = kSuccess;
  {
    std::lock_guard guard(book.lock);
    ++book.calls[call];
    for (Fault& fault : book.faults)
      if (!fnmatch(fault.call.c_str(), call, 0) && --fault.countdown == 0) code = fault.code;
  }
  if (code) fail(code, "injected fault of %s", call);
}

const bool lazy = setting("NPUSIM_LAZY", 0) != 0;
const int device_count = std::min(static_cast<int>(setting("NPUSIM_DEVICES", 1)), kMaxDevices);

int current_device() { return this_thread_device; }

}  // namespace sim

using namespace sim;

// ---- what tests use through ctypes
API const char* npusim_version() { return "simulated CANN runtime, not Ascend hardware"; }
API long npusim_calls(const char* call) {
  std::lock_guard guard(book.lock);
  return book.calls[call];
}
API void npusim_inject(const char* call, long nth, int code) {
  std::lock_guard guard(book.lock);
  book.faults.push_back({call, nth, code});
}
API void npusim_clear_faults() {
  std::lock_guard guard(book.lock);
  book.faults.clear();
}

// ---- devices
API const char* aclGetRecentErrMsg() { return this_thread_error.c_str(); }
ENTRY(aclInit, (const char*), {})
ENTRY(aclrtGetDeviceCount, (uint32_t* count), *count = device_count;)
ENTRY(aclrtSetDevice, (int device), {
  if (device < 0 || device >= device_count) fail(kNoSuchDevice, "no device %d", device);
  this_thread_device = device;
  used[device] = true;
})
// torch_npu relies on this refusal: it is how it learns that it has to set a device first.
API int aclrtGetDevice(int* device) {
  *device = this_thread_device;
  return this_thread_device < 0 ? kNoContext : kSuccess;
}
API int aclrtGetCurrentContext(void** context) {
  if (this_thread_device < 0) return kNoContext;
  *context = contexts + this_thread_device;
  return kSuccess;
}
ENTRY(aclrtGetPrimaryCtxState, (int32_t device, uint32_t* flags, int32_t* active), {
  if (flags) *flags = 0;
  *active = device >= 0 && device < kMaxDevices && used[device];
})
// This name decides which fused paths torch_npu takes (foreach and fused AdamW are on).
API const char* aclrtGetSocName() { return "Ascend910B4"; }
ENTRY(aclrtDeviceCanAccessPeer, (int32_t* can, int32_t, int32_t), *can = 1;)
// Core counts; no result depends on them.
ENTRY(aclGetDeviceCapability, (uint32_t, int, int64_t* value), *value = 20;)
ENTRY(aclrtGetSysParamOpt, (int, int64_t* value), *value = 0;)

// ---- the older operator path: descriptors are inert, execution names the operator and fails
ENTRY(aclopCompileAndExecute, (const char* name),
      fail(kOpNotFound, "operator %s is not simulated", name);)
ALIAS(aclopCompileAndExecuteV2, aclopCompileAndExecute)

#define INERT(X) \
  X(aclCreateTensorDesc) X(aclCreateDataBuffer) X(aclopCreateAttr)

// ---- settings, logs, marks of the profiler and fields of inert descriptors: no effect on data
#define ACCEPTED(X) \
  X(aclmdlInitDump) X(aclmdlSetDump) X(aclmdlFinalizeDump) X(aclSetCompileopt) \
  X(aclrtCtxSetSysParamOpt) X(aclrtSetDeviceSatMode) X(aclrtSetOpExecuteTimeOut) \
  X(aclrtSetOpWaitTimeout) X(aclrtSetStreamFailureMode) X(aclrtDeviceEnablePeerAccess) \
  X(aclrtResetDevice) X(aclrtResetEvent) X(aclrtGetLastError) X(aclrtPeekAtLastError) \
  X(aclFinalize) X(aclAppLog) X(HcclSetConfig) X(HcclGetCommConfigCapability) X(MsprofGetHashId) \
  X(MsprofRegisterCallback) X(MsprofReportAdditionalInfo) X(MsprofReportApi) \
  X(MsprofReportCompactInfo) X(MsprofSysCycleTime) X(aclSetTensorDescName) X(aclSetTensorFormat) \
  X(aclSetTensorPlaceMent) X(aclSetTensorShape) X(aclopSetAttrBool) X(aclopSetAttrDataType) \
  X(aclopSetAttrFloat) X(aclopSetAttrInt) X(aclopSetAttrListBool) X(aclopSetAttrListFloat) \
  X(aclopSetAttrListInt) X(aclopSetAttrListListInt) X(aclopSetAttrString) X(aclDestroyDataBuffer) \
  X(aclDestroyTensorDesc) X(aclopDestroyAttr)

// ---- linked against, not simulated
#define NOT_SIMULATED(X) \
  X(aclGetTensorDescDimV2) X(aclGetTensorDescFormat) X(aclGetTensorDescNumDims) \
  X(aclGetTensorDescType) X(aclrtBinaryGetFunction) X(aclrtBinaryLoadFromData) \
  X(aclrtDeviceGetBareTgid) X(aclrtEventElapsedTime) X(aclrtFreePhysical) X(aclrtGetFunctionAddr) \
  X(aclrtMallocPhysical) X(aclrtMapMem) X(aclrtMemExportToShareableHandle) \
  X(aclrtMemImportFromShareableHandle) X(aclrtMemSetPidToShareableHandle) X(aclrtMemset) \
  X(aclrtProcessReport) X(aclrtReleaseMemAddress) X(aclrtReserveMemAddress) \
  X(aclrtSetCurrentContext) X(aclrtUnmapMem) X(rtDevBinaryRegister) X(rtFunctionRegister) \
  X(rtGetC2cCtrlAddr) X(rtKernelLaunch)

#define MAKE_INERT(name) API void* name() { return contexts; }
#define ACCEPT(name) API int name() { return kSuccess; }
#define REFUSE(name) ENTRY(name, (), fail(kNotSimulated, "not simulated");)
INERT(MAKE_INERT)
ACCEPTED(ACCEPT)
NOT_SIMULATED(REFUSE)
