// Devices, settings, errors, counted calls and planned faults; and, at the end, everything that
// torch_npu links against and that is not simulated: those calls fail with their own name.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "sim.h"

namespace sim {
namespace {

thread_local int this_thread_device = -1;
std::atomic<bool> used[kMaxDevices];
char contexts[kMaxDevices];  // a context is the address of its device's byte

struct Fault {
  std::string call;  // a name; a `*` at the end stands for any rest
  long countdown;
  int code;
};

struct Book {
  std::mutex lock;
  std::map<std::string, long> calls;
  std::vector<Fault> faults;
  std::string last_error = "no error recorded";
};

bool names(const std::string& pattern, const char* call) {
  if (pattern.empty() || pattern.back() != '*') return pattern == call;
  return std::strncmp(pattern.c_str(), call, pattern.size() - 1) == 0;
}

// NPUSIM_FAULT is a list of call:n:code, for processes that a test cannot reach into.
void read_faults(Book& book) {
  const char* text = std::getenv("NPUSIM_FAULT");
  std::string rest = text ? text : "";
  while (!rest.empty()) {
    const std::string item = rest.substr(0, rest.find(','));
    rest.erase(0, item.size() + 1);
    char name[96];
    long nth;
    int code;
    if (std::sscanf(item.c_str(), "%95[^:]:%ld:%d", name, &nth, &code) == 3) {
      book.faults.push_back({name, nth, code});
    } else {
      std::fprintf(stderr, "[npusim] NPUSIM_FAULT wants call:n:code, not '%s'\n", item.c_str());
      std::abort();
    }
  }
}

Book& book() {
  static Book* b = [] {
    Book* fresh = new Book;
    read_faults(*fresh);
    return fresh;
  }();
  return *b;
}

}  // namespace

long setting(const char* name, long otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::atol(text) : otherwise;
}

int fail(int code, const char* format, ...) {
  char text[512];
  va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof text, format, args);
  va_end(args);
  std::fprintf(stderr, "[npusim] error %d: %s\n", code, text);
  if (setting("NPUSIM_ABORT", 0)) std::abort();
  std::lock_guard<std::mutex> guard(book().lock);
  book().last_error = std::string("npusim: ") + text;
  return code;
}

int enter(const char* call) {
  static const bool trace = setting("NPUSIM_TRACE", 0) != 0;
  if (trace) std::fprintf(stderr, "[npusim] %s\n", call);
  int code = kSuccess;
  {
    Book& b = book();
    std::lock_guard<std::mutex> guard(b.lock);
    ++b.calls[call];
    for (Fault& fault : b.faults)
      if (names(fault.call, call) && --fault.countdown == 0) code = fault.code;
  }
  return code ? fail(code, "%s: injected fault", call) : kSuccess;
}

int device_count() {
  return static_cast<int>(std::min<long>(setting("NPUSIM_DEVICES", 1), kMaxDevices));
}

int current_device() { return this_thread_device; }

}  // namespace sim

using namespace sim;

// ---- what tests use through ctypes
API const char* npusim_version() { return "simulated CANN runtime, not Ascend hardware"; }
API long npusim_calls(const char* call) {
  std::lock_guard<std::mutex> guard(book().lock);
  auto it = book().calls.find(call);
  return it == book().calls.end() ? 0 : it->second;
}
API void npusim_inject(const char* call, long nth, int code) {
  std::lock_guard<std::mutex> guard(book().lock);
  book().faults.push_back({call, nth, code});
}
API void npusim_clear_faults() {
  std::lock_guard<std::mutex> guard(book().lock);
  book().faults.clear();
}

