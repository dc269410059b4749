// Attention, forward: softmax(scale · Q Kᵀ) V in one pass over keys, with maximum and sum of each row.
//
// A threadgroup has SIMDGROUPS simdgroups, each with BLOCKS × 8 query rows of one head, and walks over tiles of KEYS columns:
// first those that all of its rows see, without a thought of masks, then the others, eight columns at a time. Scores,
// probabilities and sums never leave the registers of the simdgroup that made them.
//
// Q, K and V are matrix operands in their own dtype. Scores and output are accumulated in float32, and so is the
// probability when it becomes an operand: it already lies in the registers of the score, and rounding it to 16 bits would
// cost about a unit in the last place of the output.
#include "attention/key_value.h"
#include "attention/softmax.h"
#include "attention/visibility.h"

// A simdgroup's rows of one head, from `first` on, as `attend` asks about them.
template <typename Types>
struct HeadRows {
  typename Types::Visibility visibility;
  typename Types::Score score;
  Dropout drop;
  int first;  // the lane's row of the first block
  bool whole;  // all pairs at hand are visible

  template <bool MASKED>
  INLINED bool of(int block, float product, int column, thread float& x) const {
    const int row = first + block * 8;
    return (!MASKED || whole || visibility.visible(row, column)) && score.of(product, row, column, x);
  }

  INLINED bool may_be_masked() const {
    return score.may_be_masked();
  }

  template <int COLUMNS>
  INLINED void factors(int block, int column, thread float2 (&result)[COLUMNS]) const {
    drop.factors(first + block * 8, column, result);
  }
};

template <
    typename Types,
    int BLOCKS,
    int SIMDGROUPS,
    int KEYS,
    int BUFFERS,    // tiles of K and of V in threadgroup memory: 2 save a barrier, 0 reads device memory directly
    bool CACHE_Q,
    int SLICES>     // threadgroups that share the columns of the output, each with all scores
[[kernel, max_total_threads_per_threadgroup(SIMDGROUPS * 32)]] void attention_forward(
    FORWARD_OPERANDS,
    uint3 launched [[threadgroup_position_in_grid]],  // of (head, tile of rows from the last and slice, batch row)
    ushort thread_index [[thread_index_in_threadgroup]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane_index [[thread_index_in_simdgroup]]) {
  constexpr int V = Types::V;
  constexpr int rows_of_group = SIMDGROUPS * BLOCKS * 8;
  constexpr int v_fragments = slice_fragments(V, SLICES);
  using T = typename Types::T;
  using Operand = typename Types::Operand;
  using Tiles = KeyValueTiles<Types, KEYS, SIMDGROUPS * 32, (BUFFERS > 0)>;
  threadgroup Operand k_room[BUFFERS > 0 ? BUFFERS * Tiles::Keys::room : 1];
  threadgroup Operand v_room[BUFFERS > 0 ? BUFFERS * Tiles::Values::room : 1];

  const Features features = FEATURES;
  const uint3 group = place_in(p.grid, launched);
  const Lane lane(lane_index);
  const int queries = p.queries;  // loaded once: what is stored might be taken for parameters
  const int heads = p.heads;
  const int head = group.x;
  const int batch = group.z;
  const int key_head = head / (p.heads / p.key_heads);
  const int slice = int(group.y) % SLICES;
  const int group_row = int((p.grid.height - 1 - group.y) / SLICES) * rows_of_group;  // under a causal mask the longest go first
  const int first = group_row + simdgroup * BLOCKS * 8;
  const typename Types::Visibility visibility(features, batch, head, lane_index);
  const typename Types::Score score(features, batch, head, visibility.offset);
  HeadRows<Types> rows = {visibility, score, Dropout(features, batch, head), first + lane.row, false};
  const OwnRows<typename Types::Query, Operand, BLOCKS, CACHE_Q, (BUFFERS > 0)> q(
      queries_of<Types>(features, query, batch, head, queries), first, lane);
  Tiles tiles = {
      keys_of<Types>(features, key, batch, key_head, visibility.columns),
      values_of<Types>(features, value, batch, key_head, visibility.columns),
      typename Tiles::Keys(k_room, thread_index, lane), typename Tiles::Values(v_room, thread_index, lane)};
  Running<BLOCKS, v_fragments> running;

  const Walk walk = columns_for<KEYS>(p, visibility, lists, head, group_row, rows_of_group);
  Pipeline<Tiles, BUFFERS> pipeline(tiles);
  int column = walk.count > 0 ? walk.tile(0) * KEYS : 0;
  pipeline.start(walk.count > 0, column);
  int turn = 0;
  for (; turn < walk.wholes; ++turn) {
    const bool more = turn + 1 < walk.count;
    const int next = more ? walk.tile(turn + 1) * KEYS : 0;
    pipeline.ahead(more, next);
    const auto keys = tiles.keys.reader(tiles.key_source, column, pipeline.buffer);
    const auto values = tiles.values.reader(tiles.value_source, column, pipeline.buffer);
    const bool spoilt = score.may_be_masked() && !values.finite(lane_index);
    attend<false, KEYS / 8>(running, q, rows, keys, values, column, slice * v_fragments, spoilt, lane);
    pipeline.turn(more);
    column = next;
  }
  ROLLED
  for (; turn < walk.count; ++turn) {
    const bool more = turn + 1 < walk.count;
    const int next = more ? walk.tile(turn + 1) * KEYS : 0;
    pipeline.ahead(more, next);
    const int seen = visibility.of_tile(first, BLOCKS * 8, column, KEYS);
    if (seen != none_visible) {
      const auto keys = tiles.keys.reader(tiles.key_source, column, pipeline.buffer);
      const auto values = tiles.values.reader(tiles.value_source, column, pipeline.buffer);
      const bool spoilt = !values.finite(lane_index);
      rows.whole = seen == all_visible;
      ROLLED
      for (int part = 0; part < KEYS / 8; ++part) {
        const int at = column + part * 8;
        if (visibility.band(first, BLOCKS * 8, at, 8) != none_visible) {
          attend<true, 1>(
              running, q, rows, keys.part(part), values.part(part), at, slice * v_fragments, spoilt, lane);
        }
      }
    }
    pipeline.turn(more);
    column = next;
  }

  const uint out_stride = uint(heads) * uint(V);
  device T* out_rows = out + head_offset(batch, queries, heads, head, V) + ulong(uint(first)) * out_stride;
  ROLLED
  for (int block = 0; block < BLOCKS; ++block) {
    const FinishedRow row(running.row_max[0], sum_along_row(running.row_sum[0]), sink_of(p, sinks, batch, head));
    const int left = queries - first - block * 8;
    if (lane.row < left) {
      store_row<V, columns_dealt(V)>(
          running.sums[0], row.factor, out_rows + uint(block * 8 + lane.row) * out_stride, slice * v_fragments, lane);
    }
    if (slice == 0 && lane.column == 0 && lane.row < left) {
      row.store(row_max, row_sum, (ulong(batch) * queries + first + block * 8 + lane.row) * heads + head);
    }
    running.turn();
  }
}
