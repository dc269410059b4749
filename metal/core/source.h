// How a tile of rows of an array arrives at the matrix unit. A source knows where the rows of one array lie and what they are
// stored as; here is the dense one. Another kind offers the same: Storage in memory, Fetched on the way to threadgroup memory,
// Element as its tiles give them, `size`, `count`, `tile`, `turn_by` and `elements`, and of a tile what `DenseTile` has. Rows beyond
// the last are read as the last: what they lead to is hidden or never stored.
#pragma once

#include "core/fragment.h"

// Where a tile lies of a dense array.
template <typename T, int SIZE>
struct DenseTile {
  device const T* rows;  // the first
  uint stride;
  int last;

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
    return {rows + ulong(uint(first)) * ulong(stride), stride, count - 1 - first};
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

// A product over channels does not mind their order. Where its tiles come straight from device memory, place p of fragment i holds
// channel p · size / 8 + i, so that what a lane reads of a row lies side by side, for as many fragments at once as this says; of
// others, and where it says 1, it holds channel 8 · i + p.
constexpr int fragments_at_once(bool staged, int size) {
  return staged || size % 16 != 0 ? 1 : (size % 32 == 0 ? 4 : 2);
}

// The elements of COUNT fragments from i on that a lane's two places of a row have; `second` is the row of the second place, as far
// behind the first in its run.
template <typename Operand, int COUNT, typename Tile>
INLINED void load_dealt(
    thread Fragment<Operand> (&result)[COUNT], Tile tile, int row, int start, int second, int second_start, int i) {
  const auto x = tile.template load<COUNT>(row, start + i);
  const auto y = tile.template load<COUNT>(second, second_start + i);
  UNROLLED
  for (int k = 0; k < COUNT; ++k) {
    result[k] = fragment_of<Operand>(Operand(x[k]), Operand(y[k]));
  }
}

// Which fragments of a tile its readers ask for, as they lie or transposed. Staging does the transposition once for all.
constant constexpr int straight_form = 1;
constant constexpr int transposed_form = 2;

// Tiles of ROWS rows in threadgroup memory: fetched to registers, put down later, read as fragments of Operand. All threads of
// the threadgroup fetch and put. Rows there are 16 bytes longer than needed, so that those of a fragment lie in different banks.
template <typename Source, typename Operand, int ROWS, int THREADS, int FORMS>
struct Staged {
  using Element = typename Source::Element;
  static constant constexpr int size = Source::size;
  static constant constexpr int width = padded(size);
  static constant constexpr int pad = 16 / sizeof(Operand);
  static constant constexpr int straight_stride = width + pad;
  static constant constexpr int transposed_stride = ROWS + pad;
  static constant constexpr int straight_room = FORMS & straight_form ? ROWS * straight_stride : 0;
  static constant constexpr int room = straight_room + (FORMS & transposed_form ? width * transposed_stride : 0);

  // A thread moves units of `together` rows × 4 elements, or × 1 where rows are not multiples of 4.
  static constant constexpr int wide = size % 4 == 0 ? 4 : 1;
  static constant constexpr int together = FORMS & transposed_form ? 2 : 1;
  static constant constexpr int in_row = width / wide;
  static constant constexpr int across = in_row % 4 == 0 ? 4 : 1;        // units side by side that a simdgroup reads at once
  static constant constexpr int down = ROWS / together % 8 == 0 ? 8 : 4;
  static constant constexpr int units = ROWS / together * in_row;
  static constant constexpr int count = (units + THREADS - 1) / THREADS;

  threadgroup Operand* tiles;
  ushort thread_index;
  Lane lane;
  uint row[count];  // of the thread's units, for all places that fetch and put
  uint column[count];
  typename Source::Fetched fetched[count][together];

  INLINED Staged(threadgroup Operand* tiles, ushort thread_index, Lane lane) : tiles(tiles), thread_index(thread_index), lane(lane) {
    UNROLLED
    for (int i = 0; i < count; ++i) {
      row[i] = row_of(thread_index + i * THREADS);
      column[i] = column_of(thread_index + i * THREADS);
    }
  }

  INLINED static int row_of(int unit) {
    if (together == 1) {
      return unit / in_row;
    }
    return (unit % down + down * (unit / (down * across) % (ROWS / together / down))) * together;
  }

