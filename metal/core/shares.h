// Rows for a kernel without the matrix unit, whose lanes share keys: each lane's channels of a row, and sums over the lanes that share
// it.
#pragma once

#include "core/words.h"

constexpr int log2_of(int x) {
  int result = 0;
  for (; x > 1; x /= 2) {
    ++result;
  }
  return result;
}

// The channels of one row that belong to a lane where LANES share it, as they are stored.
template <typename Source, int LANES>
struct Share {
  using Encoding = typename Source::Encoding;
  using Row = typename Source::Row;
  static constant constexpr int size = Source::size;
  static constant constexpr int width = ((size + LANES - 1) / LANES + 7) / 8 * 8;
  static constant constexpr int bits = Encoding::bits;
  // elements loaded at once, 16 bytes at most
  static constant constexpr int together = least_of(size % 8 == 0 ? 8 : (size % 4 == 0 ? 4 : (size % 2 == 0 ? 2 : 1)), 128 / bits);
  static constant constexpr bool ragged = width * LANES != size;

  // Lanes side by side that have the same scale; 0 where one lane has several. Sums are scaled where these are a power of two.
  static constant constexpr int channels = Encoding::channels;
  static constant constexpr int sharing =
      channels == 0 ? LANES : (channels % width != 0 ? 0 : least_of(channels / width, LANES));
  static constant constexpr bool factored = !Encoding::centred && sharing != 0 && (sharing & (sharing - 1)) == 0;
  static constant constexpr int late = factored ? log2_of(LANES / sharing) : 0;

  using Elements = Words<Source, width, together, ragged>;
  Elements words;

  Share() = default;

  // Of a row that was moved to channel `first`.
  INLINED Share(Row row, int first) : words(reinterpret_cast<device const uchar*>(row.data), first) {}

  // Rows begin at channel `first`, and where a lane has one scale, their scales and zeros with its.
  INLINED static void move(thread Row& rows, int first) {
    rows.data = reinterpret_cast<device const typename Encoding::Data*>(Elements::place(rows.data, first));
    if (factored && Encoding::scaled) {
      rows.scales += Row::group(min(first, size - 1));
    }
    if (factored && Encoding::zeroed) {
      rows.zeros += Row::group(min(first, size - 1));
    }
  }

  INLINED float unit(int i) const {
    return words.unit(i);
  }

