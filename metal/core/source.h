// How a tile of rows of an array arrives at the matrix unit. A source knows where the rows of one array lie and what they are
// stored as; here is the dense one. Another kind offers the same: Storage in memory, Fetched on the way to threadgroup memory,
// Element as its tiles give them, `size`, `count`, `tile`, `turn_by` and `elements`, and of a tile what `DenseTile` has. Rows beyond
// the last are read as the last: what they lead to is hidden or never stored.
#pragma once

#include "core/fragment.h"

constant constexpr int LARGEST_TILE = 128;  // rows

// Where a tile lies of a dense array.
template <typename T, int SIZE>
struct DenseTile {
  device const T* rows;  // the first
  uint stride;
  int last;  // below LARGEST_TILE, so that 32 bits hold how far it is

  INLINED device const T* row(int i) const {
    return rows + min(uint(i) * stride, uint(last) * stride);
  }

  // Where an element is: the place within a fragment is the lane's, the rest a constant, which becomes part of the load.
  INLINED device const T* place(int i, int column) const {
    return (row(i) + (column & 7)) + (column & ~7);
  }

  INLINED T at(int i, int column) const {
    return *place(i, column);
  }

  // A lane's two elements of a fragment, which begin at `column`; those outside the row are zero.
  INLINED Fragment<T> pair(int i, int column) const {
    return load_within<T, SIZE>(place(i, column), column);
  }

  // COUNT elements of a row, 4, 2 or 1, as they are fetched, and as they are; the others are zero.
  template <int COUNT>
  INLINED vec<T, 4> fetch(int i, int column) const {
    return load<COUNT>(i, column);
  }

  template <int COUNT>
  INLINED vec<T, 4> load(int i, int column) const {
    if (COUNT == 4) {
      return *reinterpret_cast<device const vec<T, 4>*>(rows + column + min(uint(i) * stride, uint(last) * stride));
    }
    vec<T, 4> result = vec<T, 4>(T(0));
    if (COUNT == 2) {
      const vec<T, 2> x = *reinterpret_cast<device const vec<T, 2>*>(row(i) + column);
      result[0] = x[0];
      result[1] = x[1];
    } else {
      result[0] = row(i)[column];
    }
    return result;
  }
};

// The arrays beside the data of keys or values that are quantised or in pages (core/stored.h), null where there are none.
struct Beside {
  device const uchar* scales;
  device const uchar* zeros;
  device const uchar* means;
  device const int* tables;
};

// Element offset of row 0 of a head in an array [rows, length, heads, size]; positions may exceed 2^31 elements.
INLINED ulong head_offset(int row, int length, int heads, int head, int size) {
  return (ulong(row) * ulong(length) * ulong(heads) + ulong(head)) * ulong(size);
}

// Rows of one head of an array [rows, length, heads, WIDTH], of which `count` may be read, at least one, and of each its first SIZE
// elements: where they are not all, both are multiples of 32.
template <typename T, int SIZE, int WIDTH = SIZE>
struct Dense {
  using Storage = T;
  using Fetched = vec<T, 4>;
  using Element = T;
  using Tile = DenseTile<T, SIZE>;
  static constant constexpr int size = SIZE;
  device const T* rows;
  uint stride;  // elements from a row to the next
  int count;

  INLINED Dense(device const T* x, int row, int length, int heads, int head, int count)
      : rows(x + head_offset(row, length, heads, head, WIDTH)), stride(uint(heads) * uint(WIDTH)), count(count) {}

  INLINED Dense(device const T* x, Beside, int row, int length, int heads, int head, int count)
      : Dense(x, row, length, heads, head, count) {}

  INLINED Tile tile(int first) const {
    return {rows + ulong(uint(first)) * ulong(stride), stride, min(count - 1 - first, LARGEST_TILE - 1)};
  }

  INLINED void turn_by(int heads) {
    rows += heads * WIDTH;
  }

  template <int COUNT>
  INLINED static vec<T, 4> elements(Fetched x) {
    return x;
  }
};

