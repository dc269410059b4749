// How a row of numbers is stored: the scales of its blocks, and the data, as jax_mfa/kv_cache/quantized.py has it, which says why. Blocks
// lie within the row.
#pragma once

#include "core/encoding.h"

// A number in a narrower type, rounded up. It is not negative.
INLINED float rounded_up(float x, float) {
  return x;
}

INLINED half rounded_up(float x, half) {
  const half y = half(x);
  return float(y) < x ? as_type<half>(ushort(as_type<ushort>(y) + 1)) : y;
}

INLINED bfloat rounded_up(float x, bfloat) {
  const bfloat y = bfloat(x);
  return float(y) < x ? as_type<bfloat>(ushort(as_type<ushort>(y) + 1)) : y;
}

// The least scale: smaller ones processors take for 0.
INLINED float least_scale(half) {
  return 5.9604644775390625e-8f;
}

INLINED float least_scale(float) {
  return 1.17549435e-38f;
}

INLINED float least_scale(bfloat) {
  return 1.17549435e-38f;
}

// Above this, blocks of 2 * 448 steps or fewer may be wider than the largest number.
constant constexpr float huge_scale = 3.32306998946228968e35f;  // 2^118

// Of |x| <= 448, or NaN; to nearest, ties to even.
INLINED uint e4m3_of_float(float x) {
  const uint sign = (as_type<uint>(x) >> 24) & 0x80u;
  const float size = fabs(x);
  if (size != size) {
    return 0x7Fu;
  }
  if (size < 0.015625f) {  // subnormal
    return sign | uint(rint(size * 512.0f));
  }
  const uint bits = as_type<uint>(size);
  return sign | (((bits + 0x7FFFFu + ((bits >> 20) & 1)) >> 20) - 0x3C0u);
}

// How a block that reaches from `low` to `high` is stored; one that is `spoilt` by NaN or infinity stands for NaN.
template <typename Encoding>
struct Block {
  using Number = typename Encoding::Number;
  Number scale;
  Number zero;

  INLINED Block(float low, float high, bool spoilt) : zero(Number(0.0f)) {
    constexpr float levels = float(Encoding::levels);
    float found = 0;
    float least = least_scale(zero);
    if (!Encoding::zeroed) {
      const float reach = max(fabs(low), fabs(high));
      found = low == high ? reach : reach / levels;
      least = reach == 0 ? 1.0f : least;
    } else if (Encoding::always_finite) {
      zero = Number(low);
      found = (high / 2 - low / 2) / (levels / 2);  // the whole may overflow
    } else {
      zero = Number(low / 2 + high / 2);
      found = max(high - float(zero), float(zero) - low) / levels;
    }
    scale = spoilt ? Number(NAN) : rounded_up(max(found, least), zero);
  }
};

// The bits of a number of a block.
template <typename Encoding>
INLINED uint bits_of(float x, float scale, float zero) {
  // a power of two keeps what is subtracted from overflow, and from what processors take for 0
  constexpr float large = 9223372036854775808.0f;  // 2^63
  const float factor = scale > huge_scale ? 0.5f : (max(scale, fabs(zero)) < 1 / large ? large : 1.0f);
  const float y = Encoding::zeroed ? (x * factor - zero * factor) / (scale * factor) : x / scale;
  constexpr float levels = float(Encoding::levels);
  if (!Encoding::always_finite) {
    return e4m3_of_float(y != y ? y : clamp(y, -levels, levels));
  }
  return uint(int(y != y ? 0.0f : rint(clamp(y, Encoding::zeroed ? 0.0f : -levels, levels))));
}

// Piece i of the data of a row: a number, or those that share a byte. `blocks` are scales and zeros side by side.
template <int SIZE, typename T>
INLINED T piece(Plain<T>, device const T* row, threadgroup const float*, int i) {
  return row[i];
}

template <int SIZE, typename T, int KIND, bool SYMMETRIC, int TOKENS, int CHANNELS, int CENTER>
INLINED uchar piece(
    Quantized<T, KIND, SYMMETRIC, TOKENS, CHANNELS, CENTER>, device const T* row, threadgroup const float* blocks, int i) {
  using Encoding = Quantized<T, KIND, SYMMETRIC, TOKENS, CHANNELS, CENTER>;
  constexpr int together = KIND == int4_kind ? 2 : 1;
  uint result = 0;
  for (int e = 0; e < together; ++e) {
    const int channel = i * together + e;
    if (channel < SIZE) {
      threadgroup const float* block = blocks + (CHANNELS == 0 ? 0 : channel / (CHANNELS == 0 ? 1 : CHANNELS)) * 2;
      result |= (bits_of<Encoding>(float(row[channel]), block[0], block[1]) & (together == 2 ? 15u : 255u)) << (4 * e);
    }
  }
  return uchar(result);
}
