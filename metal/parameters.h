// What every attention kernel is told: sizes, masks and row maps. Filled by the launch plan; knows no kernel.
//
// Letters as everywhere: T queries, S keys, N query heads, K key heads, G = N / K, H and V head sizes.
#pragma once

#include <metal_stdlib>
#include <metal_simdgroup_matrix>

using namespace metal;

// Two sides of the band of visible columns; what a launch does not use is compiled away.
constant bool has_left [[function_constant(0)]];
constant bool has_right [[function_constant(1)]];

struct Parameters {
  int queries;       // T
  int keys;          // S
  int heads;         // N
  int key_heads;     // K
  int left;          // columns from position - left on are visible, where has_left
  int right;         // columns to position + right are visible, where has_right
  int limits_stride; // 3: `limits` has a row for each batch row; 0: one row for all
  int key_rows;      // batch row b reads row (b / repeat) % rows of an operand
  int key_repeat;
  int value_rows;
  int value_repeat;
  float scale;       // of the dot products
  float scale_log2;  // the same times log2(e): the softmax is taken to base 2
};

// The largest finite float stands for a log-sum-exp of minus infinity: a row that sees nothing.
constant constexpr float empty_statistic = 3.40282347e+38f;
constant constexpr float log2_e = 1.44269504088896341f;
constant constexpr float ln_2 = 0.69314718055994531f;

// Element offset of row 0 of a head in an array [rows, length, heads, size]; positions may exceed 2^31 elements.
inline ulong head_offset(int row, int length, int heads, int head, int size) {
  return (ulong(row) * ulong(length) * ulong(heads) + ulong(head)) * ulong(size);
}
