// Elements of a row as they are stored, as words of a lane, and as units: the small numbers that stand for them. Scales are applied to
// what sums of products of units come to.
#pragma once

#include "core/stored.h"

constexpr int least_of(int x, int y) {
  return x < y ? x : y;
}

// WIDTH elements of one row side by side, as they are stored, loaded TOGETHER at once: from channel `first` on, where `at` points. Those
// beyond the row are 0.
template <typename Source, int WIDTH, int TOGETHER, bool RAGGED>
struct Words {
  using Encoding = typename Source::Encoding;
  static constant constexpr int bits = Encoding::bits;
  static constant constexpr int in_word = 32 / bits;
  static constant constexpr int count = (WIDTH + in_word - 1) / in_word;
  uint words[count];

  Words() = default;

  INLINED Words(device const uchar* at, int first) {
    UNROLLED
    for (int i = 0; i < count; ++i) {
      words[i] = 0;
    }
    UNROLLED
    for (int i = 0; i < WIDTH; i += TOGETHER) {
      if (!RAGGED || first + i < Source::size) {
        load(at + i * bits / 8, first, i);
      }
    }
  }

  INLINED void load(device const uchar* at, int first, int i) {
    constexpr int loaded = TOGETHER * bits;
    const int to = i / in_word;
    if (loaded == 128) {
      const uint4 x = *reinterpret_cast<device const uint4*>(at);
      words[to] = x[0];
      words[(to + 1) % count] = x[1];
      words[(to + 2) % count] = x[2];
      words[(to + 3) % count] = x[3];
    } else if (loaded == 64) {
      const uint2 x = *reinterpret_cast<device const uint2*>(at);
      words[to] = x[0];
      words[(to + 1) % count] = x[1];
    } else {
      const uint x = loaded == 32 ? *reinterpret_cast<device const uint*>(at)
                     : loaded == 16 ? uint(*reinterpret_cast<device const ushort*>(at))
                     : loaded == 8  ? uint(at[0])
                                    : (at[0] >> (((first + i) & 1) * 4)) & 15u;
      words[to] |= x << (i % in_word * bits);
    }
  }

  // Where channel `first` lies of a row.
  INLINED static device const uchar* place(device const typename Encoding::Data* row, int first) {
    return reinterpret_cast<device const uchar*>(row) + first * bits / 8;
  }

  INLINED float number(int i) const {
    return Encoding::number(words[i / in_word], i % in_word);
  }

  INLINED float unit(int i) const {
    return float(Encoding::unit(words[i / in_word], i % in_word));
  }

  // Not 0 where an element is not finite.
  INLINED uint not_finite() const {
    uint result = 0;
    UNROLLED
    for (int i = 0; i < count; ++i) {
      result |= Encoding::not_finite(words[i]);
    }
    return result;
  }
};

// Two elements of bytes as an operand.
template <typename Encoding, typename Operand>
INLINED Fragment<Operand> units_of(uint bytes, int e) {
  const auto x = Encoding::units(bytes, e);
  return fragment_of<Operand>(Operand(x[0]), Operand(x[1]));
}

// A scale and a zero of units, and whether no element has to be held within its type.
template <typename Encoding>
struct Scaling {
  float scale;
  float zero;
  bool bounded;

  INLINED Scaling(float of_steps, float stored_zero)
      : scale(of_steps * Encoding::per_unit),
        zero(fma(of_steps, Encoding::middle, stored_zero)),
        bounded(fma(fabs(of_steps), float(Encoding::levels), fabs(stored_zero)) <= largest_number(typename Encoding::Number(0.0f))) {}
};
