// From a dot product to a logit of base 2, and back for the derivative; and which probabilities dropout keeps. Kernels ask
// nothing else about scores.
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
    return of_head(head)[2] * log2_e;
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

  // Minus infinity hides a pair as a mask does; what only becomes infinite by the change of base must not.
  float logit(float product, int row, int column) const {
    if (bias_type == 0 && !has_slopes && !has_cap) {
      return product * (scale * log2_e);
    }
    float x = product * scale;
    if (bias_type != 0) {
      x += bias_at(row, column);
    }
    if (has_slopes) {
      x += slope * distance(row, column);
    }
    if (has_cap) {
      x = p->cap * precise::tanh(x / p->cap);
    }
    const float logit = x * log2_e;
    return bias_type != 0 && abs(x) < INFINITY ? clamp(logit, -most_logit, most_logit) : logit;
  }

  // Whether a pair that masks allow may still be hidden by its logit.
  bool may_hide() const {
    return bias_type != 0;
  }

  // The derivative by the score before the cap, given that by the logit to base e; dQ and dK still need `scale`.
  float derivative(float d_logit, float logit) const {
    if (has_cap) {
      const float y = logit * (ln_2 / p->cap);
      return d_logit * (1.0f - y * y);
    }
    return d_logit;
  }
};

inline void store_bias(device uchar* d_bias, ulong at, float x) {
  if (bias_type == 1) {
    reinterpret_cast<device float*>(d_bias)[at] = x;
  } else if (bias_type == 2) {
    reinterpret_cast<device half*>(d_bias)[at] = half(x);
  } else {
    reinterpret_cast<device bfloat*>(d_bias)[at] = bfloat(x);
  }
}

// What is left of a logit after its row's log-sum-exp, both to base 2. Rounding must not lift it above 1: where logits are
// huge, a unit in the last place is a large power of two.
inline float probability(float logit, float statistic) {
  return logit > statistic ? 1.0f : fast::exp2(logit - statistic);
}

// Philox-4×32-10 (Salmon et al., SC 2011); jax_mfa/philox.py says which counter belongs to which score.
struct Dropout {
  constant Parameters& p;
  uint2 seed;
  uint batch;
  uint first_head;
  uint head;

  Dropout(constant Parameters& p, device const uint* dropout, int batch_row, int head)
      : p(p), seed(0), batch(0), first_head(0), head(head) {
    if (has_dropout) {
      device const uint* of_row = dropout + ulong(batch_row) * 4;
      seed = uint2(of_row[0], of_row[1]);
      batch = of_row[2];
      first_head = of_row[3];
    }
  }

  uint4 words(int row, int column) const {
    uint4 c = uint4(uint(column) / 4, uint(row), first_head + head, batch);
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
    return words[column & 3] >= p.drop_below;
  }

  bool keeps(int row, int column) const {
    return keeps(words(row, column), column);
  }

  // Drops weights of a lane's two columns; those of invisible pairs stay as they are.
  void thin(thread Fragment<float>& weights, int row, int column) const {
    const uint4 words = this->words(row, column);
    for (int e = 0; e < 2; ++e) {
      const float weight = weights.thread_elements()[e];
      if (!is_invisible(weight)) {
        weights.thread_elements()[e] = keeps(words, column + e) ? weight * p.keep_factor : 0.0f;
      }
    }
  }
};
