// Attention, forward: softmax(scale · Q Kᵀ) V in one pass over keys, with the log-sum-exp of each row.
//
// A threadgroup has SIMDGROUPS simdgroups, each with BLOCKS × 8 query rows of one head, and walks over tiles of KEYS
// columns. Scores, probabilities and sums never leave the registers of the simdgroup that made them (online softmax,
// Milakov & Gimelshein, arXiv:1805.02867). With STREAMS > 1 the columns of a tile are dealt to independent running
// (maximum, sum, output) triples, which shortens chains of dependent instructions, and are merged at the end.
//
// Q, K and V are matrix operands in their own dtype. Scores and output are accumulated in float32, and so is the
// probability when it becomes an operand: it already lies in the registers of the score, and rounding it to 16 bits would
// cost about a unit in the last place of the output.
#include "products.h"
#include "score.h"
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
    device float* statistic [[buffer(13)]],        // [B, T, N]
    uint3 group [[threadgroup_position_in_grid]],  // (tile of rows from the last and slice, head, batch row)
    uint3 groups [[threadgroups_per_grid]],
    ushort thread_index [[thread_index_in_threadgroup]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane_index [[thread_index_in_simdgroup]]) {
  constexpr int rows_of_group = SIMDGROUPS * BLOCKS * 8;
  constexpr int threads = SIMDGROUPS * 32;
  constexpr int v_fragments = Slice<T, V, SLICES>::count;
  constexpr int columns = KEYS / 8 / STREAMS;  // fragments of a stream in a tile
  constexpr bool staged = BUFFERS > 0;
  constexpr int k_size = staged ? KEYS * Padded<T, H>::stride : 1;
  constexpr int v_size = staged ? KEYS * Padded<T, V>::stride : 1;
  threadgroup T k_tiles[k_size * (BUFFERS == 2 ? 2 : 1)];
  threadgroup T v_tiles[v_size * (BUFFERS == 2 ? 2 : 1)];

  const Lane lane(lane_index);
  const int head = group.y;
  const int batch = group.z;
  const int key_head = head / (p.heads / p.key_heads);
  const int slice = int(group.x) % SLICES;
  const int group_row = int((groups.x - 1 - group.x) / SLICES) * rows_of_group;  // under a causal mask the longest go first
  const int first = group_row + simdgroup * BLOCKS * 8;
  const Visibility visibility(p, limits, mask, blocks, query_segments, key_segments, key_ranges, batch, head, lane_index);
  const Score score(p, numbers, bias, batch, head, visibility.offset);
  const Dropout drop(p, dropout, batch, head);

  const ulong q_stride = ulong(p.heads) * H;
  const ulong k_stride = ulong(p.key_heads) * H;
  const ulong v_stride = ulong(p.key_heads) * V;
  device const T* q_rows = query + head_offset(batch, p.queries, p.heads, head, H) + ulong(first) * q_stride;
  device const T* k_rows =
      key + head_offset(mapped_row(p.key, batch), p.keys, p.key_heads, key_head, H);
  device const T* v_rows =
      value + head_offset(mapped_row(p.value, batch), p.keys, p.key_heads, key_head, V);

  const OwnRows<T, Padded<T, H>::width / 8, BLOCKS, CACHE_Q> q(q_rows, q_stride, p.queries - first, H, lane);
  Fragment<float> sums[STREAMS][BLOCKS][v_fragments];
  float high[STREAMS][BLOCKS];
  float total[STREAMS][BLOCKS];  // of the lane's own columns
  for (int stream = 0; stream < STREAMS; ++stream) {
    clear(sums[stream]);
    for (int block = 0; block < BLOCKS; ++block) {
      high[stream][block] = -INFINITY;
      total[stream][block] = 0;
    }
  }

  const int begin = visibility.column_begin(group_row) / KEYS;
  const int end = (visibility.column_end(group_row, group_row + rows_of_group - 1) + KEYS - 1) / KEYS;
  int tile = next_tile(visibility, begin, end, group_row, rows_of_group, KEYS);
  if (BUFFERS == 2 && tile < end) {
    const int column = tile * KEYS;
    stage<T, H, KEYS, threads>(k_tiles, k_rows + column * k_stride, k_stride, visibility.columns - column, thread_index);
    stage<T, V, KEYS, threads>(v_tiles, v_rows + column * v_stride, v_stride, visibility.columns - column, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  int current = 0;
  while (tile < end) {
    const int column = tile * KEYS;
    const int following = next_tile(visibility, tile + 1, end, group_row, rows_of_group, KEYS);
    if (BUFFERS == 1) {
      const int left = visibility.columns - column;
      stage<T, H, KEYS, threads>(k_tiles, k_rows + column * k_stride, k_stride, left, thread_index);
      stage<T, V, KEYS, threads>(v_tiles, v_rows + column * v_stride, v_stride, left, thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (BUFFERS == 2 && following < end) {
      const int next = following * KEYS;
      const int left = visibility.columns - next;
      stage<T, H, KEYS, threads>(
          k_tiles + (1 - current) * k_size, k_rows + next * k_stride, k_stride, left, thread_index);
      stage<T, V, KEYS, threads>(
          v_tiles + (1 - current) * v_size, v_rows + next * v_stride, v_stride, left, thread_index);
    }

    const int seen = visibility.of_tile(first, BLOCKS * 8, column, KEYS);
    if (seen != none_visible) {
      const bool whole = seen == all_visible;
      const bool careful = !whole || score.may_hide();
      const Tile<T, H, staged> k_tile = {
          k_tiles + current * k_size, k_rows + column * k_stride, k_stride, visibility.columns - column, lane};
      const Tile<T, V, staged> v_tile = {
          v_tiles + current * v_size, v_rows + column * v_stride, v_stride, visibility.columns - column, lane};

      for (int stream = 0; stream < STREAMS; ++stream) {
        Fragment<float> s[BLOCKS][columns];
        multiply_rows(s, q, k_tile, stream * columns);

        for (int block = 0; block < BLOCKS; ++block) {
          const int row = first + block * 8 + lane.row;
          float largest = high[stream][block];
          for (int c = 0; c < columns; ++c) {
            for (int e = 0; e < 2; ++e) {
              const int at = column + (stream * columns + c) * 8 + lane.column + e;
              float x = -INFINITY;
              if (whole || visibility.visible(row, at)) {
                x = score.logit(s[block][c].thread_elements()[e], row, at);
              }
              s[block][c].thread_elements()[e] = x;
              largest = max(largest, x);
            }
          }
          largest = row_max(largest);
          const float zero = largest == -INFINITY ? 0.0f : largest;
          const float shrink = fast::exp2(high[stream][block] - zero);
          float sum = total[stream][block] * shrink;
          for (int c = 0; c < columns; ++c) {
            const int at = column + (stream * columns + c) * 8 + lane.column;
            const uint4 words = has_dropout ? drop.words(row, at) : uint4(0);
            for (int e = 0; e < 2; ++e) {
              const float x = s[block][c].thread_elements()[e];
              float weight = fast::exp2(x - zero);
              sum += weight;
              if (has_dropout) {
                weight = drop.keeps(words, at + e) ? weight * p.keep_factor : 0.0f;
              }
              if (careful) {
                weight = x == -INFINITY ? invisible_weight() : weight;
              }
              s[block][c].thread_elements()[e] = weight;
            }
          }
          high[stream][block] = largest;
          total[stream][block] = sum;
          for (int i = 0; i < v_fragments; ++i) {
            sums[stream][block][i].thread_elements()[0] *= shrink;
            sums[stream][block][i].thread_elements()[1] *= shrink;
          }
        }

        accumulate(sums[stream], s, v_tile, stream * columns, slice * v_fragments, careful);
      }
    }
    if (staged && following < end) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    current = BUFFERS == 2 ? 1 - current : 0;
    tile = following;
  }

  const ulong out_stride = ulong(p.heads) * V;
  device T* out_rows = out + head_offset(batch, p.queries, p.heads, head, V) + ulong(first) * out_stride;
  for (int block = 0; block < BLOCKS; ++block) {
    float largest = high[0][block];
    for (int stream = 1; stream < STREAMS; ++stream) {
      largest = max(largest, high[stream][block]);
    }
    const bool empty = largest == -INFINITY;
    if (has_sinks && !empty) {
      largest = max(largest, score.sink(head));
    }
    const float zero = empty ? 0.0f : largest;
    float sum = 0;
    for (int stream = 0; stream < STREAMS; ++stream) {
      const float shrink = fast::exp2(high[stream][block] - zero);
      sum += total[stream][block] * shrink;
      for (int i = 0; i < v_fragments; ++i) {
        for (int e = 0; e < 2; ++e) {
          const float x = sums[stream][block][i].thread_elements()[e] * shrink;
          sums[0][block][i].thread_elements()[e] = stream == 0 ? x : sums[0][block][i].thread_elements()[e] + x;
        }
      }
    }
    sum = row_sum(sum);
    if (has_sinks && !empty) {
      sum += fast::exp2(score.sink(head) - zero);
    }
    const float inverse = empty ? 0.0f : 1.0f / sum;
    const int rows = p.queries - first - block * 8;
    for (int i = 0; i < v_fragments; ++i) {
      store_rows(
          sums[0][block][i], inverse, out_rows + ulong(block * 8) * out_stride + ulong((slice * v_fragments + i) * 8),
          out_stride, rows, V - (slice * v_fragments + i) * 8, lane);
    }
    if (slice == 0 && lane.column == 0 && lane.row < rows) {
      const int row = first + block * 8 + lane.row;
      statistic[(ulong(batch) * p.queries + row) * p.heads + head] =
          empty ? empty_statistic : (largest + precise::log2(sum)) * ln_2;
    }
  }
}
