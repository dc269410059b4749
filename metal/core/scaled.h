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

// Rows and weights as they enter products, and what values become there. PAIRED rows stand twice in fragments, in the first and the last
// half of columns, and weights are two halves: the first columns have the leading bits, the last ones those that follow, times `low_unit`.
// A product with elements of 16 bits is as exact as of float32 then, and the fragment is full.
template <bool PAIRED>
struct WeightsInLanes {
  using Element = float;

  template <typename T>
  INLINED static Fragment<T> rows(Fragment<T> x, ushort) {
    return x;
  }

  INLINED static float of(float weight, Lane) {
    return weight;
  }
};

template <>
struct WeightsInLanes<true> {
  using Element = half;
  static constant constexpr float low_unit = 2048.0f;

  // As the first columns have them: both of a lane from one register, where a compiler might keep them in two.
  INLINED static Fragment<half> rows(Fragment<half> x, ushort lane_index) {
    vec<half, 2> pair;
    pair[0] = x.thread_elements()[0];
    pair[1] = x.thread_elements()[1];
    pair = as_type<vec<half, 2>>(simd_shuffle(as_type<uint>(pair), ushort(lane_index & ~lane_of(0, 4))));
    return fragment_of<half>(pair[0], pair[1]);
  }

  INLINED static half of(float weight, Lane lane) {
    const half high = half(weight);
    return lane.column < 4 ? high : half((weight - float(high)) * low_unit);
  }
};

// Whether half has 0 or all its bits for a number of this size: between 2^-14 and 65504, without a branch.
INLINED bool fits_half(float x) {
  const uint from_least = (as_type<uint>(x) & 0x7FFFFFFFu) - 0x38800000u;
  return (uint(from_least <= 0x477FE000u - 0x38800000u) | uint(x == 0)) != 0;
}

// The elements of one row that are dealt to PARTS lanes, span by span.
template <typename Source, typename Of, int PARTS>
struct UnitRun {
  using Encoding = typename Source::Encoding;
  static constant constexpr int width = Of::size / PARTS;
  using Elements = Words<Source, width, least_of(width & -width, 128 / Encoding::bits), false>;
  Elements words[Of::count];

  UnitRun() = default;

  INLINED UnitRun(typename Source::Row row, int first, int part) {
    UNROLLED
    for (int s = 0; s < Of::count; ++s) {
      const int channel = first + s * Of::size + part * width;
      words[s] = Elements(Elements::place(row.data, channel), channel);
    }
  }

  INLINED uint not_finite() const {
    uint bad = 0;
    UNROLLED
    for (int s = 0; s < Of::count; ++s) {
      bad |= words[s].not_finite();
    }
    return bad;
  }
};

// The rows of 8 · COLUMNS keys from `first` on, a multiple of 8, and the scales and zeros of their spans: each is read by one lane, and
// passed on to those whose key it is of.
template <typename Source, typename Of, bool PAIRED, int COLUMNS>
struct UnitTile {
  using Encoding = typename Source::Encoding;
  using Number = typename Encoding::Number;
  static constant constexpr int keys = 8 * COLUMNS;
  static constant constexpr int rounds = (keys * Of::count + 31) / 32;
  Source source;
  int first;
  Lane lane;
  uint units[COLUMNS];
  Number stored_scales[rounds];  // of span j / keys and key j % keys, j the lane's number plus 32 a round
  Number stored_zeros[rounds];
  float scales[Of::count][COLUMNS];  // of the lane's keys, known from `distribute` on
  float zeros[Of::count][COLUMNS];
  bool careful;  // whether elements are decoded

  INLINED UnitTile(Source source, Lane lane) : source(source), lane(lane), careful(false) {}

  INLINED void look(int next, ushort lane_index, int from) {
    first = next;
    UNROLLED
    for (int c = 0; c < COLUMNS; ++c) {
      units[c] = unit_of_eight(source, first + c * 8, lane_index);
    }
    UNROLLED
    for (int i = 0; i < rounds; ++i) {
      stored_scales[i] = Number(0.0f);
      stored_zeros[i] = Number(0.0f);
      if ((i + 1) * 32 <= keys * Of::count || i * 32 + lane_index < keys * Of::count) {
        const int key = lane_index % keys;
        uint unit = units[0];
        UNROLLED
        for (int c = 1; c < COLUMNS; ++c) {
          unit = key >= c * 8 ? units[c] : unit;
        }
        const auto row = row_of(unit, key);
        const int group = Source::Row::group(from + (i * 32 + lane_index) / keys * Of::size);
        stored_scales[i] = row.scales[group];
        if (Encoding::zeroed) {
          stored_zeros[i] = row.zeros[group];
        }
      }
    }
  }

