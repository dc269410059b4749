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

// The rows of a simdgroup as fragments [channel, row] in registers, a lane's two columns of each; those outside are zero, and are not
// stored. Each is divided by its unit, a power of two, so that bfloat becomes half; of other types it is 1. Where keys are units, the sums
// of rows over the channels of each span too.
template <typename Types, typename Operand, int BLOCKS, int SPANS>
struct GroupRows {
  static constant constexpr int count = padded(Types::H) / 8;
  Fragment<Operand> kept[BLOCKS][count];
  float units[BLOCKS][2];
  float sums[BLOCKS][SPANS][2];
  bool finite;  // all
  typename Types::Query::Tile rows[BLOCKS][2];
  bool inside[BLOCKS][2];

  INLINED float element(int block, int e, int channel) const {
    return inside[block][e] && channel < Types::H ? float(rows[block][e].at(0, channel)) : 0.0f;
  }

  INLINED void sum_up() {
    finite = true;
    UNROLLED
    for (int block = 0; block < BLOCKS; ++block) {
      UNROLLED
      for (int s = 0; s < SPANS; ++s) {
        UNROLLED
        for (int e = 0; e < 2; ++e) {
          float sum = 0;
          UNROLLED
          for (int i = 0; i < count / SPANS; ++i) {
            sum += float(kept[block][s * (count / SPANS) + i].thread_elements()[e]);
          }
          sums[block][s][e] = sum_along_column(sum) * units[block][e];
          finite = finite && is_finite(sums[block][s][e]);
        }
      }
    }
    finite = simd_all(finite);
  }
};

// What the keys so far have come to, for rows that are columns of fragments.
template <int BLOCKS, int COUNT, int SPANS>
struct GroupRunning {
  Fragment<float> sums[BLOCKS][COUNT];  // [channel, row], of weights times values
  float zeros[BLOCKS][SPANS][2];        // of weights times zeros of values, where those are units: of the lane's own keys
  float row_max[BLOCKS][2];
  float row_sum[BLOCKS][2];  // of the lane's own keys; absent where none is visible

  INLINED GroupRunning() {
    clear(sums);
    UNROLLED
    for (int block = 0; block < BLOCKS; ++block) {
      UNROLLED
      for (int e = 0; e < 2; ++e) {
        row_max[block][e] = -INFINITY;
        row_sum[block][e] = absent_weight();
        UNROLLED
        for (int s = 0; s < SPANS; ++s) {
          zeros[block][s][e] = 0;
        }
      }
    }
  }

  INLINED bool finite() const {
    float zero = 0;
    UNROLLED
    for (int block = 0; block < BLOCKS; ++block) {
      UNROLLED
      for (int i = 0; i < COUNT; ++i) {
        zero = fma(sums[block][i].thread_elements()[0], 0.0f, fma(sums[block][i].thread_elements()[1], 0.0f, zero));
      }
    }
    return simd_all(zero == 0);
  }

