// The threads that the runtime keeps for the whole process: one that stops dispatches in time, and workers that help with
// large ones. They start on first use; a forked child, in which they are gone, starts its own. Nothing here is ever freed,
// so that a process may exit while they run. Knows nothing of kernels.
#pragma once
#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

namespace emu {

int stop_signal();

// A lock that is free in a forked child, whoever held it before. There are only a few, none is ever destroyed.
class ForkSafeLock {
 public:
  ForkSafeLock();
  void lock() { pthread_mutex_lock(&mutex_); }
  void unlock() { pthread_mutex_unlock(&mutex_); }
  pthread_mutex_t *native() { return &mutex_; }

 private:
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
};

// While one lives, `stop` becomes 1 after `limit` seconds and 2 once `*cancel` is nonzero; from then on the threads added
// get the stop signal again and again until they are removed.
class Watch {
 public:
  Watch(std::atomic<int> *stop, double limit, const volatile int32_t *cancel);
  ~Watch();
  Watch(const Watch &) = delete;
  void add(pthread_t t);
  void remove(pthread_t t);

 private:
  friend struct Watchdog;
  std::atomic<int> *stop_;
  double deadline_;
  const volatile int32_t *cancel_;
  std::vector<pthread_t> targets_;
};

// Calls `work` here and, as workers come free, on up to `helpers` other threads; returns when all calls have returned. A
// helper that has not begun when the call here returns never begins. `work` must not throw.
void run_on_hosts(uint32_t helpers, const std::function<void()> &work);

// Gives the calling thread a stack for signals: a fault on a fiber's exhausted stack needs one. Kept until the thread ends.
void need_signal_stack();

double monotonic_seconds();

}  // namespace emu
