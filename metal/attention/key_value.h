// Tiles of keys and of values that are fetched together.
#pragma once

#include "attention/places.h"
#include "core/pipeline.h"

template <typename Types, int KEYS, int THREADS, bool STAGED>
struct KeyValueTiles {
  using Operand = typename Types::Operand;
  using Keys = typename TileOf<STAGED, typename Types::Key, Operand, KEYS, THREADS>::Type;
  using Values = typename TileOf<STAGED, typename Types::Value, Operand, KEYS, THREADS>::Type;
  typename Types::Key key_source;
  typename Types::Value value_source;
  Keys keys;
  Values values;

  INLINED void fetch(int column) {
    keys.fetch(key_source, column);
    values.fetch(value_source, column);
  }

  INLINED void put(int buffer) {
    keys.put(buffer);
    values.put(buffer);
  }
};