  // Products [key, row] of keys from `column` on become scores, and these weights; earlier sums shrink where the maximum rises. Where
  // all pairs are visible, nothing is MASKED.
  template <bool MASKED, int COLUMNS, typename Rules>
  INLINED void weigh(thread Fragment<float> (&s)[BLOCKS][COLUMNS], const thread Rules& rules, int column, Lane lane) {
    const bool may_be_masked = MASKED || rules.may_be_masked();
    UNROLLED
    for (int block = 0; block < BLOCKS; ++block) {
      float shrink[2];
      UNROLLED
      for (int e = 0; e < 2; ++e) {
        bool seen[COLUMNS];
        float largest = row_max[block][e];
        UNROLLED
        for (int c = 0; c < COLUMNS; ++c) {
          float x = -INFINITY;
          seen[c] = rules.template of<MASKED>(block, e, s[block][c].thread_elements()[e], column + c * 8 + lane.row, x);
          s[block][c].thread_elements()[e] = x;
          largest = max(largest, x);
        }
        largest = max_along_column(largest);
        const float from = or_zero(largest);
        shrink[e] = weight_of(row_max[block][e], from);
        row_max[block][e] = largest;
        row_sum[block][e] *= shrink[e];
        UNROLLED
        for (int c = 0; c < COLUMNS; ++c) {
          const float weight = weight_of(s[block][c].thread_elements()[e], from);
          s[block][c].thread_elements()[e] = !may_be_masked || seen[c] ? weight : absent_weight();
          row_sum[block][e] += s[block][c].thread_elements()[e];
        }
        UNROLLED
        for (int i = 0; i < SPANS; ++i) {
          zeros[block][i][e] *= shrink[e];
        }
      }
      if (simd_any(shrink[0] != 1.0f || shrink[1] != 1.0f)) {  // seldom, after the first tiles
        UNROLLED
        for (int i = 0; i < COUNT; ++i) {
          sums[block][i].thread_elements()[0] *= shrink[0];
          sums[block][i].thread_elements()[1] *= shrink[1];
        }
      }
    }
  }
};

// What rows, each of its own head, ask of pairs.
template <typename Types, int BLOCKS>
struct GroupRules {
  typename Types::Visibility visibility[BLOCKS][2];
  typename Types::Score score[BLOCKS][2];
  int row[BLOCKS][2];

  template <bool MASKED>
  INLINED bool of(int block, int e, float product, int column, thread float& x) const {
    return (!MASKED || visibility[block][e].visible(row[block][e], column)) &&
           score[block][e].of(product, row[block][e], column, x);
  }

  INLINED bool may_be_masked() const {
    return score[0][0].may_be_masked();
  }
};

