// Collectives between processes of one machine: shared memory that rank 0 creates and the others
// open through /proc. Every collective is the same two waits: all ranks have put their bytes into
// their own window; all ranks have read what they need. Each rank also states which collective it
// runs, so that ranks that disagree are told, and a rank that never comes is named.
//
// Collectives run as waiting tasks of the stream they are given, so a late rank stalls that stream
// and nothing else.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "tensors.h"

using namespace sim;

namespace {

enum HcclCode : int { kParameter = 1, kSystem = 4, kUnsupported = 5, kTimeout = 9 };

constexpr int kMaxRanks = 64;
constexpr size_t kWindow = size_t{1} << 30;  // of each rank; sparse
constexpr size_t kRing = size_t{4} << 20;    // of each ordered pair, for send and receive
constexpr size_t kHeadBytes = size_t{1} << 20;
constexpr size_t kRootInfoBytes = 4108;
constexpr char kMagic[8] = "npusim2";

// HCCL's own codes -> ACL's.
constexpr int kDtype[] = {kInt8,   kInt16,  kInt32,  kFloat16, kFloat,  kInt64,
                          kUint64, kUint8, kUint16, kUint32,  kDouble, kBFloat16};

struct Pair {
  std::atomic<uint64_t> written, read;  // bytes so far
};

struct Statement {
  std::atomic<uint64_t> arrived;  // waits this rank has reached
  char what[24];
  uint64_t stated;  // bytes, where every rank has the same
};

struct Head {
  Statement ranks[kMaxRanks];
  Pair pairs[kMaxRanks][kMaxRanks];
};
static_assert(sizeof(Head) <= kHeadBytes);

struct RootInfo {
  char magic[8];
  int pid, file;
};

struct Comm {
  uint32_t size = 0, rank = 0;
  char* base = nullptr;
  size_t bytes = 0;
  uint64_t waits = 0;
  std::string name;
  std::atomic<int> error{0};

