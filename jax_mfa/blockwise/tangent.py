"""Forward mode: the tangents of output and log-sum-exp, by the same tiles."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jax_mfa import partial
from jax_mfa.blockwise.loop import Loop
from jax_mfa.blockwise.tile import Tile
from jax_mfa.problem import Operands, Specification, sees_nothing


def tangent(
    spec: Specification, operands: Operands, results: Any, wrt: tuple[str, ...], tangents: Any
) -> tuple[Array, Array]:
    """What `out` and the log-sum-exp change by, where the operands named in `wrt` change by `tangents`.

    With t(score) the change of a score, that of the log-sum-exp is Σ probability · t(score), and that of the output
    Σ dropped(probability) · (t(score) · value + t(value)) − out · t(log-sum-exp).

    Args:
      results: those of `forward`.
      tangents: of the shape and dtype of their operands.

    Returns:
      [B, T, N, V] of the query's dtype, and [B, T, N] float32 (float64).
    """
    loop = Loop("blockwise forward", spec, operands)
    operands, acc, moved = loop.operands, loop.acc, dict(zip(wrt, tangents))
    if spec.value_size is not None and "key" in moved:
        moved["value"] = moved["key"][..., : spec.value_size]
    out, row_max, row_sum = results
    total = row_sum if spec.every_row_sees(operands) else jnp.where(sees_nothing(row_sum), 1, row_sum)

    def queries(tile: Tile, place: Any, results: Any) -> Any:
        q = tile.operand("query").astype(acc)
        row_max_i, inverse_i = tile.operand("row_max", row_max), 1 / tile.operand("row_sum", total)
        t_q = tile.operand("query", moved["query"]).astype(acc) if "query" in moved else None

        def keys(tile: Tile, carry: Any) -> Any:
            t_out, t_lse = carry
            k, given = tile.keys("key"), tile.terms()
            products = tile.rows_by_keys(q, k)
            pairs = [(t_q, k)] if t_q is not None else []
            pairs += [(q, tile.keys("key", moved["key"]))] if "key" in moved else []
            t_products = sum((tile.rows_by_keys(*pair) for pair in pairs), jnp.zeros_like(products))
            scores, t_scores, tile.visible = jax.jvp(
                lambda products, moving: tile.scores(products, {**given, **moving}),
                (products, {name: x for name, x in given.items() if name in moved}),
                (t_products, tile.terms({name: x for name, x in moved.items() if name in given})),
                has_aux=True,
            )
            p, kept = tile.probability(scores, row_max_i, inverse_i), tile.dropped()
            t_p = p * t_scores
            p_kept, t_p_kept = (p, t_p) if kept is None else (p * kept, t_p * kept)
            changes = [(tile.weights_by_keys, t_p_kept, tile.keys("value"), False)]
            if "value" in moved:
                changes.append((tile.weights_by_keys, p_kept, tile.keys("value", moved["value"]), True))
            t_out = sum(tile.products(*changes), t_out)
            return [t_out, t_lse + t_p.sum(-1, keepdims=True)]

        start = [jnp.zeros((*q.shape[:-1], size), acc) for size in (operands.value.shape[-1], 1)]
        found = tile.trusted(lambda tile: loop.over_keys(tile, place, keys, start))
        parts = zip(("out", "row_max"), results, found)
        return tuple(tile.add(name, x, tile.natural(name, part)) for name, x, part in parts)

    empty = jnp.zeros(out.shape, acc), jnp.zeros(row_max.shape, acc)
    t_out, t_lse = loop.over_queries(queries, empty)
    if "sinks" in moved:
        t_sinks = partial.sinks_of(spec, operands, acc, moved["sinks"])
        t_lse = t_lse + partial.sink_probability(spec, operands, row_max, row_sum) * t_sinks
    return (t_out - out.astype(acc) * t_lse[..., None]).astype(operands.query.dtype), t_lse
