// The two products of every kernel: own rows times a transposed tile gives scores, weights times a tile adds to sums.
#pragma once

#include "core/source.h"

// A weight of -0 marks an absent pair: in a product it adds nothing, and the slow product can tell it from 0. A sum of weights
// that starts from -0 is -0 only if all were absent: so a kernel tells a row that sees nothing (`sees_nothing` of
// jax_mfa/problem.py says what is stored of it).
constant constexpr uint absent_bits = 0x80000000u;

INLINED float absent_weight() {
  return as_type<float>(absent_bits);
}

INLINED bool is_absent(float weight) {
  return as_type<uint>(weight) == absent_bits;
}

// Fragments of a slice, where SLICES threadgroups share the columns of a sum that one cannot hold in registers.
constexpr int slice_fragments(int size, int slices) {
  return (padded(size) / 8 + slices - 1) / slices;
}

constexpr int larger_of(int x, int y) {
  return x > y ? x : y;
}

template <int BLOCKS, int COUNT>
INLINED void clear(thread Fragment<float> (&sums)[BLOCKS][COUNT]) {
  UNROLLED
  for (int block = 0; block < BLOCKS; ++block) {
    UNROLLED
    for (int i = 0; i < COUNT; ++i) {
      sums[block][i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
  }
}

template <typename T>
INLINED void exchange(thread T& x, thread T& y) {
  const T first = x;
  x = y;
  y = first;
}

// The first of each block becomes the last. By swapping: a loop of copies would become a copy of memory.
template <int BLOCKS, int COUNT>
INLINED void rotate(thread Fragment<float> (&x)[BLOCKS][COUNT]) {
  UNROLLED
  for (int block = 0; block < BLOCKS; ++block) {
    UNROLLED
    for (int i = 0; i + 1 < COUNT; ++i) {
      exchange(x[block][i], x[block][i + 1]);
    }
  }
}

// result = own rows · (rows of the tile)ᵀ
template <int BLOCKS, int COLUMNS, typename Own, typename Reader>
INLINED void multiply_rows(
    thread Fragment<float> (&result)[BLOCKS][COLUMNS], const thread Own& own, const thread Reader& tile) {
  constexpr int together = Reader::together;
  static_assert(Own::together == together, "own rows have their channels in the order of the tile's");
  clear(result);
  UNROLLED
  for (int i = 0; i < Own::count; i += together) {
    Fragment<typename Own::Element> rows[BLOCKS][together];
    UNROLLED
    for (int block = 0; block < BLOCKS; ++block) {
      own.at(block, i, rows[block]);
    }
    UNROLLED
    for (int c = 0; c < COLUMNS; ++c) {
      Fragment<typename Own::Element> operands[together];
      tile.transposed(c, i, operands);
      UNROLLED
      for (int k = 0; k < together; ++k) {
        UNROLLED
        for (int block = 0; block < BLOCKS; ++block) {
          simdgroup_multiply_accumulate(result[block][c], rows[block][k], operands[k], result[block][c]);
        }
      }
    }
  }
}

// sums += weights · (rows of the tile), of its WIDTH fragments of columns those from `from` on
template <int WIDTH, int BLOCKS, int COLUMNS, int COUNT, typename Reader>
INLINED void accumulate(
    thread Fragment<float> (&sums)[BLOCKS][COUNT],
    const thread Fragment<float> (&weights)[BLOCKS][COLUMNS],
    const thread Reader& tile,
    int from) {
  constexpr int together = Reader::dealt && COUNT % 2 == 0 ? 2 : 1;
  UNROLLED
  for (int c = 0; c < COLUMNS; ++c) {
    UNROLLED
    for (int i = 0; i < COUNT; i += together) {
      // the last slice may be narrower, unless all are alike
      if ((COUNT < WIDTH && WIDTH % COUNT == 0) || from + i < WIDTH) {
        Fragment<typename Reader::Element> operands[together];
        tile.straight(c, from + i, operands);
        UNROLLED
        for (int k = 0; k < together; ++k) {
          UNROLLED
          for (int block = 0; block < BLOCKS; ++block) {
            simdgroup_multiply_accumulate(sums[block][i + k], weights[block][c], operands[k], sums[block][i + k]);
          }
        }
      }
    }
  }
}

// The same element by element, so that NaN and infinity in the tile reach those only whose pair is present. Rare, hence small:
// rolled loops, through which the fragments rotate, because registers have no address.
template <int WIDTH, int BLOCKS, int COLUMNS, int COUNT, typename Reader>
INLINED void accumulate_present(
    thread Fragment<float> (&sums)[BLOCKS][COUNT],
    thread Fragment<float> (&weights)[BLOCKS][COLUMNS],
    const thread Reader& tile,
    int from,
    Lane lane) {
  ROLLED
  for (int c = 0; c < COLUMNS; ++c) {
    ROLLED
    for (int i = 0; i < COUNT; ++i) {
      if ((COUNT < WIDTH && WIDTH % COUNT == 0) || from + i < WIDTH) {
        const auto operand = tile.straight(c, from + i);
        const float left = float(operand.thread_elements()[0]);
        const float right = float(operand.thread_elements()[1]);
        ROLLED
        for (int k = 0; k < 8; ++k) {
          const float x = simd_shuffle(left, lane_of(k, lane.column));
          const float y = simd_shuffle(right, lane_of(k, lane.column));
          UNROLLED
          for (int block = 0; block < BLOCKS; ++block) {
            const float even = simd_shuffle(float(weights[block][0].thread_elements()[0]), lane_of(lane.row, k));
            const float odd = simd_shuffle(float(weights[block][0].thread_elements()[1]), lane_of(lane.row, k));
            const float weight = (k & 1) ? odd : even;
            if (!is_absent(weight)) {
              sums[block][0].thread_elements()[0] += weight * x;
              sums[block][0].thread_elements()[1] += weight * y;
            }
          }
        }
      }
      rotate(sums);
    }
    rotate(weights);
  }
}

// Either of them: NaN and infinity in a tile are looked after where it is `spoilt`.
template <int WIDTH, typename Sums, typename Weights, typename Reader>
INLINED void accumulate_or_present(
    thread Sums& sums, thread Weights& weights, const thread Reader& tile, int from, bool spoilt, Lane lane) {
  if (spoilt) {
    accumulate_present<WIDTH>(sums, weights, tile, from, lane);
  } else {
    accumulate<WIDTH>(sums, weights, tile, from);
  }
}
