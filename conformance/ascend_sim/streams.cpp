// Streams and events, eager and lazy.
//
// A stream is a queue, and a thread that runs what has been asked for. Eager: that is everything,
// and whoever submits a task to an idle stream waits for it, unless it is one that has to wait for
// another stream or rank. Lazy (NPUSIM_LAZY=1): tasks wait until something asks for them - a
// synchronisation, an event, a repeated query - so that a forgotten wait gives wrong data every
// time, not now and then.
//
// An event is a place: a stream and how much had been submitted to it. Waiting for one captures the
// place at that moment, so waits only ever point at work that was submitted earlier, and no circle
// of waits can arise.
#include <condition_variable>
#include <deque>
#include <thread>

#include "sim.h"

using namespace std::chrono_literals;

namespace sim {
namespace {

struct Stream {
  std::condition_variable changed;
  std::deque<std::function<Failure()>> queue;
  uint64_t submitted = 0, wanted = 0, finished = 0;  // tasks so far
  bool has_thread = false;
  Failure error;  // the first not yet reported
};

Stream& nowhere = *new Stream;
struct Place {
  Stream* stream = &nowhere;
  uint64_t position = 0;
};
struct Event {
  Place place;
  int queries = 0;
};

// One lock for streams and events. Whoever calls a function of a stream or a place holds it; it is
// open while a task runs and while somebody waits.
using Lock = std::unique_lock<std::mutex>;
std::mutex mutex;
std::deque<Stream>& streams = *new std::deque<Stream>(kMaxDevices);  // the devices' own come first

Stream& resolve(void* handle) {
  // A thread without a device has no default stream of its own; the first device's will do, since
  // torch_npu never submits work from such a thread.
  return handle ? *static_cast<Stream*>(handle) : streams[std::max(current_device(), 0)];
}

// A thread that has had nothing to do for a while ends: torch makes many streams and uses few.
void work(Stream& s) {
  Lock lock(mutex);
  while (s.changed.wait_for(lock, 200ms, [&] { return s.finished < s.wanted; })) {
    auto next = std::move(s.queue.front());
    s.queue.pop_front();
    lock.unlock();
    const Failure failure = next();
    next = nullptr;  // what it holds goes before anybody learns that it is done
    lock.lock();
    ++s.finished;
    if (!s.error.code) s.error = failure;
    s.changed.notify_all();
  }
  s.has_thread = false;
}

void start(Place place) {
  Stream& s = *place.stream;
  if (place.position <= s.wanted) return;
  s.wanted = place.position;
  if (!std::exchange(s.has_thread, true)) std::thread(work, std::ref(s)).detach();
  s.changed.notify_all();
}

Place end_of(Stream& s) { return {&s, s.submitted}; }
bool reached(Place place) { return place.stream->finished >= place.position; }

void wait_for(Place place, Lock& lock) {
  start(place);
  place.stream->changed.wait(lock, [&] { return reached(place); });
}

// An error is reported once, to whoever waits first.
void finish(Place place, Lock& lock) {
  wait_for(place, lock);
  const Failure error = std::exchange(place.stream->error, {});
  if (error.code) throw error;
}

}  // namespace

void submit(void* handle, Task task, bool waits) {
  Lock lock(mutex);
  Stream& s = resolve(handle);
  const bool idle = reached(end_of(s));
  // Its errors are those of the call that submits it.
  s.queue.push_back([call = current_call(), task = std::move(task)] {
    return attempt(call, [&] {
      enter("task");
      task();
    });
  });
  ++s.submitted;
  if (lazy) return;
  const Place mine = end_of(s);
  start(mine);
  if (idle && !waits) finish(mine, lock);
}

void finish_all() {
  Lock lock(mutex);
  std::vector<Place> ends;
  for (Stream& s : streams) ends.push_back(end_of(s));
  for (Place end : ends) start(end);
  for (Place end : ends) wait_for(end, lock);
  for (Place end : ends) finish(end, lock);
}

}  // namespace sim

using namespace sim;

ENTRY(aclrtCreateStream, (void** out), {
  Lock lock(mutex);
  *out = &streams.emplace_back();
})
ALIAS(aclrtCreateStreamWithConfig, aclrtCreateStream)
ENTRY(aclrtSynchronizeStream, (void* handle), {
  Lock lock(mutex);
  finish(end_of(resolve(handle)), lock);
})
ALIAS(aclrtSynchronizeStreamWithTimeout, aclrtSynchronizeStream)
ALIAS(aclrtDestroyStream, aclrtSynchronizeStream)
ALIAS(aclrtDestroyStreamForce, aclrtSynchronizeStream)
ENTRY(aclrtSynchronizeDevice, (), finish_all();)
ALIAS(aclrtSynchronizeDeviceWithTimeout, aclrtSynchronizeDevice)

ENTRY(aclrtCreateEventExWithFlag, (Event** out, uint32_t), *out = new Event;)
ALIAS(aclrtCreateEventWithFlag, aclrtCreateEventExWithFlag)
ENTRY(aclrtDestroyEvent, (Event* event), {
  Lock lock(mutex);
  delete event;
})
ENTRY(aclrtRecordEvent, (Event* event, void* stream), {
  Lock lock(mutex);
  *event = {end_of(resolve(stream))};
})
ENTRY(aclrtStreamWaitEvent, (void* stream, Event* event), {
  Lock lock(mutex);
  const Place place = event->place;
  if (place.stream == &resolve(stream) || reached(place)) return;
  lock.unlock();
  submit(stream, [place] {
    Lock inside(mutex);
    wait_for(place, inside);
  }, true);
})
ENTRY(aclrtSynchronizeEvent, (Event* event), {
  Lock lock(mutex);
  finish(Place(event->place), lock);
})
// 1 is complete. In lazy mode somebody who keeps asking is waiting, and gets his answer.
ENTRY(aclrtQueryEventStatus, (Event* event, int* status), {
  Lock lock(mutex);
  const Place place = event->place;
  *status = reached(place);
  if (*status || !lazy || ++event->queries <= 3) return;
  finish(place, lock);
  *status = 1;
})
