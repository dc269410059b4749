"""Arithmetic, slices and layouts of arrays, written as XLA's CPU backend is fast at them."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

_MOST = 2**31 - 1  # of int32
# From JAX 0.11 on, XLA is slow to copy rows of so many bytes and more if some length is no power of two, whether or not
# it also converts them. With arithmetic in it, the same copy took 1.3 to 2 times less on 0.11.2 and 0.12.0.1, but on
# 0.10.2 2.5 times more.
_SLOW_COPIES = 128 if jax.__version_info__ >= (0, 11) else math.inf
# A sum of products over rows takes XLA of JAX 0.10.2 fourteen times as long as the same written as a product (B32 T256
# N12 H32 training 235 → 145 ms); that of 0.12 makes one kernel of the sum and what is beside it.
_SUMS_AS_PRODUCTS = (0, 10) <= jax.__version_info__ < (0, 11)
# Whether rows are transposed for a product over them, or that is left to the product: on 0.10.2 it then takes up to 1.6
# times less (B8 T256 N8 H64 training 41 → 33 ms), on 0.12 up to 1.4 times more.
ROWS_TRANSPOSED = jax.__version_info__ >= (0, 11)
_SUMMED_AT_ONCE = 32  # elements of an axis by XLA, at most
# Whether XLA keeps `barrier`s till it has made kernels, or takes them away before: then what they should hold together
# is computed anew in each kernel that reads it.
BARRIERS_LAST = jax.__version_info__ >= (0, 11)
# A matrix of so many elements it transposes faster from memory than while it computes them (T128 N8 H64 bfloat16
# training 479 → 395 µs).
TRANSPOSED_FROM_MEMORY = 2**13 if BARRIERS_LAST else math.inf


# `jnp` makes three instructions of a broadcast of axes of size 1, and a function of each selection. Without those a
# program of many layers is compiled in less time.


def broadcast(x: Any, shape: tuple[Any, ...]) -> Any:
    """`jnp.broadcast_to`."""
    first = len(shape) - x.ndim
    kept = [axis for axis in range(x.ndim) if x.shape[axis] == shape[first + axis]]
    if len(kept) == len(shape):
        return x
    x = lax.squeeze(x, [axis for axis in range(x.ndim) if axis not in kept])
    return lax.broadcast_in_dim(x, shape, [first + axis for axis in kept])


def along_last(x: Any, like: Any) -> Any:
    """`x[..., None]` of the shape of `like`."""
    return broadcast(lax.broadcast_in_dim(x, (*x.shape, like.shape[-1]), range(x.ndim)), like.shape)


def where(condition: Any, x: Any, y: Any) -> Array:
    """`jnp.where` of arrays and numbers of the same dtype."""
    shape = lax.broadcast_shapes(*(a.shape for a in (condition, x, y)))
    x, y = broadcast(x, shape), broadcast(y, shape)
    return lax.select(broadcast(condition, shape) if condition.ndim else condition, x, y)


def finite(x: Any) -> Array:
    return where(jnp.isfinite(x), x, x.dtype.type(0))


def all_finite(products: Any) -> Array:
    """Whether the factors of products are finite, given products [..., y, z] and the axis, y or z, whose elements each
    are sums over all of the factor in question: one of them tells as much as all."""
    # the cheapest reduction; of numbers so large that their sum is infinite it may say no
    first = [slice_axis(x, 0, min(1, x.shape[axis]), axis) for x, axis in products]
    return functools.reduce(jnp.logical_and, [jnp.isfinite(_sum_of_few(x)) for x in first])


def _sum_of_few(x: Any) -> Array:
    """`x.sum()`; of few numbers in parts, because XLA sums longer axes in two steps, and each starts a kernel of its
    own."""
    if x.size > _SUMMED_AT_ONCE**2 or max(x.shape[:-1]) > _SUMMED_AT_ONCE:
        return x.sum()
    parts = range(0, x.shape[-1], _SUMMED_AT_ONCE)
    return functools.reduce(jnp.add, [x[..., i : i + _SUMMED_AT_ONCE].sum() for i in parts])


def finite_sums(arrays: Iterable[Any]) -> Array:
    """Whether all elements are finite: their sum, which is the fastest to find. Of numbers so large that it is infinite
    it says no."""
    # 16 bits behind a barrier: what is converted for the sum would be kept for other uses
    alone = lambda x: barrier(x) if x.dtype.itemsize < 4 else x
    return jnp.isfinite(functools.reduce(jnp.add, [alone(x).sum() for x in arrays]))


def largest(x: Any, least: Any) -> Array:
    """The largest number along the last axis, or `least` where that is larger. As one reduction: where the maximum is
    only then compared with that, XLA makes two kernels of the exponentials and not one (B16 T534 S39 N1 H40 with key
    lengths 0.48 → 0.34 ms)."""
    if x.shape[-1] == 1:  # of one number XLA makes no reduction, and forgets what it starts from
        return jnp.maximum(x[..., 0], least)
    return lax.reduce(x, least, lax.max, (x.ndim - 1,))


def row_dots(a: Array, b: Array) -> Array:
    """Σ a · b over the last axis."""
    if _SUMS_AS_PRODUCTS:
        return jnp.einsum("...s,...s->...", a, b, precision="highest")
    return (a * b).sum(-1)


def clip(x: Any, low: Any, high: Any) -> Any:
    """`x` within low..high, in numpy while all three are known."""
    return (jnp if any(isinstance(v, jax.Array) for v in (x, low, high)) else np).clip(x, low, high)


def before(position: Any, side: int) -> Any:
    """`position − side`, or 0 where that is negative; no sum on the way leaves int32."""
    return clip(position, side, _MOST) - side


def after(position: Any, side: int, end: int) -> Any:
    """`position + side + 1`, or `end` where that is more; no sum on the way leaves int32."""
    return clip(position, -_MOST, end - 1 - side) + side + 1


def exact_split(x: Array, dtype: Any) -> list[Array]:
    """Numbers of this shorter dtype of the same range that add up to those of `x`, to the last of its digits."""
    parts, digits = [], jnp.finfo(x.dtype).nmant + 1
    for _ in range(-(-digits // (jnp.finfo(dtype).nmant + 1))):
        parts.append(x.astype(dtype))
        x = x - parts[-1].astype(x.dtype)
    return parts


@jax.custom_jvp
def barrier(x: Any) -> Any:
    """`lax.optimization_barrier`, which older JAX cannot differentiate."""
    return lax.optimization_barrier(x)


barrier.defjvp(lambda primals, tangents: (barrier(*primals), *tangents))


@jax.custom_jvp
def derivative_of_tanh(x: Any) -> Any:
    """1 / cosh²; 1 − tanh² would cancel where |x| is large."""
    e = jnp.exp(-2 * jnp.abs(x))
    return 4 * e / jnp.square(1 + e)


@derivative_of_tanh.defjvp
def _derivative_of_tanh_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    (x,), (t_x,) = primals, tangents
    y = derivative_of_tanh(x)
    return y, -2 * jnp.tanh(x) * y * t_x


def laid_out(x: Any, twice: bool = False) -> Array:
    """`x`, rows that were just put into another order: the same numbers, but as a product by 1 where XLA is faster at
    that than at a mere copy. If two products read it, XLA of JAX ≥ 0.11 makes a copy for each, unless it stands behind
    a barrier (B512 T16 N4 H32 training 4.4 → 3.7 ms)."""
    lengths, row = x.shape[1:-1], x.shape[-1] * x.dtype.itemsize
    if sum(n > 1 for n in lengths) <= 1:
        return x
    if row < _SLOW_COPIES or (math.prod(lengths) & (math.prod(lengths) - 1)) == 0:
        return barrier(x) if twice and BARRIERS_LAST else x
    return x * barrier(jnp.ones((), x.dtype))


def settled(x: Any, axis: int) -> Array:
    """`x`, in an order that it was just put into, and computed once for all that read it: XLA of JAX ≥ 0.11 then makes
    one kernel of both. Merges `axis` and the next meanwhile; without an axis less it makes two."""
    merged = *x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :]
    return barrier(x.reshape(merged)).reshape(x.shape)


def divmod_unsigned(a: Array, b: Array) -> tuple[Array, Array]:
    """Quotient and remainder of what is not negative."""
    if isinstance(b, (int, np.integer)) and b == 1:
        return a, jnp.zeros_like(a)
    b = jnp.asarray(b, a.dtype)
    return lax.div(a, b), lax.rem(a, b)


# no index here is negative; where JAX lets us say so, it leaves out the asking. (Indices without a sign leave it out
# everywhere, but the partitioner of JAX 0.4.38 makes comparisons of unlike types of them.)
_NONE_NEGATIVE: dict[str, Any] = (
    {"allow_negative_indices": False}
    if "allow_negative_indices" in inspect.signature(lax.dynamic_slice).parameters
    else {}
)


def cut(x: Any, shape: tuple[int, ...], *start: Any) -> Array:
    """The part of `x` of this shape from `start` on."""
    return x if x.shape == shape else lax.dynamic_slice(x, _int32(start), shape, **_NONE_NEGATIVE)


def put(x: Any, part: Any, *start: Any) -> Array:
    """`x` with `part` in it, from `start` on."""
    return part if x.shape == part.shape else lax.dynamic_update_slice(x, part, _int32(start), **_NONE_NEGATIVE)


def _int32(indices: Any) -> list[Any]:
    return [np.int32(i) if isinstance(i, (int, np.integer)) else i.astype(jnp.int32) for i in indices]


def add(x: Any, part: Any, *start: Any) -> Array:
    """`x` with `part` added to it, from `start` on."""
    return put(x, cut(x, part.shape, *start) + part, *start)


def put_axis(x: Any, part: Any, start: Any, axis: int) -> Array:
    """`x` with `part` in it, from `start` on along `axis`."""
    return put(x, part, *(start if k == axis else 0 for k in range(x.ndim)))


def add_axis(x: Any, part: Any, start: Any, axis: int) -> Array:
    """`x` with `part` added to it, from `start` on along `axis`."""
    return add(x, part, *(start if k == axis else 0 for k in range(x.ndim)))


def slice_axis(x: Any, start: Any, size: int, axis: int) -> Array:
    """`size` elements along `axis` from `start`; an axis of size 1 broadcasts and is kept."""
    if x.shape[axis] == 1:
        return x
    shape = *x.shape[:axis], size, *x.shape[axis + 1 :]
    return cut(x, shape, *(start if k == axis else 0 for k in range(x.ndim)))


def element(x: Any, index: Any) -> Array:
    """`x[index]`, of a list."""
    return slice_axis(jnp.asarray(x), index, 1, 0).reshape(())


def as_words(x: Any, index: Any, to_lay_out: bool = True) -> Array:
    """Numbers of 16 bits or less, of which the loop of this index reads a part: XLA would convert all, and before the
    loop. It gets integers where it takes barriers away before that, and for float16 `to_lay_out` in another order,
    which it is slower to cut (B4 T2 S3726 N16 H64 14 → 8 ms)."""
    if x.dtype.itemsize > 2:
        return x
    x, _ = lax.optimization_barrier((x, index))
    as_it_is = x.dtype.itemsize < 2 or (BARRIERS_LAST and (x.dtype == jnp.bfloat16 or not to_lay_out))
    return x if as_it_is else lax.bitcast_convert_type(x, jnp.uint16)


def as_numbers(x: Any, dtype: Any, to_lay_out: bool = True) -> Array:
    """A part of what `as_words` took, as numbers."""
    if x.dtype != dtype:
        return lax.bitcast_convert_type(lax.optimization_barrier(x), dtype)
    # cut before it is laid out and converted: as one kernel that takes two to three times as long (B4 T2 S3726 N16 H128
    # bfloat16 34 → 11 ms); but one kernel that keeps the order is faster than two (B16 T1 S1024 N12 H64 6.2 → 3.7)
    cut_first = to_lay_out and BARRIERS_LAST and x.dtype.itemsize == 2
    return lax.optimization_barrier(x) if cut_first else x


def tile_start(i: Any, size: int, length: int) -> Any:
    """First index of tile `i`: the last tile of a ragged length reaches back over its neighbour."""
    return i * size if length % size == 0 else clip(i * size, 0, length - size)
