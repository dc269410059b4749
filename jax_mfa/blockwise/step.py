"""What the passes share: the tiles of a problem, the loop over them, and the arithmetic of one."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_mfa.blockwise.tiling import LISTED_TURNS, Tiling, careful_tiling
from jax_mfa.philox import keep_mask
from jax_mfa.specification import Operands, Specification, accumulation_dtype, expand_rows, row_index
from jax_mfa.whole_rows import per_batch_row

_MOST = 2**31 - 1  # of int32
# From JAX 0.11 on, XLA is slow to copy rows of so many bytes and more if some length is no power of two, whether or not
# it also converts them. With arithmetic in it, the same copy took 1.3 to 2 times less on 0.11.2 and 0.12.0.1, but on
# 0.10.2 2.5 times more.
_SLOW_COPIES = 128 if jax.__version_info__ >= (0, 11) else math.inf
# A sum of products over rows takes XLA of JAX 0.10.2 fourteen times as long as the same written as a product (B32 T256
# N12 H32 training 235 → 145 ms); that of 0.12 makes one kernel of the sum and what is beside it.
_SUMS_AS_PRODUCTS = (0, 10) <= jax.__version_info__ < (0, 11)
# Whether rows are transposed for a product over them, or that is left to the product: on 0.10.2 it then takes up to 1.6
# times less (B8 T256 N8 H64 training 41 → 33 ms), on 0.12 up to 1.4 times more.
_ROWS_TRANSPOSED = jax.__version_info__ >= (0, 11)


def finite(x: Any) -> Array:
    return jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))


def _all_finite(products: Any) -> Array:
    """Whether the factors of products are finite, given products [..., y, z] and the axis, y or z, whose elements each
    are sums over all of the factor in question: one of them tells as much as all."""
    # the cheapest reduction; of numbers so large that their sum is infinite it may say no
    first = [slice_axis(x, 0, min(1, x.shape[axis]), axis) for x, axis in products]
    return functools.reduce(jnp.logical_and, [jnp.isfinite(x.sum()) for x in first])


def row_dots(a: Array, b: Array) -> Array:
    """Σ a · b over the last axis."""
    if _SUMS_AS_PRODUCTS:
        return jnp.einsum("...s,...s->...", a, b, precision="highest")
    return (a * b).sum(-1)


def _clip(x: Any, low: Any, high: Any) -> Any:
    """`x` within low..high, in numpy while all three are known."""
    return (jnp if any(isinstance(v, jax.Array) for v in (x, low, high)) else np).clip(x, low, high)


def _before(position: Any, side: int) -> Any:
    """`position − side`, or 0 where that is negative; no sum on the way leaves int32."""
    return _clip(position, side, _MOST) - side


def _after(position: Any, side: int, end: int) -> Any:
    """`position + side + 1`, or `end` where that is more; no sum on the way leaves int32."""
    return _clip(position, -_MOST, end - 1 - side) + side + 1


@jax.custom_jvp
def _barrier(x: Any) -> Any:
    """`lax.optimization_barrier`, which older JAX cannot differentiate."""
    return lax.optimization_barrier(x)


_barrier.defjvp(lambda primals, tangents: (_barrier(*primals), *tangents))


@jax.custom_jvp
def _derivative_of_tanh(x: Any) -> Any:
    """1 / cosh²; 1 − tanh² would cancel where |x| is large."""
    e = jnp.exp(-2 * jnp.abs(x))
    return 4 * e / jnp.square(1 + e)


@_derivative_of_tanh.defjvp
def _derivative_of_tanh_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    (x,), (t_x,) = primals, tangents
    y = _derivative_of_tanh(x)
    return y, -2 * jnp.tanh(x) * y * t_x


def _laid_out(x: Any) -> Array:
    """`x`, rows that were just put into another order: the same numbers, but as a product by 1 where XLA is faster at
    that than at a mere copy."""
    lengths, row = x.shape[1:-1], x.shape[-1] * x.dtype.itemsize
    moves = sum(n > 1 for n in lengths) > 1
    if not moves or row < _SLOW_COPIES or (math.prod(lengths) & (math.prod(lengths) - 1)) == 0:
        return x
    return x * _barrier(jnp.ones((), x.dtype))


def _divmod(a: Array, b: Array) -> tuple[Array, Array]:
    """Quotient and remainder of what is not negative."""
    if isinstance(b, (int, np.integer)) and b == 1:
        return a, jnp.zeros_like(a)
    b = jnp.asarray(b, a.dtype)
    return lax.div(a, b), lax.rem(a, b)


# no index here is negative; where JAX lets us say so, it leaves out the asking. (Indices without a sign leave it out
# everywhere, but the partitioner of JAX 0.4.38 makes comparisons of unlike types of them.)
_NONE_NEGATIVE: dict[str, Any] = (
    {"allow_negative_indices": False}
    if "allow_negative_indices" in inspect.signature(lax.dynamic_slice).parameters
    else {}
)


def _cut(x: Any, shape: tuple[int, ...], *start: Any) -> Array:
    """The part of `x` of this shape from `start` on."""
    return x if x.shape == shape else lax.dynamic_slice(x, _int32(start), shape, **_NONE_NEGATIVE)


def put(x: Any, part: Any, *start: Any) -> Array:
    """`x` with `part` in it, from `start` on."""
    return part if x.shape == part.shape else lax.dynamic_update_slice(x, part, _int32(start), **_NONE_NEGATIVE)


def _int32(indices: Any) -> list[Any]:
    return [np.int32(i) if isinstance(i, (int, np.integer)) else i.astype(jnp.int32) for i in indices]


def add(x: Any, part: Any, *start: Any) -> Array:
    """`x` with `part` added to it, from `start` on."""
    return put(x, _cut(x, part.shape, *start) + part, *start)


def put_axis(x: Any, part: Any, start: Any, axis: int) -> Array:
    """`x` with `part` in it, from `start` on along `axis`."""
    return put(x, part, *(start if k == axis else 0 for k in range(x.ndim)))


def add_axis(x: Any, part: Any, start: Any, axis: int) -> Array:
    """`x` with `part` added to it, from `start` on along `axis`."""
    return add(x, part, *(start if k == axis else 0 for k in range(x.ndim)))


def slice_axis(x: Any, start: Any, size: int, axis: int) -> Array:
    """`size` elements along `axis` from `start`; an axis of size 1 broadcasts and is kept."""
    if x.shape[axis] == 1:
        return x
    shape = *x.shape[:axis], size, *x.shape[axis + 1 :]
    return _cut(x, shape, *(start if k == axis else 0 for k in range(x.ndim)))


def as_words(x: Any, index: Any) -> Array:
    """Numbers of 16 bits as integers, made within the loop of this index: XLA then cuts a part of them before it
    converts that. Numbers it would convert all, and before the loop."""
    if x.dtype.itemsize > 2:
        return x
    x, _ = lax.optimization_barrier((x, index))
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x


def as_numbers(x: Any, dtype: Any) -> Array:
    """What `as_words` took, again."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(lax.optimization_barrier(x), dtype)


