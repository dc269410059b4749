// Attention for a few query rows against many keys: the keys are dealt to simdgroups ("splits"), each keeps its own running
// maximum, sum and output, and a second kernel merges them (Flash-Decoding; Dao et al., 2023).
//
// The rows of a simdgroup are all T rows of all G heads that share a key head, so each key and value is loaded once for the
// whole group, straight from device memory: nobody else wants it. Nothing beyond a batch row's length is read.
#include "attention/softmax.h"
#include "attention/visibility.h"
#include "core/lanes.h"

// Row r of a group is query row r % T of head r / T.
struct GroupRow {
  int head;
  int row;
  bool inside;

  INLINED GroupRow(constant Parameters& p, int key_head, int r) {
    const int heads = p.heads / p.key_heads;
    inside = r < heads * p.queries;
    head = key_head * heads + (inside ? r / p.queries : 0);
    row = inside ? r % p.queries : 0;
  }
};

// The query rows of a simdgroup in registers; those outside are zero, and are not stored.
template <typename Operand, int H, int BLOCKS>
struct GroupRows {
  static constant constexpr int count = padded(H) / 8;
  Fragment<Operand> kept[BLOCKS][count];

  INLINED Fragment<Operand> at(int block, int i) const {
    return kept[block][i];
  }
};

// The rows of a group, each of its own head, as `attend` asks about them.
template <typename Types, int BLOCKS>
struct GroupRules {
  typename Types::Visibility visibility[BLOCKS];
  typename Types::Score score[BLOCKS];
  int row[BLOCKS];

  template <bool MASKED>
  INLINED bool of(int block, float product, int column, thread float& x) const {
    return (!MASKED || visibility[block].visible(row[block], column)) && score[block].of(product, row[block], column, x);
  }

  INLINED bool may_be_masked() const {
    return score[0].may_be_masked();
  }

  template <int COLUMNS>
  INLINED void factors(int, int, thread float2 (&)[COLUMNS]) const {}
};

