"""The backward pass: the probabilities of a tile are recomputed (Dao, arXiv:2307.08691, section 3.1), from a row's
maximum and sum rather than from its log-sum-exp, which has not the digits where all scores of a row are huge."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import Array

from jax_mfa import whole_rows
from jax_mfa.blockwise.arrays import add, along_last, barrier, finite, row_dots, settled, where
from jax_mfa.blockwise.columns import with_columns
from jax_mfa.blockwise.parts import in_parts
from jax_mfa.blockwise.problem import Problem
from jax_mfa.blockwise.step import Product, Step
from jax_mfa.blockwise.tiling import are_parts, backward_tiling, gradients_as_rows, keys_transposed, of_steps
from jax_mfa.specification import Operands, Specification, reduce_rows, row_index, sees_nothing


def backward(
    spec: Specification,
    operands: Operands,
    out: Array,
    row_max: Array,
    row_sum: Array,
    d_out: Array,
    d_lse: Array,
    wanted: tuple[str, ...],
    all_columns: bool = True,
    is_part: bool = False,
) -> tuple[Array, ...]:
    """Cotangents of the operands named in `wanted`, each of its operand's shape and dtype.

    Args:
      out, row_max, row_sum: results of `forward`.
      d_out: [B, T, N, V]; d_lse: [B, T, N]. What they hold for rows that see nothing is ignored.
      all_columns: whether the operands hold all columns that the rows have met; else their part of the cotangents is
        found.
      is_part: as of `forward`.
    """
    operands = with_columns(spec, operands)
    c = backward_tiling(spec, operands)
    each_has_own = all(spec.has_own_rows(operands, name) for name in wanted)
    if each_has_own and are_parts(spec, operands, c, alone=False):
        by_batch_row = out, row_max, row_sum, d_out, d_lse
        results = [(x.shape, x.dtype) for x in (getattr(operands, name) for name in wanted)]

        def part(spec: Specification, operands: Operands, rows: Any) -> tuple[Array, ...]:
            out, row_max, row_sum, d_out, d_lse = rows
            return backward(spec, operands, out, row_max, row_sum, d_out, d_lse, wanted, all_columns, is_part=True)

        return in_parts(spec, operands, c.batch_rows, by_batch_row, results, part)
    c = of_steps(operands, c)
    slope_gradient, bias_gradient = "alibi_slopes" in wanted, "bias" in wanted
    of_columns = "key" in wanted or "value" in wanted
    if bias_gradient and operands.bias.shape[0] != 1:
        c = dataclasses.replace(c, batch_rows=1)  # a step then adds to a single row of the bias
    transposed = keys_transposed(operands, c, True, is_part)
    p = Problem(spec, operands, c, keys_transposed=transposed, differentiated=True, is_backward=True)
    acc = p.acc
    d_rows, found_sum = d_out, row_sum
    # a tile that holds whole rows finds their shift in its own scores, and has no need of the output
    whole_rows_in_tile = all_columns and p.column_tiles == 1 and "sinks" not in wanted
    shift = -d_lse.astype(acc) if whole_rows_in_tile else whole_rows.shift(out, d_out, d_lse, acc)
    as_rows = gradients_as_rows(spec, operands, p.tiles)
    if not spec.every_row_sees(operands):
        empty = sees_nothing(row_sum)
        row_sum = where(empty, acc.type(1), row_sum)
        shift = where(empty, acc.type(0), shift)
        d_rows = where(along_last(empty, d_out), d_out.dtype.type(0), d_out)

    # whether a row's shift tells that its query and cotangent are finite: it comes of the output, which then is not, if
    # every row sees something, and no cap or sink makes anything finite of scores that are not
    rows_tell = not whole_rows_in_tile and spec.every_row_sees(operands)
    rows_tell = rows_tell and spec.logits_soft_cap is None and operands.sinks is None

    def product_with_rows(w: Step, weights: Array, x: Any, signed: bool) -> Product:
        if as_rows:
            return Product(w.transposed_weights(weights), lambda w: w.rows_of(x(w.p)), signed, weights_transposed=True)
        return Product(weights, lambda w: w.transposed_rows_of(x(w.p)), signed, transposed=True)

    def tile(w: Step, results: Any, rows: Any, of_products: Any, columns: Any) -> Any:
        p, (query, d_rows, shift, row_max, norms) = w.p, rows
        of_scores, of_values = p.factors(operands.query, operands.key), p.factors(operands.query, operands.value)
        (query_again, d_again, key_again), (key, value) = of_products, columns

        def visit(results: Any) -> tuple[Any, Any]:
            (d_query, d_key, d_value), (d_slopes, d_bias) = results
            query_i, d_i = w.queries_of(query, of_scores), w.rows_of(d_rows, of_values)
            x, d_cap, see = w.masked_scores(query_i, lambda: w.columns_of("key", key, of_scores))
            # a value that is not finite spoils only dp, which is overwritten where nobody may see it
            d_p = w.product(d_i, w.columns_of("value", value, of_values), transpose=True)
            probability, see = w.probability(x, see, w.rows_of(row_max), w.rows_of(norms))
            dropped = w.dropped(probability)
            shift_i = w.rows_of(shift)
            if whole_rows_in_tile:
                shift_i += row_dots(dropped, d_p) if see is None else w.shown(dropped * d_p, see).sum(-1)
            shift_i = along_last(shift_i, d_p)
            if operands.dropout is None:
                d_x = probability * (d_p - shift_i)
            else:
                d_x = dropped * d_p - probability * shift_i
            if d_cap is not None:
                d_x = d_x * d_cap
            # a huge value that nobody sees makes d_p infinite, and 0 · ∞ is NaN
            weights = w.signed(d_x, probability, see)
            products = [Product(weights, lambda w: w.columns_of("key", key_again(w.p)), True)]
            if of_columns:
                found = (weights, query_again, True), (w.unsigned(dropped, see), d_again, False)
                products += [product_with_rows(w, *each) for each in found]
            (d_query_i, *d_columns), not_finite = w.sums(products)
            d_query = w.add_rows(d_query, d_query_i)
            if of_columns:
                d_key, d_value = (w.add_columns(x, part, as_rows) for x, part in zip((d_key, d_value), d_columns))
            if slope_gradient or bias_gradient:
                d_x = w.shown(d_x, see)
            if slope_gradient:
                moment = w.first((d_x * w.merged(w.distance().astype(acc))).sum(3))
                d_slopes = w.add_heads(d_slopes, moment.reshape(*moment.shape[:2], p.g, -1).sum(3))
            if bias_gradient:
                d_bias = _add_bias_gradient(w, d_bias, w.first(d_x), w.row_start, w.column_start)
            return ((d_query, d_key, d_value), (d_slopes, d_bias)), not_finite

        return w.unless_empty(visit, results)

    # keys and values stay transposed till the end: XLA transposes a whole array several times as fast as a part of one
    shape_of = lambda size: (p.batch, p.k, *((p.s, size) if as_rows else (size, p.s))) if of_columns else ()
    shapes = p.results(p.h), shape_of(p.h), shape_of(p.v), (p.batch, p.k, p.g)
    zeros = [jnp.zeros(shape, acc) for shape in (*shapes, operands.bias.shape if bias_gradient else ())]
    init = tuple(zeros[:3]), tuple(zeros[3:])

    def run(p: Problem) -> Any:
        # scores and exponentials are computed from the same numbers as in `forward`: XLA then shares those of a problem
        # of one tile
        of_scores, of_values = p.factors(operands.query, operands.key), p.factors(d_rows, operands.value)
        rows = [p.rows_for_steps(operands.query, of_scores), p.rows_for_steps(d_rows, of_values)]
        shift_of_rows = p.rows_for_steps(shift)
        if not p.rows_by_head:
            shift_of_rows = settled(shift_of_rows, 0)
        rows.append(shift_of_rows)
        rows += [p.rows_for_steps(row_max), p.norms(p.rows_for_steps(row_sum))]
        asked = [shift_of_rows] if rows_tell else [operands.query, d_rows]
        p.ask_before(operands.key, *(asked if of_columns else ()))
        laid = lambda x, p: (p.rows_for_steps if as_rows else p.rows_transposed)(x)
        of_products = [p.for_products(functools.partial(laid, x)) for x in (operands.query, d_rows)]
        of_products.append(p.for_products(lambda p: p.columns_by_head(operands.key)))
        key = of_products[-1](p)
        if key is not operands.key and (key.dtype != of_scores or p.keys_transposed):
            key = p.columns_by_head(operands.key, of_scores, p.keys_transposed)
        columns = key, p.columns_by_head(operands.value, of_values, p.keys_transposed)
        return p.over_tiles(lambda w, results: tile(w, results, rows, of_products, columns), init)

    # the gradients by the scaled product; the scale itself follows outside, in the layout of the results and behind a
    # barrier: where they have the shape of scores, XLA would take both scales for one array, and keep that (B128 T32 N4
    # H32 bfloat16 training 1.66 → 1.54 ms)
    (d_query, d_key, d_value), (d_slopes, d_bias) = p.mended(run)

    def scaled(x: Any) -> Array:  # [B, ...]
        if operands.scale is None:
            return x * barrier(jnp.asarray(spec.scale, acc))
        scale = whole_rows.per_batch_row(spec, operands, "scale", acc).reshape(-1, *(1,) * (x.ndim - 1))
        return where(x == 0, x, x * scale)  # a sum of nothing is 0, whatever the scale

    def cotangent(name: str) -> Any:
        operand, repeat = getattr(operands, name), getattr(p.repeats, name)
        if name == "query":
            x = scaled(p.by_token(d_query))
        elif name == "key":
            x = scaled(p.columns_by_token(d_key, as_rows))
        elif name == "value":
            x = p.columns_by_token(d_value, as_rows)
        elif name == "bias":
            return d_bias.astype(operand.dtype)
        elif name == "scale":
            query = operands.query.astype(acc)
            x = ((finite(query) if p.masked else query) * p.by_token(d_query)).sum((1, 2, 3))
        elif name == "alibi_slopes":
            x = d_slopes.reshape(-1, p.n)
        elif name == "sinks":
            return whole_rows.sink_gradient(spec, operands, row_max, found_sum, shift).astype(operand.dtype)
        return p.kept(reduce_rows(x, repeat, operand.shape[0]).astype(operand.dtype))

    return tuple(cotangent(name) for name in wanted)


def _add_bias_gradient(w: Step, d_bias: Any, d_x: Any, row: Any, column: Any) -> Array:
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
    return add(d_bias, d_x, *start)