  // Element i with all that lies beside it, of such a row.
  INLINED float decoded_at(Row row, int first, int i) const {
    const int channel = min(first + i, size - 1);
    const int group = factored ? 0 : Row::group(channel);
    return decoded<Encoding>(
        words.number(i), Encoding::scaled ? float(row.scales[group]) : 1.0f,
        Encoding::zeroed ? float(row.zeros[group]) : 0.0f, Encoding::centred ? float(row.means[channel]) : 0.0f);
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

  // How many query rows of a key a lane has sums of then.
  INLINED static constexpr int rows_after(int stage_count) {
    int result = 1;
    for (int stage = stage_count; stage < halvings; ++stage) {
      result *= of_rows(stage) ? 2 : 1;
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

// The row or page in which each eight of a tile lies. Each lane looks up the page of one of 32 eights, from `begin` on, and of one of the
// next 32 meanwhile.
template <typename Source, int EIGHTS>
struct Units {
  Source source;
  int begin;
  int last;
  ushort lane_index;
  uint looked_up;
  uint next;
  uint of[EIGHTS];

  INLINED Units(Source source, int begin, int last, ushort lane_index)
      : source(source), begin(begin), last(last), lane_index(lane_index), looked_up(0), next(0) {}

  INLINED void turn_to(int first) {
    if (Source::page != 0 && (first - begin) % 256 == 0) {
      looked_up = first == begin ? page_of(first) : next;
      next = page_of(first + 256);
    }
    UNROLLED
    for (int e = 0; e < EIGHTS; ++e) {
      of[e] = Source::page != 0 ? simd_shuffle(looked_up, ushort(((first - begin) / 8 + e) & 31)) : source.row;
    }
  }

  INLINED uint page_of(int first) const {
    return source.unit(min(first + lane_index * 8, last));
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
  static constant constexpr int rows = Deals::rows_after(stages);  // of the left sums of a key
  static constant constexpr int kept = left / rows;
  static constant constexpr bool even = Source::page == 0 && Encoding::tokens == 1 && !Encoding::centred;
  Source source;  // moved to the lane's channels
  Row ahead;      // where even rows are loaded next
  Deals deal;
  int slot;     // which row of a step is the lane's
  int channel;  // the lane's first
  Part parts[STEPS];
  Number stored_scales[kept];  // of lanes of different query rows, the first reads for all
  Number stored_zeros[kept];
  float scales[kept];  // known from `factored` on
  float zeros[kept];   // what a unit of 0 stands for

  INLINED Shares(Source from, Deals deal, int slot, int begin)
      : source(from), deal(deal), slot(slot), channel(deal.part * Part::width) {
    Part::move(source.parts, channel);
    ahead = source.token_of(source.row, begin);
  }

  template <typename Units>
  INLINED uint unit_of(const thread Units& units, int e) const {
    return Source::page != 0 ? units.of[e] : source.row;
  }

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
      stored_scales[i] = row.scales[0];
      if (Encoding::zeroed) {
        stored_zeros[i] = row.zeros[0];
      }
    }
  }

  // The rows from `first` on, a multiple of 8, of which none after `last` is looked at. `units` says in which row or page each
  // eight lies. Where rows follow one another evenly, one tile leads to the next.
  template <typename Units>
  INLINED void load(int first, int last, const thread Units& units) {
    Row eight[eights];
    int begins[eights];
    UNROLLED
    for (int e = 0; e < eights; ++e) {
      begins[e] = e == 0 ? first : min(first + e * 8, last & ~7);
      eight[e] = e == 0 && even ? ahead : source.token_of(unit_of(units, e), begins[e]);
    }
    ahead = source.token_after(ahead, 0, eights * 8);
    UNROLLED
    for (int s = 0; s < STEPS; ++s) {
      const int e = even ? 0 : s * tokens / 8;
      parts[s] = Part(source.token_after(eight[e], begins[e], min(s * tokens + slot - e * 8, last - begins[e])), channel);
    }
    UNROLLED
    for (int i = 0; i < kept; ++i) {
      if (Encoding::scaled && Part::factored) {
        const int at = deal.step_of(i / Deals::held * rows * Deals::held + i % Deals::held, stages) * tokens;
        const int by = min(at + slot, last - first);
        take(i, eights == 1 || even ? source.token_after(eight[0], first, by) : row_at(first, last, at, units));
      }
    }
  }

  // The scale of sum i.
  INLINED static constexpr int scale_of(int i) {
    return i / (rows * Deals::held) * Deals::held + i % Deals::held;
  }

  // The lane's row of the step from row `at` on.
  template <typename Units>
  INLINED Row row_at(int first, int last, int at, const thread Units& units) const {
    uint unit = unit_of(units, 0);
    UNROLLED
    for (int e = 1; e < eights; ++e) {
      unit = at >= e * 8 ? unit_of(units, e) : unit;
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
    for (int i = 0; i < kept; ++i) {
      if (Encoding::scaled) {
        const ushort reader = ushort(slot * LANES + (deal.part & ~alike()));
        const float2 found = passed_on(stored_scales[i], stored_zeros[i], reader);
        const Scaling<Encoding> scaling(found[0], found[1]);
        scales[i] = scaling.scale;
        zeros[i] = scaling.zero;
        result = result && scaling.bounded;
      }
    }
    if (!finite) {
      uint bad = 0;
      UNROLLED
      for (int s = 0; s < STEPS; ++s) {
        bad |= parts[s].words.not_finite();
      }
      result = result && bad == 0;
    }
    return (finite && !Encoding::scaled) || simd_all(result);
  }
};
