// 8×8 fragments of the matrix unit: where a lane's elements lie, loads, stores, reductions along rows. Knows nothing else.
#pragma once

#include <metal_stdlib>
#include <metal_simdgroup_matrix>

using namespace metal;

// Registers have no address: every loop that indexes an array of fragments is unrolled, and every function that is given one is
// inlined, methods too. ROLLED stands where code must stay small.
#define INLINED inline __attribute__((always_inline))
#define UNROLLED _Pragma("clang loop unroll(full)")
#define ROLLED _Pragma("clang loop unroll(disable)")
#define FEW _Pragma("clang loop unroll_count(4)")  // rounds at once, so that loads overlap
#define EIGHT _Pragma("clang loop unroll_count(8)")

template <typename T>
using Fragment = simdgroup_matrix<T, 8, 8>;

// Lane b4…b0 holds row 4·b4 + 2·b2 + b1 and the columns 4·b3 + 2·b0 and one more.
struct Lane {
  int row;
  int column;

  INLINED Lane(ushort lane) {
    row = ((lane >> 4) & 1) * 4 + ((lane >> 1) & 3);  // below 8, as compilers see
    column = ((lane >> 3) & 1) * 4 + (lane & 1) * 2;
  }
};

// The lane that holds (row, column).
INLINED ushort lane_of(int row, int column) {
  return ushort((row >> 2) * 16 + (row & 3) * 2 + (column >> 2) * 8 + ((column >> 1) & 1));
}

INLINED float max_along_row(float x) {
  x = max(x, simd_shuffle_xor(x, ushort(1)));
  return max(x, simd_shuffle_xor(x, ushort(8)));
}

INLINED float max_along_column(float x) {
  x = max(x, simd_shuffle_xor(x, ushort(2)));
  x = max(x, simd_shuffle_xor(x, ushort(4)));
  return max(x, simd_shuffle_xor(x, ushort(16)));
}

INLINED float sum_along_column(float x) {
  x += simd_shuffle_xor(x, ushort(2));
  x += simd_shuffle_xor(x, ushort(4));
  return x + simd_shuffle_xor(x, ushort(16));
}

INLINED float sum_along_row(float x) {
  x += simd_shuffle_xor(x, ushort(1));
  return x + simd_shuffle_xor(x, ushort(8));
}

template <typename T>
INLINED Fragment<T> fragment_of(T x, T y) {
  Fragment<T> result;
  result.thread_elements()[0] = x;
  result.thread_elements()[1] = y;
  return result;
}

template <typename To, typename From>
INLINED Fragment<To> converted(Fragment<From> x) {
  return fragment_of<To>(To(x.thread_elements()[0]), To(x.thread_elements()[1]));
}

// A lane's two elements, which lie side by side at `at`, an even number of elements from an aligned place.
template <typename T>
INLINED Fragment<T> load_pair(device const T* at) {
  const vec<T, 2> x = *reinterpret_cast<device const vec<T, 2>*>(at);
  return fragment_of<T>(x[0], x[1]);
}

template <typename T>
INLINED Fragment<T> load_staged_pair(threadgroup const T* at) {
  const vec<T, 2> x = *reinterpret_cast<threadgroup const vec<T, 2>*>(at);
  return fragment_of<T>(x[0], x[1]);
}

// The same of a row of SIZE elements, of which the lane's begin at `column`; those outside are zero and are not read.
template <typename T, int SIZE>
INLINED Fragment<T> load_within(device const T* at, int column) {
  if (SIZE % 8 == 0 || (SIZE % 2 == 0 && column < SIZE)) {
    return load_pair(at);
  }
  Fragment<T> result = fragment_of<T>(T(0), T(0));
  if (SIZE % 2 != 0) {
    if (column < SIZE) {
      result.thread_elements()[0] = at[0];
    }
    if (column + 1 < SIZE) {
      result.thread_elements()[1] = at[1];
    }
  }
  return result;
}

// Where a lane's first element in fragment i stands whose place in a fragment is `column`. Where columns are DEALT, two fragments
// share 16, of which a lane has four that lie side by side.
template <bool DEALT>
INLINED int place_of(int i, int column) {
  return DEALT ? column * 2 + (i / 2 * 16 + i % 2 * 2) : column + i * 8;
}

// A row of fragments times `factor` to a row of SIZE elements, from its fragment `from` on: the lane's elements of them.
template <int SIZE, bool DEALT, typename T, int COUNT>
INLINED void store_row(
    const thread Fragment<float> (&sums)[COUNT], float factor, device T* row, int from, Lane lane) {
  UNROLLED
  for (int i = 0; i < COUNT; ++i) {
    const int column = place_of<DEALT>(from + i, lane.column);
    vec<T, 2> x;
    x[0] = T(sums[i].thread_elements()[0] * factor);
    x[1] = T(sums[i].thread_elements()[1] * factor);
    if (SIZE % 2 == 0) {  // pairs are aligned, and lie within the row or beyond it
      if (column < SIZE) {  // a slice may lie beyond it too
        *reinterpret_cast<device vec<T, 2>*>(row + column) = x;
      }
      continue;
    }
    if (column < SIZE) {
      row[column] = x[0];
    }
    if (column + 1 < SIZE) {
      row[column + 1] = x[1];
    }
  }
}

INLINED bool is_finite(float x) {
  return (as_type<uint>(x) & 0x7F800000u) != 0x7F800000u;
}
