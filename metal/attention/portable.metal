// The same attention for GPUs without simdgroup matrices: many threads for each row, reductions by trees in threadgroup memory, and
// no function that depends on the SIMD width. Slower, and simple.
//
//   forward, dQ: a threadgroup for each query row; a thread for each column of a tile, then for each element of the result
//   dK and dV:   a threadgroup for each key row; a thread for each query row of a tile, then for each element of the results
//
// A list of visible tiles serves ROWS rows.
#include "attention/gradient.h"
#include "attention/softmax.h"
#include "attention/visibility.h"

// Sum (or maximum) of what the threads hold, the same bits in each.
template <int THREADS, bool MAXIMUM>
INLINED float reduce(threadgroup float* scratch, float x, ushort i) {
  scratch[i] = x;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int n = THREADS / 2; n > 0; n /= 2) {
    if (i < n) {
      scratch[i] = MAXIMUM ? max(scratch[i], scratch[i + n]) : scratch[i] + scratch[i + n];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  const float result = scratch[0];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return result;
}

// Product of a row in threadgroup memory with the first of a tile, four elements at a time where rows are aligned.
template <int SIZE, typename Tile>
INLINED float dot_rows(threadgroup const float* own, Tile other) {
  constexpr int vector = SIZE % 4 == 0 ? 4 : 1;
  float sum = 0;
  for (int i = 0; i < SIZE; i += vector) {
    const auto x = other.template load<vector>(0, i);
    for (int e = 0; e < vector; ++e) {
      sum += own[i + e] * float(x[e]);
    }
  }
  return sum;
}

template <int SIZE, int THREADS, typename Tile>
INLINED void keep_row(threadgroup float* own, Tile tile, ushort thread_index) {
  for (int i = thread_index; i < SIZE; i += THREADS) {
    own[i] = float(tile.at(0, i));
  }
}

template <typename Types, int THREADS, int ROWS>
[[kernel, max_total_threads_per_threadgroup(THREADS)]] void portable_forward(
    FORWARD_OPERANDS,
    uint3 launched [[threadgroup_position_in_grid]],  // of (row, head, batch row)
    ushort thread_index [[thread_index_in_threadgroup]]) {
  using T = typename Types::T;
  constexpr int H = Types::H;
  constexpr int V = Types::V;
  const Features features = FEATURES;
  const uint3 group = place_in(p.grid, launched);
  threadgroup float q_row[H];
  threadgroup float weights[THREADS];
  threadgroup float scratch[THREADS];
  const int row = group.x;
  const int head = group.y;
  const int batch = group.z;
  const int key_head = head / (p.heads / p.key_heads);
  const typename Types::Visibility visibility(features, batch, head, thread_index);
  const typename Types::Score score(features, batch, head, visibility.offset);
  const Dropout drop(features, batch, head);
  const auto keys = keys_of<Types>(features, key, batch, key_head, visibility.columns);
  const auto values = values_of<Types>(features, value, batch, key_head, visibility.columns);
  keep_row<H, THREADS>(q_row, queries_of<Types>(features, query, batch, head, p.queries).tile(row), thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  constexpr int own = (V + THREADS - 1) / THREADS;
  float sums[own];
  for (int i = 0; i < own; ++i) {
    sums[i] = 0;
  }
  float running_max = -INFINITY;
  float running_sum = absent_weight();
  const int end = visibility.column_end(row, row);
  const int own_rows = has_lists ? ROWS : 1;
  const Walk walk = columns_for<THREADS>(p, visibility, lists, head, row / own_rows * own_rows, own_rows);
  for (int turn = 0; turn < walk.count; ++turn) {
    const int column = walk.tile(turn) * THREADS;
    const int at = column + thread_index;
    float x = -INFINITY;
    bool visible = visibility.visible(row, at);
    if (visible) {
      visible = score.of(dot_rows<H>(q_row, keys.tile(at)), row, at, x);
    }
    // a maximum passes over NaN; the sum does not
    const float largest = max(running_max, reduce<THREADS, true>(scratch, x, thread_index));
    const float from = or_zero(largest);
    const float shrink = weight_of(running_max, from);
    float weight = visible ? weight_of(x, from) : absent_weight();
    running_sum = running_sum * shrink + reduce<THREADS, false>(scratch, weight, thread_index);
    running_max = largest;
    if (has_dropout) {
      weight *= drop.factor(row, at);
    }
    weights[thread_index] = visible ? weight : absent_weight();
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = 0; i < own; ++i) {
      const int element = thread_index + i * THREADS;
      if (element < V) {
        float sum = sums[i] * shrink;
        for (int j = 0; j < min(THREADS, end - column); ++j) {
          if (!is_absent(weights[j])) {
            sum += weights[j] * float(values.tile(column + j).at(0, element));
          }
        }
        sums[i] = sum;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  const FinishedRow finished(running_max, running_sum, sink_of(p, sinks, batch, head));
  const ulong at_row = row_place(p, batch, row, head);
  for (int i = 0; i < own; ++i) {
    const int element = thread_index + i * THREADS;
    if (element < V) {
      out[at_row * V + element] = T(sums[i] * finished.factor);
    }
  }
  if (thread_index == 0) {
    finished.store(row_max, row_sum, at_row);
  }
}

template <typename Types, int THREADS>
[[kernel, max_total_threads_per_threadgroup(THREADS)]] void portable_delta(
    DELTA_OPERANDS,
    uint3 group [[threadgroup_position_in_grid]],  // (row and head, 1, batch row)
    ushort thread_index [[thread_index_in_threadgroup]]) {
  constexpr int V = Types::V;
  threadgroup float scratch[THREADS];
  const ulong at = group.z * (ulong(p.queries) * p.heads) + group.x;
  const float own = part_of_delta<V, THREADS>(out + at * V, d_out + at * V, thread_index);
  const float sum = reduce<THREADS, false>(scratch, own, thread_index);
  if (thread_index == 0) {
    store_gradient_row(row_states, at, row_max[at], row_sum[at], sum - d_lse[at]);
  }
}

template <typename Types, int THREADS, int ROWS>
[[kernel, max_total_threads_per_threadgroup(THREADS)]] void portable_d_query(
    D_QUERY_OPERANDS,
    uint3 launched [[threadgroup_position_in_grid]],  // of (row, head, batch row)
    ushort thread_index [[thread_index_in_threadgroup]]) {
  using T = typename Types::T;
  constexpr int H = Types::H;
  constexpr int V = Types::V;
  const Features features = FEATURES;
  const uint3 group = place_in(p.grid, launched);
  threadgroup float q_row[H];
  threadgroup float do_row[V];
  threadgroup float weights[THREADS];
  threadgroup float scratch[THREADS];
  const int row = group.x;
  const int head = group.y;
  const int batch = group.z;
  const int key_head = head / (p.heads / p.key_heads);
  const typename Types::Visibility visibility(features, batch, head, thread_index);
  const typename Types::Score score(features, batch, head, visibility.offset);
  const Dropout drop(features, batch, head);
  const auto keys = keys_of<Types>(features, key, batch, key_head, visibility.columns);
  const auto values = values_of<Types>(features, value, batch, key_head, visibility.columns);
  const ulong at_row = row_place(p, batch, row, head);
  keep_row<H, THREADS>(q_row, queries_of<Types>(features, query, batch, head, p.queries).tile(row), thread_index);
  keep_row<V, THREADS>(do_row, cotangents_of<Types>(features, d_out, batch, head, p.queries).tile(row), thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  constexpr int own = (H + THREADS - 1) / THREADS;
  float sums[own];
  for (int i = 0; i < own; ++i) {
    sums[i] = 0;
  }
  float scale_sum = 0;
  float slope_sum = 0;
  const int end = visibility.column_end(row, row);
  const int own_rows = has_lists ? ROWS : 1;
  const Walk walk = columns_for<THREADS>(p, visibility, lists, head, row / own_rows * own_rows, own_rows);
  if (wants_bias && walk.wholes * THREADS < p.keys) {
    for (int at = thread_index; at < p.keys; at += THREADS) {
      score.store_gradient(d_bias, row, at, 0.0f);
    }
  }
  for (int turn = 0; turn < walk.count; ++turn) {
    const int column = walk.tile(turn) * THREADS;
    const int at = column + thread_index;
    float d = absent_weight();
    if (visibility.visible(row, at)) {
      const float product = dot_rows<H>(q_row, keys.tile(at));
      const float d_weight = dot_rows<V>(do_row, values.tile(at));
      const Pair pair(score, row, at, product, d_weight, RowState(row_states[at_row]), drop.factor(row, at));
      pair.add_to(scale_sum, slope_sum, score, row, at, product);
      d = pair.d_score;
    }
    if (wants_bias) {
      score.store_gradient(d_bias, row, at, d + 0.0f);
    }
    weights[thread_index] = d;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = 0; i < own; ++i) {
      const int element = thread_index + i * THREADS;
      if (element < H) {
        for (int j = 0; j < min(THREADS, end - column); ++j) {
          if (!is_absent(weights[j])) {
            sums[i] += weights[j] * float(keys.tile(column + j).at(0, element));
          }
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  for (int i = 0; i < own; ++i) {
    const int element = thread_index + i * THREADS;
    if (element < H) {
      d_query[at_row * H + element] = T(scaled(sums[i], score.scale));
    }
  }
  if (wants_sums) {
    scale_sum = reduce<THREADS, false>(scratch, scale_sum, thread_index);
    slope_sum = reduce<THREADS, false>(scratch, slope_sum, thread_index);
    if (thread_index == 0) {
      score_sums[at_row] = float2(scale_sum, slope_sum);
    }
  }
}

template <typename Types, int THREADS, int ROWS>
[[kernel, max_total_threads_per_threadgroup(THREADS)]] void portable_d_key_value(
    D_KEY_VALUE_OPERANDS,
    uint3 launched [[threadgroup_position_in_grid]],  // of (key row, key head, batch row)
    ushort thread_index [[thread_index_in_threadgroup]]) {
  using T = typename Types::T;
  constexpr int H = Types::H;
  constexpr int V = Types::V;
  const Features features = FEATURES;
  const uint3 group = place_in(p.grid, launched);
  threadgroup float k_row[H];
  threadgroup float v_row[V];
  threadgroup float weights[THREADS];
  threadgroup float d_scores[THREADS];
  const int column = group.x;
  const int key_head = group.y;
  const int batch = group.z;
  const int heads_of_group = p.heads / p.key_heads;
  const auto keys = keys_of<Types>(features, key, batch, key_head, p.keys);
  const auto values = values_of<Types>(features, value, batch, key_head, p.keys);
  keep_row<H, THREADS>(k_row, keys.tile(column), thread_index);
  keep_row<V, THREADS>(v_row, values.tile(column), thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  constexpr int own_keys = (H + THREADS - 1) / THREADS;
  constexpr int own_values = (V + THREADS - 1) / THREADS;
  float key_sums[own_keys];
  float value_sums[own_values];
  for (int i = 0; i < own_keys; ++i) {
    key_sums[i] = 0;
  }
  for (int i = 0; i < own_values; ++i) {
    value_sums[i] = 0;
  }
  for (int head = key_head * heads_of_group; head < (key_head + 1) * heads_of_group; ++head) {
    const typename Types::Visibility visibility(features, batch, head, thread_index);
    const typename Types::Score score(features, batch, head, visibility.offset);
    const Dropout drop(features, batch, head);
    const auto queries = queries_of<Types>(features, query, batch, head, p.queries);
    const auto cotangents = cotangents_of<Types>(features, d_out, batch, head, p.queries);
    const int end = visibility.row_end(column, column);
    const int own_rows = has_lists ? ROWS : 1;
    const Walk walk = rows_for<THREADS>(p, visibility, lists, head, column / own_rows * own_rows, own_rows);
    for (int turn = 0; turn < walk.count; ++turn) {
      const int row = walk.tile(turn) * THREADS;
      const int own_row = row + thread_index;
      const ulong at_row = row_place(p, batch, own_row, head);
      Pair pair;
      if (visibility.visible(own_row, column)) {
        const float product = dot_rows<H>(k_row, queries.tile(own_row));
        const float d_weight = dot_rows<V>(v_row, cotangents.tile(own_row));
        pair = Pair(
            score, own_row, column, product, d_weight, RowState(row_states[at_row]), drop.factor(own_row, column));
      }
      weights[thread_index] = pair.weight;
      d_scores[thread_index] = pair.d_score;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (int j = 0; j < min(THREADS, end - row); ++j) {
        if (!is_absent(d_scores[j])) {
          for (int i = 0; i < own_keys; ++i) {
            const int element = thread_index + i * THREADS;
            key_sums[i] += element < H ? d_scores[j] * float(queries.tile(row + j).at(0, element)) : 0.0f;
          }
        }
        if (!is_absent(weights[j])) {
          for (int i = 0; i < own_values; ++i) {
            const int element = thread_index + i * THREADS;
            value_sums[i] += element < V ? weights[j] * float(cotangents.tile(row + j).at(0, element)) : 0.0f;
          }
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }

  const ulong at = (ulong(batch) * p.keys + column) * p.key_heads + key_head;
  for (int i = 0; i < own_keys; ++i) {
    const int element = thread_index + i * THREADS;
    if (element < H) {
      d_key[at * H + element] = T(scaled(key_sums[i], typename Types::Score(features, batch, 0, 0).scale));
    }
  }
  for (int i = 0; i < own_values; ++i) {
    const int element = thread_index + i * THREADS;
    if (element < V) {
      d_value[at * V + element] = T(value_sums[i]);
    }
  }
}

// A threadgroup for each element of the bias: its threads share the scores that the element was added to.
template <typename Types, int THREADS>
[[kernel, max_total_threads_per_threadgroup(THREADS)]] void portable_d_bias(
    D_BIAS_OPERANDS,
    uint3 launched [[threadgroup_position_in_grid]],  // of (column, row, row and head of the bias), 0 along an axis it lacks
    ushort thread_index [[thread_index_in_threadgroup]]) {
  constexpr int H = Types::H;
  constexpr int V = Types::V;
  const Features features = FEATURES;
  const uint3 group = place_in(p.grid, launched);
  threadgroup float q_row[H];
  threadgroup float do_row[V];
  threadgroup float scratch[THREADS];
  const int first_row = group.y;
  const int first_column = group.x;
  const BiasShare share(p, group.z, first_row, first_column);
  float sum = 0;
  for (int batch = 0; batch < p.batch; ++batch) {
    if (!share.has(p, batch)) {
      continue;
    }
    for (int head = share.first_head; head <= share.last_head; ++head) {
      const int key_head = head / (p.heads / p.key_heads);
      const typename Types::Visibility visibility(features, batch, head, thread_index);
      const typename Types::Score score(features, batch, head, visibility.offset);
      const Dropout drop(features, batch, head);
      const auto keys = keys_of<Types>(features, key, batch, key_head, visibility.columns);
      const auto values = values_of<Types>(features, value, batch, key_head, visibility.columns);
      const auto queries = queries_of<Types>(features, query, batch, head, p.queries);
      const auto cotangents = cotangents_of<Types>(features, d_out, batch, head, p.queries);
      for (int row = first_row; row <= share.last_row; ++row) {
        const ulong at_row = row_place(p, batch, row, head);
        keep_row<H, THREADS>(q_row, queries.tile(row), thread_index);
        keep_row<V, THREADS>(do_row, cotangents.tile(row), thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (int column = first_column + thread_index; column <= share.last_column; column += THREADS) {
          if (visibility.visible(row, column)) {
            const float product = dot_rows<H>(q_row, keys.tile(column));
            const float d_weight = dot_rows<V>(do_row, values.tile(column));
            const RowState state(row_states[at_row]);
            sum += Pair(score, row, column, product, d_weight, state, drop.factor(row, column)).d_score;
          }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
    }
  }
  sum = reduce<THREADS, false>(scratch, sum, thread_index);
  if (thread_index == 0) {
    const ulong plane = ulong(group.z) * ulong(p.bias.queries) * ulong(p.bias.keys);
    store_bias(d_bias, plane + broadcast_index(p.bias, first_row, first_column), sum);
  }
}

// The gradient of the arrays that a caller's function of scores reads: a threadgroup owns a table of sums, and walks over its share
// of the rows. Of the threads that read the same element in a tile the first adds what all of them found: in every run in the same
// order.
template <typename Types, int THREADS>
[[kernel, max_total_threads_per_threadgroup(THREADS)]] void portable_d_captured(
    D_CAPTURED_OPERANDS,
    uint3 launched [[threadgroup_position_in_grid]],  // (share, 1, row of the arrays)
    ushort thread_index [[thread_index_in_threadgroup]]) {
  using Function = typename Types::Score::Function;
  constexpr int H = Types::H;
  constexpr int V = Types::V;
  const Features features = FEATURES;
  const uint3 group = place_in(p.grid, launched);
  threadgroup float q_row[H];
  threadgroup float do_row[V];
  threadgroup int places[THREADS];
  threadgroup float terms[THREADS];
  const int shares = p.grid.width;
  device float* sums = d_captured + (ulong(group.z) * shares + group.x) * Function::floats;
  for (int i = thread_index; i < Function::floats; i += THREADS) {
    sums[i] = 0;
  }
  threadgroup_barrier(mem_flags::mem_device);
  for (int batch = 0; batch < p.batch; ++batch) {
    if (mapped_row(p.captured, batch) != int(group.z)) {
      continue;
    }
    for (int item = group.x; item < p.heads * p.queries; item += shares) {
      const int head = item / p.queries;
      const int row = item % p.queries;
      const int key_head = head / (p.heads / p.key_heads);
      const typename Types::Visibility visibility(features, batch, head, thread_index);
      const typename Types::Score score(features, batch, head, visibility.offset);
      const Dropout drop(features, batch, head);
      const auto keys = keys_of<Types>(features, key, batch, key_head, visibility.columns);
      const auto values = values_of<Types>(features, value, batch, key_head, visibility.columns);
      keep_row<H, THREADS>(q_row, queries_of<Types>(features, query, batch, head, p.queries).tile(row), thread_index);
      keep_row<V, THREADS>(do_row, cotangents_of<Types>(features, d_out, batch, head, p.queries).tile(row), thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      const RowState state(row_states[row_place(p, batch, row, head)]);
      const Walk walk = columns_for<THREADS>(p, visibility, nullptr, head, row, 1);
      for (int turn = 0; turn < walk.count; ++turn) {
        const int at = walk.tile(turn) * THREADS + thread_index;
        int place[Function::reads];
        float term[Function::reads];
        for (int i = 0; i < Function::reads; ++i) {
          place[i] = -1;
          term[i] = 0;
        }
        float x;
        if (visibility.visible(row, at)) {
          const float product = dot_rows<H>(q_row, keys.tile(at));
          if (score.of(product, row, at, x)) {
            const float d_weight = dot_rows<V>(do_row, values.tile(at)) * drop.factor(row, at);
            const float d = probability(x, state) * (d_weight - state.delta) * score.derivative_by_value(product, row, at);
            Function::by_reads(score.given, score.before(product, row, at), row + score.offset, at, place, term);
            for (int i = 0; i < Function::reads; ++i) {
              term[i] *= d;
            }
          }
        }
        for (int i = 0; i < Function::reads; ++i) {
          places[thread_index] = place[i];
          terms[thread_index] = term[i];
          threadgroup_barrier(mem_flags::mem_threadgroup);
          bool first = place[i] >= 0;
          float sum = 0;
          for (int j = 0; first && j < THREADS; ++j) {
            if (places[j] == place[i]) {
              first = j >= thread_index;
              sum += terms[j];
            }
          }
          if (first) {
            sums[place[i]] += sum;
          }
          threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
}
