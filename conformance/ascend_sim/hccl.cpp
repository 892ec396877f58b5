// Collectives between processes of one machine.
//
// One mechanism moves everything: messages between pairs of ranks, all of a collective side by
// side, so that ranks may send to each other first. A message is a note in memory that all ranks
// share, one for each ordered pair: what its sender runs, so that ranks that disagree are told, and
// where the data lies, so that the receiver reads it from there, as one device reads from another.
// A rank that never comes is named.
//
// Collectives run as waiting tasks of the stream they are given, so a late rank stalls that stream
// and nothing else.
#include <fcntl.h>
#include <sys/mman.h>

#include <thread>

#include "values.h"

using namespace sim;

namespace {

enum HcclCode : int { kParameter = 1, kSystem = 4, kUnsupported = 5, kTimeout = 9 };

constexpr uint32_t kMaxRanks = 64;

// By HCCL's own codes.
constexpr at::ScalarType kTypes[] = {at::kChar,   at::kShort, at::kInt,    at::kHalf,
                                     at::kFloat,  at::kLong,  at::kUInt64, at::kByte,
                                     at::kUInt16, at::kUInt32, at::kDouble, at::kBFloat16};

// What another process can open: a file of the process that has it.
struct Shared {
  int pid, file;

  int opened(int flags) const {
    const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(file);
    const int mine = open(path.c_str(), flags);
    if (mine < 0) fail(kSystem, "cannot reach another rank's memory %s: %m", path.c_str());
    return mine;
  }
};

struct Note {
  std::atomic<bool> full;  // until the receiver has read the data
  char what[40];
  size_t bytes;
  Shared memory;
  off_t place;
};

struct Comm {
  uint32_t size, rank;
  Note* notes;  // in shared memory
  std::atomic<int> error{0};

  Note& note(uint32_t from, uint32_t to) { return notes[from * size + to]; }
};

struct Span {
  char* at = nullptr;
  size_t bytes = 0;
};

struct Message {
  bool sends;
  uint32_t peer;
  Span data;
  bool noted = false;
};

// Does what can be done now for a message; whether it has arrived.
bool advance(Comm& c, Message& m) {
  Note& note = m.sends ? c.note(c.rank, m.peer) : c.note(m.peer, c.rank);
  if (note.full == m.sends) return false;
  if (m.sends) {
    if (m.noted) return true;
    std::snprintf(note.what, sizeof note.what, "%s", current_call());
    note.bytes = m.data.bytes;
    std::tie(note.memory.file, note.place) = place_of(m.data.at);
    note.memory.pid = getpid();
    note.full = m.noted = true;
    return false;
  }
  if (std::strcmp(note.what, current_call()) != 0 || note.bytes != m.data.bytes)
    fail(kParameter, "rank %u runs %s (%zu bytes), but rank %u runs %s (%zu bytes)", c.rank,
         current_call(), m.data.bytes, m.peer, note.what, note.bytes);
  if (note.bytes) {
    const int file = note.memory.opened(O_RDONLY);
    const ssize_t got = pread(file, m.data.at, note.bytes, note.place);
    close(file);
    if (got != static_cast<ssize_t>(note.bytes)) fail(kSystem, "cannot read from rank %u", m.peer);
  }
  note.full = false;
  return true;
}

void exchange(Comm& c, std::list<Message> messages) {
  using clock = std::chrono::steady_clock;
  const auto end = clock::now() + std::chrono::seconds(setting("NPUSIM_HCCL_TIMEOUT", 60));
  while (!messages.empty()) {
    const size_t before = messages.size();
    bool busy[2][kMaxRanks] = {};  // one message after the other in each direction of a pair
    for (auto m = messages.begin(); m != messages.end();) {
      bool& waits = busy[m->sends][m->peer];
      waits = waits || !advance(c, *m);
      m = waits ? std::next(m) : messages.erase(m);
    }
    if (messages.size() < before) continue;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    if (clock::now() < end) continue;
    for (const Message& m : messages)  // what is noted there may not be true any more
      if (m.noted) c.note(c.rank, m.peer).full = false;
    const Message& open = messages.back();
    fail(kTimeout, "rank %u of %u timed out: rank %u does not %s", c.rank, c.size, open.peer,
         open.sends ? "receive" : "send");
  }
}

void submit_exchange(Comm* c, void* stream, std::list<Message> messages, Task then = [] {}) {
  const Task task = [=] {
    try {
      exchange(*c, messages);
    } catch (const Failure& failure) {
      c->error = failure.code;
      throw;
    }
    then();
  };
  submit(stream, task, true);
}

// What this rank sends to rank r, or where it puts what rank r sends: empty where nothing goes.
using Side = std::function<Span(uint32_t r)>;

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
Side whole(const void* base, uint64_t count, int type) {
  return [=](uint32_t) { return buffer(base, count, type); };
}
Side parts(const void* base, uint64_t count, int type) {
  return [=](uint32_t r) { return buffer(base, count, type, r * count); };
}
Side only(uint32_t rank, Side side) {
  return [=](uint32_t r) { return r == rank ? side(r) : Span{}; };
}

// Between all ranks. Sends come first: a rank that fails has told everybody what it runs.
std::list<Message> with_all(const Comm* c, const Side& send, const Side& receive) {
  std::list<Message> messages;
  for (uint32_t r = 0; r < c->size; ++r) messages.push_back({true, r, send(r)});
  for (uint32_t r = 0; r < c->size; ++r) messages.push_back({false, r, receive(r)});
  return messages;
}

// What comes is folded into `out`: in the order of the ranks, so that every rank gets the same
// bits.
void reduction(Comm* c, void* stream, const Side& send, Span out, int type, int op) {
  if (op < 0 || op > 3) fail(kUnsupported, "HCCL reduction %d is not simulated", op);
  const auto all = std::make_shared<std::vector<char>>(c->size * out.bytes);
  const Side receive = [=](uint32_t r) { return Span{all->data() + r * out.bytes, out.bytes}; };
  const int64_t ranks = c->size, count = out.bytes / c10::elementSize(kTypes[type]);
  submit_exchange(c, stream, with_all(c, send, receive), later([=] {
    const at::Tensor terms = at::from_blob(all->data(), {ranks, count}, kTypes[type]);
    at::Tensor folded = at::from_blob(out.at, {count}, kTypes[type]);
    if (op == 0) at::sum_out(folded, terms, 0);
    if (op == 1) at::prod_out(folded, terms, 0);
    if (op == 2) at::amax_out(folded, terms, 0);
    if (op == 3) at::amin_out(folded, terms, 0);
  }));
}

}  // namespace

