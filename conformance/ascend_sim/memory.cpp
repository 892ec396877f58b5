// Device memory, pinned host memory, copies.
//
// All device memory of a process is one memfd that is mapped twice. torch sees the first mapping,
// which has no access rights: a host that dereferences a device pointer faults, as on hardware. The
// simulator reads and writes through the second. Fresh memory is filled with 0xFF (floats read as
// NaN, integers as -1), freed memory goes back to the system, and the size is a hard limit.
#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "sim.h"

namespace sim {
namespace {

constexpr int kPoison = 0xFF;      // fresh device memory
constexpr int kUndefined = 0xA5;   // host target of a copy that has not run yet
constexpr size_t kAlign = 512;
constexpr size_t kPage = 4096;

using Ranges = std::map<const char*, size_t>;  // start -> bytes

struct Device {
  std::map<size_t, size_t> blocks;  // offset in the device -> bytes
  size_t in_use = 0;
  size_t peak = 0;
};

struct Memory {
  std::mutex lock;
  int file = -1;
  char* shown = nullptr;  // the mapping that torch sees: no access
  char* own = nullptr;    // the simulator's mapping: read and write
  size_t per_device = 0;
  size_t total = 0;
  Device devices[kMaxDevices];
  Ranges pinned;      // aclrtMallocHost
  Ranges registered;  // host memory that the device can address (aclrtHostRegister)
  size_t pinned_bytes = 0;
};

// Never destroyed: threads of torch may still run while the process exits.
Memory& memory() {
  static Memory* m = new Memory;
  return *m;
}

// The range that holds `pointer`, or end().
Ranges::iterator find(Ranges& ranges, const void* pointer) {
  const char* p = static_cast<const char*>(pointer);
  auto it = ranges.upper_bound(p);
  if (it == ranges.begin()) return ranges.end();
  --it;
  return p < it->first + it->second ? it : ranges.end();
}

// The caller holds the lock, here and below.
int map_devices(Memory& m) {
  if (m.shown) return kSuccess;
  m.per_device = static_cast<size_t>(setting("NPUSIM_MEM_MB", 2048)) << 20;
  m.total = m.per_device * std::max(device_count(), 1);
  m.file = memfd_create("npusim", MFD_CLOEXEC);
  if (m.file < 0 || ftruncate(m.file, static_cast<off_t>(m.total)))
    return fail(kOutOfMemory, "cannot create device memory: %m");
  const int flags = MAP_SHARED | MAP_NORESERVE;
  void* own = mmap(nullptr, m.total, PROT_READ | PROT_WRITE, flags, m.file, 0);
  void* shown = mmap(nullptr, m.total, PROT_NONE, flags, m.file, 0);
  if (own == MAP_FAILED || shown == MAP_FAILED)
    return fail(kOutOfMemory, "cannot map device memory: %m");
  m.own = static_cast<char*>(own);
  m.shown = static_cast<char*>(shown);
  return kSuccess;
}

bool in_device_range(const Memory& m, const void* pointer) {
  const char* p = static_cast<const char*>(pointer);
  return m.shown && p >= m.shown && p < m.shown + m.total;
}

bool inside(Memory& m, const void* pointer, size_t bytes) {
  const char* p = static_cast<const char*>(pointer);
  if (!in_device_range(m, p)) {
    auto it = find(m.registered, p);
    return it != m.registered.end() && p + bytes <= it->first + it->second;
  }
  const size_t at = static_cast<size_t>(p - m.shown) % m.per_device;
  const auto& blocks = m.devices[(p - m.shown) / m.per_device].blocks;
  auto it = blocks.upper_bound(at);
  if (it == blocks.begin()) return false;
  --it;
  return at + bytes <= it->first + it->second;
}

int allocate(void** out, size_t bytes) {
  Memory& m = memory();
  std::lock_guard<std::mutex> guard(m.lock);
  *out = nullptr;
  if (int code = map_devices(m)) return code;
  const int index = current_device();
  if (index < 0) return fail(kNoContext, "no device was set on this thread");
  Device& device = m.devices[index];
  const size_t size = (bytes + kAlign - 1) / kAlign * kAlign + kAlign;
  size_t at = 0;  // first fit
  for (const auto& [start, length] : device.blocks) {
    if (start - at >= size) break;
    at = start + length;
  }
  if (at + size > m.per_device)
    return fail(kOutOfMemory, "device %d is out of memory: %zu bytes asked, %zu of %zu in use",
                index, bytes, device.in_use, m.per_device);
  device.blocks[at] = size;
  device.in_use += size;
  device.peak = std::max(device.peak, device.in_use);
  const size_t offset = index * m.per_device + at;
  std::memset(m.own + offset, kPoison, size);
  *out = m.shown + offset;
  return kSuccess;
}

int release(void* pointer) {
  Memory& m = memory();
  std::lock_guard<std::mutex> guard(m.lock);
  if (!in_device_range(m, pointer)) return fail(kRuntimeParam, "aclrtFree: not device memory");
  const size_t offset = static_cast<size_t>(static_cast<char*>(pointer) - m.shown);
  Device& device = m.devices[offset / m.per_device];
  auto it = device.blocks.find(offset % m.per_device);
  if (it == device.blocks.end()) return fail(kRuntimeParam, "aclrtFree: not an allocation");
  const size_t first = (offset + kPage - 1) / kPage * kPage;
  const size_t last = (offset + it->second) / kPage * kPage;
  if (last > first)
    fallocate(m.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(first),
              static_cast<off_t>(last - first));
  device.in_use -= it->second;
  device.blocks.erase(it);
  return kSuccess;
}

// Copy kinds of ACL.
enum Kind { kHostToHost, kHostToDevice, kDeviceToHost, kDeviceToDevice, kDefault };

int copy(void* target, size_t room, const void* source, size_t bytes, int kind) {
  if (bytes == 0) return kSuccess;
  if (!target || !source)
    return fail(kInvalidParam, "copy of %zu bytes %s a null pointer", bytes,
                target ? "from" : "to");
  if (bytes > room) return fail(kRuntimeParam, "copy of %zu bytes into %zu", bytes, room);
  Memory& m = memory();
  {
    std::lock_guard<std::mutex> guard(m.lock);
    const bool to_device = in_device_range(m, target), from_device = in_device_range(m, source);
    // Registered host memory may stand on either side.
    const bool target_either = !to_device && find(m.registered, target) != m.registered.end();
    const bool source_either = !from_device && find(m.registered, source) != m.registered.end();
    const bool wants_to = kind == kHostToDevice || kind == kDeviceToDevice;
    const bool wants_from = kind == kDeviceToHost || kind == kDeviceToDevice;
    if (kind < kDefault && ((to_device != wants_to && !target_either) ||
                            (from_device != wants_from && !source_either)))
      return fail(kRuntimeParam, "copy of kind %d, but its target is %s memory and its source %s",
                  kind, to_device ? "device" : "host", from_device ? "device" : "host");
    if (to_device && !inside(m, target, bytes))
      return fail(kRuntimeParam, "copy writes %zu bytes outside a device allocation", bytes);
    if (from_device && !inside(m, source, bytes))
      return fail(kRuntimeParam, "copy reads %zu bytes outside a device allocation", bytes);
  }
  std::memmove(view(target), view(source), bytes);
  return kSuccess;
}

}  // namespace

bool on_device(const void* pointer) {
  Memory& m = memory();
  std::lock_guard<std::mutex> guard(m.lock);
  return in_device_range(m, pointer) || find(m.registered, pointer) != m.registered.end();
}

bool inside_allocation(const void* pointer, size_t bytes) {
  Memory& m = memory();
  std::lock_guard<std::mutex> guard(m.lock);
  return inside(m, pointer, bytes);
}

char* view(const void* pointer) {
  Memory& m = memory();  // the mappings never move once they exist
  char* p = static_cast<char*>(const_cast<void*>(pointer));
  return in_device_range(m, p) ? m.own + (p - m.shown) : p;
}

}  // namespace sim

