// Rows that are not a plain array in one piece: encoded, in pages, or both. Offers what `Dense` does, and decodes as rows are put
// down in threadgroup memory or taken to registers. What lies beyond the rows that may be read is never looked at, nor is its page.
#pragma once

#include "core/encoding.h"
#include "core/source.h"

// Data and what lies beside them at one token of one head.
template <typename Encoding, int SIZE>
struct Token {
  using Number = typename Encoding::Number;
  static constant constexpr int groups = Encoding::channels == 0 ? 1 : (SIZE + Encoding::channels - 1) / Encoding::channels;
  // whether four channels from a multiple of four on share their scale
  static constant constexpr bool alike = groups == 1 || Encoding::channels % 4 == 0;
  device const typename Encoding::Data* data;
  device const Number* scales;
  device const Number* zeros;
  device const Number* means;

  INLINED static int group(int channel) {
    return groups == 1 ? 0 : channel / Encoding::channels;
  }

  INLINED vec<Number, 4> of_groups(device const Number* x, int channel, int count) const {
    if (alike || count == 1) {
      return vec<Number, 4>(x[group(channel)]);
    }
    vec<Number, 4> result = vec<Number, 4>(Number(0.0f));
    UNROLLED
    for (int e = 0; e < count; ++e) {
      result[e] = x[group(channel + e)];
    }
    return result;
  }
};

INLINED float largest_number(half) {
  return 65504.0f;
}

INLINED float largest_number(float) {
  return 3.40282347e38f;
}

INLINED float largest_number(bfloat) {
  return 3.38953139e38f;
}

// `x`, or the largest number of a type where rounding has passed that, of either sign; NaN stays.
template <typename T>
INLINED float held_within(float x) {
  const float most = largest_number(T(0.0f));
  x = x > most ? most : x;
  return x < -most ? -most : x;
}

// What a number in units of its scale stands for. x * scale may overflow where its sum with the zero does not: they are one
// operation.
template <typename Encoding>
INLINED float decoded(float x, float scale, float zero, float mean) {
  using Number = typename Encoding::Number;
  if (!Encoding::scaled) {
    return x;
  }
  const float result = held_within<Number>(Encoding::zeroed ? fma(x, scale, zero) : x * scale);
  return Encoding::centred ? held_within<Number>(result + mean) : result;
}

// Four elements on their way to threadgroup memory, as they are stored.
template <typename Encoding>
struct Coming {
  typename Encoding::Word word;
  vec<typename Encoding::Number, 4> scales;
  vec<typename Encoding::Number, 4> zeros;
  vec<typename Encoding::Number, 4> means;
};

template <typename Source>
struct StoredTile {
  using Encoding = typename Source::Encoding;
  using Number = typename Encoding::Number;
  using Element = typename Encoding::Element;
  Source source;
  int first;
  int last;

  template <int COUNT>
  INLINED Coming<Encoding> fetch(int i, int column) const {
    const auto token = source.token(first + min(i, last));
    Coming<Encoding> result = {};
    result.word = Encoding::template load<COUNT>(token.data, column);
    if (Encoding::scaled) {
      result.scales = token.of_groups(token.scales, column, COUNT);
    }
    if (Encoding::zeroed) {
      result.zeros = token.of_groups(token.zeros, column, COUNT);
    }
    if (Encoding::centred) {
      result.means = Plain<Number>::template load<COUNT>(token.means, column);
    }
    return result;
  }

  template <int COUNT>
  INLINED vec<Element, 4> load(int i, int column) const {
    return Source::template elements<COUNT>(fetch<COUNT>(i, column));
  }

  INLINED Element at(int i, int column) const {
    return load<1>(i, column)[0];
  }

  INLINED Fragment<Element> pair(int i, int column) const {
    const bool first = Source::size % 8 == 0 || column < Source::size;
    const bool second = Source::size % 8 == 0 || column + 1 < Source::size;
    return fragment_of<Element>(first ? at(i, column) : Element(0), second ? at(i, column + 1) : Element(0));
  }
};

