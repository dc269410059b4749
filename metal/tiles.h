// How a tile of rows of an array [length, heads, size] arrives at the matrix unit: copied to threadgroup memory first, or as
// fragments straight from device memory. A kernel sees fragments only.
#pragma once

#include "fragments.h"

// Threadgroup rows are 16 bytes longer than needed, so that the eight rows of a fragment lie in different banks.
template <typename T, int SIZE>
struct Padded {
  static constant constexpr int width = (SIZE + 7) / 8 * 8;
  static constant constexpr int stride = width + 16 / sizeof(T);
};

// Copies `rows` rows of SIZE elements; the rest of ROWS × width becomes zero. All threads of the threadgroup call it.
template <typename T, int SIZE, int ROWS, int THREADS>
inline void stage(threadgroup T* tile, device const T* source, ulong stride, int rows, ushort thread_index) {
  constexpr int vector = SIZE % 4 == 0 ? 4 : 1;
  constexpr int in_row = Padded<T, SIZE>::width / vector;
  for (int i = thread_index; i < ROWS * in_row; i += THREADS) {
    const int row = i / in_row;
    const int column = i % in_row * vector;
    const bool inside = row < rows && column < SIZE;
    device const T* from = source + ulong(row) * stride + ulong(column);
    threadgroup T* to = tile + row * Padded<T, SIZE>::stride + column;
    if (vector == 4) {
      vec<T, 4> x = vec<T, 4>(T(0));
      if (inside) {
        x = *reinterpret_cast<device const vec<T, 4>*>(from);
      }
      *reinterpret_cast<threadgroup vec<T, 4>*>(to) = x;
    } else {
      T x = T(0);
      if (inside) {
        x = *from;
      }
      *to = x;
    }
  }
}

// One tile as its readers see it, STAGED or not.
template <typename T, int SIZE, bool STAGED>
struct Tile {
  threadgroup const T* staged;
  device const T* source;  // row 0 of the tile
  ulong stride;
  int rows;
  Lane lane;

  // Fragment (8 rows from 8·row, 8 columns from 8·column).
  Fragment<T> straight(int row, int column) const {
    if (STAGED) {
      Fragment<T> result;
      simdgroup_load(result, staged + row * 8 * Padded<T, SIZE>::stride + column * 8, Padded<T, SIZE>::stride);
      return result;
    }
    return load_rows(
        source + ulong(row * 8) * stride + ulong(column * 8), stride, rows - row * 8, SIZE - column * 8, lane);
  }

  // Its transpose.
  Fragment<T> transposed(int row, int column) const {
    if (STAGED) {
      Fragment<T> result;
      simdgroup_load(
          result, staged + row * 8 * Padded<T, SIZE>::stride + column * 8, Padded<T, SIZE>::stride, ulong2(0), true);
      return result;
    }
    return load_transposed(
        source + ulong(row * 8) * stride + ulong(column * 8), stride, rows - row * 8, SIZE - column * 8, lane);
  }
};

// Rows of two arrays that are walked over together, of sizes H and V: keys and values, or queries and their dO.
template <typename T, int H, int V>
struct RowPair {
  device const T* first;
  device const T* second;
  int heads;  // of each array, between one row and the next
  int count;  // rows from here on; none beyond is read

  RowPair from(int row) const {
    return {first + ulong(row) * first_stride(), second + ulong(row) * second_stride(), heads, count - row};
  }

  RowPair of_head(int head) const {
    return {first + ulong(head) * H, second + ulong(head) * V, heads, count};
  }

  ulong first_stride() const {
    return ulong(heads) * H;
  }

  ulong second_stride() const {
    return ulong(heads) * V;
  }
};

// Keys and values of a batch row and head, of which `count` rows may be read.
template <typename T, int H, int V>
inline RowPair<T, H, V> keys_of(
    constant Parameters& p, device const T* key, device const T* value, int batch, int key_head, int count) {
  return {
      key + head_offset(mapped_row(p.key, batch), p.keys, p.key_heads, key_head, H),
      value + head_offset(mapped_row(p.value, batch), p.keys, p.key_heads, key_head, V), p.key_heads, count};
}

// Room for tiles of ROWS of both, BUFFERS times: 2 where the next tile is loaded while one is computed, 0 where fragments come
// straight from device memory.
template <typename T, int H, int V, int ROWS, int BUFFERS, int THREADS>
struct TilePair {
  static constant constexpr int first_size = ROWS * Padded<T, H>::stride;
  static constant constexpr int second_size = ROWS * Padded<T, V>::stride;
  static constant constexpr int first_room = BUFFERS > 0 ? BUFFERS * first_size : 1;
  static constant constexpr int second_room = BUFFERS > 0 ? BUFFERS * second_size : 1;
  threadgroup T* first_tiles;
  threadgroup T* second_tiles;
  ushort thread_index;
  Lane lane;

  void load(RowPair<T, H, V> rows, int buffer) const {
    stage<T, H, ROWS, THREADS>(
        first_tiles + buffer * first_size, rows.first, rows.first_stride(), rows.count, thread_index);
    stage<T, V, ROWS, THREADS>(
        second_tiles + buffer * second_size, rows.second, rows.second_stride(), rows.count, thread_index);
  }

  Tile<T, H, (BUFFERS > 0)> first(RowPair<T, H, V> rows, int buffer) const {
    return {first_tiles + buffer * first_size, rows.first, rows.first_stride(), rows.count, lane};
  }

  Tile<T, V, (BUFFERS > 0)> second(RowPair<T, H, V> rows, int buffer) const {
    return {second_tiles + buffer * second_size, rows.second, rows.second_stride(), rows.count, lane};
  }
};

// A simdgroup's own rows, COUNT fragments wide at most: kept in registers where CACHED, loaded again at each use where not.
template <typename T, int COUNT, int BLOCKS, bool CACHED>
struct OwnRows {
  Fragment<T> kept[CACHED ? BLOCKS : 1][CACHED ? COUNT : 1];
  device const T* source;
  ulong stride;
  int rows;
  int size;
  Lane lane;

  OwnRows(device const T* source, ulong stride, int rows, int size, Lane lane)
      : source(source), stride(stride), rows(rows), size(size), lane(lane) {
    if (CACHED) {
      for (int block = 0; block < BLOCKS; ++block) {
        for (int i = 0; i < COUNT; ++i) {
          kept[CACHED ? block : 0][CACHED ? i : 0] = load(block, i);
        }
      }
    }
  }

  Fragment<T> load(int block, int i) const {
    return load_rows(source + ulong(block * 8) * stride + ulong(i * 8), stride, rows - block * 8, size - i * 8, lane);
  }

  Fragment<T> at(int block, int i) const {
    if (CACHED) {
      return kept[CACHED ? block : 0][CACHED ? i : 0];
    }
    return load(block, i);
  }
};
