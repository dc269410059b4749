"""The arithmetic of `FlashMultiHeadAttention` between its projections, the same for linen and nnx: head sizes, rotary
embedding, the decode cache. Knows arrays, and of a module the attributes that both have; the modules own the
parameters, variables and random streams.

Dimension letters as in `jax_mfa.problem`: B batch (here any leading axes), T query length, S key length, N query
heads, K key/value heads, H head size; M the length of a cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_mfa import checks
from jax_mfa.arguments import as_array, known_integers
from jax_mfa.context_parallel.api import SequenceSharding
from jax_mfa.flax._drop_in import as_bool, refuse_split, seed_of, sharding_of
from jax_mfa.flex.api import flex_attention
from jax_mfa.kv_cache import contiguous as decode_cache
from jax_mfa.problem import accumulation_dtype

if TYPE_CHECKING:
    from jax_mfa.flax import linen, nnx
    from jax_mfa.typing import Float, Integer

    Module: TypeAlias = linen.FlashMultiHeadAttention | nnx.FlashMultiHeadAttention


def head_sizes(module: Module, features: int) -> tuple[int, int]:
    """K and H of a module, from what its user said about them, for inputs of so many features. Raises `TypeError` where
    a number is no integer, `ValueError` where heads do not divide, or two arguments contradict each other."""
    for name in ("num_heads", "num_key_value_heads", "num_kv_heads", "head_dim", "qkv_features"):
        if (x := getattr(module, name)) is not None or name == "num_heads":
            checks.integer(name, x)
    num_heads, head_dim, qkv_features = module.num_heads, module.head_dim, module.qkv_features
    given = [x for x in (module.num_key_value_heads, module.num_kv_heads) if x is not None]
    if len(given) == 2 and given[0] != given[1]:
        raise ValueError(
            f"num_key_value_heads and num_kv_heads are two names of one number, got {given[0]} and {given[1]}"
        )
    heads = given[0] if given else num_heads
    name = "num_key_value_heads" if module.num_kv_heads is None else "num_kv_heads"
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


def projection_keywords(module: Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keywords of flax's layers for the projections of the inputs, and for the last projection."""
    inits = "kernel_init", "bias_init"
    inner = {name: getattr(module, name) for name in ("use_bias", "dtype", "param_dtype", "precision", *inits)}
    return inner, inner | {name: getattr(module, f"out_{name}") or inner[name] for name in inits}


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
        checks.fits(name, x, x.ndim >= 2, "[..., length, features]")
    return arrays["inputs_q"], arrays["inputs_k"], arrays["inputs_v"]


def dropout_keywords(module: Module, deterministic: bool | None, random_key: Callable[[], Array]) -> dict[str, Any]:
    """The keywords of dropout; none where it is off, by the call's `deterministic` or else the module's."""
    if module.dropout_rate == 0.0:
        return {}
    deterministic = module.deterministic if deterministic is None else deterministic
    if deterministic is None:
        raise ValueError("deterministic must be given, to the call or to the module, got None for both")
    return {} if deterministic else {"dropout_rate": module.dropout_rate, "dropout_seed": seed_of(random_key())}


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
    checks.fits("x", x, x.ndim >= 3, "[..., T, N, H]")
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


def _rotated(module: Module, x: Array, offset: Any, sharding: SequenceSharding | None) -> Array:
    """`x`, `[..., length, heads, H]`, turned where a module says so; its first token has the position `offset`."""
    if module.rotary_base is None:
        return x
    # name the module's rotary_base and rotary_fraction in errors
    _turned(x.shape[-1], module.rotary_base, module.rotary_fraction, "rotary_")
    length, offset = x.shape[-3], jnp.asarray(offset)
    positions = jnp.arange(length, dtype=jnp.int32) if sharding is None else sharding.positions(length)
    positions = offset[..., None] + positions.reshape((1,) * offset.ndim + (length,))
    return rotary_embedding(x, positions, base=module.rotary_base, fraction=module.rotary_fraction)


# ---------------------------------------------------------------------------------------------------------------------
# The decode cache


class Cache(NamedTuple):
    """Keys and values seen so far, as `jax_mfa.cache` has them. Columns never written are never seen."""

    key: Any  # [..., M, K, H]
    value: Any  # [..., M, K, H]
    index: Any  # int32 [...]: how many tokens each batch entry was given; a scalar for all in caches of flax's modules


