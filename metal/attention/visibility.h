// Which pairs of a query row and a key column take part, which tiles are skipped, and which need no masking at all.
// Kernels ask nothing else about masks.
#pragma once

#include "attention/places.h"

// What is known of a tile.
constant constexpr int none_visible = 0;
constant constexpr int some_visible = 1;
constant constexpr int all_visible = 2;

// Sums up what is known of a tile's parts.
struct Found {
  bool any = false;
  bool all = true;

  INLINED void add(bool some, bool whole) {
    any = any || some;
    all = all && whole;
  }

  // Of one thread ALONE, or of its simdgroup.
  template <bool ALONE>
  INLINED int result() const {
    const bool some = ALONE ? any : simd_any(any);
    const bool whole = ALONE ? all : simd_all(all);
    return whole ? all_visible : (some ? some_visible : none_visible);
  }
};

struct Visibility {
  constant Parameters* p;
  int offset;   // position of query row 0
  int rows;     // rows from here on see nothing
  int columns;  // columns from here on are seen by nobody
  device const int* query_segments;
  device const int* key_segments;
  device const int* key_ranges;
  device const uchar* mask;
  device const uchar* block_mask;
  device const uchar* mask_of_head;
  device const uchar* blocks_of_head;
  int batch;
  ushort lane;

  Visibility() = default;

  INLINED Visibility(const thread Features& x, int batch, int head, ushort lane)
      : p(x.p), mask(x.mask), block_mask(x.block_mask), batch(batch), lane(lane) {
    offset = has_query_offset ? x.query_offset[batch] : p->query_offset;
    rows = has_query_lengths ? min(x.query_lengths[batch], p->queries) : p->queries;
    columns = has_key_lengths ? min(x.key_lengths[batch], p->keys) : p->keys;
    query_segments = has_segments ? x.query_segment_ids + ulong(batch) * ulong(p->queries) : nullptr;
    key_segments = has_segments ? x.key_segment_ids + ulong(batch) * ulong(p->keys) : nullptr;
    key_ranges = has_ranges ? x.key_ranges + ulong(batch) * ulong(p->queries) * 2 : nullptr;
    turn_to(head);
  }

  INLINED void turn_to(int head) {
    mask_of_head = has_mask ? mask + broadcast_offset(p->mask, batch, head) : nullptr;
    blocks_of_head = has_blocks ? block_mask + broadcast_offset(p->block_mask, batch, head) : nullptr;
  }

  // Whether positions and lengths alone tell what is visible.
  INLINED bool by_bands() const {
    return !(has_mask || has_blocks || has_segments || has_ranges || has_mask_mod);
  }

  // Distances between positions fit an int; a position and a side of the window added up may not. These do it safely.
  INLINED int before(int position, int side) const {
    return max(position, side) - side;  // position - side, or 0
  }

  INLINED int after(int position, int side, int end) const {
    return side < end - position ? position + side + 1 : end;  // at most
  }

  // The columns that any of the rows first … last may see lie in column_begin … column_end - 1.
  INLINED int column_begin(int first) const {
    return has_left ? before(first + offset, p->left) : 0;
  }

  INLINED int column_end(int first, int last) const {
    const int end = has_right ? after(last + offset, p->right, columns) : columns;
    return first < rows ? end : 0;
  }

  // The rows that may see any of the columns first … last lie in row_begin … row_end - 1.
  INLINED int row_begin(int first) const {
    return has_right ? before(first - offset, p->right) : 0;
  }

  INLINED int row_end(int first, int last) const {
    const int end = has_left ? after(last - offset, p->left, rows) : rows;
    return first < columns ? end : 0;
  }

  // n rows from `row` and m columns from `column`, judged by positions and lengths alone.
  INLINED int band(int row, int n, int column, int m) const {
    if (row >= rows || column >= column_end(row, row + n - 1) || column + m <= column_begin(row)) {
      return none_visible;
    }
    bool whole = row + n <= rows && column + m <= columns;
    if (has_right) {
      whole = whole && column + m - 1 - (row + offset) <= p->right;
    }
    if (has_left) {
      whole = whole && row + n - 1 + offset - column <= p->left;
    }
    return whole ? all_visible : some_visible;
  }