  INLINED static int column_of(int unit) {
    if (together == 1) {
      return unit % in_row * wide;
    }
    return (unit / down % across + across * (unit / (across * (ROWS / together)))) * wide;
  }

  INLINED void fetch(Source source, int first) {
    const auto tile = source.tile(first);
    UNROLLED
    for (int i = 0; i < count; ++i) {
      const int unit = thread_index + i * THREADS;
      UNROLLED
      for (int r = 0; r < together; ++r) {
        fetched[i][r] = {};
        if ((units % THREADS == 0 || unit < units) && (size == width || column[i] < size)) {
          fetched[i][r] = tile.template fetch<wide>(row[i] + r, column[i]);
        }
      }
    }
  }

  INLINED void put(int buffer) {
    threadgroup Operand* to = tiles + buffer * room;
    UNROLLED
    for (int i = 0; i < count; ++i) {
      const int unit = thread_index + i * THREADS;
      if (units % THREADS != 0 && unit >= units) {
        continue;
      }
      vec<Element, 4> x[together];
      UNROLLED
      for (int r = 0; r < together; ++r) {
        x[r] = Source::template elements<wide>(fetched[i][r]);
      }
      if (FORMS & straight_form) {
        threadgroup Operand* first = to + (row[i] * straight_stride + column[i]);
        UNROLLED
        for (int r = 0; r < together; ++r) {
          threadgroup Operand* at = first + r * straight_stride;
          if (wide == 4) {
            vec<Operand, 4> four;
            UNROLLED
            for (int e = 0; e < 4; ++e) {
              four[e] = Operand(x[r][e]);
            }
            *reinterpret_cast<threadgroup vec<Operand, 4>*>(at) = four;
          } else {
            at[0] = Operand(x[r][0]);
          }
        }
      }
      if (FORMS & transposed_form) {
        threadgroup Operand* first = to + (straight_room + column[i] * transposed_stride + row[i]);
        UNROLLED
        for (int e = 0; e < wide; ++e) {
          vec<Operand, 2> both;
          both[0] = Operand(x[0][e]);
          both[1] = Operand(x[together - 1][e]);
          *reinterpret_cast<threadgroup vec<Operand, 2>*>(first + e * transposed_stride) = both;
        }
      }
    }
  }

  // One tile as its readers see it.
  struct Reader {
    static constant constexpr int fragments = width / 8;  // side by side
    static constant constexpr int together = 1;
    threadgroup const Operand* straight_lane;
    threadgroup const Operand* transposed_lane;
    threadgroup const Operand* rows;

    // Fragment (8 rows from 8·row, 8 columns from 8·column).
    INLINED Fragment<Operand> straight(int row, int column) const {
      return load_staged_pair(straight_lane + (row * 8 * straight_stride + column * 8));
    }

    // Its transpose.
    INLINED Fragment<Operand> transposed(int row, int column) const {
      return load_staged_pair(transposed_lane + (column * 8 * transposed_stride + row * 8));
    }

    INLINED void transposed(int row, int column, thread Fragment<Operand> (&result)[1]) const {
      result[0] = transposed(row, column);
    }

    // The same from row 8·i on.
    INLINED Reader part(int i) const {
      return {straight_lane + i * 8 * straight_stride, transposed_lane + i * 8, rows};
    }

    // Whether all elements of the tile are finite, as a simdgroup finds out together.
    INLINED bool finite(ushort lane) const {
      constexpr int fours = ROWS * width / 4;
      float zero = 0;  // or NaN
      FEW
      for (int turn = 0; turn < (fours + 31) / 32; ++turn) {
        const int i = fours % 32 == 0 ? turn * 32 + lane % 32 : min(turn * 32 + lane, fours - 1);
        const vec<Operand, 4> x = *reinterpret_cast<threadgroup const vec<Operand, 4>*>(
            rows + i / (width / 4) * straight_stride + i % (width / 4) * 4);
        UNROLLED
        for (int e = 0; e < 4; ++e) {
          zero = fma(float(x[e]), 0.0f, zero);
        }
      }
      return simd_all(zero == 0);
    }
  };