// PAIRED rows are four a block, each of which has two columns (core/scaled.h).
template <typename Types, int BLOCKS, int SIMDGROUPS, int KEYS, int SLICES, bool PAIRED>
[[kernel, max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] void attention_decode(
    DECODE_OPERANDS,
    uint3 launched [[threadgroup_position_in_grid]],  // of (splits and key heads / SIMDGROUPS, tile of rows and slice, batch row)
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane_index [[thread_index_in_simdgroup]]) {
  constexpr int V = Types::V;
  constexpr int v_fragments = slice_fragments(V, SLICES);
  constexpr int in_block = PAIRED ? 4 : 8;  // rows
  using Keys = KeysInLanes<Types, Spans<typename Types::Key, Types::H>::even>;
  using Values = ValuesInLanes<Types, v_fragments, Spans<typename Types::Value, v_fragments * 8>::even, PAIRED>;
  using KeyTile = typename Keys::template Tile<KEYS / 8>;
  using ValueTile = typename Values::template Tile<KEYS / 8>;
  using Operand = typename Keys::Operand;
  using Running = GroupRunning<BLOCKS, v_fragments, Values::spans>;
  const Features features = FEATURES;
  const uint3 group = place_in(p.grid, launched);
  const Lane lane(lane_index);
  // simdgroups side by side have the same keys of other heads, which lie side by side
  const int place = int(group.x) * SIMDGROUPS + simdgroup;
  const int split = place / p.key_heads;
  const int slice = int(group.y) % SLICES;
  const int from = slice * v_fragments;
  const int first = int(group.y) / SLICES * BLOCKS * in_block;
  const int key_head = place % p.key_heads;
  const int batch = group.z;
  const int rows = p.heads / p.key_heads * p.queries;
  if (split >= splits) {
    return;
  }

  const typename Types::Visibility all(features, batch, key_head, lane_index);
  GroupRows<Types, Operand, BLOCKS, Keys::spans> q;
  GroupRules<Types, BLOCKS> rules;
  UNROLLED
  for (int block = 0; block < BLOCKS; ++block) {
    UNROLLED
    for (int e = 0; e < 2; ++e) {
      const GroupRow own(p, key_head, first + block * in_block + (lane.column + e) % in_block);
      rules.row[block][e] = own.row;
      rules.visibility[block][e] = typename Types::Visibility(features, batch, own.head, lane_index);
      rules.score[block][e] = typename Types::Score(features, batch, own.head, all.offset);
      q.rows[block][e] = queries_of<Types>(features, query, batch, own.head, p.queries).tile(own.row);
      q.inside[block][e] = own.inside;
      float row[q.count];
      float largest = 0;
      UNROLLED
      for (int i = 0; i < q.count; ++i) {
        row[i] = q.element(block, e, KeyTile::channel(i, lane.row));
        largest = max(largest, fabs(row[i]));
      }
      const float parts = RowsInLanes<typename Types::T, Operand>::parts(largest);
      q.units[block][e] = as_type<float>(0x7F000000u - as_type<uint>(parts));  // 1 / parts
      UNROLLED
      for (int i = 0; i < q.count; ++i) {
        q.kept[block][i].thread_elements()[e] = Operand(row[i] * parts);
      }
    }
    UNROLLED
    for (int i = 0; i < q.count; ++i) {
      q.kept[block][i] = WeightsInLanes<PAIRED>::rows(q.kept[block][i], lane_index);
    }
  }
  q.finite = true;
  if (Keys::units) {
    q.sum_up();
  }

  const auto key_source = keys_of<Types>(features, key, batch, key_head, all.columns);
  const auto value_source = values_of<Types>(features, value, batch, key_head, all.columns);
  Running running;
  const int begin = max(split * split_keys, all.column_begin(0) / KEYS * KEYS);
  const int end = min((split + 1) * split_keys, all.column_end(0, p.queries - 1));
  // columns that all rows see; masks may differ among the rows of a simdgroup
  const int whole_begin = all.column_begin(p.queries - 1);
  const int whole_end = all.by_bands() && p.queries <= all.rows ? min(all.column_end(0, 0), end) : 0;
  int column = begin;
  if (column >= whole_begin && column + KEYS <= whole_end && q.finite) {
    // the next keys are loaded after the last use of these, the next values and all scales while these are used
    KeyTile keys(key_source, lane);
    ValueTile next_values(value_source, from, lane);
    keys.look(column, lane_index);
    next_values.look(column, lane_index);
    keys.load(lane_index);
    next_values.load(lane_index);
    ROLLED
    for (; column + KEYS <= whole_end; column += KEYS) {
      const bool more = column + 2 * KEYS <= whole_end;
      ValueTile values = next_values;
      if (!keys.prepare() || !values.prepare()) {
        break;  // the loop below decodes what it has to
      }
      if (more) {
        keys.look(column + KEYS, lane_index);
        next_values.look(column + KEYS, lane_index);
        next_values.load(lane_index);
      }
      Fragment<float> s[BLOCKS][KEYS / 8];
      multiply_keys(s, q, keys);
      if (more) {
        keys.load(lane_index);
      }
      running.template weigh<false>(s, rules, column, lane);
      accumulate_values(running.sums, s, values, from);
      accumulate_zeros(running.zeros, s, values);
    }
    if (rules.may_be_masked() && !running.finite()) {  // values that are not reach visible pairs only
      running = Running();
      column = begin;
    }
  }
  ROLLED
  for (; column < end; column += 8) {
    typename Keys::template Tile<1> keys(key_source, lane);
    typename Values::template Tile<1> values(value_source, from, lane);
    keys.look(column, lane_index);
    values.look(column, lane_index);
    keys.load(lane_index);
    values.load(lane_index);
    keys.decode(!keys.prepare() || !q.finite);
    values.decode(!values.prepare());
    Fragment<float> s[BLOCKS][1];
    multiply_keys(s, q, keys);
    running.template weigh<true>(s, rules, column, lane);
    if (values.finite()) {
      accumulate_values(running.sums, s, values, from);
      accumulate_zeros(running.zeros, s, values);
    } else {
      UNROLLED
      for (int block = 0; block < BLOCKS; ++block) {
        UNROLLED
        for (int e = 0; e < 2; ++e) {
          const float weight = s[block][0].thread_elements()[e];
          s[block][0].thread_elements()[e] = lane.column < in_block ? weight : absent_weight();
        }
      }
      accumulate_present_values(running.sums, s, values, from, lane);
    }
  }

  const ulong plane = (ulong(batch) * p.key_heads + key_head) * splits + split;
  UNROLLED
  for (int block = 0; block < BLOCKS; ++block) {
    UNROLLED
    for (int e = 0; e < 2; ++e) {
      const int row = first + block * in_block + lane.column + e;
      const bool stored = lane.column < in_block && row < rows;
      const float sum = sum_along_column(running.row_sum[block][e]);
      float zeros[Values::spans];
      UNROLLED
      for (int s = 0; s < Values::spans; ++s) {
        zeros[s] = sum_along_column(running.zeros[block][s][e]);
      }
      device float* at = split_out + (plane * rows + row) * V;
      UNROLLED
      for (int i = 0; i < v_fragments; ++i) {
        const int channel = ValueTile::channel(from + i, lane.row);
        float y = running.sums[block][i].thread_elements()[e];
        if (PAIRED) {
          y += simd_shuffle_xor(y, lane_of(0, 4)) / WeightsInLanes<true>::low_unit;
        }
        if (stored && channel < V) {
          at[channel] = y + zeros[i * Values::spans / v_fragments];
        }
      }
      if (slice == 0 && lane.row == 0 && stored) {
        device float* state = split_state + (plane * rows + row) * 2;
        state[0] = running.row_max[block][e];
        state[1] = sum;
      }
    }
  }
}

// The same without the matrix unit, for rows too few to fill it: LANES lanes share a key, and a simdgroup has 32 / LANES at once.
// Elements in few bits are multiplied as units (core/words.h), and scales are applied to sums, unless a tile's elements must be clamped
// to their type, or they or queries are not finite: then each element is decoded. Nothing is loaded of what no row sees.
template <typename Types, int ROWS, int SIMDGROUPS, int KEYS, int LANES>
[[kernel, max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] void attention_decode_rows(
    DECODE_ROWS_OPERANDS,
    uint3 launched [[threadgroup_position_in_grid]],  // of (splits and key heads / SIMDGROUPS, tile of rows, batch row)
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane_index [[thread_index_in_simdgroup]]) {
  constexpr int V = Types::V;
  constexpr int STEPS = KEYS * LANES / 32;
  using KeyPart = Share<typename Types::Key, LANES>;
  using ValuePart = Share<typename Types::Value, LANES>;
  using Deals = Deal<ROWS, STEPS, LANES, (KeyPart::late > ValuePart::late ? KeyPart::late : ValuePart::late)>;
  using Keys = Shares<typename Types::Key, Deals, STEPS, LANES>;
  using Values = Shares<typename Types::Value, Deals, STEPS, LANES>;
  constexpr bool keys_scaled = Types::Key::Encoding::scaled;
  constexpr bool values_scaled = Types::Value::Encoding::scaled;
  constexpr int held = Deals::held;
  // small tiles are loaded while others are computed, keys after their last use
  constexpr bool ahead = Types::Key::Encoding::bits <= 8 && Types::Value::Encoding::bits <= 8;
  const Features features = FEATURES;
  const uint3 group = place_in(p.grid, launched);
  // simdgroups side by side have the same keys of other heads, which lie side by side
  const int place = int(group.x) * SIMDGROUPS + simdgroup;
  const int split = place / p.key_heads;
  const int first = int(group.y) * ROWS;
  const int key_head = place % p.key_heads;
  const int batch = group.z;
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
