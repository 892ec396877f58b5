// Device memory, pinned host memory, copies.
//
// All of it is one memfd that is mapped twice. torch sees device memory in the first mapping, which
// has no access rights: a host that dereferences a device pointer faults, as on hardware. The
// simulator reads and writes through the second, where torch sees pinned memory. Fresh memory is
// filled with 0xFF (floats read as NaN, integers as -1), freed memory goes back to the system, and
// the size is a hard limit.
#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>

#include "sim.h"

namespace sim {
namespace {

constexpr int kPoison = 0xFF;     // fresh memory
constexpr int kUndefined = 0xA5;  // host target of a copy that has not run yet
constexpr size_t kPage = 4096;
constexpr int kHost = -1;  // pinned memory is that of device -1, as large as all devices may be

struct Block {
  size_t bytes;
  int device;
  bool addressable;  // by devices: their own memory, and host memory after aclrtHostRegister
};
struct Use {
  size_t now, peak;
};
using Range = std::pair<const char*, size_t>;

struct Memory {
  std::mutex lock;
  int file;
  size_t per_device, total;
  char* shown;  // device memory as torch sees it: no access
  char* own;    // the simulator's mapping: read and write
  std::map<size_t, Block> blocks;  // by their place in the file, as all places below
  Use use[kMaxDevices + 1] = {};
  std::list<std::weak_ptr<const Range>> unread;  // what submitted copies are going to read

  Memory() {
    per_device = static_cast<size_t>(setting("NPUSIM_MEM_MB", 2048)) << 20;
    total = end_of(device_count - 1);
    file = memfd_create("npusim", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, static_cast<off_t>(total)))
      fail(kOutOfMemory, "cannot create device memory: %m");
    const int flags = MAP_SHARED | MAP_NORESERVE;
    void* hidden = mmap(nullptr, total, PROT_NONE, flags, file, 0);
    void* open = mmap(nullptr, total, PROT_READ | PROT_WRITE, flags, file, 0);
    if (hidden == MAP_FAILED || open == MAP_FAILED)
      fail(kOutOfMemory, "cannot map device memory: %m");
    shown = static_cast<char*>(hidden);
    own = static_cast<char*>(open);
  }

  size_t end_of(int device) const { return (kMaxDevices + 1 + device) * per_device; }
  size_t begin_of(int device) const { return device == kHost ? 0 : end_of(device - 1); }

