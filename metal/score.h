// From a dot product to a score, and back for the derivative; what a row of scores comes to; and which probabilities dropout
// keeps. Kernels ask nothing else about scores.
#pragma once

#include "fragments.h"

struct Score {
  constant Parameters* p;
  device const float* numbers;
  device const uchar* bias;
  ulong bias_offset;
  int batch;
  int offset;  // position of query row 0
  float scale;
  float slope;

  Score() = default;

  Score(
      constant Parameters& p, device const float* numbers, device const uchar* bias, int batch, int head, int offset)
      : p(&p), numbers(numbers), bias(bias), batch(batch), offset(offset) {
    turn_to(head);
  }

  device const float* of_head(int head) const {
    return numbers + (ulong(batch) * ulong(p->heads) + ulong(head)) * ulong(p->numbers_stride);
  }

  void turn_to(int head) {
    scale = of_head(head)[0];
    slope = has_slopes ? of_head(head)[1] : 0.0f;
    bias_offset = bias_type != 0 ? broadcast_offset(p->bias, batch, head) : 0;
  }

  float sink(int head) const {
    return of_head(head)[2];
  }

  float bias_at(int row, int column) const {
    const ulong i = bias_offset + broadcast_index(p->bias, row, column);
    if (bias_type == 1) {
      return reinterpret_cast<device const float*>(bias)[i];
    }
    if (bias_type == 2) {
      return float(reinterpret_cast<device const half*>(bias)[i]);
    }
    return float(reinterpret_cast<device const bfloat*>(bias)[i]);
  }

  float distance(int row, int column) const {
    return float(column - (row + offset));
  }

  // The score `x` of a pair that the masks allow. Returns whether its bias leaves it visible: minus infinity hides a pair,
  // whatever the product; its score is then minus infinity too. Under a soft cap it hides nothing.
  bool of(float product, int row, int column, thread float& x) const {
    x = product * scale;
    if (bias_type != 0) {
      const float bias = bias_at(row, column);
      if (may_hide() && bias == -INFINITY) {
        x = -INFINITY;
        return false;
      }
      x += bias;
    }
    if (has_slopes) {
      x += slope * distance(row, column);
    }
    if (has_cap) {
      x = p->cap * precise::tanh(x / p->cap);
    }
    return true;
  }

  // Whether a pair that masks allow may still be hidden by its bias.
  bool may_hide() const {
    return bias_type != 0 && !has_cap;
  }

  // The derivative by the score before the cap, given that by the score `x`; dQ and dK still need `scale`.
  float derivative(float d_x, float x) const {
    if (has_cap) {
      const float y = x / p->cap;
      return d_x * (1.0f - y * y);
    }
    return d_x;
  }
};

// A sum of nothing is 0, whatever the scale.
inline float scaled(float sum, float scale) {
  return sum == 0 ? 0.0f : sum * scale;
}

inline void scale_sums(thread Fragment<float>& sums, float scale) {
  for (int e = 0; e < 2; ++e) {
    sums.thread_elements()[e] = scaled(sums.thread_elements()[e], scale);
  }
}

inline void store_bias(device uchar* d_bias, ulong at, float x) {
  if (bias_type == 1) {
    reinterpret_cast<device float*>(d_bias)[at] = x;
  } else if (bias_type == 2) {
    reinterpret_cast<device half*>(d_bias)[at] = half(x);
  } else {
    reinterpret_cast<device bfloat*>(d_bias)[at] = bfloat(x);
  }
}

// exp(x - largest). The largest of no scores, and of scores that are minus infinity all, counts as 0.
inline float weight_of(float x, float largest) {
  return fast::exp2((x - largest) * log2_e);
}

inline float or_zero(float largest) {
  return largest == -INFINITY ? 0.0f : largest;
}

// A row as the backward pass is told: its largest score, finite, and the sum of its weights: 0 where it sees nothing, NaN where
// its softmax is not defined. The sum alone has not the digits of scores that are huge all, nor has their log-sum-exp.
inline void store_row(
    device float* row_max, device float* row_sum, ulong at, float largest, float sum, bool empty) {
  row_max[at] = !empty && is_finite(largest) ? largest : 0.0f;
  row_sum[at] = empty ? 0.0f : (sum == 0 ? NAN : sum);
}

// The same row as kernels of gradients are told: D, of which `d` is the sum, and what makes probabilities of its scores.
inline void store_gradient_row(
    device float* row_sums, device float2* row_states, ulong at, float row_max, float row_sum, float d) {
  const bool empty = row_sum == 0;
  row_sums[at] = empty ? 0.0f : d;
  row_states[at] = float2(row_max, empty ? 0.0f : precise::log2(row_sum));
}

// A probability from its score and its row: largest score, logarithm of the sum to base 2. Rounding must not lift the score
// above the largest: where scores are huge, a unit in the last place is a large power of e.
inline float probability(float x, float2 row) {
  return fast::exp2((x > row.x ? 0.0f : (x - row.x) * log2_e) - row.y);
}

// Philox-4×32-10 (Salmon et al., SC 2011); jax_mfa/philox.py says which counter belongs to which score.
struct Dropout {
  constant Parameters& p;
  uint2 seed;
  uint batch;
  uint first_head;
  uint first_row;
  uint first_column;
  uint head;

  Dropout(constant Parameters& p, device const uint* dropout, int batch_row, int head)
      : p(p), seed(0), batch(0), first_head(0), first_row(0), first_column(0), head(head) {
    if (has_dropout) {
      device const uint* of_row = dropout + ulong(batch_row) * 6;
      seed = uint2(of_row[0], of_row[1]);
      batch = of_row[2];
      first_head = of_row[3];
      first_row = of_row[4];
      first_column = of_row[5];
    }
  }

  uint4 words(int row, int column) const {
    uint4 c = uint4((first_column + uint(column)) / 4, first_row + uint(row), first_head + head, batch);
    uint2 k = seed;
    for (int round = 0; round < 10; ++round) {
      const uint high0 = mulhi(0xD2511F53u, c.x);
      const uint high1 = mulhi(0xCD9E8D57u, c.z);
      c = uint4(high1 ^ c.y ^ k.x, 0xCD9E8D57u * c.z, high0 ^ c.w ^ k.y, 0xD2511F53u * c.x);
      k += uint2(0x9E3779B9u, 0xBB67AE85u);
    }
    return c;
  }

  bool keeps(uint4 words, int column) const {
    return words[(first_column + uint(column)) & 3] >= p.drop_below;
  }

  bool keeps(int row, int column) const {
    return keeps(words(row, column), column);
  }

  // Makes the words of `column` those of its neighbour, an odd column as the kernel counts them, unless they are the same.
  void next(thread uint4& words, int row, int column) const {
    if (first_column & 1) {
      words = this->words(row, column + 1);
    }
  }

  // Drops weights of a lane's two columns; those of invisible pairs stay as they are.
  void thin(thread Fragment<float>& weights, int row, int column) const {
    uint4 words = this->words(row, column);
    for (int e = 0; e < 2; ++e) {
      if (e == 1) {
        next(words, row, column);
      }
      const float weight = weights.thread_elements()[e];
      if (!is_invisible(weight)) {
        weights.thread_elements()[e] = weight * (keeps(words, column + e) ? p.keep_factor : 0.0f);
      }
    }
  }
};
