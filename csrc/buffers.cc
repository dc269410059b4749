// Wrapping pages, and the staging pool.
#include "buffers.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "error.h"
#include "statistics.h"

namespace launcher {
namespace {

// Apple silicon's page. A process under Rosetta, or a host that only acts as one, sees smaller ones; a multiple does no harm.
constexpr uint64_t kApplePage = 16384;
constexpr uint64_t kAlignment = 16;    // of the widest type that a kernel loads at once
constexpr uint64_t kPlaceholder = 16;  // bytes bound in place of none, which Metal does not have

std::atomic<uint64_t> g_stage_shared_lines{0};

uint64_t key_of(uint64_t bytes, bool marked) { return bytes * 2 + marked; }

uint64_t cost_of(uint64_t bytes) { return (bytes + page_size() - 1) / page_size() * page_size(); }

}  // namespace

uint64_t stage_shared_lines(uint64_t below) { return g_stage_shared_lines.exchange(below); }

uint64_t page_size() {
  static const uint64_t size = std::max<uint64_t>(kApplePage, static_cast<uint64_t>(sysconf(_SC_PAGESIZE)));
  return size;
}

StagingPool::~StagingPool() {
  for (auto& entry : idle_) drop(entry.second);
}

void StagingPool::drop(std::vector<MTL::Buffer*>& buffers) {
  for (MTL::Buffer* buffer : buffers) {
    count(statistics().staging_bytes, -static_cast<int64_t>(buffer->length()));
    buffer->release();
  }
  buffers.clear();
}

MTL::Buffer* StagingPool::take(MTL::Device* device, uint64_t bytes, bool marked, const NS::String* marker) {
  {
    std::scoped_lock guard(mutex_);
    auto found = idle_.find(key_of(bytes, marked));
    if (found != idle_.end() && !found->second.empty()) {
      MTL::Buffer* buffer = found->second.back();
      found->second.pop_back();
      idle_bytes_ -= cost_of(bytes);
      return buffer;
    }
  }
  MTL::Buffer* buffer = device->newBuffer(bytes, MTL::ResourceStorageModeShared);
  if (!buffer) return nullptr;
  if (marked) buffer->addDebugMarker(marker, NS::Range(0, bytes));
  count(statistics().staging_bytes, static_cast<int64_t>(bytes));
  return buffer;
}

void StagingPool::give(MTL::Buffer* buffer, bool marked) {
  const uint64_t bytes = buffer->length();
  std::scoped_lock guard(mutex_);
  if (idle_bytes_ + cost_of(bytes) > kMostIdleBytes) {
    for (auto& entry : idle_) drop(entry.second);
    idle_.clear();
    idle_bytes_ = 0;
  }
  std::vector<MTL::Buffer*>& alike = idle_[key_of(bytes, marked)];
  alike.push_back(buffer);
  if (cost_of(bytes) > kMostIdleBytes) drop(alike);
  else idle_bytes_ += cost_of(bytes);
}

Binding bind(MTL::Device* device, StagingPool& pool, void* data, uint64_t bytes, Use use, const NS::String* marker, bool whole) {
  Binding out;
  out.bytes = bytes;
  const auto start = reinterpret_cast<uintptr_t>(data);
  const bool lines_shared = use != Use::kRead && (start % kLineBytes || (start + bytes) % kLineBytes);
  const uint64_t most_staged = lines_shared ? std::max(kStagedBytes + 1, g_stage_shared_lines.load()) - 1 : kStagedBytes;
  if (bytes > most_staged && start % kAlignment == 0) {
    out.offset = start % page_size();
    const uint64_t length = (out.offset + bytes + page_size() - 1) / page_size() * page_size();
    out.buffer = device->newBuffer(static_cast<char*>(data) - out.offset, length, MTL::ResourceStorageModeShared, nullptr);
    if (out.buffer) {
      out.buffer->addDebugMarker(marker, NS::Range(out.offset, bytes));
      count(statistics().buffers_no_copy);
      if (use != Use::kScratch) count(statistics().bytes_no_copy, static_cast<int64_t>(bytes));
      return out;
    }
    out.offset = 0;
  }
  out.staged = true;
  out.marked = whole && bytes > 0;
  out.buffer = pool.take(device, bytes ? bytes : kPlaceholder, out.marked, marker);
  if (!out.buffer)
    throw Error(Cause::kOutOfMemory,
                "Metal gave no buffer of " + std::to_string(bytes) + " bytes: let arrays go, or divide the batch");
  if (bytes == 0) return out;
  if (use == Use::kRead || use == Use::kUpdated) std::memcpy(out.buffer->contents(), data, bytes);
  if (use == Use::kWritten || use == Use::kUpdated) out.copy_to = data;
  count(statistics().buffers_staged);
  if (use != Use::kScratch) count(statistics().bytes_staged, static_cast<int64_t>(bytes));
  return out;
}

void unbind(StagingPool& pool, const Binding& binding) {
  if (binding.staged) pool.give(binding.buffer, binding.marked);
  else binding.buffer->release();
}

}  // namespace launcher
