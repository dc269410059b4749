// Attention, backward (Dao, arXiv:2307.08691, section 3.1): three kernels and no atomics, so that the same bits come out of
// every run.
//
//   attention_row_sums:   D = Σ dO·O - d(statistic), one number for each row
//   attention_d_query:    dQ = scale · dS K, parallel over query rows
//   attention_d_key_value: dK = scale · dSᵀ Q and dV = Pᵀ dO, parallel over key rows, looping over the heads of a group
//
// with P = exp(score - statistic) computed again and dS = P ∘ (dO Vᵀ - D). Inputs are matrix operands in their own dtype;
// P and dS are float32 operands, for the reason given in forward.metal.
#include "products.h"
#include "score.h"
#include "visibility.h"

// One simdgroup for each row.
template <typename T, int V, int SIMDGROUPS>
[[kernel, max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] void attention_row_sums(
    device const T* out [[buffer(0)]],                // [B, T, N, V]
    device const T* d_out [[buffer(1)]],              // [B, T, N, V]
    device const float* statistic [[buffer(2)]],      // [B, T, N]
    device const float* d_statistic [[buffer(3)]],    // [B, T, N]
    device float* row_sums [[buffer(4)]],             // [B, T, N]
    constant Parameters& p [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]],     // (SIMDGROUPS rows and heads, 1, batch row)
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  const ulong rows = ulong(p.queries) * p.heads;
  const ulong row = ulong(group.x) * SIMDGROUPS + simdgroup;
  if (row >= rows) {
    return;
  }
  const ulong at = group.z * rows + row;
  float sum = 0;
  for (int i = lane; i < V; i += 32) {
    sum += float(d_out[at * V + i]) * float(out[at * V + i]);
  }
  sum = simd_sum(sum);
  if (lane == 0) {
    row_sums[at] = statistic[at] == empty_statistic ? 0.0f : sum - d_statistic[at];
  }
}

template <
    typename T,
    int H,
    int V,
    int BLOCKS,
    int SIMDGROUPS,
    int KEYS,
    int COLUMNS,  // fragments of columns computed side by side
    int BUFFERS,
    bool CACHE_Q,
    bool CACHE_DO>
