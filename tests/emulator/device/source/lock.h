// A mutex that a forked child finds usable: every lock of the library is taken before fork and given back on both sides.
// Knows nothing of what it guards.
#pragma once

#include <pthread.h>

namespace device {

// Order in which locks nest, outermost first; fork takes them in this order.
enum class Rank { kClasses, kQueues, kOptions, kReports, kObjects, kCount };

class Lock {
 public:
  explicit Lock(Rank rank);
  void lock() { pthread_mutex_lock(&mutex_); }
  void unlock() { pthread_mutex_unlock(&mutex_); }
  pthread_mutex_t* native() { return &mutex_; }
  void reset() { mutex_ = PTHREAD_MUTEX_INITIALIZER; }

 private:
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
};

class Guard {
 public:
  explicit Guard(Lock& lock) : lock_(lock) { lock_.lock(); }
  ~Guard() { lock_.unlock(); }
  Guard(const Guard&) = delete;

 private:
  Lock& lock_;
};

// Called in a forked child, when every lock is free again.
void set_fork_child_hook(void (*hook)());
bool in_forked_child();

}  // namespace device
