"""What the passes do with one tile: its part of the operands, what it may see, its scores and products."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_mfa.blockwise.arrays import (
    BARRIERS_LAST,
    ROWS_TRANSPOSED,
    TRANSPOSED_FROM_MEMORY,
    add,
    along_last,
    as_numbers,
    as_words,
    barrier,
    broadcast,
    cut,
    derivative_of_tanh,
    exact_split,
    finite_sums,
    put,
    slice_axis,
    where,
)
from jax_mfa.philox import keep_mask
from jax_mfa.specification import row_index

if TYPE_CHECKING:
    from jax_mfa.blockwise.problem import Problem


class Attempt:
    """The first attempt at the products of all tiles takes what is finite of their factors. Where others are not, two
    more look for them, for ∞ and for −∞, of which one that is visible tells. NaN is both.

    They do so by the same program: what is visible has a weight above 2, and what is sought has so large a factor
    that their product is infinite; what is hidden has a weight of 0, and what is not sought a factor of 0."""

    SIGNS = 0, 1, -1  # of what is looked for

    def __init__(self, sign: Any, dtype: Any, of_all: bool) -> None:
        self._sign, self._dtype = sign, dtype
        self._of_all = of_all  # whether factors are the same in all attempts

    @functools.cached_property
    def is_first(self) -> Array:
        return self._sign == 0

    @functools.cached_property
    def lowest_exponent(self) -> Array:
        """Of what is visible: any in the first attempt, then one that makes weights above 2."""
        return where(self.is_first, self._dtype.type(-np.inf), self._dtype.type(2))

    @functools.cached_property
    def _taken(self) -> Array:
        """1 in the first attempt, then 0."""
        return self.is_first.astype(self._dtype)

    @functools.cached_property
    def _other_infinity(self) -> Array:
        """The one that is not sought; NaN in the first attempt."""
        return self._sign * self._dtype.type(-np.inf)

    @functools.cached_property
    def _sought(self) -> Array:
        """A power of 2, which hardware that rounds factors leaves as it is; 0 in the first attempt."""
        return self._sign * self._dtype.type(2.0 ** (jnp.finfo(self._dtype).maxexp - 1))

    def factor(self, x: Array, signed: bool) -> Array:
        """What is multiplied with weights. Where those are `signed`, either sign looks for all that is not finite."""
        found = self._sought if signed else where(x == self._other_infinity, self._dtype.type(0), self._sought)
        # by a number that is not the same in all attempts: XLA would ask before them, and in any case (B1 T1 S8192 N8
        # K1 H64 bfloat16 0.75 → 0.6 ms)
        asked = x * where(self.is_first, self._dtype.type(1), self._dtype.type(0.5)) if self._of_all else x
        return where(jnp.isfinite(asked), x * self._taken, found)


class Product(NamedTuple):
    """`Step.product(weights, x(step))`, or the `Step.transposed_product` of them.

    Weights are [R, E, M, columns], or [R, E, columns, M] if `weights_transposed`, and 0 where hidden: those of
    `Step.probability` and `Step.exponentials`, of which in attempts no visible one is 0, however small; or `signed`:
    what is visible and not finite makes NaN of their sums, for it is a query or key, where either the row has no
    softmax or the weight is 0. `x` gives what `Step.columns_of`, `rows_of` or `transposed_rows_of` does."""

    weights: Array
    x: Callable[[Step], Array]
    signed: bool
    weights_transposed: bool = False
    transposed: bool = False


class Place(NamedTuple):
    """Where a step starts: the first of its batch rows, key heads, rows and columns, and the first row and column that
    are its own, and not those of the tile before too; None where all are."""

    row0: Any
    head0: Any
    row_start: Any
    column_start: Any
    own_row: Any
    own_column: Any


class Step:
    """The operands of one step: R batch rows and E key heads, of which it meets the rows of one tile and the columns of
    another. M = G · rows: the rows of a group's heads are rows of one matrix. Everything else keeps its letter."""

    def __init__(self, problem: Problem, place: Place, sign: Any = None) -> None:
        self.p = problem
        self.attempt = None if sign is None else Attempt(sign, problem.acc, problem.whole)  # None where one is made
        self.row0, self.head0, self.row_start, self.column_start, self.own_row, self.own_column = place
        o, acc = problem.operands, problem.acc

        per_row: Any = lambda name: None if getattr(o, name) is None else self.per_row(name, getattr(o, name))
        self.offset = per_row("query_offset")
        self.query_lengths = per_row("query_lengths")
        self.key_lengths = per_row("key_lengths")
        self.scale = None if o.scale is None else per_row("scale").astype(acc)
        self.slopes = None if o.alibi_slopes is None else self.per_head("alibi_slopes", o.alibi_slopes)
        self.query_segments = (
            None if o.query_segment_ids is None else self.rows("query_segment_ids", o.query_segment_ids)
        )
        self.key_segments = None if o.key_segment_ids is None else self.rows("key_segment_ids", o.key_segment_ids)
        self.key_ranges = None if o.key_ranges is None else self.rows("key_ranges", o.key_ranges)
        self.bias = self.scores_like("bias", o.bias)
        self.mask = self.scores_like("mask", o.mask)
        self.blocks = self.scores_like("block_mask", o.block_mask)

    # --- taking a step's share of an operand

    def rows(self, name: str, x: Any) -> Array:
        """The rows that the step's batch rows read of `x`, the operand of this name or an array like it: [R|1, ...]."""
        return self.take_rows(x, getattr(self.p.repeats, name))

    def per_row(self, name: str, x: Any) -> Array:
        """`[rows]` as `[R|1, 1, 1, 1, 1]`."""
        return self.rows(name, x).reshape(-1, 1, 1, 1, 1)

    def take_rows(self, x: Any, repeat: int = 1) -> Array:
        rows, size = x.shape[0], self.p.tiles.batch_rows
        if rows == 1 or (rows == size == self.p.batch and repeat == 1):
            return x
        if size == 1:
            return slice_axis(x, row_index(self.row0, repeat, rows), 1, 0)
        return x[row_index(self.row0 + jnp.arange(size, dtype=jnp.int32), repeat, rows)]

    def per_head(self, name: str, x: Any) -> Array:
        """`[rows, N]` as `[R|1, E, G, 1, 1]`."""
        x = self.rows(name, x).astype(self.p.acc)
        x = x.reshape(x.shape[0], self.p.k, self.p.g, 1, 1)
        return slice_axis(x, self.head0, self.p.tiles.key_heads, 1)

    def scores_like(self, name: str, x: Any) -> Array | None:
        """`[rows, 1|N, 1|T, 1|S]` as `[R|1, 1|E, 1|G, 1|T, 1|S]`; None as None."""
        if x is None:
            return None
        x = self.rows(name, x)
        heads = (1, 1) if x.shape[1] == 1 else (self.p.k, self.p.g)
        return slice_axis(x.reshape(x.shape[0], *heads, *x.shape[2:]), self.head0, self.p.tiles.key_heads, 1)

    def rows_of(self, x: Any, dtype: Any = None) -> Any:
        """The rows of what `rows_for_steps` gave, or of `results`, of this dtype or else that of accumulation:
        `[R, E, M, ...]`."""
        if self.p.rows_by_head:
            c = self.p.tiles
            return cut(x, (c.batch_rows, c.key_heads, *x.shape[2:]), self.row0, self.head0, *(0,) * (x.ndim - 2))
        if x.ndim == 3:
            c, one_each = self.p.tiles, self._shape_of_one_each()
            return cut(x, one_each, *self._rows_start(x)).reshape(c.batch_rows, c.key_heads, self.p.g * c.rows)
        rows, dtype = self._rows_as_they_lie(x), dtype or self.p.acc
        if self.p.g == 1:
            return jnp.swapaxes(rows, 1, 2).astype(dtype)
        rows = jnp.moveaxis(self._grouped(rows), 1, 3).astype(dtype)
        return rows.reshape(*rows.shape[:2], -1, *rows.shape[4:])

    def _shape_of_one_each(self) -> tuple[int, ...]:
        """Of one number for each row, as it lies in `results`."""
        c = self.p.tiles
        return c.batch_rows, c.key_heads * self.p.g, c.rows

    def _rows_as_they_lie(self, x: Any) -> Array:
        """Those of `[B, T, N, ...]`: `[R, rows, E · G, ...]`."""
        c, g, tail = self.p.tiles, self.p.g, x.shape[3:]
        index = next((n for n in (self.row_start, self.head0, self.row0) if isinstance(n, jax.Array)), 0)
        start = self.row0, self.row_start, self.head0 * g, *(0,) * len(tail)
        words = cut(as_words(x, index), (c.batch_rows, c.rows, c.key_heads * g, *tail), *start)
        return as_numbers(words, x.dtype)

    def _grouped(self, x: Array) -> Array:
        """`[R, rows, E · G, ...]` as `[R, rows, E, G, ...]`."""
        return x.reshape(*x.shape[:2], self.p.tiles.key_heads, self.p.g, *x.shape[3:])

    def transposed_rows_of(self, x: Any) -> Array:
        """The rows of what `rows_transposed` gave, for `transposed_product`: `[R, E, x, M]`, or `[R, E, M, x]` where
        they are not `ROWS_TRANSPOSED`."""
        if not ROWS_TRANSPOSED or self.p.rows_by_head:
            return self.rows_of(x)
        rows = self._rows_as_they_lie(x)
        if self.p.g == 1:
            return rows.transpose(0, 2, 3, 1).astype(self.p.acc)
        rows = self._grouped(rows).transpose(0, 2, 4, 3, 1)
        return rows.reshape(*rows.shape[:3], -1).astype(self.p.acc)

    def put_rows(self, x: Any, part: Any) -> Array:
        """`x`, of the shape of `results`, with `part`, [R, E, M, ...], as its rows."""
        return put(x, self._as_results(part), *self._rows_start(x))

    def add_rows(self, x: Any, part: Any, kept: Any = None) -> Array:
        """`x`, of the shape of `results`, with `part` added to its rows, which are multiplied with `kept`, [R, E, M],
        before."""
        if kept is None and self.p.rows_once and self.attempt is None:
            return self.put_rows(x, part)
        # in the layout of the results, so that one kernel reads and writes them
        if kept is not None and part.ndim > 3:
            kept = along_last(kept, part)
        part, start = self._as_results(part), self._rows_start(x)
        old = cut(x, part.shape, *start)
        return put(x, (old if kept is None else old * self._as_results(kept)) + part, *start)

    def _as_results(self, part: Any) -> Any:
        """[R, E, M, ...] in the layout of `results`."""
        if self.p.rows_by_head:
            return part
        if part.ndim == 3:
            return part.reshape(self._shape_of_one_each())
        if self.p.g == 1:
            return jnp.swapaxes(part, 1, 2)
        c, tail = self.p.tiles, part.shape[3:]
        part = jnp.moveaxis(part.reshape(*part.shape[:2], self.p.g, c.rows, *tail), 3, 1)
        return part.reshape(c.batch_rows, c.rows, -1, *tail)

    def _rows_start(self, x: Any) -> tuple[Any, ...]:
        """Where its rows start in `results`."""
        if self.p.rows_by_head:
            return self.row0, self.head0, *(0,) * (x.ndim - 2)
        head = self.head0 * self.p.g
        return (self.row0, head, self.row_start) if x.ndim == 3 else (self.row0, self.row_start, head, 0)

    def columns_of(self, name: str, x: Any, dtype: Any = None) -> Array:
        """The columns of an operand, or of an array like it: `[R|1, E, columns, ...]`, or `[R|1, columns, E, ...]`
        where `heads_in_one`.

        Args:
          x: what `columns_by_head` made of the operand, of this dtype.
        """
        c = self.p.tiles
        if not isinstance(x, jax.Array):  # quantised or in pages: `Columns`
            columns = x.tile(self, dtype or self.p.acc)
            return columns if self.p.heads_in_one else jnp.moveaxis(columns, 2, 1)
        if not self.p.met_once:
            shape = x.shape[0], c.key_heads, c.columns, *x.shape[3:]
            return self.rows(name, cut(x, shape, 0, self.head0, self.column_start, *(0,) * (x.ndim - 3)))
        if self.p.whole:
            return self.rows(name, x).astype(dtype or self.p.acc)
        # an index that is the same in every turn is no array, and would keep nothing in the loop
        index = next((n for n in (self.column_start, self.head0, self.row0) if isinstance(n, jax.Array)), 0)
        to_lay_out = not self.p.heads_in_one
        words = slice_axis(as_words(x, index, to_lay_out), self.column_start, c.columns, 1)
        words = self.rows(name, slice_axis(words, self.head0, c.key_heads, 2))
        columns = as_numbers(words, x.dtype, to_lay_out).astype(dtype or self.p.acc)
        return self.p.laid_out_columns(jnp.moveaxis(columns, 2, 1)) if to_lay_out else columns

    def by_head(self, columns: Any) -> Array:
        """What `columns_of` gave, as `[R|1, E, columns, ...]`."""
        return jnp.moveaxis(columns, 2, 1) if self.p.heads_in_one else columns

    def add_columns(self, x: Any, part: Any, as_rows: bool) -> Array:
        """`x`, [B, K, x, S], with `part`, [R, E, x, columns], added to its columns; [B, K, S, x] and [R, E, columns, x]
        if `as_rows`."""
        start = (self.column_start, 0) if as_rows else (0, self.column_start)
        once = self.p.columns_once and self.attempt is None
        return (put if once else add)(x, part, self.row0, self.head0, *start)

    def add_heads(self, x: Any, part: Any) -> Array:
        """`x`, [B, K, G], with `part`, [R, E, G], added."""
        return add(x, part, self.row0, self.head0, 0)

    # --- rows and columns of a tile

    def merged(self, x: Any) -> Any:
        """`[R|1, 1|E, 1|G, 1|rows, 1|columns]` as `[R|1, 1|E, 1|M, 1|columns]`."""
        r, e, g, t, s = x.shape
        if g * t > 1 and self.p.g > 1:
            x = broadcast(x, (r, e, self.p.g, self.p.tiles.rows, s))
        return x.reshape(r, e, -1, s)

    def columns(self) -> Array:
        return self.column_start + jnp.arange(self.p.tiles.columns, dtype=jnp.int32).reshape(1, 1, 1, 1, -1)

    def _positions(self) -> tuple[Array, Array]:
        """Columns and rows, [R|1, 1, 1, rows, columns] and [1, 1, 1, rows, columns]: how far each is from the row at
        the position of the tile's first."""
        c, offset = self.p.tiles, self.p.spec.query_offset if self.offset is None else self.offset
        shape, start = (1, 1, 1, c.rows, c.columns), self.row_start + offset - self.column_start
        row, column = lax.broadcasted_iota(jnp.int32, shape, 3), lax.iota(jnp.int32, c.columns)
        # not the column less the row first: that is the same in every turn, and would be kept, and read
        if not np.ndim(start):
            return lax.broadcast_in_dim(column - start, shape, (4,)), row
        return lax.broadcast_in_dim(column, shape, (4,)) - start, row

    def distance(self) -> Array:
        """How far a column stands after a row: [R|1, 1, 1, rows, columns]."""
        column, row = self._positions()
        return column - row

    def visible(self) -> Any:
        """Which scores of a tile count: bool [R, E, M, columns]; None where all do.

        A bias of −∞ is not asked: `scores` are −∞ there.
        """
        p, spec, c = self.p, self.p.spec, self.p.tiles
        rules = []
        column = self.columns()
        row = self.row_start + jnp.arange(c.rows, dtype=jnp.int32).reshape(1, 1, 1, -1, 1)
        if p.masked:
            left, right = spec.band
            if left is not None:
                rules.append(self.distance() >= -left)
            if right == 0:
                rules.append(operator.le(*self._positions()))
            elif right is not None:
                rules.append(self.distance() <= right)
            if self.key_lengths is not None:
                rules.append(column < self.key_lengths)
            if self.query_lengths is not None:
                rules.append(row < self.query_lengths)
            if self.mask is not None:
                rules.append(self.tile_of(self.mask))
            if self.query_segments is not None:
                a, b = self.segments()
                rules.append(a[:, None, None, :, None] == b[:, None, None, None, :])
            if self.key_ranges is not None:
                start, end = (x[:, None, None, :, None] for x in self.ranges())
                rules.append((column >= start) & (column < end))
            if self.blocks is not None and spec.mask_block is not None:
                block_rows, block_columns = spec.mask_block
                blocks = jnp.take(self.blocks, row.reshape(-1) // block_rows, axis=3)
                rules.append(jnp.take(blocks, column.reshape(-1) // block_columns, axis=4))
            # what tiles share belongs to the first of them
            if self.own_row is not None:
                rules.append(row >= self.own_row)
            if self.own_column is not None:
                rules.append(column >= self.own_column)
        if not rules:
            return None
        see = functools.reduce(jnp.logical_and, rules)
        if p.whole:
            return broadcast(self.merged(see), self._shape_of_scores())
        # behind a barrier in loops: all that need it would compute it anew
        kept = [axis for axis, size in enumerate(see.shape) if size > 1]
        see = barrier(lax.squeeze(see, [axis for axis in range(see.ndim) if axis not in kept]))
        if p.g == 1:  # without that axis
            return lax.broadcast_in_dim(see, self._shape_of_scores(), [axis - (axis > 2) for axis in kept])
        shape = c.batch_rows, c.key_heads, p.g, c.rows, c.columns
        return lax.broadcast_in_dim(see, shape, kept).reshape(self._shape_of_scores())

    def all_visible(self) -> Array:
        """The same after the bias: [R, E, M, columns]."""
        see = self.after_bias(self.visible())
        return (
            jnp.ones(self._shape_of_scores(), bool) if see is None else jnp.broadcast_to(see, self._shape_of_scores())
        )

    def _shape_of_scores(self) -> tuple[int, ...]:
        c = self.p.tiles
        return c.batch_rows, c.key_heads, self.p.g * c.rows, c.columns

    def after_bias(self, see: Array | None) -> Array | None:
        """`see` without the columns that a bias of −∞ hides; None where nothing is hidden."""
        if not self.p.spec.bias_hides(self.p.operands):
            return see
        shown = self.merged(self.tile_of(self.bias)) != -np.inf
        return shown if see is None else see & shown

    def segments(self) -> tuple[Array, Array]:
        return (
            slice_axis(self.query_segments, self.row_start, self.p.tiles.rows, 1),
            slice_axis(self.key_segments, self.column_start, self.p.tiles.columns, 1),
        )

    def ranges(self) -> tuple[Array, Array]:
        """First visible column of each row and the one after the last: [R|1, rows] each."""
        x = slice_axis(self.key_ranges, self.row_start, self.p.tiles.rows, 1)
        return x[..., 0], x[..., 1]

    def unless_empty(self, body: Callable[..., Any], carry: Any) -> Any:
        """`body(carry)`; or `carry`, and that nothing is not finite, where segments, ranges or mask blocks show that no
        score of the tile is visible."""
        some = []
        if self.query_segments is not None:
            a, b = self.segments()
            some.append(((a.min(1) <= b.max(1)) & (b.min(1) <= a.max(1))).any())
        if self.key_ranges is not None:
            (start, end), column = self.ranges(), self.column_start
            some.append(((start < column + self.p.tiles.columns) & (end > column) & (start < end)).any())
        if self.blocks is not None and self.p.spec.mask_block is not None:
            rows, columns = self.p.spec.mask_block
            row = self.row_start + jnp.arange(self.p.tiles.rows, dtype=jnp.int32)
            column = self.column_start + jnp.arange(self.p.tiles.columns, dtype=jnp.int32)
            row_blocks = jnp.zeros(self.blocks.shape[3], bool).at[row // rows].set(True)
            column_blocks = jnp.zeros(self.blocks.shape[4], bool).at[column // columns].set(True)
            touched = row_blocks[:, None] & column_blocks[None, :]
            some.append((self.blocks & touched.reshape(1, 1, 1, *touched.shape)).any())
        if not some:
            return body(carry)
        none = None if self.attempt is None or self.p.all_finite is not None else jnp.zeros((), bool)
        return lax.cond(functools.reduce(jnp.logical_and, some), body, lambda x: (x, none), carry)

    def tile_of(self, x: Any) -> Array:
        x = slice_axis(x, self.row_start, self.p.tiles.rows, 3)
        return slice_axis(x, self.column_start, self.p.tiles.columns, 4)

    # --- products

    def product(self, a: Array, b: Array, transpose: bool = False) -> Array:
        """`[R, E, M, x] · [R|1, E, x, y]`, or `[R|1, E, y, x]` to transpose: [R, E, M, y]. A `b` is what `columns_of`
        gives."""
        return (self._product_in_one if self.p.heads_in_one else self._product_by_head)(a, b, transpose)

    def _product_by_head(self, a: Array, b: Array, transpose: bool) -> Array:
        b = broadcast(b, (a.shape[0], *b.shape[1:]))
        if a.dtype != self.p.acc or (transpose and self.p.keys_transposed):
            # where the batch axes are not the first, XLA multiplies numbers of 16 bits as they are, which else it
            # converts, and lays out the second factor as it likes
            assert transpose
            a, b = (jnp.moveaxis(x, 1, 2) for x in (a, b))
            return lax.dot_general(a, b, (((3,), (3,)), ((0, 2), (0, 2))), preferred_element_type=self.p.acc)
        return lax.dot_general(a, b, (((3,), (3 if transpose else 2,)), ((0, 1), (0, 1))))

    def _product_in_one(self, a: Array, b: Array, transpose: bool) -> Array:
        """`product` with a `b` of `[R|1, columns, E, y]`, whose products of other heads are made and thrown away."""
        (r, e, m, _), acc = a.shape, self.p.acc
        of_own_head = lambda x: where(jnp.eye(e, dtype=bool)[:, None, :, None], x, x.dtype.type(0)) if e > 1 else x
        b = broadcast(b, (r, *b.shape[1:])).reshape(*b.shape[:2], -1)
        dot = functools.partial(lax.dot_general, preferred_element_type=acc)
        if transpose:
            a = of_own_head(a[:, :, :, None]).reshape(r, e * m, -1)
            if e * m == 1 and b.dtype != acc:
                # by a vector XLA takes longer than by two (B1 T1 S512 N1 H64 on 0.10.2 0.054 → 0.033 ms)
                a = broadcast(a, (r, 2, a.shape[2]))
            x = dot(b, a, (((2,), (2,)), ((0,), (0,))))[:, :, : e * m]
            return jnp.moveaxis(x, 1, 2).reshape(r, e, m, -1)
        a = a.reshape(r, e * m, -1)
        parts = [a] if b.dtype == acc else exact_split(a, b.dtype)
        x = dot(jnp.concatenate(parts, 1), b, (((2,), (1,)), ((0,), (0,))))
        # added one by one: XLA would make one slow kernel of the product and a sum
        x = functools.reduce(jnp.add, (x[:, i : i + e * m] for i in range(0, len(parts) * e * m, e * m)))
        return of_own_head(x.reshape(r, e, m, e, -1)).sum(3)

    def transposed_product(self, weights: Array, a: Array) -> Array:
        """`[R, E, x, M] · [R, E, M, columns]` of an `a` as `transposed_rows_of` gives it: [R, E, x, columns]."""
        return lax.dot_general(a, weights, (((3 if ROWS_TRANSPOSED else 2,), (2,)), ((0, 1), (0, 1))))

    def transposed_weights(self, weights: Array) -> Array:
        """[R, E, M, columns] as [R, E, columns, M], for a `product` with rows."""
        # behind a barrier, by way of one axis more: XLA is slow at products of which the first factor is transposed,
        # and at transposing the last two axes
        r, e, m, s = weights.shape
        if m * s >= TRANSPOSED_FROM_MEMORY:
            weights = barrier(weights)
        return barrier(jnp.moveaxis(weights[:, :, None], 4, 2).reshape(r, e, s, m))

    # --- attempts: 0 · NaN is NaN, but what is hidden takes no part

    def sums(self, products: Sequence[Product]) -> tuple[list[Array], Any]:
        """What these products are, of which what is hidden has no part, though `x` be not finite; and whether something
        of x is not, if that is to be asked."""
        factors = [each.x(self) for each in products]
        if self.attempt is None:
            sums = [self.multiplied(each, each.weights, x) for each, x in zip(products, factors)]
            return self.p.mended_products(sums, products) if self.p.whole and self.p.masked else sums, None
        factors_of = [self.attempt.factor(x, each.signed) for each, x in zip(products, factors)]
        sums = [self.multiplied(each, each.weights, x) for each, x in zip(products, factors_of)]
        return sums, None if self.p.all_finite is not None else ~finite_sums(factors)

    def multiplied(self, each: Product, weights: Array, x: Array) -> Array:
        """The product, with these weights and this `x`."""
        return self.transposed_product(weights, x) if each.transposed else self.product(weights, x)

    @functools.cached_property
    def _visible_weights(self) -> Array:
        """4 where visible: above 2, as an `Attempt` has them."""
        see, four = self.after_bias(self.visible()), self.p.acc.type(4)
        return jnp.full(self._shape_of_scores(), four) if see is None else self.shown(four, see)

    @functools.cached_property
    def _visible_weights_transposed(self) -> Array:
        return self.transposed_weights(self._visible_weights)

    def attempted(self, each: Product, weights: Array) -> Array:
        """The product in an `Attempt`, the first with these weights."""
        assert self.attempt is not None
        later = self._visible_weights_transposed if each.weights_transposed else self._visible_weights
        weights = where(self.attempt.is_first, weights, later)
        return self.multiplied(each, weights, self.attempt.factor(each.x(self), each.signed))

    def signed(self, weights: Any, probability: Any, see: Any) -> Array:
        """Weights [R, E, M, columns] of any sign, 0 where hidden; in attempts after the first probabilities."""
        if self.attempt is None:
            return self.shown(weights, see)
        taken = where(self.attempt.is_first if see is None else self.attempt.is_first & see, weights, probability)
        # behind a barrier, and as XLA multiplies them: it would compute them anew for each use
        return barrier(taken.reshape(-1, *taken.shape[2:])).reshape(taken.shape)

    def unsigned(self, probability: Any, see: Any) -> Array:
        """Weights that are probabilities, 0 where hidden: of attempts they are so already."""
        return self.shown(probability, see) if self.attempt is None else probability

    def first(self, x: Any) -> Any:
        """What is added once: `x` in the first attempt, then 0."""
        return x if self.attempt is None else where(self.attempt.is_first, x, x.dtype.type(0))

    def later(self, x: Array) -> Array:
        """What is added to: 0 in the first attempt, then `x`."""
        assert self.attempt is not None
        return where(self.attempt.is_first, x.dtype.type(0), x)

    # --- scores

    def queries_of(self, x: Any, dtype: Any) -> Any:
        """`rows_of` queries or their tangents, for `scores`."""
        rows = self.rows_of(x, dtype)
        return rows if self.p.scale_of_rows == 1 else rows * rows.dtype.type(self.p.scale_of_rows)

    def scaled(self, products: Array) -> Array:
        """Products with `queries_of`, by what of the scale those do not have."""
        if self.scale is not None:
            return products * self.merged(self.scale)
        return products if self.p.scale_of_scores == 1 else products * self.p.scale_of_scores

    def scores(self, q: Array, keys: Callable[[], Array]) -> tuple[Array, Array | None]:
        """Scores of a tile after bias, slopes and soft cap, and the derivative of the cap (None without one).

        `q` is what `queries_of` gives, `keys` gives what `columns_of` does.
        """
        x = self.product(q, keys(), transpose=True)
        if self.p.heads_in_one and self.p.k > 1:
            by_head = lambda: self._product_by_head(q, self.by_head(keys()), transpose=True)
            x = lax.cond(jnp.isfinite(x.sum()), lambda: x, by_head)
        x = self.scaled(x)
        if self.bias is not None:
            bias = self.merged(self.tile_of(self.bias)).astype(x.dtype)
            x = x + bias
        if self.slopes is not None:
            x = x + self.merged(self.slopes * self.distance().astype(x.dtype))
        if self.p.spec.bias_hides(self.p.operands):  # whatever the rest is
            x = where(bias == -np.inf, bias, x)
        cap, d_cap = self.p.spec.logits_soft_cap, None
        if cap is not None:
            x = x / cap
            x, d_cap = cap * jnp.tanh(x), derivative_of_tanh(x)
        if self.slopes is not None or cap is not None:
            # a compiler that contracts the last product differently for a row's maximum and for the exponent would
            # shift huge scores against each other
            x = barrier(x)
        return x, d_cap

    def masked_scores(self, q: Array, keys: Callable[[], Array]) -> tuple[Array, Array | None, Any]:
        """`scores`, −∞ where nothing is visible; the derivative of the cap; and `visible`."""
        x, d_cap = self.scores(q, keys)
        see = self.visible()
        if self.attempt is not None and not BARRIERS_LAST:
            # the same numbers: else LLVM takes the two masks of `exponentials` for one, and contracts the last product
            # with the maximum's subtraction, which huge scores then do not reach
            x = where(x != x, self.p.acc.type(np.nan), x)
        # a query or key that is not finite spoils only scores; those that nobody may see are overwritten
        return (x if see is None else where(see, x, self.p.acc.type(-np.inf))), d_cap, see

    def exponentials(self, scores: Array, see: Array | None, row_max: Array, log_sum: Any = None) -> Array:
        """exp(scores − row_max − log_sum) of `masked_scores`, 0 where hidden: of one attempt NaN there in a row whose
        softmax is not defined, of more above 2 where visible, but for the first. `see` is what is visible after the
        bias."""
        x = self.p.below_maximum(scores, row_max)
        if log_sum is not None:
            x = x - along_last(log_sum, x)
        if self.attempt is not None:
            x = jnp.maximum(x, self.attempt.lowest_exponent)
            x = x if see is None else where(see, x, self.p.acc.type(-np.inf))
        return jnp.exp(x)

    def probability(self, scores: Array, see: Array | None, row_max: Array, norm: Any) -> tuple[Array, Array | None]:
        """The probabilities of `masked_scores`, given the rows' maxima and `norms`; and what is visible after the bias,
        None where all is. Where hidden they are as `exponentials`."""
        see = self.after_bias(see)
        if self.p.log_norms:
            return self.exponentials(scores, see, row_max, norm), see
        probability = self.exponentials(scores, see, row_max)
        if self.attempt is None:
            return probability * along_last(norm, scores), see
        norm = where(self.attempt.is_first, norm, self.p.acc.type(1))
        return self.shown(probability * along_last(norm, scores), see), see

    def shown(self, x: Any, see: Array | None) -> Any:
        """`x`, of the shape of scores or a number, and 0 where hidden."""
        return x if see is None else where(see, x, x.dtype.type(0))

    def dropped(self, probability: Any) -> Any:
        """The probabilities of a tile after dropout."""
        o, c, p = self.p.operands, self.p.tiles, self.p
        if o.dropout is None:
            return probability
        words = self.rows("dropout", o.dropout)
        seed0, seed1, batch, head0, row0, column0 = (words[:, w].reshape(-1, 1, 1, 1, 1) for w in range(6))
        head = jnp.arange(p.n, dtype=jnp.uint32).reshape(1, p.k, p.g, 1, 1)
        head = head0 + slice_axis(head, self.head0, c.key_heads, 1)
        row = self.row_start + jnp.arange(c.rows, dtype=jnp.int32).reshape(1, 1, 1, -1, 1)
        row, column = row0 + row.astype(jnp.uint32), column0 + jnp.asarray(self.column_start, jnp.uint32)
        keep = keep_mask(p.spec.dropout_rate, (seed0, seed1), batch, head, row, column, c.columns)
        # a division, because XLA on CPU would compute a product, and the mask with it, once for each of its uses
        kept, dropped = p.acc.type(1 - p.spec.dropout_rate), p.acc.type(np.inf)
        if self.attempt is not None:  # what is dropped is visible
            dropped = where(self.attempt.is_first, dropped, kept)
        return probability / self.merged(where(keep, kept, dropped))
