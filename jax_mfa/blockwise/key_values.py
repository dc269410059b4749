"""Keys and values that are quantised, in pages or both: how a tile of them is read, and dequantised, within the loop.

Nothing but a tile is ever read or dequantised at a time, so that memory does not grow with the context.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_mfa.blockwise.tile import Tile, part_of, tied
from jax_mfa.kv_cache.storage import spread
from jax_mfa.problem import KeyValueView, field_of


class KeyValueTiles(KeyValueView):
    """Keys or values whose tiles are read one at a time."""

    def tile(self, tile: Tile) -> Array:
        """The tile's keys or values, [R|1, S, E, H|V]."""
        read = self._of_rows if self.page_size is None else self._of_pages
        return self.decoded({part: read(tile, part, x) for part, x in self.parts.items()}, tile.acc)

    def _of_rows(self, tile: Tile, part: str, x: Any) -> Array:
        start, count, per = tile.starts["S"], tile.tiles.block_kv, self.tokens_of(part)
        (first, *_), (rows, *_) = tile.corner(field_of(self.name, part), x)
        _, entries, heads, size = x.shape
        begin = [first, 0 if entries == 1 else start, 0 if heads == 1 else tile.starts["K"], 0]
        x = tied(x, begin)
        if per > 1 and entries > 1:
            places = (start + jnp.arange(count, dtype=jnp.int32)) // np.int32(per)
            x, begin[1] = jnp.take(x, places, axis=1, mode="clip"), 0
        return part_of(x, begin, (rows, 1 if entries == 1 else count, 1 if heads == 1 else tile.tiles.heads, size))

    def _of_pages(self, tile: Tile, part: str, x: Any) -> Array:
        page, per, (_, entries, heads, size) = self.page_size, self.tokens_of(part), x.shape
        assert page is not None
        start, count = tile.starts["S"], tile.tiles.block_kv
        (row, _), (rows, _) = tile.corner("block_tables", self.tables)
        pages = part_of(self.tables, (row, start // page), (rows, count // page))
        first, taken = (0, 1) if heads == 1 else (tile.starts["K"], tile.tiles.heads)
        x = tied(x, (row, start, first))
        one = lambda index: part_of(x, (index, 0, first, 0), (1, entries, taken, size))[0]
        found = jax.vmap(jax.vmap(one))(pages)  # [R|1, pages, entries, E|1, size]
        if per > 1:
            found = spread(found, per, page, 2)
            found = jnp.broadcast_to(found, (*found.shape[:2], page, taken, size))
        return found.reshape(found.shape[0], count, taken, size)