// Rows of one head, of which `count` may be read, at least one. They lie in `row` of arrays [rows, length, heads, …], or where PAGE
// is not 0 in pages of PAGE tokens, [pages, PAGE, heads, …], with tables [rows, length / PAGE]. SIZE and WIDTH are those of `Dense`.
template <typename Encoded, int SIZE, int PAGE, int WIDTH = SIZE>
struct Stored {
  using Encoding = Encoded;
  using Storage = typename Encoding::Data;
  using Number = typename Encoding::Number;
  using Element = typename Encoding::Element;
  using Fetched = Coming<Encoding>;
  using Tile = StoredTile<Stored>;
  using Row = Token<Encoding, WIDTH>;
  static constant constexpr int size = SIZE;
  static constant constexpr int page = PAGE;
  Row parts;  // where the arrays begin
  device const int* table;
  uint row;
  uint length;  // tokens of a row or page
  uint heads;
  uint head;
  int count;

  INLINED Stored(device const Storage* data, Beside beside, int row, int length, int heads, int head, int count)
      : parts({data, reinterpret_cast<device const Number*>(beside.scales), reinterpret_cast<device const Number*>(beside.zeros),
               reinterpret_cast<device const Number*>(beside.means)}),
        table(beside.tables), row(row), length(PAGE != 0 ? PAGE : length), heads(heads), head(head), count(count) {
    if (PAGE != 0) {  // strided by its own width
      table += ulong(uint(row)) * ulong(uint(length / (PAGE != 0 ? PAGE : 1)));
    }
  }

  INLINED Tile tile(int first) const {
    return {*this, first, count - 1 - first};
  }

  // In which row or page a token lies.
  INLINED uint unit(int token) const {
    return PAGE != 0 ? uint(table[token / (PAGE != 0 ? PAGE : 1)]) : row;
  }

  // Which entry of a part that PER tokens share, or all of a row or page, holds a token.
  template <int PER>
  INLINED uint entry(uint unit, uint within) const {
    constexpr uint per = PER == 0 ? 1 : PER;
    return PER == 0 ? unit : unit * ((length + per - 1) / per) + within / per;
  }

  INLINED Row token_of(uint unit, int token) const {
    const uint within = PAGE != 0 ? uint(token) % uint(PAGE != 0 ? PAGE : 1) : uint(token);
    const ulong at = ulong(entry<1>(unit, within)) * heads + head;
    Row result = parts;
    result.data += at * ulong(Encoding::room(WIDTH));
    const ulong block = Encoding::whole ? ulong(unit) : (ulong(entry<Encoding::tokens>(unit, within)) * heads + head) * result.groups;
    if (Encoding::scaled) {
      result.scales += block;
    }
    if (Encoding::zeroed) {
      result.zeros += block;
    }
    if (Encoding::centred) {
      result.means += (ulong(entry<Encoding::center>(unit, within)) * heads + head) * ulong(WIDTH);
    }
    return result;
  }

  // How many entries further a token lies, `by` after another of the same eight.
  template <int PER>
  INLINED uint further(uint within, uint by) const {
    constexpr uint per = PER == 0 ? 1 : PER;
    return PER == 1 ? by : (PER % 8 == 0 ? 0 : (within + by) / per - within / per);
  }

  // The token `by` after another, of which `from` says where it lies; from a multiple of 8 to the next there are both.
  INLINED Row token_after(Row from, int token, int by) const {
    const uint within = PAGE != 0 ? uint(token) % uint(PAGE != 0 ? PAGE : 1) : uint(token);
    from.data += ulong(uint(by)) * ulong(heads * uint(Encoding::room(WIDTH)));
    const ulong block = Encoding::whole ? 0 : ulong(further<Encoding::tokens>(within, uint(by))) * ulong(heads * uint(from.groups));
    if (Encoding::scaled) {
      from.scales += block;
    }
    if (Encoding::zeroed) {
      from.zeros += block;
    }
    if (Encoding::centred) {
      from.means += ulong(further<Encoding::center>(within, uint(by))) * ulong(heads * uint(WIDTH));
    }
    return from;
  }

  INLINED Row token(int token) const {
    return token_of(unit(token), token);
  }

  template <int COUNT>
  INLINED static vec<Element, 4> elements(Fetched x) {
    vec<Element, 4> result = vec<Element, 4>(Element(0));
    UNROLLED
    for (int e = 0; e < COUNT; ++e) {
      result[e] = Element(
          decoded<Encoding>(Encoding::number(x.word, e), float(x.scales[e]), float(x.zeros[e]), float(x.means[e])));
    }
    return result;
  }
};
