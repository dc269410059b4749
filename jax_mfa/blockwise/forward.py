"""The forward pass: online softmax (Milakov & Gimelshein, arXiv:1805.02867) over tiles of keys."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from jax_mfa.blockwise.key_values import viewed
from jax_mfa.blockwise.loop import Loop
from jax_mfa.blockwise.tile import Tile
from jax_mfa.blockwise.tiles import few_queries, tiles_of
from jax_mfa.problem import Operands, Specification, accumulation_dtype


def forward(spec: Specification, operands: Operands, differentiated: bool = False) -> tuple[Array, ...]:
    """Attention, and what the backward pass needs of each row.

    Args:
      differentiated: whether a backward pass may follow in the same program.

    Returns:
      out: [B, T, N, V] of the query's dtype.
      row_max: [B, T, N], the largest score of a row, its sink included.
      row_sum: [B, T, N], the sum of exp(score − row_max). Both are float32 (float64); `sees_nothing` says what they are
        of rows without a softmax.
    """
    operands = viewed(spec, operands)
    tiles = tiles_of("blockwise forward", spec, operands, differentiated)
    acc, dtype = accumulation_dtype(operands.query.dtype), operands.query.dtype
    rows, v = operands.query.shape[:3], operands.value.shape[-1]

    loop = Loop(spec, operands, tiles, all_heads=few_queries(spec, operands, differentiated))

    def queries(tile: Tile, place: Any, results: Any) -> Any:
        q = tile.operand("query").astype(acc)

        def keys(tile: Tile, before: Any) -> Any:
            """Adds a tile of keys: Σ p · value, the largest score, and Σ p."""
            scores, tile.visible = tile.scores(tile.rows_by_keys(q, tile.keys("key")), tile.terms(), False)
            row_max = tile.largest(scores) if before is None else jnp.maximum(before[1], tile.largest(scores))
            shift = jnp.where(row_max == -jnp.inf, 0, row_max)  # of rows that have seen nothing yet
            p, kept = jnp.exp(scores - shift), tile.dropped()
            p_kept, row_sum = p if kept is None else p * kept, p.sum(-1, keepdims=True)
            (sums,) = tile.products((tile.weights_by_keys, p_kept, tile.keys("value"), True))
            if before is not None:
                rescale = jnp.exp(before[1] - shift)
                row_sum = rescale * before[2] + row_sum
                sums = jnp.where(jnp.isfinite(before[0]), rescale, 1) * before[0] + sums  # 0 · ∞ is NaN
            return sums, row_max, row_sum

        none = jnp.zeros((*q.shape[:-1], 1), acc)
        start = jnp.zeros((*q.shape[:-1], v), acc), jnp.full(none.shape, -jnp.inf, acc), none
        sums, *parts = loop.over_keys(tile, place, keys, None if loop.tiles_of_keys == 1 else start)

        out, row_max, row_sum = _normalised(tile, sums, *parts)
        found = zip(("out", "row_max", "row_sum"), results, (out, row_max, row_sum), (dtype, acc, acc))
        return tuple(tile.put(name, x, tile.natural(name, part), kind) for name, x, part, kind in found)

    empty = jnp.zeros((*rows, v), dtype), jnp.zeros(rows, acc), jnp.zeros(rows, acc)
    return loop.over_queries(queries, empty)


def _normalised(tile: Tile, sums: Any, row_max: Any, row_sum: Any) -> tuple[Array, Array, Array]:
    """Output, maximum and sum of rows, of Σ exp(score − row_max) · value, with their sinks."""
    spec, o, acc = tile.spec, tile.operands, tile.acc
    empty = jnp.zeros((), bool) if spec.every_row_sees(o) else row_max == -jnp.inf
    undefined = (row_sum == 0) & ~empty  # rows whose scores are −∞ all
    row_max = jnp.where(row_max == -jnp.inf, 0, row_max)
    if o.sinks is not None:
        sinks = tile.operand("sinks").astype(acc)
        high = jnp.where(empty, 0, jnp.maximum(jnp.where(undefined, -jnp.inf, row_max), sinks))
        undefined = undefined & (sinks == -jnp.inf)
        high = jnp.where(high == -jnp.inf, 0, high)
        rescale = jnp.where(undefined, 0, jnp.exp(row_max - high))
        sums, row_sum, row_max = sums * rescale, row_sum * rescale + jnp.exp(sinks - high), high
    row_sum = jnp.where(empty, 0, jnp.where(undefined, jnp.nan, row_sum))
    row_max = jnp.where(jnp.isnan(row_sum) & ~undefined, jnp.nan, row_max)
    return sums / jnp.where(empty, 1, row_sum), row_max, row_sum
