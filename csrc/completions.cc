// A queue and as many threads as were ever busy at the same time; both live as long as the process.
#include "completions.h"

#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <mutex>

namespace launcher {
namespace {

// macOS gives threads 512 KiB unless told. XLA gives its own 8 MiB, which LAPACK needs (jax issue 20428), Python its own 16 MiB,
// and both kinds of code run here. Pages that nobody touches cost nothing.
constexpr size_t kStackBytes = size_t{16} * 1024 * 1024;

struct State {
  std::mutex mutex;
  std::condition_variable wake;
  std::deque<std::function<void()>> queue;
  size_t idle = 0, threads = 0;
};

State& state() {
  static auto* made = new State;
  return *made;
}

void* serve(void*) {
  State& all = state();
  std::unique_lock<std::mutex> lock(all.mutex);
  for (;;) {
    ++all.idle;
    all.wake.wait(lock, [&] { return !all.queue.empty(); });
    --all.idle;
    std::function<void()> work = std::move(all.queue.front());
    all.queue.pop_front();
    lock.unlock();
    work();
    work = nullptr;
    lock.lock();
  }
  return nullptr;
}

bool start_thread() {
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, kStackBytes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_t thread;
  const bool started = pthread_create(&thread, &attributes, serve, nullptr) == 0;
  pthread_attr_destroy(&attributes);
  return started;
}

}  // namespace

void run_elsewhere(std::function<void()> work) {
  State& all = state();
  bool attended = false;
  {
    std::scoped_lock guard(all.mutex);
    all.queue.push_back(std::move(work));
    attended = all.queue.size() <= all.idle;
    if (!attended) ++all.threads;
  }
  if (attended) {
    all.wake.notify_one();
    return;
  }
  if (start_thread()) return;
  // the system gives no more threads: one that gets free takes the work, and where there is none, this one does
  std::unique_lock<std::mutex> lock(all.mutex);
  if (--all.threads > 0 || all.queue.empty()) return;
  work = std::move(all.queue.front());
  all.queue.pop_front();
  lock.unlock();
  work();
}

}  // namespace launcher
