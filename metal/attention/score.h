// From a dot product to a score, and back for the derivative; and which probabilities dropout keeps. Kernels ask nothing else
// about scores.
#pragma once

#include "attention/places.h"
#include "core/product.h"

INLINED void store_bias(device uchar* d_bias, ulong at, float x) {
  if (bias_type == 1) {
    reinterpret_cast<device float*>(d_bias)[at] = x;
  } else if (bias_type == 2) {
    reinterpret_cast<device half*>(d_bias)[at] = half(x);
  } else {
    reinterpret_cast<device bfloat*>(d_bias)[at] = bfloat(x);
  }
}

struct Score {
  constant Parameters* p;
  device const float* slopes;
  device const uchar* bias;
  ulong bias_offset;
  int batch;
  int offset;  // position of query row 0
  float scale;
  float slope;

  Score() = default;

  INLINED Score(const thread Features& x, int batch, int head, int offset)
      : p(x.p), slopes(x.alibi_slopes), bias(x.bias), batch(batch), offset(offset) {
    scale = has_scale ? x.scale[batch] : p->scale;
    turn_to(head);
  }

  INLINED void turn_to(int head) {
    slope = has_slopes ? slopes[head_place(*p, batch, head)] : 0.0f;
    bias_offset = has_bias ? broadcast_offset(p->bias, batch, head) : 0;
  }

  // A row or column that does not exist, which may be asked for where nothing is masked, has what the last has.
  INLINED float bias_at(int row, int column) const {
    const ulong i = bias_offset + broadcast_index(p->bias, min(row, p->queries - 1), min(column, p->keys - 1));
    if (bias_type == 1) {
      return reinterpret_cast<device const float*>(bias)[i];
    }
    if (bias_type == 2) {
      return float(reinterpret_cast<device const half*>(bias)[i]);
    }
    return float(reinterpret_cast<device const bfloat*>(bias)[i]);
  }

  // The gradient of the bias by an element of its own: one that broadcasts nothing.
  INLINED void store_gradient(device uchar* d_bias, int row, int column, float x) const {
    if (row < p->queries && column < p->keys) {
      store_bias(d_bias, bias_offset + broadcast_index(p->bias, row, column), x);
    }
  }

  INLINED float distance(int row, int column) const {
    return float(column - (row + offset));
  }

  // The score before the cap, given its bias where it has one.
  INLINED float uncapped(float product, float bias, int row, int column) const {
    float x = product * scale;
    if (has_bias) {
      x += bias;
    }
    if (has_slopes) {
      x += slope * distance(row, column);
    }
    return x;
  }

  INLINED float capped(float x) const {
    return has_cap ? p->cap * precise::tanh(x / p->cap) : x;
  }

  // The score `x` of a pair that the masks allow. Returns whether its bias leaves it visible: minus infinity hides a pair,
  // whatever the product; its score is then minus infinity too. Under a soft cap it hides nothing.
  INLINED bool of(float product, int row, int column, thread float& x) const {
    const float bias = has_bias ? bias_at(row, column) : 0.0f;
    if (may_be_masked() && bias == -INFINITY) {
      x = -INFINITY;
      return false;
    }
    x = capped(uncapped(product, bias, row, column));
    return true;
  }

  // Whether a pair that masks allow may still be hidden by its bias.
  INLINED bool may_be_masked() const {
    return has_bias && !has_cap;
  }

  // The derivative of the score by the scaled product; dQ and dK still need `scale`.
  INLINED float derivative(float product, int row, int column) const {
    return has_cap ? derivative_of_cap(uncapped(product, has_bias ? bias_at(row, column) : 0.0f, row, column)) : 1.0f;
  }

  INLINED float derivative_of_cap(float x) const {
    // 1 / cosh²; 1 - tanh² would cancel where the cap is nearly reached
    const float e = fast::exp2(-2.0f * log2_e * fabs(x / p->cap));
    return 4.0f * e / ((1.0f + e) * (1.0f + e));
  }
};

