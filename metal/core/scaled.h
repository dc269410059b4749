// What core/lanes.h does, of rows in few bits whose scales runs of channels share: elements become operands as units (core/words.h), and
// scales are applied to what those come to, of keys to products, of values to weights. Tiles with an element that is not finite or has to
// be held within its type are decoded one by one.
#pragma once

#include "core/lanes.h"
#include "core/words.h"

// The channels of a row that have their scale in common, of SIZE from a multiple of SIZE on.
template <typename Source, int SIZE>
struct Spans {
  using Encoding = typename Source::Encoding;
  static constant constexpr int channels = Source::Row::groups == 1 ? SIZE : Encoding::channels;
  static constant constexpr int size = least_of(channels, SIZE);
  static constant constexpr int count = SIZE / size;
  // whether they are alike, and can be dealt to fragments
  static constant constexpr bool even = Encoding::scaled && !Encoding::centred && Source::size % 32 == 0 && size % 32 == 0 &&
                                        SIZE % size == 0 && channels % size == 0;
};

// Elements of one row that are dealt to PARTS lanes, span by span; each of them reads some of the scales and zeros.
template <typename Source, typename Of, int PARTS>
struct ScaledRun {
  using Encoding = typename Source::Encoding;
  using Number = typename Encoding::Number;
  static constant constexpr int width = Of::size / PARTS;
  static constant constexpr int together = least_of(width & -width, 128 / Encoding::bits);
  static constant constexpr int entries = Of::count * (Encoding::zeroed ? 2 : 1);
  static constant constexpr int rounds = (entries + PARTS - 1) / PARTS;
  using Elements = Words<Source, width, together, false>;
  Elements words[Of::count];
  Number stored[rounds];

  ScaledRun() = default;

  INLINED ScaledRun(typename Source::Row row, int first, int part) {
    UNROLLED
    for (int s = 0; s < Of::count; ++s) {
      const int channel = first + s * Of::size + part * width;
      words[s] = Elements(Elements::place(row.data, channel), channel);
    }
    UNROLLED
    for (int i = 0; i < rounds; ++i) {
      const int entry = min(i * PARTS + part, entries - 1);
      const bool zero = Encoding::zeroed && entry >= Of::count;
      const int s = zero ? entry - Of::count : entry;
      stored[i] = (zero ? row.zeros : row.scales)[Source::Row::group(first + s * Of::size)];
    }
  }

  // Whether all that a part read is finite, and no element has to be held within its type, as scales and zeros say each for itself.
  INLINED bool bounded(int part) const {
    uint bad = 0;
    UNROLLED
    for (int s = 0; s < Of::count; ++s) {
      bad |= words[s].not_finite();
    }
    bool result = bad == 0;
    UNROLLED
    for (int i = 0; i < rounds; ++i) {
      const float most = largest_number(Number(0.0f)) / (i * PARTS + part < Of::count ? float(2 * Encoding::levels) : 2.0f);
      result = result && fabs(float(stored[i])) <= most;
    }
    return result;
  }
};

// The scales and zeros of a lane's columns of 8 · COLUMNS keys, span by span, and whether these have to be decoded.
template <typename Encoding, bool BALANCED, int COLUMNS, int SPANS>
struct ColumnScales {
  float scales[COLUMNS][2][SPANS];
  float zeros[COLUMNS][2][SPANS];
  bool careful = false;

  INLINED void decode(bool all) {
    careful = all;
  }

  // From a tile, whose `entry` i of a column is its scale or, after these, its zero.
  template <typename Tile>
  INLINED void take(const thread Tile& tile) {
    UNROLLED
    for (int c = 0; c < COLUMNS; ++c) {
      UNROLLED
      for (int e = 0; e < 2; ++e) {
        UNROLLED
        for (int s = 0; s < SPANS; ++s) {
          const float zero = Encoding::zeroed ? tile.entry(c, e, SPANS + s) : 0.0f;
          const Scaling<Encoding, BALANCED> scaling(tile.entry(c, e, s), zero);
          scales[c][e][s] = scaling.scale;
          zeros[c][e][s] = scaling.zero;
        }
      }
    }
  }
};