  Head& head() const { return *reinterpret_cast<Head*>(base); }
  char* window(uint32_t r) const { return base + kHeadBytes + r * kWindow; }
  char* ring(uint32_t from, uint32_t to) const {
    return base + kHeadBytes + size * kWindow + (from * size + to) * kRing;
  }
};

size_t shared_bytes(uint32_t ranks) {
  return kHeadBytes + ranks * kWindow + size_t{ranks} * ranks * kRing;
}

// Spin, politely, until `ready`; false when the time is over.
template <class Ready>
bool wait_for(Ready ready) {
  using clock = std::chrono::steady_clock;
  const auto end = clock::now() + std::chrono::seconds(setting("NPUSIM_HCCL_TIMEOUT", 60));
  for (int spins = 0; !ready(); ++spins) {
    if (clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(spins < 100 ? 20 : 500));
  }
  return true;
}

int wait_for_all(Comm& c, const char* what) {
  const uint64_t mine = ++c.waits;
  c.head().ranks[c.rank].arrived = mine;
  const bool complete = wait_for([&] {
    for (uint32_t r = 0; r < c.size; ++r)
      if (c.head().ranks[r].arrived < mine) return false;
    return true;
  });
  if (complete) return kSuccess;
  std::string late;
  for (uint32_t r = 0; r < c.size; ++r)
    if (c.head().ranks[r].arrived < mine) late += (late.empty() ? "" : ", ") + std::to_string(r);
  c.error = kTimeout;
  return fail(kTimeout, "%s on rank %u of %u timed out: rank %s did not come", what, c.rank,
              c.size, late.c_str());
}

// The heart: show my bytes, then read those of others: `read(window)`, where window(r) is what rank
// r showed. `stated` is a number on which all ranks must agree.
template <class Read>
int exchange(Comm& c, const char* what, const void* mine, size_t bytes, uint64_t stated,
             Read read) {
  if (bytes > kWindow) return fail(kUnsupported, "%s of %zu bytes is too large", what, bytes);
  Statement& me = c.head().ranks[c.rank];
  std::snprintf(me.what, sizeof me.what, "%s", what);
  me.stated = stated;
  if (bytes && mine) std::memcpy(c.window(c.rank), mine, bytes);
  if (int code = wait_for_all(c, what)) return code;
  int code = kSuccess;
  for (uint32_t r = 0; r < c.size && !code; ++r) {
    const Statement& other = c.head().ranks[r];
    if (std::strcmp(other.what, what) != 0 || other.stated != stated)
      code = fail(kParameter, "rank %u runs %s (%zu bytes), but rank %u runs %s (%zu bytes)",
                  c.rank, what, size_t{stated}, r, other.what, size_t{other.stated});
  }
  if (!code) code = read([&](uint32_t r) -> const char* { return c.window(r); });
  if (code) c.error = code;
  const int last = wait_for_all(c, what);
  return code ? code : last;
}

// The address of a buffer of `count` elements in device memory, or null with an error recorded.
struct Buffer {
  char* at = nullptr;
  size_t bytes = 0;
  int code = kSuccess;
};

Buffer buffer(const void* pointer, uint64_t count, int type) {
  if (type < 0 || type >= static_cast<int>(std::size(kDtype)))
    return {nullptr, 0, fail(kUnsupported, "HCCL data type %d is not simulated", type)};
  const size_t bytes = count * size_of(kDtype[type]);
  if (bytes && !inside_allocation(pointer, bytes))
    return {nullptr, 0, fail(kParameter, "HCCL buffer of %zu bytes is not device memory", bytes)};
  return {view(pointer), bytes};
}

// What the ranks showed from byte `at` of their windows on, folded into `to`: in the order of the
// ranks, so that every rank gets the same bits.
template <class Window>
int fold(const Comm& c, Window window, size_t at, char* to, uint64_t count, int hccl_type, int op) {
  if (op < 0 || op > 3) return fail(kUnsupported, "HCCL reduction %d is not simulated", op);
  const int type = kDtype[hccl_type];
  const size_t step = size_of(type);
  std::memcpy(to, window(0) + at, count * step);
  in_working_type({type}, [&](auto zero) {
    using T = decltype(zero);
    for (uint32_t r = 1; r < c.size; ++r)
      for (uint64_t i = 0; i < count; ++i) {
        const T a = load<T>(type, to + i * step), b = load<T>(type, window(r) + at + i * step);
        const T folded[] = {static_cast<T>(a + b), static_cast<T>(a * b), std::max(a, b),
                            std::min(a, b)};
        store<T>(type, to + i * step, folded[op]);
      }
  });
  return kSuccess;
}

Comm* comm_of(void* handle) { return static_cast<Comm*>(handle); }

#define REQUIRE(buffer) \
  if (buffer.code) return buffer.code

// One side of a transfer between two ranks.
struct Transfer {
  bool sends;
  char* data;
  size_t bytes;
  uint32_t peer;
};

// Move what can move now through the pair's ring; how many bytes did.
size_t advance(Comm& c, Transfer& t) {
  const uint32_t from = t.sends ? c.rank : t.peer, to = t.sends ? t.peer : c.rank;
  Pair& pair = c.head().pairs[from][to];
  std::atomic<uint64_t>& place = t.sends ? pair.written : pair.read;
  const size_t held = pair.written - pair.read;
  const size_t at = place % kRing;
  const size_t part = std::min({t.bytes, kRing - at, t.sends ? kRing - held : held});
  char* shared = c.ring(from, to) + at;
  std::memcpy(t.sends ? shared : t.data, t.sends ? t.data : shared, part);
  place += part;
  t.data += part;
  t.bytes -= part;
  return part;
}

// All transfers move side by side, so that two ranks may send to each other first.
int run_transfers(Comm& c, const char* what, std::vector<Transfer> all) {
  for (;;) {
    const Transfer* open = nullptr;
    const bool moved = wait_for([&] {
      size_t part = 0;
      open = nullptr;
      for (Transfer& t : all) {
        if (t.bytes) part += advance(c, t);
        if (t.bytes) open = &t;
      }
      return part || !open;
    });
    if (!open) return kSuccess;
    if (moved) continue;
    c.error = kTimeout;
    return fail(kTimeout, "%s on rank %u timed out: rank %u does not %s", what, c.rank, open->peer,
                open->sends ? "receive" : "send");
  }
}

}  // namespace

