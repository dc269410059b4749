"""Attention in tiles: O(T + S) memory in both passes, in plain jnp. The fallback wherever Metal is not.

Forward: online softmax (Milakov & Gimelshein, arXiv:1805.02867) over key tiles. Backward: the probabilities of a tile
are recomputed (Dao, arXiv:2307.08691, section 3.1), from a row's maximum and sum rather than from its log-sum-exp,
which has not the digits where all scores of a row are huge. Tiles that no row can see by causality, window or lengths
are never visited, tiles of disjoint segments and of empty mask blocks are stepped over.

The loops are shaped for XLA's CPU backend, where a matrix product runs at full speed only when it is large and sums
over the last axis of its first operand: a *step* takes a few batch rows and key heads, its tile is about 512 × 512
scores, and the gradients of keys and values are accumulated transposed. Memory touched for the first time is slow too:
the larger part of what is no result is of the size of a tile.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_mfa.philox import keep_mask
from jax_mfa.specification import Operands, Specification, accumulation_dtype, expand_rows, reduce_rows, row_index

# Measured on x86-64 with two cores: below 512 × 512 scores a product slows down; 1024 × 1024 are better still, but
# where positions hide columns they compute more that is hidden. Several heads share a step up to this many scores;
# the backward pass, which holds twice as many tiles at a time, is faster with half of them.
TILE_ROWS = 512
TILE_COLUMNS = 512
FORWARD_SCORES = 2**20
BACKWARD_SCORES = 2**19
_MOST = 2**31 - 1  # of int32


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How the loops cut a problem: a step holds `batch_rows` × `key_heads`, a tile `rows` × `columns` scores."""

    batch_rows: int
    key_heads: int
    rows: int
    columns: int


def _largest_divisor(n: int, limit: int) -> int:
    return max(d for d in range(1, max(1, min(n, limit)) + 1) if n % d == 0)


