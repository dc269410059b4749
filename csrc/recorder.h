// What `jax_mfa.record` asks for: calls of each plan with a histogram of their times, and launches of each kernel. Off until
// asked for; then the end of a call takes a lock.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "plan.h"

namespace launcher {

// Seconds: upper bounds of the histogram's buckets, which has one more beyond the last.
constexpr std::array<double, 16> kBounds = {1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2,
                                            5e-2, 0.1,    0.25, 0.5,  1,      2.5,  5,    10};

class Recorder {
 public:
  using Clock = std::chrono::steady_clock;
  struct Series {
    int64_t calls = 0;
    double seconds = 0;
    std::array<int64_t, kBounds.size() + 1> buckets{};
  };

  // Lives as long as the process, like the statistics.
  static Recorder& get() {
    static auto* made = new Recorder;
    return *made;
  }

  void record(bool on) { on_ = on; }
  bool on() const { return on_; }

  // A call that went well, from its start to the moment before its caller is told.
  void add(const Plan& plan, Clock::time_point start) {
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    size_t bucket = 0;
    while (bucket < kBounds.size() && seconds > kBounds[bucket]) ++bucket;
    std::scoped_lock guard(mutex_);
    Series& series = plans_[plan.name];
    ++series.calls;
    series.seconds += seconds;
    ++series.buckets[bucket];
    for (const DispatchPlan& dispatch : plan.dispatches) ++kernels_[dispatch.kernel];
  }

  // Copies of both, by name.
  std::pair<std::map<std::string, Series>, std::map<std::string, int64_t>> read() {
    std::scoped_lock guard(mutex_);
    return {plans_, kernels_};
  }

 private:
  std::atomic<bool> on_{false};
  std::mutex mutex_;
  std::map<std::string, Series> plans_;
  std::map<std::string, int64_t> kernels_;
};

}  // namespace launcher
