"""Attention over some of the columns: partial results, how they are merged, and how they end as those of whole rows."""

from __future__ import annotations

from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_mfa.specification import Operands, Specification, sees_nothing
from jax_mfa.whole_rows import per_batch_row

Partial: TypeAlias = tuple[Any, Any, Any]  # sums [B, T, N, V], and of each row its maximum and sum


def weighed(out: Array, row_max: Array, row_sum: Array, acc: Any) -> tuple[Array, Array, Array]:
    """A partial result as sums: of weighted values, the maximum, −∞ where no score is above that, and of weights.

    A row that sees scores of −∞ alone keeps the sum NaN, as `sees_nothing` says; other columns may yet define its
    softmax.
    """
    lost = sees_nothing(row_sum) | (jnp.isnan(row_sum) & (row_max < np.inf))
    sums = jnp.where(lost[..., None], acc.type(0), out.astype(acc) * row_sum[..., None])
    return sums, jnp.where(lost, acc.type(-np.inf), row_max), row_sum


def merged(a: Partial, b: Partial) -> Partial:
    """Two partial results of disjoint columns as one."""
    high = jnp.maximum(a[1], b[1])  # NaN where either is
    lost = high == -np.inf

    def rescaled(sums: Array, row_max: Array, row_sum: Array) -> tuple[Array, Array]:
        nothing = row_max == -np.inf
        weight = jnp.where(nothing, 0, jnp.exp(jnp.where(nothing, 0, row_max - jnp.where(nothing, 0, high))))
        return jnp.where(nothing[..., None], 0, sums * weight[..., None]), jnp.where(nothing, 0, row_sum * weight)

    (sums_a, sum_a), (sums_b, sum_b) = rescaled(*a), rescaled(*b)
    return sums_a + sums_b, high, jnp.where(lost, a[2] + b[2], sum_a + sum_b)


def finished(spec: Specification, operands: Operands, whole: Partial) -> tuple[Array, Array, Array]:
    """Output, maximum and sum of whole rows, their sinks included, from merged results without them."""
    sums, row_max, row_sum = whole
    acc = sums.dtype.type
    if operands.sinks is not None:
        sinks = per_batch_row(spec, operands, "sinks", sums.dtype)[:, None]
        seen = (row_max != -np.inf) | jnp.isnan(row_sum)
        sink = jnp.zeros_like(sums), jnp.where(seen, sinks, -np.inf), jnp.where(seen, acc(1), acc(0))
        sums, row_max, row_sum = merged(whole, sink)
    out = sums / jnp.where(sees_nothing(row_sum), acc(1), row_sum)[..., None]
    return out.astype(operands.query.dtype), jnp.where(row_max == -np.inf, acc(0), row_max), row_sum