constexpr int padded(int size) {
  return (size + 7) / 8 * 8;
}

// A product over channels does not mind their order: of so many fragments side by side a place holds as many channels that lie side
// by side, so that a lane reads them at once.
constexpr int fragments_at_once(int size) {
  return size % 32 == 0 ? 4 : (size % 16 == 0 ? 2 : 1);
}

// Nor does a sum over rows mind where its columns stand: a lane reads four side by side, of two fragments.
constexpr bool columns_dealt(int size) {
  return size % 16 == 0;
}

// COUNT fragments of channels from fragment i on, a multiple of COUNT: of each a lane's two elements, of `place` in one row and of
// `second_place` in a second. In threadgroup memory lanes side by side read what lies side by side, from different banks; in device
// memory each has a run of the row's SIZE channels, so that the first reads bring all of a row into the cache.
template <bool STAGED, int SIZE, typename Operand, int COUNT, typename Tile>
INLINED void load_dealt(
    thread Fragment<Operand> (&result)[COUNT], Tile tile, int row, int place, int second, int second_place, int i) {
  constexpr int run = STAGED || COUNT == 1 ? COUNT : SIZE / 8;
  const int start = STAGED || COUNT == 1 ? i * 8 : i;
  const auto x = tile.template load<COUNT>(row, place * run + start);
  const auto y = tile.template load<COUNT>(second, second_place * run + start);
  UNROLLED
  for (int k = 0; k < COUNT; ++k) {
    result[k] = fragment_of<Operand>(Operand(x[k]), Operand(y[k]));
  }
}

// A tile of ROWS rows as fragments, from wherever it lies.
template <typename Tile, typename Operand, int SIZE, int ROWS, bool STAGED>
struct TileReader {
  static_assert(ROWS <= LARGEST_TILE);
  using Element = Operand;
  static constant constexpr int fragments = padded(SIZE) / 8;  // side by side
  static constant constexpr int together = fragments_at_once(SIZE);
  static constant constexpr bool dealt = columns_dealt(SIZE);
  Tile tile;
  int first;  // row of the tile
  Lane lane;

  // Fragment (8 rows from 8·row, 8 columns from 8·column, unless they are dealt).
  INLINED Fragment<Operand> straight(int row, int column) const {
    return converted<Operand>(tile.pair(first + row * 8 + lane.row, place_of<dealt>(column, lane.column)));
  }

  // Two fragments from `column` on, an even one, where they are dealt.
  INLINED void straight(int row, int column, thread Fragment<Operand> (&result)[2]) const {
    const auto x = tile.template load<4>(first + row * 8 + lane.row, place_of<dealt>(column, lane.column));
    result[0] = fragment_of<Operand>(Operand(x[0]), Operand(x[1]));
    result[1] = fragment_of<Operand>(Operand(x[2]), Operand(x[3]));
  }

  INLINED void straight(int row, int column, thread Fragment<Operand> (&result)[1]) const {
    result[0] = straight(row, column);
  }

  // `together` fragments from `column` on, transposed.
  INLINED void transposed(int row, int column, thread Fragment<Operand> (&result)[together]) const {
    const int at = first + row * 8 + lane.column;
    if (SIZE % 8 != 0 && column * 8 + lane.row >= SIZE) {
      result[0] = fragment_of<Operand>(Operand(0), Operand(0));
    } else {
      load_dealt<STAGED, SIZE>(result, tile, at, lane.row, at + 1, lane.row, column);
    }
  }

  // The same from row 8·i on.
  INLINED TileReader part(int i) const {
    return {tile, i * 8, lane};
  }

