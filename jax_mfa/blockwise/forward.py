"""The forward pass: online softmax (Milakov & Gimelshein, arXiv:1805.02867) over tiles of keys."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from jax_mfa import partial
from jax_mfa.blockwise.loop import Loop
from jax_mfa.blockwise.tile import Tile
from jax_mfa.problem import Operands, Specification


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
    loop = Loop("blockwise forward", spec, operands, differentiated)
    acc, dtype, names = loop.acc, operands.query.dtype, ("out", "row_max", "row_sum")
    rows, v = operands.query.shape[:3], loop.operands.value.shape[-1]
    all_see, at_once = spec.every_row_sees(loop.operands), loop.tiles_of_keys == 1
    never_empty = all_see and at_once and operands.sinks is None  # where a row of −∞ alone has no softmax

    def queries(tile: Tile, place: Any, results: Any) -> Any:
        q = tile.operand("query").astype(acc)

        def keys(tile: Tile, before: Any) -> Any:
            """Adds a tile of keys: Σ p · value, the largest score, and Σ p."""
            scores, tile.visible = tile.scores(tile.rows_by_keys(q, tile.keys("key")), tile.terms(), False)
            row_max = tile.largest(scores) if before is None else jnp.maximum(before[1], tile.largest(scores))
            # of rows that have seen nothing yet, or only −∞; XLA asks it for each score, which takes time
            shift = row_max if never_empty else jnp.where(row_max == -jnp.inf, 0, row_max)
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
        whole = tile.trusted(lambda tile: loop.over_keys(tile, place, keys, None if at_once else start))
        sums, row_max, row_sum = (tile.natural(name, x) for name, x in zip(names, whole))
        undefined = (row_sum == 0) & (all_see or row_max != -jnp.inf)  # rows whose scores are −∞ all
        row_max = jnp.where(jnp.isnan(row_sum), jnp.nan, row_max)  # XLA's maxima may pass over NaN
        row_max, row_sum = jnp.where(undefined, -jnp.inf, row_max), jnp.where(undefined, jnp.nan, row_sum)
        sinks = None if operands.sinks is None else tile.cut("sinks").astype(acc)[:, None]
        found = partial.finished((sums, row_max, row_sum), sinks, dtype)
        return tuple(tile.put(name, x, part) for name, x, part in zip(names, results, found))

    empty = jnp.zeros((*rows, v), dtype), jnp.zeros(rows, acc), jnp.zeros(rows, acc)
    return loop.over_queries(queries, empty)