  INLINED Reader reader(Source, int, int buffer) const {
    threadgroup const Operand* at = tiles + buffer * room;
    return {
        at + (lane.row * straight_stride + lane.column),
        at + (straight_room + lane.row * transposed_stride + lane.column), at};
  }
};

// The same without threadgroup memory: fragments come straight from device memory, through its caches.
template <typename Source, typename Operand, int ROWS>
struct Direct {
  static constant constexpr int size = Source::size;
  static constant constexpr int width = padded(size);
  static constant constexpr int room = 0;
  Lane lane;

  INLINED Direct(Lane lane) : lane(lane) {}

  INLINED Direct(threadgroup Operand*, ushort, Lane lane) : lane(lane) {}

  INLINED void fetch(Source, int) {}

  INLINED void put(int) {}

  struct Reader {
    static constant constexpr int fragments = width / 8;
    static constant constexpr int together = fragments_at_once(false, size);
    typename Source::Tile tile;
    int first;  // row of the tile
    Lane lane;

    INLINED Fragment<Operand> straight(int row, int column) const {
      return converted<Operand>(tile.pair(first + row * 8 + lane.row, lane.column + column * 8));
    }

    // `together` fragments from `column` on.
    INLINED void transposed(int row, int column, thread Fragment<Operand> (&result)[together]) const {
      if (together == 1) {
        result[0] = transposed(row, column);
        return;
      }
      const int at = first + row * 8 + lane.column;
      const int start = lane.row * (width / 8);
      load_dealt(result, tile, at, start, at + 1, start, column);
    }

    INLINED Fragment<Operand> transposed(int row, int column) const {
      if (size % 8 != 0 && column * 8 + lane.row >= size) {
        return fragment_of<Operand>(Operand(0), Operand(0));
      }
      const int at = first + row * 8 + lane.column;
      return fragment_of<Operand>(
          Operand(tile.at(at, lane.row + column * 8)), Operand(tile.at(at + 1, lane.row + column * 8)));
    }

    INLINED Reader part(int i) const {
      return {tile, i * 8, lane};
    }

    INLINED bool finite(ushort lane) const {
      constexpr int wide = size % 4 == 0 ? 4 : 1;
      float zero = 0;
      FEW
      for (int i = lane; i < min(ROWS, tile.last + 1) * (size / wide); i += 32) {
        const vec<typename Source::Element, 4> x = tile.template load<wide>(i / (size / wide), i % (size / wide) * wide);
        UNROLLED
        for (int e = 0; e < wide; ++e) {
          zero = fma(float(x[e]), 0.0f, zero);
        }
      }
      return simd_all(zero == 0);
    }
  };

  INLINED Reader reader(Source source, int first, int) const {
    return {source.tile(first), 0, lane};
  }
};

template <bool STAGED, typename Source, typename Operand, int ROWS, int THREADS, int FORMS>
struct TileOf {
  using Type = Staged<Source, Operand, ROWS, THREADS, FORMS>;
};

template <typename Source, typename Operand, int ROWS, int THREADS, int FORMS>
struct TileOf<false, Source, Operand, ROWS, THREADS, FORMS> {
  using Type = Direct<Source, Operand, ROWS>;
};

// A simdgroup's own rows as fragments: kept in registers where CACHED, loaded again at each use where not. Their channels are in the
// order of the tiles that they are multiplied with, STAGED or not.
template <typename Source, typename Operand, int BLOCKS, bool CACHED, bool STAGED>
struct OwnRows {
  static constant constexpr int count = padded(Source::size) / 8;
  static constant constexpr int together = fragments_at_once(STAGED, Source::size);
  using Element = Operand;
  typename Source::Tile tile;
  Lane lane;
  Fragment<Operand> kept[CACHED ? BLOCKS : 1][CACHED ? count : 1];

  INLINED OwnRows(Source source, int first, Lane lane) : tile(source.tile(min(first, source.count - 1))), lane(lane) {
    UNROLLED
    for (int block = 0; block < (CACHED ? BLOCKS : 0); ++block) {
      UNROLLED
      for (int i = 0; i < (CACHED ? count : 0); i += together) {
        Fragment<Operand> x[together];
        load(block, i, x);
        UNROLLED
        for (int k = 0; k < together; ++k) {
          kept[CACHED ? block : 0][CACHED ? i + k : 0] = x[k];
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
    load_dealt(result, tile, row, lane.column * count, row, (lane.column + 1) * count, i);
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
