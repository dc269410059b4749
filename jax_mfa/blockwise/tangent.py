"""Forward mode: the tangents of output and log-sum-exp, by the same tiles."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array

from jax_mfa import whole_rows
from jax_mfa.blockwise.arrays import along_last, where
from jax_mfa.blockwise.columns import with_columns
from jax_mfa.blockwise.problem import Problem
from jax_mfa.blockwise.step import Product, Step
from jax_mfa.blockwise.tiling import forward_tiling, keys_transposed, of_steps
from jax_mfa.specification import Operands, Specification, sees_nothing


def tangent(
    spec: Specification,
    operands: Operands,
    out: Array,
    row_max: Array,
    row_sum: Array,
    wanted: tuple[str, ...],
    tangents: Any,
) -> tuple[Array, Array]:
    """What `out` and the log-sum-exp change by, where the operands named in `wanted` change by `tangents`.

    With t(score) the change of a score, that of the log-sum-exp is Σ probability · t(score), and that of the output
    Σ dropped(probability) · (t(score) · value + t(value)) − out · t(log-sum-exp).

    Args:
      out, row_max, row_sum: results of `forward`.
      tangents: of the shape and dtype of their operands.

    Returns:
      [B, T, N, V] of the query's dtype, and [B, T, N] float32 (float64).
    """
    operands = with_columns(spec, operands)
    tiles = of_steps(operands, forward_tiling(spec, operands, differentiated=True))
    # as in `forward`: XLA then shares the scores and exponentials of a problem of one tile
    transposed = keys_transposed(operands, tiles, differentiated=True)
    p = Problem(spec, operands, tiles, keys_transposed=transposed, differentiated=True)
    acc, t = p.acc, Operands(**{**dict.fromkeys(Operands._fields), **dict(zip(wanted, tangents))})
    divisor = row_sum
    if not spec.every_row_sees(operands):
        divisor = where(sees_nothing(row_sum), acc.type(1), row_sum)

    def tile(w: Step, results: Any, rows: Any, columns: Any, values: Any) -> Any:
        dtype, (query, t_query, *found) = w.p.factors(operands.query, operands.key), rows
        query_i = w.queries_of(query, dtype)
        t_query_i: Any = None if t_query is None else w.queries_of(t_query, dtype)
        row_max_i, norm_i = (w.rows_of(x) for x in found)

        def visit(results: Any) -> tuple[Any, Any]:
            (sums,), (lse,) = results
            key_j, t_key_j = (functools.partial(w.columns_of, "key", x, query_i.dtype) for x in columns)
            value_j, t_value_j = (functools.partial(lambda x, w: w.columns_of("value", x(w.p)), x) for x in values)
            x, d_cap, see = w.masked_scores(query_i, key_j)
            probability, see = w.probability(x, see, row_max_i, norm_i)

            t_x = jnp.zeros((), acc)
            if t.query is not None:
                t_x = t_x + w.product(t_query_i, key_j(), transpose=True)
            if t.key is not None:
                t_x = t_x + w.product(query_i, t_key_j(), transpose=True)
            t_x = w.scaled(t_x)
            if t.scale is not None:
                t_scale = w.merged(w.per_row("scale", t.scale).astype(acc))
                t_x = t_x + t_scale * w.product(query_i, key_j(), transpose=True)
            if t.bias is not None:
                t_x = t_x + w.merged(w.tile_of(w.scores_like("bias", t.bias))).astype(acc)
            if t.alibi_slopes is not None:
                t_x = t_x + w.merged(w.per_head("alibi_slopes", t.alibi_slopes) * w.distance().astype(acc))
            if d_cap is not None:
                t_x = t_x * d_cap
            moved = probability * w.shown(t_x, see)

            dropped = w.dropped(probability)
            products = [Product(w.signed(w.dropped(moved), dropped, see), value_j, True)]
            if t.value is not None:
                products.append(Product(w.unsigned(dropped, see), t_value_j, False))
            found, not_finite = w.sums(products)
            return ((w.add_rows(sums, sum(found)),), (w.add_rows(lse, w.first(moved.sum(-1))),)), not_finite

        return w.unless_empty(visit, results)

    init = (jnp.zeros(p.results(p.v), acc),), (jnp.zeros(p.results(), acc),)

    def run(p: Problem) -> Any:
        given = lambda layout, x, *details: None if x is None else layout(x, *details)
        dtype = p.factors(operands.query, operands.key)
        rows = [given(p.rows_for_steps, x, dtype) for x in (operands.query, t.query)]
        rows += [p.rows_for_steps(row_max), p.norms(p.rows_for_steps(divisor))]
        columns = [given(p.columns_by_head, x, dtype, p.keys_transposed) for x in (operands.key, t.key)]
        laid = lambda x, p: given(p.columns_by_head, x)
        values = [p.for_products(functools.partial(laid, x)) for x in (operands.value, t.value)]
        return p.over_tiles(lambda w, results: tile(w, results, rows, columns, values), init)

    (sums,), (lse,) = p.mended(run)
    sums, lse = p.by_token(sums), p.by_token(p.along_rows(lse))
    if t.sinks is not None:
        t_sinks = whole_rows.per_batch_row(spec, operands, "sinks", acc, t.sinks)[:, None]
        lse = lse + whole_rows.sink_probability(spec, operands, row_max, row_sum) * t_sinks
    t_out = sums - out.astype(acc) * along_last(lse, sums)
    return t_out.astype(operands.query.dtype), lse