  // Whether all elements of the tile are finite, as a simdgroup finds out together.
  INLINED bool finite(ushort lane) const {
    constexpr int wide = SIZE % 4 == 0 ? 4 : 1;
    float zero = 0;  // or NaN
    FEW
    for (int i = lane; i < min(ROWS, tile.last + 1) * (SIZE / wide); i += 32) {
      const auto x = tile.template load<wide>(i / (SIZE / wide), i % (SIZE / wide) * wide);
      UNROLLED
      for (int e = 0; e < wide; ++e) {
        zero = fma(float(x[e]), 0.0f, zero);
      }
    }
    return simd_all(zero == 0);
  }
};

// A tile in threadgroup memory, whose rows are STRIDE elements apart.
template <typename T, int ROWS, int STRIDE>
struct StagedTile {
  static constant constexpr int last = ROWS - 1;
  threadgroup const T* rows;

  INLINED Fragment<T> pair(int i, int column) const {
    return load_staged_pair(rows + (i * STRIDE + column));
  }

  // COUNT elements of a row, 4, 2 or 1; the others are zero.
  template <int COUNT>
  INLINED vec<T, 4> load(int i, int column) const {
    threadgroup const T* at = rows + (i * STRIDE + column);
    if (COUNT == 4) {
      return *reinterpret_cast<threadgroup const vec<T, 4>*>(at);
    }
    vec<T, 4> result = vec<T, 4>(T(0));
    UNROLLED
    for (int e = 0; e < COUNT; ++e) {
      result[e] = at[e];
    }
    return result;
  }
};

// Tiles of ROWS rows in threadgroup memory: fetched to registers, put down later, read as fragments of Operand. All threads of
// the threadgroup fetch and put. Rows are longer there than needed, by what a fragment's lanes read of one at once, so that those of
// a fragment lie in different banks.
template <typename Source, typename Operand, int ROWS, int THREADS>
struct Staged {
  using Element = typename Source::Element;
  static constant constexpr int size = Source::size;
  static constant constexpr int width = padded(size);
  static constant constexpr int stride = width + 16;
  static constant constexpr int room = ROWS * stride;
  using Tile = StagedTile<Operand, ROWS, stride>;
  using Reader = TileReader<Tile, Operand, size, ROWS, true>;

  // A thread moves units of 4 elements, or of 1 where rows are not multiples of 4.
  static constant constexpr int wide = size % 4 == 0 ? 4 : 1;
  static constant constexpr int in_row = width / wide;
  static constant constexpr int units = ROWS * in_row;
  static constant constexpr int count = (units + THREADS - 1) / THREADS;

  threadgroup Operand* tiles;
  ushort thread_index;
  Lane lane;
  uint row[count];  // of the thread's units, for all places that fetch and put
  uint column[count];
  typename Source::Fetched fetched[count];

  INLINED Staged(threadgroup Operand* tiles, ushort thread_index, Lane lane) : tiles(tiles), thread_index(thread_index), lane(lane) {
    UNROLLED
    for (int i = 0; i < count; ++i) {
      const int unit = thread_index + i * THREADS;
      row[i] = unit / in_row;
      column[i] = unit % in_row * wide;
    }
  }

  INLINED bool has(int i) const {
    return units % THREADS == 0 || thread_index + i * THREADS < units;
  }

  INLINED void fetch(Source source, int first) {
    const auto tile = source.tile(first);
    UNROLLED
    for (int i = 0; i < count; ++i) {
      fetched[i] = {};
      if (has(i) && (size == width || column[i] < size)) {
        fetched[i] = tile.template fetch<wide>(row[i], column[i]);
      }
    }
  }

  INLINED void put(int buffer) {
    UNROLLED
    for (int i = 0; i < count; ++i) {
      if (has(i)) {
        threadgroup Operand* at = tiles + (buffer * room + row[i] * stride + column[i]);
        const vec<Element, 4> x = Source::template elements<wide>(fetched[i]);
        if (wide == 4) {
          vec<Operand, 4> four;
          UNROLLED
          for (int e = 0; e < 4; ++e) {
            four[e] = Operand(x[e]);
          }
          *reinterpret_cast<threadgroup vec<Operand, 4>*>(at) = four;
        } else {
          at[0] = Operand(x[0]);
        }
      }
    }
  }