  // The same by everything else but the mask, for rows and columns that exist. A whole simdgroup finds out together, or a thread
  // ALONE.
  template <bool ALONE>
  INLINED int contents(int row, int n, int column, int m) const {
    const int from = ALONE ? 0 : lane;
    const int step = ALONE ? 1 : 32;
    const int row_end = min(row + n, p->queries);
    const int column_end = min(column + m, p->keys);
    int result = all_visible;
    if (has_segments) {
      int low = INT_MAX, high = INT_MIN, key_low = INT_MAX, key_high = INT_MIN;
      for (int i = row + from; i < row_end; i += step) {
        low = min(low, query_segments[i]);
        high = max(high, query_segments[i]);
      }
      for (int i = column + from; i < column_end; i += step) {
        key_low = min(key_low, key_segments[i]);
        key_high = max(key_high, key_segments[i]);
      }
      if (!ALONE) {
        low = simd_min(low);
        high = simd_max(high);
        key_low = simd_min(key_low);
        key_high = simd_max(key_high);
      }
      if (high < key_low || key_high < low) {
        return none_visible;
      }
      if (low != high || key_low != key_high) {
        result = some_visible;
      }
    }
    if (has_ranges) {
      Found found;
      for (int i = row + from; i < row_end; i += step) {
        const int start = key_ranges[2 * i];
        const int end = key_ranges[2 * i + 1];
        found.add(max(start, column) < min(end, column_end), start <= column && end >= column_end);
      }
      result = min(result, found.result<ALONE>());
    }
    if (has_blocks && result != none_visible) {
      const int first_row = row / p->block_rows;
      const int first_column = column / p->block_columns;
      const int across = (column_end - 1) / p->block_columns - first_column + 1;
      const int count = ((row_end - 1) / p->block_rows - first_row + 1) * across;
      Found found;
      for (int i = from; i < count; i += step) {
        const uchar entry = block(first_row + i / across, first_column + i % across);
        found.add(entry != 0, has_mask_mod ? entry == 2 : entry != 0);
      }
      result = min(result, found.result<ALONE>());
    }
    return result;
  }

  // Both together: what there is to compute, and how carefully. What a mask hides is looked up later, unless WITH_MASK is
  // false; a caller's function is asked later, unless the block says that it holds everywhere.
  template <bool ALONE = false, bool WITH_MASK = true>
  INLINED int of_tile(int row, int n, int column, int m) const {
    int result = band(row, n, column, m);
    if (result != none_visible && (has_segments || has_ranges || has_blocks)) {
      result = min(result, contents<ALONE>(row, n, column, m));
    }
    return (has_mask && WITH_MASK) || (has_mask_mod && !has_blocks) ? min(result, some_visible) : result;
  }

  INLINED bool masked_in(int row, int column) const {
    return mask_of_head[broadcast_index(p->mask, row, column)] != 0;
  }

  INLINED uchar block(int row, int column) const {
    return blocks_of_head[broadcast_index(p->block_mask, row, column)];
  }

  INLINED uchar block_of(int row, int column) const {
    return block(row / p->block_rows, column / p->block_columns);
  }

  INLINED bool visible(int row, int column) const {
    bool result = row < rows && column < columns;
    if (has_right) {
      result = result && column - (row + offset) <= p->right;
    }
    if (has_left) {
      result = result && row + offset - column <= p->left;
    }
    if (has_segments) {
      result = result && query_segments[row] == key_segments[column];
    }
    if (has_ranges) {
      result = result && column >= key_ranges[2 * row] && column < key_ranges[2 * row + 1];
    }
    if (has_blocks) {
      result = result && block_of(row, column) != 0;
    }
    if (has_mask) {
      result = result && masked_in(row, column);
    }
    return result;
  }
};

// Visibility with a caller's function beside the masks: its `value` comes with the plan, made by jax_mfa/metal/functions.py.
template <typename Function>
struct ModifiedVisibility : Visibility {
  Given given;

  ModifiedVisibility() = default;

  INLINED ModifiedVisibility(const thread Features& x, int batch, int head, ushort lane)
      : Visibility(x, batch, head, lane), given(x, batch, head) {}