[[kernel, max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] void attention_d_query(
    device const T* query [[buffer(0)]],
    device const T* key [[buffer(1)]],
    device const T* value [[buffer(2)]],
    device const int* limits [[buffer(3)]],
    device const T* d_out [[buffer(4)]],
    device const float* statistic [[buffer(5)]],
    device const float* row_sums [[buffer(6)]],
    device T* d_query [[buffer(7)]],  // [B, T, N, H]
    constant Parameters& p [[buffer(8)]],
    uint3 group [[threadgroup_position_in_grid]],  // (tile of rows from the last, head, batch row)
    uint3 groups [[threadgroups_per_grid]],
    ushort thread_index [[thread_index_in_threadgroup]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane_index [[thread_index_in_simdgroup]]) {
  constexpr int rows_of_group = SIMDGROUPS * BLOCKS * 8;
  constexpr int threads = SIMDGROUPS * 32;
  constexpr int h_fragments = Padded<T, H>::width / 8;
  constexpr int v_fragments = Padded<T, V>::width / 8;
  constexpr bool staged = BUFFERS > 0;
  constexpr int k_size = staged ? KEYS * Padded<T, H>::stride : 1;
  constexpr int v_size = staged ? KEYS * Padded<T, V>::stride : 1;
  threadgroup T k_tiles[k_size * (BUFFERS == 2 ? 2 : 1)];
  threadgroup T v_tiles[v_size * (BUFFERS == 2 ? 2 : 1)];

  const Lane lane(lane_index);
  const int head = group.y;
  const int batch = group.z;
  const int key_head = head / (p.heads / p.key_heads);
  const int group_row = int(groups.x - 1 - group.x) * rows_of_group;
  const int first = group_row + simdgroup * BLOCKS * 8;
  const Visibility visibility(p, limits, batch);
  const Score score(p);

  const ulong q_stride = ulong(p.heads) * H;
  const ulong do_stride = ulong(p.heads) * V;
  const ulong k_stride = ulong(p.key_heads) * H;
  const ulong v_stride = ulong(p.key_heads) * V;
  const ulong q_offset = head_offset(batch, p.queries, p.heads, head, H) + ulong(first) * q_stride;
  device const T* do_rows = d_out + head_offset(batch, p.queries, p.heads, head, V) + ulong(first) * do_stride;
  device const T* k_rows =
      key + head_offset((batch / p.key_repeat) % p.key_rows, p.keys, p.key_heads, key_head, H);
  device const T* v_rows =
      value + head_offset((batch / p.value_repeat) % p.value_rows, p.keys, p.key_heads, key_head, V);

  const OwnRows<T, h_fragments, BLOCKS, CACHE_Q> q(query + q_offset, q_stride, p.queries - first, H, lane);
  const OwnRows<T, v_fragments, BLOCKS, CACHE_DO> d_o(do_rows, do_stride, p.queries - first, V, lane);
  float row_statistic[BLOCKS];
  float row_shift[BLOCKS];
  Fragment<float> sums[BLOCKS][h_fragments];
  for (int block = 0; block < BLOCKS; ++block) {
    const int row = first + block * 8 + lane.row;
    const bool inside = row < p.queries;
    const ulong at = (ulong(batch) * p.queries + row) * p.heads + head;
    row_statistic[block] = inside ? statistic[at] * log2_e : 0.0f;
    row_shift[block] = inside ? row_sums[at] : 0.0f;
  }
  clear(sums);

  const int begin = visibility.column_begin(group_row) / KEYS;
  const int end = (visibility.column_end(group_row, group_row + rows_of_group - 1) + KEYS - 1) / KEYS;
  if (BUFFERS == 2 && begin < end) {
    const int column = begin * KEYS;
    stage<T, H, KEYS, threads>(k_tiles, k_rows + column * k_stride, k_stride, visibility.columns - column, thread_index);
    stage<T, V, KEYS, threads>(v_tiles, v_rows + column * v_stride, v_stride, visibility.columns - column, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  for (int tile = begin; tile < end; ++tile) {
    const int column = tile * KEYS;
    int current = 0;
    if (BUFFERS == 1) {
      const int left = visibility.columns - column;
      stage<T, H, KEYS, threads>(k_tiles, k_rows + column * k_stride, k_stride, left, thread_index);
      stage<T, V, KEYS, threads>(v_tiles, v_rows + column * v_stride, v_stride, left, thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (BUFFERS == 2) {
      current = (tile - begin) & 1;
      if (tile + 1 < end) {
        const int next = column + KEYS;
        const int left = visibility.columns - next;
        stage<T, H, KEYS, threads>(
            k_tiles + (1 - current) * k_size, k_rows + next * k_stride, k_stride, left, thread_index);
        stage<T, V, KEYS, threads>(
            v_tiles + (1 - current) * v_size, v_rows + next * v_stride, v_stride, left, thread_index);
      }
    }

    const Tile<T, H, staged> k_tile = {
        k_tiles + current * k_size, k_rows + column * k_stride, k_stride, visibility.columns - column, lane};
    const Tile<T, V, staged> v_tile = {
        v_tiles + current * v_size, v_rows + column * v_stride, v_stride, visibility.columns - column, lane};
    for (int part = 0; part < KEYS / 8; part += COLUMNS) {
      const int part_column = column + part * 8;
      if (visibility.none(first, BLOCKS * 8, part_column, COLUMNS * 8)) {
        continue;
      }
      const bool whole = visibility.whole(first, BLOCKS * 8, part_column, COLUMNS * 8);
      Fragment<float> s[BLOCKS][COLUMNS];
      Fragment<float> d_p[BLOCKS][COLUMNS];
      multiply_rows(s, q, k_tile, part);
      multiply_rows(d_p, d_o, v_tile, part);
      for (int block = 0; block < BLOCKS; ++block) {
        const int row = first + block * 8 + lane.row;
        for (int c = 0; c < COLUMNS; ++c) {
          for (int e = 0; e < 2; ++e) {
            const float x = score.logit(s[block][c].thread_elements()[e]);
            const float weight = fast::exp2(x - row_statistic[block]);
            float d = score.derivative(weight * (d_p[block][c].thread_elements()[e] - row_shift[block]));
            if (!whole) {
              const int at = part_column + c * 8 + lane.column + e;
              d = visibility.visible(row, at) ? d : invisible_weight();
            }
            s[block][c].thread_elements()[e] = d;
          }
        }
      }
      accumulate(sums, s, k_tile, part, whole);
    }
    if (staged && tile + 1 < end) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }

  for (int block = 0; block < BLOCKS; ++block) {
    for (int i = 0; i < h_fragments; ++i) {
      store_rows(
          sums[block][i], p.scale, d_query + q_offset + ulong(block * 8) * q_stride + ulong(i * 8), q_stride,
          p.queries - first - block * 8, H - i * 8, lane);
    }
  }
}

// Simdgroups work in pairs over the same BLOCKS × 8 keys, with scores transposed (rows are keys, columns are queries). The
// first of a pair computes Pᵀ from K and Q, hands it over in threadgroup memory, and sums dV = Pᵀ dO; the second computes
// dPᵀ from V and dO, and sums dK = dSᵀ Q. Each holds one accumulator and one operand, which is what lets head sizes up to
// 256 stay in registers without computing anything twice.
template <
    typename T,
    int H,
    int V,
    int BLOCKS,
    int PAIRS,
    int QUERIES,
    int BUFFERS,
    bool CACHED>
[[kernel, max_total_threads_per_threadgroup(PAIRS * 64)]] void attention_d_key_value(
    device const T* query [[buffer(0)]],
    device const T* key [[buffer(1)]],
    device const T* value [[buffer(2)]],
    device const int* limits [[buffer(3)]],
    device const T* d_out [[buffer(4)]],
    device const float* statistic [[buffer(5)]],
    device const float* row_sums [[buffer(6)]],
    device T* d_key [[buffer(7)]],    // [B, S, K, H]
    device T* d_value [[buffer(8)]],  // [B, S, K, V]
    constant Parameters& p [[buffer(9)]],
    uint3 group [[threadgroup_position_in_grid]],  // (tile of keys, key head, batch row)
    ushort thread_index [[thread_index_in_threadgroup]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane_index [[thread_index_in_simdgroup]]) {
  constexpr int keys_of_group = PAIRS * BLOCKS * 8;
  constexpr int threads = PAIRS * 64;
  constexpr int h_fragments = Padded<T, H>::width / 8;
  constexpr int v_fragments = Padded<T, V>::width / 8;
  constexpr int most_fragments = h_fragments > v_fragments ? h_fragments : v_fragments;
  constexpr int columns = QUERIES / 8;
  constexpr bool staged = BUFFERS > 0;
  constexpr int q_size = staged ? QUERIES * Padded<T, H>::stride : 1;
  constexpr int do_size = staged ? QUERIES * Padded<T, V>::stride : 1;
  threadgroup T q_tiles[q_size * (BUFFERS == 2 ? 2 : 1)];
  threadgroup T do_tiles[do_size * (BUFFERS == 2 ? 2 : 1)];
  threadgroup float weights[PAIRS * BLOCKS * columns * 64];

  const Lane lane(lane_index);
  const bool for_value = simdgroup % 2 == 0;  // the first of a pair
  const int pair = simdgroup / 2;
  const int key_head = group.y;
  const int batch = group.z;
  const int heads_of_group = p.heads / p.key_heads;
  const int group_column = int(group.x) * keys_of_group;
  const int first = group_column + pair * BLOCKS * 8;
  const Visibility visibility(p, limits, batch);
  const Score score(p);

  const ulong q_stride = ulong(p.heads) * H;
  const ulong do_stride = ulong(p.heads) * V;
  const ulong k_stride = ulong(p.key_heads) * H;
  const ulong v_stride = ulong(p.key_heads) * V;
  const ulong k_offset = head_offset((batch / p.key_repeat) % p.key_rows, p.keys, p.key_heads, key_head, H);
  const ulong v_offset = head_offset((batch / p.value_repeat) % p.value_rows, p.keys, p.key_heads, key_head, V);
  // columns that nobody sees are not loaded: what they hold must not matter
  const OwnRows<T, most_fragments, BLOCKS, CACHED> own(
      for_value ? key + k_offset + ulong(first) * k_stride : value + v_offset + ulong(first) * v_stride,
      for_value ? k_stride : v_stride, visibility.columns - first, for_value ? H : V, lane);
  threadgroup float* handed = weights + pair * BLOCKS * columns * 64;
  Fragment<float> sums[BLOCKS][most_fragments];
  clear(sums);

  const int begin = visibility.row_begin(group_column) / QUERIES;
  const int end = (visibility.row_end(group_column, group_column + keys_of_group - 1) + QUERIES - 1) / QUERIES;
  const int tiles = max(end - begin, 0);
  const int turns = tiles * heads_of_group;
  if (BUFFERS == 2 && turns > 0) {
    const int row = begin * QUERIES;
    const int head = key_head * heads_of_group;
    stage<T, H, QUERIES, threads>(
        q_tiles, query + head_offset(batch, p.queries, p.heads, head, H) + row * q_stride, q_stride,
        visibility.rows - row, thread_index);
    stage<T, V, QUERIES, threads>(
        do_tiles, d_out + head_offset(batch, p.queries, p.heads, head, V) + row * do_stride, do_stride,
        visibility.rows - row, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  for (int turn = 0; turn < turns; ++turn) {
    const int head = key_head * heads_of_group + turn / tiles;
    const int row = (begin + turn % tiles) * QUERIES;
    device const T* q_rows = query + head_offset(batch, p.queries, p.heads, head, H) + row * q_stride;
    device const T* do_rows = d_out + head_offset(batch, p.queries, p.heads, head, V) + row * do_stride;
    const int left = visibility.rows - row;
    int current = 0;
    if (BUFFERS == 1) {
      stage<T, H, QUERIES, threads>(q_tiles, q_rows, q_stride, left, thread_index);
      stage<T, V, QUERIES, threads>(do_tiles, do_rows, do_stride, left, thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (BUFFERS == 2) {
      current = turn & 1;
      if (turn + 1 < turns) {
        const int next_head = key_head * heads_of_group + (turn + 1) / tiles;
        const int next = (begin + (turn + 1) % tiles) * QUERIES;
        stage<T, H, QUERIES, threads>(
            q_tiles + (1 - current) * q_size,
            query + head_offset(batch, p.queries, p.heads, next_head, H) + next * q_stride, q_stride,
            visibility.rows - next, thread_index);
        stage<T, V, QUERIES, threads>(
            do_tiles + (1 - current) * do_size,
            d_out + head_offset(batch, p.queries, p.heads, next_head, V) + next * do_stride, do_stride,
            visibility.rows - next, thread_index);
      }
    }

    const Tile<T, H, staged> q_tile = {q_tiles + current * q_size, q_rows, q_stride, left, lane};
    const Tile<T, V, staged> do_tile = {do_tiles + current * do_size, do_rows, do_stride, left, lane};
    const bool none = visibility.none(row, QUERIES, first, BLOCKS * 8);
    const bool whole = visibility.whole(row, QUERIES, first, BLOCKS * 8);
    Fragment<float> s[BLOCKS][columns];
    if (!none && for_value) {
      multiply_rows(s, own, q_tile, 0);
      for (int c = 0; c < columns; ++c) {
        for (int e = 0; e < 2; ++e) {
          const int at = row + c * 8 + lane.column + e;
          const bool inside = at < p.queries;
          const float row_statistic =
              inside ? statistic[(ulong(batch) * p.queries + at) * p.heads + head] * log2_e : 0.0f;
          for (int block = 0; block < BLOCKS; ++block) {
            float weight = fast::exp2(score.logit(s[block][c].thread_elements()[e]) - row_statistic);
            if (!whole) {
              weight = visibility.visible(at, first + block * 8 + lane.row) ? weight : invisible_weight();
            }
            s[block][c].thread_elements()[e] = weight;
          }
        }
        for (int block = 0; block < BLOCKS; ++block) {
          simdgroup_store(s[block][c], handed + (block * columns + c) * 64, 8);
        }
      }
    }
    if (!none && !for_value) {
      multiply_rows(s, own, do_tile, 0);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (!none && for_value) {
      accumulate(sums, s, do_tile, 0, whole);
    }
    if (!none && !for_value) {
      for (int c = 0; c < columns; ++c) {
        Fragment<float> weight[BLOCKS];
        for (int block = 0; block < BLOCKS; ++block) {
          simdgroup_load(weight[block], handed + (block * columns + c) * 64, 8);
        }
        for (int e = 0; e < 2; ++e) {
          const int at = row + c * 8 + lane.column + e;
          const bool inside = at < p.queries;
          const float shift = inside ? row_sums[(ulong(batch) * p.queries + at) * p.heads + head] : 0.0f;
          for (int block = 0; block < BLOCKS; ++block) {
            const float x = weight[block].thread_elements()[e];
            const float d = score.derivative(x * (s[block][c].thread_elements()[e] - shift));
            s[block][c].thread_elements()[e] = is_invisible(x) ? x : d;
          }
        }
      }
      accumulate(sums, s, q_tile, 0, whole);
    }
    if (turn + 1 < turns) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }

  const ulong out_stride = for_value ? v_stride : k_stride;
  const int size = for_value ? V : H;
  const float factor = for_value ? 1.0f : p.scale;
  device T* destination = (for_value ? d_value : d_key) + head_offset(batch, p.keys, p.key_heads, key_head, size) +
                          ulong(first) * out_stride;
  for (int block = 0; block < BLOCKS; ++block) {
    for (int i = 0; i < most_fragments; ++i) {
      store_rows(
          sums[block][i], factor, destination + ulong(block * 8) * out_stride + ulong(i * 8), out_stride,
          p.keys - first - block * 8, size - i * 8, lane);
    }
  }
}
