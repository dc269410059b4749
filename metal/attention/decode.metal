// Attention for a few query rows against many keys: the keys are dealt to simdgroups ("splits"), each keeps its own running
// maximum, sum and output, and a second kernel merges them (Flash-Decoding; Dao et al., 2023).
//
// The rows of a simdgroup are all T rows of all G heads that share a key head, so each key and value is loaded once for the
// whole group, straight from device memory: nobody else wants it. Nothing beyond a batch row's length is read.
#include "attention/softmax.h"
#include "attention/visibility.h"
#include "core/scaled.h"
#include "core/shares.h"

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

// The query rows of a simdgroup in registers; those outside are zero, and are not stored. Where keys are units, their sums over the
// channels of each span too.
template <typename Types, typename Operand, int BLOCKS, int SPANS>
struct GroupRows {
  static constant constexpr int count = padded(Types::H) / 8;
  Fragment<Operand> kept[BLOCKS][count];
  float sums[BLOCKS][SPANS];
  bool finite;  // all
  typename Types::Query::Tile rows[BLOCKS];
  bool inside[BLOCKS];

  INLINED float element(int block, int channel) const {
    return inside[block] && channel < Types::H ? float(rows[block].at(0, channel)) : 0.0f;
  }

  INLINED void sum_up() {
    finite = true;
    UNROLLED
    for (int block = 0; block < BLOCKS; ++block) {
      UNROLLED
      for (int s = 0; s < SPANS; ++s) {
        float sum = 0;
        UNROLLED
        for (int i = 0; i < count / SPANS; ++i) {
          const Fragment<Operand> x = kept[block][s * (count / SPANS) + i];
          sum += float(x.thread_elements()[0]) + float(x.thread_elements()[1]);
        }
        sums[block][s] = sum_along_row(sum);
        finite = finite && is_finite(sums[block][s]);
      }
    }
    finite = simd_all(finite);
  }

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
  constexpr int V = Types::V;
  constexpr int v_fragments = slice_fragments(V, SLICES);
  using Keys = KeysInLanes<Types, Spans<typename Types::Key, Types::H>::even>;
  using Values = ValuesInLanes<Types, v_fragments, Spans<typename Types::Value, v_fragments * 8>::even>;
  using KeyTile = typename Keys::template Tile<KEYS / 8>;
  using ValueTile = typename Values::template Tile<KEYS / 8>;
  using Operand = typename Keys::Operand;
  constexpr bool ahead = Keys::units && Values::units;  // small tiles are loaded while others are computed
  const Features features = FEATURES;
  const uint3 group = place_in(p.grid, launched);
  const Lane lane(lane_index);
  const int split = int(group.x) * SIMDGROUPS + simdgroup;
  const int slice = int(group.y) % SLICES;
  const int from = slice * v_fragments;
  const int first = int(group.y) / SLICES * BLOCKS * 8;
  const int key_head = int(group.z) % p.key_heads;
  const int batch = int(group.z) / p.key_heads;
  const int rows = p.heads / p.key_heads * p.queries;
  if (split >= splits) {
    return;
  }

  const typename Types::Visibility all(features, batch, key_head, lane_index);
  GroupRows<Types, Operand, BLOCKS, Keys::spans> q;
  GroupRules<Types, BLOCKS> rules;
  UNROLLED
  for (int block = 0; block < BLOCKS; ++block) {
    const GroupRow own(p, key_head, first + block * 8 + lane.row);
    rules.row[block] = own.row;
    rules.visibility[block] = typename Types::Visibility(features, batch, own.head, lane_index);
    rules.score[block] = typename Types::Score(features, batch, own.head, all.offset);
    q.rows[block] = queries_of<Types>(features, query, batch, own.head, p.queries).tile(own.row);
    q.inside[block] = own.inside;
    UNROLLED
    for (int i = 0; i < q.count; ++i) {
      Operand x[2];
      UNROLLED
      for (int e = 0; e < 2; ++e) {
        x[e] = Operand(q.element(block, KeyTile::channel(i, lane.column + e)));
      }
      q.kept[block][i] = fragment_of<Operand>(x[0], x[1]);
    }
  }
  q.finite = true;
  if (Keys::units) {
    q.sum_up();
  }

