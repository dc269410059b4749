// New tokens into pages of a pool, in place and quantised on their way; before that, copies of pages that sequences had shared.
#include "core/encode.h"
#include "core/stored.h"

constant bool has_scales [[function_constant(100)]];  // which parts the pool has
constant bool has_zeros [[function_constant(101)]];

struct AppendSizes {
  int tokens;
  int heads;
  int slots;  // tokens that the pool has room for
};

// A simdgroup for each new token and head. A token whose slot is none of the pool's is not written.
template <typename Encoding, int SIZE, int SIMDGROUPS>
[[kernel, max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] void append_tokens(
    device const typename Encoding::Number* tokens [[buffer(0)]],  // [tokens, heads, SIZE]
    device const int* slots [[buffer(1)]],                         // [tokens]
    device typename Encoding::Data* data [[buffer(2)]],            // [slots, heads, …]
    device typename Encoding::Number* scales [[buffer(3), function_constant(has_scales)]],  // [slots, heads, groups]
    device typename Encoding::Number* zeros [[buffer(4), function_constant(has_zeros)]],
    constant AppendSizes& sizes [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]],  // (SIMDGROUPS tokens, head)
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  constexpr int groups = Token<Encoding, SIZE>::groups;
  constexpr int block = groups == 1 ? SIZE : Encoding::channels;
  threadgroup float blocks[SIMDGROUPS * groups * 2];
  threadgroup float* own = blocks + simdgroup * groups * 2;
  const int token = int(group.x) * SIMDGROUPS + simdgroup;
  const int slot = token < sizes.tokens ? slots[token] : -1;
  if (slot < 0 || slot >= sizes.slots) {
    return;
  }
  const ulong heads = uint(sizes.heads);
  device const typename Encoding::Number* row = tokens + (ulong(uint(token)) * heads + group.y) * ulong(SIZE);
  const ulong at = ulong(uint(slot)) * heads + group.y;
  for (int g = 0; g < (Encoding::scaled ? groups : 0); ++g) {
    float low = INFINITY;
    float high = -INFINITY;
    bool spoilt = false;
    for (int i = g * block + lane; i < min((g + 1) * block, SIZE); i += 32) {
      const float x = float(row[i]);
      low = min(low, x);
      high = max(high, x);
      spoilt = spoilt || !is_finite(x);
    }
    const Block<Encoding> found(simd_min(low), simd_max(high), simd_any(spoilt));
    if (lane == 0) {
      own[2 * g] = float(found.scale);
      own[2 * g + 1] = float(found.zero);
      scales[at * groups + g] = found.scale;
      if (Encoding::zeroed) {
        zeros[at * groups + g] = found.zero;
      }
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = lane; i < Encoding::room(SIZE); i += 32) {
    data[at * ulong(Encoding::room(SIZE)) + i] = piece<SIZE>(Encoding(), row, own, i);
  }
}

// Pages of a part of the pool to other pages, four bytes at a time; what is no page is left out.
template <int THREADS>
[[kernel, max_total_threads_per_threadgroup(THREADS)]] void copy_pages(
    device uint* part [[buffer(0)]],           // [pages, words]
    device const int* sources [[buffer(1)]],
    device const int* targets [[buffer(2)]],
    constant uint2& sizes [[buffer(3)]],       // words of a page, pages
    uint3 group [[threadgroup_position_in_grid]],  // (part of a page, copy)
    uint3 groups [[threadgroups_per_grid]],
    ushort thread_index [[thread_index_in_threadgroup]]) {
  const int source = sources[group.y];
  const int target = targets[group.y];
  if (target < 0 || uint(target) >= sizes.y || source < 0 || uint(source) >= sizes.y) {
    return;
  }
  for (uint i = group.x * THREADS + thread_index; i < sizes.x; i += groups.x * THREADS) {
    part[ulong(uint(target)) * sizes.x + i] = part[ulong(uint(source)) * sizes.x + i];
  }
}
