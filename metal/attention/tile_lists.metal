// Which tiles are visible, where the indices of a tile do not tell (masks, blocks, segments, ranges): a list for each tile of
// rows, or of columns, made once for all heads that share it, so that an attention kernel meets visible tiles only. Where no
// operand has an entry for each row and column, a list would be the only thing to grow with their product: a span stands for it.
#include "attention/visibility.h"

template <typename Types, int ROWS, int COLUMNS, bool FOR_ROWS, int THREADS>
[[kernel, max_total_threads_per_threadgroup(THREADS)]] void attention_tile_lists(
    TILE_LISTS_OPERANDS,
    uint3 group [[threadgroup_position_in_grid]],  // (tile, head of the lists, batch row)
    uint3 groups [[threadgroups_per_grid]],
    ushort thread_index [[thread_index_in_threadgroup]]) {
  threadgroup int found[THREADS];
  // bit i: whether the thread saw a score of tile i that the mask shows, and one that it hides
  threadgroup ulong shown[THREADS];
  threadgroup ulong hidden[THREADS];
  static_assert(THREADS <= 64, "a bit for each tile");
  const int own = group.x;
  const Features features = FEATURES;
  const typename Types::Visibility visibility(features, group.z, group.y, thread_index);
  const int others = FOR_ROWS ? tiles_of(p.keys, COLUMNS) : tiles_of(p.queries, ROWS);
  const ulong plane = ulong(group.z) * groups.y + group.y;
  device int* list = lists + (plane * groups.x + group.x) * room_of_list(others);
  int count = 0;
  int wholes = 0;
  int first = 0;
  int last = -1;
  int whole_first = 0;
  int whole_end = -1;  // of the first run of wholly visible ones
  for (int from = 0; from < others; from += THREADS) {
    const int other = from + thread_index;
    const int tiles = min(THREADS, others - from);
    int seen = none_visible;
    if (other < others) {
      const int row = (FOR_ROWS ? own : other) * ROWS;
      const int column = (FOR_ROWS ? other : own) * COLUMNS;
      seen = visibility.template of_tile<true, false>(row, ROWS, column, COLUMNS);
    }
    found[thread_index] = seen;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (has_mask) {  // all threads read each tile of it, side by side
      ulong any = 0;
      ulong none = 0;
      for (int i = 0; i < tiles; ++i) {
        const int row = (FOR_ROWS ? own : from + i) * ROWS;
        const int column = (FOR_ROWS ? from + i : own) * COLUMNS;
        const int n = p.mask.queries > 1 ? min(ROWS, p.queries - row) : 1;
        const int m = p.mask.keys > 1 ? min(COLUMNS, p.keys - column) : 1;
        for (int at = thread_index; at < (found[i] == none_visible ? 0 : n * m); at += THREADS) {
          const bool some = visibility.masked_in(row + at / m, column + at % m);
          any |= ulong(some ? 1 : 0) << i;
          none |= ulong(some ? 0 : 1) << i;
        }
      }
      shown[thread_index] = any;
      hidden[thread_index] = none;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      any = 0;
      none = 0;
      for (int i = 0; i < THREADS; ++i) {
        any |= shown[i];
        none |= hidden[i];
      }
      if (seen != none_visible) {
        const bool some = (any >> thread_index) & 1;
        seen = !some ? none_visible : ((none >> thread_index) & 1 ? some_visible : seen);
      }
      found[thread_index] = seen;
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    int wholes_before = wholes;
    int others_before = count - wholes;
    for (int i = 0; i < tiles; ++i) {
      if (found[i] != none_visible) {
        const bool whole = found[i] == all_visible;
        wholes_before += whole && i < thread_index ? 1 : 0;
        others_before += !whole && i < thread_index ? 1 : 0;
        first = count == 0 ? from + i : first;
        last = from + i;
        ++count;
        if (whole) {
          whole_first = wholes == 0 ? from + i : whole_first;
          whole_end = wholes == 0 || whole_end == from + i ? from + i + 1 : whole_end;
          ++wholes;
        }
      }
    }
    if (!has_spans && seen != none_visible) {
      list[2 + (seen == all_visible ? wholes_before : others - 1 - others_before)] = other;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (thread_index == 0) {
    list[0] = has_spans ? last - first + 1 : count;
    list[1] = has_spans ? (wholes > 0 ? whole_end - whole_first : 0) : wholes;
    if (has_spans) {
      list[2] = first;
      list[3] = wholes > 0 ? whole_first : first;
    }
  }
}
