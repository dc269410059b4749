"""Merging attention over parts of the columns into attention over all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from jax_mfa.arguments import as_array
from jax_mfa.specification import accumulation_dtype

if TYPE_CHECKING:
    from jax_mfa.annotations import Float


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
    if out.ndim < 3:
        raise ValueError(f"out_a must have shape [..., T, N, V], got {list(out.shape)}")
    for name, x, shape in zip(names, arrays, (out.shape, rows, out.shape, rows)):
        if x.shape != shape:
            raise ValueError(
                f"{name} must have shape {list(shape)} beside out_a {list(out.shape)}, got {list(x.shape)}"
            )
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