  INLINED int token(int key) const {
    return min(first + key, source.count - 1);
  }

  INLINED typename Source::Row row_of(uint unit, int key) const {
    return source.token_of(unit, token(key));
  }

  // When all has arrived, of which `bad` is 0 if elements are finite: whether none has to be held within its type. Where rows are paired,
  // weights times scales are halves, of which small ones have few bits.
  INLINED bool distribute(uint bad) {
    bool bounded = bad == 0;
    float own_scales[rounds];
    float own_zeros[rounds];
    UNROLLED
    for (int i = 0; i < rounds; ++i) {
      const float stored_scale = float(stored_scales[i]);
      const Scaling<Encoding> own(stored_scale, float(stored_zeros[i]));
      bounded = bounded && own.bounded && (!PAIRED || fits_half(own.scale));
      own_scales[i] = own.scale;
      own_zeros[i] = own.zero;
    }
    UNROLLED
    for (int s = 0; s < Of::count; ++s) {
      UNROLLED
      for (int c = 0; c < COLUMNS; ++c) {
        const ushort reader = ushort(s * keys % 32 + c * 8 + lane.row);
        scales[s][c] = simd_shuffle(own_scales[s * keys / 32], reader);
        zeros[s][c] = simd_shuffle(own_zeros[s * keys / 32], reader);
      }
    }
    return simd_all(bounded);
  }

  INLINED void decode(bool all) {
    careful = all;
  }
};

// Keys as fragments [key, channel].
template <typename Source, typename Operand, int COLUMNS>
struct UnitKeys : UnitTile<Source, Spans<Source, Source::size>, false, COLUMNS> {
  using Encoding = typename Source::Encoding;
  using Of = Spans<Source, Source::size>;
  using Base = UnitTile<Source, Of, false, COLUMNS>;
  using Part = UnitRun<Source, Of, 4>;
  static constant constexpr int apart = 16 / Encoding::bits;
  static constant constexpr int in_span = Of::size / 8;
  Part runs[COLUMNS];

  INLINED UnitKeys(Source source, Lane lane) : Base(source, lane) {}

  INLINED void look(int first, ushort lane_index) {
    Base::look(first, lane_index, 0);
  }

  INLINED void load(ushort) {
    const Lane lane = this->lane;
    UNROLLED
    for (int c = 0; c < COLUMNS; ++c) {
      runs[c] = Part(this->row_of(this->units[c], c * 8 + lane.row), 0, lane.column / 2);
    }
  }

  // When all has arrived: whether nobody has to be careful.
  INLINED bool prepare() {
    uint bad = 0;
    UNROLLED
    for (int c = 0; c < COLUMNS; ++c) {
      bad |= runs[c].not_finite();
    }
    return this->distribute(bad);
  }

  // Of fragment i of a span, two of a lane's elements, `apart` in their row, and of those in the same bytes.
  INLINED uint bytes_of(int c, int s, int i) const {
    return Encoding::bytes(runs[c].words[s].words[i / apart], i % apart / Encoding::in_byte);
  }

  // The channel of a place in fragment i.
  INLINED static int channel(int i, int place) {
    const int run = i / in_span * Of::size + place / 2 * Part::width;
    return run + i % in_span / apart * 2 * apart + i % apart + place % 2 * apart;
  }

  INLINED float alone(int c, int channel) const {
    return this->source.tile(this->token(c * 8 + this->lane.row)).at(0, channel);
  }
};

// Values as fragments [channel, key], of which COUNT from `from` on, a multiple of COUNT, are summed.
template <typename Source, int COLUMNS, int COUNT, bool PAIRED>
struct UnitValues : UnitTile<Source, Spans<Source, COUNT * 8>, PAIRED, COLUMNS> {
  using Encoding = typename Source::Encoding;
  using Operand = typename WeightsInLanes<PAIRED>::Element;
  using Of = Spans<Source, COUNT * 8>;
  using Base = UnitTile<Source, Of, PAIRED, COLUMNS>;
  using Part = UnitRun<Source, Of, 8>;
  static constant constexpr int fragments = padded(Source::size) / 8;
  Part runs[COLUMNS][2];
  int from;

  INLINED UnitValues(Source source, int from, Lane lane) : Base(source, lane), from(from) {}

  INLINED void look(int first, ushort lane_index) {
    Base::look(first, lane_index, from * 8);
  }

