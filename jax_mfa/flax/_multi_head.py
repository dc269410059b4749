"""The arithmetic of `FlashMultiHeadAttention` between its projections, the same for linen and nnx: head sizes, rotary
embedding, the decode cache. Knows arrays only; the modules own the parameters, variables and random streams.

Dimension letters as in `jax_mfa.specification`: B batch (here any leading axes), T query length, S key length, N query
heads, K key/value heads, H head size; M the length of a cache.
"""

from __future__ import annotations

import math
import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_mfa.api import dot_product_attention
from jax_mfa.flax._drop_in import as_bool
from jax_mfa.specification import accumulation_dtype


def first_given(name: str, *values):
    """The first of `values` that is not None."""
    for value in values:
        if value is not None:
            return value
    raise ValueError(f"{name} must be given, to the call or to the module, got None for both")


def head_sizes(
    features: int, num_heads: int, num_key_value_heads: int | None, head_dim: int | None, qkv_features: int | None
) -> tuple[int, int]:
    """K and H of a module, from what its user said about them.

    Raises:
      TypeError: where a number is no integer.
      ValueError: where heads do not divide, or head_dim and qkv_features contradict each other.
    """
    heads = num_heads if num_key_value_heads is None else num_key_value_heads
    given = {"num_heads": num_heads, "num_key_value_heads": heads, "head_dim": head_dim, "qkv_features": qkv_features}
    for name, x in given.items():
        left_out = x is None and name in ("head_dim", "qkv_features")
        if not left_out and (isinstance(x, bool) or not isinstance(x, numbers.Integral)):
            raise TypeError(f"{name} must be an integer, got {x!r}")
    if num_heads < 1 or heads < 1 or num_heads % heads:
        raise ValueError(
            f"num_heads must be a positive multiple of num_key_value_heads, got {num_heads} and {num_key_value_heads}"
        )
    if head_dim is None:
        features = features if qkv_features is None else qkv_features
        if features < num_heads or features % num_heads:
            raise ValueError(
                f"num_heads = {num_heads} must divide qkv_features = {features} (by default the input's features), "
                "unless head_dim is given"
            )
        head_dim = features // num_heads
    elif head_dim < 1 or (qkv_features is not None and qkv_features != num_heads * head_dim):
        raise ValueError(
            f"head_dim must be positive and qkv_features, where given too, num_heads · head_dim: "
            f"got head_dim = {head_dim}, num_heads = {num_heads}, qkv_features = {qkv_features}"
        )
    return heads, head_dim


def key_value_inputs(inputs_q, inputs_k, inputs_v):
    """Inputs of keys and values: by default those of the queries, and those of the keys."""
    if inputs_k is None and inputs_v is not None:
        raise ValueError("inputs_k must be given where inputs_v is, got None")
    inputs_k = inputs_q if inputs_k is None else inputs_k
    inputs_v = inputs_k if inputs_v is None else inputs_v
    for name, x in (("inputs_q", inputs_q), ("inputs_k", inputs_k), ("inputs_v", inputs_v)):
        if jnp.ndim(x) < 2:
            raise ValueError(f"{name} must have shape [..., length, features], got {list(jnp.shape(x))}")
    return inputs_k, inputs_v


# ---------------------------------------------------------------------------------------------------------------------
# Rotary embedding


def _number(name: str, x) -> float:
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        raise TypeError(f"{name} must be a number, got {x!r}")
    try:
        return float(x)
    except OverflowError:
        return math.inf


def _turned(h: int, base, fraction, prefix: str = "") -> int:
    """How many of H features are turned. The arguments are called `prefix` + their names."""
    number, part = _number(f"{prefix}base", base), _number(f"{prefix}fraction", fraction)
    r = round(part * h) if 0 < part <= 1 else 0
    if r < 2 or r % 2 or abs(r - part * h) > 1e-6 * h:
        raise ValueError(
            f"{prefix}fraction must lie in (0, 1] and make an even number of the H = {h} features, got {fraction!r}"
        )
    if not 0 < number < math.inf:
        raise ValueError(f"{prefix}base must be a positive finite number, got {base!r}")
    return r


