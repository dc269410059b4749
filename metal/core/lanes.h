// Fragments for a kernel whose simdgroups share no rows: straight from device memory to the lanes that need them. Each lane reads
// runs of channels that lie side by side, no byte is read twice, and what lanes have in common one of them reads for all.
//
// Scores stand as [key, row] and sums of values as [channel, row]: keys and values are the left factor of products, and what is known of
// a row is known of a column of fragments. A product does not mind in which order its terms come, nor a sum where its rows stand: a
// lane's run fills places of all fragments, so that own rows are taken, and sums are stored, in that order.
#pragma once

#include "core/product.h"
#include "core/stored.h"

// The channels of one row that are dealt out to PARTS lanes, of which MOST or fewer are read at once.
template <typename Source, int PARTS, int MOST = 8>
struct Run {
  using Encoding = typename Source::Encoding;
  using Row = typename Source::Row;
  static constant constexpr int width = padded(Source::size) / PARTS;
  static constant constexpr int channels = Encoding::channels;
  static constant constexpr bool ragged = padded(Source::size) != Source::size;

  // how many elements a lane reads at once
  INLINED static constexpr bool fits(int n) {
    return !ragged && n <= MOST && n <= Encoding::most && width % n == 0;
  }
  static constant constexpr int together = fits(8) ? 8 : (fits(4) ? 4 : (fits(2) ? 2 : 1));

  // lanes whose runs share a scale, or the scales of a run, or neither
  static constant constexpr bool shared = Row::groups == 1 || channels % width == 0;
  static constant constexpr bool kept = shared || width % (channels == 0 ? 1 : channels) == 0;
  static constant constexpr int per_scale = shared || !kept ? width : channels;
  static constant constexpr int count = width / per_scale;

  Row row;
  int first;  // channel
  float scales[count];
  float zeros[count];

  // Which part reads the scale that a part needs.
  INLINED static int reader_of(int part) {
    return Row::groups == 1 ? 0 : (shared ? part * width / channels * channels / width : part);
  }

  Run() = default;

  // `reader` is the lane of the part that reads for this one.
  INLINED Run(Row row, int part, ushort reader) : row(row), first(part * width) {
    UNROLLED
    for (int i = 0; i < count; ++i) {
      scales[i] = Encoding::scaled && kept ? taken(row.scales, part, i, reader) : 1.0f;
      zeros[i] = Encoding::zeroed && kept ? taken(row.zeros, part, i, reader) : 0.0f;
    }
  }

  INLINED float taken(device const typename Encoding::Number* x, int part, int i, ushort reader) const {
    float result = 0;
    if (!shared || part == reader_of(part)) {
      if (first + i * per_scale < Source::size) {
        result = float(x[Row::group(first + i * per_scale)]);
      }
    }
    return shared ? simd_shuffle(result, reader) : result;
  }

  INLINED typename Encoding::Word word(int i) const {
    if (!ragged || first + i < Source::size) {
      return Encoding::template load<together>(row.data, first + i);
    }
    return typename Encoding::Word(0);
  }

  // The scale or zero of channel i: chosen, as an index that is not known to the compiler would place the array in memory.
  INLINED static float of_channel(const thread float (&x)[count], int i) {
    float result = x[0];
    UNROLLED
    for (int k = 1; k < count; ++k) {
      result = i / per_scale == k ? x[k] : result;
    }
    return result;
  }

  // Channel i of the run, element e of a word.
  INLINED float element(typename Encoding::Word word, int i, int e) const {
    if (!kept) {
      return alone(i);
    }
    if (ragged && first + i >= Source::size) {
      return 0;
    }
    const float mean = Encoding::centred ? float(row.means[first + i]) : 0.0f;
    return decoded<Encoding>(Encoding::number(word, e), of_channel(scales, i), of_channel(zeros, i), mean);
  }

  // The same of any channel, read for itself.
  INLINED float alone(int i) const {
    const int channel = first + i;
    if (ragged && channel >= Source::size) {
      return 0;
    }
    const int group = Row::group(channel);
    return decoded<Encoding>(
        Encoding::number(Encoding::template load<1>(row.data, channel), 0),
        Encoding::scaled ? float(row.scales[group]) : 1.0f, Encoding::zeroed ? float(row.zeros[group]) : 0.0f,
        Encoding::centred ? float(row.means[channel]) : 0.0f);
  }

