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
#include <list>
#include <map>
#include <memory>
#include <mutex>

#include "sim.h"

namespace sim {
namespace {

constexpr int kPoison = 0xFF;     // fresh device memory
constexpr int kUndefined = 0xA5;  // host target of a copy that has not run yet
constexpr size_t kAlign = 512;
constexpr size_t kPage = 4096;

constexpr size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

using Ranges = std::map<char*, size_t>;  // start -> bytes
using Source = std::pair<const char*, size_t>;

struct Memory {
  std::mutex lock;
  int file = -1;
  char* shown = nullptr;  // the mapping that torch sees: no access
  char* own = nullptr;    // the simulator's mapping: read and write
  size_t per_device = 0;
  size_t total = 0;
  size_t in_use[kMaxDevices] = {}, peak[kMaxDevices] = {};
  Ranges blocks;      // allocated in `shown`, of all devices
  Ranges pinned;      // aclrtMallocHost
  Ranges registered;  // host memory that the device can address (aclrtHostRegister)
  std::list<Source> unread;  // what copies that have not run yet are going to read

  // No lock: the mappings never move once they exist.
  bool on_device(const void* pointer) const {
    const char* p = static_cast<const char*>(pointer);
    return shown && p >= shown && p < shown + total;
  }
};

Memory& memory() {
  static Memory* m = new Memory;
  return *m;
}

// The caller holds the lock, here and below.
bool within(const Ranges& ranges, const void* pointer, size_t bytes) {
  char* p = static_cast<char*>(const_cast<void*>(pointer));
  auto after = ranges.upper_bound(p);
  if (after == ranges.begin()) return false;
  const auto [start, length] = *std::prev(after);
  return p < start + length && p + bytes <= start + length;
}

void map_devices(Memory& m) {
  if (m.shown) return;
  m.per_device = static_cast<size_t>(setting("NPUSIM_MEM_MB", 2048)) << 20;
  m.total = m.per_device * std::max(device_count(), 1);
  m.file = memfd_create("npusim", MFD_CLOEXEC);
  if (m.file < 0 || ftruncate(m.file, static_cast<off_t>(m.total)))
    fail(kOutOfMemory, "cannot create device memory: %m");
  const int flags = MAP_SHARED | MAP_NORESERVE;
  void* own = mmap(nullptr, m.total, PROT_READ | PROT_WRITE, flags, m.file, 0);
  void* shown = mmap(nullptr, m.total, PROT_NONE, flags, m.file, 0);
  if (own == MAP_FAILED || shown == MAP_FAILED) fail(kOutOfMemory, "cannot map device memory: %m");
  m.own = static_cast<char*>(own);
  m.shown = static_cast<char*>(shown);
}

size_t device_of_this_thread() {
  if (current_device() < 0) fail(kNoContext, "no device was set on this thread");
  return current_device();
}

char* allocate(size_t bytes) {
  Memory& m = memory();
  std::lock_guard guard(m.lock);
  map_devices(m);
  const size_t device = device_of_this_thread();
  const size_t size = round_up(bytes, kAlign) + kAlign;
  char* const start = m.shown + device * m.per_device;
  char* at = start;  // first fit
  for (auto block = m.blocks.lower_bound(start); block != m.blocks.end(); ++block) {
    if (block->first >= at + size) break;
    at = block->first + block->second;
  }
  if (at + size > start + m.per_device)
    fail(kOutOfMemory, "device %zu is out of memory: %zu bytes asked, %zu of %zu in use", device,
         bytes, m.in_use[device], m.per_device);
  m.blocks[at] = size;
  m.in_use[device] += size;
  m.peak[device] = std::max(m.peak[device], m.in_use[device]);
  std::memset(m.own + (at - m.shown), kPoison, size);
  return at;
}

// Copy kinds of ACL: 1 to a device, 2 from a device, 3 both; this one takes whatever it finds.
constexpr int kAnyKind = 4;

// The simulator's own address of one side of a copy.
char* side(const char* name, const void* pointer, size_t bytes, int kind, int device_bit) {
  Memory& m = memory();
  bool device, registered;
  {
    std::lock_guard guard(m.lock);
    device = m.on_device(pointer);
    registered = within(m.registered, pointer, 1);  // may stand for either
  }
  if (kind != kAnyKind && device != bool(kind & device_bit) && !registered)
    fail(kRuntimeParam, "copy of kind %d, but its %s is %s memory", kind, name,
         device ? "device" : "host");
  if (!device) return static_cast<char*>(const_cast<void*>(pointer));
  char* at = view(pointer, bytes);
  if (!at) fail(kRuntimeParam, "the %s of %zu bytes reaches beyond an allocation", name, bytes);
  return at;
}

void copy(void* target, size_t room, const void* source, size_t bytes, int kind) {
  if (bytes == 0) return;
  if (!target || !source)
    fail(kInvalidParam, "copy of %zu bytes %s a null pointer", bytes, target ? "from" : "to");
  if (bytes > room) fail(kRuntimeParam, "copy of %zu bytes into %zu", bytes, room);
  char* const to = side("target", target, bytes, kind, 1);
  std::memmove(to, side("source", source, bytes, kind, 2), bytes);
}

// Notes what a submitted copy is going to read; the note goes with the last holder.
std::shared_ptr<void> reading(const void* source, size_t bytes) {
  Memory& m = memory();
  std::lock_guard guard(m.lock);
  m.unread.emplace_front(static_cast<const char*>(source), bytes);
  return {nullptr, [&m, entry = m.unread.begin()](void*) {
            std::lock_guard guard(m.lock);
            m.unread.erase(entry);
          }};
}

// Lazy mode: whoever reads the target of a copy on the host before it has run finds garbage. Not
// where an earlier copy has yet to read what lies there, which the order of streams allows.
void undefine(void* target, size_t bytes) {
  if (memory().on_device(target) || view(target, bytes)) return;
  std::lock_guard guard(memory().lock);
  const char* const from = static_cast<char*>(target);
  for (const auto& [start, length] : memory().unread)
    if (start < from + bytes && from < start + length) return;
  std::memset(target, kUndefined, bytes);
}

}  // namespace

char* view(const void* pointer, size_t bytes) {
  Memory& m = memory();
  std::lock_guard guard(m.lock);
  char* p = static_cast<char*>(const_cast<void*>(pointer));
  if (within(m.blocks, p, bytes)) return m.own + (p - m.shown);
  return within(m.registered, p, bytes) ? p : nullptr;
}

}  // namespace sim