  // No lock: neither mapping moves.
  bool on_device(const void* pointer) const {
    return pointer >= shown + begin_of(0) && pointer < shown + total;
  }
  size_t place(const void* pointer) const {
    return static_cast<const char*>(pointer) - (on_device(pointer) ? shown : own);
  }
};

Memory& memory() {
  static Memory* m = new Memory;
  return *m;
}

int device_of_this_thread() {
  if (current_device() < 0) fail(kNoContext, "no device was set on this thread");
  return current_device();
}

// The place of a new block.
size_t allocate(int device, size_t bytes) {
  Memory& m = memory();
  std::lock_guard guard(m.lock);
  const size_t size = (std::max<size_t>(bytes, 1) + kPage - 1) / kPage * kPage;
  size_t at = m.begin_of(device);  // first fit
  for (auto b = m.blocks.lower_bound(at); b != m.blocks.end() && b->first < at + size; ++b)
    at = b->first + b->second.bytes;
  Use& use = m.use[device + 1];
  if (at + size > m.end_of(device))
    fail(kOutOfMemory, "device %d is out of memory: %zu bytes asked, %zu of %zu in use", device,
         bytes, use.now, m.end_of(device) - m.begin_of(device));
  m.blocks[at] = {size, device, device != kHost};
  use.now += size;
  use.peak = std::max(use.peak, use.now);
  std::memset(m.own + at, kPoison, size);
  return at;
}

// The caller holds the lock.
std::map<size_t, Block>::iterator block_at(void* pointer, const char* kind) {
  const auto block = memory().blocks.find(memory().place(pointer));
  if (block == memory().blocks.end()) fail(kRuntimeParam, "not an allocation of %s memory", kind);
  return block;
}

void release(void* pointer, const char* kind) {
  Memory& m = memory();
  std::lock_guard guard(m.lock);
  const auto block = block_at(pointer, kind);
  const size_t bytes = block->second.bytes;
  m.use[1 + block->second.device].now -= bytes;
  fallocate(m.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(block->first),
            static_cast<off_t>(bytes));
  m.blocks.erase(block);
}

// Copy kinds of ACL: 1 to a device, 2 from a device, 3 both; this one takes whatever it finds.
constexpr int kAnyKind = 4;

// The simulator's own address of one side of a copy.
char* side(const char* name, const void* pointer, size_t bytes, int kind, int device_bit) {
  const bool device = memory().on_device(pointer);
  const bool either = !device && view(pointer, 1);  // registered host memory
  if (kind != kAnyKind && device != bool(kind & device_bit) && !either)
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

// Notes what a submitted copy is going to read, for as long as somebody holds the note.
std::shared_ptr<const Range> reading(const void* source, size_t bytes) {
  auto note = std::make_shared<const Range>(static_cast<const char*>(source), bytes);
  std::lock_guard guard(memory().lock);
  memory().unread.remove_if([](const auto& other) { return other.expired(); });
  memory().unread.push_back(note);
  return note;
}

// Lazy mode: whoever reads the target of a copy on the host before it has run finds garbage. Not
// where an earlier copy has yet to read what lies there, which the order of streams allows.
void undefine(void* target, size_t bytes) {
  if (memory().on_device(target) || view(target, bytes)) return;
  std::lock_guard guard(memory().lock);
  const char* const from = static_cast<char*>(target);
  for (const auto& note : memory().unread)
    if (const auto source = note.lock())
      if (source->first < from + bytes && from < source->first + source->second) return;
  std::memset(target, kUndefined, bytes);
}

}  // namespace

char* view(const void* pointer, size_t bytes) {
  Memory& m = memory();
  std::lock_guard guard(m.lock);
  const size_t at = m.place(pointer);
  const auto after = m.blocks.upper_bound(at);
  if (after == m.blocks.begin()) return nullptr;
  const auto& [start, block] = *std::prev(after);
  const bool inside = at < start + block.bytes && at + bytes <= start + block.bytes;
  return inside && block.addressable ? m.own + at : nullptr;
}

std::pair<int, off_t> place_of(const char* viewed) {
  return {memory().file, static_cast<off_t>(memory().place(viewed))};
}

}  // namespace sim

using namespace sim;

ENTRY(aclrtMalloc, (void** out, size_t bytes, int),
      *out = memory().shown + allocate(device_of_this_thread(), bytes);)
ENTRY(aclrtMallocAlign32, (void** out, size_t bytes, int),
      *out = memory().shown + allocate(device_of_this_thread(), bytes);)
ENTRY(aclrtMallocHost, (void** out, size_t bytes), *out = memory().own + allocate(kHost, bytes);)
ENTRY(aclrtFree, (void* pointer), {
  finish_all();  // work in flight may still use the block
  release(pointer, "device");
})
ENTRY(aclrtFreeHost, (void* pointer), release(pointer, "pinned");)
ENTRY(aclrtHostRegister, (void* pointer, uint64_t, int, void** device_pointer), {
  std::lock_guard guard(memory().lock);
  block_at(pointer, "pinned")->second.addressable = true;
  if (device_pointer) *device_pointer = pointer;
})
ENTRY(aclrtHostUnregister, (void* pointer), {
  std::lock_guard guard(memory().lock);
  block_at(pointer, "pinned")->second.addressable = false;
})
ENTRY(aclrtGetMemInfo, (int, size_t* free, size_t* total), {
  std::lock_guard guard(memory().lock);
  *total = memory().per_device;
  *free = *total - memory().use[1 + device_of_this_thread()].now;
})

ENTRY(aclrtMemcpy, (void* target, size_t room, const void* source, size_t bytes, int kind),
      copy(target, room, source, bytes, kind);)
ENTRY(aclrtMemcpyAsync, (void* target, size_t room, const void* source, size_t bytes, int kind,
                         void* stream), {
  if (bytes && (!target || !source)) copy(target, room, source, bytes, kind);  // refused now
  if (lazy && bytes <= room) undefine(target, bytes);
  submit(stream, [=, held = reading(source, bytes)] { copy(target, room, source, bytes, kind); });
})

// What tests read through ctypes; the host is device -1.
API Use* npusim_use(int device) { return memory().use + 1 + device; }
