// A queue and as many threads as were ever busy at the same time; both live as long as the process.
#include "completions.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

namespace launcher {
namespace {

struct State {
  std::mutex mutex;
  std::condition_variable wake;
  std::deque<std::function<void()>> queue;
  size_t idle = 0;
};

State& state() {
  static auto* made = new State;
  return *made;
}

void serve() {
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
}

}  // namespace

void run_elsewhere(std::function<void()> work) {
  State& all = state();
  bool attended = false;
  {
    std::lock_guard<std::mutex> guard(all.mutex);
    all.queue.push_back(std::move(work));
    attended = all.queue.size() <= all.idle;
  }
  if (attended) all.wake.notify_one();
  else std::thread(serve).detach();
}

}  // namespace launcher