  INLINED void turn_to(int head) {
    Visibility::turn_to(head);
    given.turn_to(head);
  }

  INLINED bool visible(int row, int column) const {
    return Visibility::visible(row, column) &&
           ((has_blocks && block_of(row, column) == 2) || Function::value(given, row + offset, column));
  }
};

// The tiles of one axis that a tile of the other meets: first those wholly visible, then the others. Both are runs of
// consecutive ones, or a list made by attention_tile_lists.
struct Walk {
  int count;
  int wholes;       // of them are wholly visible
  int begin;        // of all
  int whole_begin;  // of those
  device const int* list;  // wholes from the front, others from the back
  int last;

  INLINED int tile(int i) const {
    if (has_lists && !has_spans) {
      return list[i < wholes ? i : last - (i - wholes)];
    }
    if (i < wholes) {
      return whole_begin + i;
    }
    const int other = begin + i - wholes;
    return other < whole_begin ? other : other + wholes;
  }
};

// The tiles of SIZE elements that hold begin … end - 1, and of them those that lie within whole_begin … whole_end - 1, if any may.
template <int SIZE>
INLINED Walk runs(bool may_be_whole, int begin, int end, int whole_begin, int whole_end) {
  const int first = begin / SIZE;
  const int count = max((end + SIZE - 1) / SIZE - first, 0);
  const int whole_first = max((whole_begin + SIZE - 1) / SIZE, first);
  const int wholes = may_be_whole ? clamp(whole_end / SIZE - whole_first, 0, count) : 0;
  return {count, wholes, first, wholes > 0 ? whole_first : first, nullptr, 0};
}

// Lists of tiles lie as [B, 1|N, tiles of the one axis, 2 + tiles of the other]: how many are visible and how many of them
// wholly, and then which; where only runs are kept as [B, 1|N, tiles of the one axis, 4]: their beginnings after the numbers. One
// list serves all heads where neither mask nor blocks differ among them.
INLINED int heads_of_lists(constant Parameters& p) {
  return max(p.mask.heads, p.block_mask.heads);
}

INLINED ulong room_of_list(int others) {
  return has_spans ? 4 : 2 + ulong(others);
}

INLINED Walk listed(constant Parameters& p, device const int* lists, int batch, int head, int tile, int tiles, int others) {
  const int heads = heads_of_lists(p);
  const ulong plane = ulong(batch) * ulong(heads) + ulong(heads > 1 ? head : 0);
  device const int* list = lists + (plane * ulong(tiles) + ulong(tile)) * room_of_list(others);
  if (has_spans) {
    return {list[0], list[1], list[2], list[3], nullptr, 0};
  }
  return {list[0], list[1], 0, 0, list + 2, others - 1};
}

INLINED int tiles_of(int length, int size) {
  return (length + size - 1) / size;
}

// The tiles of SIZE columns that the rows first … first + n - 1 meet, n rows being a tile. Rows that do not exist hide nothing.
template <int SIZE, typename Visibility>
INLINED Walk columns_for(
    constant Parameters& p, const thread Visibility& visibility, device const int* lists, int head, int first, int n) {
  if (has_lists) {
    return listed(p, lists, visibility.batch, head, first / n, tiles_of(p.queries, n), tiles_of(p.keys, SIZE));
  }
  const int last = min(first + n, p.queries) - 1;
  return runs<SIZE>(
      visibility.by_bands(), visibility.column_begin(first), visibility.column_end(first, last), visibility.column_begin(last),
      last < visibility.rows ? visibility.column_end(first, first) : 0);
}

// The tiles of SIZE rows that the columns first … first + n - 1 meet, n columns being a tile.
template <int SIZE, typename Visibility>
INLINED Walk rows_for(
    constant Parameters& p, const thread Visibility& visibility, device const int* lists, int head, int first, int n) {
  if (has_lists) {
    return listed(p, lists, visibility.batch, head, first / n, tiles_of(p.keys, n), tiles_of(p.queries, SIZE));
  }
  const int last = min(first + n, p.keys) - 1;
  return runs<SIZE>(
      visibility.by_bands(), visibility.row_begin(first), visibility.row_end(first, last), visibility.row_begin(last),
      last < visibility.columns ? visibility.row_end(first, first) : 0);
}
