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

  INLINED LaneValues(Source source, int first, ushort lane_index, Lane lane) {
    UNROLLED
    for (int c = 0; c < COLUMNS; ++c) {
      const uint unit = unit_of_eight(source, first + c * 8, lane_index);
      const int at = min(first + c * 8 + lane.row, source.count - 1);
      const int part = lane.column / 2;
      runs[c] = Part(source.token_of(unit, at), part, lane_of(lane.row, Part::reader_of(part) * 2));
    }
  }

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

constexpr int log2_of(int x) {
  int result = 0;
  for (; x > 1; x /= 2) {
    ++result;
  }
  return result;
}

constexpr int least_of(int x, int y) {
  return x < y ? x : y;
}

// Without the matrix unit: the channels of one row that belong to a lane where LANES share it, as they are stored.
template <typename Source, int LANES>
struct Share {
  using Encoding = typename Source::Encoding;
  using Row = typename Source::Row;
  static constant constexpr int size = Source::size;
  static constant constexpr int width = ((size + LANES - 1) / LANES + 7) / 8 * 8;
  static constant constexpr int bits = Encoding::bits;
  static constant constexpr int in_word = 32 / bits;
  static constant constexpr int count = width / in_word;
  // elements loaded at once, 16 bytes at most
  static constant constexpr int together = least_of(size % 8 == 0 ? 8 : (size % 4 == 0 ? 4 : (size % 2 == 0 ? 2 : 1)), 128 / bits);
  static constant constexpr bool ragged = width * LANES != size;

  // Lanes side by side that have the same scale; 0 where one lane has several. Sums are scaled where these are a power of two.
  static constant constexpr int channels = Encoding::channels;
  static constant constexpr int sharing =
      channels == 0 ? LANES : (channels % width != 0 ? 0 : least_of(channels / width, LANES));
  static constant constexpr bool factored = !Encoding::centred && sharing != 0 && (sharing & (sharing - 1)) == 0;
  static constant constexpr int late = factored ? log2_of(LANES / sharing) : 0;

  uint words[count];

  Share() = default;

  INLINED Share(Row row, int first) {
    UNROLLED
    for (int i = 0; i < count; ++i) {
      words[i] = 0;
    }
    UNROLLED
    for (int i = 0; i < width; i += together) {
      if (!ragged || first + i < size) {
        load(row, first, i);
      }
    }
  }

  INLINED void load(Row row, int first, int i) {
    constexpr int loaded = together * bits;
    device const uchar* at = reinterpret_cast<device const uchar*>(row.data) + (first + i) * bits / 8;
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

  INLINED float unit(int i) const {
    return Encoding::unit(words[i / in_word], i % in_word);
  }

  INLINED static constexpr float factor(int i) {
    return Encoding::factor(i % in_word);
  }

  INLINED uint not_finite() const {
    uint result = 0;
    UNROLLED
    for (int i = 0; i < count; ++i) {
      result |= Encoding::not_finite(words[i]);
    }
    return result;
  }

  // Whether no element of such a scale and zero has to be held within its type.
  INLINED static bool bounded(float scale, float zero) {
    return fma(fabs(scale), float(Encoding::levels), fabs(zero)) <= largest_number(typename Encoding::Number(0.0f));
  }

  // Element i with all that lies beside it, divided by its factor.
  INLINED float decoded_at(Row row, int first, int i) const {
    const int channel = min(first + i, size - 1);
    const int group = Row::group(channel);
    const float x = decoded<Encoding>(
        Encoding::number(words[i / in_word], i % in_word), Encoding::scaled ? float(row.scales[group]) : 1.0f,
        Encoding::zeroed ? float(row.zeros[group]) : 0.0f, Encoding::centred ? float(row.means[channel]) : 0.0f);
    return x * (1.0f / factor(i));
  }
};

// Sums over LANES lanes that share keys. Each has the products of its channels, of ROWS query rows and STEPS keys, and ends with the
// sums of one query row. In each stage two lanes, whose numbers differ in one bit, exchange halves of what they have. Where query rows
// are halved, nobody chooses: place r of a lane is its row `r ^ turn`, so that all keep the first half. The LATE last stages unite lanes
// of different scales; query rows are halved there if possible, so that a lane's sums before them are of one key.
template <int ROWS, int STEPS, int LANES, int LATE>
struct Deal {
  static constant constexpr int count = ROWS * STEPS;
  static constant constexpr int stages = log2_of(LANES);
  static constant constexpr int held = count > LANES ? count / LANES : 1;  // sums of a lane in the end
  static constant constexpr int halvings = log2_of(count / held);          // in further stages, lanes get the same sum
  static constant constexpr int row_bits = log2_of(ROWS);
  static constant constexpr int spare = stages - halvings;
  static constant constexpr int late = least_of(LATE > spare ? LATE - spare : 0, row_bits);
  static constant constexpr int early = row_bits - late;

