// Forward flash attention, one head: 32 query rows per threadgroup, 4 simdgroups of 8 rows, K and V staged in threadgroup memory.
// The suite's speed test and its largest program that must run without a report.
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;

constant uint kHead = 64;
constant uint kRows = 32;
constant uint kColumns = 32;
constant uint kSimdgroups = 4;

struct Shape {
  uint queries, keys;
  float scale;
};

// Stages rows [first, first + 32) of a [keys, 64] array; rows beyond the end become zeros.
static void stage(device const float *source, threadgroup float *tile, uint first, uint keys, uint thread_index) {
  for (uint i = thread_index; i < kColumns * kHead / 4; i += kSimdgroups * 32) {
    uint row = i / (kHead / 4), column = i % (kHead / 4) * 4;
    float4 value = 0;
    if (first + row < keys) value = *(device const float4 *)(source + (first + row) * kHead + column);
    *(threadgroup float4 *)(tile + row * kHead + column) = value;
  }
}

kernel void attention(device const float *q [[buffer(0)]], device const float *k [[buffer(1)]], device const float *v [[buffer(2)]],
                      device float *out [[buffer(3)]], constant Shape &shape [[buffer(4)]], uint group [[threadgroup_position_in_grid]],
                      uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                      uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float k_tile[kColumns * kHead];
  threadgroup float v_tile[kColumns * kHead];
  const uint row = (lane >> 2 & 4) | (lane >> 1 & 3);
  const uint first_row = group * kRows + simdgroup * 8;

  simdgroup_float8x8 query[kHead / 8], sum[kHead / 8];
  for (uint d = 0; d < kHead / 8; d++) {
    simdgroup_load(query[d], q + first_row * kHead, kHead, ulong2(d * 8, 0));
    sum[d] = make_filled_simdgroup_matrix<float, 8>(0.0f);
  }
  float row_max = -INFINITY, row_sum = 0;

  for (uint first = 0; first < shape.keys; first += kColumns) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage(k, k_tile, first, shape.keys, thread_index);
    stage(v, v_tile, first, shape.keys, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    simdgroup_float8x8 score[kColumns / 8];
    for (uint c = 0; c < kColumns / 8; c++) {
      score[c] = make_filled_simdgroup_matrix<float, 8>(0.0f);
      for (uint d = 0; d < kHead / 8; d++) {
        simdgroup_float8x8 key;
        simdgroup_load(key, k_tile + c * 8 * kHead, kHead, ulong2(0, d * 8), true);
        simdgroup_multiply_accumulate(score[c], query[d], key, score[c]);
      }
    }
    float new_max = row_max;
    for (uint c = 0; c < kColumns / 8; c++) {
      thread float2 &s = score[c].thread_elements();
      uint column = first + c * 8 + ((lane >> 1 & 4) | (lane << 1 & 2));
      s *= shape.scale * M_LOG2E_F;
      if (column >= shape.keys) s.x = -INFINITY;
      if (column + 1 >= shape.keys) s.y = -INFINITY;
      new_max = max(new_max, max(s.x, s.y));
    }
    new_max = max(new_max, simd_shuffle_xor(new_max, 1));
    new_max = max(new_max, simd_shuffle_xor(new_max, 8));
    float factor = fast::exp2(row_max - new_max), partial = 0;
    row_max = new_max;
    for (uint c = 0; c < kColumns / 8; c++) {
      thread float2 &s = score[c].thread_elements();
      s = fast::exp2(s - new_max);
      partial += s.x + s.y;
    }
    partial += simd_shuffle_xor(partial, 1);
    partial += simd_shuffle_xor(partial, 8);
    row_sum = row_sum * factor + partial;
    for (uint d = 0; d < kHead / 8; d++) {
      sum[d].thread_elements() *= factor;
      for (uint c = 0; c < kColumns / 8; c++) {
        simdgroup_float8x8 value;
        simdgroup_load(value, v_tile + c * 8 * kHead, kHead, ulong2(d * 8, 0));
        simdgroup_multiply_accumulate(sum[d], score[c], value, sum[d]);
      }
    }
  }
  if (first_row + 8 > shape.queries) return;
  for (uint d = 0; d < kHead / 8; d++) {
    sum[d].thread_elements() /= row_sum;
    simdgroup_store(sum[d], out + first_row * kHead, kHead, ulong2(d * 8, 0));
  }
  (void)row;
}
