// What the numbers of a row are stored as, and what they stand for: plain, or in few bits with scales (jax_mfa/kv_cache/storage.py says
// what schemes mean). Knows nothing of where rows lie.
//
// An encoding has Data, which lie in memory, a Word, which holds up to `most` of them side by side, a Number, as scales and other
// parts are, and an Element, as it is decoded; it says which parts there are, and how many tokens and channels share an entry, 0 for
// all.
#pragma once

#include "core/fragment.h"

// Element e of a word of 32 bits, of the type of the first argument.
INLINED float element_of(half, uint word, int e) {
  return float(as_type<half>(ushort(word >> (16 * e))));
}

INLINED float element_of(bfloat, uint word, int e) {
  return as_type<float>(e == 0 ? word << 16 : word & 0xFFFF0000u);
}

INLINED float element_of(float, uint word, int) {
  return as_type<float>(word);
}

// A scale and a zero as another lane has them, and both in one word if they fit: converted when they have arrived, for a conversion right
// after a load would wait for it.
INLINED float2 passed_on(float x, float y, ushort lane) {
  return float2(simd_shuffle(x, lane), simd_shuffle(y, lane));
}

template <typename T>
INLINED float2 passed_on(T x, T y, ushort lane) {
  const uint word = simd_shuffle(uint(as_type<ushort>(x)) | uint(as_type<ushort>(y)) << 16, lane);
  return float2(element_of(x, word, 0), element_of(y, word, 1));
}

// What carries into the sign of each element of a word, without its sign, where all bits of the exponent are set.
INLINED uint carry_of(half) {
  return 0x04000400u;
}

INLINED uint carry_of(bfloat) {
  return 0x00800080u;
}

INLINED uint carry_of(float) {
  return 0x00800000u;
}

template <typename T>
struct Plain {
  using Number = T;
  using Element = T;
  using Data = T;
  using Word = vec<T, 4>;
  static constant constexpr int most = 4;
  static constant constexpr int bits = 8 * sizeof(T);
  static constant constexpr bool scaled = false;
  static constant constexpr bool zeroed = false;
  static constant constexpr bool centred = false;
  static constant constexpr bool whole = false;
  static constant constexpr bool always_finite = false;  // whether data are, whatever their bits
  static constant constexpr int levels = 1;
  static constant constexpr int tokens = 1;
  static constant constexpr int channels = 0;
  static constant constexpr int center = 1;
  static constant constexpr float per_unit = 1.0f;
  static constant constexpr float middle = 0.0f;

  // Data of a row of so many elements.
  INLINED static constexpr int room(int size) {
    return size;
  }

  // COUNT elements of a row, `most` or fewer, from a multiple of COUNT on.
  template <int COUNT>
  INLINED static Word load(device const T* row, int channel) {
    if (COUNT == 4) {
      return *reinterpret_cast<device const vec<T, 4>*>(row + channel);
    }
    Word result = Word(T(0));
    if (COUNT == 2) {
      const vec<T, 2> x = *reinterpret_cast<device const vec<T, 2>*>(row + channel);
      result[0] = x[0];
      result[1] = x[1];
    } else {
      result[0] = row[channel];
    }
    return result;
  }

  INLINED static float number(Word word, int e) {
    return float(word[e]);
  }

  // The same of 32 bits, as are those below; `Quantized` says what they mean.
  INLINED static float number(uint word, int e) {
    return element_of(T(0.0f), word, e);
  }

  INLINED static float unit(uint word, int e) {
    return number(word, e);
  }

  INLINED static uint not_finite(uint word) {
    constexpr uint sign = sizeof(T) == 4 ? 0x80000000u : 0x80008000u;
    return ((word & ~sign) + carry_of(T(0.0f))) & sign;
  }
};

constant constexpr int int8_kind = 0;
constant constexpr int int4_kind = 1;
constant constexpr int fp8_kind = 2;

// e4m3: a sign, four bits of exponent, three of mantissa; no infinity, and the largest of each sign is NaN.
INLINED float float_of_e4m3(uint bits) {
  const uint size = bits & 0x7Fu;
  const float small = float(size) * 0.001953125f;  // 2^-9, of subnormal numbers
  const float large = as_type<float>((size << 20) + 0x3C000000u);
  const float x = size == 0x7Fu ? NAN : (size < 8 ? small : large);
  return bits & 0x80u ? -x : x;
}

