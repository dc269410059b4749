// Attention, backward (Dao, arXiv:2307.08691, section 3.1): several kernels and no atomics, so that the same bits come out of
// every run.
//
//   attention_delta:       delta = Σ dO·O - d(log-sum-exp) and what probabilities need, three numbers for each row
//   attention_d_query:     dQ = scale · dS K, parallel over query rows
//   attention_d_key_value: dK = scale · dSᵀ Q and dV = Pᵀ dO, parallel over key rows, looping over the heads of a group
//   attention_d_bias:      dS summed over what the bias broadcasts, parallel over its elements; of a bias that broadcasts nothing
//                          attention_d_query stores dS itself
//
// with P = exp(score - maximum) / sum computed again and dS = P ∘ (dO Vᵀ - delta). Inputs are matrix operands in their own dtype;
// P and dS are float32 operands, for the reason given in forward.metal.
#include "attention/gradient.h"
#include "attention/key_value.h"
#include "attention/visibility.h"

// One simdgroup for each row.
template <typename Types, int SIMDGROUPS>
[[kernel, max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] void attention_delta(
    DELTA_OPERANDS,
    uint3 group [[threadgroup_position_in_grid]],     // (SIMDGROUPS rows and heads, 1, batch row)
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  constexpr int V = Types::V;
  const ulong rows = ulong(p.queries) * p.heads;
  const ulong row = ulong(group.x) * SIMDGROUPS + simdgroup;
  if (row >= rows) {
    return;
  }
  const ulong at = group.z * rows + row;
  const float sum = simd_sum(part_of_delta<V, 32>(out + at * V, d_out + at * V, lane));
  if (lane == 0) {
    store_gradient_row(row_states, at, row_max[at], row_sum[at], sum - d_lse[at]);
  }
}

// dQ of a simdgroup's rows of one head, in its registers.
template <typename Types, int BLOCKS, int COUNT>
struct QueryGradient {
  typename Types::Visibility visibility;
  typename Types::Score score;
  Dropout drop;
  device uchar* d_bias;
  bool stores_bias;  // dS is that of the bias, and no other slice stores it
  int first;         // the lane's row of the first block
  bool whole;        // all pairs at hand are visible
  RowState row_state[BLOCKS];
  float scale_sum[BLOCKS];  // of the lane's own columns
  float slope_sum[BLOCKS];
  Fragment<float> sums[BLOCKS][COUNT];

  // Adds 8 · COLUMNS columns from `column` on, where the tiles begin. See `attend`.
  template <bool MASKED, int COLUMNS, typename Queries, typename Cotangents, typename Keys, typename Values>
  INLINED void add(
      const thread Queries& q, const thread Cotangents& d_o, const thread Keys& keys, const thread Values& values,
      int column, int from, bool spoilt, Lane lane) {
    constexpr int width = Keys::fragments;
    Fragment<float> s[BLOCKS][COLUMNS];
    Fragment<float> d_p[BLOCKS][COLUMNS];
    multiply_rows(s, q, keys);
    multiply_rows(d_p, d_o, values);
    UNROLLED
    for (int block = 0; block < BLOCKS; ++block) {
      const int row = first + block * 8;
      float2 keep[COLUMNS];
      drop.factors(row, column + lane.column, keep);
      UNROLLED
      for (int c = 0; c < COLUMNS; ++c) {
        UNROLLED
        for (int e = 0; e < 2; ++e) {
          const int at = column + c * 8 + lane.column + e;
          const float product = s[block][c].thread_elements()[e];
          Pair pair;
          if (!MASKED || whole || visibility.visible(row, at)) {
            pair = Pair(score, row, at, product, d_p[block][c].thread_elements()[e], row_state[block], keep[c][e]);
            pair.add_to(scale_sum[block], slope_sum[block], score, row, at, product);
          }
          if (stores_bias) {
            score.store_gradient(d_bias, row, at, pair.d_score + 0.0f);
          }
          s[block][c].thread_elements()[e] = pair.d_score;
        }
      }
    }
    accumulate_or_present<width>(sums, s, keys, from, (MASKED || score.may_be_masked()) && spoilt, lane);
  }
};

template <
    typename Types,
    int BLOCKS,
    int SIMDGROUPS,
    int KEYS,
    int COLUMNS,  // fragments of columns computed side by side
    int BUFFERS,
    bool CACHE_Q,
    bool CACHE_DO,
    int SLICES>   // threadgroups that share the columns of dQ, each with all scores
[[kernel, max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] void attention_d_query(
    D_QUERY_OPERANDS,
    uint3 launched [[threadgroup_position_in_grid]],  // of (head, tile of rows from the last and slice, batch row)
    ushort thread_index [[thread_index_in_threadgroup]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane_index [[thread_index_in_simdgroup]]) {
  constexpr int H = Types::H;
  constexpr int V = Types::V;
  static_assert(KEYS / 8 % COLUMNS == 0, "parts of a tile are alike");
  constexpr int rows_of_group = SIMDGROUPS * BLOCKS * 8;
  constexpr int h_fragments = slice_fragments(H, SLICES);
  using T = typename Types::T;
  using Operand = typename Types::Operand;
  using Tiles = KeyValueTiles<Types, KEYS, SIMDGROUPS * 32, (BUFFERS > 0)>;
  threadgroup Operand k_room[BUFFERS > 0 ? BUFFERS * Tiles::Keys::room : 1];
  threadgroup Operand v_room[BUFFERS > 0 ? BUFFERS * Tiles::Values::room : 1];

  const Features features = FEATURES;
  const uint3 group = place_in(p.grid, launched);
  const Lane lane(lane_index);
  const int head = group.x;
  const int batch = group.z;
  const int key_head = head / (p.heads / p.key_heads);
  const int slice = int(group.y) % SLICES;
  const int group_row = int((p.grid.height - 1 - group.y) / SLICES) * rows_of_group;
  const int first = group_row + simdgroup * BLOCKS * 8;
  const typename Types::Visibility visibility(features, batch, head, lane_index);
  const typename Types::Score score(features, batch, head, visibility.offset);
  const OwnRows<typename Types::Query, Operand, BLOCKS, CACHE_Q, (BUFFERS > 0)> q(
      queries_of<Types>(features, query, batch, head, p.queries), first, lane);
  const OwnRows<typename Types::Cotangent, Operand, BLOCKS, CACHE_DO, (BUFFERS > 0)> d_o(
      cotangents_of<Types>(features, d_out, batch, head, p.queries), first, lane);
  Tiles tiles = {
      keys_of<Types>(features, key, batch, key_head, visibility.columns),
      values_of<Types>(features, value, batch, key_head, visibility.columns),
      typename Tiles::Keys(k_room, thread_index, lane), typename Tiles::Values(v_room, thread_index, lane)};
  QueryGradient<Types, BLOCKS, h_fragments> gradient = {
      visibility, score, Dropout(features, batch, head), wants_bias ? d_bias : nullptr, wants_bias && slice == 0, first + lane.row, false, {}, {}, {}, {}};
  UNROLLED
  for (int block = 0; block < BLOCKS; ++block) {
    const int row = min(gradient.first + block * 8, p.queries - 1);
    gradient.row_state[block] = RowState(row_states[row_place(p, batch, row, head)]);
    gradient.scale_sum[block] = 0;
    gradient.slope_sum[block] = 0;
  }
  clear(gradient.sums);

  const Walk walk = columns_for<KEYS>(p, visibility, lists, head, group_row, rows_of_group);
  if (gradient.stores_bias && walk.wholes * KEYS < p.keys) {  // each lane its own pairs, which it may store again
    for (int column = lane.column; column < p.keys; column += 8) {
      UNROLLED
      for (int block = 0; block < BLOCKS; ++block) {
        score.store_gradient(d_bias, gradient.first + block * 8, column, 0.0f);
        score.store_gradient(d_bias, gradient.first + block * 8, column + 1, 0.0f);
      }
    }
  }
  Pipeline<Tiles, BUFFERS> pipeline(tiles);
  int column = walk.count > 0 ? walk.tile(0) * KEYS : 0;
  pipeline.start(walk.count > 0, column);
  int turn = 0;
  for (; turn < walk.wholes; ++turn) {
    const bool more = turn + 1 < walk.count;
    const int next = more ? walk.tile(turn + 1) * KEYS : 0;
    pipeline.ahead(more, next);
    const auto keys = tiles.keys.reader(tiles.key_source, column, pipeline.buffer);
    const auto values = tiles.values.reader(tiles.value_source, column, pipeline.buffer);
    const bool spoilt = score.may_be_masked() && !keys.finite(lane_index);
    ROLLED
    for (int part = 0; part < KEYS / 8; part += COLUMNS) {
      gradient.template add<false, COLUMNS>(
          q, d_o, keys.part(part), values.part(part), column + part * 8, slice * h_fragments, spoilt, lane);
    }
    pipeline.turn(more);
    column = next;
  }
  ROLLED
  for (; turn < walk.count; ++turn) {
    const bool more = turn + 1 < walk.count;
    const int next = more ? walk.tile(turn + 1) * KEYS : 0;
    pipeline.ahead(more, next);
    const int seen = visibility.of_tile(first, BLOCKS * 8, column, KEYS);
    if (seen != none_visible) {
      const auto keys = tiles.keys.reader(tiles.key_source, column, pipeline.buffer);
      const auto values = tiles.values.reader(tiles.value_source, column, pipeline.buffer);
      const bool spoilt = !keys.finite(lane_index);
      gradient.whole = seen == all_visible;
      ROLLED
      for (int part = 0; part < KEYS / 8; ++part) {
        const int at = column + part * 8;
        if (visibility.band(first, BLOCKS * 8, at, 8) != none_visible) {
          gradient.template add<true, 1>(
              q, d_o, keys.part(part), values.part(part), at, slice * h_fragments, spoilt, lane);
        }
      }
    }
    pipeline.turn(more);
    column = next;
  }

  scale_sums(gradient.sums, score.scale);
  const uint stride = uint(p.heads) * uint(H);
  device T* rows = d_query + head_offset(batch, p.queries, p.heads, head, H) + ulong(uint(first)) * stride;
  UNROLLED
  for (int block = 0; block < BLOCKS; ++block) {
    const int left = p.queries - first - block * 8;
    const ulong at_row = row_place(p, batch, first + block * 8 + lane.row, head);
    if (wants_sums) {
      const float2 found = float2(sum_along_row(gradient.scale_sum[block]), sum_along_row(gradient.slope_sum[block]));
      if (slice == 0 && lane.column == 0 && lane.row < left) {
        score_sums[at_row] = found;
      }
    }
    if (lane.row < left) {
      store_row<H, columns_dealt(H)>(
          gradient.sums[block], 1.0f, rows + uint(block * 8 + lane.row) * stride, slice * h_fragments, lane);
    }
  }
}

// States of query rows on their way to dK and dV: staged beside the tile, or read by each lane.
template <int QUERIES, int THREADS, bool STAGED>
struct RowStates {
  static constant constexpr int room = STAGED ? 3 * QUERIES : 0;
  device const float4* row_states;  // of row 0 of the head
  uint stride;
  int last;
  threadgroup float* tiles;
  ushort thread_index;
  RowState fetched;

  INLINED RowState load(int row) const {
    return RowState(row_states[ulong(uint(min(row, last))) * ulong(stride)]);
  }

  INLINED void fetch(int row) {
    if (thread_index < QUERIES) {
      fetched = load(row + thread_index);
    }
  }

  INLINED void put(int buffer) {
    threadgroup float* at = tiles + (buffer * room + thread_index);
    if (thread_index < QUERIES) {
      at[0] = fetched.row_max;
      at[QUERIES] = fetched.log2_sum;
      at[2 * QUERIES] = fetched.delta;
    }
  }

  // Of row i of the tile that begins at `row`.
  INLINED RowState at(int row, int i, int buffer) const {
    if (!STAGED) {
      return load(row + i);
    }
    threadgroup const float* at = tiles + (buffer * room + i);
    RowState result;
    result.row_max = at[0];
    result.log2_sum = at[QUERIES];
    result.delta = at[2 * QUERIES];
    return result;
  }
};

// A tile of queries that a tile of keys meets.
struct QueryPlace {
  int head;
  int row;
};

// Queries and dO on their way to dK and dV: each is read as it lies and transposed.
template <typename Types, int QUERIES, int THREADS, bool STAGED>
struct QueryTiles {
  using Operand = typename Types::Operand;
  using QuerySource = typename Types::Query;
  using CotangentSource = typename Types::Cotangent;
  using Queries = typename TileOf<STAGED, QuerySource, Operand, QUERIES, THREADS>::Type;
  using Cotangents = typename TileOf<STAGED, CotangentSource, Operand, QUERIES, THREADS>::Type;
  QuerySource query_source;  // of head 0
  CotangentSource cotangent_source;
  Queries queries;
  Cotangents cotangents;
  RowStates<QUERIES, THREADS, STAGED> states;

  INLINED QuerySource queries_at(int head) const {
    QuerySource result = query_source;
    result.turn_by(head);
    return result;
  }

  INLINED CotangentSource cotangents_at(int head) const {
    CotangentSource result = cotangent_source;
    result.turn_by(head);
    return result;
  }

  INLINED RowStates<QUERIES, THREADS, STAGED> states_at(int head) const {
    RowStates<QUERIES, THREADS, STAGED> result = states;
    result.row_states += head;
    return result;
  }

  INLINED void fetch(QueryPlace place) {
    queries.fetch(queries_at(place.head), place.row);
    cotangents.fetch(cotangents_at(place.head), place.row);
    RowStates<QUERIES, THREADS, STAGED> of_head = states_at(place.head);
    of_head.fetch(place.row);
    states.fetched = of_head.fetched;
  }

  INLINED void put(int buffer) {
    queries.put(buffer);
    cotangents.put(buffer);
    states.put(buffer);
  }
};

// Where a tile of keys stands among the tiles of queries that it meets, one head of the group after another.
struct Turn {
  int head;
  int end_head;
  int i;
  Walk walk;

  INLINED bool there() const {
    return head < end_head;
  }

  INLINED bool whole() const {
    return there() && i < walk.wholes;
  }

  INLINED QueryPlace place(int rows) const {
    return {head, there() ? walk.tile(i) * rows : 0};
  }

  // The turn after this one.
  template <int QUERIES, typename Visibility>
  INLINED Turn next(
      constant Parameters& p, const thread Visibility& visibility, device const int* lists, int column, int columns) const {
    Turn result = *this;
    ++result.i;
    ROLLED
    while (result.i >= result.walk.count && ++result.head < result.end_head) {
      result.i = 0;
      result.walk = rows_for<QUERIES>(p, visibility, lists, result.head, column, columns);
    }
    return result;
  }
};

// Sums of a simdgroup's keys to their place.
template <typename T, int SIZE, int BLOCKS, int COUNT>
INLINED void store_keys(
    const thread Fragment<float> (&sums)[BLOCKS][COUNT], constant Parameters& p, device T* to, int batch, int key_head, int first,
    int from, Lane lane) {
  const uint stride = uint(p.key_heads) * uint(SIZE);
  device T* rows = to + head_offset(batch, p.keys, p.key_heads, key_head, SIZE) + ulong(uint(first)) * stride;
  UNROLLED
  for (int block = 0; block < BLOCKS; ++block) {
    if (first + block * 8 + lane.row < p.keys) {
      store_row<SIZE, columns_dealt(SIZE)>(sums[block], 1.0f, rows + uint(block * 8 + lane.row) * stride, from, lane);
    }
  }
}

// Who sums dK and dV of keys, in registers, with scores transposed: rows are keys, columns are queries. Where registers do not hold
// both, two simdgroups share keys: the first has the scores and dV, the second dP and dK, and takes the scores from the first. Where
// they do not hold one either, PARTS threadgroups share the columns, each with all scores.
template <typename Types, int BLOCKS, int SIMDGROUPS, int COLUMNS, bool CACHE_K, bool CACHE_V, bool STAGED, int PARTS>
struct KeyValueSums {
  using Operand = typename Types::Operand;
  using Keys = OwnRows<typename Types::Key, Operand, BLOCKS, false, STAGED>;
  using Values = OwnRows<typename Types::Value, Operand, BLOCKS, false, STAGED>;
  static constant constexpr bool paired = true;
  static constant constexpr int owners = SIMDGROUPS / 2;  // of different keys
  static constant constexpr int room = owners * 2 * BLOCKS * COLUMNS * 32;
  static_assert(PARTS <= 2, "parts are alike, or the last of two is narrower");
  static constant constexpr int count = slice_fragments(larger_of(Types::H, Types::V), PARTS);
  static constant constexpr int k_kept = CACHE_K ? Keys::count : 0;
  static constant constexpr int v_kept = CACHE_V ? Values::count : 0;
  static constant constexpr int kept_count = larger_of(larger_of(k_kept, v_kept), 1);
  bool of_values;
  int from;  // fragment
  Keys k;
  Values v;
  threadgroup float2* scores;  // the lane's of its pair, of two parts: one is taken while the other is made
  bool second;
  Fragment<Operand> kept[BLOCKS][kept_count];
  Fragment<float> sums[BLOCKS][count];

  INLINED KeyValueSums(
      typename Types::Key keys, typename Types::Value values, threadgroup float2* scores, int first, ushort simdgroup, int part,
      Lane lane, ushort lane_index)
      : of_values(simdgroup < owners), from(part * count), k(keys, first, lane), v(values, first, lane),
        scores(scores + simdgroup % owners * (room / owners) + lane_index), second(false) {
    clear(sums);
    if (CACHE_K && of_values) {
      k.keep(kept);
    }
    if (CACHE_V && !of_values) {
      v.keep(kept);
    }
  }

  // Scores, and dP where it is wanted, of a part of a tile that `sees` says this pair sees something in.
  template <int COUNT, typename Queries, typename Cotangents>
  INLINED void multiply(
      thread Fragment<float> (&s)[BLOCKS][COUNT], thread Fragment<float> (&d_p)[BLOCKS][COUNT], const thread Queries& queries,
      const thread Cotangents& cotangents, bool sees) {
    threadgroup float2* at = scores + (second ? room / owners / 2 : 0);
    second = !second;
    clear(s);
    clear(d_p);
    if (sees && of_values) {
      multiply_rows(s, SharedRows<Keys, CACHE_K, BLOCKS, kept_count>{k, kept}, queries);
      UNROLLED
      for (int i = 0; i < BLOCKS * COUNT; ++i) {
        at[i * 32] = float2(s[i / COUNT][i % COUNT].thread_elements()[0], s[i / COUNT][i % COUNT].thread_elements()[1]);
      }
    }
    if (sees && !of_values) {
      multiply_rows(d_p, SharedRows<Values, CACHE_V, BLOCKS, kept_count>{v, kept}, cotangents);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (sees && !of_values) {
      UNROLLED
      for (int i = 0; i < BLOCKS * COUNT; ++i) {
        s[i / COUNT][i % COUNT] = fragment_of<float>(at[i * 32].x, at[i * 32].y);
      }
    }
  }

  template <typename Weights, typename Queries, typename Cotangents>
  INLINED void add(
      thread Weights& weights, thread Weights& d_scores, const thread Queries& queries, const thread Cotangents& cotangents,
      bool spoilt, Lane lane) {
    if (of_values) {
      accumulate_or_present<Cotangents::fragments>(sums, weights, cotangents, from, spoilt, lane);
    } else {
      accumulate_or_present<Queries::fragments>(sums, d_scores, queries, from, spoilt, lane);
    }
  }

  template <typename T>
  INLINED void store(
      constant Parameters& p, device T* d_key, device T* d_value, float scale, int batch, int key_head, int first, Lane lane) {
    if (of_values) {
      store_keys<T, Types::V>(sums, p, d_value, batch, key_head, first, from, lane);
    } else {
      scale_sums(sums, scale);
      store_keys<T, Types::H>(sums, p, d_key, batch, key_head, first, from, lane);
    }
  }
};

// One simdgroup for both.
template <typename Types, int BLOCKS, int SIMDGROUPS, int COLUMNS, bool CACHE_K, bool CACHE_V, bool STAGED>
struct KeyValueSums<Types, BLOCKS, SIMDGROUPS, COLUMNS, CACHE_K, CACHE_V, STAGED, 0> {
  using Operand = typename Types::Operand;
  static constant constexpr bool paired = false;
  static constant constexpr int owners = SIMDGROUPS;
  static constant constexpr int room = 1;
  OwnRows<typename Types::Key, Operand, BLOCKS, CACHE_K, STAGED> k;
  OwnRows<typename Types::Value, Operand, BLOCKS, CACHE_V, STAGED> v;
  Fragment<float> key_sums[BLOCKS][slice_fragments(Types::H, 1)];
  Fragment<float> value_sums[BLOCKS][slice_fragments(Types::V, 1)];

  INLINED KeyValueSums(
      typename Types::Key keys, typename Types::Value values, threadgroup float2*, int first, ushort, int, Lane lane, ushort)
      : k(keys, first, lane), v(values, first, lane) {
    clear(key_sums);
    clear(value_sums);
  }

  template <typename Products, typename Queries, typename Cotangents>
  INLINED void multiply(
      thread Products& s, thread Products& d_p, const thread Queries& queries, const thread Cotangents& cotangents, bool) {
    multiply_rows(s, k, queries);
    multiply_rows(d_p, v, cotangents);
  }

  template <typename Weights, typename Queries, typename Cotangents>
  INLINED void add(
      thread Weights& weights, thread Weights& d_scores, const thread Queries& queries, const thread Cotangents& cotangents,
      bool spoilt, Lane lane) {
    accumulate_or_present<Cotangents::fragments>(value_sums, weights, cotangents, 0, spoilt, lane);
    accumulate_or_present<Queries::fragments>(key_sums, d_scores, queries, 0, spoilt, lane);
  }

  template <typename T>
  INLINED void store(
      constant Parameters& p, device T* d_key, device T* d_value, float scale, int batch, int key_head, int first, Lane lane) {
    scale_sums(key_sums, scale);
    store_keys<T, Types::H>(key_sums, p, d_key, batch, key_head, first, 0, lane);
    store_keys<T, Types::V>(value_sums, p, d_value, batch, key_head, first, 0, lane);
  }
};

// What pairs of a query and a key add to dK and dV.
template <typename Types, typename Sums, int BLOCKS>
struct KeyValueGradient {
  typename Types::Visibility visibility;
  typename Types::Score score;
  Dropout drop;
  int first;   // the lane's key of the first block
  bool whole;  // all pairs at hand are visible
  Sums sums;

  // Adds 8 · COLUMNS queries from row `part` · 8 of the tile on, where the readers begin, where `sees`. See `attend`.
  template <bool MASKED, int COLUMNS, typename Queries, typename Cotangents, typename States>
  INLINED void add(
      const thread Queries& queries, const thread Cotangents& cotangents, const thread States& states, int tile_row, int buffer,
      int part, bool sees, bool spoilt, Lane lane) {
    Fragment<float> s[BLOCKS][COLUMNS];
    Fragment<float> d_p[BLOCKS][COLUMNS];
    sums.multiply(s, d_p, queries, cotangents, sees);
    if (!sees) {
      return;
    }
    RowState state[COLUMNS][2];
    UNROLLED
    for (int c = 0; c < COLUMNS; ++c) {
      UNROLLED
      for (int e = 0; e < 2; ++e) {
        state[c][e] = states.at(tile_row, (part + c) * 8 + lane.column + e, buffer);
      }
    }
    int rows[BLOCKS * COLUMNS];
    int columns[BLOCKS * COLUMNS];
    UNROLLED
    for (int i = 0; i < BLOCKS * COLUMNS; ++i) {
      rows[i] = tile_row + (part + i % COLUMNS) * 8 + lane.column;
      columns[i] = first + i / COLUMNS * 8;
    }
    float2 keep[BLOCKS * COLUMNS];
    drop.factors_of_columns(rows, columns, keep);
    UNROLLED
    for (int block = 0; block < BLOCKS; ++block) {
      const int column = first + block * 8;
      UNROLLED
      for (int c = 0; c < COLUMNS; ++c) {
        UNROLLED
        for (int e = 0; e < 2; ++e) {
          const int row = rows[c] + e;
          Pair pair;
          if (!MASKED || whole || visibility.visible(row, column)) {
            pair = Pair(
                score, row, column, s[block][c].thread_elements()[e], d_p[block][c].thread_elements()[e], state[c][e],
                keep[block * COLUMNS + c][e]);
          }
          s[block][c].thread_elements()[e] = pair.weight;
          d_p[block][c].thread_elements()[e] = pair.d_score;
        }
      }
    }
    sums.add(s, d_p, queries, cotangents, (MASKED || score.may_be_masked()) && spoilt, lane);
  }

  // Adds all queries that the keys of the threadgroup meet.
  template <int QUERIES, int COLUMNS, int BUFFERS, typename Tiles>
  INLINED void add_all(
      constant Parameters& p, thread Tiles& tiles, Turn turn, device const int* lists, int group_column, int columns, int own,
      Lane lane, ushort lane_index) {
    Pipeline<Tiles, BUFFERS> pipeline(tiles);
    pipeline.start(turn.there(), turn.place(QUERIES));
    while (turn.there()) {
      const int head = turn.head;
      visibility.turn_to(head);
      score.turn_to(head);
      drop.head = head;
      const auto query_source = tiles.queries_at(head);
      const auto cotangent_source = tiles.cotangents_at(head);
      const auto states = tiles.states_at(head);
      while (turn.whole() && turn.head == head) {
        const int row = turn.place(QUERIES).row;
        const Turn following = turn.template next<QUERIES>(p, visibility, lists, group_column, columns);
        pipeline.ahead(following.there(), following.place(QUERIES));
        const auto queries = tiles.queries.reader(query_source, row, pipeline.buffer);
        const auto cotangents = tiles.cotangents.reader(cotangent_source, row, pipeline.buffer);
        const bool spoilt = score.may_be_masked() && !(queries.finite(lane_index) && cotangents.finite(lane_index));
        ROLLED
        for (int part = 0; part < QUERIES / 8; part += COLUMNS) {
          add<false, COLUMNS>(
              queries.part(part), cotangents.part(part), states, row, pipeline.buffer, part, true, spoilt, lane);
        }
        pipeline.turn(following.there());
        turn = following;
      }
      ROLLED
      while (turn.there() && !turn.whole() && turn.head == head) {
        const int row = turn.place(QUERIES).row;
        const Turn following = turn.template next<QUERIES>(p, visibility, lists, group_column, columns);
        pipeline.ahead(following.there(), following.place(QUERIES));
        const int seen = visibility.of_tile(row, QUERIES, own, BLOCKS * 8);
        if (Sums::paired || seen != none_visible) {
          const auto queries = tiles.queries.reader(query_source, row, pipeline.buffer);
          const auto cotangents = tiles.cotangents.reader(cotangent_source, row, pipeline.buffer);
          const bool spoilt = seen != none_visible && !(queries.finite(lane_index) && cotangents.finite(lane_index));
          whole = seen == all_visible;
          ROLLED
          for (int part = 0; part < QUERIES / 8; ++part) {
            const bool sees = seen != none_visible && visibility.band(row + part * 8, 8, own, BLOCKS * 8) != none_visible;
            if (Sums::paired || sees) {
              add<true, 1>(
                  queries.part(part), cotangents.part(part), states, row, pipeline.buffer, part, sees, spoilt, lane);
            }
          }
        }
        pipeline.turn(following.there());
        turn = following;
      }
    }
  }
};

// A simdgroup, or a pair, has BLOCKS × 8 keys and their values, and sums up dK and dV of them.
template <
    typename Types,
    int BLOCKS,
    int SIMDGROUPS,
    int QUERIES,
    int COLUMNS,  // fragments of queries computed side by side
    int BUFFERS,
    bool CACHE_K,
    bool CACHE_V,
    int PARTS>    // 0 for no pairs; threadgroups that share the columns of sums, each with all scores
[[kernel, max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] void attention_d_key_value(
    D_KEY_VALUE_OPERANDS,
    uint3 launched [[threadgroup_position_in_grid]],  // of (key head, tile of keys and slice, batch row)
    ushort thread_index [[thread_index_in_threadgroup]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane_index [[thread_index_in_simdgroup]]) {
  constexpr int H = Types::H;
  constexpr int V = Types::V;
  static_assert(QUERIES / 8 % COLUMNS == 0, "parts of a tile are alike");
  using Sums = KeyValueSums<Types, BLOCKS, SIMDGROUPS, COLUMNS, CACHE_K, CACHE_V, (BUFFERS > 0), PARTS>;
  constexpr int keys_of_group = Sums::owners * BLOCKS * 8;
  constexpr int parts = larger_of(PARTS, 1);
  using T = typename Types::T;
  using Operand = typename Types::Operand;
  using Tiles = QueryTiles<Types, QUERIES, SIMDGROUPS * 32, (BUFFERS > 0)>;
  threadgroup Operand q_room[BUFFERS > 0 ? BUFFERS * Tiles::Queries::room : 1];
  threadgroup Operand do_room[BUFFERS > 0 ? BUFFERS * Tiles::Cotangents::room : 1];
  threadgroup float state_room[BUFFERS > 0 ? BUFFERS * 3 * QUERIES : 1];
  threadgroup float2 score_room[Sums::room];

  const Features features = FEATURES;
  const uint3 group = place_in(p.grid, launched);
  const Lane lane(lane_index);
  const int key_head = group.x;
  const int batch = group.z;
  const int heads_of_group = p.heads / p.key_heads;
  const int group_column = int(group.y) / parts * keys_of_group;
  const int first = group_column + simdgroup % Sums::owners * BLOCKS * 8;
  const int first_head = key_head * heads_of_group;
  const int end_head = first_head + heads_of_group;
  const typename Types::Visibility visibility(features, batch, first_head, lane_index);
  const typename Types::Score score(features, batch, first_head, visibility.offset);
  const Dropout drop(features, batch, first_head);
  KeyValueGradient<Types, Sums, BLOCKS> gradient = {
      visibility, score, drop, first + lane.row, false,
      Sums(
          keys_of<Types>(features, key, batch, key_head, p.keys), values_of<Types>(features, value, batch, key_head, p.keys),
          score_room, first, simdgroup, int(group.y) % parts, lane, lane_index)};
  const ulong at_batch = ulong(batch) * p.queries * p.heads;
  Tiles tiles = {
      queries_of<Types>(features, query, batch, 0, visibility.rows),
      cotangents_of<Types>(features, d_out, batch, 0, visibility.rows),
      typename Tiles::Queries(q_room, thread_index, lane), typename Tiles::Cotangents(do_room, thread_index, lane),
      {row_states + at_batch, uint(p.heads), p.queries - 1, state_room, thread_index, {}}};
  const Turn before = {first_head - 1, end_head, 0, {0, 0, 0, 0, nullptr, 0}};
  const Turn turn = before.template next<QUERIES>(p, visibility, lists, group_column, keys_of_group);

  gradient.template add_all<QUERIES, COLUMNS, BUFFERS>(
      p, tiles, turn, lists, group_column, keys_of_group, first, lane, lane_index);
  gradient.sums.store(p, d_key, d_value, score.scale, batch, key_head, first, lane);
}

// One simdgroup for each 8 × (8 · COLUMNS) elements of the bias; along an axis that the bias lacks it walks over all tiles.
template <typename Types, int COLUMNS>
[[kernel, max_total_threads_per_threadgroup(32)]] void attention_d_bias(
    D_BIAS_OPERANDS,
    uint3 launched [[threadgroup_position_in_grid]],  // of (tile of columns, tile of rows, row and head of the bias)
    ushort lane_index [[thread_index_in_simdgroup]]) {
  constexpr int H = Types::H;
  constexpr int V = Types::V;
  using Operand = typename Types::Operand;
  constexpr int width = COLUMNS * 8;
  const Features features = FEATURES;
  const uint3 group = place_in(p.grid, launched);
  const Lane lane(lane_index);
  const int first_row = int(group.y) * 8;
  const int first_column = int(group.x) * width;
  const BiasShare share(p, group.z, first_row, first_column);
  float sums[COLUMNS][2];
  UNROLLED
  for (int c = 0; c < COLUMNS; ++c) {
    sums[c][0] = 0;
    sums[c][1] = 0;
  }

  for (int batch = 0; batch < p.batch; ++batch) {
    if (!share.has(p, batch)) {
      continue;
    }
    for (int head = share.first_head; head <= share.last_head; ++head) {
      const int key_head = head / (p.heads / p.key_heads);
      const typename Types::Visibility visibility(features, batch, head, lane_index);
      const typename Types::Score score(features, batch, head, visibility.offset);
      const Dropout drop(features, batch, head);
      const auto keys = keys_of<Types>(features, key, batch, key_head, visibility.columns);
      const auto values = values_of<Types>(features, value, batch, key_head, visibility.columns);
      for (int row = first_row; row <= share.last_row; row += 8) {
        const OwnRows<typename Types::Query, Operand, 1, false, false> q(
            queries_of<Types>(features, query, batch, head, p.queries), row, lane);
        const OwnRows<typename Types::Cotangent, Operand, 1, false, false> d_o(
            cotangents_of<Types>(features, d_out, batch, head, p.queries), row, lane);
        const int own_row = row + lane.row;
        const RowState state(row_states[row_place(p, batch, min(own_row, p.queries - 1), head)]);
        for (int column = first_column; column <= share.last_column; column += width) {
          if (visibility.of_tile(row, 8, column, width) == none_visible) {
            continue;
          }
          Fragment<float> s[1][COLUMNS];
          Fragment<float> d_p[1][COLUMNS];
          multiply_rows(s, q, Direct<typename Types::Key, Operand, width>(lane).reader(keys, column, 0));
          multiply_rows(d_p, d_o, Direct<typename Types::Value, Operand, width>(lane).reader(values, column, 0));
          UNROLLED
          for (int c = 0; c < COLUMNS; ++c) {
            UNROLLED
            for (int e = 0; e < 2; ++e) {
              const int at = column + c * 8 + lane.column + e;
              if (visibility.visible(own_row, at)) {
                const Pair pair(
                    score, own_row, at, s[0][c].thread_elements()[e], d_p[0][c].thread_elements()[e], state,
                    drop.factor(own_row, at));
                sums[c][e] += pair.d_score;
              }
            }
          }
        }
      }
    }
  }

  const ulong plane = ulong(group.z) * ulong(p.bias.queries) * ulong(p.bias.keys);
  float whole_row = 0;
  UNROLLED
  for (int c = 0; c < COLUMNS; ++c) {
    UNROLLED
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
    const float x = sum_along_row(whole_row);
    const int row = p.bias.queries > 1 ? first_row + lane.row : 0;
    const bool own = lane.column == 0 && (p.bias.queries > 1 || lane.row == 0);
    if (own && row < p.bias.queries) {
      store_bias(d_bias, plane + ulong(row), x);
    }
  }
}