  // 0, or NaN where an element is not finite.
  INLINED float spoilt() const {
    float result = 0;
    if (Encoding::always_finite && kept && !Encoding::centred) {
      UNROLLED
      for (int i = 0; i < count; ++i) {
        result = fma(scales[i], 0.0f, fma(zeros[i], 0.0f, result));
      }
      return result;
    }
    UNROLLED
    for (int i = 0; i < width; i += together) {
      const auto x = word(i);
      UNROLLED
      for (int e = 0; e < together; ++e) {
        result = fma(element(x, i + e, e), 0.0f, result);
      }
    }
    return result;
  }
};

// The row or page of 8 rows from a multiple of 8 on, looked up once for the simdgroup.
template <typename Source>
INLINED uint unit_of_eight(const thread Source& source, int first, ushort lane_index) {
  if (Source::page == 0) {
    return source.unit(first);
  }
  uint result = 0;
  if (lane_index == 0) {
    result = source.unit(first);
  }
  return simd_shuffle(result, ushort(0));
}

// 8 · COLUMNS keys from `first` on, a multiple of 8, as fragments [key, channel].
template <typename Source, typename Operand, int COLUMNS>
struct LaneKeys {
  using Part = Run<Source, 4>;
  static constant constexpr int count = padded(Source::size) / 8;
  Source source;
  Lane lane;
  int first;
  Part runs[COLUMNS];

  INLINED LaneKeys(Source source, Lane lane) : source(source), lane(lane) {}

  INLINED void look(int next, ushort) {
    first = next;
  }

  INLINED void load(ushort lane_index) {
    UNROLLED
    for (int c = 0; c < COLUMNS; ++c) {
      const uint unit = unit_of_eight(source, first + c * 8, lane_index);
      const int at = min(first + c * 8 + lane.row, source.count - 1);
      const int part = lane.column / 2;
      runs[c] = Part(source.token_of(unit, at), part, lane_of(lane.row, Part::reader_of(part) * 2));
    }
  }

  INLINED bool prepare() {
    return true;
  }

  INLINED void decode(bool) {}

  // The channel of a place in fragment i.
  INLINED static int channel(int i, int place) {
    return place / 2 * Part::width + 2 * i + place % 2;
  }
};

// As many values as fragments [channel, key], of float32 as weights are; COUNT are summed.
template <typename Source, int COLUMNS, int COUNT>
struct LaneValues {
  using Part = Run<Source, 8, (COUNT & -COUNT)>;
  static constant constexpr int fragments = padded(Source::size) / 8;
  Source source;
  Lane lane;
  int first;
  Part runs[COLUMNS][2];

  INLINED LaneValues(Source source, int, Lane lane) : source(source), lane(lane) {}

  INLINED void look(int next, ushort) {
    first = next;
  }

  INLINED void load(ushort lane_index) {
    UNROLLED
    for (int c = 0; c < COLUMNS; ++c) {
      const uint unit = unit_of_eight(source, first + c * 8, lane_index);
      UNROLLED
      for (int e = 0; e < 2; ++e) {
        const int at = min(first + c * 8 + lane.column + e, source.count - 1);
        runs[c][e] = Part(source.token_of(unit, at), lane.row, lane_of(Part::reader_of(lane.row), lane.column));
      }
    }
  }

  INLINED bool prepare() {
    return true;
  }

  INLINED void decode(bool) {}

  // The channel of a place in fragment i.
  INLINED static int channel(int i, int place) {
    return place * Part::width + i;
  }

  // The lane's element of fragment i, of any, of its first or second key.
  INLINED float alone(int c, int e, int i) const {
    return e == 0 ? runs[c][0].alone(i) : runs[c][1].alone(i);
  }

  INLINED bool finite() const {
    float zero = 0;
    UNROLLED
    for (int c = 0; c < COLUMNS; ++c) {
      zero += runs[c][0].spoilt() + runs[c][1].spoilt();
    }
    return simd_all(zero == 0);
  }
};