// 8 · COLUMNS keys from `first` on, a multiple of 8, as transposed fragments.
template <typename Source, typename Operand, int COLUMNS>
struct ScaledKeys
    : ColumnScales<
          typename Source::Encoding, balanced_keys<typename Source::Encoding>(), COLUMNS, Spans<Source, Source::size>::count> {
  using Of = Spans<Source, Source::size>;
  using Run = ScaledRun<Source, Of, 8>;
  using Encoding = typename Source::Encoding;
  static constant constexpr bool balanced = balanced_keys<Encoding>();
  Source source;
  int first;
  Lane lane;
  Run runs[COLUMNS][2];

  INLINED ScaledKeys(Source source, int first, ushort lane_index, Lane lane) : source(source), first(first), lane(lane) {
    UNROLLED
    for (int c = 0; c < COLUMNS; ++c) {
      const uint unit = unit_of_eight(source, first + c * 8, lane_index);
      UNROLLED
      for (int e = 0; e < 2; ++e) {
        runs[c][e] = Run(source.token_of(unit, min(first + c * 8 + lane.column + e, source.count - 1)), 0, lane.row);
      }
    }
  }

  // When all has arrived: whether nobody has to be careful.
  INLINED bool prepare() {
    bool bounded = true;
    UNROLLED
    for (int c = 0; c < COLUMNS; ++c) {
      UNROLLED
      for (int e = 0; e < 2; ++e) {
        bounded = bounded && runs[c][e].bounded(lane.row);
      }
    }
    this->take(*this);
    return simd_all(bounded);
  }

  INLINED float entry(int c, int e, int i) const {
    return simd_shuffle(float(runs[c][e].stored[i / 8]), lane_of(i % 8, lane.column));
  }

  INLINED typename Encoding::Unit unit(int c, int e, int s, int i) const {
    return runs[c][e].words[s].template unit<balanced, typename Encoding::Unit>(i);
  }

  // The channel of a place in fragment i.
  INLINED static int channel(int i, int place) {
    return i / Run::width * Of::size + place * Run::width + i % Run::width;
  }

  INLINED float alone(int c, int e, int channel) const {
    return source.tile(min(first + c * 8 + lane.column + e, source.count - 1)).at(0, channel);
  }
};

// As many values, of which COUNT fragments from `from` on, a multiple of COUNT, as fragments that lie straight.
template <typename Source, typename Operand, int COLUMNS, int COUNT>
struct ScaledValues : ColumnScales<typename Source::Encoding, true, COLUMNS, Spans<Source, COUNT * 8>::count> {
  using Of = Spans<Source, COUNT * 8>;
  using Run = ScaledRun<Source, Of, 4>;
  using Encoding = typename Source::Encoding;
  static constant constexpr int fragments = padded(Source::size) / 8;
  Source source;
  int first;
  Lane lane;
  Run runs[COLUMNS];

  INLINED ScaledValues(Source source, int first, ushort lane_index, Lane lane, int from) : source(source), first(first), lane(lane) {
    UNROLLED
    for (int c = 0; c < COLUMNS; ++c) {
      const uint unit = unit_of_eight(source, first + c * 8, lane_index);
      runs[c] = Run(source.token_of(unit, min(first + c * 8 + lane.row, source.count - 1)), from * 8, lane.column / 2);
    }
  }

  INLINED bool prepare() {
    bool bounded = true;
    UNROLLED
    for (int c = 0; c < COLUMNS; ++c) {
      bounded = bounded && runs[c].bounded(lane.column / 2);
    }
    this->take(*this);
    return simd_all(bounded);
  }

  INLINED float entry(int c, int e, int i) const {
    return simd_shuffle(float(runs[c].stored[i / 4]), lane_of(lane.column + e, i % 4 * 2));
  }

  INLINED typename Encoding::Unit unit(int c, int s, int i) const {
    return runs[c].words[s].template unit<true, typename Encoding::Unit>(i);
  }

  // The channel of a lane's first element in fragment i.
  INLINED static int channel(int i, Lane lane) {
    constexpr int in_span = Of::size / 8;
    return i / in_span * Of::size + lane.column / 2 * Run::width + i % in_span * 2;
  }

  // Fragment i of eight rows, for rare use: of any i.
  INLINED Fragment<float> straight(int c, int i) const {
    const auto row = source.tile(min(first + c * 8 + lane.row, source.count - 1));
    return fragment_of<float>(row.at(0, channel(i, lane)), row.at(0, channel(i, lane) + 1));
  }

  INLINED bool finite() const {
    return !this->careful;
  }
};

// result = own rows · keysᵀ
template <int BLOCKS, int COLUMNS, typename Own, typename Source, typename Operand>
INLINED void multiply_rows(
    thread Fragment<float> (&result)[BLOCKS][COLUMNS], const thread Own& own,
    const thread ScaledKeys<Source, Operand, COLUMNS>& keys) {
  using Keys = ScaledKeys<Source, Operand, COLUMNS>;
  constexpr int width = Keys::Run::width;
  clear(result);
  if (keys.careful) {
    ROLLED
    for (int channel = 0; channel < Source::size; ++channel) {
      UNROLLED
      for (int c = 0; c < COLUMNS; ++c) {
        UNROLLED
        for (int e = 0; e < 2; ++e) {
          const float x = keys.alone(c, e, channel);
          UNROLLED
          for (int block = 0; block < BLOCKS; ++block) {
            result[block][c].thread_elements()[e] = fma(own.element(block, channel), x, result[block][c].thread_elements()[e]);
          }
        }
      }
    }
    return;
  }
  UNROLLED
  for (int c = 0; c < COLUMNS; ++c) {
    Fragment<float> sums[BLOCKS][Keys::Of::count];
    clear(sums);
    UNROLLED
    for (int i = 0; i < width; ++i) {
      UNROLLED
      for (int s = 0; s < Keys::Of::count; ++s) {
        const Fragment<Operand> operand = fragment_of<Operand>(Operand(keys.unit(c, 0, s, i)), Operand(keys.unit(c, 1, s, i)));
        UNROLLED
        for (int block = 0; block < BLOCKS; ++block) {
          simdgroup_multiply_accumulate(sums[block][s], own.at(block, s * width + i), operand, sums[block][s]);
        }
      }
    }
    UNROLLED
    for (int block = 0; block < BLOCKS; ++block) {
      UNROLLED
      for (int e = 0; e < 2; ++e) {
        float x = 0;
        UNROLLED
        for (int s = 0; s < Keys::Of::count; ++s) {
          x = fma(sums[block][s].thread_elements()[e], keys.scales[c][e][s], fma(own.sums[block][s], keys.zeros[c][e][s], x));
        }
        result[block][c].thread_elements()[e] = x;
      }
    }
  }
}

