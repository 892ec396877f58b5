// Streams and events, eager and lazy.
//
// Eager: a task runs at once in the thread that submits it, unless it or something before it in the
// stream has to wait for another stream or rank; then a new thread runs what the stream holds.
// Lazy (NPUSIM_LAZY=1): tasks wait until something asks for them - a synchronisation, an event, a
// repeated query - so that a forgotten wait gives wrong data every time, not now and then.
//
// An event is a place: a stream and how much had been submitted to it. Waiting for one captures the
// place at that moment, so waits only ever point at work that was submitted earlier, and no circle
// of waits can arise.
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "sim.h"

namespace sim {
namespace {

struct Stream {
  std::mutex lock;
  std::condition_variable changed;
  std::deque<Task> queue;
  uint64_t submitted = 0;
  uint64_t finished = 0;
  bool running = false;          // a thread is inside a task of this stream
  bool draining = false;         // eager mode: a thread runs all that is submitted
  std::optional<Failure> error;  // the first not yet reported
};

struct Place {
  Stream* stream = nullptr;
  uint64_t position = 0;
};
struct Event {
  Place place;
  int queries = 0;
};

std::mutex global;          // what follows, and all events
std::vector<Stream*>& all = *new std::vector<Stream*>;  // never deleted: events may name any
Stream* defaults[kMaxDevices];

// The caller holds the global lock.
Stream* make_stream() {
  all.push_back(new Stream);
  return all.back();
}

Stream& resolve(void* handle) {
  if (handle) return *static_cast<Stream*>(handle);
  // A thread without a device has no default stream of its own; the first device's will do, since
  // torch_npu never submits work from such a thread.
  Stream*& found = defaults[std::max(current_device(), 0)];
  std::lock_guard guard(global);
  if (!found) found = make_stream();
  return *found;
}

// Run the next task, or wait for the one that another thread has begun. The lock is open while a
// task runs. The thread may be anybody's: of what torch does for it - autograd, modes that watch
// operators - a task sees nothing.
void advance(Stream& s, std::unique_lock<std::mutex>& guard) {
  if (s.running) return s.changed.wait(guard);
  Task task = std::move(s.queue.front());
  s.queue.pop_front();
  s.running = true;
  guard.unlock();
  std::optional<Failure> error;
  try {
    enter("task");
    const c10::impl::ForceDispatchKeyGuard plain(
        c10::default_included_set,
        c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    task();
  } catch (const Failure& failure) {
    error = failure;
  } catch (const std::exception& other) {
    error = Failure{kNotSimulated, other.what()};
  }
  task = nullptr;  // what it holds goes before anybody learns that it is done
  guard.lock();
  s.running = false;
  ++s.finished;
  if (!s.error) s.error = error;
  s.changed.notify_all();
}

void run_until(Place place) {
  std::unique_lock guard(place.stream->lock);
  while (place.stream->finished < place.position) advance(*place.stream, guard);
}

void drain(Stream& s) {
  std::unique_lock guard(s.lock);
  while (s.finished < s.submitted) advance(s, guard);
  s.draining = false;
}

Place end_of(Stream& s) {
  std::lock_guard guard(s.lock);
  return {&s, s.submitted};
}

bool reached(Place place) {
  if (!place.stream) return true;
  std::lock_guard guard(place.stream->lock);
  return place.stream->finished >= place.position;
}

// An error is reported once, to whoever waits first.
void finish(Place place) {
  if (!place.stream) return;
  run_until(place);
  std::unique_lock guard(place.stream->lock);
  const std::optional<Failure> error = std::exchange(place.stream->error, std::nullopt);
  if (error) throw *error;
}

// Where an event was when somebody asked.
Place place_of(void* event) {
  std::lock_guard guard(global);
  return static_cast<Event*>(event)->place;
}

}  // namespace

bool lazy() {
  static const bool on = setting("NPUSIM_LAZY", 0) != 0;
  return on;
}

void submit(void* handle, Task task, bool waits) {
  Stream& s = resolve(handle);
  Place mine{&s};
  {
    std::lock_guard guard(s.lock);
    const bool idle = s.finished == s.submitted;
    s.queue.push_back(std::move(task));
    mine.position = ++s.submitted;
    if (lazy()) return;
    if (waits || !idle) {
      if (!s.draining) std::thread(drain, std::ref(s)).detach();
      s.draining = true;
      return;
    }
  }
  finish(mine);
}

void finish_all() {
  std::vector<Stream*> now;
  {
    std::lock_guard guard(global);
    now = all;
  }
  std::vector<Place> ends;
  for (Stream* s : now) ends.push_back(end_of(*s));
  for (Place end : ends) run_until(end);
  for (Place end : ends) finish(end);
}

}  // namespace sim

using namespace sim;

ENTRY(aclrtCreateStream, (void** out), {
  std::lock_guard guard(global);
  *out = make_stream();
})
ALIAS(aclrtCreateStreamWithConfig, aclrtCreateStream)
ENTRY(aclrtSynchronizeStream, (void* handle), finish(end_of(resolve(handle)));)
ALIAS(aclrtSynchronizeStreamWithTimeout, aclrtSynchronizeStream)
ALIAS(aclrtDestroyStream, aclrtSynchronizeStream)
ALIAS(aclrtDestroyStreamForce, aclrtSynchronizeStream)
ENTRY(aclrtSynchronizeDevice, (), finish_all();)
ALIAS(aclrtSynchronizeDeviceWithTimeout, aclrtSynchronizeDevice)

ENTRY(aclrtCreateEventExWithFlag, (void** out, uint32_t), *out = new Event;)
ALIAS(aclrtCreateEventWithFlag, aclrtCreateEventExWithFlag)
ENTRY(aclrtDestroyEvent, (void* handle), {
  std::lock_guard guard(global);
  delete static_cast<Event*>(handle);
})
ENTRY(aclrtRecordEvent, (void* handle, void* stream), {
  const Place place = end_of(resolve(stream));
  std::lock_guard guard(global);
  *static_cast<Event*>(handle) = {place};
})
ENTRY(aclrtStreamWaitEvent, (void* stream, void* handle), {
  const Place place = place_of(handle);
  if (place.stream != &resolve(stream) && !reached(place))
    submit(stream, [=] { run_until(place); }, true);
})
ENTRY(aclrtSynchronizeEvent, (void* handle), finish(place_of(handle));)
// 1 is complete. In lazy mode somebody who keeps asking is waiting, and gets his answer.
ENTRY(aclrtQueryEventStatus, (void* handle, int* status), {
  const Place place = place_of(handle);
  *status = reached(place);
  if (*status || !lazy()) return;
  {
    std::lock_guard guard(global);
    if (++static_cast<Event*>(handle)->queries <= 3) return;
  }
  *status = 1;
  finish(place);
})