using namespace sim;

API int aclrtMalloc(void** out, size_t bytes, int) {
  ENTER("aclrtMalloc");
  return allocate(out, bytes);
}
API int aclrtMallocAlign32(void** out, size_t bytes, int) {
  ENTER("aclrtMallocAlign32");
  return allocate(out, bytes);
}
API int aclrtFree(void* pointer) {
  ENTER("aclrtFree");
  if (!pointer) return kSuccess;
  if (int code = finish_all()) return code;  // work in flight may still use the block
  return release(pointer);
}
API int aclrtGetMemInfo(int, size_t* free, size_t* total) {
  ENTER("aclrtGetMemInfo");
  Memory& m = memory();
  std::lock_guard<std::mutex> guard(m.lock);
  if (int code = map_devices(m)) return code;
  if (current_device() < 0) return fail(kNoContext, "no device was set on this thread");
  *total = m.per_device;
  *free = m.per_device - m.devices[current_device()].in_use;
  return kSuccess;
}

API int aclrtMallocHost(void** out, size_t bytes) {
  ENTER("aclrtMallocHost");
  const size_t size = (std::max<size_t>(bytes, 1) + kPage - 1) / kPage * kPage;
  *out = std::aligned_alloc(kPage, size);
  if (!*out) return fail(kOutOfMemory, "no host memory for %zu pinned bytes", bytes);
  Memory& m = memory();
  std::lock_guard<std::mutex> guard(m.lock);
  m.pinned[static_cast<char*>(*out)] = size;
  m.pinned_bytes += size;
  return kSuccess;
}
API int aclrtFreeHost(void* pointer) {
  ENTER("aclrtFreeHost");
  Memory& m = memory();
  std::lock_guard<std::mutex> guard(m.lock);
  auto it = m.pinned.find(static_cast<char*>(pointer));
  if (it == m.pinned.end()) return fail(kRuntimeParam, "aclrtFreeHost: not pinned memory");
  m.pinned_bytes -= it->second;
  m.pinned.erase(it);
  std::free(pointer);
  return kSuccess;
}
API int aclrtHostRegister(void* pointer, uint64_t bytes, int, void** device_pointer) {
  ENTER("aclrtHostRegister");
  Memory& m = memory();
  std::lock_guard<std::mutex> guard(m.lock);
  m.registered[static_cast<char*>(pointer)] = bytes;
  if (device_pointer) *device_pointer = pointer;
  return kSuccess;
}
API int aclrtHostUnregister(void* pointer) {
  ENTER("aclrtHostUnregister");
  Memory& m = memory();
  std::lock_guard<std::mutex> guard(m.lock);
  m.registered.erase(static_cast<char*>(pointer));
  return kSuccess;
}

