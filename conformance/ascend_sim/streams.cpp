// Streams and events, eager and lazy.
//
// Eager: a task runs at once in the thread that submits it, unless it or something before it in the
// stream has to wait for another stream or rank; then a worker thread of the stream takes over.
// Lazy (NPUSIM_LAZY=1): tasks wait until something asks for them - a synchronisation, an event, a
// repeated query - so that a forgotten wait gives wrong data every time, not now and then.
//
// An event is a stream and a position in it. Waiting for one captures both at that moment, so waits
// only ever point at work that was submitted earlier, and no circle of waits can arise.
#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "sim.h"

namespace sim {
namespace {

struct Stream {
  int id = 0;
  std::mutex lock;
  std::condition_variable changed;
  std::deque<Task> queue;
  uint64_t submitted = 0;
  uint64_t finished = 0;
  bool running = false;     // a thread is inside a task of this stream
  bool has_worker = false;  // eager mode, once something had to wait
  uint64_t hand_over = 0;   // the worker runs everything up to here
  int error = 0;            // first error not yet reported
};

struct Event {
  Stream* stream = nullptr;
  uint64_t position = 0;
  int queries = 0;
};

struct Streams {
  std::mutex lock;
  std::set<Stream*> all;  // never deleted: events may name a stream that torch destroyed
  int made = 0;
  Stream* defaults[kMaxDevices] = {};
  std::mutex event_lock;
};

Streams& streams() {
  static Streams* s = new Streams;
  return *s;
}

Stream* make_stream() {
  Streams& s = streams();
  Stream* stream = new Stream;
  std::lock_guard<std::mutex> guard(s.lock);
  stream->id = ++s.made;
  s.all.insert(stream);
  return stream;
}

Stream& resolve(void* handle) {
  if (handle) return *static_cast<Stream*>(handle);
  Streams& s = streams();
  // A thread without a device has no default stream of its own; the first device's will do, since
  // torch_npu never submits work from such a thread.
  Stream*& found = s.defaults[std::max(current_device(), 0)];
  {
    std::lock_guard<std::mutex> guard(s.lock);
    if (found) return *found;
  }
  Stream* fresh = make_stream();
  std::lock_guard<std::mutex> guard(s.lock);
  if (!found) found = fresh;
  return *found;
}

// Run tasks of the stream, one at a time and in order, until `position` is reached; tasks that
// another thread has begun are waited for. The lock is open while a task runs.
void run_until(Stream& s, uint64_t position) {
  std::unique_lock<std::mutex> guard(s.lock);
  while (s.finished < position) {
    if (s.running) {
      s.changed.wait(guard);
      continue;
    }
    Task task = std::move(s.queue.front());
    s.queue.pop_front();
    s.running = true;
    guard.unlock();
    int code = enter("task");
    if (!code) code = task();
    task = nullptr;
    guard.lock();
    s.running = false;
    ++s.finished;
    if (code && !s.error) s.error = code;
    s.changed.notify_all();
  }
}

uint64_t position(Stream& s) {
  std::lock_guard<std::mutex> guard(s.lock);
  return s.submitted;
}

bool reached(Stream& s, uint64_t where) {
  std::lock_guard<std::mutex> guard(s.lock);
  return s.finished >= where;
}

// An error is reported once, to whoever waits first.
int finish(Stream& s, uint64_t where) {
  run_until(s, where);
  std::lock_guard<std::mutex> guard(s.lock);
  return std::exchange(s.error, 0);
}

void worker(Stream& s) {
  for (;;) {
    uint64_t upto;
    {
      std::unique_lock<std::mutex> guard(s.lock);
      s.changed.wait(guard, [&] { return s.finished < s.hand_over; });
      upto = s.hand_over;
    }
    run_until(s, upto);
  }
}

// What the position of an event was when somebody asked.
std::pair<Stream*, uint64_t> recorded(void* handle) {
  std::lock_guard<std::mutex> guard(streams().event_lock);
  Event* event = static_cast<Event*>(handle);
  return {event->stream, event->position};
}

}  // namespace

bool lazy() {
  static const bool on = setting("NPUSIM_LAZY", 0) != 0;
  return on;
}

int submit(void* handle, Task task, bool waits) {
  Stream& s = resolve(handle);
  uint64_t mine;
  {
    std::lock_guard<std::mutex> guard(s.lock);
    const bool idle = s.finished == s.submitted;
    s.queue.push_back(std::move(task));
    mine = ++s.submitted;
    if (lazy()) return kSuccess;
    if (waits || !idle) {
      if (!s.has_worker) std::thread(worker, std::ref(s)).detach();
      s.has_worker = true;
      s.hand_over = mine;
      s.changed.notify_all();
      return kSuccess;
    }
  }
  return finish(s, mine);
}

int finish_all() {
  std::vector<Stream*> all;
  {
    std::lock_guard<std::mutex> guard(streams().lock);
    all.assign(streams().all.begin(), streams().all.end());
  }
  int first = kSuccess;
  for (Stream* s : all) {
    const int code = finish(*s, position(*s));
    if (!first) first = code;
  }
  return first;
}

}  // namespace sim