  int part;

  INLINED static constexpr bool of_rows(int stage) {
    return stage < early || stage >= halvings - late;
  }

  INLINED static constexpr int index(int row, int step) {
    return (((((row >> late) * (STEPS / held)) + step / held) << late) | (row & ((1 << late) - 1))) * held + step % held;
  }

  // The bit of a query row's number that a stage halves.
  INLINED static constexpr int row_bit(int stage) {
    return stage < early ? row_bits - 1 - stage : halvings - 1 - stage;
  }

  INLINED static constexpr int turn_of(int part) {
    int result = 0;
    for (int stage = 0; stage < halvings; ++stage) {
      result |= of_rows(stage) ? ((part >> stage) & 1) << row_bit(stage) : 0;
    }
    return result;
  }

  // The inverse: by which bits lanes differ whose query rows differ by those of `row`.
  INLINED static constexpr int lanes_of(int row) {
    int result = 0;
    for (int stage = 0; stage < halvings; ++stage) {
      result |= of_rows(stage) ? ((row >> row_bit(stage)) & 1) << stage : 0;
    }
    return result;
  }

  INLINED int turn() const {
    return turn_of(part);
  }

  // Sums that a lane has after so many stages.
  INLINED static constexpr int left_after(int stage) {
    return count >> stage > held ? count >> stage : held;
  }

  // The step of sum i of those.
  INLINED int step_of(int i, int stage_count) const {
    int result = 0;
    UNROLLED
    for (int stage = early; stage < halvings - late; ++stage) {
      const int bit = stage < stage_count ? (part >> stage) & 1 : (i >> (log2_of(count) - 1 - stage)) & 1;
      result = result * 2 + bit;
    }
    return result * held + i % held;
  }

  // The place of its query row.
  INLINED static constexpr int row_of(int i, int stage_count) {
    int result = 0;
    for (int stage = stage_count; stage < halvings; ++stage) {
      result |= of_rows(stage) ? ((i >> (log2_of(count) - 1 - stage)) & 1) << row_bit(stage) : 0;
    }
    return result;
  }

  // The bits of query rows that are not yet halved.
  INLINED static constexpr int rows_left_after(int stage_count) {
    int result = 0;
    for (int stage = stage_count; stage < halvings; ++stage) {
      result |= of_rows(stage) ? 1 << row_bit(stage) : 0;
    }
    return result;
  }

  INLINED void fold(thread float (&x)[count], int stage) const {
    const int n = left_after(stage + 1);
    const bool upper = (part >> stage) & 1;
    UNROLLED
    for (int i = 0; i < count; ++i) {
      if (i >= n) {
        continue;
      }
      if (stage >= halvings) {
        x[i] += simd_shuffle_xor(x[i], ushort(1 << stage));
      } else if (of_rows(stage)) {
        x[i] += simd_shuffle_xor(x[(i + n) % count], ushort(1 << stage));
      } else {
        const float other = x[(i + n) % count];
        const float given = upper ? x[i] : other;
        x[i] = (upper ? other : x[i]) + simd_shuffle_xor(given, ushort(1 << stage));
      }
    }
  }

  // The inverse of a stage: both lanes get what either has.
  INLINED void spread(thread float (&x)[count], int stage) const {
    const int n = left_after(stage + 1);
    const bool upper = (part >> stage) & 1;
    UNROLLED
    for (int i = 0; i < count; ++i) {
      if (i >= n || stage >= halvings) {
        continue;
      }
      const float own = x[i];
      const float other = simd_shuffle_xor(own, ushort(1 << stage));
      x[i] = upper && !of_rows(stage) ? other : own;
      x[(i + n) % count] = upper && !of_rows(stage) ? own : other;
    }
  }

  // Over all lanes that have the same query row.
  INLINED static float max_of_row(float x) {
    UNROLLED
    for (int stage = 0; stage < 5; ++stage) {
      if (stage >= stages || (stage < halvings && !of_rows(stage))) {
        x = max(x, simd_shuffle_xor(x, ushort(1 << stage)));
      }
    }
    return x;
  }

  // The same of what lanes have after so many stages.
  INLINED static float sum_of_row(float x, int stage_count) {
    UNROLLED
    for (int stage = 0; stage < 5; ++stage) {
      if (stage >= stages || (stage < halvings && stage < stage_count && !of_rows(stage))) {
        x += simd_shuffle_xor(x, ushort(1 << stage));
      }
    }
    return x;
  }
};

// The row or page in which each eight of a tile lies. Each lane looks up the page of one of 32 eights, from `begin` on.
template <typename Source, int EIGHTS>
struct Units {
  Source source;
  int begin;
  int last;
  ushort lane_index;
  uint looked_up;
  uint of[EIGHTS];