template <typename T, int KIND, bool SYMMETRIC, int TOKENS, int CHANNELS, int CENTER>
struct Quantized {
  using Number = T;
  using Element = float;  // 16 bits would round once more
  using Data = uchar;
  using Word = uint;
  static constant constexpr int most = KIND == int4_kind ? 8 : 4;
  static constant constexpr int bits = KIND == int4_kind ? 4 : 8;
  static constant constexpr int in_byte = 8 / bits;
  static constant constexpr bool scaled = true;
  static constant constexpr bool zeroed = !SYMMETRIC;
  static constant constexpr bool centred = CENTER != 0;
  static constant constexpr bool whole = TOKENS == 0 && CHANNELS == 0;  // one scale for all heads too
  static constant constexpr bool always_finite = KIND != fp8_kind;
  static constant constexpr int levels = KIND == fp8_kind ? 448 : (1 << ((KIND == int4_kind ? 4 : 8) - (SYMMETRIC ? 1 : 0))) - 1;
  static constant constexpr int tokens = TOKENS;
  static constant constexpr int channels = CHANNELS;
  static constant constexpr int center = CENTER;
  static constant constexpr float per_unit = KIND == fp8_kind ? 256.0f : float(1 << bits);

  // the element, in steps of a scale, whose unit is 0; another one's unit stands for per_unit times itself more
  static constant constexpr float middle = KIND == fp8_kind || SYMMETRIC ? 0.0f : per_unit / 2;

  INLINED static constexpr int room(int size) {
    return KIND == int4_kind ? (size + 1) / 2 : size;
  }

  template <int COUNT>
  INLINED static Word load(device const uchar* row, int channel) {
    device const uchar* at = row + (KIND == int4_kind ? channel / 2 : channel);
    constexpr int bytes = KIND == int4_kind ? COUNT / 2 : COUNT;
    if (bytes == 4) {
      return *reinterpret_cast<device const uint*>(at);
    }
    if (bytes == 2) {
      return *reinterpret_cast<device const ushort*>(at);
    }
    return bytes == 1 ? at[0] : at[0] >> ((channel & 1) * 4);
  }

  // Element e of a word in units of its scale.
  INLINED static float number(Word word, int e) {
    if (KIND == fp8_kind) {
      return float_of_e4m3((word >> (8 * e)) & 0xFFu);
    }
    if (SYMMETRIC) {
      return float(int(word << (32 - bits - bits * e)) >> (32 - bits));
    }
    return float((word >> (bits * e)) & ((1u << bits) - 1));
  }

  // Two elements of a word as units, e of the byte b of either half: exact in 16 bits, in few operations, of elements that are finite. An
  // integer becomes the last bits of a half between 1024 and 2048, and this a number from -1/2 to 1/2, so that long sums do not cancel; its
  // sign is its first bit, flipped. e4m3 becomes a half, whose exponent has a bias larger by 8: subnormal numbers of the one are those of
  // the other.
  INLINED static uint bytes(uint word, int b) {
    if (KIND == fp8_kind) {
      return b == 1 ? word : word << 8;
    }
    const uint byte = b == 0 ? word : word >> 8;
    return (SYMMETRIC ? byte ^ (bits == 4 ? 0x00880088u : 0x00800080u) : byte) | 0x64006400u;
  }

  INLINED static vec<half, 2> units(uint bytes, int e) {
    if (KIND == fp8_kind) {
      return as_type<vec<half, 2>>(((bytes >> 1) & 0x3F803F80u) | (bytes & 0x80008000u));
    }
    const uint mask = ((1u << bits) - 1) << (bits * e);
    vec<half, 2> x = as_type<vec<half, 2>>(bytes & ((mask | 0x6400u) * 0x10001u));
    const float unit = 1.0f / (per_unit * float(1 << (bits * e)));
    x[0] = fma(x[0], half(unit), half(-1024.0f * unit - 0.5f));
    x[1] = fma(x[1], half(unit), half(-1024.0f * unit - 0.5f));
    return x;
  }

  INLINED static half unit(uint word, int e) {
    return units(bytes(word, e / in_byte % 2), e % in_byte)[e / in_byte / 2];
  }

  // Not 0 where an element of a word is not finite.
  INLINED static uint not_finite(uint word) {
    return KIND == fp8_kind ? ((word & 0x7F7F7F7Fu) + 0x01010101u) & 0x80808080u : 0;
  }
};
