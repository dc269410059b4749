// Attention, backward (Dao, arXiv:2307.08691, section 3.1): several kernels and no atomics, so that the same bits come out of
// every run.
//
//   attention_row_sums:    D = Σ dO·O - d(log-sum-exp) and what probabilities need, three numbers for each row
//   attention_d_query:     dQ = scale · dS K, parallel over query rows
//   attention_d_key_value: dK = scale · dSᵀ Q and dV = Pᵀ dO, parallel over key rows, looping over the heads of a group
//   attention_d_bias:      dS summed over what the bias broadcasts, parallel over its elements
//
// with P = exp(score - maximum) / sum computed again and dS = P ∘ (dO Vᵀ - D). Inputs are matrix operands in their own dtype;
// P and dS are float32 operands, for the reason given in forward.metal.
#include "products.h"
#include "score.h"
#include "visibility.h"

// One simdgroup for each row.
template <typename T, int V, int SIMDGROUPS>
[[kernel, max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] void attention_row_sums(
    device const T* out [[buffer(0)]],                // [B, T, N, V]
    device const T* d_out [[buffer(1)]],              // [B, T, N, V]
    device const float* row_maximum [[buffer(2)]],    // [B, T, N]
    device const float* row_total [[buffer(3)]],      // [B, T, N]
    device const float* d_lse [[buffer(4)]],          // [B, T, N]
    device float* row_sums [[buffer(5)]],             // [B, T, N]
    device float2* row_states [[buffer(6)]],          // [B, T, N]: see `probability`
    constant Parameters& p [[buffer(7)]],
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
    store_gradient_row(row_sums, row_states, at, row_maximum[at], row_total[at], sum - d_lse[at]);
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
    bool CACHE_DO,
    int SLICES>   // threadgroups that share the columns of dQ, each with all scores
[[kernel, max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] void attention_d_query(
    ATTENTION_OPERANDS,
    device const T* d_out [[buffer(12)]],          // [B, T, N, V]
    device const float2* row_states [[buffer(13)]],  // [B, T, N]
    device const float* row_sums [[buffer(14)]],   // [B, T, N]
    device T* d_query [[buffer(15)]],              // [B, T, N, H]
    device float* d_scale [[buffer(16), function_constant(wants_scale)]],   // [B, T, N]: Σ dS · score / scale
    device float* d_slope [[buffer(17), function_constant(wants_slopes)]],  // [B, T, N]: Σ dS · distance
    uint3 launched [[threadgroup_position_in_grid]],  // of (tile of rows from the last and slice, head, batch row)
    ushort thread_index [[thread_index_in_threadgroup]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane_index [[thread_index_in_simdgroup]]) {
  const uint3 group = place_in(grid, launched);
  constexpr int rows_of_group = SIMDGROUPS * BLOCKS * 8;
  constexpr int threads = SIMDGROUPS * 32;
  constexpr int h_fragments = Padded<T, H>::width / 8;
  constexpr int v_fragments = Padded<T, V>::width / 8;
  constexpr int sum_fragments = Slice<T, H, SLICES>::count;
  using Tiles = TilePair<T, H, V, KEYS, BUFFERS, threads>;
  threadgroup T k_room[Tiles::first_room];
  threadgroup T v_room[Tiles::second_room];

  const Lane lane(lane_index);
  const int head = group.y;
  const int batch = group.z;
  const int key_head = head / (p.heads / p.key_heads);
  const int slice = int(group.x) % SLICES;
  const int group_row = int((grid.width - 1 - group.x) / SLICES) * rows_of_group;
  const int first = group_row + simdgroup * BLOCKS * 8;
  const Visibility visibility(p, limits, mask, blocks, query_segments, key_segments, key_ranges, batch, head, lane_index);
  const Score score(p, numbers, bias, batch, head, visibility.offset);
  const Dropout drop(p, dropout, batch, head);

  const ulong q_stride = ulong(p.heads) * H;
  const ulong do_stride = ulong(p.heads) * V;
  const ulong q_offset = head_offset(batch, p.queries, p.heads, head, H) + ulong(first) * q_stride;
  device const T* do_rows = d_out + head_offset(batch, p.queries, p.heads, head, V) + ulong(first) * do_stride;
  const RowPair<T, H, V> keys = keys_of<T, H, V>(p, key, value, batch, key_head, visibility.columns);
  const Tiles tiles = {k_room, v_room, thread_index, lane};
  const OwnRows<T, h_fragments, BLOCKS, CACHE_Q> q(query + q_offset, q_stride, p.queries - first, H, lane);
  const OwnRows<T, v_fragments, BLOCKS, CACHE_DO> d_o(do_rows, do_stride, p.queries - first, V, lane);
  float2 row_state[BLOCKS];
  float row_shift[BLOCKS];
  float scale_sum[BLOCKS];  // of the lane's own columns
  float slope_sum[BLOCKS];
  Fragment<float> sums[BLOCKS][sum_fragments];
  for (int block = 0; block < BLOCKS; ++block) {
    const int row = first + block * 8 + lane.row;
    const bool inside = row < p.queries;
    const ulong at = (ulong(batch) * p.queries + row) * p.heads + head;
    row_state[block] = inside ? row_states[at] : float2(0.0f);
    row_shift[block] = inside ? row_sums[at] : 0.0f;
    scale_sum[block] = 0;
    slope_sum[block] = 0;
  }
  clear(sums);

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

    for (int part = 0; part < KEYS / 8; part += COLUMNS) {
      const int part_column = column + part * 8;
      const int seen =
          walk.whole(turn) ? all_visible : visibility.of_tile(first, BLOCKS * 8, part_column, COLUMNS * 8);
      if (seen == none_visible) {
        continue;
      }
      const bool whole = seen == all_visible;
      Fragment<float> s[BLOCKS][COLUMNS];
      Fragment<float> d_p[BLOCKS][COLUMNS];
      multiply_rows(s, q, tiles.first(here, buffer), part);
      multiply_rows(d_p, d_o, tiles.second(here, buffer), part);
      for (int block = 0; block < BLOCKS; ++block) {
        const int row = first + block * 8 + lane.row;
        for (int c = 0; c < COLUMNS; ++c) {
          const int at = part_column + c * 8 + lane.column;
          uint4 words = has_dropout ? drop.words(row, at) : uint4(0);
          for (int e = 0; e < 2; ++e) {
            if (has_dropout && e == 1) {
              drop.next(words, row, at);
            }
            const float product = s[block][c].thread_elements()[e];
            float d_weight = d_p[block][c].thread_elements()[e];
            if (has_dropout) {
              d_weight *= drop.keeps(words, at + e) ? p.keep_factor : 0.0f;
            }
            float d = invisible_weight();
            if (whole || visibility.visible(row, at + e)) {
              float x;
              if (score.of(product, row, at + e, x)) {
                // what is visible is not marked with -0
                d = score.derivative(probability(x, row_state[block]) * (d_weight - row_shift[block]), x) + 0.0f;
                if (wants_scale) {
                  scale_sum[block] += d * product;
                }
                if (wants_slopes) {
                  slope_sum[block] += d * score.distance(row, at + e);
                }
              }
            }
            s[block][c].thread_elements()[e] = d;
          }
        }
      }
      accumulate(sums, s, tiles.first(here, buffer), part, slice * sum_fragments, !whole || score.may_hide());
    }
    if (BUFFERS > 0 && turn + 1 < walk.count) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }

  for (int block = 0; block < BLOCKS; ++block) {
    const int row = first + block * 8 + lane.row;
    const ulong at = (ulong(batch) * p.queries + row) * p.heads + head;
    const bool writes = slice == 0 && lane.column == 0 && row < p.queries;
    if (wants_scale) {
      const float sum = row_sum(scale_sum[block]);
      if (writes) {
        d_scale[at] = sum;
      }
    }
    if (wants_slopes) {
      const float sum = row_sum(slope_sum[block]);
      if (writes) {
        d_slope[at] = sum;
      }
    }
    for (int i = 0; i < sum_fragments; ++i) {
      const int column = (slice * sum_fragments + i) * 8;
      scale_sums(sums[block][i], score.scale);
      store_rows(
          sums[block][i], 1.0f, d_query + q_offset + ulong(block * 8) * q_stride + ulong(column), q_stride,
          p.queries - first - block * 8, H - column, lane);
    }
  }
}

// Where a tile of keys stands among the tiles of queries that it meets, one head of the group after another.
struct Turn {
  int head;
  int end_head;
  int i;
  Walk walk;

  int tile() const {
    return walk.tile(i);
  }

  // The turn after this one; its head is end_head where there is none.
  template <int QUERIES>
  Turn next(
      constant Parameters& p, const thread Visibility& visibility, device const int* lists, int column, int columns) const {
    Turn result = *this;
    ++result.i;
    while (result.i >= result.walk.count && ++result.head < result.end_head) {
      result.i = 0;
      result.walk = rows_for<QUERIES>(p, visibility, lists, result.head, column, columns);
    }
    return result;
  }
};

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
    bool CACHED,
    int SLICES>   // threadgroups that share the columns of dK and dV, each with all scores
[[kernel, max_total_threads_per_threadgroup(PAIRS * 64)]] void attention_d_key_value(
    ATTENTION_OPERANDS,
    device const T* d_out [[buffer(12)]],          // [B, T, N, V]
    device const float2* row_states [[buffer(13)]],  // [B, T, N]
    device const float* row_sums [[buffer(14)]],   // [B, T, N]
    device T* d_key [[buffer(15)]],                // [B, S, K, H]
    device T* d_value [[buffer(16)]],              // [B, S, K, V]
    uint3 launched [[threadgroup_position_in_grid]],  // of (tile of keys and slice, key head, batch row)
    ushort thread_index [[thread_index_in_threadgroup]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane_index [[thread_index_in_simdgroup]]) {
  const uint3 group = place_in(grid, launched);
  constexpr int keys_of_group = PAIRS * BLOCKS * 8;
  constexpr int threads = PAIRS * 64;
  constexpr int h_fragments = Padded<T, H>::width / 8;
  constexpr int v_fragments = Padded<T, V>::width / 8;
  constexpr int most_fragments = h_fragments > v_fragments ? h_fragments : v_fragments;
  constexpr int columns = QUERIES / 8;
  using Tiles = TilePair<T, H, V, QUERIES, BUFFERS, threads>;
  threadgroup T q_room[Tiles::first_room];
  threadgroup T do_room[Tiles::second_room];
  threadgroup float weights[PAIRS * BLOCKS * columns * 64];

  const Lane lane(lane_index);
  const bool for_value = simdgroup % 2 == 0;  // the first of a pair
  const int pair = simdgroup / 2;
  const int key_head = group.y;
  const int batch = group.z;
  const int heads_of_group = p.heads / p.key_heads;
  const int slice = int(group.x) % SLICES;
  const int group_column = int(group.x) / SLICES * keys_of_group;
  const int first = group_column + pair * BLOCKS * 8;
  const int first_head = key_head * heads_of_group;
  const int end_head = first_head + heads_of_group;
  Visibility visibility(p, limits, mask, blocks, query_segments, key_segments, key_ranges, batch, first_head, lane_index);
  Score score(p, numbers, bias, batch, first_head, visibility.offset);
  Dropout drop(p, dropout, batch, first_head);

  const ulong k_stride = ulong(p.key_heads) * H;
  const ulong v_stride = ulong(p.key_heads) * V;
  const ulong k_offset = head_offset(mapped_row(p.key, batch), p.keys, p.key_heads, key_head, H);
  const ulong v_offset = head_offset(mapped_row(p.value, batch), p.keys, p.key_heads, key_head, V);
  // columns that nobody sees are not loaded: what they hold must not matter
  const OwnRows<T, most_fragments, BLOCKS, CACHED> own(
      for_value ? key + k_offset + ulong(first) * k_stride : value + v_offset + ulong(first) * v_stride,
      for_value ? k_stride : v_stride, visibility.columns - first, for_value ? H : V, lane);
  threadgroup float* handed = weights + pair * BLOCKS * columns * 64;
  constexpr int sum_fragments = Slice<T, (H > V ? H : V), SLICES>::count;
  Fragment<float> sums[BLOCKS][sum_fragments];
  clear(sums);

  const Tiles tiles = {q_room, do_room, thread_index, lane};
  const RowPair<T, H, V> queries = {
      query + head_offset(batch, p.queries, p.heads, 0, H), d_out + head_offset(batch, p.queries, p.heads, 0, V), p.heads,
      visibility.rows};
  const Turn before = {first_head - 1, end_head, 0, {0, 0, nullptr}};
  Turn turn = before.next<QUERIES>(p, visibility, lists, group_column, keys_of_group);
  if (BUFFERS == 2 && turn.head < end_head) {
    tiles.load(queries.of_head(turn.head).from(turn.tile() * QUERIES), 0);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  int buffer = 0;
  while (turn.head < end_head) {
    const int head = turn.head;
    const int row = turn.tile() * QUERIES;
    const RowPair<T, H, V> here = queries.of_head(head).from(row);
    const Turn following = turn.next<QUERIES>(p, visibility, lists, group_column, keys_of_group);
    const bool last = following.head >= end_head;
    if (BUFFERS == 1) {
      tiles.load(here, 0);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (BUFFERS == 2 && !last) {
      tiles.load(queries.of_head(following.head).from(following.tile() * QUERIES), 1 - buffer);
    }
    const Tile<T, H, (BUFFERS > 0)> q_tile = tiles.first(here, buffer);
    const Tile<T, V, (BUFFERS > 0)> do_tile = tiles.second(here, buffer);

    visibility.turn_to(head);
    score.turn_to(head);
    drop.head = head;
    const int seen =
        turn.walk.whole(turn.i) ? all_visible : visibility.of_tile(row, QUERIES, first, BLOCKS * 8);
    const bool none = seen == none_visible;
    const bool whole = seen == all_visible;
    const bool careful = !whole || score.may_hide();
    Fragment<float> s[BLOCKS][columns];
    if (!none && for_value) {
      multiply_rows(s, own, q_tile, 0);
      for (int c = 0; c < columns; ++c) {
        Fragment<float> handing[BLOCKS];
        for (int e = 0; e < 2; ++e) {
          const int at = row + c * 8 + lane.column + e;
          const bool inside = at < p.queries;
          const float2 row_state = inside ? row_states[(ulong(batch) * p.queries + at) * p.heads + head] : float2(0.0f);
          for (int block = 0; block < BLOCKS; ++block) {
            const int column = first + block * 8 + lane.row;
            float weight = invisible_weight();  // of dV
            float hand = weight;                // of dS; negative where dropout cut it off
            if (whole || visibility.visible(at, column)) {
              float x;
              if (score.of(s[block][c].thread_elements()[e], at, column, x)) {
                weight = probability(x, row_state);
                hand = score.derivative(weight, x);
                if (has_dropout) {
                  const bool keep = drop.keeps(at, column);
                  weight *= keep ? p.keep_factor : 0.0f;
                  hand = keep ? hand : -hand;
                }
              }
            }
            s[block][c].thread_elements()[e] = weight;
            handing[block].thread_elements()[e] = hand;
          }
        }
        for (int block = 0; block < BLOCKS; ++block) {
          simdgroup_store(handing[block], handed + (block * columns + c) * 64, 8);
        }
      }
    }
    if (!none && !for_value) {
      multiply_rows(s, own, do_tile, 0);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (!none && for_value) {
      accumulate(sums, s, do_tile, 0, slice * sum_fragments, careful);
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
            float d_weight = s[block][c].thread_elements()[e];
            if (has_dropout) {
              d_weight *= x < 0 ? 0.0f : p.keep_factor;
            }
            const float d = (has_dropout ? fabs(x) : x) * (d_weight - shift);
            s[block][c].thread_elements()[e] = is_invisible(x) ? x : d + 0.0f;
          }
        }
      }
      accumulate(sums, s, q_tile, 0, slice * sum_fragments, careful);
    }
    if (!last) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    buffer = BUFFERS == 2 ? 1 - buffer : 0;
    turn = following;
  }

  const ulong out_stride = for_value ? v_stride : k_stride;
  const int size = for_value ? V : H;
  const float factor = for_value ? 1.0f : score.scale;
  device T* destination = (for_value ? d_value : d_key) + head_offset(batch, p.keys, p.key_heads, key_head, size) +
                          ulong(first) * out_stride;
  for (int block = 0; block < BLOCKS; ++block) {
    for (int i = 0; i < sum_fragments; ++i) {
      const int column = (slice * sum_fragments + i) * 8;
      scale_sums(sums[block][i], factor);
      store_rows(
          sums[block][i], 1.0f, destination + ulong(block * 8) * out_stride + ulong(column), out_stride,
          p.keys - first - block * 8, size - column, lane);
    }
  }
}

// One simdgroup for each 8 × (8 · COLUMNS) elements of the bias; along an axis that the bias lacks it walks over all tiles.
template <typename T, int H, int V, int COLUMNS>
[[kernel, max_total_threads_per_threadgroup(32)]] void attention_d_bias(
    ATTENTION_OPERANDS,
    device const T* d_out [[buffer(12)]],          // [B, T, N, V]
    device const float2* row_states [[buffer(13)]],  // [B, T, N]
    device const float* row_sums [[buffer(14)]],   // [B, T, N]
    device uchar* d_bias [[buffer(15)]],           // as bias
    uint3 launched [[threadgroup_position_in_grid]],  // of (tile of columns, tile of rows, row and head of the bias)
    ushort lane_index [[thread_index_in_simdgroup]]) {
  const uint3 group = place_in(grid, launched);
  constexpr int width = COLUMNS * 8;
  const Lane lane(lane_index);
  const int bias_row = int(group.z) / p.bias.heads;
  const int bias_head = int(group.z) % p.bias.heads;
  const ulong q_stride = ulong(p.heads) * H;
  const ulong do_stride = ulong(p.heads) * V;
  const int first_row = int(group.y) * 8;
  const int first_column = int(group.x) * width;
  const int last_row = p.bias.queries > 1 ? first_row : p.queries - 1;
  const int last_column = p.bias.keys > 1 ? first_column : p.keys - 1;
  const int low_head = p.bias.heads > 1 ? bias_head : 0;
  const int high_head = p.bias.heads > 1 ? bias_head : p.heads - 1;
  float sums[COLUMNS][2];
  for (int c = 0; c < COLUMNS; ++c) {
    sums[c][0] = 0;
    sums[c][1] = 0;
  }

  for (int batch = 0; batch < p.batch; ++batch) {
    if (mapped_row(p.bias.map, batch) != bias_row) {
      continue;
    }
    for (int head = low_head; head <= high_head; ++head) {
      const int key_head = head / (p.heads / p.key_heads);
      const Visibility visibility(p, limits, mask, blocks, query_segments, key_segments, key_ranges, batch, head, lane_index);
      const Score score(p, numbers, bias, batch, head, visibility.offset);
      const Dropout drop(p, dropout, batch, head);
      const RowPair<T, H, V> keys = keys_of<T, H, V>(p, key, value, batch, key_head, visibility.columns);
      for (int row = first_row; row <= last_row; row += 8) {
        const OwnRows<T, Padded<T, H>::width / 8, 1, false> q(
            query + head_offset(batch, p.queries, p.heads, head, H) + row * q_stride, q_stride, p.queries - row, H, lane);
        const OwnRows<T, Padded<T, V>::width / 8, 1, false> d_o(
            d_out + head_offset(batch, p.queries, p.heads, head, V) + row * do_stride, do_stride, p.queries - row, V,
            lane);
        const int own_row = row + lane.row;
        const bool inside = own_row < p.queries;
        const ulong at_row = (ulong(batch) * p.queries + own_row) * p.heads + head;
        const float2 row_state = inside ? row_states[at_row] : float2(0.0f);
        const float row_shift = inside ? row_sums[at_row] : 0.0f;
        for (int column = first_column; column <= last_column; column += width) {
          if (visibility.of_tile(row, 8, column, width) == none_visible) {
            continue;
          }
          const RowPair<T, H, V> here = keys.from(column);
          const Tile<T, H, false> k_tile = {nullptr, here.first, here.first_stride(), here.count, lane};
          const Tile<T, V, false> v_tile = {nullptr, here.second, here.second_stride(), here.count, lane};
          Fragment<float> s[1][COLUMNS];
          Fragment<float> d_p[1][COLUMNS];
          multiply_rows(s, q, k_tile, 0);
          multiply_rows(d_p, d_o, v_tile, 0);
          for (int c = 0; c < COLUMNS; ++c) {
            for (int e = 0; e < 2; ++e) {
              const int at = column + c * 8 + lane.column + e;
              if (visibility.visible(own_row, at)) {
                float x;
                if (score.of(s[0][c].thread_elements()[e], own_row, at, x)) {
                  float d_weight = d_p[0][c].thread_elements()[e];
                  if (has_dropout) {
                    d_weight *= drop.keeps(own_row, at) ? p.keep_factor : 0.0f;
                  }
                  sums[c][e] += score.derivative(probability(x, row_state) * (d_weight - row_shift), x);
                }
              }
            }
          }
        }
      }
    }
  }

  const ulong plane = ulong(group.z) * ulong(p.bias.queries) * ulong(p.bias.keys);
  float whole_row = 0;
  for (int c = 0; c < COLUMNS; ++c) {
    for (int e = 0; e < 2; ++e) {
      float x = sums[c][e];
      if (p.bias.queries == 1) {
        x += simd_shuffle_xor(x, ushort(2));
        x += simd_shuffle_xor(x, ushort(4));
        x += simd_shuffle_xor(x, ushort(16));
      }
      whole_row += x;
      const int row = p.bias.queries > 1 ? first_row + lane.row : 0;
      const int column = first_column + c * 8 + lane.column + e;
      const bool own = row < p.bias.queries && (p.bias.queries > 1 || lane.row == 0);
      if (p.bias.keys > 1 && own && column < p.bias.keys) {
        store_bias(d_bias, plane + broadcast_index(p.bias, row, column), x);
      }
    }
  }
  if (p.bias.keys == 1) {
    const float x = row_sum(whole_row);
    const int row = p.bias.queries > 1 ? first_row + lane.row : 0;
    const bool own = lane.column == 0 && (p.bias.queries > 1 || lane.row == 0);
    if (own && row < p.bias.queries) {
      store_bias(d_bias, plane + ulong(row), x);
    }
  }
}
