"""What of a derivative depends on whole rows alone: the same for tiles, kernels, and columns on other devices."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from jax_mfa.specification import Operands, Specification, expand_rows, reduce_rows, sees_nothing


def per_batch_row(spec: Specification, operands: Operands, name: str, dtype: Any, x: Any = None) -> Any:
    """`[rows, ...]` of the operand of this name, or of an `x` like it, as `[B|1, ...]` of this dtype."""
    x = getattr(operands, name) if x is None else x
    one = x.shape[0] == 1
    return (x if one else expand_rows(x, getattr(Operands(*spec.repeats), name), operands.query.shape[0])).astype(dtype)


def shift(out: Array, d_out: Array, d_lse: Array, acc: Any) -> Array:
    """Σ d_out · out − d_lse, [B, T, N]: d(score) = dropped(probability) · d(p) − probability · shift."""
    # written as a product: XLA's CPU backend of JAX 0.10 takes seventy times as long for the sum
    return jnp.einsum("...v,...v->...", d_out.astype(acc), out.astype(acc), precision="highest") - d_lse.astype(acc)


def sink_probability(spec: Specification, operands: Operands, row_max: Array, row_sum: Array) -> Array:
    """What of a row its sink takes, [B, T, N]; 0 in a row that sees nothing."""
    empty = sees_nothing(row_sum)
    sinks = per_batch_row(spec, operands, "sinks", row_sum.dtype)[:, None]
    # where a row is empty, numbers without harm
    shift, total = jnp.where(empty, 0, sinks - row_max), jnp.where(empty, 1, row_sum)
    return jnp.where(empty, 0, jnp.exp(shift) / total)


def sink_gradient(spec: Specification, operands: Operands, row_max: Array, row_sum: Array, shift: Any) -> Any:
    """The gradient of the sinks, of their own shape, in the dtype of the sums. A row that sees nothing has none."""
    x = jnp.where(sees_nothing(row_sum), 0, sink_probability(spec, operands, row_max, row_sum) * shift)
    return reduce_rows(-x.sum(1), Operands(*spec.repeats).sinks, operands.sinks.shape[0])
