// Memory of a call as Metal buffers. Large ranges are not copied: the pages that cover them are wrapped and bound with an
// offset. Small ones, and those that Metal will not wrap, are staged: copied through a buffer of exactly their size, taken from
// a pool. Knows nothing of kernels.
//
// Since covering pages hold more than the range meant, the range is marked (addDebugMarker), which a frame capture shows and
// the emulated device holds kernels to. A marker that starts with "output" promises that a dispatch writes all of it.
#pragma once

#include <Foundation/Foundation.hpp>
#include <Metal/Metal.hpp>

#include <mutex>
#include <unordered_map>
#include <vector>

namespace launcher {

// At most this many bytes are staged: copying them costs less than mapping pages into the GPU's address space.
constexpr uint64_t kStagedBytes = uint64_t{32} * 1024;

// Unused staging buffers are let go when they hold more than this.
constexpr uint64_t kMostIdleBytes = uint64_t{64} * 1024 * 1024;

// Lines of this size are the largest that a CPU or GPU of Apple's caches. XLA aligns to less, so a line may hold the end of what
// kernels write and the start of what the CPU does.
constexpr uint64_t kLineBytes = 128;

// Ranges of fewer bytes that kernels write, and that share a line with other memory, are staged from here on; 0, as at first: none
// but those that are staged anyway. Answers the last setting.
uint64_t stage_shared_lines(uint64_t below);

uint64_t page_size();

// Staging buffers by exact size, so that a kernel that leaves its range leaves its buffer.
class StagingPool {
 public:
  ~StagingPool();
  // A shared buffer of `bytes`, marked with `marker` where that is not nil; nullptr where Metal has none.
  MTL::Buffer* take(MTL::Device* device, uint64_t bytes, bool marked, const NS::String* marker);
  void give(MTL::Buffer* buffer, bool marked);

 private:
  static void drop(std::vector<MTL::Buffer*>& buffers);
  std::mutex mutex_;
  std::unordered_map<uint64_t, std::vector<MTL::Buffer*>> idle_;  // by 2 bytes + marked
  uint64_t idle_bytes_ = 0;
};

// One range of memory bound for one call.
struct Binding {
  MTL::Buffer* buffer = nullptr;  // a reference of its own
  uint64_t offset = 0;
  bool staged = false, marked = false;
  void* copy_to = nullptr;  // where a staged result belongs once the kernels are done
  uint64_t bytes = 0;
};

// What to do with the range: kRead is copied in, kWritten copied out, kUpdated both, kScratch neither.
enum class Use { kRead, kWritten, kUpdated, kScratch };

// Throws Error(kOutOfMemory).
Binding bind(MTL::Device* device, StagingPool& pool, void* data, uint64_t bytes, Use use, const NS::String* marker, bool whole);
void unbind(StagingPool& pool, const Binding& binding);

}  // namespace launcher
