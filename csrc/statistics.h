// Counts of what the launcher did since the module was loaded or reset, for tests and for `check`. Only ever added to.
#pragma once

#include <atomic>
#include <cstdint>

namespace launcher {

struct Statistics {
  std::atomic<int64_t> calls{0}, failures{0}, command_buffers{0}, dispatches{0}, barriers{0};
  std::atomic<int64_t> buffers_no_copy{0}, buffers_staged{0}, bytes_no_copy{0}, bytes_staged{0};
  std::atomic<int64_t> libraries{0}, pipelines{0}, pipelines_loaded{0}, pipelines_kept{0}, plans{0};
  std::atomic<int64_t> retries{0};        // of calls that another one's error took with it
  std::atomic<int64_t> in_flight{0};      // calls committed and not finished; not cleared by a reset
  std::atomic<int64_t> staging_bytes{0};  // held by staging buffers, in use or waiting for use; likewise
};

// Lives as long as the process: a completion may count when everything else is being taken down.
inline Statistics& statistics() {
  static auto* made = new Statistics;
  return *made;
}

inline void count(std::atomic<int64_t>& counter, int64_t amount = 1) { counter.fetch_add(amount, std::memory_order_relaxed); }

}  // namespace launcher