def _tile_start(i: Any, size: int, length: int) -> Any:
    """First index of tile `i`: the last tile of a ragged length reaches back over its neighbour."""
    return i * size if length % size == 0 else _clip(i * size, 0, length - size)


def _sums_of_others(products: Any) -> list[Array]:
    """Σ left · right over what is visible and not finite, term by term.

    Args:
      products: left [..., y, l], right [..., l, z], which of the two is the weights, 0 or 1, and which of them are
        visible: bool, of their shape. What they are multiplied with may not be finite.
    """
    sums = [jnp.zeros((*left.shape[:3], right.shape[3]), left.dtype) for left, right, *_ in products]
    for length in {right.shape[2] for _, right, *_ in products}:  # those of one length share a loop, for short programs
        mine = [i for i, (_, right, *_) in enumerate(products) if right.shape[2] == length]

        def add_terms(k: Array, sums: Array, mine: Any = mine) -> Array:
            for i in mine:
                left, right, weights, see = products[i]
                both = left, right = slice_axis(left, k, 1, 3), slice_axis(right, k, 1, 2)
                counts = slice_axis(see, k, 1, 2 if weights else 3) & ~jnp.isfinite(both[1 - weights])
                sums[i] = sums[i] + jnp.where(counts, left * right, 0)
            return sums

        sums = lax.fori_loop(jnp.uint32(0), jnp.uint32(length), add_terms, sums)
    return sums


