// The order of fetching, barriers and putting, once for all kernels: while a tile is computed, the next one is on its way to
// registers, and is put down when nobody reads the place any more.
#pragma once

#include "core/source.h"

// BUFFERS tiles have room: 2 save a barrier, 0 leave nothing to do. `Tiles` has `fetch(place)` and `put(buffer)`. Whether there
// are more tiles is the same for all threads of the threadgroup.
template <typename Tiles, int BUFFERS>
struct Pipeline {
  thread Tiles& tiles;
  int buffer = 0;

  INLINED Pipeline(thread Tiles& tiles) : tiles(tiles) {}

  template <typename Place>
  INLINED void start(bool any, Place first) {
    if (BUFFERS > 0 && any) {
      tiles.fetch(first);
      tiles.put(0);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }

  template <typename Place>
  INLINED void ahead(bool more, Place next) {
    if (BUFFERS > 0 && more) {
      tiles.fetch(next);
    }
  }

  INLINED void turn(bool more) {
    if (BUFFERS > 0 && more) {
      if (BUFFERS == 1) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      buffer = BUFFERS == 2 ? 1 - buffer : 0;
      tiles.put(buffer);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
};