template <typename Types, int BLOCKS, int SIMDGROUPS, int KEYS, int SLICES>
[[kernel, max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] void attention_decode(
    DECODE_OPERANDS,
    uint3 launched [[threadgroup_position_in_grid]],  // of (splits / SIMDGROUPS, tile of rows and slice, key head and batch row)
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane_index [[thread_index_in_simdgroup]]) {
  using Operand = typename Types::Operand;
  constexpr int H = Types::H;
  constexpr int V = Types::V;
  constexpr int v_fragments = slice_fragments(V, SLICES);
  using Keys = LaneKeys<typename Types::Key, Operand, KEYS / 8>;
  using Values = LaneValues<typename Types::Value, Operand, KEYS / 8>;
  const Features features = FEATURES;
  const uint3 group = place_in(p.grid, launched);
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

  const typename Types::Visibility all(features, batch, key_head, lane_index);
  GroupRows<Operand, H, BLOCKS> q;
  GroupRules<Types, BLOCKS> rules;
  UNROLLED
  for (int block = 0; block < BLOCKS; ++block) {
    const GroupRow own(p, key_head, first + block * 8 + lane.row);
    rules.row[block] = own.row;
    rules.visibility[block] = typename Types::Visibility(features, batch, own.head, lane_index);
    rules.score[block] = typename Types::Score(features, batch, own.head, all.offset);
    const auto at = queries_of<Types>(features, query, batch, own.head, p.queries).tile(own.row);
    UNROLLED
    for (int i = 0; i < padded(H) / 8; ++i) {
      Operand x[2];
      UNROLLED
      for (int e = 0; e < 2; ++e) {
        const int channel = Keys::channel(i, lane.column + e);
        x[e] = own.inside && channel < H ? Operand(at.at(0, channel)) : Operand(0);
      }
      q.kept[block][i] = fragment_of<Operand>(x[0], x[1]);
    }
  }

  const auto key_source = keys_of<Types>(features, key, batch, key_head, all.columns);
  const auto value_source = values_of<Types>(features, value, batch, key_head, all.columns);
  Running<BLOCKS, v_fragments> running;
  const int begin = max(split * split_keys, all.column_begin(0) / KEYS * KEYS);
  const int end = min((split + 1) * split_keys, all.column_end(0, p.queries - 1));
  // columns that all rows see; masks may differ among the rows of a simdgroup
  const int whole_begin = all.column_begin(p.queries - 1);
  const int whole_end = all.by_bands() && p.queries <= all.rows ? min(all.column_end(0, 0), end) : 0;
  int column = begin;
  for (; column >= whole_begin && column + KEYS <= whole_end; column += KEYS) {
    const Keys keys(key_source, column, lane_index, lane);
    const Values values(value_source, column, lane_index, lane);
    const bool spoilt = rules.may_be_masked() && !values.finite();
    attend<false, KEYS / 8>(running, q, rules, keys, values, column, slice * v_fragments, spoilt, lane);
  }
  ROLLED
  for (; column < end; column += 8) {
    const LaneKeys<typename Types::Key, Operand, 1> keys(key_source, column, lane_index, lane);
    const LaneValues<typename Types::Value, Operand, 1> values(value_source, column, lane_index, lane);
    attend<true, 1>(running, q, rules, keys, values, column, slice * v_fragments, !values.finite(), lane);
  }

  const ulong plane = (ulong(batch) * p.key_heads + key_head) * splits + split;
  UNROLLED
  for (int block = 0; block < BLOCKS; ++block) {
    const int row = first + block * 8;
    const float sum = sum_along_row(running.row_sum[block]);
    device float* at = split_out + (plane * rows + row) * V;
    UNROLLED
    for (int i = 0; i < v_fragments; ++i) {
      const int channel = Values::channel(slice * v_fragments + i, lane);
      UNROLLED
      for (int e = 0; e < 2; ++e) {
        if (row + lane.row < rows && channel + e < V) {
          at[lane.row * V + channel + e] = running.sums[block][i].thread_elements()[e];
        }
      }
    }
    if (slice == 0 && lane.column == 0 && row + lane.row < rows) {
      device float* state = split_state + (plane * rows + row + lane.row) * 2;
      state[0] = running.row_max[block];
      state[1] = sum;
    }
  }
}

// The same without the matrix unit, for rows too few to fill it: eight lanes share a key, a simdgroup has four keys at once, and
// each of its quarters sums up what its own keys come to. Nothing is loaded of what a row does not see.
template <typename Types, int ROWS, int SIMDGROUPS, int KEYS>
[[kernel, max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] void attention_decode_rows(
    DECODE_ROWS_OPERANDS,
    uint3 launched [[threadgroup_position_in_grid]],  // of (splits / SIMDGROUPS, tile of rows, key head and batch row)
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane_index [[thread_index_in_simdgroup]]) {
  constexpr int H = Types::H;
  constexpr int V = Types::V;
  using KeyRun = Run<typename Types::Key, 8>;
  using ValueRun = Run<typename Types::Value, 8>;
  const Features features = FEATURES;
  const uint3 group = place_in(p.grid, launched);
  const int split = int(group.x) * SIMDGROUPS + simdgroup;
  const int first = int(group.y) * ROWS;
  const int key_head = int(group.z) % p.key_heads;
  const int batch = int(group.z) / p.key_heads;
  const int rows = p.heads / p.key_heads * p.queries;
  const int part = lane_index & 7;
  const int quarter = lane_index >> 3;
  if (split >= splits) {
    return;
  }

  const typename Types::Visibility all(features, batch, key_head, lane_index);
  float q[ROWS][KeyRun::width];
  float sums[ROWS][ValueRun::width];
  float row_max[ROWS];
  float row_sum[ROWS];
  GroupRules<Types, ROWS> rules;
  UNROLLED
  for (int r = 0; r < ROWS; ++r) {
    const GroupRow own(p, key_head, first + r);
    rules.row[r] = own.row;
    rules.visibility[r] = typename Types::Visibility(features, batch, own.head, lane_index);
    rules.score[r] = typename Types::Score(features, batch, own.head, all.offset);
    row_max[r] = -INFINITY;
    row_sum[r] = absent_weight();
    UNROLLED
    for (int i = 0; i < ValueRun::width; ++i) {
      sums[r][i] = 0;
    }
  }
  // each quarter loads a row, and all four share it
  static_assert(ROWS <= 4, "a simdgroup has four quarters");
  const GroupRow loaded(p, key_head, first + quarter);
  const auto from = queries_of<Types>(features, query, batch, loaded.head, p.queries).tile(loaded.row);
  UNROLLED
  for (int i = 0; i < KeyRun::width; ++i) {
    const int channel = part * KeyRun::width + i;
    const float found = quarter < ROWS && loaded.inside && channel < H ? float(from.at(0, channel)) : 0.0f;
    UNROLLED
    for (int r = 0; r < ROWS; ++r) {
      q[r][i] = simd_shuffle(found, ushort(r * 8 + part));
    }
  }

  const auto keys = keys_of<Types>(features, key, batch, key_head, all.columns);
  const auto values = values_of<Types>(features, value, batch, key_head, all.columns);
  const int begin = max(split * split_keys, all.column_begin(0) / KEYS * KEYS);
  const int end = min((split + 1) * split_keys, all.column_end(0, p.queries - 1));
  // columns that all rows see, where positions and lengths tell
  const int whole_begin = all.column_begin(p.queries - 1);
  const int whole_end = all.by_bands() && p.queries <= all.rows ? min(all.column_end(0, 0), end) : 0;
  ROLLED
  for (int tile = begin; tile < end; tile += KEYS) {
    const bool whole = tile >= whole_begin && tile + KEYS <= whole_end;
    float x[KEYS / 4][ROWS];
    bool seen[KEYS / 4][ROWS];
    uint units[KEYS / 8];
    UNROLLED
    for (int k = 0; k < KEYS / 8; ++k) {
      units[k] = unit_of_eight(keys, min(tile + k * 8, end - 1), lane_index);
    }
    UNROLLED
    for (int k = 0; k < KEYS / 4; ++k) {
      const int column = tile + k * 4 + quarter;
      const KeyRun run(keys.token_of(units[k / 2], min(column, end - 1)), part, lane_index - part + KeyRun::reader_of(part));
      float product[ROWS];
      UNROLLED
      for (int r = 0; r < ROWS; ++r) {
        product[r] = 0;
      }
      UNROLLED
      for (int i = 0; i < KeyRun::width; i += KeyRun::together) {
        const auto word = run.word(i);
        UNROLLED
        for (int e = 0; e < KeyRun::together; ++e) {
          const float found = run.element(word, i + e, e);
          UNROLLED
          for (int r = 0; r < ROWS; ++r) {
            product[r] = fma(q[r][i + e], found, product[r]);
          }
        }
      }
      UNROLLED
      for (int r = 0; r < ROWS; ++r) {
        product[r] += simd_shuffle_xor(product[r], ushort(1));
        product[r] += simd_shuffle_xor(product[r], ushort(2));
        product[r] += simd_shuffle_xor(product[r], ushort(4));
        x[k][r] = -INFINITY;
        if (whole) {
          seen[k][r] = rules.template of<false>(r, product[r], column, x[k][r]);
        } else {
          seen[k][r] = column < end && rules.template of<true>(r, product[r], column, x[k][r]);
        }
      }
    }
    UNROLLED
    for (int r = 0; r < ROWS; ++r) {
      float largest = row_max[r];
      UNROLLED
      for (int k = 0; k < KEYS / 4; ++k) {
        largest = max(largest, x[k][r]);
      }
      const float from = or_zero(largest);
      const float shrink = weight_of(row_max[r], from);
      row_max[r] = largest;
      row_sum[r] *= shrink;
      UNROLLED
      for (int k = 0; k < KEYS / 4; ++k) {
        x[k][r] = weight_of(x[k][r], from);
        row_sum[r] += seen[k][r] ? x[k][r] : absent_weight();
      }
      UNROLLED
      for (int i = 0; i < ValueRun::width; ++i) {
        sums[r][i] *= shrink;
      }
    }
    UNROLLED
    for (int k = 0; k < KEYS / 4; ++k) {
      const uint unit = Types::Value::page != 0 ? units[k / 2] : values.row;
      const int token = min(tile + k * 4 + quarter, end - 1);
      const ValueRun run(values.token_of(unit, token), part, lane_index - part + ValueRun::reader_of(part));
      UNROLLED
      for (int i = 0; i < ValueRun::width; i += ValueRun::together) {
        const auto word = run.word(i);
        UNROLLED
        for (int e = 0; e < ValueRun::together; ++e) {
          const float found = run.element(word, i + e, e);
          UNROLLED
          for (int r = 0; r < ROWS; ++r) {
            if (seen[k][r]) {
              sums[r][i + e] = fma(x[k][r], found, sums[r][i + e]);
            }
          }
        }
      }
    }
  }

  const ulong plane = (ulong(batch) * p.key_heads + key_head) * splits + split;
  UNROLLED
  for (int r = 0; r < ROWS; ++r) {
    float largest = max(row_max[r], simd_shuffle_xor(row_max[r], ushort(8)));
    largest = max(largest, simd_shuffle_xor(largest, ushort(16)));
    const float shrink = weight_of(row_max[r], or_zero(largest));
    float sum = row_sum[r] * shrink;
    sum += simd_shuffle_xor(sum, ushort(8));
    sum += simd_shuffle_xor(sum, ushort(16));
    const ulong row = plane * rows + first + r;
    const bool writes = quarter == 0 && first + r < rows;
    UNROLLED
    for (int i = 0; i < ValueRun::width; ++i) {
      const int channel = part * ValueRun::width + i;
      float y = sums[r][i] * shrink;
      y += simd_shuffle_xor(y, ushort(8));
      y += simd_shuffle_xor(y, ushort(16));
      if (writes && channel < V) {
        split_out[row * V + channel] = y;
      }
    }
    if (writes && part == 0) {
      split_state[row * 2] = largest;
      split_state[row * 2 + 1] = sum;
    }
  }
}

// One simdgroup for each row: its splits become one output, maximum and sum.
template <typename Types, int SIMDGROUPS>
[[kernel, max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] void attention_merge(
    MERGE_OPERANDS,
    uint3 group [[threadgroup_position_in_grid]],  // (SIMDGROUPS rows, key head, batch row)
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  using T = typename Types::T;
  constexpr int V = Types::V;
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
  const float from = or_zero(largest);
  // a lane reads a split's maximum and sum, for all
  constexpr int width = (V + 31) / 32;
  float sum = absent_weight();
  float sums[width];
  UNROLLED
  for (int i = 0; i < width; ++i) {
    sums[i] = 0;
  }
  for (int begin = 0; begin < splits; begin += 32) {
    const ulong own_split = first + min(begin + int(lane), splits - 1);
    device const float* state = split_state + (own_split * rows + r) * 2;
    const float own_weight = weight_of(state[0], from);
    const float own_sum = state[1] * own_weight;
    for (int k = 0; k < min(splits - begin, 32); ++k) {
      const float weight = simd_shuffle(own_weight, ushort(k));
      sum += simd_shuffle(own_sum, ushort(k));
      device const float* part = split_out + ((first + begin + k) * rows + r) * V;
      UNROLLED
      for (int i = 0; i < width; ++i) {
        sums[i] += i * 32 + lane < V ? part[i * 32 + lane] * weight : 0.0f;
      }
    }
  }
  const FinishedRow row(largest, sum, sink_of(p, sinks, batch, own.head));
  const ulong at = (ulong(batch) * p.queries + own.row) * p.heads + own.head;
  UNROLLED
  for (int i = 0; i < width; ++i) {
    if (i * 32 + lane < V) {
      out[at * V + i * 32 + lane] = T(sums[i] * row.factor);
    }
  }
  if (lane == 0) {
    row.store(row_max, row_sum, at);
  }
}
