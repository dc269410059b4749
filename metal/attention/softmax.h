// The online softmax (Milakov & Gimelshein, arXiv:1805.02867) of a simdgroup's rows, in its registers, and what a row comes to.
#pragma once

#include "attention/score.h"
#include "core/product.h"

// exp(x - largest). The largest of no scores, and of scores that are minus infinity all, counts as 0.
INLINED float weight_of(float x, float largest) {
  return fast::exp2((x - largest) * log2_e);
}

INLINED float or_zero(float largest) {
  return largest == -INFINITY ? 0.0f : largest;
}

INLINED float sink_of(constant Parameters& p, device const float* sinks, int batch, int head) {
  return has_sinks ? sinks[head_place(p, batch, head)] : -INFINITY;
}

// A row from its running maximum and sum of weights, which is absent where it sees nothing. Its output is the sum of weighted
// values times `factor`.
struct FinishedRow {
  float row_max;
  float row_sum;
  bool empty;
  float factor;

  INLINED FinishedRow(float running_max, float running_sum, float sink) {
    row_max = or_zero(has_sinks ? max(running_max, sink) : running_max);
    const float shrink = weight_of(running_max, row_max);
    empty = is_absent(running_sum);
    row_sum = running_sum * shrink + (has_sinks ? weight_of(sink, row_max) : 0.0f);
    factor = empty ? 0.0f : shrink / row_sum;
  }

  // As `sees_nothing` of jax_mfa/problem.py has it. The sum alone has not the digits of scores that are huge all, nor has
  // their log-sum-exp. Of scores that are NaN the largest is too: further columns, on other devices, leave it so.
  INLINED void store(device float* row_maxima, device float* row_sums, ulong at) const {
    const float undefined_or_finite = row_sum != row_sum ? NAN : (is_finite(row_max) ? row_max : 0.0f);
    row_maxima[at] = empty ? 0.0f : undefined_or_finite;
    row_sums[at] = empty ? 0.0f : (row_sum == 0 ? NAN : row_sum);
  }
};

// What the columns so far have come to.
template <int BLOCKS, int COUNT>
struct Running {
  Fragment<float> sums[BLOCKS][COUNT];  // of weights times values
  float row_max[BLOCKS];
  float row_sum[BLOCKS];  // of the lane's own columns; absent where none is visible

  INLINED Running() {
    clear(sums);
    UNROLLED
    for (int block = 0; block < BLOCKS; ++block) {
      row_max[block] = -INFINITY;
      row_sum[block] = absent_weight();
    }
  }

  // The first block becomes the last, for a loop over them that is not unrolled.
  INLINED void turn() {
    UNROLLED
    for (int block = 0; block + 1 < BLOCKS; ++block) {
      UNROLLED
      for (int i = 0; i < COUNT; ++i) {
        exchange(sums[block][i], sums[block + 1][i]);
      }
      exchange(row_max[block], row_max[block + 1]);
      exchange(row_sum[block], row_sum[block + 1]);
    }
  }

  // Scores of further columns become weights; earlier sums shrink where the maximum rises. Where some may be hidden, bit 2c + e
  // of `seen` is set for each that is visible, the others have scores of minus infinity.
  template <int COLUMNS>
  INLINED void weigh(thread Fragment<float> (&s)[BLOCKS][COLUMNS], const thread uint (&seen)[BLOCKS], bool may_be_masked) {
    static_assert(COLUMNS <= 16, "a bit for each of a lane's columns");
    UNROLLED
    for (int block = 0; block < BLOCKS; ++block) {
      float largest = row_max[block];
      UNROLLED
      for (int c = 0; c < COLUMNS; ++c) {
        largest = max(largest, max(s[block][c].thread_elements()[0], s[block][c].thread_elements()[1]));
      }
      largest = max_along_row(largest);
      const float from = or_zero(largest);
      const float shrink = weight_of(row_max[block], from);
      float sum = row_sum[block] * shrink;
      UNROLLED
      for (int c = 0; c < COLUMNS; ++c) {
        UNROLLED
        for (int e = 0; e < 2; ++e) {
          float weight = weight_of(s[block][c].thread_elements()[e], from);
          if (may_be_masked) {
            weight = (seen[block] >> (2 * c + e)) & 1 ? weight : absent_weight();
          }
          sum += weight;
          s[block][c].thread_elements()[e] = weight;
        }
      }
      row_max[block] = largest;
      row_sum[block] = sum;
      if (simd_any(shrink != 1.0f)) {  // seldom, after the first tiles
        UNROLLED
        for (int i = 0; i < COUNT; ++i) {
          sums[block][i].thread_elements()[0] *= shrink;
          sums[block][i].thread_elements()[1] *= shrink;
        }
      }
    }
  }
};

// Scores of own rows with 8 · COLUMNS columns from `column` on, where the tiles begin; their weights, and what these add to the
// output. `Rows` says what `of` a product becomes and what dropout thins. Where all pairs are visible, nothing
// is MASKED. Where a tile of values is `spoilt` by NaN or infinity, those reach visible pairs only.
template <bool MASKED, int COLUMNS, int BLOCKS, int COUNT, typename Own, typename Rows, typename Keys, typename Values>
INLINED void attend(
    thread Running<BLOCKS, COUNT>& running, const thread Own& own, const thread Rows& rows, const thread Keys& keys,
    const thread Values& values, int column, int from, bool spoilt, Lane lane) {
  Fragment<float> s[BLOCKS][COLUMNS];
  uint seen[BLOCKS];
  multiply_rows(s, own, keys);
  UNROLLED
  for (int block = 0; block < BLOCKS; ++block) {
    seen[block] = 0;
    UNROLLED
    for (int c = 0; c < COLUMNS; ++c) {
      UNROLLED
      for (int e = 0; e < 2; ++e) {
        float x = -INFINITY;
        const bool visible = rows.template of<MASKED>(
            block, s[block][c].thread_elements()[e], column + c * 8 + lane.column + e, x);
        seen[block] |= uint(visible) << (2 * c + e);
        s[block][c].thread_elements()[e] = x;
      }
    }
  }
  const bool may_be_masked = MASKED || rows.may_be_masked();
  running.weigh(s, seen, may_be_masked);
  if (has_dropout) {
    UNROLLED
    for (int block = 0; block < BLOCKS; ++block) {
      float2 factors[COLUMNS];
      rows.factors(block, column + lane.column, factors);
      UNROLLED
      for (int c = 0; c < COLUMNS; ++c) {
        UNROLLED
        for (int e = 0; e < 2; ++e) {
          const float weight = s[block][c].thread_elements()[e];
          s[block][c].thread_elements()[e] = may_be_masked && is_absent(weight) ? weight : weight * factors[c][e];
        }
      }
    }
  }
  accumulate_or_present<Values::fragments>(running.sums, s, values, from, spoilt, lane);
}