// ---- communicators
API int HcclGetRootInfo(char* out) {
  ENTER("HcclGetRootInfo");
  RootInfo info = {};
  std::memcpy(info.magic, kMagic, sizeof kMagic);
  info.pid = getpid();
  info.file = memfd_create("npusim-hccl", 0);
  if (info.file < 0 || ftruncate(info.file, static_cast<off_t>(shared_bytes(kMaxRanks))))
    return fail(kSystem, "cannot create shared memory: %m");
  std::memset(out, 0, kRootInfoBytes);
  std::memcpy(out, &info, sizeof info);
  return kSuccess;
}
API int HcclCommInitRootInfo(uint32_t size, const char* root, uint32_t rank, void** out) {
  ENTER("HcclCommInitRootInfo");
  RootInfo info;
  std::memcpy(&info, root, sizeof info);
  if (std::memcmp(info.magic, kMagic, sizeof kMagic) != 0)
    return fail(kParameter, "the root info is not from this simulator");
  if (size > kMaxRanks) return fail(kUnsupported, "more than %d ranks", kMaxRanks);
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", info.pid, info.file);
  const int file = open(path, O_RDWR);
  if (file < 0) return fail(kSystem, "cannot reach rank 0's memory %s: %m", path);
  const size_t bytes = shared_bytes(size);
  void* base =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  close(file);
  if (base == MAP_FAILED) return fail(kSystem, "cannot map shared memory: %m");
  Comm* c = new Comm;
  c->size = size;
  c->rank = rank;
  c->base = static_cast<char*>(base);
  c->bytes = bytes;
  c->name = "npusim_" + std::to_string(info.pid) + "_" + std::to_string(info.file);
  *out = c;
  return wait_for_all(*c, "HcclCommInitRootInfo");
}
API int HcclCommInitRootInfoConfig(uint32_t size, const char* root, uint32_t rank, const void*,
                                   void** out) {
  return HcclCommInitRootInfo(size, root, rank, out);
}
API int HcclGetCommName(void* comm, char* out) {
  std::strcpy(out, comm_of(comm)->name.c_str());
  return kSuccess;
}
API int HcclCommDestroy(void* comm) {
  ENTER("HcclCommDestroy");
  if (int code = finish_all()) return code;
  munmap(comm_of(comm)->base, comm_of(comm)->bytes);
  delete comm_of(comm);
  return kSuccess;
}
API int HcclGetCommAsyncError(void* comm, int* error) {
  *error = comm_of(comm)->error;
  return kSuccess;
}
API const char* aclGetRecentErrMsg();
API const char* HcclGetErrorString(int) { return aclGetRecentErrMsg(); }
API uint32_t HcclGetCommConfigCapability() { return 0; }
API int HcclSetConfig(int, int64_t) { return kSuccess; }