def tiling(spec: Specification, operands: Operands, scores: int) -> Tiling:
    """The tile sizes for a problem; a step has at most `scores` scores, or elements of keys, if a head has no more."""
    batch, t, n, h = operands.query.shape
    s, k, v = operands.value.shape[1:]
    size = 1 if spec.is_causal or spec.window != (None, None) else 2
    rows = min(t, max(size * TILE_ROWS // (n // k), 1))
    columns = min(s, size * TILE_COLUMNS)
    units = max(scores // (columns * max(n // k * rows, h, v)), 1)
    key_heads = _largest_divisor(k, units)
    known = isinstance(batch, int)  # not of a program that is exported for any batch
    batch_rows = _largest_divisor(batch, units // k) if key_heads == k and known else 1
    return Tiling(batch_rows, key_heads, rows, columns)


def _loop(low, high, body, init):
    """`fori_loop`, without a loop where it is known to take a single turn, or none."""
    if low is high:
        return init
    if isinstance(low, int) and isinstance(high, int) and high - low <= 1:
        return body(low, init) if high > low else init
    return lax.fori_loop(low, high, body, init)


def _clip(x, low, high):
    """`x` within low..high, in Python while all three are known: loops of known length stay so."""
    if all(isinstance(v, int) for v in (x, low, high)):
        return max(low, min(x, high))
    return jnp.clip(x, low, high)


def _before(position, side: int):
    """`position − side`, or 0 where that is negative; no sum on the way leaves int32."""
    return _clip(position, side, _MOST) - side


def _after(position, side: int, end: int):
    """`position + side + 1`, or `end` where that is more; no sum on the way leaves int32."""
    return _clip(position, -_MOST, end - 1 - side) + side + 1


def _finite(x):
    return jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))


def _all_finite(*arrays):
    # a maximum keeps NaN and is one cheap reduction
    return functools.reduce(jnp.logical_and, [jnp.abs(x).max() < np.inf for x in arrays])


def _corner(start):
    return [jnp.asarray(i, jnp.int32) for i in start]


def _cut(x, shape: tuple[int, ...], *start):
    """The part of `x` of this shape from `start` on."""
    return x if x.shape == shape else lax.dynamic_slice(x, _corner(start), shape)


def _put(x, part, *start):
    """`x` with `part` in it, from `start` on."""
    return part if x.shape == part.shape else lax.dynamic_update_slice(x, part, _corner(start))


def _add(x, part, *start):
    """`x` with `part` added to it, from `start` on."""
    return _put(x, _cut(x, part.shape, *start) + part, *start)


def _slice(x, start, size: int, axis: int):
    """`size` elements along `axis` from `start`; an axis of size 1 broadcasts and is kept."""
    if x.shape[axis] == size or x.shape[axis] == 1:
        return x
    return lax.dynamic_slice_in_dim(x, start, size, axis)


class _Problem:
    """A specification with its operands, and the arithmetic of steps and tiles both passes share."""

    def __init__(self, spec: Specification, operands: Operands, tiles: Tiling):
        self.spec, self.operands, self.tiles = spec, operands, tiles
        self.repeats = Operands(*spec.repeats)
        self.batch, self.t, self.n, self.h = operands.query.shape
        self.s, self.k, self.v = operands.value.shape[1:]
        self.g = self.n // self.k
        self.acc = accumulation_dtype(operands.query.dtype)
        self.masked = spec.has_mask(operands)
        self.head_steps = self.k // tiles.key_heads
        self.steps = self.batch // tiles.batch_rows * self.head_steps
        self.row_tiles = -(-self.t // tiles.rows)
        self.column_tiles = -(-self.s // tiles.columns)

    def step(self, index) -> _Step:
        return _Step(self, index)

    def weights(self, scores, row_max):
        """exp(scores − row_max) of [..., columns] and [...]."""
        x = scores - row_max[..., None]
        if self.operands.bias is not None or self.operands.alibi_slopes is not None:
            # scores that are made again may be rounded otherwise: where they are huge, and one unit in the last place
            # is a large power of e, none may pass the maximum
            x = jnp.minimum(x, self.acc.type(0))
        return jnp.exp(x)


class _Step:
    """The operands of one step. R batch rows and E key heads of it; everything else keeps its letter."""

    def __init__(self, problem: _Problem, index):
        self.p, c = problem, problem.tiles
        self.row0 = index // problem.head_steps * c.batch_rows
        self.head0 = index % problem.head_steps * c.key_heads
        o, acc = problem.operands, problem.acc

        per_row: Any = lambda name: None if getattr(o, name) is None else self.rows(name).reshape(-1, 1, 1, 1, 1)
        self.offset = per_row("query_offset")
        self.query_lengths = per_row("query_lengths")
        self.key_lengths = per_row("key_lengths")
        self.scale = None if o.scale is None else per_row("scale").astype(acc)
        self.slopes = None if o.alibi_slopes is None else self.per_head(self.rows("alibi_slopes"))
        self.query_segments = None if o.query_segment_ids is None else self.rows("query_segment_ids")
        self.key_segments = None if o.key_segment_ids is None else self.rows("key_segment_ids")
        self.key_ranges = None if o.key_ranges is None else self.rows("key_ranges")
        self.bias = self.scores_like("bias")
        self.mask = self.scores_like("mask")
        self.blocks = self.scores_like("block_mask")

    # --- taking a step's share of an operand

    def rows(self, name: str):
        """The rows of an operand that the step's batch rows read: [R|1, ...]."""
        x = getattr(self.p.operands, name)
        return self.take_rows(x, getattr(self.p.repeats, name))

    def take_rows(self, x, repeat: int = 1):
        rows, size = x.shape[0], self.p.tiles.batch_rows
        if rows == 1 or (rows == size == self.p.batch and repeat == 1):
            return x
        if size == 1:
            return lax.dynamic_slice_in_dim(x, row_index(self.row0, repeat, rows), 1, 0)
        return x[row_index(self.row0 + jnp.arange(size), repeat, rows)]

    def per_head(self, x):
        """`[R|1, N]` as `[R|1, E, G, 1, 1]`."""
        x = x.astype(self.p.acc).reshape(x.shape[0], self.p.k, self.p.g, 1, 1)
        return _slice(x, self.head0, self.p.tiles.key_heads, 1)

    def scores_like(self, name: str):
        """`[rows, 1|N, 1|T, 1|S]` as `[R|1, 1|E, 1|G, 1|T, 1|S]`."""
        if getattr(self.p.operands, name) is None:
            return None
        x = self.rows(name)
        heads = (1, 1) if x.shape[1] == 1 else (self.p.k, self.p.g)
        return _slice(x.reshape(x.shape[0], *heads, *x.shape[2:]), self.head0, self.p.tiles.key_heads, 1)

    def queries_like(self, x, i):
        """The rows of tile `i` of `[B, T, N, ...]`: `[R, E, G, rows, ...]`."""
        c, g, tail = self.p.tiles, self.p.g, x.shape[3:]
        x = _cut(x, (c.batch_rows, c.rows, c.key_heads * g, *tail), *self.queries_start(x, i))
        return jnp.moveaxis(x.reshape(c.batch_rows, c.rows, c.key_heads, g, *tail), 1, 3)

    def queries_start(self, x, i):
        """Where the rows of tile `i` begin in `x`, [B, T, N, ...]."""
        return self.row0, self.row_start(i), self.head0 * self.p.g, *(0,) * (x.ndim - 3)

    def put_queries(self, x, part, i):
        """`x`, [B, T, N, ...], with `part`, [R, E, G, rows, ...], as the rows of tile `i`."""
        part = jnp.moveaxis(part, 3, 1)
        part = part.reshape(*part.shape[:2], -1, *x.shape[3:]).astype(x.dtype)
        return _put(x, part, *self.queries_start(x, i))

    def add(self, x, part, column=0, once: bool = False):
        """`x`, [B, K, ...], with `part`, [R, E, ...], added at the step's rows and heads and from `column` on.

        Args:
          once: nothing was added there before.
        """
        start = (self.row0, self.head0, 0, column)[: x.ndim]
        return _put(x, part, *start) if once else _add(x, part, *start)

    def keys_like(self, name: str, j):
        """The columns of tile `j` of `[rows, S, K, ...]`, as `[R|1, E, columns, ...]` in the accumulation dtype."""
        c = self.p.tiles
        x = _slice(getattr(self.p.operands, name), self.column_start(j), c.columns, 1)
        x = self.take_rows(_slice(x, self.head0, c.key_heads, 2), getattr(self.p.repeats, name))
        return jnp.moveaxis(x, 1, 2).astype(self.p.acc)

    # --- rows and columns of a tile

    def tile_start(self, i, size: int, length: int):
        """First index of tile `i`: the last tile of a ragged length reaches back over its neighbour."""
        return i * size if length % size == 0 else _clip(i * size, 0, length - size)

    def row_start(self, i):
        return self.tile_start(i, self.p.tiles.rows, self.p.t)

    def column_start(self, j):
        return self.tile_start(j, self.p.tiles.columns, self.p.s)

    def positions(self, i):
        """Positions of tile `i`'s rows: [R|1, 1, 1, rows, 1]."""
        t = self.row_start(i) + jnp.arange(self.p.tiles.rows, dtype=jnp.int32).reshape(1, 1, 1, -1, 1)
        return t + (self.p.spec.query_offset if self.offset is None else self.offset)

    def columns(self, j):
        return self.column_start(j) + jnp.arange(self.p.tiles.columns, dtype=jnp.int32).reshape(1, 1, 1, 1, -1)

    def outermost_positions(self, i):
        """The lowest position of a row of tile `i`, and the highest."""
        offset = self.p.spec.query_offset
        low, high = (offset, offset) if self.offset is None else (self.offset.min(), self.offset.max())
        return self.row_start(i) + low, self.row_start(i) + self.p.tiles.rows - 1 + high

    def column_tiles(self, i):
        """The half-open range of column tiles in which a row of tile `i` may see something."""
        size, (left, right) = self.p.tiles.columns, self.p.spec.band
        low, high = 0, self.p.s
        if left is not None:
            low = _clip(_before(self.outermost_positions(i)[0], left), 0, self.p.s)
        if right is not None:
            high = _clip(_after(self.outermost_positions(i)[1], right, self.p.s), 0, self.p.s)
        if self.key_lengths is not None:
            high = _clip(self.key_lengths.max(), 0, high)
        if self.query_lengths is not None:
            high = jnp.where(self.row_start(i) < self.query_lengths.max(), high, 0)
        return low // size, -(-high // size)

    def whole_tiles(self, i, low, end):
        """The column tiles within low … end in which nothing is hidden; rules about single pairs may hide anywhere."""
        size, (left, right) = self.p.tiles.columns, self.p.spec.band
        by_pair = (self.mask, self.query_segments, self.key_ranges, self.blocks, self.query_lengths)
        if self.p.column_tiles == 1 or any(x is not None for x in by_pair):
            return low, low
        high = self.p.s // size  # the last tile of a ragged length repeats columns of its neighbour
        if left is not None:
            low = _clip(-(-_before(self.outermost_positions(i)[1], left) // size), low, end)
        if right is not None:
            high = _clip(_after(self.outermost_positions(i)[0], right, self.p.s) // size, 0, high)
        if self.key_lengths is not None:
            high = jnp.minimum(high, self.key_lengths.min() // size)
        return low, _clip(high, low, end)

    def over_columns(self, i, low, end, body, init):
        """Loops `body(j, carry, whole)` over column tiles of row tile `i`, `whole` where nothing in them is hidden."""
        first, last = self.whole_tiles(i, low, end)
        carry = _loop(low, first, functools.partial(body, whole=False), init)
        carry = _loop(first, last, functools.partial(body, whole=True), carry)
        return _loop(last, end, functools.partial(body, whole=False), carry)

    def visible(self, i, j):
        """Which scores of a tile count: bool, broadcastable to [R, E, G, rows, columns]; None where all do.

        A bias of −∞ is not asked: `scores` are −∞ there.
        """
        p, spec, c = self.p, self.p.spec, self.p.tiles
        left, right = spec.band
        rules = []
        column = self.columns(j)
        if p.masked:
            if (left, right) != (None, None):
                distance = column - self.positions(i)
                if left is not None:
                    rules.append(distance >= -left)
                if right is not None:
                    rules.append(distance <= right)
            row = self.row_start(i) + jnp.arange(c.rows, dtype=jnp.int32).reshape(1, 1, 1, -1, 1)
            if self.key_lengths is not None:
                rules.append(column < self.key_lengths)
            if self.query_lengths is not None:
                rules.append(row < self.query_lengths)
            if self.mask is not None:
                rules.append(self.tile_of(self.mask, i, j))
            if self.query_segments is not None:
                a, b = self.segments(i, j)
                rules.append(a[:, None, None, :, None] == b[:, None, None, None, :])
            if self.key_ranges is not None:
                start, end = (x[:, None, None, :, None] for x in self.ranges(i))
                rules.append((column >= start) & (column < end))
            if self.blocks is not None:
                block_rows, block_columns = spec.mask_block
                blocks = jnp.take(self.blocks, row.reshape(-1) // block_rows, axis=3)
                rules.append(jnp.take(blocks, column.reshape(-1) // block_columns, axis=4))
        if p.s % c.columns:
            rules.append(column >= j * c.columns)
        return functools.reduce(jnp.logical_and, rules) if rules else None

    def all_visible(self, i, j, own=None):
        """The same after the bias, and of those rows that are a tile's `own`: [R, E, G, rows, columns]."""
        c, see = self.p.tiles, self.after_bias(self.visible(i, j), i, j)
        every = jnp.ones((c.batch_rows, c.key_heads, self.p.g, c.rows, c.columns), bool)
        return functools.reduce(jnp.logical_and, [x for x in (see, own) if x is not None], every)

    def after_bias(self, see, i, j):
        """`see` without the columns that a bias of −∞ hides; None where nothing is hidden."""
        if not self.p.spec.bias_hides(self.p.operands):
            return see
        shown = self.tile_of(self.bias, i, j) != -np.inf
        return shown if see is None else see & shown

    def own_rows(self, i):
        """Which rows of a tile it does not share with its neighbour; None where the tiles do not overlap."""
        if self.p.t % self.p.tiles.rows == 0:
            return None
        row = self.row_start(i) + jnp.arange(self.p.tiles.rows, dtype=jnp.int32).reshape(1, 1, 1, -1, 1)
        return row >= i * self.p.tiles.rows

    def segments(self, i, j):
        return (
            _slice(self.query_segments, self.row_start(i), self.p.tiles.rows, 1),
            _slice(self.key_segments, self.column_start(j), self.p.tiles.columns, 1),
        )

    def ranges(self, i):
        """First visible column of tile `i`'s rows and the one after the last: [R|1, rows] each."""
        x = _slice(self.key_ranges, self.row_start(i), self.p.tiles.rows, 1)
        return x[..., 0], x[..., 1]

    def unless_empty(self, i, j, body, carry):
        """`body(carry)`, or `carry` where segments, ranges or mask blocks show that no score of the tile is visible."""
        some = []
        if self.query_segments is not None:
            a, b = self.segments(i, j)
            some.append(((a.min(1) <= b.max(1)) & (b.min(1) <= a.max(1))).any())
        if self.key_ranges is not None:
            (start, end), column = self.ranges(i), self.column_start(j)
            some.append(((start < column + self.p.tiles.columns) & (end > column) & (start < end)).any())
        if self.blocks is not None:
            rows, columns = self.p.spec.mask_block
            row = self.row_start(i) + jnp.arange(self.p.tiles.rows)
            column = self.column_start(j) + jnp.arange(self.p.tiles.columns)
            row_blocks = jnp.zeros(self.blocks.shape[3], bool).at[row // rows].set(True)
            column_blocks = jnp.zeros(self.blocks.shape[4], bool).at[column // columns].set(True)
            touched = row_blocks[:, None] & column_blocks[None, :]
            some.append((self.blocks & touched.reshape(1, 1, 1, *touched.shape)).any())
        if not some:
            return body(carry)
        return lax.cond(functools.reduce(jnp.logical_and, some), body, lambda x: x, carry)

    def tile_of(self, x, i, j):
        x = _slice(x, self.row_start(i), self.p.tiles.rows, 3)
        return _slice(x, self.column_start(j), self.p.tiles.columns, 4)

    # --- products and scores

    def product(self, a, b, transpose: bool = False):
        """`[R, E, G, rows, x] · [R|1, E, x, y]`, or `[R|1, E, y, x]` to transpose: a group's heads are rows of one
        product."""
        r, e, g, t, x = a.shape
        b = jnp.broadcast_to(b, (r, e, *b.shape[2:])).reshape(r * e, *b.shape[2:])
        dimensions = ((2,), (2 if transpose else 1,)), ((0,), (0,))
        return lax.dot_general(a.reshape(r * e, g * t, x), b, dimensions).reshape(r, e, g, t, -1)

    def transposed_product(self, weights, a):
        """`[R, E, x, G, rows] · [R, E, G, rows, columns]`, summed over the rows of the group: [R, E, x, columns]."""
        r, e, x, g, t = a.shape
        return lax.dot_general(
            a.reshape(r * e, x, g * t), weights.reshape(r * e, g * t, -1), (((2,), (1,)), ((0,), (0,)))
        ).reshape(r, e, x, -1)

    def clean(self, x):
        """`x` with zeros for what is not finite, where something may be hidden: 0 · NaN is NaN."""
        return _finite(x) if self.p.masked else x

    def of_others(self, see, product, weights, x):
        """What `product(weights, clean(x))` leaves out: the sums of terms whose x is not finite, where visible.

        Such a sum is ±∞ or NaN, which three products of signs tell, as plain arithmetic has it.

        Args:
          see: as `visible` gives it, of the shape of the weights.
          product: `product` or `transposed_product`.
          weights: [R, E, G, rows, columns].
          x: rows of keys or values [R|1, E, columns, y], or of queries [R, E, x, G, rows].
        """
        sign = jnp.where(see & ~jnp.isnan(weights), jnp.sign(weights), 0).astype(x.dtype)
        infinite = jnp.where(jnp.isinf(x), jnp.sign(x), 0)
        net, infinities = product(sign, infinite), product(jnp.abs(sign), jnp.abs(infinite))
        terms = product(see.astype(x.dtype), (~jnp.isfinite(x)).astype(x.dtype))
        undefined = (terms != infinities) | (jnp.abs(net) != infinities)
        return jnp.where(undefined, jnp.nan, jnp.where(infinities > 0, jnp.sign(net) * jnp.inf, 0)).astype(x.dtype)

    def scaled(self, q):
        """Queries times a scale that is known; one that is not, and may be infinite, waits for the product."""
        return q * self.p.spec.scale if self.scale is None else q

    def scores(self, q, keys, i, j):
        """Scores of a tile after bias, slopes and soft cap, and the derivative of the cap (None without one).

        `q` has been `scaled`.
        """
        x = self.product(q, keys, transpose=True)
        if self.scale is not None:
            x = x * self.scale
        if self.bias is not None:
            bias = self.tile_of(self.bias, i, j).astype(x.dtype)
            x = x + bias
        if self.slopes is not None:
            x = x + self.slopes * (self.columns(j) - self.positions(i)).astype(x.dtype)
        if self.p.spec.bias_hides(self.p.operands):  # whatever the rest is
            x = jnp.where(bias == -np.inf, bias, x)
        cap, d_cap = self.p.spec.logits_soft_cap, None
        if cap is not None:
            y = jnp.tanh(x / cap)
            x, d_cap = cap * y, 1 - y * y
        if self.slopes is not None or cap is not None:
            # a compiler that contracts the last product differently for a row's maximum and for the exponent would
            # shift huge scores against each other
            x = lax.optimization_barrier(x)
        return x, d_cap

    def dropped(self, probability, i, j):
        """The probabilities of a tile after dropout."""
        o, c, p = self.p.operands, self.p.tiles, self.p
        if o.dropout is None:
            return probability
        seed0, seed1, batch, head0 = (self.rows("dropout")[:, w].reshape(-1, 1, 1, 1, 1) for w in range(4))
        head = jnp.arange(p.n, dtype=jnp.uint32).reshape(1, p.k, p.g, 1, 1)
        head = head0 + _slice(head, self.head0, c.key_heads, 1)
        row = self.row_start(i) + jnp.arange(c.rows).reshape(1, 1, 1, -1, 1)
        keep = keep_mask(
            p.spec.dropout_rate, (seed0, seed1), batch, head, row.astype(jnp.uint32), self.column_start(j), c.columns
        )
        # a division, because XLA on CPU would compute a product, and the mask with it, once for each of its uses
        return probability / jnp.where(keep, p.acc.type(1 - p.spec.dropout_rate), p.acc.type(np.inf))


def forward(spec: Specification, operands: Operands):
    """Attention, and what the backward pass needs of each row.

    Returns:
      out: [B, T, N, V] of the query's dtype.
      row_max: [B, T, N], the largest score of a row, its sink included; finite, 0 where there is none.
      row_sum: [B, T, N], the sum of exp(score − row_max); 0 for a row that sees nothing, NaN for one whose softmax is
        not defined. Both are float32 (float64).
    """
    c = tiling(spec, operands, FORWARD_SCORES)
    p = _Problem(spec, operands, c)
    acc = p.acc

    def step(index, results):
        w = p.step(index)
        sinks = None if operands.sinks is None else w.per_head(w.rows("sinks"))[..., 0]

        def row_tile(i, results):
            q_i = w.scaled(w.queries_like(operands.query, i).astype(acc))

            def column_tile(j, carry, whole):
                def visit(carry):
                    # a query or key that is not finite spoils only scores; those that nobody may see are overwritten
                    x, _ = w.scores(q_i, w.keys_like("key", j), i, j)
                    see = None if whole else w.visible(i, j)
                    if see is not None:
                        x = jnp.where(see, x, acc.type(-np.inf))
                    new_high = x.max(-1) if carry is None else jnp.maximum(carry[0], x.max(-1))
                    shift = jnp.where(new_high == -np.inf, acc.type(0), new_high)
                    probability = p.weights(x, shift)
                    new_total = probability.sum(-1)
                    probability = w.dropped(probability, i, j)
                    new_sums = w.product(probability, w.clean(w.keys_like("value", j)))
                    if carry is not None:
                        high, total, sums = carry
                        rescale = jnp.exp(high - shift)
                        new_total = total * rescale + new_total
                        new_sums = sums * rescale[..., None] + new_sums
                    return new_high, new_total, new_sums

                return visit(None) if carry is None else w.unless_empty(i, j, visit, carry)

            low, end = w.column_tiles(i)
            init = None
            if not (isinstance(low, int) and isinstance(end, int) and (low, end) == (0, 1)):
                shape = (c.batch_rows, c.key_heads, p.g, c.rows)
                init = jnp.full(shape, -np.inf, acc), jnp.zeros(shape, acc), jnp.zeros((*shape, p.v), acc)
            high, total, sums = w.over_columns(i, low, end, column_tile, init)

            empty = high == -np.inf
            if sinks is not None:
                new_high = jnp.where(empty, acc.type(0), jnp.maximum(high, sinks))
                rescale = jnp.exp(high - new_high)
                total = total * rescale + jnp.exp(sinks - new_high)
                sums, high = sums * rescale[..., None], new_high
            total = jnp.where(empty, acc.type(0), total)
            out_i = sums / jnp.where(empty, acc.type(1), total)[..., None]
            row_max = jnp.where(empty, acc.type(0), _finite(high))
            return tuple(w.put_queries(x, part, i) for x, part in zip(results, (out_i, row_max, total)))

        return _loop(0, p.row_tiles, row_tile, results)

    rows = (p.batch, p.t, p.n)
    out = jnp.zeros((*rows, p.v), operands.query.dtype)
    out, row_max, row_sum = _loop(0, p.steps, step, (out, jnp.zeros(rows, acc), jnp.zeros(rows, acc)))
    infinite = lax.cond((row_sum == 0).any(), lambda: ~_is_tame(p), lambda: jnp.zeros((), bool))
    if p.masked:
        infinite = infinite | ~_all_finite(operands.value)
    return _with_others(p, jnp.where(infinite, p.steps, 0), out, row_max, row_sum)


def _is_tame(p: _Problem):
    """Whether no score can be infinite but by a bias that hides its column."""
    o = p.operands
    largest = lambda x: jnp.abs(x).max(initial=0).astype(p.acc)
    size = largest(o.query) * largest(o.key) * (p.h * (abs(p.spec.scale) if o.scale is None else largest(o.scale)))
    if o.bias is not None:
        size = size + largest(jnp.where(o.bias == -np.inf, o.bias.dtype.type(0), o.bias))
    if o.alibi_slopes is not None:
        size = size + largest(o.alibi_slopes) * _MOST
    return size < float(jnp.finfo(p.acc).max) / 4


def _with_others(p: _Problem, steps, out, row_max, row_sum):
    """The results of `forward` with what its sums left out: values that are not finite, and rows whose scores are all
    −∞. A loop over `steps`, which are none where there are none of them: it changes its arrays in place."""
    o, acc = p.operands, p.acc

    def step(index, results):
        w = p.step(index)

        def row_tile(i, results):
            q_i = w.scaled(w.queries_like(o.query, i).astype(acc))
            row_max_i, row_sum_i = w.queries_like(row_max, i), w.queries_like(row_sum, i)

            def column_tile(j, carry):
                def visit(carry):
                    seen, others = carry
                    see, values_j = w.all_visible(i, j), w.keys_like("value", j)

                    def add(others):
                        x, _ = w.scores(q_i, w.keys_like("key", j), i, j)
                        weights = w.dropped(p.weights(jnp.where(see, x, acc.type(-np.inf)), row_max_i), i, j)
                        return others + w.of_others(see, w.product, weights, values_j)

                    if p.masked:
                        others = lax.cond(_all_finite(values_j), lambda x: x, add, others)
                    return seen | see.any(-1), others

                return w.unless_empty(i, j, visit, carry)

            init = jnp.zeros(row_sum_i.shape, bool), jnp.zeros((*row_sum_i.shape, p.v), acc)
            seen, others = _loop(*w.column_tiles(i), column_tile, init)
            others = others + w.queries_like(out, i).astype(acc)
            lost = seen & (row_sum_i == 0)
            row_sum_i = jnp.where(lost, acc.type(np.nan), row_sum_i)
            if o.sinks is not None:  # a sink beside scores of −∞ takes all of the softmax
                sinks = jnp.broadcast_to(w.per_head(w.rows("sinks"))[..., 0], lost.shape)
                taken = lost & (sinks > -np.inf)
                row_max_i = jnp.where(taken, _finite(sinks), row_max_i)
                row_sum_i = jnp.where(taken, jnp.exp(sinks - sinks), row_sum_i)
            undefined = seen & jnp.isnan(row_sum_i)
            others = jnp.where(undefined[..., None], acc.type(np.nan), others)
            return tuple(w.put_queries(x, part, i) for x, part in zip(results, (others, row_max_i, row_sum_i)))

        return _loop(0, p.row_tiles, row_tile, results)

    return _loop(0, steps, step, (out, row_max, row_sum))


def backward(spec: Specification, operands: Operands, out, row_max, row_sum, d_out, d_lse, wanted: tuple[str, ...]):
    """Cotangents of the operands named in `wanted`, each of its operand's shape and dtype.

    Args:
      out, row_max, row_sum: results of `forward`.
      d_out: [B, T, N, V]; d_lse: [B, T, N]. What they hold for rows that see nothing is ignored.
    """
    c = tiling(spec, operands, BACKWARD_SCORES)
    if "bias" in wanted and operands.bias.shape[0] != 1:
        c = dataclasses.replace(c, batch_rows=1)  # a step then adds to a single row of the bias
    p = _Problem(spec, operands, c)
    acc = p.acc
    # With e = exp(score − row_max) the probability is e / row_sum. The division is made once for each row, of d_out
    # and of the shift: d(score) = dropped(e) · d(p) − e · shift, with shift = Σ d_out · out − d_lse
    # (written as a product: XLA's CPU backend of JAX 0.10 takes seventy times as long for the sum)
    empty = row_sum == 0
    inverse = 1 / jnp.where(empty, acc.type(1), row_sum)
    shift = jnp.einsum("...v,...v->...", d_out.astype(acc), out.astype(acc), precision="highest")
    shift = jnp.where(empty, acc.type(0), (shift - d_lse.astype(acc)) * inverse)

    met_once = p.row_tiles == 1 and p.s % c.columns == 0
    bias_gradient = "bias" in wanted
    slope_gradient = "alibi_slopes" in wanted

    def step(index, results, of_others: bool):
        w = p.step(index)
        once = met_once and not of_others

        def row_tile(i, results):
            d_query, d_key, d_value, d_slopes, d_bias = results
            start = w.row_start(i)
            # scores and exponentials are computed from the same numbers as in `forward`: XLA then shares those of a
            # problem of one tile
            q_i = w.queries_like(operands.query, i).astype(acc)
            q_scaled_i = w.scaled(q_i)
            do_i = w.queries_like(d_out, i).astype(acc) * w.queries_like(inverse, i)[..., None]
            if p.masked:
                do_i = jnp.where(w.queries_like(empty, i)[..., None], acc.type(0), do_i)
            q_transposed_i, do_transposed_i = jnp.moveaxis(q_i, 4, 2), jnp.moveaxis(do_i, 4, 2)
            row_max_i, shift_i = w.queries_like(row_max, i), w.queries_like(shift, i)
            own = w.own_rows(i)

            def column_tile(j, carry, whole):
                def visit(carry):
                    d_q_i, d_key, d_value, d_slopes, d_bias = carry
                    column = w.column_start(j)
                    keys_j = w.keys_like("key", j)
                    x, d_cap = w.scores(q_scaled_i, keys_j, i, j)
                    # a value that is not finite spoils only dp, which is overwritten where nobody may see it
                    d_p = w.product(do_i, w.keys_like("value", j), transpose=True)
                    see = None if whole else w.visible(i, j)
                    if own is not None:
                        see = own if see is None else see & own
                    if see is not None:
                        x = jnp.where(see, x, acc.type(-np.inf))
                    e = p.weights(x, row_max_i)
                    dropped = w.dropped(e, i, j)
                    d_x = dropped * d_p - e * shift_i[..., None]
                    if d_cap is not None:
                        d_x = d_x * d_cap
                    see = w.after_bias(see, i, j)
                    if see is not None:  # a huge value that nobody sees makes d_p infinite, and 0 · ∞ is NaN
                        d_x = jnp.where(see, d_x, acc.type(0))

                    if of_others:
                        sums = functools.partial(w.of_others, w.all_visible(i, j, own))
                    else:
                        sums = lambda product, weights, x: product(weights, w.clean(x))
                    part = sums(w.product, d_x, keys_j)
                    d_q_i = part if p.column_tiles == 1 and not of_others else d_q_i + part
                    d_key = w.add(d_key, sums(w.transposed_product, d_x, q_transposed_i), column, once)
                    d_value = w.add(d_value, sums(w.transposed_product, dropped, do_transposed_i), column, once)
                    if of_others:
                        return d_q_i, d_key, d_value, d_slopes, d_bias
                    if slope_gradient:
                        distance = (w.columns(j) - w.positions(i)).astype(acc)
                        d_slopes = w.add(d_slopes, (d_x * distance).sum((3, 4)))
                    if bias_gradient:
                        d_bias = _add_bias_gradient(w, d_bias, d_x, start, column)
                    return d_q_i, d_key, d_value, d_slopes, d_bias

                if of_others:
                    finite = _all_finite(q_i, do_i, w.keys_like("key", j))
                    return lax.cond(finite, lambda carry: carry, visit, carry)
                return w.unless_empty(i, j, visit, carry)

            low, end = w.column_tiles(i)
            init = jnp.zeros(q_i.shape, acc), d_key, d_value, d_slopes, d_bias
            if of_others:
                d_q_i, *rest = _loop(low, end, functools.partial(column_tile, whole=False), init)
                return w.put_queries(d_query, d_q_i + w.queries_like(d_query, i), i), *rest
            d_q_i, d_key, d_value, d_slopes, d_bias = w.over_columns(i, low, end, column_tile, init)
            if own is not None:  # rows that the tile shares with its neighbour are zero here
                d_q_i = d_q_i + w.queries_like(d_query, i)
            return w.put_queries(d_query, d_q_i, i), d_key, d_value, d_slopes, d_bias

        return _loop(0, p.row_tiles, row_tile, results)

    # keys and values stay transposed till the end: XLA transposes a whole array several times as fast as a part of one
    results = (p.batch, p.t, p.n, p.h), (p.batch, p.k, p.h, p.s), (p.batch, p.k, p.v, p.s), (p.batch, p.k, p.g)
    init = *(jnp.zeros(shape, acc) for shape in results), jnp.zeros(operands.bias.shape if bias_gradient else (), acc)
    # the gradients by the scaled product; the scale itself follows outside
    results = _loop(0, p.steps, functools.partial(step, of_others=False), init)
    if p.masked:
        visible = jnp.where(empty[..., None], d_out.dtype.type(0), d_out)
        finite = _all_finite(operands.query, operands.key, visible, inverse)
        results = _loop(0, jnp.where(finite, 0, p.steps), functools.partial(step, of_others=True), results)
    d_query, d_key, d_value, d_slopes, d_bias = results

    def scaled(x):
        if operands.scale is None:
            return x * p.spec.scale
        # a sum of nothing is 0, whatever the scale
        return jnp.where(x == 0, x, x * _per_batch_row(p, operands.scale, "scale").astype(acc))

    def cotangent(name):
        operand, repeat = getattr(operands, name), getattr(p.repeats, name)
        if name == "query":
            x = scaled(d_query)
        elif name == "key":
            x = scaled(jnp.moveaxis(d_key, 3, 1))
        elif name == "value":
            x = jnp.moveaxis(d_value, 3, 1)
        elif name == "bias":
            return d_bias.astype(operand.dtype)
        elif name == "scale":
            q = operands.query.astype(acc)
            x = ((_finite(q) if p.masked else q) * d_query).sum((1, 2, 3))
        elif name == "alibi_slopes":
            x = d_slopes.reshape(-1, p.n)
        elif name == "sinks":
            sinks = _per_batch_row(p, operands.sinks, "sinks").astype(acc)
            exponent = jnp.where(empty, acc.type(0), sinks.reshape(-1, 1, p.n) - row_max)
            x = -(jnp.exp(exponent) * shift).sum(1)
        return reduce_rows(x, repeat, operand.shape[0]).astype(operand.dtype)

    return tuple(cotangent(name) for name in wanted)


def _per_batch_row(p: _Problem, x, name: str):
    """`[rows, ...]` as `[B, 1, 1, ...]`, or `[1, 1, 1, ...]` where a single row serves all."""
    if x.shape[0] != 1:
        x = expand_rows(x, getattr(p.repeats, name), p.batch)
    return x.reshape(x.shape[0], 1, 1, *x.shape[1:], *((1,) if x.ndim == 1 else ()))


def _add_bias_gradient(w: _Step, d_bias, d_x, row, column):
    """Adds a tile of score gradients to the bias gradient, summed over the axes that the bias broadcasts."""
    p, c = w.p, w.p.tiles
    rows, heads, t, s = d_bias.shape
    d_x = d_x.reshape(c.batch_rows, c.key_heads * p.g, c.rows, c.columns)
    summed = tuple(axis for axis, size in enumerate((rows, heads, t, s)) if size == 1)
    if summed:
        d_x = d_x.sum(summed, keepdims=True)
    start = (
        row_index(w.row0, p.repeats.bias, rows) if rows != 1 else 0,
        w.head0 * p.g if heads > 1 else 0,
        row if t > 1 else 0,
        column if s > 1 else 0,
    )
    return _add(d_bias, d_x, *start)
