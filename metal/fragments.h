// 8×8 fragments of the matrix unit: loading with limits, storing, reductions along rows, and products that leave out
// what is invisible. Knows lanes and elements, not attention.
#pragma once

#include "parameters.h"

template <typename T>
using Fragment = simdgroup_matrix<T, 8, 8>;

// Lane b4…b0 holds row 4·b4 + 2·b2 + b1 and the columns 4·b3 + 2·b0 and one more.
struct Lane {
  int row;
  int column;

  Lane(ushort lane) {
    row = (lane >> 4) * 4 + ((lane >> 1) & 3);
    column = ((lane >> 3) & 1) * 4 + (lane & 1) * 2;
  }
};

// The lane that holds (row, column).
inline ushort lane_of(int row, int column) {
  return ushort((row >> 2) * 16 + (row & 3) * 2 + (column >> 2) * 8 + ((column >> 1) & 1));
}

inline float row_max(float x) {
  x = max(x, simd_shuffle_xor(x, ushort(1)));
  return max(x, simd_shuffle_xor(x, ushort(8)));
}

inline float row_sum(float x) {
  x += simd_shuffle_xor(x, ushort(1));
  return x + simd_shuffle_xor(x, ushort(8));
}

// Elements outside rows × columns are zero and are not read.
template <typename T>
inline Fragment<T> load_rows(device const T* source, ulong stride, int rows, int columns, Lane lane) {
  Fragment<T> result;
  if (rows >= 8 && columns >= 8) {
    simdgroup_load(result, source, stride);
  } else {
    const bool row = lane.row < rows;
    device const T* at = source + ulong(lane.row) * stride + ulong(lane.column);
    result.thread_elements()[0] = row && lane.column < columns ? at[0] : T(0);
    result.thread_elements()[1] = row && lane.column + 1 < columns ? at[1] : T(0);
  }
  return result;
}

// The same of the transpose: element (i, j) is source[j, i], and `rows` limits j.
template <typename T>
inline Fragment<T> load_transposed(device const T* source, ulong stride, int rows, int columns, Lane lane) {
  Fragment<T> result;
  if (rows >= 8 && columns >= 8) {
    simdgroup_load(result, source, stride, ulong2(0), true);
  } else {
    const bool column = lane.row < columns;
    device const T* at = source + ulong(lane.column) * stride + ulong(lane.row);
    result.thread_elements()[0] = column && lane.column < rows ? at[0] : T(0);
    result.thread_elements()[1] = column && lane.column + 1 < rows ? at[stride] : T(0);
  }
  return result;
}

template <typename T>
inline void store_rows(
    Fragment<float> x, float factor, device T* destination, ulong stride, int rows, int columns, Lane lane) {
  device T* at = destination + ulong(lane.row) * stride + ulong(lane.column);
  if (lane.row < rows && lane.column < columns) {
    at[0] = T(x.thread_elements()[0] * factor);
  }
  if (lane.row < rows && lane.column + 1 < columns) {
    at[1] = T(x.thread_elements()[1] * factor);
  }
}

// A weight of -0 marks an invisible pair: in a product it adds nothing, and a slower product can tell it from 0. A sum of
// weights that starts from -0 is -0 only if all were invisible.
constant constexpr uint invisible_bits = 0x80000000u;

inline float invisible_weight() {
  return as_type<float>(invisible_bits);
}

inline bool is_invisible(float weight) {
  return as_type<uint>(weight) == invisible_bits;
}

inline bool is_finite(float x) {
  return (as_type<uint>(x) & 0x7F800000u) != 0x7F800000u;
}

// sum += weights · operand. Where pairs may be invisible, NaN and infinity in the operand reach visible ones only: such
// fragments are rare, and multiplied element by element.
template <typename T>
inline void multiply_visible(
    thread Fragment<float>& sum, Fragment<float> weights, Fragment<T> operand, bool careful, Lane lane) {
  if (careful) {
    const float left = float(operand.thread_elements()[0]);
    const float right = float(operand.thread_elements()[1]);
    if (simd_any(!is_finite(left) || !is_finite(right))) {
      for (int k = 0; k < 8; ++k) {
        const float even = simd_shuffle(float(weights.thread_elements()[0]), lane_of(lane.row, k));
        const float odd = simd_shuffle(float(weights.thread_elements()[1]), lane_of(lane.row, k));
        const float weight = (k & 1) ? odd : even;
        const float x = simd_shuffle(left, lane_of(k, lane.column));
        const float y = simd_shuffle(right, lane_of(k, lane.column));
        if (!is_invisible(weight)) {
          sum.thread_elements()[0] += weight * x;
          sum.thread_elements()[1] += weight * y;
        }
      }
      return;
    }
  }
  simdgroup_multiply_accumulate(sum, weights, operand, sum);
}