using namespace sim;

API int aclrtCreateStream(void** out) {
  ENTER("aclrtCreateStream");
  *out = make_stream();
  return kSuccess;
}
API int aclrtCreateStreamWithConfig(void** out, uint32_t, uint32_t) {
  return aclrtCreateStream(out);
}
API int aclrtDestroyStream(void* handle) {
  ENTER("aclrtDestroyStream");
  Stream& s = resolve(handle);
  return finish(s, position(s));
}
API int aclrtDestroyStreamForce(void* handle) { return aclrtDestroyStream(handle); }
API int aclrtSynchronizeStream(void* handle) {
  ENTER("aclrtSynchronizeStream");
  Stream& s = resolve(handle);
  return finish(s, position(s));
}
API int aclrtSynchronizeStreamWithTimeout(void* handle, int) {
  return aclrtSynchronizeStream(handle);
}
API int aclrtSynchronizeDevice() {
  ENTER("aclrtSynchronizeDevice");
  return finish_all();
}
API int aclrtSynchronizeDeviceWithTimeout(int) { return aclrtSynchronizeDevice(); }
API int aclrtStreamQuery(void* handle, int* status) {
  ENTER("aclrtStreamQuery");
  Stream& s = resolve(handle);
  *status = reached(s, position(s)) ? 0 : 1;
  return kSuccess;
}
API int aclrtStreamGetId(void* handle, int* id) {
  *id = resolve(handle).id;
  return kSuccess;
}

API int aclrtCreateEventExWithFlag(void** out, uint32_t) {
  ENTER("aclrtCreateEvent");
  *out = new Event;
  return kSuccess;
}
API int aclrtCreateEventWithFlag(void** out, uint32_t flag) {
  return aclrtCreateEventExWithFlag(out, flag);
}
API int aclrtDestroyEvent(void* handle) {
  ENTER("aclrtDestroyEvent");
  std::lock_guard<std::mutex> guard(streams().event_lock);
  delete static_cast<Event*>(handle);
  return kSuccess;
}
API int aclrtRecordEvent(void* handle, void* stream) {
  ENTER("aclrtRecordEvent");
  Stream& s = resolve(stream);
  const uint64_t where = position(s);
  std::lock_guard<std::mutex> guard(streams().event_lock);
  *static_cast<Event*>(handle) = {&s, where, 0};
  return kSuccess;
}
API int aclrtResetEvent(void*, void*) { return kSuccess; }
API int aclrtStreamWaitEvent(void* stream, void* handle) {
  ENTER("aclrtStreamWaitEvent");
  const auto [other, where] = recorded(handle);
  if (!other || other == &resolve(stream) || reached(*other, where)) return kSuccess;
  Stream* source = other;
  const uint64_t upto = where;
  return submit(
      stream,
      [=] {
        run_until(*source, upto);
        return kSuccess;
      },
      true);
}
API int aclrtSynchronizeEvent(void* handle) {
  ENTER("aclrtSynchronizeEvent");
  const auto [stream, where] = recorded(handle);
  return stream ? finish(*stream, where) : kSuccess;
}
// 1 is complete. In lazy mode somebody who keeps asking is waiting, and gets his answer.
API int aclrtQueryEventStatus(void* handle, int* status) {
  ENTER("aclrtQueryEventStatus");
  const auto [stream, where] = recorded(handle);
  *status = !stream || reached(*stream, where);
  if (*status || !lazy()) return kSuccess;
  {
    std::lock_guard<std::mutex> guard(streams().event_lock);
    if (++static_cast<Event*>(handle)->queries <= 3) return kSuccess;
  }
  *status = 1;
  return finish(*stream, where);
}
