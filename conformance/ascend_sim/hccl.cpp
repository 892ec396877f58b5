// Collectives between processes of one machine, through shared memory that rank 0 creates and the
// others open through /proc.
//
// One mechanism moves everything: messages between pairs of ranks, each ordered pair through a ring
// of its own, all of a collective side by side, so that ranks may send to each other first. A
// message begins with what its sender runs, so that ranks that disagree are told; a rank that never
// comes is named.
//
// Collectives run as waiting tasks of the stream they are given, so a late rank stalls that stream
// and nothing else.
#include <ATen/ops/amax.h>
#include <ATen/ops/amin.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/prod.h>
#include <ATen/ops/sum.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <iterator>
#include <memory>
#include <thread>

#include "values.h"

using namespace sim;

namespace {

enum HcclCode : int { kParameter = 1, kSystem = 4, kUnsupported = 5, kTimeout = 9 };

constexpr uint32_t kMaxRanks = 64;
constexpr size_t kRing = size_t{4} << 20;
constexpr size_t kRootInfoBytes = 4108;
constexpr char kMagic[8] = "npusim3";

// By HCCL's own codes.
constexpr at::ScalarType kTypes[] = {at::kChar,   at::kShort, at::kInt,    at::kHalf,
                                     at::kFloat,  at::kLong,  at::kUInt64, at::kByte,
                                     at::kUInt16, at::kUInt32, at::kDouble, at::kBFloat16};

struct RootInfo {
  char magic[8];
  int pid, file;
};

struct Ring {
  std::atomic<uint64_t> written, read;  // bytes so far
  char bytes[kRing];
};

struct Comm {
  uint32_t size, rank;
  Ring* rings;  // in shared memory
  std::atomic<int> error{0};
};

struct Span {
  char* at = nullptr;
  size_t bytes = 0;

  Span part(uint32_t r, size_t length) const { return {at + r * length, length}; }
};

struct Header {
  char what[24];
  uint64_t bytes;
};

struct Message {
  bool sends;
  uint32_t peer;
  Span data;
  Header header = {};
  size_t done = 0;  // bytes of header and data that this rank has moved

  bool complete() const { return done == sizeof header + data.bytes; }
};

// Moves what can move now of the header, or of the data behind it; how many bytes did.
size_t advance(Comm& c, const char* what, Message& m) {
  Ring& ring = c.rings[m.sends ? c.rank * c.size + m.peer : m.peer * c.size + c.rank];
  std::atomic<uint64_t>& place = m.sends ? ring.written : ring.read;
  const size_t held = ring.written - ring.read, at = place % kRing;
  const bool in_header = m.done < sizeof m.header;
  const size_t end = sizeof m.header + (in_header ? 0 : m.data.bytes);
  const size_t part = std::min({end - m.done, kRing - at, m.sends ? kRing - held : held});
  char* mine = in_header ? reinterpret_cast<char*>(&m.header) + m.done
                         : m.data.at + (m.done - sizeof m.header);
  std::memcpy(m.sends ? ring.bytes + at : mine, m.sends ? mine : ring.bytes + at, part);
  place += part;
  m.done += part;
  const bool just_read = !m.sends && in_header && m.done == end;
  if (just_read && (std::strcmp(m.header.what, what) != 0 || m.header.bytes != m.data.bytes))
    fail(kParameter, "rank %u runs %s (%zu bytes), but rank %u runs %s (%zu bytes)", c.rank, what,
         m.data.bytes, m.peer, m.header.what, size_t{m.header.bytes});
  return part;
}

void exchange(Comm& c, const char* what, std::vector<Message> messages) {
  using clock = std::chrono::steady_clock;
  const auto patience = std::chrono::seconds(setting("NPUSIM_HCCL_TIMEOUT", 60));
  for (Message& m : messages) {
    if (!m.sends) continue;
    std::snprintf(m.header.what, sizeof m.header.what, "%s", what);
    m.header.bytes = m.data.bytes;
  }
  auto end = clock::now() + patience;
  for (int idle = 0;; ++idle) {
    size_t moved = 0;
    const Message* open = nullptr;
    bool busy[2][kMaxRanks] = {};  // one message after the other in each direction of a pair
    for (Message& m : messages) {
      if (m.complete() || busy[m.sends][m.peer]) continue;
      moved += advance(c, what, m);
      if (m.complete()) continue;
      busy[m.sends][m.peer] = true;
      open = &m;
    }
    if (!open) return;
    if (moved) {
      idle = 0;
      end = clock::now() + patience;
    } else if (clock::now() > end) {
      fail(kTimeout, "%s on rank %u of %u timed out: rank %u does not %s", what, c.rank, c.size,
           open->peer, open->sends ? "receive" : "send");
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(idle < 100 ? 20 : 500));
    }
  }
}