def rotary_embedding(x, positions, *, base: float = 10000.0, fraction: float = 1.0):
    """Turns pairs of features by angles that grow with the position (RoFormer, arXiv:2104.09864, equation 34).

    The first R = fraction · H features are turned, the others left alone. Feature i < R/2 is paired with feature
    i + R/2 (half-split, as in GPT-NeoX and LLaMA; not RoFormer's own neighbours 2i, 2i + 1) and turned by
    `position · base^(−2i/R)`. The scores of queries and keys so turned depend on distances of positions only.

    Args:
      x: `[..., T, N, H]`, floating.
      positions: integers `[T]`, or with leading axes that broadcast to those of x. Exact up to 2²⁴.
      base: the slowest pair turns about once in 2π · base positions.
      fraction: in (0, 1], such that fraction · H is an even integer.

    Returns:
      `[..., T, N, H]` of x's dtype; computed in float32 (float64 for float64) and rounded once.

    Raises:
      TypeError: for an argument of another kind.
      ValueError: for a base or fraction out of range, or an array of the wrong shape.
    """
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.floating):
        seen = f"{x.dtype.name}{list(x.shape)}" if hasattr(x, "dtype") else type(x).__name__
        raise TypeError(f"x must be a floating array [..., T, N, H], got {seen}")
    if x.ndim < 3:
        raise ValueError(f"x must have shape [..., T, N, H], got {list(x.shape)}")
    h = x.shape[-1]
    r = _turned(h, base, fraction)
    positions = jnp.asarray(positions)
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise TypeError(f"positions must be integers [..., T], got {positions.dtype.name}{list(positions.shape)}")
    lead = x.shape[:-2]
    shape = (1,) * (len(lead) - positions.ndim) + positions.shape
    if len(shape) != len(lead) or any(d not in (1, full) for d, full in zip(shape, lead)) or shape[-1] != lead[-1]:
        raise ValueError(f"positions must broadcast to [..., T] = {list(lead)}, got {list(positions.shape)}")
    acc = accumulation_dtype(x.dtype)
    powers = np.float64(base) ** (-np.arange(0, r, 2) / r)
    frequencies = jnp.asarray(powers.astype(acc)).reshape((1,) * len(shape) + (1, r // 2))
    angles = positions.reshape(*shape, 1, 1).astype(acc) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = x[..., : r // 2].astype(acc), x[..., r // 2 : r].astype(acc)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
    return turned if r == h else jnp.concatenate([turned, x[..., r:]], axis=-1)


def _positions(offset, length: int):
    """Positions `[..., length]` that start at `offset`: an integer, or integers with leading axes."""
    offset = jnp.asarray(offset)
    return offset[..., None] + jnp.arange(length, dtype=jnp.int32).reshape((1,) * offset.ndim + (length,))


# ---------------------------------------------------------------------------------------------------------------------
# The decode cache


class Cache(NamedTuple):
    """Keys and values seen so far. Entries from `index` on were never written and are never seen."""

    key: Any  # [..., M, K, H]
    value: Any  # [..., M, K, H]
    index: Any  # int32 scalar: how many are written


def empty_cache(lead: tuple[int, ...], length: int, heads: int, head_dim: int, dtype) -> Cache:
    """A cache for `length` tokens with nothing in it."""
    # two arrays, not one twice: a donated cache must not name one buffer twice
    key, value = (jnp.zeros((*lead, length, heads, head_dim), dtype) for _ in range(2))
    return Cache(key, value, jnp.zeros((), jnp.int32))


def _append(cache: Cache, key, value) -> Cache:
    """The cache with T more tokens; `key` and `value` are [..., T, K, H]."""
    length, tokens = cache.key.shape[-3], key.shape[-3]
    if key.shape[:-3] != cache.key.shape[:-3] or key.shape[-2:] != cache.key.shape[-2:]:
        raise ValueError(
            f"the cache, of shape {list(cache.key.shape)}, must differ from new keys in its length axis only, "
            f"got {list(key.shape)}"
        )
    written = 0 if isinstance(cache.index, jax.core.Tracer) else int(cache.index)
    if written + tokens > length:
        raise ValueError(
            f"the cache holds {length} tokens; {written} known to be written, it cannot take {tokens} more"
        )
    insert = lambda whole, part: jax.lax.dynamic_update_slice_in_dim(
        whole, part.astype(whole.dtype), cache.index, axis=whole.ndim - 3
    )
    return Cache(insert(cache.key, key), insert(cache.value, value), cache.index + jnp.int32(tokens))


def attend(
    query,
    key,
    value,
    *,
    cache: Cache | None,
    mask,
    query_offset,
    key_value_seq_lengths,
    is_causal: bool,
    rotary_base: float | None,
    rotary_fraction: float,
    **keywords,
):
    """Rotary embedding, cache and attention.

    Args:
      query: `[..., T, N, H]`.
      key, value: `[..., S, K, H]`; with a cache those of the T new tokens.
      cache: what came before, or None.
      mask: as flax means it, of any dtype.
      rotary_base: None for no rotary embedding.
      **keywords: for `jax_mfa.dot_product_attention`, as are the others.

    Returns:
      out: `[..., T, N, H]`.
      cache: the cache with the new tokens, or None.
    """
    dtype = jnp.result_type(query, key, value)
    query, key, value = (x.astype(dtype) for x in (query, key, value))
    tokens, key_offset = query.shape[-3], 0
    if cache is not None:
        if key.shape[-3] != tokens:
            raise ValueError(
                f"decoding takes one key for each query: inputs_k must have the length {tokens} of inputs_q, "
                f"got {key.shape[-3]}"
            )
        if not (isinstance(query_offset, numbers.Integral) and query_offset == 0):
            raise ValueError("query_offset must not be given while decoding: the cache knows its position")
        query_offset = key_offset = cache.index
    if rotary_base is not None:
        _turned(query.shape[-1], rotary_base, rotary_fraction, "rotary_")  # by the names that modules have for them
        rotate = lambda x, offset: rotary_embedding(
            x, _positions(offset, x.shape[-3]), base=rotary_base, fraction=rotary_fraction
        )
        query, key = rotate(query, query_offset), rotate(key, key_offset)
    full = None
    if cache is not None:
        full = _append(cache, key, value)
        key, value = full.key.astype(dtype), full.value.astype(dtype)
        is_causal = True
        lengths = () if key_value_seq_lengths is None else (jnp.asarray(key_value_seq_lengths),)
        key_value_seq_lengths = full.index if not lengths else jnp.minimum(lengths[0], full.index)
    out = dot_product_attention(
        query,
        key,
        value,
        mask=as_bool(mask),
        is_causal=is_causal,
        query_offset=query_offset,
        key_value_seq_lengths=key_value_seq_lengths,
        **keywords,
    )
    if full is not None and isinstance(full.index, jax.core.Tracer):
        # how full a traced cache is shows only at run time, and a wrong answer must not look like a right one
        out = jnp.where(full.index > full.key.shape[-3], jnp.asarray(jnp.nan, out.dtype), out)
    return out, full
