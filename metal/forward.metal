// Attention, forward: softmax(scale · Q Kᵀ) V in one pass over keys, with maximum and sum of each row.
//
// A threadgroup has SIMDGROUPS simdgroups, each with BLOCKS × 8 query rows of one head, and walks over tiles of KEYS
// columns. Scores, probabilities and sums never leave the registers of the simdgroup that made them. With STREAMS > 1 the
// columns of a tile are dealt to independent running (maximum, sum, output) triples, which shortens chains of dependent
// instructions, and are merged at the end.
//
// Q, K and V are matrix operands in their own dtype. Scores and output are accumulated in float32, and so is the
// probability when it becomes an operand: it already lies in the registers of the score, and rounding it to 16 bits would
// cost about a unit in the last place of the output.
#include "score.h"
#include "softmax.h"
#include "visibility.h"

template <
    typename T,
    int H,
    int V,
    int BLOCKS,
    int SIMDGROUPS,
    int KEYS,
    int STREAMS,
    int BUFFERS,    // tiles of K and of V in threadgroup memory: 2 loads ahead, 0 reads device memory directly
    bool CACHE_Q,
    int SLICES>     // threadgroups that share the columns of the output, each with all scores
[[kernel, max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] void attention_forward(
    ATTENTION_OPERANDS,
    device T* out [[buffer(12)]],                  // [B, T, N, V]
    device float* row_maximum [[buffer(13)]],      // [B, T, N]
    device float* row_total [[buffer(14)]],        // [B, T, N]
    uint3 launched [[threadgroup_position_in_grid]],  // of (tile of rows from the last and slice, head, batch row)
    ushort thread_index [[thread_index_in_threadgroup]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane_index [[thread_index_in_simdgroup]]) {
  const uint3 group = place_in(grid, launched);
  constexpr int rows_of_group = SIMDGROUPS * BLOCKS * 8;
  constexpr int threads = SIMDGROUPS * 32;
  constexpr int v_fragments = Slice<T, V, SLICES>::count;
  constexpr int columns = KEYS / 8 / STREAMS;  // fragments of a stream in a tile
  using Tiles = TilePair<T, H, V, KEYS, BUFFERS, threads>;
  threadgroup T k_room[Tiles::first_room];
  threadgroup T v_room[Tiles::second_room];

  const Lane lane(lane_index);
  const int head = group.y;
  const int batch = group.z;
  const int key_head = head / (p.heads / p.key_heads);
  const int slice = int(group.x) % SLICES;
  const int group_row = int((grid.width - 1 - group.x) / SLICES) * rows_of_group;  // under a causal mask the longest go first
  const int first = group_row + simdgroup * BLOCKS * 8;
  const Visibility visibility(p, limits, mask, blocks, query_segments, key_segments, key_ranges, batch, head, lane_index);
  const Score score(p, numbers, bias, batch, head, visibility.offset);
  const Dropout drop(p, dropout, batch, head);

  const ulong q_stride = ulong(p.heads) * H;
  const OwnRows<T, Padded<T, H>::width / 8, BLOCKS, CACHE_Q> q(
      query + head_offset(batch, p.queries, p.heads, head, H) + ulong(first) * q_stride, q_stride, p.queries - first, H, lane);
  const RowPair<T, H, V> keys = keys_of<T, H, V>(p, key, value, batch, key_head, visibility.columns);
  const Tiles tiles = {k_room, v_room, thread_index, lane};
  Running<BLOCKS, v_fragments> running[STREAMS];

  const Walk walk = columns_for<KEYS>(p, visibility, lists, head, group_row, rows_of_group);
  if (BUFFERS == 2 && walk.count > 0) {
    tiles.load(keys.from(walk.tile(0) * KEYS), 0);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  for (int turn = 0; turn < walk.count; ++turn) {
    const int column = walk.tile(turn) * KEYS;
    const int buffer = BUFFERS == 2 ? turn % 2 : 0;
    const RowPair<T, H, V> here = keys.from(column);
    if (BUFFERS == 1) {
      tiles.load(here, 0);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (BUFFERS == 2 && turn + 1 < walk.count) {
      tiles.load(keys.from(walk.tile(turn + 1) * KEYS), 1 - buffer);
    }

    const int seen = walk.whole(turn) ? all_visible : visibility.of_tile(first, BLOCKS * 8, column, KEYS);
    if (seen != none_visible) {
      const bool whole = seen == all_visible;
      const bool careful = !whole || score.may_hide();
      for (int stream = 0; stream < STREAMS; ++stream) {
        Fragment<float> s[BLOCKS][columns];
        uint visible[BLOCKS];
        multiply_rows(s, q, tiles.first(here, buffer), stream * columns);
        for (int block = 0; block < BLOCKS; ++block) {
          visible[block] = 0;
          const int row = first + block * 8 + lane.row;
          for (int c = 0; c < columns; ++c) {
            for (int e = 0; e < 2; ++e) {
              const int at = column + (stream * columns + c) * 8 + lane.column + e;
              float x = -INFINITY;
              if (whole || visibility.visible(row, at)) {
                visible[block] |= uint(score.of(s[block][c].thread_elements()[e], row, at, x)) << (2 * c + e);
              }
              s[block][c].thread_elements()[e] = x;
            }
          }
        }
        running[stream].weigh(s, visible, careful);
        if (has_dropout) {
          for (int block = 0; block < BLOCKS; ++block) {
            for (int c = 0; c < columns; ++c) {
              const int at = column + (stream * columns + c) * 8 + lane.column;
              drop.thin(s[block][c], first + block * 8 + lane.row, at);
            }
          }
        }
        accumulate(
            running[stream].sums, s, tiles.second(here, buffer), stream * columns, slice * v_fragments, careful);
      }
    }
    if (BUFFERS > 0 && turn + 1 < walk.count) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }

  const ulong out_stride = ulong(p.heads) * V;
  device T* out_rows = out + head_offset(batch, p.queries, p.heads, head, V) + ulong(first) * out_stride;
  for (int block = 0; block < BLOCKS; ++block) {
    float largest = running[0].high[block];
    for (int stream = 1; stream < STREAMS; ++stream) {
      largest = max(largest, running[stream].high[block]);
    }
    largest = or_zero(has_sinks ? max(largest, score.sink(head)) : largest);
    float sum = invisible_weight();
    for (int stream = 0; stream < STREAMS; ++stream) {
      const float shrink = weight_of(running[stream].high[block], largest);
      sum += running[stream].total[block] * shrink;
      for (int i = 0; i < v_fragments; ++i) {
        for (int e = 0; e < 2; ++e) {
          const float x = running[stream].sums[block][i].thread_elements()[e] * shrink;
          running[0].sums[block][i].thread_elements()[e] =
              stream == 0 ? x : running[0].sums[block][i].thread_elements()[e] + x;
        }
      }
    }
    sum = row_sum(sum);
    const bool empty = is_invisible(sum);
    if (has_sinks) {
      sum += weight_of(score.sink(head), largest);
    }
    const float inverse = empty ? 0.0f : 1.0f / sum;
    const int rows = p.queries - first - block * 8;
    for (int i = 0; i < v_fragments; ++i) {
      store_rows(
          running[0].sums[block][i], inverse, out_rows + ulong(block * 8) * out_stride + ulong((slice * v_fragments + i) * 8),
          out_stride, rows, V - (slice * v_fragments + i) * 8, lane);
    }
    if (slice == 0 && lane.column == 0 && lane.row < rows) {
      const int row = first + block * 8 + lane.row;
      store_row(row_maximum, row_total, (ulong(batch) * p.queries + row) * p.heads + head, largest, sum, empty);
    }
  }
}