// ---- devices
API int aclInit(const char*) {
  ENTER("aclInit");
  return kSuccess;
}
API int aclFinalize() { return kSuccess; }
API const char* aclGetRecentErrMsg() {
  static thread_local std::string copy;
  std::lock_guard<std::mutex> guard(book().lock);
  copy = book().last_error;
  return copy.c_str();
}
API int aclrtGetDeviceCount(uint32_t* count) {
  ENTER("aclrtGetDeviceCount");
  *count = device_count();
  return kSuccess;
}
API int aclrtSetDevice(int device) {
  ENTER("aclrtSetDevice");
  if (device < 0 || device >= device_count()) return fail(kNoSuchDevice, "no device %d", device);
  this_thread_device = device;
  used[device] = true;
  return kSuccess;
}
API int aclrtGetDevice(int* device) {
  // torch_npu relies on this answer: it is how it learns that it has to set a device first.
  if (this_thread_device < 0) return kNoContext;
  *device = this_thread_device;
  return kSuccess;
}
API int aclrtResetDevice(int) { return kSuccess; }
API int aclrtGetCurrentContext(void** context) {
  if (this_thread_device < 0) return kNoContext;
  *context = &contexts[this_thread_device];
  return kSuccess;
}
API int aclrtSetCurrentContext(void* context) {
  const long index = static_cast<char*>(context) - contexts;
  if (index < 0 || index >= device_count()) return fail(kRuntimeParam, "not a context");
  this_thread_device = static_cast<int>(index);
  return kSuccess;
}
API int aclrtGetPrimaryCtxState(int32_t device, uint32_t* flags, int32_t* active) {
  if (flags) *flags = 0;
  *active = device >= 0 && device < kMaxDevices && used[device];
  return kSuccess;
}
// This name decides which fused paths torch_npu takes (foreach and fused AdamW are on).
API const char* aclrtGetSocName() { return "Ascend910B4"; }
API int aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) {
  *can = 1;
  return kSuccess;
}
API int aclrtDeviceGetBareTgid(int32_t* pid) {
  *pid = getpid();
  return kSuccess;
}
// Core counts; no result depends on them.
API int aclGetDeviceCapability(uint32_t, int, int64_t* value) {
  *value = 20;
  return kSuccess;
}
API int aclrtGetSysParamOpt(int, int64_t* value) {
  *value = 0;
  return kSuccess;
}
API int aclrtGetLastError(int) { return kSuccess; }
API int aclrtPeekAtLastError(int) { return kSuccess; }

API void aclAppLog(int level, const char*, const char*, uint32_t, const char* format, ...) {
  static const long from = setting("NPUSIM_LOG", 9);  // 0 debug .. 3 error
  if (level < from) return;
  va_list args;
  va_start(args, format);
  std::vfprintf(stderr, format, args);
  va_end(args);
  std::fputc('\n', stderr);
}

// ---- the older operator path: descriptors are inert, execution names the operator and fails
namespace {
char inert;
}
API void* aclCreateTensorDesc(int, int, const int64_t*, int) { return &inert; }
API void aclDestroyTensorDesc(void*) {}
API void* aclCreateDataBuffer(void*, size_t) { return &inert; }
API void* aclopCreateAttr() { return &inert; }
API void aclopDestroyAttr(void*) {}
API int aclopCompileAndExecute(const char* name) {
  return fail(kOpNotFound, "operator %s is not simulated", name);
}
API int aclopCompileAndExecuteV2(const char* name) { return aclopCompileAndExecute(name); }

// ---- settings, marks of the profiler and fields of inert descriptors: no effect on data
#define ACCEPTED(X) \
  X(aclmdlInitDump) X(aclmdlSetDump) X(aclmdlFinalizeDump) X(aclSetCompileopt) \
  X(aclrtCtxSetSysParamOpt) X(aclrtSetDeviceSatMode) X(aclrtSetOpExecuteTimeOut) \
  X(aclrtSetOpWaitTimeout) X(aclrtSetStreamFailureMode) X(aclrtDeviceEnablePeerAccess) \
  X(MsprofGetHashId) X(MsprofRegisterCallback) X(MsprofReportAdditionalInfo) X(MsprofReportApi) \
  X(MsprofReportCompactInfo) X(MsprofSysCycleTime) X(aclSetTensorDescName) \
  X(aclSetTensorFormat) X(aclSetTensorPlaceMent) X(aclSetTensorShape) X(aclopSetAttrBool) \
  X(aclopSetAttrDataType) X(aclopSetAttrFloat) X(aclopSetAttrInt) X(aclopSetAttrListBool) \
  X(aclopSetAttrListFloat) X(aclopSetAttrListInt) X(aclopSetAttrListListInt) \
  X(aclopSetAttrString) X(aclDestroyDataBuffer)

// ---- linked against, not simulated
#define NOT_SIMULATED(X) \
  X(aclGetTensorDescDimV2) X(aclGetTensorDescFormat) X(aclGetTensorDescNumDims) \
  X(aclGetTensorDescType) X(aclrtBinaryGetFunction) X(aclrtBinaryLoadFromData) \
  X(aclrtEventElapsedTime) X(aclrtFreePhysical) X(aclrtGetFunctionAddr) X(aclrtMallocPhysical) \
  X(aclrtMapMem) X(aclrtMemExportToShareableHandle) X(aclrtMemImportFromShareableHandle) \
  X(aclrtMemSetPidToShareableHandle) X(aclrtProcessReport) X(aclrtReleaseMemAddress) \
  X(aclrtReserveMemAddress) X(aclrtUnmapMem) X(rtDevBinaryRegister) X(rtFunctionRegister) \
  X(rtGetC2cCtrlAddr) X(rtKernelLaunch)

#define ACCEPT(name) \
  API int name() { return kSuccess; }
#define REFUSE(name) \
  API int name() { return fail(kNotSimulated, #name " is not simulated"); }
ACCEPTED(ACCEPT)
NOT_SIMULATED(REFUSE)