using namespace sim;

ENTRY(aclrtMalloc, (void** out, size_t bytes, int), *out = allocate(bytes);)
ENTRY(aclrtMallocAlign32, (void** out, size_t bytes, int), *out = allocate(bytes);)
ENTRY(aclrtFree, (void* pointer), {
  finish_all();  // work in flight may still use the block
  Memory& m = memory();
  std::lock_guard guard(m.lock);
  const auto block = m.blocks.find(static_cast<char*>(pointer));
  if (block == m.blocks.end()) fail(kRuntimeParam, "not an allocation of device memory");
  const size_t offset = block->first - m.shown;
  const size_t first = round_up(offset, kPage), last = (offset + block->second) / kPage * kPage;
  if (last > first)
    fallocate(m.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(first),
              static_cast<off_t>(last - first));
  m.in_use[offset / m.per_device] -= block->second;
  m.blocks.erase(block);
})
ENTRY(aclrtGetMemInfo, (int, size_t* free, size_t* total), {
  Memory& m = memory();
  std::lock_guard guard(m.lock);
  map_devices(m);
  *total = m.per_device;
  *free = m.per_device - m.in_use[device_of_this_thread()];
})
ENTRY(aclrtMallocHost, (void** out, size_t bytes), {
  const size_t size = round_up(std::max<size_t>(bytes, 1), kPage);
  *out = std::aligned_alloc(kPage, size);
  if (!*out) fail(kOutOfMemory, "no host memory for %zu pinned bytes", bytes);
  std::lock_guard guard(memory().lock);
  memory().pinned[static_cast<char*>(*out)] = size;
})
ENTRY(aclrtFreeHost, (void* pointer), {
  std::lock_guard guard(memory().lock);
  if (!memory().pinned.erase(static_cast<char*>(pointer))) fail(kRuntimeParam, "not pinned memory");
  std::free(pointer);
})
ENTRY(aclrtHostRegister, (void* pointer, uint64_t bytes, int, void** device_pointer), {
  std::lock_guard guard(memory().lock);
  memory().registered[static_cast<char*>(pointer)] = bytes;
  if (device_pointer) *device_pointer = pointer;
})
ENTRY(aclrtHostUnregister, (void* pointer), {
  std::lock_guard guard(memory().lock);
  memory().registered.erase(static_cast<char*>(pointer));
})

ENTRY(aclrtMemcpy, (void* target, size_t room, const void* source, size_t bytes, int kind),
      copy(target, room, source, bytes, kind);)
ENTRY(aclrtMemcpyAsync, (void* target, size_t room, const void* source, size_t bytes, int kind,
                         void* stream), {
  if (bytes && (!target || !source)) copy(target, room, source, bytes, kind);  // refused now
  if (lazy() && bytes <= room) undefine(target, bytes);
  submit(stream, [=, held = reading(source, bytes)] { copy(target, room, source, bytes, kind); });
})

// What tests read through ctypes.
API size_t npusim_bytes_in_use(int device) {
  std::lock_guard guard(memory().lock);
  return memory().in_use[device];
}
API size_t npusim_peak_bytes(int device) {
  std::lock_guard guard(memory().lock);
  return memory().peak[device];
}
API void npusim_reset_peak(int device) {
  std::lock_guard guard(memory().lock);
  memory().peak[device] = memory().in_use[device];
}
API size_t npusim_pinned_bytes() {
  std::lock_guard guard(memory().lock);
  size_t sum = 0;
  for (const auto& [start, bytes] : memory().pinned) sum += bytes;
  return sum;
}
