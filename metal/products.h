// The two products of every kernel: own rows times a transposed tile gives scores, weights times a tile adds to sums.
// Loops over a head's fragments are unrolled, because registers have no address.
#pragma once

#include "tiles.h"

// Fragments of a slice, where SLICES threadgroups share the columns of a sum that one cannot hold in registers.
template <typename T, int SIZE, int SLICES>
struct Slice {
  static constant constexpr int count = (Padded<T, SIZE>::width / 8 + SLICES - 1) / SLICES;
};

template <int BLOCKS, int COUNT>
inline void clear(thread Fragment<float> (&sums)[BLOCKS][COUNT]) {
  for (int block = 0; block < BLOCKS; ++block) {
    for (int i = 0; i < COUNT; ++i) {
      sums[block][i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
  }
}

// result = own rows · (rows 8·part … of the tile)ᵀ, where own.at(block, i) gives a fragment of the rows
template <typename T, int SIZE, int BLOCKS, int COLUMNS, bool STAGED, typename Own>
inline void multiply_rows(
    thread Fragment<float> (&result)[BLOCKS][COLUMNS],
    const thread Own& own,
    const thread Tile<T, SIZE, STAGED>& tile,
    int part) {
  clear(result);
#pragma clang loop unroll(full)
  for (int i = 0; i < Padded<T, SIZE>::width / 8; ++i) {
    Fragment<T> rows[BLOCKS];
    for (int block = 0; block < BLOCKS; ++block) {
      rows[block] = own.at(block, i);
    }
    for (int c = 0; c < COLUMNS; ++c) {
      const Fragment<T> operand = tile.transposed(part + c, i);
      for (int block = 0; block < BLOCKS; ++block) {
        simdgroup_multiply_accumulate(result[block][c], rows[block], operand, result[block][c]);
      }
    }
  }
}

// sums += weights · (rows 8·part … of the tile), of its fragments of columns from `from` on
template <typename T, int SIZE, int BLOCKS, int COLUMNS, int COUNT, bool STAGED>
inline void accumulate(
    thread Fragment<float> (&sums)[BLOCKS][COUNT],
    const thread Fragment<float> (&weights)[BLOCKS][COLUMNS],
    const thread Tile<T, SIZE, STAGED>& tile,
    int part,
    int from,
    bool careful) {
  constexpr int width = Padded<T, SIZE>::width / 8;
  for (int c = 0; c < COLUMNS; ++c) {
#pragma clang loop unroll(full)
    for (int i = 0; i < (COUNT < width ? COUNT : width); ++i) {
      if (COUNT < width && from + i >= width) {
        continue;
      }
      const Fragment<T> operand = tile.straight(part + c, from + i);
      for (int block = 0; block < BLOCKS; ++block) {
        multiply_visible(sums[block][i], weights[block][c], operand, careful, tile.lane);
      }
    }
  }
}
