"""How arrays are quantised: blocks, their scales and zeros, means. `storage` says what the results mean."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from jax_mfa import checks, compat
from jax_mfa.arguments import as_array
from jax_mfa.kv_cache.storage import PARTS, QuantizedArray, Scheme, as_scheme, huge_scale, spread
from jax_mfa.problem import DTYPES

if TYPE_CHECKING:
    from jax_mfa.typing import Float

CHECKPOINT_NAME = "jax_mfa_quantized"  # of everything that is stored, for policies of `jax.checkpoint`


def quantize(
    x: Float[ArrayLike, "*B S K H"], scheme: Scheme | str = "int8", *, straight_through: bool = False
) -> Float[QuantizedArray, "*B S K H"]:
    """Stores an array by a scheme; `jax_mfa.dot_product_attention` takes the result as query, key or value.

    Each batch entry is quantised for itself. The scale of a block is the least one of its dtype that reaches all of its
    numbers, so that none is clipped: each comes back within half a step, as docs/caches.md has it. A block that holds
    NaN or ∞ stands for NaN.

    Args:
      x: `[..., S, K, H]`, float16, bfloat16, float32 or float64.
      scheme: a `Scheme`, or "int8", "int4" or "fp8" for the `Scheme` of that name.
      straight_through: gradients pass to x as if it were not rounded (Bengio et al., arXiv:1308.3432). The result then
        also holds x, which no derivative of attention reads: under `jit` it need not be kept. Otherwise x gets no
        gradient.

    Returns:
      A `QuantizedArray`. Under `jax.checkpoint`, policies know what it stores as "jax_mfa_quantized".

    Raises:
      ValueError, TypeError: naming the argument, what was seen and what was expected.
    """
    scheme = as_scheme("scheme", scheme)
    checks.boolean("straight_through", straight_through)
    given = as_array("x", x, "f", "floating [..., S, K, H]")
    checks.fits("x", given, given.ndim >= 3 and given.shape[-1] > 0, "[..., S, K, H] with H > 0")
    if given.dtype.name not in DTYPES:
        raise TypeError(f"x must be of a dtype of {', '.join(DTYPES)}, got {given.dtype.name}")
    parts = _stored_anywhere(given, scheme)
    named = {name: checkpoint_name(parts[name], CHECKPOINT_NAME) if name in parts else None for name in PARTS}
    original = given if straight_through else None
    dtype = np.dtype(given.dtype)
    return QuantizedArray(**named, original=original, scheme=scheme, head_size=given.shape[-1], dtype=dtype)


# ---------------------------------------------------------------------------------------------------------------------


def _stored_anywhere(x: Array, scheme: Scheme) -> dict[str, Any]:
    """`_stored`, whose parts are split as an array is whose sharding is explicit, along axes that they have of it."""

    def specs() -> dict[str, PartitionSpec]:
        parts = jax.eval_shape(functools.partial(_stored, scheme=scheme), jax.ShapeDtypeStruct(x.shape, x.dtype))
        axes = compat.spec_of(x)[:-1]
        kept = lambda part: (axis if n == size else None for axis, n, size in zip(axes, part.shape, x.shape))
        return {name: PartitionSpec(*kept(part), None) for name, part in parts.items()}

    return compat.without_types(lambda known: _stored(known["x"], scheme), {"x": x}, specs)


@functools.partial(jax.jit, static_argnames="scheme")
def _stored(x: Array, scheme: Scheme) -> dict[str, Any]:
    """The parts of `QuantizedArray`."""
    dtype, (s, _, h) = x.dtype, x.shape[-3:]
    values = lax.stop_gradient(x).astype(np.promote_types(dtype, np.float32))
    # NaN is looked for apart, for XLA's minima and maxima of long arrays pass over it
    finite = jnp.isfinite(values)
    not_finite = _over_blocks(~finite, scheme, jnp.any)
    values = jnp.where(finite, values, 0)
    parts = {}
    if scheme.center is not None:
        parts["means"] = _means(values, scheme.center, dtype)
        values = values - spread(parts["means"], scheme.center, s, -3).astype(values.dtype)
    low, high = (_over_blocks(values, scheme, reduce) for reduce in (jnp.min, jnp.max))
    scales, zeros = _scales(scheme, low, high, dtype)
    scales = jnp.where(not_finite, np.asarray(np.nan, dtype), scales)
    spread_blocks = lambda x: spread(spread(x, scheme.tokens, s, -3), scheme.channels, h, -1).astype(values.dtype)
    if zeros is None:
        return {"data": _encoded(scheme, values / spread_blocks(scales)), "scales": scales, **parts}
    # a power of two keeps differences from overflow, and from magnitudes that processors take for 0
    factor = spread_blocks(_factors(scales.astype(values.dtype), zeros.astype(values.dtype)))
    apart = values * factor - spread_blocks(zeros) * factor
    data = _encoded(scheme, apart / (spread_blocks(scales) * factor))
    return {"data": data, "scales": scales, "zeros": zeros, **parts}


def _factors(scales: Any, zeros: Any) -> Any:
    """For each block 1, but a half where its range may overflow, and a large power of two where it is tiny."""
    info, size = jnp.finfo(scales.dtype), jnp.maximum(scales, jnp.abs(zeros))
    large = 2.0 ** (-info.minexp // 2)
    one = scales.dtype.type
    return jnp.where(scales > huge_scale(info), one(0.5), jnp.where(size < 1 / large, one(large), one(1)))


def _padded(x: Array, per: int, axis: int) -> Array:
    """`x` with its last entry repeated, up to a multiple of `per`."""
    widths = np.zeros((x.ndim, 2), int)
    widths[axis, 1] = -x.shape[axis] % per
    return jnp.pad(x, widths, mode="edge")


def _over_blocks(x: Array, scheme: Scheme, reduce: Any) -> Array:
    """`reduce` of each block: `[..., S / tokens, K, H / channels]`, or `[..., 1, 1, 1]` of everything."""
    s, k, h = x.shape[-3:]
    tokens, channels = min(scheme.tokens or s, max(s, 1)) or 1, min(scheme.channels or h, h)
    if scheme.whole:
        return reduce(x, axis=(-3, -2, -1), keepdims=True) if s * k else x[..., :1, :1, :1]
    x = _padded(_padded(x, tokens, -3), channels, -1)
    x = x.reshape(*x.shape[:-3], x.shape[-3] // tokens, tokens, k, x.shape[-1] // channels, channels)
    return reduce(x, axis=(-4, -1))


def _means(x: Array, per: int, dtype: Any) -> Array:
    """The mean of each channel over runs of `per` tokens, of which the last may be shorter: `[..., S / per, K, H]`.
    Where elements might lie too far from it, the middle of their range."""
    s = x.shape[-3]
    per = min(per, max(s, 1))
    count = -(-s // per)
    runs = _padded(x, per, -3).reshape(*x.shape[:-3], count, per, *x.shape[-2:])
    mean = runs.mean(-3, where=(np.arange(count * per) < s).reshape(count, per, 1, 1))
    low, high = runs.min(-3), runs.max(-3)
    near = jnp.maximum(high - mean, mean - low) < float(jnp.finfo(dtype).max) / 2  # not where the sum has overflown
    return jnp.where(near, mean, low / 2 + high / 2).astype(dtype)


def _scales(scheme: Scheme, low: Any, high: Any, dtype: Any) -> tuple[Array, Array | None]:
    """Scales and zeros (None where symmetric) of blocks that reach from `low` to `high`, which are finite."""
    wide, info, (_, most) = low.dtype, jnp.finfo(dtype), scheme.levels
    # no scale is 0, nor so small that a processor takes it for 0
    least: Any = float(info.smallest_subnormal) if dtype == np.float16 else float(info.tiny)
    zeros = None
    if scheme.symmetric:
        # the scale of equal elements is their magnitude
        reach = jnp.maximum(jnp.abs(low), jnp.abs(high))
        scales = jnp.where(low == high, reach, reach / most)
        least = jnp.where(reach == 0, 1, least)
    elif scheme.kind == "fp8":  # its values lie on both sides of the zero, most of them near it
        zeros = (low / 2 + high / 2).astype(dtype)
        centre = zeros.astype(wide)
        scales = jnp.maximum(high - centre, centre - low) / most
    else:
        zeros = _rounded(low, dtype, up=False)
        scales = (high / 2 - zeros.astype(wide) / 2) / (most / 2)  # the whole may overflow
    return _rounded(jnp.maximum(scales, least).astype(wide), dtype, up=True), zeros


def _rounded(x: Array, dtype: Any, up: bool) -> Array:
    """`x` in a dtype, rounded up or down."""
    y = x.astype(dtype)
    wrong = y.astype(x.dtype) < x if up else y.astype(x.dtype) > x
    return jnp.where(wrong, jnp.nextafter(y, jnp.asarray(np.inf if up else -np.inf, dtype)), y)


def _encoded(scheme: Scheme, x: Array) -> Array:
    """Elements in units of their block's scale, as they are stored."""
    x = jnp.clip(x, *scheme.levels)
    if scheme.kind == "fp8":
        return lax.bitcast_convert_type(x.astype(jnp.float8_e4m3fn), np.uint8)
    x = jnp.where(jnp.isnan(x), 0, jnp.round(x))
    if scheme.kind == "int8":
        return x.astype(np.int8 if scheme.symmetric else np.uint8)
    x = x.astype(np.int8).astype(np.uint8) & np.uint8(15)
    if x.shape[-1] % 2:
        x = jnp.concatenate([x, jnp.zeros((*x.shape[:-1], 1), x.dtype)], axis=-1)
    pair = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    return pair[..., 0] | pair[..., 1] << np.uint8(4)
