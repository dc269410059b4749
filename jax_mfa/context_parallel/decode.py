"""Decoding with a cache that is split along the sequence: each device attends over its columns, and partial results
are merged by their maxima and sums, in one all-reduce of a few numbers for each row."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, Required, Unpack, overload

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from jax_mfa import api, checks, choice, compat, partial, primitives
from jax_mfa.arguments import as_rows, clipped, known_lengths, seed_words, specify
from jax_mfa.choice import Implementation
from jax_mfa.context_parallel.api import STATIC, decided
from jax_mfa.context_parallel.layout import axis_size, refuse_quantised
from jax_mfa.kv_cache import contiguous as cache
from jax_mfa.problem import MAX_POSITION, accumulation_dtype, counted_from

if TYPE_CHECKING:
    from jax_mfa.typing import Float, Int32, Integer, Lists


class _OfColumns(api.Features[ArrayLike], total=False):
    """The keyword arguments that the type of the result does not depend on."""

    axis_name: Required[Any]
    mesh: Any
    implementation: Implementation | None


@overload
def sharded_decode_attention(
    query: Float[ArrayLike, "*B T N H"],
    key: Float[ArrayLike, "*B S K H"],
    value: Float[ArrayLike, "*B S K V"],
    lengths: Integer[ArrayLike, "*#B"] | Lists,
    *,
    return_residual: Literal[False] = False,
    **keywords: Unpack[_OfColumns],
) -> Float[Array, "*B T N V"]: ...
@overload
def sharded_decode_attention(
    query: Float[ArrayLike, "*B T N H"],
    key: Float[ArrayLike, "*B S K H"],
    value: Float[ArrayLike, "*B S K V"],
    lengths: Integer[ArrayLike, "*#B"] | Lists,
    *,
    return_residual: Literal[True],
    **keywords: Unpack[_OfColumns],
) -> tuple[Float[Array, "*B T N V"], Float[Array, "*B T N"]]: ...
def sharded_decode_attention(
    query: Float[ArrayLike, "*B T N H"],
    key: Float[ArrayLike, "*B S K H"],
    value: Float[ArrayLike, "*B S K V"],
    lengths: Integer[ArrayLike, "*#B"] | Lists,
    *,
    axis_name: Any,
    mesh: Any = None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
    **keywords: Unpack[api.Features[ArrayLike]],
) -> Float[Array, "*B T N V"] | tuple[Float[Array, "*B T N V"], Float[Array, "*B T N"]]:
    """`decode_attention` with a cache whose columns are split over the devices of a mesh axis, in order.

    Each device reads its own columns; partial results are merged in float32 by one all-reduce of `devices · (V + 2)`
    numbers for each row and head. Every device has the queries, and gets the result.

    Args:
      query: `[B, T, N, H]`, the newest positions; the same on every device.
      key, value: `[B, S, K, H]` and `[B, S, K, V]`, caches that already hold the newest entries. Within `shard_map` a
        device's columns; with `mesh` whole arrays.
      lengths: integers `[B]` (or one for all), how many entries of the whole cache are filled.
      axis_name, mesh: as in `ring_attention`.
      implementation, return_residual: as in `decode_attention`.
      **keywords: scale, local_window_size, logits_soft_cap, alibi_slopes, sinks, dropout_rate and dropout_seed, as in
        `dot_product_attention`.

    Returns, Raises:
      as `decode_attention`; also ValueError for an axis that is not there, or a cache that does not divide.
    """
    for name in sorted(keywords.keys() - _TAKEN):
        raise TypeError(f"sharded_decode_attention() got an unexpected keyword argument {name!r}: it takes {_TAKEN}")
    given = {"query": query, "key": key, "value": value}
    refuse_quantised("sharded_decode_attention", given)
    checks.boolean("return_residual", return_residual)
    choice.names_of(implementation)
    q, k, v = (as_rows(name, x, "[..., length, heads, size]") for name, x in given.items())
    columns, devices = k.shape[-3], axis_size(axis_name, "axis_name", mesh)
    filled = known_lengths("lengths", lengths, columns * devices if mesh is None else columns, q.shape[:-3])
    if keywords.get("dropout_seed") is not None:
        keywords["dropout_seed"] = seed_words(keywords["dropout_seed"])
    is_array = lambda name, x: name not in STATIC and (hasattr(x, "dtype") or isinstance(x, list))
    arrays = {name: jnp.asarray(x) for name, x in keywords.items() if is_array(name, x)}
    static = {name: x for name, x in keywords.items() if name not in arrays}
    run: Any = functools.partial(_of_own_columns, axis_name, implementation, static)
    if mesh is not None:
        split, whole = _split_columns("key", k, axis_name, devices), PartitionSpec()
        run = compat.shard_map(run, mesh, (whole, split, split, whole, whole), (whole, whole))
    out, lse = run(q, k, v, clipped(filled, 0, MAX_POSITION), arrays)
    return (out, lse) if return_residual else out


_TAKEN = ("scale", "local_window_size", "logits_soft_cap", "alibi_slopes", "sinks", "dropout_rate", "dropout_seed")


def _split_columns(name: str, x: Array, axis: Any, devices: int) -> PartitionSpec:
    if x.shape[-3] % devices:
        raise ValueError(f"{name} must have columns that the {devices} devices divide, got S = {x.shape[-3]}")
    return PartitionSpec(*(None,) * (x.ndim - 3), axis)


def _of_own_columns(
    axis: Any, implementation: Any, static: Any, query: Any, key: Any, value: Any, filled: Any, arrays: Any
) -> tuple[Array, Array]:
    """Output and log-sum-exp of all columns, of which a device holds some."""
    rows, columns, tokens, v = query.shape[:-1], key.shape[-3], query.shape[-3], value.shape[-1]
    device = lax.axis_index(axis)
    first = device * columns
    visible = {"query_offset": filled - tokens - first, "key_value_seq_lengths": jnp.clip(filled - first, 0, columns)}
    spec, operands = specify(query, key, value, is_causal=True, **visible, **static, **arrays)
    acc = accumulation_dtype(operands.query.dtype)
    if 0 in (*rows, columns):  # no rows, or no columns
        return jnp.zeros((*rows, v), operands.query.dtype), jnp.full(rows, -jnp.inf, acc)
    if operands.dropout is not None:  # rows count from 0 on, as on one device
        operands = operands._replace(dropout=counted_from(operands.dropout, column=first))
    taken = decided("sharded_decode_attention", implementation, spec, operands)
    out, row_max, row_sum = primitives.attention(spec, operands._replace(sinks=None), taken)
    # sums that have the derivative of the log-sum-exp; else maximum and sum of a row have none
    lse = partial.log_sum_exp(row_max, row_sum)
    lse = jnp.where(jnp.isfinite(lse), lse, 0)
    row_max, row_sum = lax.stop_gradient((row_max, row_sum))
    sums, row_max, row_sum = partial.weighed(out, row_max, row_sum * jnp.exp(lse - lax.stop_gradient(lse)), acc)
    # maximum and sum beside the sums of values, in a place for each device: one all-reduce gathers all
    own = jnp.concatenate([sums, row_max[..., None], row_sum[..., None]], axis=-1)[None]
    places = jnp.zeros((axis_size(axis, "axis_name"), *own.shape[1:]), own.dtype)
    places = lax.psum(lax.dynamic_update_slice_in_dim(places, own, device, 0), axis)
    parts = [(x[..., :-2], x[..., -2], x[..., -1]) for x in places]
    whole, sinks = functools.reduce(partial.merged, parts), partial.sinks_of(spec, operands, acc)
    out, row_max, row_sum = partial.finished(whole, sinks, operands.query.dtype)
    return out[..., :v].reshape(*rows, v), (row_max + jnp.log(row_sum)).reshape(rows)


def sharded_append(
    key_cache: Float[ArrayLike, "*B S K H"],
    value_cache: Float[ArrayLike, "*B S K V"],
    lengths: Integer[ArrayLike, "*#B"] | Lists,
    key: Float[ArrayLike, "*B T K H"],
    value: Float[ArrayLike, "*B T K V"],
    *,
    axis_name: Any,
    mesh: Any = None,
) -> tuple[Float[Array, "*B S K H"], Float[Array, "*B S K V"], Int32[Array, "*B"]]:
    """`cache.append` to a cache whose columns are split over the devices of a mesh axis: each writes its own.

    Args:
      key_cache, value_cache: `[B, S, K, H]` and `[B, S, K, V]`; within `shard_map` a device's columns, with `mesh`
        whole arrays.
      lengths, key, value: as there; the same on every device.
      axis_name, mesh: as in `sharded_decode_attention`.

    Returns, Raises:
      as `cache.append`; also ValueError for an axis that is not there, and a cache that does not divide.
    """
    arrays = cache.checked_arrays(key_cache, value_cache, key, value)
    (*lead, columns, _, _), devices = arrays[0].shape, axis_size(axis_name, "axis_name", mesh)
    parts = devices if mesh is None else 1
    start, count = cache.checked_counts(lead, parts * columns, arrays[2].shape[-3], lengths, None, False)

    def run(key_cache: Array, value_cache: Array, key: Any, value: Any, start: Any, count: Any) -> tuple[Any, ...]:
        first = lax.axis_index(axis_name) * key_cache.shape[-3]
        *caches, _ = cache.write(key_cache, value_cache, key, value, start - first, count, False)
        return *caches, start + count

    if mesh is not None:
        split, whole = _split_columns("key_cache", arrays[0], axis_name, devices), PartitionSpec()
        run = compat.shard_map(run, mesh, (split, split, *(whole,) * 4), (split, split, whole))
    return run(*arrays, start, count)