  INLINED Reader reader(Source, int, int buffer) const {
    return {{tiles + buffer * room}, 0, lane};
  }
};

// The same without threadgroup memory: fragments come straight from device memory, through its caches.
template <typename Source, typename Operand, int ROWS>
struct Direct {
  using Reader = TileReader<typename Source::Tile, Operand, Source::size, ROWS, false>;
  static constant constexpr int room = 0;
  Lane lane;

  INLINED Direct(Lane lane) : lane(lane) {}

  INLINED Direct(threadgroup Operand*, ushort, Lane lane) : lane(lane) {}

  INLINED void fetch(Source, int) {}

  INLINED void put(int) {}

  INLINED Reader reader(Source source, int first, int) const {
    return {source.tile(first), 0, lane};
  }
};

template <bool STAGED, typename Source, typename Operand, int ROWS, int THREADS>
struct TileOf {
  using Type = Staged<Source, Operand, ROWS, THREADS>;
};

template <typename Source, typename Operand, int ROWS, int THREADS>
struct TileOf<false, Source, Operand, ROWS, THREADS> {
  using Type = Direct<Source, Operand, ROWS>;
};

// A simdgroup's own rows as fragments: kept in registers where CACHED, loaded again at each use where not. Their channels are in the
// order of the tiles that they are multiplied with, STAGED or not.
template <typename Source, typename Operand, int BLOCKS, bool CACHED, bool STAGED>
struct OwnRows {
  static constant constexpr int count = padded(Source::size) / 8;
  static constant constexpr int together = fragments_at_once(Source::size);
  using Element = Operand;
  typename Source::Tile tile;
  Lane lane;
  Fragment<Operand> kept[CACHED ? BLOCKS : 1][CACHED ? count : 1];

  INLINED OwnRows(Source source, int first, Lane lane) : tile(source.tile(min(first, source.count - 1))), lane(lane) {
    if (CACHED) {
      keep(kept);
    }
  }

  // All fragments, to registers.
  template <int ROWS, int COUNT>
  INLINED void keep(thread Fragment<Operand> (&result)[ROWS][COUNT]) const {
    UNROLLED
    for (int block = 0; block < ROWS; ++block) {
      UNROLLED
      for (int i = 0; i < count; i += together) {
        Fragment<Operand> x[together];
        load(block, i, x);
        UNROLLED
        for (int k = 0; k < (i + together <= COUNT ? together : 0); ++k) {
          result[block][i + k] = x[k];
        }
      }
    }
  }

  INLINED void load(int block, int i, thread Fragment<Operand> (&result)[together]) const {
    const int row = block * 8 + lane.row;
    if (together == 1) {
      result[0] = converted<Operand>(tile.pair(row, lane.column + i * 8));
      return;
    }
    load_dealt<STAGED, Source::size>(result, tile, row, lane.column, row, lane.column + 1, i);
  }

  // Fragments i to i + together - 1.
  INLINED void at(int block, int i, thread Fragment<Operand> (&result)[together]) const {
    if (!CACHED) {
      load(block, i, result);
      return;
    }
    UNROLLED
    for (int k = 0; k < together; ++k) {
      result[k] = kept[CACHED ? block : 0][CACHED ? i + k : 0];
    }
  }
};

// Own rows, in registers where CACHED, which others have in their place.
template <typename Own, bool CACHED, int BLOCKS, int COUNT>
struct SharedRows {
  static constant constexpr int count = Own::count;
  static constant constexpr int together = Own::together;
  using Element = typename Own::Element;
  const thread Own& own;
  const thread Fragment<Element> (&kept)[BLOCKS][COUNT];

  INLINED void at(int block, int i, thread Fragment<Element> (&result)[together]) const {
    if (!CACHED) {
      own.load(block, i, result);
      return;
    }
    UNROLLED
    for (int k = 0; k < together; ++k) {
      result[k] = kept[block][CACHED ? i + k : 0];
    }
  }
};