// Scores with a caller's function between bias and cap: its `value` and `derivative` come with the plan, made by
// jax_mfa/metal/functions.py.
template <typename FUNCTION>
struct ModifiedScore : Score {
  using Function = FUNCTION;
  Given given;

  ModifiedScore() = default;

  INLINED ModifiedScore(const thread Features& x, int batch, int head, int offset)
      : Score(x, batch, head, offset), given(x, batch, head) {}

  INLINED void turn_to(int head) {
    Score::turn_to(head);
    given.turn_to(head);
  }

  INLINED float modified(float x, int row, int column) const {
    return Function::value(given, x, row + offset, column);
  }

  // A function that makes minus infinity of what is not hides the pair, as a bias does.
  INLINED bool of(float product, int row, int column, thread float& x) const {
    const float bias = has_bias ? bias_at(row, column) : 0.0f;
    x = -INFINITY;
    if (Score::may_be_masked() && bias == -INFINITY) {
      return false;
    }
    const float given_score = uncapped(product, bias, row, column);
    x = capped(modified(given_score, row, column));
    return !Function::may_hide || has_cap || x != -INFINITY || given_score == -INFINITY;
  }

  INLINED bool may_be_masked() const {
    return !has_cap && (has_bias || Function::may_hide);
  }

  INLINED float before(float product, int row, int column) const {
    return uncapped(product, has_bias ? bias_at(row, column) : 0.0f, row, column);
  }

  // The derivative of the score by what the function gives.
  INLINED float derivative_by_value(float product, int row, int column) const {
    return has_cap ? derivative_of_cap(modified(before(product, row, column), row, column)) : 1.0f;
  }

  INLINED float derivative(float product, int row, int column) const {
    return derivative_by_value(product, row, column) *
           Function::derivative(given, before(product, row, column), row + offset, column);
  }
};

// A sum of nothing is 0, whatever the scale.
INLINED float scaled(float sum, float scale) {
  return sum == 0 ? 0.0f : sum * scale;
}

template <int BLOCKS, int COUNT>
INLINED void scale_sums(thread Fragment<float> (&sums)[BLOCKS][COUNT], float scale) {
  UNROLLED
  for (int block = 0; block < BLOCKS; ++block) {
    UNROLLED
    for (int i = 0; i < COUNT; ++i) {
      sums[block][i].thread_elements()[0] = scaled(sums[block][i].thread_elements()[0], scale);
      sums[block][i].thread_elements()[1] = scaled(sums[block][i].thread_elements()[1], scale);
    }
  }
}

// Element j is that of x at i ^ j, i from 0 to 3.
INLINED uint4 exchanged(uint4 x, int i) {
  const uint4 y = (i & 1) != 0 ? uint4(x.y, x.x, x.w, x.z) : x;
  return (i & 2) != 0 ? uint4(y.z, y.w, y.x, y.y) : y;
}

// Philox-4×32-10 (Salmon et al., SC 2011); jax_mfa/philox.py says which counter belongs to which score.
struct Dropout {
  constant Parameters* p;
  uint2 seed;
  uint batch;
  uint first_head;
  uint first_row;
  uint first_column;
  uint head;

  INLINED Dropout(const thread Features& x, int batch_row, int head)
      : p(x.p), seed(0), batch(0), first_head(0), first_row(0), first_column(0), head(head) {
    if (has_dropout) {
      device const uint* of_row = x.dropout + ulong(batch_row) * 6;
      seed = uint2(of_row[0], of_row[1]);
      batch = of_row[2];
      first_head = of_row[3];
      first_row = of_row[4];
      first_column = of_row[5];
    }
  }