  INLINED void load(ushort) {
    const Lane lane = this->lane;
    UNROLLED
    for (int c = 0; c < COLUMNS; ++c) {
      UNROLLED
      for (int e = 0; e < 2; ++e) {
        runs[c][e] = Part(this->row_of(this->units[c], c * 8 + lane.column + e), from * 8, lane.row);
      }
    }
  }

  INLINED bool prepare() {
    uint bad = 0;
    UNROLLED
    for (int c = 0; c < COLUMNS; ++c) {
      bad |= runs[c][0].not_finite() | runs[c][1].not_finite();
    }
    return this->distribute(bad);
  }

  // Of fragment i of a span, a lane's channel of both its keys, and of those in the same bytes: of two words the same half.
  INLINED uint bytes_of(int c, int s, int i) const {
    constexpr int in_half = 16 / Encoding::bits;
    const int half_of = i / in_half % 2;
    const vec<ushort, 2> left = as_type<vec<ushort, 2>>(runs[c][0].words[s].words[i / (2 * in_half)]);
    const vec<ushort, 2> right = as_type<vec<ushort, 2>>(runs[c][1].words[s].words[i / (2 * in_half)]);
    vec<ushort, 2> both;
    both[0] = left[half_of];
    both[1] = right[half_of];
    return Encoding::bytes(as_type<uint>(both), i % in_half / Encoding::in_byte);
  }

  // The channel of a place in fragment i.
  INLINED static int channel(int i, int place) {
    return i / Part::width * Of::size + place * Part::width + i % Part::width;
  }

  // The lane's element of fragment i, of any, of its first or second key.
  INLINED float alone(int c, int e, int i) const {
    return this->source.tile(this->token(c * 8 + this->lane.column + e)).at(0, channel(i, this->lane.row));
  }

  INLINED bool finite() const {
    return !this->careful;
  }
};

// result = keys · own rowsᵀ
template <int BLOCKS, int COLUMNS, typename Own, typename Source, typename Operand>
INLINED void multiply_keys(
    thread Fragment<float> (&result)[BLOCKS][COLUMNS], const thread Own& own,
    const thread UnitKeys<Source, Operand, COLUMNS>& keys) {
  using Keys = UnitKeys<Source, Operand, COLUMNS>;
  clear(result);
  if (keys.careful) {
    ROLLED
    for (int channel = 0; channel < Source::size; ++channel) {
      UNROLLED
      for (int c = 0; c < COLUMNS; ++c) {
        const float x = keys.alone(c, channel);
        UNROLLED
        for (int block = 0; block < BLOCKS; ++block) {
          UNROLLED
          for (int e = 0; e < 2; ++e) {
            result[block][c].thread_elements()[e] = fma(own.element(block, e, channel), x, result[block][c].thread_elements()[e]);
          }
        }
      }
    }
    return;
  }
  UNROLLED
  for (int s = 0; s < Keys::Of::count; ++s) {
    Fragment<float> sums[BLOCKS][COLUMNS];
    clear(sums);
    UNROLLED
    for (int i = 0; i < Keys::in_span; i += Keys::Encoding::in_byte) {
      uint bytes[COLUMNS];
      UNROLLED
      for (int c = 0; c < COLUMNS; ++c) {
        bytes[c] = keys.bytes_of(c, s, i);
      }
      UNROLLED
      for (int e = 0; e < Keys::Encoding::in_byte; ++e) {
        UNROLLED
        for (int c = 0; c < COLUMNS; ++c) {
          const Fragment<Operand> operand = units_of<typename Keys::Encoding, Operand>(bytes[c], e);
          UNROLLED
          for (int block = 0; block < BLOCKS; ++block) {
            simdgroup_multiply_accumulate(sums[block][c], operand, own.kept[block][s * Keys::in_span + i + e], sums[block][c]);
          }
        }
      }
    }
    UNROLLED
    for (int block = 0; block < BLOCKS; ++block) {
      UNROLLED
      for (int c = 0; c < COLUMNS; ++c) {
        UNROLLED
        for (int e = 0; e < 2; ++e) {
          const float sum = sums[block][c].thread_elements()[e] * own.units[block][e];
          const float x = fma(sum, keys.scales[s][c], result[block][c].thread_elements()[e]);
          result[block][c].thread_elements()[e] = fma(own.sums[block][s][e], keys.zeros[s][c], x);
        }
      }
    }
  }
}

