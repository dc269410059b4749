"""The arithmetic of `FlashMultiHeadAttention` between its projections, the same for linen and nnx: head sizes, rotary
embedding, the decode cache. Knows arrays only; the modules own the parameters, variables and random streams.

Dimension letters as in `jax_mfa.problem`: B batch (here any leading axes), T query length, S key length, N query
heads, K key/value heads, H head size; M the length of a cache.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_mfa import checks
from jax_mfa.api import dot_product_attention
from jax_mfa.arguments import as_array, known_lengths
from jax_mfa.flax._drop_in import as_bool, sharding_of
from jax_mfa.kv_cache import contiguous as decode_cache
from jax_mfa.problem import accumulation_dtype

if TYPE_CHECKING:
    from jax_mfa.typing import Float, Integer


def first_given(name: str, *values: Any) -> Any:
    """The first of `values` that is not None."""
    for value in values:
        if value is not None:
            return value
    raise ValueError(f"{name} must be given, to the call or to the module, got None for both")


def head_sizes(
    features: int,
    num_heads: int,
    num_key_value_heads: int | None,
    num_kv_heads: int | None,
    head_dim: int | None,
    qkv_features: int | None,
) -> tuple[int, int]:
    """K and H of a module, from what its user said about them; num_kv_heads is flax's name of num_key_value_heads.

    Raises:
      TypeError: where a number is no integer.
      ValueError: where heads do not divide, or two arguments contradict each other.
    """
    given = {
        "num_heads": num_heads,
        "num_key_value_heads": num_key_value_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "qkv_features": qkv_features,
    }
    for name, x in given.items():
        if x is not None or name == "num_heads":
            checks.integer(name, x)
    if None not in (num_key_value_heads, num_kv_heads) and num_key_value_heads != num_kv_heads:
        raise ValueError(
            "num_key_value_heads and num_kv_heads are two names of one number, "
            f"got {num_key_value_heads} and {num_kv_heads}"
        )
    name = "num_key_value_heads" if num_kv_heads is None else "num_kv_heads"
    heads = next((x for x in (num_key_value_heads, num_kv_heads) if x is not None), num_heads)
    if num_heads < 1 or heads < 1 or num_heads % heads:
        raise ValueError(f"num_heads must be a positive multiple of {name}, got {num_heads} and {heads}")
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
            f"head_dim must be positive and qkv_features, where given too, num_heads * head_dim: "
            f"got head_dim = {head_dim}, num_heads = {num_heads}, qkv_features = {qkv_features}"
        )
    return heads, head_dim


def module_inputs(
    inputs_q: ArrayLike, inputs_k: ArrayLike | None, inputs_v: ArrayLike | None
) -> tuple[Array, Array, Array]:
    """A module's inputs as arrays: those of keys by default those of queries, those of values those of keys."""
    if inputs_k is None and inputs_v is not None:
        raise ValueError("inputs_k must be given where inputs_v is, got None")
    inputs_k = inputs_q if inputs_k is None else inputs_k
    inputs_v = inputs_k if inputs_v is None else inputs_v
    given = {"inputs_q": inputs_q, "inputs_k": inputs_k, "inputs_v": inputs_v}
    arrays = {name: as_array(name, x, "fibc", "numbers [..., length, features]") for name, x in given.items()}
    for name, x in arrays.items():
        if x.ndim < 2:
            raise ValueError(f"{name} must have shape [..., length, features], got {list(x.shape)}")
    return arrays["inputs_q"], arrays["inputs_k"], arrays["inputs_v"]


# ---------------------------------------------------------------------------------------------------------------------
# Rotary embedding


def _turned(h: int, base: Any, fraction: Any, prefix: str = "") -> int:
    """How many of H features are turned. The arguments are called `prefix` + their names."""
    number, part = checks.number(f"{prefix}base", base), checks.number(f"{prefix}fraction", fraction)
    r = round(part * h) if 0 < part <= 1 else 0
    if r < 2 or r % 2 or abs(r - part * h) > 1e-6 * h:
        raise ValueError(
            f"{prefix}fraction must lie in (0, 1] and make an even number of the H = {h} features, got {fraction!r}"
        )
    if not 0 < number < math.inf:
        raise ValueError(f"{prefix}base must be a positive finite number, got {base!r}")
    return r


def rotary_embedding(
    x: Float[Array | np.ndarray, "*B T N H"],
    positions: Integer[ArrayLike, "*#B T"],
    *,
    base: float = 10000.0,
    fraction: float = 1.0,
) -> Float[Array, "*B T N H"]:
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
    if isinstance(x, (list, tuple)):
        raise TypeError(f"x must be a floating array [..., T, N, H], got {type(x).__name__}")
    x = as_array("x", x, "f", "floating [..., T, N, H]")
    if x.ndim < 3:
        raise ValueError(f"x must have shape [..., T, N, H], got {list(x.shape)}")
    h = x.shape[-1]
    r = _turned(h, base, fraction)
    positions = as_array("positions", positions, "i", "integers [..., T]")
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


def _positions(offset: Any, positions: Any) -> Any:
    """`offset + positions`, `[..., length]`, of an integer, or integers with leading axes."""
    offset = jnp.asarray(offset)
    return offset[..., None] + positions.reshape((1,) * offset.ndim + positions.shape)


