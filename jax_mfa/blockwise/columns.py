"""Keys and values that are no plain array: how a tile of them is read from pages, and dequantised, within the loop.

Nothing but a tile is ever read or dequantised at a time, so that memory does not grow with the context.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_mfa.blockwise.arrays import as_numbers, as_words, slice_axis
from jax_mfa.blockwise.step import Step
from jax_mfa.specification import Operands, Specification
from jax_mfa.storage import Stored, field_of, spread, stored


def with_columns(spec: Specification, operands: Operands) -> Operands:
    """The operands, with `Columns` in place of keys and values that are no plain array."""
    return stored(spec, operands, Columns)


class Columns(Stored):
    """Keys or values whose tiles are read one at a time."""

    def tile(self, w: Step, dtype: Any) -> Array:
        """The columns of the step's tile, [R|1, columns, E, size]."""
        read = self._of_row if self.page_size is None else self._of_pages
        return self.decoded({part: read(w, part, x) for part, x in self.parts.items()}, dtype)

    def _of_row(self, w: Step, part: str, x: Any) -> Array:
        start, count, per = w.column_start, w.p.tiles.columns, self.tokens_of(part)
        to_lay_out = not w.p.heads_in_one
        words = as_words(x, w.column_start, to_lay_out)
        if per == 1:
            words = slice_axis(words, start, count, 1)
        elif x.shape[1] > 1:
            words = jnp.take(words, (start + jnp.arange(count, dtype=jnp.int32)) // np.int32(per), axis=1, mode="clip")
        words = slice_axis(words, w.head0, w.p.tiles.key_heads, 2)
        return as_numbers(w.rows(field_of(self.name, part), words), x.dtype, to_lay_out)

    def _of_pages(self, w: Step, part: str, x: Any) -> Array:
        page, per = self.page_size, self.tokens_of(part)
        assert page is not None
        c, (_, entries, heads, size) = w.p.tiles, x.shape
        pages = w.rows("block_tables", self.tables)
        pages = lax.dynamic_slice_in_dim(pages, w.column_start // page, c.columns // page, 1)
        to_lay_out = not w.p.heads_in_one
        words = as_words(x, w.column_start, to_lay_out).reshape(-1, entries, heads * size)
        first, taken = (0, 1) if heads == 1 else (w.head0 * size, c.key_heads)

        def one(index: Any) -> Array:
            start = (jnp.asarray(x, jnp.int32) for x in (index, 0, first))
            return lax.dynamic_slice(words, tuple(start), (1, entries, taken * size))[0]

        found = jax.vmap(jax.vmap(one))(pages)  # [R|1, pages, entries, E|1 · size]
        if per > 1:
            found = spread(found, per, page, 2)
            found = jnp.broadcast_to(found, (*found.shape[:2], page, taken * size))
        return as_numbers(found.reshape(found.shape[0], c.columns, taken, size), x.dtype, to_lay_out)