void submit_exchange(Comm* c, const char* what, void* stream, std::vector<Message> messages,
                     Task then = [] {}) {
  submit(
      stream,
      [=] {
        try {
          exchange(*c, what, messages);
        } catch (const Failure& failure) {
          c->error = failure.code;
          throw;
        }
        then();
      },
      true);
}

// What this rank sends to rank r, or where it puts what rank r sends: empty where nothing goes.
using Side = std::function<Span(uint32_t r)>;

// Between all ranks. Sends come first: a rank that fails has told everybody what it runs.
std::vector<Message> with_all(const Comm& c, Side send, Side receive) {
  std::vector<Message> messages;
  for (uint32_t r = 0; r < c.size; ++r) messages.push_back({true, r, send(r)});
  for (uint32_t r = 0; r < c.size; ++r) messages.push_back({false, r, receive(r)});
  return messages;
}

void collective(Comm* c, const char* what, void* stream, Side send, Side receive) {
  submit_exchange(c, what, stream, with_all(*c, send, receive));
}

// As collective, but what comes is folded into `out`: in the order of the ranks, so that every rank
// gets the same bits.
void reduction(Comm* c, const char* what, void* stream, Side send, Span out, int type, int op) {
  if (op < 0 || op > 3) fail(kUnsupported, "HCCL reduction %d is not simulated", op);
  const auto parts = std::make_shared<std::vector<char>>(c->size * out.bytes);
  const Side receive = [=](uint32_t r) { return Span{parts->data()}.part(r, out.bytes); };
  const int64_t ranks = c->size, count = out.bytes / c10::elementSize(kTypes[type]);
  submit_exchange(c, what, stream, with_all(*c, send, receive), later([=] {
    const at::Tensor all = at::from_blob(parts->data(), {ranks, count}, kTypes[type]);
    at::Tensor folded = at::from_blob(out.at, {count}, kTypes[type]);
    if (op == 0) at::sum_out(folded, all, 0);
    if (op == 1) at::prod_out(folded, all, 0);
    if (op == 2) at::amax_out(folded, all, 0);
    if (op == 3) at::amin_out(folded, all, 0);
  }));
}

// `count` elements of device memory, `offset` elements behind `base`.
Span buffer(const void* base, uint64_t count, int type, uint64_t offset = 0) {
  if (type < 0 || type >= static_cast<int>(std::size(kTypes)))
    fail(kUnsupported, "HCCL data type %d is not simulated", type);
  const size_t step = c10::elementSize(kTypes[type]), bytes = count * step;
  if (!bytes) return {};
  char* at = view(static_cast<const char*>(base) + offset * step, bytes);
  if (!at) fail(kParameter, "HCCL buffer of %zu bytes is not device memory", bytes);
  return {at, bytes};
}

Side always(Span span) {
  return [=](uint32_t) { return span; };
}
Side parts_of(const Comm* c, Span whole) {
  return [=](uint32_t r) { return whole.part(r, whole.bytes / c->size); };
}
Side only(uint32_t rank, Span span) {
  return [=](uint32_t r) { return r == rank ? span : Span{}; };
}

}  // namespace

// ---- communicators
ENTRY(HcclGetRootInfo, (char* out), {
  RootInfo info = {};
  std::memcpy(info.magic, kMagic, sizeof kMagic);
  info.pid = getpid();
  info.file = memfd_create("npusim-hccl", 0);
  if (info.file < 0 || ftruncate(info.file, sizeof(Ring) * kMaxRanks * kMaxRanks))
    fail(kSystem, "cannot create shared memory: %m");
  std::memset(out, 0, kRootInfoBytes);
  std::memcpy(out, &info, sizeof info);
})
ENTRY(HcclCommInitRootInfo, (uint32_t size, const char* root, uint32_t rank, Comm** out), {
  RootInfo info;
  std::memcpy(&info, root, sizeof info);
  if (std::memcmp(info.magic, kMagic, sizeof kMagic) != 0)
    fail(kParameter, "the root info is not from this simulator");
  if (size > kMaxRanks) fail(kUnsupported, "more than %u ranks", kMaxRanks);
  const std::string path = "/proc/" + std::to_string(info.pid) + "/fd/" + std::to_string(info.file);
  const int file = open(path.c_str(), O_RDWR);
  if (file < 0) fail(kSystem, "cannot reach rank 0's memory %s: %m", path.c_str());
  const int flags = MAP_SHARED | MAP_NORESERVE;
  void* base = mmap(nullptr, sizeof(Ring) * size * size, PROT_READ | PROT_WRITE, flags, file, 0);
  close(file);
  if (base == MAP_FAILED) fail(kSystem, "cannot map shared memory: %m");
  *out = new Comm{size, rank, static_cast<Ring*>(base)};
  const Side nothing = always({});
  exchange(**out, "CommInit", with_all(**out, nothing, nothing));
})
API int HcclCommInitRootInfoConfig(uint32_t size, const char* root, uint32_t rank, const void*,
                                   Comm** out) {
  return HcclCommInitRootInfo(size, root, rank, out);
}
ENTRY(HcclCommDestroy, (Comm* c), {
  finish_all();
  munmap(c->rings, sizeof(Ring) * c->size * c->size);
  delete c;
})
ENTRY(HcclGetCommAsyncError, (Comm* c, int* error), *error = c->error;)
API const char* aclGetRecentErrMsg();
API const char* HcclGetErrorString(int) { return aclGetRecentErrMsg(); }

