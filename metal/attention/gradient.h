// The backward pass of one pair and one row; kernels differ in what they sum up of it.
#pragma once

#include "attention/score.h"

// What one of THREADS finds of Σ dO·O of a row of SIZE elements.
template <int SIZE, int THREADS, typename Out, typename Cotangent>
INLINED float part_of_delta(Out out, Cotangent d_out, int thread_index) {
  float sum = 0;
  for (int i = thread_index; i < SIZE; i += THREADS) {
    sum += float(d_out[i]) * float(out[i]);
  }
  return sum;
}

// A row as kernels of gradients are told: what makes probabilities of its scores, and delta = Σ dO·O - d(log-sum-exp).
INLINED void store_gradient_row(device float4* row_states, ulong at, float row_max, float row_sum, float delta) {
  const bool empty = row_sum == 0;  // `sees_nothing`
  row_states[at] = float4(row_max, empty ? 0.0f : precise::log2(row_sum), empty ? 0.0f : delta, 0.0f);
}

// What is known of a query row: its largest score, the logarithm of its sum of weights to base 2, and delta.
struct RowState {
  float row_max;
  float log2_sum;
  float delta;

  RowState() = default;

  INLINED explicit RowState(float4 state) : row_max(state.x), log2_sum(state.y), delta(state.z) {}
};

// A probability from its score and its row. Rounding must not lift the score above the largest: where scores are huge, a unit in
// the last place is a large power of e.
INLINED float probability(float x, RowState row) {
  return fast::exp2((x > row.row_max ? 0.0f : (x - row.row_max) * log2_e) - row.log2_sum);
}

// What a pair adds to gradients. Both are marked as absent where the pair is hidden, and never otherwise.
struct Pair {
  float weight;   // of dV
  float d_score;  // by the scaled product

  INLINED Pair() : weight(absent_weight()), d_score(absent_weight()) {}

  // Of a pair that masks allow; `d_weight` is dO · v, `keep` the factor of dropout.
  template <typename Score>
  INLINED Pair(const thread Score& score, int row, int column, float product, float d_weight, RowState state, float keep) : Pair() {
    float x;
    if (score.of(product, row, column, x)) {
      const float p = probability(x, state);
      weight = p * keep;
      d_score = p * (d_weight * keep - state.delta) * score.derivative(product, row, column) + 0.0f;
    }
  }

  // To the sums that gradients of scale and slopes are made of, where they are wanted.
  template <typename Score>
  INLINED void add_to(
      thread float& scale_sum, thread float& slope_sum, const thread Score& score, int row, int column, float product) const {
    if (wants_sums && !is_absent(d_score)) {
      scale_sum += d_score * product;
      slope_sum += d_score * score.distance(row, column);
    }
  }
};

// What an element of the bias was added to, of its row and head those that `plane` says: rows and columns from its own to these
// last ones, one of them or all, and so with heads and batch rows.
struct BiasShare {
  int bias_row;
  int first_head;
  int last_head;
  int last_row;
  int last_column;

  INLINED BiasShare(constant Parameters& p, int plane, int row, int column) {
    const bool each_head = p.bias.heads > 1;
    bias_row = plane / p.bias.heads;
    first_head = each_head ? plane % p.bias.heads : 0;
    last_head = each_head ? first_head : p.heads - 1;
    last_row = p.bias.queries > 1 ? row : p.queries - 1;
    last_column = p.bias.keys > 1 ? column : p.keys - 1;
  }

  INLINED bool has(constant Parameters& p, int batch) const {
    return mapped_row(p.bias.map, batch) == bias_row;
  }
};