// sums += (values less their zeros)ᵀ · weights
template <int BLOCKS, int COLUMNS, int COUNT, typename Source, bool PAIRED>
INLINED void accumulate_values(
    thread Fragment<float> (&sums)[BLOCKS][COUNT], const thread Fragment<float> (&weights)[BLOCKS][COLUMNS],
    const thread UnitValues<Source, COLUMNS, COUNT, PAIRED>& values, int) {
  using Values = UnitValues<Source, COLUMNS, COUNT, PAIRED>;
  constexpr int in_span = Values::Of::size / 8;
  UNROLLED
  for (int s = 0; s < Values::Of::count; ++s) {
    Fragment<typename Values::Operand> scaled[BLOCKS][COLUMNS];
    UNROLLED
    for (int block = 0; block < BLOCKS; ++block) {
      UNROLLED
      for (int c = 0; c < COLUMNS; ++c) {
        UNROLLED
        for (int e = 0; e < 2; ++e) {
          const float weight = weights[block][c].thread_elements()[e] * values.scales[s][c];
          scaled[block][c].thread_elements()[e] = WeightsInLanes<PAIRED>::of(weight, values.lane);
        }
      }
    }
    UNROLLED
    for (int c = 0; c < COLUMNS; ++c) {
      UNROLLED
      for (int i = 0; i < in_span; i += Values::Encoding::in_byte) {
        const uint bytes = values.bytes_of(c, s, i);
        UNROLLED
        for (int e = 0; e < Values::Encoding::in_byte; ++e) {
          const Fragment<typename Values::Operand> operand = units_of<typename Values::Encoding, typename Values::Operand>(bytes, e);
          UNROLLED
          for (int block = 0; block < BLOCKS; ++block) {
            const int at = s * in_span + i + e;
            simdgroup_multiply_accumulate(sums[block][at], operand, scaled[block][c], sums[block][at]);
          }
        }
      }
    }
  }
}

// The zeros of all channels of a span come to the same: a sum of a lane's own keys.
template <int BLOCKS, int COLUMNS, int COUNT, typename Source, int SPANS, bool PAIRED>
INLINED void accumulate_zeros(
    thread float (&sums)[BLOCKS][SPANS][2], const thread Fragment<float> (&weights)[BLOCKS][COLUMNS],
    const thread UnitValues<Source, COLUMNS, COUNT, PAIRED>& values) {
  UNROLLED
  for (int block = 0; block < BLOCKS; ++block) {
    UNROLLED
    for (int s = 0; s < SPANS; ++s) {
      UNROLLED
      for (int c = 0; c < COLUMNS; ++c) {
        UNROLLED
        for (int e = 0; e < 2; ++e) {
          sums[block][s][e] = fma(weights[block][c].thread_elements()[e], values.zeros[s][c], sums[block][s][e]);
        }
      }
    }
  }
}

// Values that are decoded have no zeros left.
template <typename Zeros, typename Weights, typename Values>
INLINED void accumulate_zeros(thread Zeros&, const thread Weights&, const thread Values&) {}

// The operand that units become: half for queries of 16 bits, else float32.
template <typename T>
struct OperandOf {
  using Type = half;
};

template <>
struct OperandOf<float> {
  using Type = float;
};

// By what a row of queries is multiplied to become one of operands, where `largest` is the lane's largest number of it.
template <typename T, typename Operand>
struct RowsInLanes {
  INLINED static float parts(float) {
    return 1;
  }
};

// The row's largest number comes to 2^14 or more: what half has no bits for is 2^-28 of it or less.
template <>
struct RowsInLanes<bfloat, half> {
  INLINED static float parts(float largest) {
    const int exponent = int(as_type<uint>(max_along_column(largest)) >> 23);
    return as_type<float>(uint(min(268 - exponent, 253)) << 23);
  }
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
  using Tile = UnitKeys<typename Types::Key, Operand, COLUMNS>;
};

template <typename Types, int COUNT, bool UNITS, bool PAIRED>
struct ValuesInLanes {
  static_assert(!PAIRED, "the weights of paired rows are halves, and what is decoded is not");
  static constant constexpr int spans = 1;
  template <int COLUMNS>
  using Tile = LaneValues<typename Types::Value, COLUMNS, COUNT>;
};

template <typename Types, int COUNT, bool PAIRED>
struct ValuesInLanes<Types, COUNT, true, PAIRED> {
  static constant constexpr int spans = Spans<typename Types::Value, COUNT * 8>::count;
  template <int COLUMNS>
  using Tile = UnitValues<typename Types::Value, COLUMNS, COUNT, PAIRED>;
};