// result = keys · own rowsᵀ
template <int BLOCKS, int COLUMNS, typename Own, typename Source, typename Operand>
INLINED void multiply_keys(
    thread Fragment<float> (&result)[BLOCKS][COLUMNS], const thread Own& own,
    const thread LaneKeys<Source, Operand, COLUMNS>& keys) {
  using Keys = LaneKeys<Source, Operand, COLUMNS>;
  using Part = typename Keys::Part;
  // an odd number in a word is one: two of them make a fragment
  constexpr int pairs = Part::together == 1 ? 1 : Part::together / 2;
  clear(result);
  UNROLLED
  for (int i = 0; i < Keys::count; i += pairs) {
    UNROLLED
    for (int c = 0; c < COLUMNS; ++c) {
      const auto word = keys.runs[c].word(2 * i);
      const auto other = Part::together == 1 ? keys.runs[c].word(2 * i + 1) : word;
      UNROLLED
      for (int e = 0; e < pairs; ++e) {
        const int at = 2 * (i + e);
        const float x = keys.runs[c].element(word, at, 2 * e);
        const float y = keys.runs[c].element(other, at + 1, Part::together == 1 ? 0 : 2 * e + 1);
        const Fragment<Operand> operand = fragment_of<Operand>(Operand(x), Operand(y));
        UNROLLED
        for (int block = 0; block < BLOCKS; ++block) {
          simdgroup_multiply_accumulate(result[block][c], operand, own.kept[block][i + e], result[block][c]);
        }
      }
    }
  }
}

// sums += valuesᵀ · weights, of fragments from `from` on
template <int BLOCKS, int COLUMNS, int COUNT, typename Source>
INLINED void accumulate_values(
    thread Fragment<float> (&sums)[BLOCKS][COUNT], const thread Fragment<float> (&weights)[BLOCKS][COLUMNS],
    const thread LaneValues<Source, COLUMNS, COUNT>& values, int from) {
  using Values = LaneValues<Source, COLUMNS, COUNT>;
  constexpr int together = Values::Part::together;
  constexpr int width = Values::fragments;
  UNROLLED
  for (int c = 0; c < COLUMNS; ++c) {
    UNROLLED
    for (int i = 0; i < COUNT; i += together) {
      // the last slice may be narrower, unless all are alike
      if ((COUNT < width && width % COUNT == 0) || from + i < width) {
        const auto left = values.runs[c][0].word(from + i);
        const auto right = values.runs[c][1].word(from + i);
        UNROLLED
        for (int e = 0; e < together; ++e) {
          const Fragment<float> operand = fragment_of<float>(
              values.runs[c][0].element(left, from + i + e, e), values.runs[c][1].element(right, from + i + e, e));
          UNROLLED
          for (int block = 0; block < BLOCKS; ++block) {
            simdgroup_multiply_accumulate(sums[block][i + e], operand, weights[block][c], sums[block][i + e]);
          }
        }
      }
    }
  }
}

// The same element by element, so that NaN and infinity reach those only whose pair is present: rare, hence small.
template <int BLOCKS, int COUNT, typename Values>
INLINED void accumulate_present_values(
    thread Fragment<float> (&sums)[BLOCKS][COUNT], const thread Fragment<float> (&weights)[BLOCKS][1], const thread Values& values,
    int from, Lane lane) {
  ROLLED
  for (int i = 0; i < COUNT; ++i) {
    if (from + i < Values::fragments) {
      const float left = values.alone(0, 0, from + i);
      const float right = values.alone(0, 1, from + i);
      ROLLED
      for (int k = 0; k < 8; ++k) {
        const float even = simd_shuffle(left, lane_of(lane.row, k));
        const float odd = simd_shuffle(right, lane_of(lane.row, k));
        UNROLLED
        for (int block = 0; block < BLOCKS; ++block) {
          UNROLLED
          for (int e = 0; e < 2; ++e) {
            const float weight = simd_shuffle(float(weights[block][0].thread_elements()[e]), lane_of(k, lane.column));
            if (!is_absent(weight)) {
              sums[block][0].thread_elements()[e] += weight * ((k & 1) ? odd : even);
            }
          }
        }
      }
    }
    rotate(sums);
  }
}
