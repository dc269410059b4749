"""The forward pass: online softmax (Milakov & Gimelshein, arXiv:1805.02867) over key tiles."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_mfa.blockwise.arrays import along_last, barrier, largest, where
from jax_mfa.blockwise.columns import with_columns
from jax_mfa.blockwise.parts import in_parts
from jax_mfa.blockwise.problem import Problem
from jax_mfa.blockwise.step import Product, Step
from jax_mfa.blockwise.tiling import Tiling, are_parts, divides_first, forward_tiling, heads_in_one, keys_transposed
from jax_mfa.specification import Operands, Specification, accumulation_dtype


def forward(
    spec: Specification, operands: Operands, differentiated: bool = False, is_part: bool = False
) -> tuple[Array, ...]:
    """Attention, and what the backward pass needs of each row.

    Args:
      differentiated: whether the backward pass may follow in the same program. Of a problem of one tile XLA then shares
        what both compute, as long as they compute it alike.
      is_part: whether this is in the loop of `in_parts`.

    Returns:
      out: [B, T, N, V] of the query's dtype.
      row_max: [B, T, N], the largest score of a row, its sink included.
      row_sum: [B, T, N], the sum of exp(score − row_max). Both are float32 (float64); `sees_nothing` says what they are
        of rows without a softmax.
    """
    operands = with_columns(spec, operands)
    tiles = forward_tiling(spec, operands, differentiated)
    if are_parts(spec, operands, tiles, not differentiated):
        rows, acc = operands.query.shape[:3], accumulation_dtype(operands.query.dtype)
        results = ((*rows, operands.value.shape[-1]), operands.query.dtype), (rows, acc), (rows, acc)
        part = lambda spec, operands, _: forward(spec, operands, is_part=True)
        return in_parts(spec, operands, tiles.batch_rows, (), results, part)
    in_one = heads_in_one(operands, tiles, differentiated)
    transposed = keys_transposed(operands, tiles, differentiated, is_part)
    p = Problem(spec, operands, tiles, in_one, transposed, differentiated)
    acc = p.acc
    every_row_sees = operands.sinks is None and spec.every_row_sees(operands)
    # a row is met once, and its scores may be −∞ all: their sum is 0, and 0 / 0 is NaN, which its softmax is. Nothing
    # else stands between a compiler and one kernel for all of it, and the backward pass finds the same exponentials
    # again: there the maximum is taken as it is.
    plain = p.rows_once and every_row_sees
    shared = plain and p.whole and differentiated
    lowest = acc.type(jnp.finfo(acc).min)
    divided_first = plain and p.whole and divides_first(spec, operands, differentiated)

    def tile(w: Step, results: Any, query: Any, key: Any, value: Any) -> Any:
        p, dtype = w.p, w.p.factors(operands.query, operands.key)

        def visit(results: Any) -> tuple[Any, Any]:
            (sums,), (high, total) = results
            query_i = w.queries_of(query, dtype)
            x, _, see = w.masked_scores(query_i, lambda: w.columns_of("key", key, dtype))
            if not p.whole:  # behind a barrier: exponentials would be those of scores that are masked anew
                x = barrier(x)
            # a finite one where −∞ is not to be shifted by −∞
            new_high = largest(x, lowest) if p.rows_once and not shared else x.max(-1)
            if not p.rows_once:
                # behind a barrier: read by all that need it, and so at any time, they could not be changed in place
                old_high = barrier(w.rows_of(high))
                new_high = jnp.maximum(old_high, new_high)
            probability = w.exponentials(x, w.after_bias(see), new_high)
            if divided_first:
                new_total = probability.sum(-1)
                divisor = new_total if w.attempt is None else where(w.attempt.is_first, new_total, acc.type(1))
                probability = probability * along_last(1 / divisor, probability)  # as the backward pass does
            weights = w.dropped(probability)
            if not divided_first:
                new_total = w.first(probability.sum(-1))
            values = lambda w: w.columns_of("value", value(w.p), w.p.value_dtype)
            (new_sums,), not_finite = w.sums([Product(weights, values, False)])
            if p.rows_once:
                sums, total = w.add_rows(sums, new_sums), w.add_rows(total, new_total)
            else:
                rescale = jnp.exp(old_high - new_high)
                sums, total = w.add_rows(sums, new_sums, rescale), w.add_rows(total, new_total, rescale)
            return ((sums,), (w.put_rows(high, new_high), total)), not_finite

        return w.unless_empty(visit, results)

    rows = p.results()
    init = (jnp.zeros(p.results(p.v), acc),), (jnp.full(rows, lowest), jnp.zeros(rows, acc))

    def run(p: Problem) -> Any:
        dtype = p.factors(operands.query, operands.key)
        key = p.columns_by_head(operands.key, dtype, p.keys_transposed)
        p.ask_before(operands.value)
        value = p.for_products(lambda p: p.columns_by_head(operands.value))
        arrays = p.rows_for_steps(operands.query, dtype), key, value
        return p.over_tiles(lambda w, results: tile(w, results, *arrays), init)

    (sums,), (row_max, total) = p.mended(run)
    if not shared:  # XLA's maxima of long arrays pass over NaN; sums do not
        row_max = where(jnp.isnan(total), acc.type(np.nan), row_max)
    if every_row_sees:
        # of rows that have met no score above −∞, NaN
        row_sum = total if shared else where(total == 0, acc.type(np.nan), total)
        row_max, row_sum = p.along_rows(row_max), p.along_rows(row_sum)
        divisor = p.along_rows(total) if plain else row_sum
        out = sums if divided_first else sums / along_last(divisor, sums)
    else:
        out, row_max, row_sum = _with_lost_rows(p, sums, p.along_rows(row_max), p.along_rows(total))
    return p.kept(p.by_token(out.astype(operands.query.dtype))), p.by_token(row_max), p.by_token(row_sum)


def _with_lost_rows(p: Problem, sums: Array, row_max: Array, total: Any) -> tuple[Array, Array, Any]:
    """Output, maximum and sum of rows, some of which may be `lost`: they have met no score above −∞."""
    o, zero, lost = p.operands, p.acc.type(0), total == 0
    seen = _seen(p, lost)
    undefined, empty = lost & seen, lost & ~seen  # rows that see scores of −∞ alone, and rows that see nothing
    if o.sinks is not None:
        sinks = p.per_row_and_head("sinks")
        high = where(lost, p.acc.type(-np.inf), row_max)
        new_max = where(empty, zero, jnp.maximum(high, sinks))
        rescale = where(undefined, zero, jnp.exp(high - new_max))
        total = total * rescale + jnp.exp(sinks - new_max)
        sums, row_max = sums * along_last(rescale, sums), where(new_max == -np.inf, zero, new_max)
        undefined = undefined & (sinks == -np.inf)
    total = where(empty, zero, where(undefined, p.acc.type(np.nan), total))
    return sums / along_last(where(empty, p.acc.type(1), total), sums), row_max, total


def _seen(p: Problem, lost: Array) -> Array:
    """Whether a row sees anything, shaped as `lost`: right where it is `lost`, of which alone that is asked."""
    if p.spec.every_row_sees(p.operands):
        return jnp.ones(lost.shape, bool)
    if p.spec.only_bounds_hide(p.operands):  # those of tiles of one score
        first, end = Problem(p.spec, p.operands, Tiling(1, p.k, 1, 1)).bounds()
        seen = jnp.broadcast_to(jnp.asarray(first < end)[:, :, None], (p.batch, p.t, p.n))
        return p.along_rows(p.rows_for_steps(seen, bool))

    def tile(w: Step, seen: Any) -> Any:
        any_visible = lambda: w.all_visible().any(-1)
        visit = lambda seen: w.put_rows(seen, any_visible() if p.rows_once else w.rows_of(seen) | any_visible())
        return w.unless_empty(lambda seen: (visit(seen), None), seen)

    none = jnp.zeros(p.results(), bool)
    return p.along_rows(lax.cond(lost.any(), lambda: p.over_tiles(tile, none, attempts=False), lambda: none))
