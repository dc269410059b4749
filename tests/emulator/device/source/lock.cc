// Fork handling for lock.h. Locks are leaked on purpose: threads may outlive static destructors.
#include "lock.h"

#include <atomic>

namespace device {
namespace {

Lock* g_locks[static_cast<int>(Rank::kCount)];
void (*g_child_hook)();
std::atomic<bool> g_forked{false};

void prepare() {
  for (Lock* lock : g_locks)
    if (lock) lock->lock();
}

void parent() {
  for (int i = static_cast<int>(Rank::kCount) - 1; i >= 0; --i)
    if (g_locks[i]) g_locks[i]->unlock();
}

void child() {
  for (Lock* lock : g_locks)
    if (lock) lock->reset();
  g_forked = true;
  if (g_child_hook) g_child_hook();
}

}  // namespace

Lock::Lock(Rank rank) {
  static bool registered = [] {
    pthread_atfork(prepare, parent, child);
    return true;
  }();
  (void)registered;
  g_locks[static_cast<int>(rank)] = this;
}

void set_fork_child_hook(void (*hook)()) { g_child_hook = hook; }
bool in_forked_child() { return g_forked; }

}  // namespace device