class Problem:
    """A specification with its operands and its tiles.

    Columns are read in the layout [rows, K, S, ...]: what a step takes of them is then a matrix as it lies. Those that
    are met once are left as they are till then: nothing is read of a cache but the tiles that are visited. Rows and
    their results are left by token, and laid out by each step that meets them: a copy of them all is written to memory
    and read again, that of a tile stays in the caches (B1 T2048 N32 K8 H128 causal forward 387 → 343 ms; B1 T8192
    N8 H64 training takes 54 MiB of temporary memory instead of 129). Only those of a single step are laid out before,
    where XLA makes one pass of it with what is beside it.
    """

    def __init__(
        self,
        spec: Specification,
        operands: Operands,
        tiles: Tiling,
        heads_in_one: bool = False,
        keys_transposed: bool = False,
    ) -> None:
        self.spec, self.operands, self.tiles = spec, operands, tiles
        self.repeats = Operands(*spec.repeats)
        self.batch, self.t, self.n, self.h = operands.query.shape
        self.s, self.k, self.v = operands.value.shape[1:]
        self.g = self.n // self.k
        self.acc = accumulation_dtype(operands.query.dtype)
        self.row_tiles = -(-self.t // tiles.rows)
        self.column_tiles = -(-self.s // tiles.columns)
        overlap = bool(self.t % tiles.rows or self.s % tiles.columns)
        self.rows_once = self.column_tiles == 1 and self.t % tiles.rows == 0
        self.columns_once = self.row_tiles == 1 and self.s % tiles.columns == 0
        self.batch_steps = self.batch // tiles.batch_rows
        self.head_steps = self.k // tiles.key_heads
        self.whole = self.batch_steps == self.head_steps == self.row_tiles == self.column_tiles == 1
        self.met_once = self.row_tiles == 1 and (heads_in_one or not self.whole)
        # rows and their results as [B, K, G · T, ...], else as [B, T, N, ...]
        self.rows_by_head = self.whole
        # all heads in one product over the columns as they lie, of which only blocks are looked at
        self.heads_in_one = heads_in_one
        # keys laid out as [rows, K, H, S] for the scores, and values for their products, in a problem of one tile
        self.keys_transposed = keys_transposed
        # whether anything that is not finite may spoil what does not see it
        self.masked = spec.has_mask(operands) or overlap or self.heads_in_one

    # --- layouts

    def factors(self, rows: Any, columns: Any) -> Any:
        """The dtype in which two operands are multiplied: their own if that is bfloat16, whose products are exact in
        the accumulation dtype; else that."""
        own = all(isinstance(x, jax.Array) and x.dtype == jnp.bfloat16 for x in (rows, columns))
        return rows.dtype if own and not self.heads_in_one else self.acc

    def rows_for_steps(self, x: Any, dtype: Any = None) -> Array:
        """[B, T, N, ...] for `Step.rows_of`: of `rows_by_head` laid out, in this dtype or else that of accumulation;
        or as it is."""
        if not self.rows_by_head:
            return x
        tail = x.shape[3:]
        x = jnp.moveaxis(x.reshape(*x.shape[:2], self.k, self.g, *tail), 1, 3).astype(dtype or self.acc)
        if tail:
            x = _laid_out(x)
        return x.reshape(*x.shape[:2], -1, *tail)

    def rows_transposed(self, x: Any) -> Any:
        """[B, T, N, x] for `Step.transposed_rows_of`: of `rows_by_head` [B, K, x, G · T] in the accumulation dtype; or
        as it is."""
        if not self.rows_by_head or not _ROWS_TRANSPOSED:
            return self.rows_for_steps(x)
        x = x.reshape(*x.shape[:2], self.k, self.g, -1).transpose(0, 2, 4, 3, 1)
        return x.reshape(*x.shape[:3], -1).astype(self.acc)

    def results(self, *tail: int) -> tuple[int, ...]:
        """The shape of results of so many numbers a row: [B, K, G · T, ...] of `rows_by_head`, else [B, T, N, ...]."""
        return (self.batch, *((self.k, self.g * self.t) if self.rows_by_head else (self.t, self.n)), *tail)

    def by_token(self, x: Any) -> Any:
        """`results` as [B, T, N, ...]."""
        if not self.rows_by_head:
            return x
        tail = x.shape[3:]
        x = jnp.moveaxis(x.reshape(*x.shape[:2], self.g, self.t, *tail), 3, 1)
        return x.reshape(*x.shape[:2], self.n, *tail)

    def columns_by_head(self, x: Any, dtype: Any = None, transposed: bool = False) -> Array:
        """[rows, S, K, ...] as [rows, K, S, ...] of this dtype, or else that of accumulation; or as it is where it is
        `met_once`, or no plain array. If `transposed`, a product lays it out again, and in one pass with this."""
        if self.met_once or not isinstance(x, jax.Array):
            return x
        moved = jnp.moveaxis(x, 2, 1).astype(dtype or self.acc)
        return moved if transposed else self.laid_out_columns(moved)

    def laid_out_columns(self, x: Array) -> Array:
        """`_laid_out` of columns by head; as they are if of bfloat16, which a product lays out again."""
        return _laid_out(x) if x.dtype == self.acc else x

    def columns_by_token(self, x: Any, as_rows: bool) -> Any:
        """[B, K, S, x], or [B, K, x, S] if not `as_rows`, as [B, S, K, x]."""
        if not as_rows:
            return jnp.moveaxis(x, 3, 1)
        # with an axis more, XLA lays it out in one pass instead of two
        return _laid_out(jnp.moveaxis(x[:, :, None], 3, 1).reshape(self.batch, self.s, self.k, x.shape[3]))

    def per_row_and_head(self, name: str) -> Any:
        """The operand `[rows, N]` of this name, of a shape that broadcasts to that of `results`."""
        x = per_batch_row(self.spec, self.operands, name, self.acc)
        if not self.rows_by_head:
            return x[:, None]
        x = jnp.broadcast_to(x.reshape(x.shape[0], self.k, self.g, 1), (x.shape[0], self.k, self.g, self.t))
        return x.reshape(*x.shape[:2], -1)

    # --- loops

    def bounds(self) -> tuple[Any, Array]:
        """The column tiles in which a row may see something: first, and the one after the last; [batch steps, row
        tiles] each, of numpy where they are known."""
        spec, o, c = self.spec, self.operands, self.tiles
        (left, right), size = spec.band, c.columns

        def per_step(name: str) -> Any:  # [1 | batch steps, batch rows of a step]
            x = expand_rows(getattr(o, name), getattr(self.repeats, name), self.batch)
            return x.reshape(-1, 1 if x.shape[0] == 1 else c.batch_rows)

        first = _tile_start(np.arange(self.row_tiles, dtype=np.int32), c.rows, self.t)[None]
        low_offset = high_offset = np.full((1, 1), spec.query_offset)
        if o.query_offset is not None:
            offset = per_step("query_offset")
            low_offset, high_offset = offset.min(1, keepdims=True), offset.max(1, keepdims=True)
        low: Any = np.zeros_like(first)
        high: Any = np.full_like(first, self.s)
        if left is not None:
            low = _clip(_before(first + low_offset, left), 0, self.s)
        if right is not None:
            high = _clip(_after(first + c.rows - 1 + high_offset, right, self.s), 0, self.s)
        if o.key_lengths is not None:
            high = _clip(per_step("key_lengths").max(1, keepdims=True), 0, high)
        if o.query_lengths is not None:
            high = jnp.where(first < per_step("query_lengths").max(1, keepdims=True), high, 0)
        end = -(-high // size)
        low = low // size + 0 * end
        return low, _clip(end, low, self.column_tiles)

    def over_tiles(self, body: Callable[..., Any], carry: Any) -> Any:
        """`body(step, i, j, carry)` over all tiles in which a row may see something."""
        if self.whole:
            return body(Step(self, 0, 0), 0, 0, carry)
        low, end = self.bounds()
        if isinstance(end, np.ndarray) and isinstance(self.batch, int):  # not of a program for any batch
            turns = self.batch_steps * self.head_steps * int((end - low).sum())
            if turns <= LISTED_TURNS:
                return self._over_listed_tiles(low, end, turns, body, carry)
        lists = low.shape[0]  # of tiles: one for each step of the batch, or one for all
        counts = (end - low).reshape(-1)
        ends = counts.cumsum()
        ends, shift = (jnp.asarray(x).astype(jnp.uint32) for x in (ends, low.reshape(-1) - (ends - counts)))
        each = jnp.maximum(ends[-1], 1)  # a divisor

        def place(index: Any) -> tuple[Array, ...]:  # in numbers without a sign: quotients of others are long programs
            step, rest = _divmod(index, each)
            row = (ends <= rest).sum(dtype=jnp.uint32)
            i, j = _divmod(row, self.row_tiles)[1], rest + slice_axis(shift, row, 1, 0)[0]
            if lists == 1:
                batch_step, head_step = _divmod(step, self.head_steps)
            else:
                batch_step, head_step = _divmod(row, self.row_tiles)[0], step
            return tuple(x.astype(jnp.int32) for x in (batch_step, head_step, i, j))

        def turn(index: Any, state: Any) -> tuple[tuple[Array, ...], Any]:
            # the place of the next turn is found in this one: what is carried is not computed anew by all that need it
            (batch_step, head_step, i, j), carry = state
            following = place(jnp.asarray(index, jnp.uint32) + jnp.uint32(1))
            return following, body(Step(self, batch_step, head_step), i, j, carry)

        turns = ends[-1] * jnp.uint32(self.head_steps * (self.batch_steps if lists == 1 else 1))
        return lax.fori_loop(jnp.uint32(0), turns, turn, (place(jnp.uint32(0)), carry))[1]

    def _over_listed_tiles(self, low: Any, end: Any, turns: int, body: Callable[..., Any], carry: Any) -> Any:
        """`over_tiles` of bounds that are known, each turn's place read from lists."""
        i, j = zip(*[(i, j) for i in range(self.row_tiles) for j in range(low[0, i], end[0, i])]) if turns else ((), ())
        steps = np.indices((self.batch_steps, self.head_steps, len(i))).reshape(3, -1)
        lists = [*steps[:2], np.array(i, np.int32)[steps[2]], np.array(j, np.int32)[steps[2]]]

        def turn(index: Any, carry: Any) -> Any:
            # what is the same in every turn is no array
            place = (
                int(x[0]) if (x == x[0]).all() else slice_axis(jnp.asarray(x, jnp.int32), index, 1, 0)[0] for x in lists
            )
            batch_step, head_step, i, j = place
            return body(Step(self, batch_step, head_step), i, j, carry)

        return lax.fori_loop(jnp.uint32(0), jnp.uint32(turns), turn, carry) if turns else carry

    def mended(self, run: Any, columns_axis: int | None = None) -> tuple[Any, Any]:
        """`run(problem, careful=False)`: sums, and what takes no care. The sums of a problem of one tile are those of a
        careful run if what they are sums of is not finite; other problems take care tile by tile.

        Args:
          columns_axis: where all sums but the first, whose axis 2 is that of rows, have columns.
        """
        sums, rest = run(self, False)
        if not (self.whole and self.masked):
            return sums, rest
        # a loop of one turn or none, for it changes its arrays in place; `lax.cond` copies what it hands on
        one_head = Problem(self.spec, self.operands, careful_tiling(self.operands))
        one_head.rows_by_head = True  # for results in the layout of this one
        again = lambda _: (jnp.zeros((), bool), run(one_head, True)[0])
        products = [(x, columns_axis if n else 2) for n, x in enumerate(sums) if x.ndim]
        return lax.while_loop(lambda state: state[0], again, (~_all_finite(products), sums))[1], rest

    def weights(self, scores: Array, row_max: Array) -> Array:
        """exp(scores − row_max) of [..., columns] and [...]."""
        x = scores - row_max[..., None]
        if self.operands.bias is not None or self.operands.alibi_slopes is not None:
            # scores that are made again may be rounded otherwise: where they are huge, and one unit in the last place
            # is a large power of e, none may pass the maximum
            x = jnp.where(x > 0, self.acc.type(0), x)
        return jnp.exp(x)


class Step:
    """The operands of one step. R batch rows and E key heads of it, M = G · rows: the rows of a group's heads are rows
    of one matrix. Everything else keeps its letter."""

    def __init__(self, problem: Problem, batch_step: Any, head_step: Any) -> None:
        self.p, c = problem, problem.tiles
        self.row0, self.head0 = batch_step * c.batch_rows, head_step * c.key_heads
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
        return x[row_index(self.row0 + jnp.arange(size), repeat, rows)]

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

    def rows_of(self, x: Any, i: Any, dtype: Any = None) -> Any:
        """The rows of tile `i` of what `rows_for_steps` gave, or of `results`, of this dtype or else that of
        accumulation: `[R, E, M, ...]`."""
        if self.p.rows_by_head:
            c = self.p.tiles
            return _cut(x, (c.batch_rows, c.key_heads, *x.shape[2:]), self.row0, self.head0, *(0,) * (x.ndim - 2))
        rows = jnp.moveaxis(self._rows_as_they_lie(x, i), 1, 3).astype(dtype or self.p.acc)
        return rows.reshape(*rows.shape[:2], -1, *rows.shape[4:])

    def _rows_as_they_lie(self, x: Any, i: Any) -> Array:
        """Those of tile `i` of `[B, T, N, ...]`: `[R, rows, E, G, ...]`."""
        c, g, tail = self.p.tiles, self.p.g, x.shape[3:]
        index = next((n for n in (i, self.head0, self.row0) if isinstance(n, jax.Array)), 0)
        start = self.row0, self.row_start(i), self.head0 * g, *(0,) * len(tail)
        words = _cut(as_words(x, index), (c.batch_rows, c.rows, c.key_heads * g, *tail), *start)
        return as_numbers(words, x.dtype).reshape(c.batch_rows, c.rows, c.key_heads, g, *tail)

    def transposed_rows_of(self, x: Any, i: Any) -> Array:
        """The rows of tile `i` of what `rows_transposed` gave, for `transposed_product`: `[R, E, x, M]`, or `[R, E, M,
        x]` where they are not `_ROWS_TRANSPOSED`."""
        if not _ROWS_TRANSPOSED or self.p.rows_by_head:
            return self.rows_of(x, i)
        rows = self._rows_as_they_lie(x, i).transpose(0, 2, 4, 3, 1)
        return rows.reshape(*rows.shape[:3], -1).astype(self.p.acc)

    def put_rows(self, x: Any, part: Any, i: Any) -> Array:
        """`x`, of the shape of `results`, with `part`, [R, E, M, ...], as the rows of tile `i`."""
        if self.p.rows_by_head:
            return put(x, part, self.row0, self.head0, *(0,) * (x.ndim - 2))
        c, tail = self.p.tiles, part.shape[3:]
        part = jnp.moveaxis(part.reshape(*part.shape[:2], self.p.g, c.rows, *tail), 3, 1)
        part = part.reshape(c.batch_rows, c.rows, -1, *tail)
        return put(x, part, self.row0, self.row_start(i), self.head0 * self.p.g, *(0,) * len(tail))

    def add_rows(self, x: Any, part: Any, i: Any) -> Array:
        """`x`, of the shape of `results`, with `part` added to the rows of tile `i`."""
        return self.put_rows(x, part if self.p.rows_once else self.rows_of(x, i) + part, i)

    def columns_of(self, name: str, x: Any, j: Any, dtype: Any = None) -> Array:
        """The columns of tile `j` of an operand, or of an array like it: `[R|1, E, columns, ...]`, or `[R|1, columns,
        E, ...]` where `heads_in_one`.

        Args:
          x: what `columns_by_head` made of the operand, of this dtype.
        """
        c = self.p.tiles
        if not isinstance(x, jax.Array):  # quantised or in pages: `Columns`
            columns = x.tile(self, j)
            return columns if self.p.heads_in_one else jnp.moveaxis(columns, 2, 1)
        if not self.p.met_once:
            return self.rows(
                name, slice_axis(slice_axis(x, self.column_start(j), c.columns, 2), self.head0, c.key_heads, 1)
            )
        if self.p.whole:
            return self.rows(name, x).astype(dtype or self.p.acc)
        # an index that is the same in every turn is no array, and would keep nothing in the loop
        index = next((n for n in (j, self.head0, self.row0) if isinstance(n, jax.Array)), j)
        words = slice_axis(as_words(x, index), self.column_start(j), c.columns, 1)
        words = self.rows(name, slice_axis(words, self.head0, c.key_heads, 2))
        columns = as_numbers(words, x.dtype).astype(dtype or self.p.acc)
        return columns if self.p.heads_in_one else self.p.laid_out_columns(jnp.moveaxis(columns, 2, 1))

    def by_head(self, columns: Any) -> Array:
        """What `columns_of` gave, as `[R|1, E, columns, ...]`."""
        return jnp.moveaxis(columns, 2, 1) if self.p.heads_in_one else columns

    def add_columns(self, x: Any, part: Any, j: Any, as_rows: bool) -> Array:
        """`x`, [B, K, x, S], with `part`, [R, E, x, columns], added to the columns of tile `j`; [B, K, S, x] and
        [R, E, columns, x] if `as_rows`."""
        start = (self.column_start(j), 0) if as_rows else (0, self.column_start(j))
        return (put if self.p.columns_once else add)(x, part, self.row0, self.head0, *start)

    def add_heads(self, x: Any, part: Any) -> Array:
        """`x`, [B, K, G], with `part`, [R, E, G], added."""
        return add(x, part, self.row0, self.head0, 0)

    # --- rows and columns of a tile

    def merged(self, x: Any) -> Any:
        """`[R|1, 1|E, 1|G, 1|rows, 1|columns]` as `[R|1, 1|E, 1|M, 1|columns]`."""
        r, e, g, t, s = x.shape
        if g * t > 1 and self.p.g > 1:
            x = jnp.broadcast_to(x, (r, e, self.p.g, self.p.tiles.rows, s))
        return x.reshape(r, e, -1, s)

    def row_start(self, i: Any) -> Any:
        return 0 if self.p.row_tiles == 1 else _tile_start(i, self.p.tiles.rows, self.p.t)

    def column_start(self, j: Any) -> Array:
        return _tile_start(j, self.p.tiles.columns, self.p.s)

    def positions(self, i: Any) -> Array:
        """Positions of tile `i`'s rows: [R|1, 1, 1, rows, 1]."""
        t = self.row_start(i) + jnp.arange(self.p.tiles.rows, dtype=jnp.int32).reshape(1, 1, 1, -1, 1)
        return t + (self.p.spec.query_offset if self.offset is None else self.offset)

    def columns(self, j: Any) -> Array:
        return self.column_start(j) + jnp.arange(self.p.tiles.columns, dtype=jnp.int32).reshape(1, 1, 1, 1, -1)

    def distance(self, i: Any, j: Any) -> Array:
        """How far a column stands after a row: [R|1, 1, 1, rows, columns]."""
        return (self.columns(j) - self.positions(i)).astype(self.p.acc)

    def visible(self, i: Any, j: Any) -> Any:
        """Which scores of a tile count: bool, broadcastable to [R, E, M, columns]; None where all do.

        A bias of −∞ is not asked: `scores` are −∞ there.
        """
        p, spec, c = self.p, self.p.spec, self.p.tiles
        rules = []
        column = self.columns(j)
        row = self.row_start(i) + jnp.arange(c.rows, dtype=jnp.int32).reshape(1, 1, 1, -1, 1)
        if p.masked:
            left, right = spec.band
            if (left, right) != (None, None):
                distance = column - self.positions(i)
                if left is not None:
                    rules.append(distance >= -left)
                if right is not None:
                    rules.append(distance <= right)
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
            if self.blocks is not None and spec.mask_block is not None:
                block_rows, block_columns = spec.mask_block
                blocks = jnp.take(self.blocks, row.reshape(-1) // block_rows, axis=3)
                rules.append(jnp.take(blocks, column.reshape(-1) // block_columns, axis=4))
            # what tiles share belongs to the first of them
            if p.t % c.rows:
                rules.append(row >= i * c.rows)
            if p.s % c.columns:
                rules.append(column >= j * c.columns)
        return self.merged(functools.reduce(jnp.logical_and, rules)) if rules else None

    def all_visible(self, i: Any, j: Any) -> Array:
        """The same after the bias: [R, E, M, columns]."""
        c, see = self.p.tiles, self.after_bias(self.visible(i, j), i, j)
        return jnp.broadcast_to(True if see is None else see, (c.batch_rows, c.key_heads, self.p.g * c.rows, c.columns))

    def after_bias(self, see: Array | None, i: Any, j: Any) -> Array | None:
        """`see` without the columns that a bias of −∞ hides; None where nothing is hidden."""
        if not self.p.spec.bias_hides(self.p.operands):
            return see
        shown = self.merged(self.tile_of(self.bias, i, j)) != -np.inf
        return shown if see is None else see & shown

    def segments(self, i: Any, j: Any) -> tuple[Array, Array]:
        return (
            slice_axis(self.query_segments, self.row_start(i), self.p.tiles.rows, 1),
            slice_axis(self.key_segments, self.column_start(j), self.p.tiles.columns, 1),
        )

    def ranges(self, i: Any) -> tuple[Array, Array]:
        """First visible column of tile `i`'s rows and the one after the last: [R|1, rows] each."""
        x = slice_axis(self.key_ranges, self.row_start(i), self.p.tiles.rows, 1)
        return x[..., 0], x[..., 1]

    def unless_empty(self, i: Any, j: Any, body: Callable[..., Any], carry: Any) -> Any:
        """`body(carry)`, or `carry` where segments, ranges or mask blocks show that no score of the tile is visible."""
        some = []
        if self.query_segments is not None:
            a, b = self.segments(i, j)
            some.append(((a.min(1) <= b.max(1)) & (b.min(1) <= a.max(1))).any())
        if self.key_ranges is not None:
            (start, end), column = self.ranges(i), self.column_start(j)
            some.append(((start < column + self.p.tiles.columns) & (end > column) & (start < end)).any())
        if self.blocks is not None and self.p.spec.mask_block is not None:
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

    def tile_of(self, x: Any, i: Any, j: Any) -> Array:
        x = slice_axis(x, self.row_start(i), self.p.tiles.rows, 3)
        return slice_axis(x, self.column_start(j), self.p.tiles.columns, 4)

    # --- products and scores

    def product(self, a: Array, b: Array, transpose: bool = False) -> Array:
        """`[R, E, M, x] · [R|1, E, x, y]`, or `[R|1, E, y, x]` to transpose: [R, E, M, y]."""
        b = jnp.broadcast_to(b, (a.shape[0], *b.shape[1:]))
        if a.dtype != self.p.acc or (transpose and self.p.keys_transposed):
            # where the batch axes are not the first, XLA multiplies numbers of 16 bits as they are, which else it
            # converts, and lays out the second factor as it likes
            assert transpose
            a, b = (jnp.moveaxis(x, 1, 2) for x in (a, b))
            return lax.dot_general(a, b, (((3,), (3,)), ((0, 2), (0, 2))), preferred_element_type=self.p.acc)
        return lax.dot_general(a, b, (((3,), (3 if transpose else 2,)), ((0, 1), (0, 1))))

    def product_in_one(self, a: Array, b: Array, transpose: bool = False) -> Array:
        """`product` with a `b` of `[R|1, columns, E, y]`, whose products of other heads are made and thrown away."""
        r, e, m, _ = a.shape
        own = jnp.eye(e, dtype=bool)[:, None, :, None]
        b = jnp.broadcast_to(b, (r, *b.shape[1:])).reshape(*b.shape[:2], -1)
        if transpose:
            a = jnp.where(own, a[:, :, :, None], 0).reshape(r, e * m, -1)
            x = lax.dot_general(b, a, (((2,), (2,)), ((0,), (0,))))
            return jnp.moveaxis(x, 1, 2).reshape(r, e, m, -1)
        x = lax.dot_general(a.reshape(r, e * m, -1), b, (((2,), (1,)), ((0,), (0,))))
        return jnp.where(own, x.reshape(r, e, m, e, -1), 0).sum(3)

    def transposed_product(self, weights: Array, a: Array) -> Array:
        """`[R, E, x, M] · [R, E, M, columns]` of an `a` as `transposed_rows_of` gives it: [R, E, x, columns]."""
        return lax.dot_general(a, weights, (((3 if _ROWS_TRANSPOSED else 2,), (2,)), ((0, 1), (0, 1))))

    def product_of_rows(self, weights: Array, a: Array) -> Array:
        """`[R, E, columns, M] · [R, E, M, x]` of weights [R, E, M, columns]: [R, E, columns, x]."""
        # laid out anew behind a barrier, by way of one axis more: XLA is slow at products of which the first factor is
        # transposed, and at transposing the last two axes
        r, e, m, s = weights.shape
        weights = _barrier(jnp.moveaxis(weights[:, :, None], 4, 2).reshape(r, e, s, m))
        return lax.dot_general(weights, a, (((3,), (2,)), ((0, 1), (0, 1))))

    def sums(self, products: Any, i: Any, j: Any, careful: bool) -> Any:
        """`product(weights, x)` of each (product, weights, x), of which what is hidden has no part though `x` is not
        finite: 0 · NaN is NaN. What is not finite is then added term by term; it is rare.

        Args:
          products: `product`, `product_of_rows` or `transposed_product` each, with weights [R, E, M, columns] that are
            zero where hidden, and what gives x: what `columns_of`, `rows_of` or `transposed_rows_of` does. Given
            inside of a branch that is seldom taken, it is not kept for that branch.
          careful: that it be added so; otherwise only where a sum is not finite and something may be hidden.
        """

        def multiplied(weights: list[Any]) -> list[Array]:
            return [
                (self.product_in_one if self.p.heads_in_one else product)(x, y())
                for (product, _, y), x in zip(products, weights)
            ]

        def with_care(weights: list[Any]) -> list[Any]:
            ys = [self.by_head(y()) for *_, y in products]
            see = self.all_visible(i, j)
            factors: Any = {  # of weights x and what they are multiplied with; which are the weights; what they see
                self.product: lambda x, y: (x, y, 0, see),
                self.product_of_rows: lambda x, y: (x.swapaxes(2, 3), y, 0, see.swapaxes(2, 3)),
                self.transposed_product: lambda x, y: (y if _ROWS_TRANSPOSED else y.swapaxes(2, 3), x, 1, see),
            }
            others = _sums_of_others([factors[product](x, y) for (product, *_), x, y in zip(products, weights, ys)])
            return [product(x, finite(y)) + z for (product, *_), x, y, z in zip(products, weights, ys, others)]

        weights = [x for _, x, _ in products]
        if careful:
            return with_care(weights)
        if self.p.whole or not self.p.masked:
            return multiplied(weights)
        # as XLA multiplies them, and behind a barrier: it would compute them a second time for the branch
        flat = [_barrier(x.reshape(-1, *x.shape[2:])) for x in weights]
        kept = lambda: [x.reshape(like.shape) for x, like in zip(flat, weights)]
        sums = multiplied(kept())
        axes = [3 if product == self.transposed_product else 2 for product, *_ in products]
        return lax.cond(_all_finite(zip(sums, axes)), lambda: sums, lambda: with_care(kept()))

    def factor(self) -> float:
        """The scale: a number, or [R|1, 1, 1, 1]."""
        return self.p.spec.scale if self.scale is None else self.merged(self.scale)

    def scores(self, q: Array, keys: Callable[[], Array], i: Any, j: Any) -> tuple[Array, Array | None]:
        """Scores of a tile after bias, slopes and soft cap, and the derivative of the cap (None without one).

        `keys` gives what `columns_of` does, as in `sums`.
        """
        if self.p.heads_in_one:
            x = self.product_in_one(q, keys(), transpose=True)
            by_head = lambda: self.product(q, self.by_head(keys()), transpose=True)
            x = lax.cond(jnp.isfinite(x.sum()), lambda: x, by_head)
        else:
            x = self.product(q, keys(), transpose=True)
        x = x * self.factor()
        if self.bias is not None:
            bias = self.merged(self.tile_of(self.bias, i, j)).astype(x.dtype)
            x = x + bias
        if self.slopes is not None:
            x = x + self.merged(self.slopes * self.distance(i, j))
        if self.p.spec.bias_hides(self.p.operands):  # whatever the rest is
            x = jnp.where(bias == -np.inf, bias, x)
        cap, d_cap = self.p.spec.logits_soft_cap, None
        if cap is not None:
            x = x / cap
            x, d_cap = cap * jnp.tanh(x), _derivative_of_tanh(x)
        if self.slopes is not None or cap is not None:
            # a compiler that contracts the last product differently for a row's maximum and for the exponent would
            # shift huge scores against each other
            x = _barrier(x)
        return x, d_cap

    def masked_scores(self, q: Array, keys: Callable[[], Array], i: Any, j: Any) -> tuple[Array, Array | None, Any]:
        """`scores`, −∞ where nothing is visible; the derivative of the cap; and `visible`."""
        x, d_cap = self.scores(q, keys, i, j)
        see = self.visible(i, j)
        # a query or key that is not finite spoils only scores; those that nobody may see are overwritten
        return (x if see is None else jnp.where(see, x, self.p.acc.type(-np.inf))), d_cap, see

    def probability(
        self, scores: Array, see: Array | None, row_max: Array, inverse: Any, i: Any, j: Any
    ) -> tuple[Array, Array | None]:
        """The probabilities of `masked_scores`, given the rows' maxima and inverse sums; and what is visible after the
        bias, None where all is."""
        probability = self.p.weights(scores, row_max) * inverse[..., None]
        see = self.after_bias(see, i, j)
        # NaN in a row whose softmax is not defined
        return (probability if see is None else jnp.where(see, probability, self.p.acc.type(0))), see

    def dropped(self, probability: Any, i: Any, j: Any) -> Any:
        """The probabilities of a tile after dropout."""
        o, c, p = self.p.operands, self.p.tiles, self.p
        if o.dropout is None:
            return probability
        words = self.rows("dropout", o.dropout)
        seed0, seed1, batch, head0, row0, column0 = (words[:, w].reshape(-1, 1, 1, 1, 1) for w in range(6))
        head = jnp.arange(p.n, dtype=jnp.uint32).reshape(1, p.k, p.g, 1, 1)
        head = head0 + slice_axis(head, self.head0, c.key_heads, 1)
        row = self.row_start(i) + jnp.arange(c.rows).reshape(1, 1, 1, -1, 1)
        row, column = row0 + row.astype(jnp.uint32), column0 + jnp.asarray(self.column_start(j), jnp.uint32)
        keep = keep_mask(p.spec.dropout_rate, (seed0, seed1), batch, head, row, column, c.columns)
        # a division, because XLA on CPU would compute a product, and the mask with it, once for each of its uses
        return probability / self.merged(jnp.where(keep, p.acc.type(1 - p.spec.dropout_rate), p.acc.type(np.inf)))