def empty_cache(module: Module, shape: tuple[int, ...], dtype: Any) -> Cache:
    """A cache of the shape `[..., M, K, H]` with nothing in it; a ring has as many columns as the module's window."""
    *lead, length, heads, head_dim = shape
    if checks.boolean("ring_cache", module.ring_cache):
        length = decode_cache.ring_columns(module.local_window_size)
    # two arrays, not one twice: a donated cache must not name one buffer twice
    key, value = (jnp.zeros((*lead, length, heads, head_dim), dtype) for _ in range(2))
    return Cache(key, value, jnp.zeros(lead, jnp.int32))


def attend(
    module: Module,
    query: Array,
    key: Array,
    value: Array,
    *,
    decode: bool,
    cache: Cache | None,
    mask: ArrayLike | None,
    query_offset: Any,
    key_value_seq_lengths: Any,
    functions: dict[str, Any],
    **keywords: Any,
) -> tuple[Array, Cache | None]:
    """Rotary embedding, cache and attention, as a module's attributes say: the output `[..., T, N, H]`, and the cache
    with the new tokens, or None.

    With a cache, key, value and key_value_seq_lengths are of the T new tokens; while one is made, `decode` is set
    without. `mask` is as flax means it, of any dtype, and `functions`, score_mod and mask_mod, go before those of the
    module; the other arguments are as `flex_attention` takes them.
    """
    dtype = jnp.result_type(query, key, value)
    query, key, value = (x.astype(dtype) for x in (query, key, value))
    functions = {name: getattr(module, name) if x is None else x for name, x in functions.items()}
    keywords |= refuse_split(functions, module.sequence_axis) | {"mask": None if mask is None else as_bool(mask)}
    keywords |= {name: getattr(module, name) for name in ("local_window_size", "logits_soft_cap", "implementation")}
    key_offset: Any = 0
    if cache is not None:
        _check_decoding(module, cache, query, key, query_offset, key_value_seq_lengths)
        query_offset = key_offset = jnp.broadcast_to(cache.index, key.shape[:-3])
    sharding = None if module.sequence_axis is None else sharding_of(module.sequence_axis)
    query, key = _rotated(module, query, query_offset, sharding), _rotated(module, key, key_offset, sharding)
    if cache is not None:
        keywords["ring"] = module.ring_cache
        out, *new = decode_cache.attend(query, key, value, *cache, key_value_seq_lengths, **keywords)
        return out, Cache(*new)
    attention: Any = flex_attention if sharding is None else sharding.attend
    keywords |= {"query_offset": query_offset, "key_value_seq_lengths": key_value_seq_lengths}
    return attention(query, key, value, is_causal=module.is_causal or decode, **keywords), None


def _check_decoding(
    module: Module, cache: Cache, query: Array, key: Array, query_offset: Any, key_value_seq_lengths: Any
) -> None:
    """Raises where a cache cannot take new keys, by the names that modules have for the arguments."""
    lead, tokens = key.shape[:-3], query.shape[-3]
    if module.sequence_axis is not None:
        raise NotImplementedError(
            f"sequence_axis={module.sequence_axis!r} cannot run while decoding: see jax_mfa.sharded_decode_attention"
        )
    if key.shape[-3] != tokens:
        raise ValueError(
            f"decoding takes one key for each query: inputs_k must have the length {tokens} of inputs_q, "
            f"got {key.shape[-3]}"
        )
    if not (checks.is_integer(query_offset) and query_offset == 0):
        raise ValueError("query_offset must not be given while decoding: the cache knows its position")
    if lead != cache.key.shape[:-3] or key.shape[-2:] != cache.key.shape[-2:]:
        raise ValueError(
            f"the cache, of shape {list(cache.key.shape)}, must differ from new keys in its length axis only, "
            f"got {list(key.shape)}"
        )
    if jnp.shape(cache.index) not in ((), lead):
        raise ValueError(
            f"the index of the cache must have the leading axes {list(lead)} of the cached keys, "
            f"or be one for all, got {list(jnp.shape(cache.index))}"
        )
    if key_value_seq_lengths is not None:
        lengths = known_integers("key_value_seq_lengths", key_value_seq_lengths, 0, tokens, "integers [...]")
        checks.fits("key_value_seq_lengths", lengths, lengths.shape in ((), lead), f"[...] = {list(lead)}")
