// Attention for a few query rows against many keys: the keys are dealt to simdgroups ("splits"), each keeps its own running
// maximum, sum and output, and a second kernel merges them (Flash-Decoding; Dao et al., 2023).
//
// The rows of a simdgroup are all T rows of all G heads that share a key head, so each key and value is loaded once for the
// whole group, straight from device memory: nobody else wants it. Nothing beyond a batch row's length is read.
#include "score.h"
#include "softmax.h"
#include "visibility.h"

// Row r of a group is query row r % T of head r / T.
struct GroupRow {
  int head;
  int row;
  bool inside;

  GroupRow(constant Parameters& p, int key_head, int r) {
    const int heads = p.heads / p.key_heads;
    inside = r < heads * p.queries;
    head = key_head * heads + (inside ? r / p.queries : 0);
    row = inside ? r % p.queries : 0;
  }
};

// The query rows of a simdgroup in registers; rows and columns outside are zero.
template <typename T, int COUNT, int BLOCKS>
struct GroupRows {
  Fragment<T> kept[BLOCKS][COUNT];

  Fragment<T> at(int block, int i) const {
    return kept[block][i];
  }
};

template <typename T, int H, int V, int BLOCKS, int SIMDGROUPS, int KEYS, int SLICES>
[[kernel, max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] void attention_decode(
    ATTENTION_OPERANDS,
    device float* split_out [[buffer(12)]],    // [B, K, splits, G·T, V], not normalised
    device float* split_state [[buffer(13)]],  // [B, K, splits, G·T, 2]: maximum, sum; -0 where nothing is visible
    constant int& splits [[buffer(14)]],
    constant int& split_keys [[buffer(15)]],   // columns of a split, a multiple of KEYS
    uint3 launched [[threadgroup_position_in_grid]],  // of (splits / SIMDGROUPS, tile of rows and slice, key head and batch row)
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane_index [[thread_index_in_simdgroup]]) {
  const uint3 group = place_in(grid, launched);
  constexpr int h_fragments = Padded<T, H>::width / 8;
  constexpr int v_fragments = Slice<T, V, SLICES>::count;
  constexpr int columns = KEYS / 8;
  const Lane lane(lane_index);
  const int split = int(group.x) * SIMDGROUPS + simdgroup;
  const int slice = int(group.y) % SLICES;
  const int first = int(group.y) / SLICES * BLOCKS * 8;
  const int key_head = int(group.z) % p.key_heads;
  const int batch = int(group.z) / p.key_heads;
  const int rows = p.heads / p.key_heads * p.queries;
  if (split >= splits) {
    return;
  }

  const Visibility all(p, limits, mask, blocks, query_segments, key_segments, key_ranges, batch, key_head, lane_index);
  const RowPair<T, H, V> keys = keys_of<T, H, V>(p, key, value, batch, key_head, all.columns);
  GroupRows<T, h_fragments, BLOCKS> q;
  Visibility visibility[BLOCKS];
  Score score[BLOCKS];
  int own_row[BLOCKS];  // -1 outside
  for (int block = 0; block < BLOCKS; ++block) {
    const GroupRow own(p, key_head, first + block * 8 + lane.row);
    own_row[block] = own.inside ? own.row : -1;
    visibility[block] =
        Visibility(p, limits, mask, blocks, query_segments, key_segments, key_ranges, batch, own.head, lane_index);
    score[block] = Score(p, numbers, bias, batch, own.head, all.offset);
    device const T* at = query + head_offset(batch, p.queries, p.heads, own.head, H) + ulong(own.row) * p.heads * H;
    for (int i = 0; i < h_fragments; ++i) {
      const int column = i * 8 + lane.column;
      q.kept[block][i].thread_elements()[0] = own.inside && column < H ? at[column] : T(0);
      q.kept[block][i].thread_elements()[1] = own.inside && column + 1 < H ? at[column + 1] : T(0);
    }
  }

  Running<BLOCKS, v_fragments> running;
  const bool careless = !has_mask && !has_blocks && !has_segments && !has_ranges;
  const int begin = max(split * split_keys, all.column_begin(0) / KEYS * KEYS);
  const int end = min((split + 1) * split_keys, all.column_end(0, p.queries - 1));
  for (int column = begin; column < end; column += KEYS) {
    const bool whole = careless && all.band(0, p.queries, column, KEYS) == all_visible;
    const RowPair<T, H, V> here = keys.from(column);
    const Tile<T, H, false> k_tile = {nullptr, here.first, here.first_stride(), here.count, lane};
    const Tile<T, V, false> v_tile = {nullptr, here.second, here.second_stride(), here.count, lane};
    Fragment<float> s[BLOCKS][columns];
    uint visible[BLOCKS];
    multiply_rows(s, q, k_tile, 0);
    for (int block = 0; block < BLOCKS; ++block) {
      visible[block] = 0;
      for (int c = 0; c < columns; ++c) {
        for (int e = 0; e < 2; ++e) {
          const int at = column + c * 8 + lane.column + e;
          float x = -INFINITY;
          if (own_row[block] >= 0 && (whole || visibility[block].visible(own_row[block], at))) {
            visible[block] |= uint(score[block].of(s[block][c].thread_elements()[e], own_row[block], at, x)) << (2 * c + e);
          }
          s[block][c].thread_elements()[e] = x;
        }
      }
    }
    const bool careful = !whole || score[0].may_hide();
    running.weigh(s, visible, careful);
    accumulate(running.sums, s, v_tile, 0, slice * v_fragments, careful);
  }

  const ulong plane = (ulong(batch) * p.key_heads + key_head) * splits + split;
  for (int block = 0; block < BLOCKS; ++block) {
    const int row = first + block * 8;
    const float sum = row_sum(running.total[block]);
    device float* at = split_out + (plane * rows + row) * V;
    for (int i = 0; i < v_fragments; ++i) {
      const int column = (slice * v_fragments + i) * 8;
      store_rows(running.sums[block][i], 1.0f, at + column, ulong(V), rows - row, V - column, lane);
    }
    if (slice == 0 && lane.column == 0 && row + lane.row < rows) {
      device float* state = split_state + (plane * rows + row + lane.row) * 2;
      state[0] = running.high[block];
      state[1] = sum;
    }
  }
}

// One simdgroup for each row: its splits become one output, maximum and sum.
template <typename T, int V, int SIMDGROUPS>
[[kernel, max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] void attention_merge(
    device const float* split_out [[buffer(0)]],
    device const float* split_state [[buffer(1)]],
    device const float* numbers [[buffer(2)]],
    device T* out [[buffer(3)]],              // [B, T, N, V]
    device float* row_maximum [[buffer(4)]],  // [B, T, N]
    device float* row_total [[buffer(5)]],    // [B, T, N]
    constant Parameters& p [[buffer(6)]],
    constant int& splits [[buffer(7)]],
    uint3 group [[threadgroup_position_in_grid]],  // (SIMDGROUPS rows, key head, batch row)
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  const int key_head = group.y;
  const int batch = group.z;
  const int rows = p.heads / p.key_heads * p.queries;
  const int r = int(group.x) * SIMDGROUPS + simdgroup;
  if (r >= rows) {
    return;
  }
  const GroupRow own(p, key_head, r);
  const ulong first = (ulong(batch) * p.key_heads + key_head) * splits;
  float largest = -INFINITY;
  for (int split = lane; split < splits; split += 32) {
    largest = max(largest, split_state[((first + split) * rows + r) * 2]);
  }
  largest = simd_max(largest);
  const float sink = has_sinks ? numbers[(ulong(batch) * p.heads + own.head) * p.numbers_stride + 2] : -INFINITY;
  largest = or_zero(has_sinks ? max(largest, sink) : largest);
  float sum = invisible_weight();
  for (int split = 0; split < splits; ++split) {
    device const float* state = split_state + ((first + split) * rows + r) * 2;
    sum += state[1] * weight_of(state[0], largest);
  }
  const bool empty = is_invisible(sum);
  if (has_sinks) {
    sum += weight_of(sink, largest);
  }
  const float inverse = empty ? 0.0f : 1.0f / sum;
  const ulong at = (ulong(batch) * p.queries + own.row) * p.heads + own.head;
  for (int i = lane; i < V; i += 32) {
    float x = 0;
    for (int split = 0; split < splits; ++split) {
      const float shrink = weight_of(split_state[((first + split) * rows + r) * 2], largest);
      x += split_out[((first + split) * rows + r) * V + i] * shrink;
    }
    out[at * V + i] = T(x * inverse);
  }
  if (lane == 0) {
    store_row(row_maximum, row_total, at, largest, sum, empty);
  }
}
