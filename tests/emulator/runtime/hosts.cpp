#include "hosts.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <mutex>

namespace emu {

int stop_signal() { return SIGRTMAX - 3; }

double monotonic_seconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// ---- fork -----------------------------------------------------------------------------------------------------------

namespace {

constexpr unsigned kMostLocks = 8;
ForkSafeLock *locks[kMostLocks];
std::atomic<unsigned> lock_count{0};
void forget_threads();

void before_fork() {
  for (unsigned i = 0; i < lock_count; i++) locks[i]->lock();
}
void after_fork_parent() {
  for (unsigned i = lock_count; i-- > 0;) locks[i]->unlock();
}
void after_fork_child() {
  for (unsigned i = lock_count; i-- > 0;) *locks[i]->native() = PTHREAD_MUTEX_INITIALIZER;
  forget_threads();
}

// A detached thread that takes no signals but those for faults and, where asked, for stopping a kernel.
bool start_thread(void *(*body)(void *), void *argument, bool runs_kernels) {
  sigset_t mask, before;
  sigfillset(&mask);
  for (int s : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) sigdelset(&mask, s);
  if (runs_kernels) sigdelset(&mask, stop_signal());
  pthread_sigmask(SIG_SETMASK, &mask, &before);
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_t thread;
  int error = pthread_create(&thread, &attributes, body, argument);
  pthread_attr_destroy(&attributes);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return error == 0;
}

void make_condition(pthread_cond_t *c) {
  pthread_condattr_t attributes;
  pthread_condattr_init(&attributes);
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  pthread_cond_init(c, &attributes);
  pthread_condattr_destroy(&attributes);
}

}  // namespace

ForkSafeLock::ForkSafeLock() {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(before_fork, after_fork_parent, after_fork_child); });
  unsigned i = lock_count;
  if (i >= kMostLocks) abort();
  locks[i] = this;
  lock_count = i + 1;
}

// ---- the watchdog ---------------------------------------------------------------------------------------------------

struct Watchdog {
  ForkSafeLock lock;
  pthread_cond_t wake;
  bool running = false;
  double planned = INFINITY;  // when the thread looks next; a later deadline need not wake it
  std::vector<Watch *> watches;

  Watchdog() { make_condition(&wake); }

  void add(Watch *w) {
    std::lock_guard<ForkSafeLock> guard(lock);
    if (!running) running = start_thread(body, this, false);
    watches.push_back(w);
    double wanted = w->cancel_ ? std::min(w->deadline_, monotonic_seconds() + 0.02) : w->deadline_;
    if (wanted < planned) pthread_cond_signal(&wake);
  }

  void remove(Watch *w) {
    std::lock_guard<ForkSafeLock> guard(lock);
    watches.erase(std::remove(watches.begin(), watches.end(), w), watches.end());
  }

  static void *body(void *argument) {
    Watchdog &self = *(Watchdog *)argument;
    self.lock.lock();
    for (;;) {
      double now = monotonic_seconds(), next = INFINITY;
      for (Watch *w : self.watches) {
        if (!w->stop_->load() && w->deadline_ <= now) *w->stop_ = 1;
        if (!w->stop_->load() && w->cancel_ && *w->cancel_) *w->stop_ = 2;
        bool stopping = w->stop_->load() != 0;
        if (stopping)
          for (pthread_t t : w->targets_) pthread_kill(t, stop_signal());
        next = std::min(next, stopping ? now + 0.002 : w->cancel_ ? std::min(w->deadline_, now + 0.02) : w->deadline_);
      }
      self.planned = next;
      if (std::isinf(next)) {
        pthread_cond_wait(&self.wake, self.lock.native());
      } else {
        timespec until{(time_t)next, (long)((next - std::floor(next)) * 1e9)};
        pthread_cond_timedwait(&self.wake, self.lock.native(), &until);
      }
    }
    return nullptr;
  }
};

// ---- the workers ----------------------------------------------------------------------------------------------------

