// Which pairs of a query row and a key column take part, which tiles are skipped, and which need no masking at all.
// Kernels ask nothing else about masks.
#pragma once

#include "parameters.h"

// What is known of a tile.
constant constexpr int none_visible = 0;
constant constexpr int some_visible = 1;
constant constexpr int all_visible = 2;

struct Visibility {
  constant Parameters* p;
  int offset;   // position of query row 0
  int rows;     // rows from here on see nothing
  int columns;  // columns from here on are seen by nobody
  device const int* query_segments;
  device const int* key_segments;
  device const int* key_ranges;
  device const uchar* mask;
  device const uchar* blocks;
  device const uchar* mask_of_head;
  device const uchar* blocks_of_head;
  int batch;
  ushort lane;

  Visibility() = default;

  Visibility(
      constant Parameters& p, device const int* limits, device const uchar* mask, device const uchar* blocks,
      device const int* query_segments, device const int* key_segments, device const int* key_ranges, int batch, int head,
      ushort lane)
      : p(&p), mask(mask), blocks(blocks), batch(batch), lane(lane) {
    device const int* of_row = limits + ulong(batch) * ulong(p.limits_stride);
    offset = of_row[0];
    rows = min(of_row[1], p.queries);
    columns = min(of_row[2], p.keys);
    this->query_segments = has_segments ? query_segments + ulong(batch) * ulong(p.queries) : query_segments;
    this->key_segments = has_segments ? key_segments + ulong(batch) * ulong(p.keys) : key_segments;
    this->key_ranges = has_ranges ? key_ranges + ulong(batch) * ulong(p.queries) * 2 : key_segments;
    turn_to(head);
  }

  void turn_to(int head) {
    mask_of_head = has_mask ? mask + broadcast_offset(p->mask, batch, head) : mask;
    blocks_of_head = has_blocks ? blocks + broadcast_offset(p->blocks, batch, head) : blocks;
  }

  // The columns that any of the rows first … last may see lie in column_begin … column_end - 1.
  int column_begin(int first) const {
    return has_left ? max(first + offset - p->left, 0) : 0;
  }

  int column_end(int first, int last) const {
    const int end = has_right ? min(columns, last + offset + p->right + 1) : columns;
    return first < rows ? end : 0;
  }

  // The rows that may see any of the columns first … last lie in row_begin … row_end - 1.
  int row_begin(int first) const {
    return has_right ? max(first - offset - p->right, 0) : 0;
  }

  int row_end(int first, int last) const {
    const int end = has_left ? min(rows, last - offset + p->left + 1) : rows;
    return first < columns ? end : 0;
  }

  // n rows from `row` and m columns from `column`, judged by positions and lengths alone.
  int band(int row, int n, int column, int m) const {
    if (row >= rows || column >= column_end(row, row + n - 1) || column + m <= column_begin(row)) {
      return none_visible;
    }
    bool whole = row + n <= rows && column + m <= columns;
    if (has_right) {
      whole = whole && column + m - 1 <= row + offset + p->right;
    }
    if (has_left) {
      whole = whole && column >= row + n - 1 + offset - p->left;
    }
    return whole ? all_visible : some_visible;
  }

  // The same by everything else; to be called by whole simdgroups for rows and columns that exist.
  int contents(int row, int n, int column, int m) const {
    int result = has_mask ? some_visible : all_visible;
    const int row_end = min(row + n, p->queries);
    const int column_end = min(column + m, p->keys);
    if (has_segments) {
      int low = INT_MAX, high = INT_MIN, key_low = INT_MAX, key_high = INT_MIN;
      for (int i = row + lane; i < row_end; i += 32) {
        low = min(low, query_segments[i]);
        high = max(high, query_segments[i]);
      }
      for (int i = column + lane; i < column_end; i += 32) {
        key_low = min(key_low, key_segments[i]);
        key_high = max(key_high, key_segments[i]);
      }
      low = simd_min(low);
      high = simd_max(high);
      key_low = simd_min(key_low);
      key_high = simd_max(key_high);
      if (high < key_low || key_high < low) {
        return none_visible;
      }
      if (low != high || key_low != key_high) {
        result = some_visible;
      }
    }
    if (has_ranges) {
      bool any = false;
      bool all = true;
      for (int i = row + lane; i < row_end; i += 32) {
        const int start = key_ranges[2 * i];
        const int end = key_ranges[2 * i + 1];
        any = any || max(start, column) < min(end, column_end);
        all = all && start <= column && end >= column_end;
      }
      if (!simd_any(any)) {
        return none_visible;
      }
      if (!simd_all(all)) {
        result = some_visible;
      }
    }
    if (has_blocks) {
      const int first_row = row / p->block_rows;
      const int first_column = column / p->block_columns;
      const int across = (column_end - 1) / p->block_columns - first_column + 1;
      const int count = ((row_end - 1) / p->block_rows - first_row + 1) * across;
      bool any = false;
      bool all = true;
      for (int i = lane; i < count; i += 32) {
        const bool some = block(first_row + i / across, first_column + i % across);
        any = any || some;
        all = all && some;
      }
      if (!simd_any(any)) {
        return none_visible;
      }
      if (!simd_all(all)) {
        result = some_visible;
      }
    }
    return result;
  }

  // Both together: what a simdgroup has to compute, and how carefully.
  int of_tile(int row, int n, int column, int m) const {
    const int result = band(row, n, column, m);
    if (result == none_visible || !(has_mask || has_segments || has_ranges || has_blocks)) {
      return result;
    }
    return min(result, contents(row, n, column, m));
  }

  bool block(int row, int column) const {
    return blocks_of_head[broadcast_index(p->blocks, row, column)] != 0;
  }

  bool visible(int row, int column) const {
    bool result = row < rows && column < columns;
    if (has_right) {
      result = result && column <= row + offset + p->right;
    }
    if (has_left) {
      result = result && column >= row + offset - p->left;
    }
    if (has_segments) {
      result = result && query_segments[row] == key_segments[column];
    }
    if (has_ranges) {
      result = result && column >= key_ranges[2 * row] && column < key_ranges[2 * row + 1];
    }
    if (has_blocks) {
      result = result && block(row / p->block_rows, column / p->block_columns);
    }
    if (has_mask) {
      result = result && mask_of_head[broadcast_index(p->mask, row, column)] != 0;
    }
    return result;
  }
};

// The first tile from `tile` on in which one of n rows may see something; whole simdgroups decide alike.
inline int next_tile(const thread Visibility& visibility, int tile, int end, int row, int n, int size) {
  if (has_segments || has_ranges || has_blocks) {
    while (tile < end && visibility.contents(row, n, tile * size, size) == none_visible) {
      ++tile;
    }
  }
  return tile;
}
