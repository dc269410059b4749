"""The backward pass: the probabilities of a tile are recomputed (Dao, arXiv:2307.08691, section 3.1), from a row's
maximum and sum rather than from its log-sum-exp, which has not the digits where all scores of a row are huge."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jax_mfa import partial
from jax_mfa.blockwise.loop import Loop
from jax_mfa.blockwise.tile import OF_SCORES, Tile
from jax_mfa.problem import Operands, Specification, reduce_entries, sees_nothing


def backward(
    spec: Specification, operands: Operands, results: Any, wrt: tuple[str, ...], cotangents: Any
) -> tuple[Array, ...]:
    """Cotangents of the operands named in `wrt`, each of its operand's shape and dtype.

    With delta = Σ d_out · out − d_lse, d(score) = probability · (dropout · d(probability) − delta).

    Args:
      results: those of `forward`, over all keys that rows see, of which operands may hold some.
      cotangents: d_out [B, T, N, V] and d_lse [B, T, N]. What they hold for rows that see nothing is ignored.
    """
    loop = Loop("blockwise backward", spec, operands, once=True)
    operands, acc = loop.operands, loop.acc
    (out, row_max, row_sum), (d_out, d_lse) = results, cotangents
    delta = partial.delta_of(out, d_out, d_lse, acc)
    total = row_sum
    if not spec.every_row_sees(operands):
        empty = sees_nothing(row_sum)
        total, delta = jnp.where(empty, 1, row_sum), jnp.where(empty, 0, delta)
        d_out = jnp.where(empty[..., None], 0, d_out)
    rows = jnp.stack([row_max, 1 / total, delta], axis=-1)
    terms = tuple(name for name in OF_SCORES if name in wrt)
    of_keys = "key" in wrt or "value" in wrt

    def queries(tile: Tile, place: Any, results: Any) -> Any:
        cut_q, cut_do = lambda: tile.operand("query").astype(acc), lambda: tile.operand("out", d_out).astype(acc)
        q, do = cut_q(), cut_do()
        row_max_i, inverse_i, delta_i = jnp.split(tile.operand("rows", rows), 3, axis=-1)

        def of_tile(tile: Tile) -> Any:
            k, v, given = tile.keys("key"), tile.keys("value"), tile.terms()
            scores, pullback, tile.visible = jax.vjp(
                lambda products, moving: tile.scores(products, {**given, **moving}),
                tile.rows_by_keys(q, k),
                {name: given[name] for name in terms},
                has_aux=True,
            )
            p, kept = tile.probability(scores, row_max_i, inverse_i), tile.dropped()
            dp = tile.rows_by_keys(do, v)
            p_kept, dp = (p, dp) if kept is None else (p * kept, dp * kept)
            ds, d_terms = pullback(p * (dp - delta_i))
            # what is not finite and visible makes scores NaN, or has a weight of 0: NaN in either case
            of_rows = (tile.weights_by_rows, ds, cut_q, False), (tile.weights_by_rows, p_kept, cut_do, True)
            return d_terms, tile.products((tile.weights_by_keys, ds, k, False), *(of_rows if of_keys else ()))

        def keys(tile: Tile, carry: Any) -> Any:
            dq, found = carry
            d_terms, (dq_j, *d_keys) = tile.trusted(of_tile)
            found = {name: tile.add(name, x, d_terms[name]) if name in terms else x for name, x in found.items()}
            for name, d_name, x in zip(("key", "value"), ("dk", "dv"), d_keys):
                found[name] = tile.add(d_name, found[name], tile.like_keys(x))
            return dq + dq_j, found

        dq, found = results
        dq_i, found = loop.over_keys(tile, place, keys, (jnp.zeros(q.shape, acc), found))
        return tile.add("query", dq, tile.natural("query", dq_i)), found

    found = {name: jnp.zeros(getattr(operands, name).shape, acc) for name in terms}
    for name in ("key", "value") if of_keys else ():
        x = getattr(operands, name)
        # of sums over tiles of queries, or over batch entries, the dtype of accumulation
        at_once = loop.tiles_of_queries <= 1 and spec.has_own_entries(operands, name)
        found[name] = jnp.zeros((operands.query.shape[0], *x.shape[1:]), x.dtype if at_once else acc)
    dq, found = loop.over_queries(queries, (jnp.zeros_like(operands.query), found))
    found["query"] = dq
    if "sinks" in wrt:
        found["sinks"] = partial.sink_gradient(spec, operands, row_max, row_sum, delta)

    def cotangent(name: str) -> Array:
        operand, x = getattr(operands, name), found[name]
        if name == "key" and spec.value_size is not None:
            x = x.at[..., : spec.value_size].add(found["value"].astype(x.dtype))
        if name in ("key", "value"):
            x = reduce_entries(x, getattr(Operands(*spec.repeats), name), operand.shape[0])
        return x.astype(operand.dtype)

    return tuple(cotangent(name) for name in wrt)
