// Fragments for a kernel whose simdgroups share no rows: straight from device memory to the lanes that need them. Each lane reads
// runs of channels that lie side by side, no byte is read twice, and what lanes have in common one of them reads for all.
//
// A product does not mind in which order its terms come, nor a sum where its columns stand: a lane's run fills one place of all
// fragments, so that own rows are taken, and sums are stored, in that order.
#pragma once

#include "core/product.h"
#include "core/stored.h"

// The channels of one row that are dealt out to PARTS lanes.
template <typename Source, int PARTS>
struct Run {
  using Encoding = typename Source::Encoding;
  using Row = typename Source::Row;
  static constant constexpr int width = padded(Source::size) / PARTS;
  static constant constexpr int channels = Encoding::channels;
  static constant constexpr bool ragged = padded(Source::size) != Source::size;

  // how many elements a lane reads at once
  INLINED static constexpr bool fits(int n) {
    return !ragged && n <= Encoding::most && width % n == 0;
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

// 8 · COLUMNS keys from `first` on, a multiple of 8, as transposed fragments.
template <typename Source, typename Operand, int COLUMNS>
struct LaneKeys {
  using Part = Run<Source, 8>;
  Part runs[COLUMNS][2];

  INLINED LaneKeys(Source source, int first, ushort lane_index, Lane lane) {
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
};

// As many values, as fragments that lie straight.
template <typename Source, typename Operand, int COLUMNS>
struct LaneValues {
  using Part = Run<Source, 4>;
  static constant constexpr int fragments = padded(Source::size) / 8;
  Part runs[COLUMNS];

  INLINED LaneValues(Source source, int first, ushort lane_index, Lane lane, int = 0) {
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

  // The channel of a lane's first element in fragment i.
  INLINED static int channel(int i, Lane lane) {
    return lane.column / 2 * Part::width + 2 * i;
  }

  // Fragment i of eight rows, for rare use: of any i.
  INLINED Fragment<Operand> straight(int c, int i) const {
    const Part run = runs[COLUMNS == 1 ? 0 : c];
    float x[2];
    UNROLLED
    for (int e = 0; e < 2; ++e) {
      x[e] = run.alone(2 * i + e);
    }
    return fragment_of<Operand>(Operand(x[0]), Operand(x[1]));
  }

  INLINED bool finite() const {
    float zero = 0;
    UNROLLED
    for (int c = 0; c < COLUMNS; ++c) {
      zero += runs[c].spoilt();
    }
    return simd_all(zero == 0);
  }
};

// result = own rows · keysᵀ
template <int BLOCKS, int COLUMNS, typename Own, typename Source, typename Operand>
INLINED void multiply_rows(
    thread Fragment<float> (&result)[BLOCKS][COLUMNS], const thread Own& own,
    const thread LaneKeys<Source, Operand, COLUMNS>& keys) {
  using Part = Run<Source, 8>;
  clear(result);
  UNROLLED
  for (int i = 0; i < Part::width; i += Part::together) {
    UNROLLED
    for (int c = 0; c < COLUMNS; ++c) {
      const auto left = keys.runs[c][0].word(i);
      const auto right = keys.runs[c][1].word(i);
      UNROLLED
      for (int e = 0; e < Part::together; ++e) {
        const Fragment<Operand> operand = fragment_of<Operand>(
            Operand(keys.runs[c][0].element(left, i + e, e)), Operand(keys.runs[c][1].element(right, i + e, e)));
        UNROLLED
        for (int block = 0; block < BLOCKS; ++block) {
          simdgroup_multiply_accumulate(result[block][c], own.at(block, i + e), operand, result[block][c]);
        }
      }
    }
  }
}

// sums += weights · values, of whose WIDTH fragments those from `from` on
template <int WIDTH, int BLOCKS, int COLUMNS, int COUNT, typename Source, typename Operand>
INLINED void accumulate(
    thread Fragment<float> (&sums)[BLOCKS][COUNT], const thread Fragment<float> (&weights)[BLOCKS][COLUMNS],
    const thread LaneValues<Source, Operand, COLUMNS>& values, int from) {
  using Part = Run<Source, 4>;
  // an odd number in a word is one: two of them make a fragment
  constexpr int pairs = Part::together == 1 ? 1 : Part::together / 2;
  UNROLLED
  for (int c = 0; c < COLUMNS; ++c) {
    UNROLLED
    for (int i = 0; i < COUNT; i += pairs) {
      if ((COUNT < WIDTH && WIDTH % COUNT == 0) || from + i < WIDTH) {
        const int at = 2 * (from + i);
        const auto word = values.runs[c].word(at);
        const auto other = Part::together == 1 ? values.runs[c].word(at + 1) : word;
        UNROLLED
        for (int e = 0; e < pairs; ++e) {
          const float x = values.runs[c].element(word, at + 2 * e, 2 * e);
          const float y = values.runs[c].element(other, at + 2 * e + 1, Part::together == 1 ? 0 : 2 * e + 1);
          const Fragment<Operand> operand = fragment_of<Operand>(Operand(x), Operand(y));
          UNROLLED
          for (int block = 0; block < BLOCKS; ++block) {
            simdgroup_multiply_accumulate(sums[block][i + e], weights[block][c], operand, sums[block][i + e]);
          }
        }
      }
    }
  }
}
