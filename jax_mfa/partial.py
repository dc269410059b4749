"""Attention over some of the columns and over whole rows: results merged, and derivatives of rows.

The same for tiles, kernels, and columns on other devices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from jax_mfa import checks
from jax_mfa.arguments import as_array
from jax_mfa.problem import Operands, Specification, accumulation_dtype, expand_entries, reduce_entries, sees_nothing

if TYPE_CHECKING:
    from jax_mfa.typing import Float

Partial: TypeAlias = tuple[Any, Any, Any]  # sums [B, T, N, V], and of each row its maximum and sum


def merge(
    out_a: Float[ArrayLike, "*B T N V"],
    lse_a: Float[ArrayLike, "*B T N"],
    out_b: Float[ArrayLike, "*B T N V"],
    lse_b: Float[ArrayLike, "*B T N"],
) -> tuple[Float[Array, "*B T N V"], Float[Array, "*B T N"]]:
    """Attention over two disjoint sets of columns, from the attention over each.

    `lse = log(exp(lse_a) + exp(lse_b))` and `out = exp(lse_a − lse) out_a + exp(lse_b − lse) out_b`
    (FlashAttention-2, arXiv:2307.08691, section 3.1.1). Differentiable in all four. A log-sum-exp of −inf says that the
    row saw nothing in that part: the part's output, whatever it holds, does not count, and gets no gradient. Where
    there are sinks, give them to one of the parts only.

    Args:
      out_a: `[..., T, N, V]`, float16, bfloat16, float32 or float64; first result of `flash_attention`.
      lse_a: `[..., T, N]`, floating; the second result. (That of `jax.nn` has few digits in 16-bit dtypes.)
      out_b: of the shape and dtype of out_a.
      lse_b: of the shape of lse_a.

    Returns:
      out: of the shape and dtype of out_a.
      lse: `[..., T, N]` float32 (float64 for float64); NaN where lse_a or lse_b is, −inf for a row that sees nothing.

    Raises:
      ValueError, TypeError: naming the argument, what was seen and what was expected.
    """
    names = ("out_a", "lse_a", "out_b", "lse_b")
    arrays = [as_array(name, x, "f", "floating") for name, x in zip(names, (out_a, lse_a, out_b, lse_b))]
    out, rows = arrays[0], arrays[0].shape[:-1]
    checks.fits("out_a", out, out.ndim >= 3, "[..., T, N, V]")
    for name, x, shape in zip(names, arrays, (out.shape, rows, out.shape, rows)):
        checks.fits(name, x, x.shape == shape, f"{list(shape)} beside out_a {list(out.shape)}")
    if arrays[2].dtype != out.dtype:
        raise TypeError(f"out_b must have the dtype of out_a, {out.dtype.name}, got {arrays[2].dtype.name}")

    acc = accumulation_dtype(out.dtype)
    outs, lses = ([x.astype(acc) for x in pair] for pair in (arrays[::2], arrays[1::2]))
    seen = [lse != -jnp.inf for lse in lses]
    empty = ~(seen[0] | seen[1])
    high = lax.stop_gradient(jnp.where(empty, 0, jnp.maximum(*lses)))  # it cancels
    # what was not seen is hidden before and behind every function, so that neither numbers nor cotangents pass
    weights = [jnp.where(see, jnp.exp(jnp.where(see, lse, high) - high), 0) for see, lse in zip(seen, lses)]
    total = jnp.where(empty, 1, weights[0] + weights[1])
    parts = [
        jnp.where(see[..., None], (weight / total)[..., None] * jnp.where(see[..., None], x, 0), 0)
        for see, weight, x in zip(seen, weights, outs)
    ]
    return (parts[0] + parts[1]).astype(out.dtype), jnp.where(empty, -jnp.inf, high + jnp.log(total))


def sinks_of(spec: Specification, operands: Operands, dtype: Any, x: Any = None) -> Any:
    """The sinks, or an `x` like them, as `[B|1, 1, N]` of this dtype; None where there are none."""
    x = operands.sinks if x is None else x
    if x is None:
        return None
    if x.shape[0] != 1:  # may be symbolic
        x = expand_entries(x, Operands(*spec.repeats).sinks, operands.query.shape[0])
    return x.astype(dtype)[:, None]


def log_sum_exp(row_max: Array, row_sum: Array) -> Array:
    """The log-sum-exp of rows: −inf where a row sees nothing, NaN where its softmax is not defined."""
    return row_max + jnp.log(lax.stop_gradient(row_sum))


def delta_of(out: Array, d_out: Array, d_lse: Array, acc: Any) -> Array:
    """Σ d_out · out − d_lse, [B, T, N]: d(score) = dropped(probability) · d(p) − probability · delta."""
    # a product: XLA's CPU backend is far slower at the sum
    return jnp.einsum("...v,...v->...", d_out.astype(acc), out.astype(acc), precision="highest") - d_lse.astype(acc)


def sink_probability(spec: Specification, operands: Operands, row_max: Array, row_sum: Array) -> Array:
    """What of a row its sink takes, [B, T, N]; 0 in a row that sees nothing."""
    empty = sees_nothing(row_sum)
    sinks = sinks_of(spec, operands, row_sum.dtype)
    # an empty row gets finite values, so that its derivatives are finite too
    shift, total = jnp.where(empty, 0, sinks - row_max), jnp.where(empty, 1, row_sum)
    return jnp.where(empty, 0, jnp.exp(shift) / total)


def sink_gradient(spec: Specification, operands: Operands, row_max: Array, row_sum: Array, shift: Any) -> Any:
    """The gradient of the sinks, of their own shape, in the dtype of the sums. A row that sees nothing has none."""
    x = jnp.where(sees_nothing(row_sum), 0, sink_probability(spec, operands, row_max, row_sum) * shift)
    return reduce_entries(-x.sum(1), Operands(*spec.repeats).sinks, operands.sinks.shape[0])


def weighed(out: Array, row_max: Array, row_sum: Array, acc: Any) -> tuple[Array, Array, Array]:
    """A partial result as sums: of weighted values, the maximum, −∞ where no score is above that, and of weights. A row
    that sees scores of −∞ alone keeps the sum NaN, as `sees_nothing` says: other columns may yet define its softmax."""
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


def finished(whole: Partial, sinks: Any, dtype: Any) -> tuple[Array, Array, Array]:
    """Output of a dtype, maximum and sum of whole rows: merged results, and sinks [B|1, 1, N] if there are any."""
    sums, row_max, row_sum = whole
    acc = sums.dtype.type
    if sinks is not None:
        seen = (row_max != -np.inf) | jnp.isnan(row_sum)
        sink = jnp.zeros_like(sums), jnp.where(seen, sinks, -np.inf), jnp.where(seen, acc(1), acc(0))
        sums, row_max, row_sum = merged(whole, sink)
    out = sums / jnp.where(sees_nothing(row_sum), acc(1), row_sum)[..., None]
    return out.astype(dtype), jnp.where(row_max == -np.inf, acc(0), row_max), row_sum
