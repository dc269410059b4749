// What every attention kernel is told: sizes, row maps and the shared operands. Filled by the launch plan; knows no kernel.
//
// Letters as everywhere: T queries, S keys, N query heads, K key heads, G = N / K, H and V head sizes.
#pragma once

#include "core/source.h"

// Which features a launch uses; what it does not use is compiled away.
constant bool has_left [[function_constant(0)]];
constant bool has_right [[function_constant(1)]];
constant bool has_mask [[function_constant(2)]];
constant bool has_blocks [[function_constant(3)]];
constant bool has_segments [[function_constant(4)]];
constant int bias_type [[function_constant(5)]];  // 0 none, 1 float, 2 half, 3 bfloat
constant bool has_slopes [[function_constant(6)]];
constant bool has_sinks [[function_constant(7)]];
constant bool has_cap [[function_constant(8)]];
constant bool has_dropout [[function_constant(9)]];
constant bool has_ranges [[function_constant(12)]];
constant bool has_lists [[function_constant(13)]];     // of visible tiles, made by a kernel before this one
constant bool has_spans [[function_constant(14)]];     // of which only two runs are kept: all, and those wholly visible
constant bool wants_scale [[function_constant(10)]];   // gradients that the kernel of dQ sums up too
constant bool wants_slopes [[function_constant(11)]];

// Batch row b reads row (b / repeat) % rows of an operand.
struct RowMap {
  int rows;
  int repeat;
};

// An operand [rows, 1|heads, 1|queries, 1|keys]; an axis of size 1 serves all.
struct Broadcast {
  RowMap map;
  int heads;
  int queries;
  int keys;
};

struct Parameters {
  int queries;         // T
  int keys;            // S
  int heads;           // N
  int key_heads;       // K
  int batch;           // B
  int limits_stride;   // 3: `limits` has a row for each batch row; 0: one row for all
  int numbers_stride;  // 3: `numbers` has a row for each batch row and head; 0: one row for all
  RowMap key;
  RowMap value;
  int left;            // columns from position - left on are visible, where has_left
  int right;           // columns to position + right are visible, where has_right
  Broadcast bias;
  Broadcast mask;
  Broadcast blocks;    // one entry for block_rows × block_columns scores
  int block_rows;
  int block_columns;
  float cap;
  uint drop_below;     // random words below this drop a probability
  float keep_factor;   // 1 / (1 - rate)
};

// A grid may be launched in parts.
struct Grid {
  uint x;       // the first threadgroup of this launch
  uint y;
  uint z;
  uint width;   // threadgroups of all launches together
  uint height;
  uint depth;
};

// What visibility asks of a launch. What a launch does not use is a few zero bytes.
#define VISIBILITY_OPERANDS                                                                       \
  constant Parameters& p [[buffer(3)]],                                                           \
  device const int* limits [[buffer(4)]],         /* [1|B, 3]: position of row 0, visible rows and columns */ \
  device const uchar* mask [[buffer(7)]],         /* Broadcast, nonzero where visible */          \
  device const uchar* blocks [[buffer(8)]],       /* Broadcast, nonzero where some score is visible */ \
  device const int* query_segments [[buffer(9)]], /* [B, T] */                                    \
  device const int* key_segments [[buffer(10)]],  /* [B, S] */                                    \
  device const int* key_ranges [[buffer(18), function_constant(has_ranges)]] /* [B, T, 2]: first column, end */

// The operands that all attention kernels share, at the same indices.
#define ATTENTION_OPERANDS                                                                        \
  VISIBILITY_OPERANDS,                                                                            \
  device const T* query [[buffer(0)]],            /* [B, T, N, H] */                              \
  device const typename KeySource::Storage* key [[buffer(1)]],      /* [rows, S, K, H] */         \
  device const typename ValueSource::Storage* value [[buffer(2)]],  /* [rows, S, K, V] */         \
  device const float* numbers [[buffer(5)]],      /* [1|B·N, 3]: scale, slope, sink */            \
  device const uchar* bias [[buffer(6)]],         /* Broadcast, of bias_type */                   \
  device const uint* dropout [[buffer(11)]],      /* [B, 6]: seed; batch, first head, row, column */ \
  device const int* lists [[buffer(19), function_constant(has_lists)]], /* see Walk in visibility.h */ \
  constant Grid& grid [[buffer(20)]]

constant constexpr float log2_e = 1.44269504088896341f;

// The place in the whole grid of a threadgroup of this launch.
INLINED uint3 place_in(constant Grid& grid, uint3 group) {
  return uint3(grid.x, grid.y, grid.z) + group;
}

INLINED int mapped_row(constant RowMap& map, int batch) {
  return (batch / map.repeat) % map.rows;
}

INLINED ulong broadcast_offset(constant Broadcast& x, int batch, int head) {
  const ulong plane = ulong(mapped_row(x.map, batch)) * ulong(x.heads) + ulong(x.heads > 1 ? head : 0);
  return plane * ulong(x.queries) * ulong(x.keys);
}

INLINED ulong broadcast_index(constant Broadcast& x, int row, int column) {
  return ulong(x.queries > 1 ? row : 0) * ulong(x.keys) + ulong(x.keys > 1 ? column : 0);
}