// ---- collectives: count the call, then run the body as a waiting task
#define COLLECTIVE(name, params, ...)                                        \
  API int name(UNPACKED params, void* comm, void* stream) {                 \
    ENTER(#name);                                                            \
    Comm& c = *comm_of(comm);                                                \
    const char* const what = #name + sizeof "Hccl" - 1;                      \
    return submit(stream, [=, &c]() -> int __VA_ARGS__, true);               \
  }
#define UNPACKED(...) __VA_ARGS__

COLLECTIVE(HcclAllReduce, (const void* in, void* out, uint64_t count, int type, int op), {
  const Buffer from = buffer(in, count, type), to = buffer(out, count, type);
  REQUIRE(from);
  REQUIRE(to);
  return exchange(c, what, from.at, from.bytes, from.bytes, [&](auto window) {
    return fold(c, window, 0, to.at, count, type, op);
  });
})

COLLECTIVE(HcclReduce,
           (const void* in, void* out, uint64_t count, int type, int op, uint32_t root), {
  const Buffer from = buffer(in, count, type), to = buffer(out, c.rank == root ? count : 0, type);
  REQUIRE(from);
  REQUIRE(to);
  return exchange(c, what, from.at, from.bytes, from.bytes, [&](auto window) {
    return c.rank == root ? fold(c, window, 0, to.at, count, type, op) : int{kSuccess};
  });
})

COLLECTIVE(HcclReduceScatter, (const void* in, void* out, uint64_t count, int type, int op), {
  const Buffer from = buffer(in, count * c.size, type), to = buffer(out, count, type);
  REQUIRE(from);
  REQUIRE(to);
  return exchange(c, what, from.at, from.bytes, from.bytes, [&](auto window) {
    return fold(c, window, c.rank * to.bytes, to.at, count, type, op);
  });
})

COLLECTIVE(HcclBroadcast, (void* data, uint64_t count, int type, uint32_t root), {
  const Buffer both = buffer(data, count, type);
  REQUIRE(both);
  return exchange(c, what, c.rank == root ? both.at : nullptr, both.bytes, both.bytes,
                  [&](auto window) {
                    if (c.rank != root) std::memcpy(both.at, window(root), both.bytes);
                    return kSuccess;
                  });
})

COLLECTIVE(HcclAllGather, (const void* in, void* out, uint64_t count, int type), {
  const Buffer from = buffer(in, count, type), to = buffer(out, count * c.size, type);
  REQUIRE(from);
  REQUIRE(to);
  return exchange(c, what, from.at, from.bytes, from.bytes, [&](auto window) {
    for (uint32_t r = 0; r < c.size; ++r)
      std::memcpy(to.at + r * from.bytes, window(r), from.bytes);
    return kSuccess;
  });
})

COLLECTIVE(HcclScatter, (const void* in, void* out, uint64_t count, int type, uint32_t root), {
  const Buffer from = buffer(in, c.rank == root ? count * c.size : 0, type);
  const Buffer to = buffer(out, count, type);
  REQUIRE(from);
  REQUIRE(to);
  return exchange(c, what, from.at, from.bytes, to.bytes, [&](auto window) {
    std::memcpy(to.at, window(root) + c.rank * to.bytes, to.bytes);
    return kSuccess;
  });
})

// ---- between pairs of ranks

namespace {

struct Item {
  int kind;  // 0 send, 1 receive
  void* data;
  uint64_t count;
  int type;
  uint32_t peer;
};

// Buffers are checked at the call: what a caller hands over in arrays lives only that long.
int transfer(Comm& c, const char* what, const std::vector<Item>& items, void* stream) {
  std::vector<Transfer> all;
  for (const Item& item : items) {
    const Buffer data = buffer(item.data, item.count, item.type);
    REQUIRE(data);
    if (item.peer >= c.size) return fail(kParameter, "%s: no rank %u", what, item.peer);
    all.push_back({item.kind == 0, data.at, data.bytes, item.peer});
  }
  return submit(stream, [=, &c] { return run_transfers(c, what, all); }, true);
}

// The part of a buffer from an offset in elements on.
void* part_of(const void* base, uint64_t offset, int type) {
  const bool known = type >= 0 && type < static_cast<int>(std::size(kDtype));
  const char* at = static_cast<const char*>(base);
  return const_cast<char*>(at) + (known ? offset * size_of(kDtype[type]) : 0);
}

}  // namespace

API int HcclAlltoAllV(const void* in, const uint64_t* in_counts, const uint64_t* in_offsets,
                      int type, const void* out, const uint64_t* out_counts,
                      const uint64_t* out_offsets, int, void* comm, void* stream) {
  ENTER("HcclAlltoAllV");
  std::vector<Item> items;
  for (uint32_t r = 0; r < comm_of(comm)->size; ++r) {
    items.push_back({0, part_of(in, in_offsets[r], type), in_counts[r], type, r});
    items.push_back({1, part_of(out, out_offsets[r], type), out_counts[r], type, r});
  }
  return transfer(*comm_of(comm), "AlltoAllV", items, stream);
}
API int HcclAlltoAll(const void* in, uint64_t count, int type, const void* out, uint64_t, int,
                     void* comm, void* stream) {
  ENTER("HcclAlltoAll");
  std::vector<Item> items;
  for (uint32_t r = 0; r < comm_of(comm)->size; ++r) {
    items.push_back({0, part_of(in, r * count, type), count, type, r});
    items.push_back({1, part_of(out, r * count, type), count, type, r});
  }
  return transfer(*comm_of(comm), "AlltoAll", items, stream);
}
API int HcclSend(void* data, uint64_t count, int type, uint32_t peer, void* comm, void* stream) {
  ENTER("HcclSend");
  return transfer(*comm_of(comm), "Send", {{0, data, count, type, peer}}, stream);
}
API int HcclRecv(void* data, uint64_t count, int type, uint32_t peer, void* comm, void* stream) {
  ENTER("HcclRecv");
  return transfer(*comm_of(comm), "Recv", {{1, data, count, type, peer}}, stream);
}
API int HcclBatchSendRecv(const Item* items, uint32_t count, void* comm, void* stream) {
  ENTER("HcclBatchSendRecv");
  return transfer(*comm_of(comm), "BatchSendRecv", {items, items + count}, stream);
}
