"""Slices of arrays along an axis, and numbers of 16 bits in loops."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax


@jax.custom_jvp
def barrier(x: Any) -> Any:
    """`lax.optimization_barrier`, which older JAX cannot differentiate."""
    return lax.optimization_barrier(x)


barrier.defjvp(lambda primals, tangents: (barrier(*primals), *tangents))


def to_words(x: Any, indices: Any) -> Array:
    """16-bit numbers as integers, tied to the traced one of some indices.

    Keeps XLA's CPU backend from hoisting a conversion of the whole array out of the loop that reads parts of it.
    """
    if x.dtype.itemsize > 2:
        return x
    index = next((i for i in indices if isinstance(i, jax.Array)), None)
    if index is not None:
        x, _ = lax.optimization_barrier((x, index))
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x


def from_words(x: Any, dtype: Any) -> Array:
    """The numbers that `to_words` made integers of."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def cut(x: Any, shape: tuple[int, ...], *start: Any) -> Array:
    """The part of `x` of this shape from `start` on."""
    return x if x.shape == shape else lax.dynamic_slice(x, int32(start), shape)


def put(x: Any, part: Any, *start: Any) -> Array:
    """`x` with `part` in it, from `start` on."""
    return part if x.shape == part.shape else lax.dynamic_update_slice(x, part, int32(start))


def int32(indices: Any) -> list[Any]:
    return [np.int32(i) if isinstance(i, (int, np.integer)) else i.astype(jnp.int32) for i in indices]


def put_axis(x: Any, part: Any, start: Any, axis: int) -> Array:
    """`x` with `part` in it, from `start` on along `axis`."""
    return put(x, part, *(start if k == axis else 0 for k in range(x.ndim)))


def add_axis(x: Any, part: Any, start: Any, axis: int) -> Array:
    """`x` with `part` added to it, from `start` on along `axis`."""
    at = [start if k == axis else 0 for k in range(x.ndim)]
    return put(x, cut(x, part.shape, *at) + part, *at)


def slice_axis(x: Any, start: Any, size: int, axis: int) -> Array:
    """`size` elements along `axis` from `start`; an axis of size 1 broadcasts and is kept."""
    if x.shape[axis] == 1:
        return x
    shape = *x.shape[:axis], size, *x.shape[axis + 1 :]
    return cut(x, shape, *(start if k == axis else 0 for k in range(x.ndim)))