  const auto key_source = keys_of<Types>(features, key, batch, key_head, all.columns);
  const auto value_source = values_of<Types>(features, value, batch, key_head, all.columns);
  Running<BLOCKS, v_fragments, Values::spans> running;
  const int begin = max(split * split_keys, all.column_begin(0) / KEYS * KEYS);
  const int end = min((split + 1) * split_keys, all.column_end(0, p.queries - 1));
  // columns that all rows see; masks may differ among the rows of a simdgroup
  const int whole_begin = all.column_begin(p.queries - 1);
  const int whole_end = all.by_bands() && p.queries <= all.rows ? min(all.column_end(0, 0), end) : 0;
  int column = begin;
  if (column >= whole_begin && column + KEYS <= whole_end && q.finite) {
    KeyTile next_keys(key_source, column, lane_index, lane);
    ValueTile next_values(value_source, column, lane_index, lane, from);
    ROLLED
    for (; column + KEYS <= whole_end; column += KEYS) {
      if (!ahead) {
        next_keys = KeyTile(key_source, column, lane_index, lane);
        next_values = ValueTile(value_source, column, lane_index, lane, from);
      }
      KeyTile keys = next_keys;
      ValueTile values = next_values;
      if (ahead && column + 2 * KEYS <= whole_end) {
        next_keys = KeyTile(key_source, column + KEYS, lane_index, lane);
        next_values = ValueTile(value_source, column + KEYS, lane_index, lane, from);
      }
      if (!keys.prepare() || !values.prepare()) {
        break;  // the loop below decodes what it has to
      }
      const bool spoilt = rules.may_be_masked() && !values.finite();
      attend<false, KEYS / 8>(running, q, rules, keys, values, column, from, spoilt, lane);
    }
  }
  ROLLED
  for (; column < end; column += 8) {
    typename Keys::template Tile<1> keys(key_source, column, lane_index, lane);
    typename Values::template Tile<1> values(value_source, column, lane_index, lane, from);
    keys.decode(!keys.prepare() || !q.finite);
    values.decode(!values.prepare());
    attend<true, 1>(running, q, rules, keys, values, column, from, !values.finite(), lane);
  }

