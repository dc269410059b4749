// Where an element of an operand lies, and where a threadgroup stands.
//
// Letters as everywhere: T queries, S keys, N query heads, K key heads, G = N / K, H and V head sizes.
#pragma once

#include "attention/operands.h"
#include "core/stored.h"

constant constexpr float log2_e = 1.44269504088896341f;

// What a kernel is made of: operands of the matrix unit, how the rows of each array arrive, what a score is and what is visible.
template <
    typename OPERAND,
    typename QUERY,
    typename KEY,
    typename VALUE,
    typename COTANGENT,
    typename SCORE,
    typename VISIBILITY>
struct Attention {
  using Operand = OPERAND;
  using Query = QUERY;
  using Key = KEY;
  using Value = VALUE;
  using Cotangent = COTANGENT;  // of the output
  using Score = SCORE;
  using Visibility = VISIBILITY;
  using T = typename QUERY::Storage;  // of results
  static constant constexpr int H = KEY::size;
  static constant constexpr int V = VALUE::size;
};

// The place in the whole grid of a threadgroup of this launch.
INLINED uint3 place_in(constant Grid& grid, uint3 group) {
  return uint3(grid.x, grid.y, grid.z) + group;
}

INLINED int mapped_row(constant RowMap& map, int batch) {
  return (batch / map.repeat) % map.rows;
}

INLINED ulong broadcast_offset(constant Broadcast& x, int batch, int head) {
  const ulong plane = ulong(mapped_row(x.map, batch)) * ulong(x.heads) + ulong(x.heads > 1 ? head : 0);
  return plane * ulong(x.queries) * ulong(x.keys);
}

INLINED ulong broadcast_index(constant Broadcast& x, int row, int column) {
  return ulong(x.queries > 1 ? row : 0) * ulong(x.keys) + ulong(x.keys > 1 ? column : 0);
}

// Where a number of a head lies.
INLINED ulong head_place(constant Parameters& p, int batch, int head) {
  return ulong(batch) * ulong(p.heads) + ulong(head);
}

// Where a number of a query row lies.
INLINED ulong row_place(constant Parameters& p, int batch, int row, int head) {
  return (ulong(batch) * ulong(p.queries) + ulong(row)) * ulong(p.heads) + ulong(head);
}

// The rows that a batch row reads of an array, of which `count` may be read, at least one.
template <typename Types>
INLINED typename Types::Query queries_of(
    const thread Features& x, device const typename Types::Query::Storage* query, int batch, int head, int count) {
  return typename Types::Query(query, batch, x.p->queries, x.p->heads, head, count);
}

template <typename Types>
INLINED typename Types::Cotangent cotangents_of(
    const thread Features& x, device const typename Types::Cotangent::Storage* d_out, int batch, int head, int count) {
  return typename Types::Cotangent(d_out, batch, x.p->queries, x.p->heads, head, count);
}

template <typename Types>
INLINED typename Types::Key keys_of(
    const thread Features& x, device const typename Types::Key::Storage* key, int batch, int key_head, int count) {
  const Beside beside = {x.key_scales, x.key_zeros, x.key_means, x.block_tables};
  return typename Types::Key(key, beside, mapped_row(x.p->key, batch), x.p->keys, x.p->key_heads, key_head, count);
}

template <typename Types>
INLINED typename Types::Value values_of(
    const thread Features& x, device const typename Types::Value::Storage* value, int batch, int key_head, int count) {
  const Beside beside = {x.value_scales, x.value_zeros, x.value_means, x.block_tables};
  return typename Types::Value(value, beside, mapped_row(x.p->value, batch), x.p->keys, x.p->key_heads, key_head, count);
}

// What a caller's function of scores or masks is given beside these and positions: where the values of the arrays lie that it reads,
// its batch index and its query head, in a part of a batch or of the heads those of the whole.
struct Given {
  device const int* captured;
  int b;
  int first_head;
  int n;

  Given() = default;

  INLINED Given(const thread Features& x, int batch, int head) : captured(nullptr) {
    if (has_captured) {
      captured = x.captured + ulong(mapped_row(x.p->captured, batch)) * ulong(x.p->captured_words);
    }
    b = x.origin[2 * batch];
    first_head = x.origin[2 * batch + 1];
    turn_to(head);
  }

  INLINED void turn_to(int head) {
    n = first_head + head;
  }
};
