// Which pairs of a query row and a key column take part, which tiles are skipped, and which need no masking at all.
// Kernels ask nothing else about masks.
#pragma once

#include "parameters.h"

struct Visibility {
  int offset;   // position of query row 0
  int rows;     // rows from here on see nothing
  int columns;  // columns from here on are seen by nobody
  int left;
  int right;

  Visibility(constant Parameters& p, device const int* limits, int batch) {
    device const int* of_row = limits + ulong(batch) * ulong(p.limits_stride);
    offset = of_row[0];
    rows = min(of_row[1], p.queries);
    columns = min(of_row[2], p.keys);
    left = p.left;
    right = p.right;
  }

  // The columns that any of the rows first … last sees lie in column_begin … column_end - 1.
  int column_begin(int first) const {
    return has_left ? max(first + offset - left, 0) : 0;
  }

  int column_end(int first, int last) const {
    const int end = has_right ? min(columns, last + offset + right + 1) : columns;
    return first < rows ? end : 0;
  }

  // The rows that see any of the columns first … last lie in row_begin … row_end - 1.
  int row_begin(int first) const {
    return has_right ? max(first - offset - right, 0) : 0;
  }

  int row_end(int first, int last) const {
    const int end = has_left ? min(rows, last - offset + left + 1) : rows;
    return first < columns ? end : 0;
  }

  // Whether every row of row … row + n - 1 sees every column of column … column + m - 1.
  bool whole(int row, int n, int column, int m) const {
    bool result = row + n <= rows && column + m <= columns;
    if (has_right) {
      result = result && column + m - 1 <= row + offset + right;
    }
    if (has_left) {
      result = result && column >= row + n - 1 + offset - left;
    }
    return result;
  }

  // Whether no row of row … row + n - 1 sees any column of column … column + m - 1.
  bool none(int row, int n, int column, int m) const {
    return row >= rows || column >= column_end(row, row + n - 1) || column + m <= column_begin(row);
  }

  bool visible(int row, int column) const {
    bool result = row < rows && column < columns;
    if (has_right) {
      result = result && column <= row + offset + right;
    }
    if (has_left) {
      result = result && column >= row + offset - left;
    }
    return result;
  }
};