// ---- collectives
ENTRY(HcclAllReduce, (const void* in, void* out, uint64_t count, int type, int op, Comm* c,
                      void* stream), {
  const Span mine = buffer(in, count, type), result = buffer(out, count, type);
  reduction(c, "AllReduce", stream, always(mine), result, type, op);
})
ENTRY(HcclReduce, (const void* in, void* out, uint64_t count, int type, int op, uint32_t root,
                   Comm* c, void* stream), {
  const Span mine = buffer(in, count, type);
  const Span result = buffer(out, c->rank == root ? count : 0, type);
  reduction(c, "Reduce", stream, only(root, mine), result, type, op);
})
ENTRY(HcclReduceScatter, (const void* in, void* out, uint64_t count, int type, int op, Comm* c,
                          void* stream), {
  const Span mine = buffer(in, count * c->size, type), result = buffer(out, count, type);
  reduction(c, "ReduceScatter", stream, parts_of(c, mine), result, type, op);
})
ENTRY(HcclBroadcast, (void* data, uint64_t count, int type, uint32_t root, Comm* c, void* stream), {
  const Span all = buffer(data, count, type), sent = c->rank == root ? all : Span{};
  collective(c, "Broadcast", stream, always(sent), only(root, all));
})
ENTRY(HcclScatter, (const void* in, void* out, uint64_t count, int type, uint32_t root, Comm* c,
                    void* stream), {
  const Span all = buffer(in, c->rank == root ? count * c->size : 0, type);
  collective(c, "Scatter", stream, parts_of(c, all), only(root, buffer(out, count, type)));
})
ENTRY(HcclAllGather, (const void* in, void* out, uint64_t count, int type, Comm* c, void* stream), {
  const Span mine = buffer(in, count, type), all = buffer(out, count * c->size, type);
  collective(c, "AllGather", stream, always(mine), parts_of(c, all));
})
ENTRY(HcclAlltoAll, (const void* in, uint64_t count, int type, const void* out, uint64_t, int,
                     Comm* c, void* stream), {
  const Span from = buffer(in, count * c->size, type), to = buffer(out, count * c->size, type);
  collective(c, "AlltoAll", stream, parts_of(c, from), parts_of(c, to));
})
ENTRY(HcclAlltoAllV, (const void* in, const uint64_t* in_counts, const uint64_t* in_offsets,
                      int type, const void* out, const uint64_t* out_counts,
                      const uint64_t* out_offsets, int, Comm* c, void* stream), {
  collective(
      c, "AlltoAllV", stream,
      [=](uint32_t r) { return buffer(in, in_counts[r], type, in_offsets[r]); },
      [=](uint32_t r) { return buffer(out, out_counts[r], type, out_offsets[r]); });
})

// ---- between pairs of ranks
struct Item {
  int kind;  // 0 send, 1 receive
  void* data;
  uint64_t count;
  int type;
  uint32_t peer;
};
ENTRY(HcclBatchSendRecv, (const Item* items, uint32_t count, Comm* c, void* stream), {
  std::vector<Message> messages;
  for (const Item* item = items; item != items + count; ++item) {
    if (item->peer >= c->size) fail(kParameter, "no rank %u", item->peer);
    const Span data = buffer(item->data, item->count, item->type);
    messages.push_back({item->kind == 0, item->peer, data});
  }
  submit_exchange(c, "SendRecv", stream, messages);
})
API int HcclSend(void* data, uint64_t count, int type, uint32_t peer, Comm* c, void* stream) {
  const Item item{0, data, count, type, peer};
  return HcclBatchSendRecv(&item, 1, c, stream);
}
API int HcclRecv(void* data, uint64_t count, int type, uint32_t peer, Comm* c, void* stream) {
  const Item item{1, data, count, type, peer};
  return HcclBatchSendRecv(&item, 1, c, stream);
}