namespace {

struct Job {
  const std::function<void()> *work;
  uint32_t wanted, running;
};

struct Workers {
  ForkSafeLock lock;
  pthread_cond_t work, done;
  std::deque<Job *> jobs;  // those which want more helpers
  uint32_t count = 0, idle = 0;

  Workers() { make_condition(&work), make_condition(&done); }

  static void *body(void *argument) {
    Workers &self = *(Workers *)argument;
    self.lock.lock();
    for (;;) {
      if (self.jobs.empty()) {
        self.idle++;
        pthread_cond_wait(&self.work, self.lock.native());
        self.idle--;
        continue;
      }
      Job *job = self.jobs.front();
      if (--job->wanted == 0) self.jobs.pop_front();
      job->running++;
      self.lock.unlock();
      (*job->work)();
      self.lock.lock();
      if (--job->running == 0) pthread_cond_broadcast(&self.done);
    }
    return nullptr;
  }
};

Watchdog *the_watchdog = new Watchdog;
Workers *the_workers = new Workers;

void forget_threads() {
  the_watchdog->running = false;
  the_watchdog->planned = INFINITY;
  the_watchdog->watches.clear();
  make_condition(&the_watchdog->wake);
  the_workers->jobs.clear();
  the_workers->count = the_workers->idle = 0;
  make_condition(&the_workers->work);
  make_condition(&the_workers->done);
}

}  // namespace

Watch::Watch(std::atomic<int> *stop, double limit, const volatile int32_t *cancel) : stop_(stop), deadline_(monotonic_seconds() + limit), cancel_(cancel) {
  the_watchdog->add(this);
}
Watch::~Watch() { the_watchdog->remove(this); }
void Watch::add(pthread_t t) {
  std::lock_guard<ForkSafeLock> guard(the_watchdog->lock);
  targets_.push_back(t);
}
void Watch::remove(pthread_t t) {
  std::lock_guard<ForkSafeLock> guard(the_watchdog->lock);
  for (size_t i = 0; i < targets_.size(); i++)
    if (pthread_equal(targets_[i], t)) {
      targets_.erase(targets_.begin() + (long)i);
      break;
    }
}

void run_on_hosts(uint32_t helpers, const std::function<void()> &work) {
  if (!helpers) return work();
  Workers &w = *the_workers;
  Job job{&work, helpers, 0};
  w.lock.lock();
  w.jobs.push_back(&job);
  while (w.count < helpers && start_thread(Workers::body, &w, true)) w.count++;
  for (uint32_t i = std::min(helpers, w.idle); i > 0; i--) pthread_cond_signal(&w.work);
  w.lock.unlock();
  work();
  w.lock.lock();
  auto at = std::find(w.jobs.begin(), w.jobs.end(), &job);
  if (at != w.jobs.end()) w.jobs.erase(at);
  while (job.running) pthread_cond_wait(&w.done, w.lock.native());
  w.lock.unlock();
}

// ---- the signal stack -----------------------------------------------------------------------------------------------

namespace {

struct SignalStack {
  void *memory = nullptr;
  void install() {
    stack_t s;
    if (sigaltstack(nullptr, &s) != 0 || !(s.ss_flags & SS_DISABLE)) return;  // there is one, ours or another's
    if (!memory && !(memory = malloc(64 << 10))) return;
    memset(&s, 0, sizeof s);
    s.ss_sp = memory;
    s.ss_size = 64 << 10;
    sigaltstack(&s, nullptr);
  }
  ~SignalStack() {
    if (!memory) return;
    stack_t s;
    if (sigaltstack(nullptr, &s) == 0 && s.ss_sp == memory) {
      s.ss_flags = SS_DISABLE;
      sigaltstack(&s, nullptr);
    }
    free(memory);
  }
};
thread_local SignalStack signal_stack;

}  // namespace

void need_signal_stack() { signal_stack.install(); }

}  // namespace emu