struct PointerAttributes {
  uint32_t device;
  int location;  // 0 pinned host, 1 device, 2 unregistered host
  uint32_t page_size;
  uint32_t reserved[4];
};
API int aclrtPointerGetAttributes(const void* pointer, PointerAttributes* out) {
  ENTER("aclrtPointerGetAttributes");
  Memory& m = memory();
  std::lock_guard<std::mutex> guard(m.lock);
  *out = {};
  if (in_device_range(m, pointer)) {
    out->location = 1;
    out->device = (static_cast<const char*>(pointer) - m.shown) / m.per_device;
  } else {
    out->location = find(m.pinned, pointer) != m.pinned.end() ? 0 : 2;
  }
  return kSuccess;
}

API int aclrtMemcpy(void* target, size_t room, const void* source, size_t bytes, int kind) {
  ENTER("aclrtMemcpy");
  return copy(target, room, source, bytes, kind);
}
API int aclrtMemcpyAsync(void* target, size_t room, const void* source, size_t bytes, int kind,
                         void* stream) {
  ENTER("aclrtMemcpyAsync");
  if (bytes && (!target || !source)) return copy(target, room, source, bytes, kind);
  if (lazy() && bytes <= room && !on_device(target)) std::memset(target, kUndefined, bytes);
  return submit(stream, [=] { return copy(target, room, source, bytes, kind); });
}
API int aclrtMemset(void* target, size_t room, int value, size_t bytes) {
  ENTER("aclrtMemset");
  if (bytes > room || !inside_allocation(target, bytes))
    return fail(kRuntimeParam, "aclrtMemset of %zu bytes outside an allocation", bytes);
  std::memset(view(target), value, bytes);
  return kSuccess;
}

// What tests read through ctypes.
API size_t npusim_bytes_in_use(int device) {
  std::lock_guard<std::mutex> guard(memory().lock);
  return memory().devices[device].in_use;
}
API size_t npusim_peak_bytes(int device) {
  std::lock_guard<std::mutex> guard(memory().lock);
  return memory().devices[device].peak;
}
API void npusim_reset_peak(int device) {
  std::lock_guard<std::mutex> guard(memory().lock);
  memory().devices[device].peak = memory().devices[device].in_use;
}
API size_t npusim_pinned_bytes() {
  std::lock_guard<std::mutex> guard(memory().lock);
  return memory().pinned_bytes;
}