// sums += weights · (values less their zeros)
template <int WIDTH, int BLOCKS, int COLUMNS, int COUNT, typename Source, typename Operand>
INLINED void accumulate(
    thread Fragment<float> (&sums)[BLOCKS][COUNT], const thread Fragment<float> (&weights)[BLOCKS][COLUMNS],
    const thread ScaledValues<Source, Operand, COLUMNS, COUNT>& values, int) {
  using Values = ScaledValues<Source, Operand, COLUMNS, COUNT>;
  constexpr int in_span = Values::Of::size / 8;
  UNROLLED
  for (int c = 0; c < COLUMNS; ++c) {
    UNROLLED
    for (int s = 0; s < Values::Of::count; ++s) {
      Fragment<float> scaled[BLOCKS];
      UNROLLED
      for (int block = 0; block < BLOCKS; ++block) {
        scaled[block] = fragment_of<float>(
            weights[block][c].thread_elements()[0] * values.scales[c][0][s],
            weights[block][c].thread_elements()[1] * values.scales[c][1][s]);
      }
      UNROLLED
      for (int i = 0; i < in_span; ++i) {
        const Fragment<Operand> operand =
            fragment_of<Operand>(Operand(values.unit(c, s, 2 * i)), Operand(values.unit(c, s, 2 * i + 1)));
        UNROLLED
        for (int block = 0; block < BLOCKS; ++block) {
          const int at = s * in_span + i;
          simdgroup_multiply_accumulate(sums[block][at], scaled[block], operand, sums[block][at]);
        }
      }
    }
  }
}

// The zeros of all channels of a span come to the same: a sum of a lane's own columns.
template <int BLOCKS, int COLUMNS, int COUNT, typename Source, typename Operand, int SPANS>
INLINED void accumulate_zeros(
    thread float (&sums)[BLOCKS][SPANS], const thread Fragment<float> (&weights)[BLOCKS][COLUMNS],
    const thread ScaledValues<Source, Operand, COLUMNS, COUNT>& values) {
  UNROLLED
  for (int block = 0; block < BLOCKS; ++block) {
    UNROLLED
    for (int s = 0; s < SPANS; ++s) {
      UNROLLED
      for (int c = 0; c < COLUMNS; ++c) {
        UNROLLED
        for (int e = 0; e < 2; ++e) {
          sums[block][s] = fma(weights[block][c].thread_elements()[e], values.zeros[c][e][s], sums[block][s]);
        }
      }
    }
  }
}

// The operand that units become: what queries of 16 bits are multiplied with as they are, else float32.
template <typename T>
struct OperandOf {
  using Type = float;
};

template <>
struct OperandOf<half> {
  using Type = half;
};

// Keys and values of a simdgroup whose rows nobody shares: decoded as they are loaded, or as units. COUNT fragments of values are summed.
template <typename Types, bool UNITS>
struct KeysInLanes {
  static constant constexpr bool units = false;
  using Operand = typename Types::Operand;
  static constant constexpr int spans = 1;
  template <int COLUMNS>
  using Tile = LaneKeys<typename Types::Key, Operand, COLUMNS>;
};

template <typename Types>
struct KeysInLanes<Types, true> {
  static constant constexpr bool units = true;
  using Operand = typename OperandOf<typename Types::T>::Type;
  static constant constexpr int spans = Spans<typename Types::Key, Types::H>::count;
  template <int COLUMNS>
  using Tile = ScaledKeys<typename Types::Key, Operand, COLUMNS>;
};

template <typename Types, int COUNT, bool UNITS>
struct ValuesInLanes {
  static constant constexpr bool units = false;
  static constant constexpr int spans = 1;
  template <int COLUMNS>
  using Tile = LaneValues<typename Types::Value, typename Types::Operand, COLUMNS>;
};

template <typename Types, int COUNT>
struct ValuesInLanes<Types, COUNT, true> {
  static constant constexpr bool units = true;
  static constant constexpr int spans = Spans<typename Types::Value, COUNT * 8>::count;
  template <int COLUMNS>
  using Tile = ScaledValues<typename Types::Value, typename OperandOf<typename Types::T>::Type, COLUMNS, COUNT>;
};