# ---------------------------------------------------------------------------------------------------------------------
# The decode cache


class Cache(NamedTuple):
    """Keys and values seen so far, as `jax_mfa.cache` has them. Columns never written are never seen."""

    key: Any  # [..., M, K, H]
    value: Any  # [..., M, K, H]
    index: Any  # int32 [...]: how many tokens each batch row was given; a scalar, for all, in caches of flax's modules


def empty_cache(
    lead: tuple[int, ...],
    length: int,
    heads: int,
    head_dim: int,
    dtype: Any,
    ring: bool,
    local_window_size: int | tuple[int | None, int | None] | None,
) -> Cache:
    """A cache for `length` tokens, or a ring of the window's size, with nothing in it."""
    if checks.boolean("ring_cache", ring):
        length = decode_cache.ring_columns(local_window_size)
    # two arrays, not one twice: a donated cache must not name one buffer twice
    key, value = (jnp.zeros((*lead, length, heads, head_dim), dtype) for _ in range(2))
    return Cache(key, value, jnp.zeros(lead, jnp.int32))


def attend(
    query: Array,
    key: Array,
    value: Array,
    *,
    cache: Cache | None,
    ring_cache: bool,
    mask: ArrayLike | None,
    query_offset: Any,
    key_value_seq_lengths: Any,
    is_causal: bool,
    rotary_base: float | None,
    rotary_fraction: float,
    sequence_axis: Any,
    **keywords: Any,
) -> tuple[Array, Cache | None]:
    """Rotary embedding, cache and attention.

    Args:
      query: `[..., T, N, H]`.
      key, value: `[..., S, K, H]`; with a cache those of the T new tokens.
      cache: what came before, or None.
      ring_cache: whether the cache is a ring.
      mask: as flax means it, of any dtype.
      key_value_seq_lengths: with a cache, how many of the T new tokens count.
      rotary_base: None for no rotary embedding.
      sequence_axis: a mesh axis or `SequenceSharding`, where sequences are split over devices.
      **keywords: for `jax_mfa.dot_product_attention`, as are the others.

    Returns:
      out: `[..., T, N, H]`.
      cache: the cache with the new tokens, or None.
    """
    dtype = jnp.result_type(query, key, value)
    query, key, value = (x.astype(dtype) for x in (query, key, value))
    mask = None if mask is None else as_bool(mask)
    tokens = query.shape[-3]
    key_offset: Any = 0
    attention: Any = dot_product_attention
    positions: Any = lambda length: jnp.arange(length, dtype=jnp.int32)
    if sequence_axis is not None:
        if cache is not None:
            raise NotImplementedError(
                f"sequence_axis={sequence_axis!r} cannot run while decoding: see jax_mfa.sharded_decode_attention"
            )
        sharding = sharding_of(sequence_axis)
        attention, positions = sharding.attend, sharding.positions
    if cache is not None:
        if key.shape[-3] != tokens:
            raise ValueError(
                f"decoding takes one key for each query: inputs_k must have the length {tokens} of inputs_q, "
                f"got {key.shape[-3]}"
            )
        if not (checks.is_integer(query_offset) and query_offset == 0):
            raise ValueError("query_offset must not be given while decoding: the cache knows its position")
        if key.shape[:-3] != cache.key.shape[:-3] or key.shape[-2:] != cache.key.shape[-2:]:
            raise ValueError(
                f"the cache, of shape {list(cache.key.shape)}, must differ from new keys in its length axis only, "
                f"got {list(key.shape)}"
            )
        if jnp.ndim(cache.index) and jnp.shape(cache.index) != key.shape[:-3]:
            raise ValueError(
                f"the index of the cache must have the leading axes {list(key.shape[:-3])} of the cached keys, "
                f"or be one for all, got {list(jnp.shape(cache.index))}"
            )
        query_offset = key_offset = jnp.broadcast_to(cache.index, key.shape[:-3])
    if rotary_base is not None:
        _turned(query.shape[-1], rotary_base, rotary_fraction, "rotary_")  # by the names that modules have for them
        rotate = lambda x, offset: rotary_embedding(
            x, _positions(offset, positions(x.shape[-3])), base=rotary_base, fraction=rotary_fraction
        )
        query, key = rotate(query, query_offset), rotate(key, key_offset)
    if cache is not None:
        if key_value_seq_lengths is not None:  # checked here, by the name that modules have for it
            lengths = key_value_seq_lengths = known_lengths("key_value_seq_lengths", key_value_seq_lengths, tokens)
            if lengths.shape not in ((), key.shape[:-3]):
                raise ValueError(
                    f"key_value_seq_lengths must have shape [...] = {list(key.shape[:-3])}, got {list(lengths.shape)}"
                )
        out, *new = decode_cache.attend(
            query, key, value, *cache, key_value_seq_lengths, ring=ring_cache, mask=mask, **keywords
        )
        return out, Cache(*new)
    out = attention(
        query,
        key,
        value,
        mask=mask,
        is_causal=is_causal,
        query_offset=query_offset,
        key_value_seq_lengths=key_value_seq_lengths,
        **keywords,
    )
    return out, None