  const ulong plane = (ulong(batch) * p.key_heads + key_head) * splits + split;
  UNROLLED
  for (int block = 0; block < BLOCKS; ++block) {
    const int row = first + block * 8;
    const float sum = sum_along_row(running.row_sum[block]);
    float zeros[Values::spans];
    UNROLLED
    for (int s = 0; s < Values::spans; ++s) {
      zeros[s] = sum_along_row(running.zeros[block][s]);
    }
    device float* at = split_out + (plane * rows + row) * V;
    UNROLLED
    for (int i = 0; i < v_fragments; ++i) {
      const int channel = ValueTile::channel(from + i, lane);
      UNROLLED
      for (int e = 0; e < 2; ++e) {
        if (row + lane.row < rows && channel + e < V) {
          at[lane.row * V + channel + e] = running.sums[block][i].thread_elements()[e] + zeros[i * Values::spans / v_fragments];
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

// The same without the matrix unit, for rows too few to fill it: LANES lanes share a key, and a simdgroup has 32 / LANES at once.
// Elements in few bits are multiplied as units (core/words.h), and scales are applied to sums, unless a tile's elements must be clamped
// to their type, or they or queries are not finite: then each element is decoded. Nothing is loaded of what no row sees.
template <typename Types, int ROWS, int SIMDGROUPS, int KEYS, int LANES>
[[kernel, max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] void attention_decode_rows(
    DECODE_ROWS_OPERANDS,
    uint3 launched [[threadgroup_position_in_grid]],  // of (splits / SIMDGROUPS, tile of rows, key head and batch row)
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane_index [[thread_index_in_simdgroup]]) {
  constexpr int V = Types::V;
  constexpr int STEPS = KEYS * LANES / 32;
  constexpr bool balanced = balanced_keys<typename Types::Key::Encoding>();
  using KeyPart = Share<typename Types::Key, LANES, balanced>;
  using ValuePart = Share<typename Types::Value, LANES, true>;
  using Deals = Deal<ROWS, STEPS, LANES, (KeyPart::late > ValuePart::late ? KeyPart::late : ValuePart::late)>;
  using Keys = Shares<typename Types::Key, Deals, STEPS, LANES, balanced>;
  using Values = Shares<typename Types::Value, Deals, STEPS, LANES, true>;
  constexpr bool keys_scaled = Types::Key::Encoding::scaled;
  constexpr bool values_scaled = Types::Value::Encoding::scaled;
  constexpr int held = Deals::held;
  // small tiles are loaded while others are computed, keys after their last use
  constexpr bool ahead = Types::Key::Encoding::bits <= 8 && Types::Value::Encoding::bits <= 8;
  const Features features = FEATURES;
  const uint3 group = place_in(p.grid, launched);
  const int split = int(group.x) * SIMDGROUPS + simdgroup;
  const int first = int(group.y) * ROWS;
  const int key_head = int(group.z) % p.key_heads;
  const int batch = int(group.z) / p.key_heads;
  const int rows = p.heads / p.key_heads * p.queries;
  const int part = lane_index & (LANES - 1);
  const int slot = lane_index / LANES;
  const Deals deal = {part};
  const int turn = deal.turn();
  if (split >= splits) {
    return;
  }

  const GroupRow own(p, key_head, first + turn);
  const typename Types::Visibility visibility(features, batch, own.head, lane_index);
  const typename Types::Score score(features, batch, own.head, visibility.offset);
  float q[ROWS][KeyPart::width];
  float q_sums[ROWS];  // over the channels of one scale
  float sums[ROWS][ValuePart::width];
  float zeros[ROWS];  // sums of weights times zeros of values
  UNROLLED
  for (int r = 0; r < ROWS; ++r) {
    const GroupRow loaded(p, key_head, first + (r ^ turn));
    const auto from = queries_of<Types>(features, query, batch, loaded.head, p.queries).tile(loaded.row);
    q_sums[r] = 0;
    zeros[r] = 0;
    UNROLLED
    for (int i = 0; i < KeyPart::width; ++i) {
      const int channel = part * KeyPart::width + i;
      const float found = loaded.inside && channel < Types::H ? float(from.at(0, channel)) : 0.0f;
      q[r][i] = found;
      q_sums[r] += found;
    }
    UNROLLED
    for (int i = 0; i < ValuePart::width; ++i) {
      sums[r][i] = 0;
    }
  }
  if (keys_scaled) {
    UNROLLED
    for (int stage = 0; stage < Keys::stages; ++stage) {
      float others[ROWS];
      UNROLLED
      for (int r = 0; r < ROWS; ++r) {
        others[r] = simd_shuffle_xor(q_sums[r ^ Deals::turn_of(1 << stage)], ushort(1 << stage));
      }
      UNROLLED
      for (int r = 0; r < ROWS; ++r) {
        q_sums[r] += others[r];
      }
    }
  }
  bool finite = true;
  UNROLLED
  for (int r = 0; r < ROWS; ++r) {
    finite = finite && is_finite(q_sums[r]);
  }
  finite = !keys_scaled || simd_all(finite);
  float row_max = -INFINITY;
  float row_sum = absent_weight();

  const int begin = max(split * split_keys, visibility.column_begin(0) / KEYS * KEYS);
  const int end = min((split + 1) * split_keys, visibility.column_end(0, p.queries - 1));
  Keys keys(keys_of<Types>(features, key, batch, key_head, visibility.columns), deal, slot, begin);
  Values next_values(values_of<Types>(features, value, batch, key_head, visibility.columns), deal, slot, begin);
  // columns that all rows see, where positions and lengths tell
  const int whole_begin = visibility.column_begin(p.queries - 1);
  const int whole_end = visibility.by_bands() && p.queries <= visibility.rows ? min(visibility.column_end(0, 0), end) : 0;
  Units<typename Types::Key, KEYS / 8> units(keys.source, begin, end - 1, lane_index);
  if (ahead && begin < end) {
    units.turn_to(begin);
    keys.load(begin, end - 1, units);
    next_values.load(begin, end - 1, units);
  }
  ROLLED
  for (int tile = begin; tile < end; tile += KEYS) {
    const bool whole = tile >= whole_begin && tile + KEYS <= whole_end;
    if (!ahead) {
      units.turn_to(tile);
      keys.load(tile, end - 1, units);
      next_values.load(tile, end - 1, units);
    }
    const auto here = units;
    float x[Deals::count];
    const bool keys_factored = finite && keys.factored(!keys_scaled);
    if (keys_factored) {
      UNROLLED
      for (int i = 0; i < Deals::count; ++i) {
        x[i] = 0;
      }
      UNROLLED
      for (int s = 0; s < STEPS; ++s) {
        UNROLLED
        for (int i = 0; i < KeyPart::width; ++i) {
          const float unit = keys.parts[s].unit(i);
          UNROLLED
          for (int r = 0; r < ROWS; ++r) {
            x[Deals::index(r, s)] = fma(q[r][i], unit, x[Deals::index(r, s)]);
          }
        }
      }
    } else {
      ROLLED
      for (int s = 0; s < STEPS; ++s) {
        const auto row = keys.row_at(tile, end - 1, s * Keys::tokens, here);
        const KeyPart found(row, keys.channel);
        float product[ROWS];
        UNROLLED
        for (int r = 0; r < ROWS; ++r) {
          product[r] = 0;
        }
        UNROLLED
        for (int i = 0; i < KeyPart::width; ++i) {
          const float decoded = found.decoded_at(row, keys.channel, i);
          UNROLLED
          for (int r = 0; r < ROWS; ++r) {
            product[r] = fma(q[r][i], decoded, product[r]);
          }
        }
        UNROLLED
        for (int i = 0; i < STEPS; ++i) {
          UNROLLED
          for (int r = 0; r < ROWS; ++r) {
            x[Deals::index(r, i)] = i == s || s == 0 ? product[r] : x[Deals::index(r, i)];
          }
        }
      }
    }
    Values values = next_values;
    if (ahead && tile + KEYS < end) {
      units.turn_to(tile + KEYS);
      keys.load(tile + KEYS, end - 1, units);
      next_values.load(tile + KEYS, end - 1, units);
    }
    UNROLLED
    for (int stage = 0; stage <= Deals::stages; ++stage) {
      if (keys_scaled && stage == Keys::stages && keys_factored) {
        UNROLLED
        for (int i = 0; i < Keys::left; ++i) {
          const int k = Keys::scale_of(i);
          x[i] = fma(x[i], keys.scales[k], q_sums[Deals::row_of(i, stage)] * keys.zeros[k]);
        }
      }
      if (stage < Deals::stages) {
        deal.fold(x, stage);
      }
    }

    bool seen[held];
    float largest = row_max;
    UNROLLED
    for (int i = 0; i < held; ++i) {
      const int column = tile + deal.step_of(i, Deals::stages) * Keys::tokens + slot;
      const float product = x[i];
      x[i] = -INFINITY;
      const bool visible = whole || (column < end && visibility.visible(own.row, column));
      seen[i] = visible && score.of(product, own.row, column, x[i]);
      largest = max(largest, x[i]);
    }
    if (simd_any(largest != row_max)) {  // seldom, after the first tiles
      largest = Deals::max_of_row(largest);
      const float shrink = weight_of(row_max, or_zero(largest));
      row_sum *= shrink;
      UNROLLED
      for (int r = 0; r < ROWS; ++r) {
        const float of_row = simd_shuffle_xor(shrink, ushort(Deals::lanes_of(r)));
        zeros[r] *= of_row;
        UNROLLED
        for (int i = 0; i < ValuePart::width; ++i) {
          sums[r][i] *= of_row;
        }
      }
      row_max = largest;
    }
    const float from = or_zero(row_max);
    UNROLLED
    for (int i = 0; i < held; ++i) {
      x[i] = seen[i] ? weight_of(x[i], from) : absent_weight();
      row_sum += x[i];
    }

    // the weight of a hidden pair is 0, which changes no sum of finite values
    const bool values_factored = values.factored(!values_scaled && whole && !score.may_be_masked());
    UNROLLED
    for (int stage = Deals::stages; stage >= 0; --stage) {
      if (values_scaled && stage == Values::stages && values_factored) {
        UNROLLED
        for (int i = 0; i < Values::left; ++i) {
          const int k = Values::scale_of(i);
          zeros[Deals::row_of(i, stage)] = fma(x[i], values.zeros[k], zeros[Deals::row_of(i, stage)]);
          x[i] *= values.scales[k];
        }
      }
      if (stage > 0) {
        deal.spread(x, stage - 1);
      }
    }
    if (values_factored) {
      UNROLLED
      for (int s = 0; s < STEPS; ++s) {
        UNROLLED
        for (int i = 0; i < ValuePart::width; ++i) {
          const float unit = values.parts[s].unit(i);
          UNROLLED
          for (int r = 0; r < ROWS; ++r) {
            sums[r][i] = fma(x[Deals::index(r, s)], unit, sums[r][i]);
          }
        }
      }
    } else {
      ROLLED
      for (int s = 0; s < STEPS; ++s) {
        const auto row = values.row_at(tile, end - 1, s * Values::tokens, here);
        const ValuePart found(row, values.channel);
        float weights[ROWS];
        UNROLLED
        for (int r = 0; r < ROWS; ++r) {
          weights[r] = x[Deals::index(r, 0)];
          UNROLLED
          for (int i = 1; i < STEPS; ++i) {
            weights[r] = i == s ? x[Deals::index(r, i)] : weights[r];
          }
        }
        UNROLLED
        for (int i = 0; i < ValuePart::width; ++i) {
          const float decoded = found.decoded_at(row, values.channel, i);
          UNROLLED
          for (int r = 0; r < ROWS; ++r) {
            sums[r][i] = is_absent(weights[r]) ? sums[r][i] : fma(weights[r], decoded, sums[r][i]);
          }
        }
      }
    }
  }

  const float sum = Deals::sum_of_row(row_sum, Deals::stages);
  const ulong plane = (ulong(batch) * p.key_heads + key_head) * splits + split;
  UNROLLED
  for (int r = 0; r < ROWS; ++r) {
    zeros[r] = Deals::sum_of_row(zeros[r], Values::stages);
  }
  UNROLLED
  for (int r = 0; r < ROWS; ++r) {
    const int written = first + (r ^ turn);
    const int at = r & Deals::rows_left_after(Values::stages);
    const float zero = values_scaled ? simd_shuffle_xor(zeros[at], ushort(Deals::lanes_of(r ^ at))) : 0.0f;
    UNROLLED
    for (int i = 0; i < ValuePart::width; ++i) {
      float y = sums[r][i];
      UNROLLED
      for (int other = LANES; other < 32; other *= 2) {
        y += simd_shuffle_xor(y, ushort(other));
      }
      if (slot == 0 && written < rows && next_values.channel + i < V) {
        split_out[(plane * rows + written) * V + next_values.channel + i] = y + zero;
      }
    }
  }
  if (slot == 0 && (part & ~Deals::lanes_of(ROWS - 1)) == 0 && first + turn < rows) {
    device float* state = split_state + (plane * rows + first + turn) * 2;
    state[0] = row_max;
    state[1] = sum;
  }
}

// One threadgroup for each row: its simdgroups deal the splits among them, and merge what each comes to.
template <typename Types, int SIMDGROUPS>
[[kernel, max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] void attention_merge(
    MERGE_OPERANDS,
    uint3 group [[threadgroup_position_in_grid]],  // (row, key head, batch row)
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  using T = typename Types::T;
  constexpr int V = Types::V;
  constexpr int width = (V + 31) / 32;
  threadgroup float shared_sums[SIMDGROUPS][V];
  threadgroup float shared_states[SIMDGROUPS][2];
  const int r = group.x;
  const int key_head = group.y;
  const int batch = group.z;
  const int rows = p.heads / p.key_heads * p.queries;
  const ulong first = (ulong(batch) * p.key_heads + key_head) * splits;
  float largest = -INFINITY;
  float sum = absent_weight();
  float sums[width];
  UNROLLED
  for (int i = 0; i < width; ++i) {
    sums[i] = 0;
  }
  // a lane reads a split's maximum and sum, for all
  for (int begin = simdgroup; begin < splits; begin += 32 * SIMDGROUPS) {
    const int own_split = begin + lane * SIMDGROUPS;
    device const float* state = split_state + ((first + min(own_split, splits - 1)) * rows + r) * 2;
    const float before = largest;
    largest = max(largest, simd_max(state[0]));
    const float from = or_zero(largest);
    const float own_weight = weight_of(state[0], from);
    const float own_sum = own_split < splits ? state[1] * own_weight : absent_weight();
    const float shrink = weight_of(before, from);
    sum *= shrink;
    UNROLLED
    for (int i = 0; i < width; ++i) {
      sums[i] *= shrink;
    }
    EIGHT
    for (int k = 0; k < min((splits - begin + SIMDGROUPS - 1) / SIMDGROUPS, 32); ++k) {
      const float weight = simd_shuffle(own_weight, ushort(k));
      sum += simd_shuffle(own_sum, ushort(k));
      device const float* part = split_out + ((first + begin + k * SIMDGROUPS) * rows + r) * V;
      UNROLLED
      for (int i = 0; i < width; ++i) {
        sums[i] += i * 32 + lane < V ? part[i * 32 + lane] * weight : 0.0f;
      }
    }
  }
  UNROLLED
  for (int i = 0; i < width; ++i) {
    if (i * 32 + lane < V) {
      shared_sums[simdgroup][i * 32 + lane] = sums[i];
    }
  }
  if (lane == 0) {
    shared_states[simdgroup][0] = largest;
    shared_states[simdgroup][1] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float weights[SIMDGROUPS];
  largest = -INFINITY;
  UNROLLED
  for (int i = 0; i < SIMDGROUPS; ++i) {
    weights[i] = shared_states[i][0];
    largest = max(largest, weights[i]);
  }
  sum = absent_weight();
  UNROLLED
  for (int i = 0; i < SIMDGROUPS; ++i) {
    weights[i] = weight_of(weights[i], or_zero(largest));
    sum += shared_states[i][1] * weights[i];
  }
  const GroupRow own(p, key_head, r);
  const FinishedRow row(largest, sum, sink_of(p, sinks, batch, own.head));
  const ulong at = (ulong(batch) * p.queries + own.row) * p.heads + own.head;
  for (int channel = simdgroup * 32 + lane; channel < V; channel += SIMDGROUPS * 32) {
    float y = 0;
    UNROLLED
    for (int i = 0; i < SIMDGROUPS; ++i) {
      y += shared_sums[i][channel] * weights[i];
    }
    out[at * V + channel] = T(y * row.factor);
  }
  if (simdgroup == 0 && lane == 0) {
    row.store(row_max, row_sum, at);
  }
}