  INLINED uint4 words(int row, int column) const {
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

  INLINED float factor(uint word) const {
    return word >= p->drop_below ? p->keep_factor : 0.0f;
  }

  // What the probability of one pair is multiplied by.
  INLINED float factor(int row, int column) const {
    return has_dropout ? factor(words(row, column)[(first_column + uint(column)) & 3]) : 1.0f;
  }

  // The same where fragments are transposed: of a lane's column in each of COUNT fragments, in two rows from `row` on. Four lanes,
  // which differ in the bits of 2 and 4, have the columns that share their words: of two fragments each lane makes the words of one
  // row, of a single one two lanes make the same.
  template <int COUNT>
  INLINED void factors_of_columns(
      const thread int (&row)[COUNT], const thread int (&column)[COUNT], thread float2 (&result)[COUNT]) const {
    UNROLLED
    for (int c = 0; c < COUNT; c += 2) {
      const int d = c + 1 < COUNT ? c + 1 : c;
      if (!has_dropout || (first_column & 3) != 0) {
        result[c] = float2(factor(row[c], column[c]), factor(row[c] + 1, column[c]));
        result[d] = float2(factor(row[d], column[d]), factor(row[d] + 1, column[d]));
        continue;
      }
      const int i = column[c] & 3;
      const bool second = (i & 2) != 0;
      // all are read: a choice of addresses would keep the arrays in memory
      const int rows[] = {row[c], row[d]}, columns[] = {column[c], column[d]};
      const uint4 own = exchanged(words((second ? rows[1] : rows[0]) + (i & 1), second ? columns[1] : columns[0]), i);
      const uint beside = simd_shuffle_xor(own.y, ushort(2));
      if (c == d) {
        result[c] = (i & 1) != 0 ? float2(factor(beside), factor(own.x)) : float2(factor(own.x), factor(beside));
        continue;
      }
      const uint below = simd_shuffle_xor(own.z, ushort(4));
      const uint across = simd_shuffle_xor(own.w, ushort(6));
      const uint4 all = exchanged(uint4(own.x, beside, below, across), i);
      result[c] = float2(factor(all.x), factor(all.y));
      result[d] = float2(factor(all.z), factor(all.w));
    }
  }

  // The same of a pair and the next one of its row.
  INLINED float2 both(int row, int column) const {
    return float2(factor(row, column), factor(row, column + 1));
  }

  // The same of a lane's two columns in each of COLUMNS fragments, its first at `column`. Four columns share their words, and two
  // lanes these columns: of two fragments each lane makes the words of one. Not so in a part of a longer sequence that begins
  // between such fours.
  template <int COLUMNS>
  INLINED void factors(int row, int column, thread float2 (&result)[COLUMNS]) const {
    const bool second = (column & 2) != 0;
    UNROLLED
    for (int c = 0; c < COLUMNS; c += 2) {
      if (!has_dropout) {
        result[c] = float2(1.0f, 1.0f);
        result[c + 1 < COLUMNS ? c + 1 : c] = float2(1.0f, 1.0f);
        continue;
      }
      if ((first_column & 3) != 0) {
        result[c] = both(row, column + c * 8);
        if (c + 1 < COLUMNS) {
          result[c + 1 < COLUMNS ? c + 1 : c] = both(row, column + (c + 1) * 8);
        }
        continue;
      }
      const bool alone = c + 1 == COLUMNS;
      const uint4 own = words(row, column + c * 8 + (second && !alone ? 8 : 0));
      const uint2 here = second ? uint2(own.z, own.w) : uint2(own.x, own.y);
      if (alone) {
        result[c] = float2(factor(here.x), factor(here.y));
        continue;
      }
      const uint there_x = simd_shuffle_xor(second ? own.x : own.z, ushort(1));
      const uint there_y = simd_shuffle_xor(second ? own.y : own.w, ushort(1));
      const float2 kept = float2(factor(here.x), factor(here.y));
      const float2 given = float2(factor(there_x), factor(there_y));
      result[c] = second ? given : kept;
      result[c + 1] = second ? kept : given;
    }
  }
};