  INLINED Units(Source source, int begin, int last, ushort lane_index)
      : source(source), begin(begin), last(last), lane_index(lane_index), looked_up(0) {}

  INLINED void turn_to(int first) {
    if (Source::page != 0 && (first - begin) % 256 == 0) {
      looked_up = source.unit(min(first + lane_index * 8, last));
    }
    UNROLLED
    for (int e = 0; e < EIGHTS; ++e) {
      of[e] = Source::page != 0 ? simd_shuffle(looked_up, ushort(((first - begin) / 8 + e) & 31)) : source.row;
    }
  }
};

// STEPS times 32 / LANES rows of a source: a lane's shares of them, and the scales of the sums that it has after `stages`.
template <typename Source, typename Deals, int STEPS, int LANES>
struct Shares {
  using Part = Share<Source, LANES>;
  using Row = typename Part::Row;
  using Encoding = typename Source::Encoding;
  using Number = typename Encoding::Number;
  static constant constexpr int tokens = 32 / LANES;
  static constant constexpr int eights = STEPS * tokens / 8;
  static constant constexpr int stages = Deals::stages - Part::late;  // that unite lanes of one scale
  static constant constexpr int left = Deals::left_after(stages);
  Source source;
  Deals deal;
  int slot;     // which row of a step is the lane's
  int channel;  // the lane's first
  Part parts[STEPS];
  Number stored_scales[left];  // of lanes of different query rows, the first reads for all
  Number stored_zeros[left];
  float scales[left];  // known from `factored` on
  float zeros[left];   // what a unit of 0 stands for

  INLINED Shares(Source source, Deals deal, int slot) : source(source), deal(deal), slot(slot), channel(deal.part * Part::width) {}

  // The bits by which lanes differ that have sums of the same key and scale.
  INLINED static constexpr int alike() {
    int result = 0;
    for (int stage = 0; stage < stages; ++stage) {
      result |= stage >= Deals::halvings || Deals::of_rows(stage) ? 1 << stage : 0;
    }
    return result;
  }

  INLINED void take(int i, Row row) {
    stored_scales[i] = Number(0.0f);
    stored_zeros[i] = Number(0.0f);
    if ((deal.part & alike()) == 0) {
      const int group = Row::group(min(channel, Source::size - 1));
      stored_scales[i] = row.scales[group];
      if (Encoding::zeroed) {
        stored_zeros[i] = row.zeros[group];
      }
    }
  }

  // The rows from `first` on, a multiple of 8, of which none after `last` is looked at. `units` says in which row or page each
  // eight lies.
  INLINED void load(int first, int last, const thread uint (&units)[eights]) {
    Row rows[eights];
    int begins[eights];
    UNROLLED
    for (int e = 0; e < eights; ++e) {
      begins[e] = min(first + e * 8, last & ~7);
      rows[e] = source.token_of(units[e], begins[e]);
    }
    UNROLLED
    for (int s = 0; s < STEPS; ++s) {
      const int e = s * tokens / 8;
      const int by = min(first + s * tokens + slot, last) - begins[e];
      parts[s] = Part(source.token_after(rows[e], begins[e], by), channel);
    }
    UNROLLED
    for (int i = 0; i < left; ++i) {
      if (Encoding::scaled && Part::factored) {
        const int at = deal.step_of(i, stages) * tokens;
        const int by = min(first + at + slot, last) - begins[0];
        take(i, eights == 1 ? source.token_after(rows[0], begins[0], by) : row_at(first, last, at, units));
      }
    }
  }

  // The lane's row of the step from row `at` on.
  INLINED Row row_at(int first, int last, int at, const thread uint (&units)[eights]) const {
    uint unit = units[0];
    UNROLLED
    for (int e = 1; e < eights; ++e) {
      unit = at >= e * 8 ? units[e] : unit;
    }
    return source.token_of(unit, min(first + at + slot, last));
  }

  // Whether scales may be applied to sums, in the whole simdgroup: all elements are finite, and within their type.
  INLINED bool factored(bool finite) {
    if (!Part::factored) {
      return false;
    }
    bool result = true;
    UNROLLED
    for (int i = 0; i < left; ++i) {
      if (Encoding::scaled) {
        const ushort reader = ushort(slot * LANES + (deal.part & ~alike()));
        scales[i] = simd_shuffle(float(stored_scales[i]), reader);
        const float zero = Encoding::zeroed ? simd_shuffle(float(stored_zeros[i]), reader) : 0.0f;
        zeros[i] = fma(scales[i], Encoding::middle, zero);
        result = result && Part::bounded(scales[i], zero);
      }
    }
    if (!finite) {
      uint bad = 0;
      UNROLLED
      for (int s = 0; s < STEPS; ++s) {
        bad |= parts[s].not_finite();
      }
      result = result && bad == 0;
    }
    return (finite && !Encoding::scaled) || simd_all(result);
  }
};