// ---- communicators
ENTRY(HcclGetRootInfo, (char* out), {
  const Shared notes{getpid(), memfd_create("npusim-hccl", 0)};
  if (notes.file < 0 || ftruncate(notes.file, sizeof(Note) * kMaxRanks * kMaxRanks))
    fail(kSystem, "cannot create shared memory: %m");
  std::memcpy(out, &notes, sizeof notes);
})
ENTRY(HcclCommInitRootInfoConfig, (uint32_t size, const char* root, uint32_t rank, const void*,
                                   Comm** out), {
  if (size > kMaxRanks) fail(kUnsupported, "more than %u ranks", kMaxRanks);
  Shared notes;
  std::memcpy(&notes, root, sizeof notes);
  const int file = notes.opened(O_RDWR);
  const size_t bytes = sizeof(Note) * size * size;
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (base == MAP_FAILED) fail(kSystem, "cannot map shared memory: %m");
  *out = new Comm{size, rank, static_cast<Note*>(base)};
  const Side nothing = [](uint32_t) { return Span{}; };
  exchange(**out, with_all(*out, nothing, nothing));
})
ENTRY(HcclCommDestroy, (Comm* c), {
  finish_all();
  munmap(c->notes, sizeof(Note) * c->size * c->size);
  delete c;
})
ENTRY(HcclGetCommAsyncError, (Comm* c, int* error), *error = c->error;)
API const char* aclGetRecentErrMsg();
API const char* HcclGetErrorString(int) { return aclGetRecentErrMsg(); }

// ---- collectives
ENTRY(HcclAllReduce, (const void* in, void* out, uint64_t count, int type, int op, Comm* c,
                      void* stream),
      reduction(c, stream, whole(in, count, type), buffer(out, count, type), type, op);)
ENTRY(HcclReduceScatter, (const void* in, void* out, uint64_t count, int type, int op, Comm* c,
                          void* stream),
      reduction(c, stream, parts(in, count, type), buffer(out, count, type), type, op);)
ENTRY(HcclReduce, (const void* in, void* out, uint64_t count, int type, int op, uint32_t root,
                   Comm* c, void* stream),
      reduction(c, stream, only(root, whole(in, count, type)),
                buffer(out, c->rank == root ? count : 0, type), type, op);)
ENTRY(HcclBroadcast, (void* data, uint64_t count, int type, uint32_t root, Comm* c,
                      void* stream),
      submit_exchange(c, stream, with_all(c, whole(data, c->rank == root ? count : 0, type),
                                          only(root, whole(data, count, type))));)
ENTRY(HcclScatter, (const void* in, void* out, uint64_t count, int type, uint32_t root, Comm* c,
                    void* stream),
      submit_exchange(c, stream, with_all(c, parts(in, c->rank == root ? count : 0, type),
                                          only(root, whole(out, count, type))));)
ENTRY(HcclAllGather, (const void* in, void* out, uint64_t count, int type, Comm* c, void* stream),
      submit_exchange(c, stream, with_all(c, whole(in, count, type), parts(out, count, type)));)
ENTRY(HcclAlltoAll, (const void* in, uint64_t count, int type, const void* out, uint64_t, int,
                     Comm* c, void* stream),
      submit_exchange(c, stream, with_all(c, parts(in, count, type), parts(out, count, type)));)
ENTRY(HcclAlltoAllV, (const void* in, const uint64_t* in_counts, const uint64_t* in_offsets,
                      int type, const void* out, const uint64_t* out_counts,
                      const uint64_t* out_offsets, int, Comm* c, void* stream), {
  const Side send = [=](uint32_t r) { return buffer(in, in_counts[r], type, in_offsets[r]); };
  const Side get = [=](uint32_t r) { return buffer(out, out_counts[r], type, out_offsets[r]); };
  submit_exchange(c, stream, with_all(c, send, get));
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
  std::list<Message> messages;
  for (const Item* item = items; item != items + count; ++item) {
    if (item->peer >= c->size) fail(kParameter, "no rank %u", item->peer);
    const Span data = buffer(item->data, item->count, item->type);
    messages.push_back({item->kind == 0, item->peer, data});
  }
  submit_exchange(c, stream, messages);
})
API int HcclSend(void* data, uint64_t count, int type, uint32_t peer, Comm* c, void* stream) {
  const Item item{0, data, count, type, peer};
  return HcclBatchSendRecv(&item, 1, c, stream);
}
API int HcclRecv(void* data, uint64_t count, int type, uint32_t peer, Comm* c, void* stream) {
  const Item item{1, data, count, type, peer};
  return HcclBatchSendRecv(&item, 1, c, stream);
}
