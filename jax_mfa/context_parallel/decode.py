"""Decoding with a cache that is split along the sequence: each device attends over its columns, and partial results
are merged by their maxima and sums, in one all-reduce of a few numbers for each row."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Required, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from jax_mfa import api, checks, compat, partial, primitives
from jax_mfa.arguments import as_array, known_lengths, specify
from jax_mfa.choice import Implementation, names_of
from jax_mfa.context_parallel import axes
from jax_mfa.context_parallel.layout import decided, refuse_quantised
from jax_mfa.kv_cache import contiguous as cache
from jax_mfa.problem import accumulation_dtype, counted_from

if TYPE_CHECKING:
    from jax_mfa.typing import Float, Int32, Integer, Lists


class _OverDevices(api.Features[ArrayLike], total=False):
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
    **keywords: Unpack[_OverDevices],
) -> Float[Array, "*B T N V"]: ...
@overload
def sharded_decode_attention(
    query: Float[ArrayLike, "*B T N H"],
    key: Float[ArrayLike, "*B S K H"],
    value: Float[ArrayLike, "*B S K V"],
    lengths: Integer[ArrayLike, "*#B"] | Lists,
    *,
    return_residual: Literal[True],
    **keywords: Unpack[_OverDevices],
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

    Each device reads its own columns; what they find is merged in float32 by one all-reduce of `devices · (V + 2)`
    numbers for each row and head. Every device has the queries, and gets the result.

    Args:
      query: `[B, T, N, H]`, the newest positions; the same on every device.
      key, value: `[B, S, K, H]` and `[B, S, K, V]`, caches that already hold the newest entries. Within `shard_map` a
        device's columns; with `mesh` whole arrays.
      lengths: integers `[B]` (or one for all), how many entries of the whole cache are filled.
      axis_name: the mesh axis, or a tuple of axes.
      mesh: a `jax.sharding.Mesh`, for a call with whole arrays.
      implementation, return_residual: as in `decode_attention`.
      **keywords: scale, local_window_size, logits_soft_cap, alibi_slopes, sinks, dropout_rate and dropout_seed, as in
        `dot_product_attention`.

    Returns:
      `[B, T, N, V]` of the query's dtype; with `return_residual` also the log-sum-exp, `[B, T, N]` float32 (float64).

    Raises:
      ValueError, TypeError: as `decode_attention`; also for an axis that is not there, or a cache that does not divide.
      NotImplementedError: where a named implementation cannot run the call.
    """
    for name in sorted(keywords):
        if name not in _TAKEN:
            raise TypeError(
                f"sharded_decode_attention() got an unexpected keyword argument {name!r}: it takes {_TAKEN}"
            )
    refuse_quantised("sharded_decode_attention", query=query, key=key, value=value)
    checks.boolean("return_residual", return_residual)
    names_of(implementation)
    given = {"query": query, "key": key, "value": value}
    query, key, value = (as_array(name, x, "f", "floating [..., length, heads, size]") for name, x in given.items())
    if min(x.ndim for x in (query, key, value)) < 3:
        specify(query, key, value)  # says what is wrong with them
    columns, devices = key.shape[-3], _devices(mesh, axis_name)
    filled = known_lengths("lengths", lengths, columns * devices if mesh is None else columns)
    if filled.shape not in ((), np.shape(query)[:-3]):
        raise ValueError(f"lengths must have shape [B] = {list(np.shape(query)[:-3])}, got {list(filled.shape)}")
    if mesh is None:
        out, lse = _of_own_columns(query, key, value, filled, axis_name, devices, implementation, keywords)
        return (out, lse) if return_residual else out
    _check_columns("key", columns, devices)
    arrays = {name: jnp.asarray(x) for name, x in keywords.items() if hasattr(x, "dtype") or isinstance(x, list)}
    static = {name: x for name, x in keywords.items() if name not in arrays}

    def run(query: Any, key: Any, value: Any, filled: Array, arrays: Any) -> tuple[Array, Array]:
        return _of_own_columns(query, key, value, filled, axis_name, devices, implementation, {**static, **arrays})

    split = _columns_of(key, axis_name)
    whole = PartitionSpec()
    out, lse = compat.shard_map(run, mesh, (whole, split, split, whole, whole), (whole, whole))(
        *(jnp.asarray(x) for x in (query, key, value, filled)), arrays
    )
    return (out, lse) if return_residual else out


_TAKEN = (
    *("scale", "local_window_size", "logits_soft_cap", "alibi_slopes", "sinks"),
    *("dropout_rate", "dropout_seed"),
)


def _columns_of(x: Any, axis: Any) -> PartitionSpec:
    return PartitionSpec(*(None,) * (np.ndim(x) - 3), axis)


def _devices(mesh: Any, axis: Any) -> int:
    size = axes.axis_size if mesh is None else functools.partial(axes.mesh_axis_size, mesh)
    return size(axis, "axis_name")


def _check_columns(name: str, columns: int, devices: int) -> None:
    if columns % devices:
        raise ValueError(f"{name} must have columns that the {devices} devices divide, got S = {columns}")


def _of_own_columns(
    query: Any,
    key: Any,
    value: Any,
    filled: Array,
    axis: Any,
    devices: int,
    implementation: Implementation | None,
    keywords: Mapping[str, Any],
) -> tuple[Array, Array]:
    columns, tokens = np.shape(key)[-3], np.shape(query)[-3]
    first = lax.axis_index(axis) * columns
    filled = jnp.asarray(filled, jnp.int32)
    spec, operands = specify(
        query,
        key,
        value,
        is_causal=True,
        query_offset=filled - tokens - first,
        key_value_seq_lengths=jnp.clip(filled - first, 0, columns),
        **keywords,
    )
    shape = np.shape(query)[:-1]
    if 0 in (*shape, columns):  # nobody looks, or there is nothing to see
        out = jnp.zeros((*shape, np.shape(value)[-1]), operands.query.dtype)
        return out, jnp.full(shape, -jnp.inf, accumulation_dtype(out.dtype))
    if operands.dropout is not None:
        # rows count from 0 on, as on one device
        operands = operands._replace(dropout=counted_from(operands.dropout, column=first))
    chosen = decided("sharded_decode_attention", implementation, spec, operands)
    results = primitives.attention(spec, operands._replace(sinks=None), chosen)
    out, row_max, row_sum = _differentiable(*results)
    sums, row_max, row_sum = partial.weighed(out, row_max, row_sum, accumulation_dtype(operands.query.dtype))
    # one number each beside the sums; every device fills a place of its own
    own = jnp.concatenate([sums, row_max[..., None], row_sum[..., None]], axis=-1)[None]
    places = jnp.zeros((devices, *own.shape[1:]), own.dtype)
    found = lax.psum(lax.dynamic_update_slice_in_dim(places, own, lax.axis_index(axis), 0), axis)
    parts = [(x[..., :-2], x[..., -2], x[..., -1]) for x in found]
    out, row_max, row_sum = partial.finished(spec, operands, functools.reduce(partial.merged, parts))
    return out[..., : np.shape(value)[-1]].reshape(*shape, -1), (row_max + jnp.log(row_sum)).reshape(shape)


def _differentiable(out: Array, row_max: Array, row_sum: Array) -> tuple[Array, Array, Array]:
    """The same numbers, of which the sum has the derivative: a row's maximum and sum have none of their own."""
    lse = partial.log_sum_exp(row_max, row_sum)
    lse = jnp.where(jnp.isfinite(lse), lse, 0)
    return out, lax.stop_gradient(row_max), lax.stop_gradient(row_sum) * jnp.exp(lse - lax.stop_gradient(lse))


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
    """`cache.append` to a cache whose columns are split over the devices of a mesh axis: each writes what falls to it.

    Args:
      key_cache, value_cache: `[B, S, K, H]` and `[B, S, K, V]`; within `shard_map` a device's columns, with `mesh`
        whole arrays.
      lengths: integers `[B]` (or one for all): how many tokens each batch row's cache was given so far.
      key, value: `[B, T, K, H]` and `[B, T, K, V]`, the new tokens; the same on every device.
      axis_name, mesh: as in `sharded_decode_attention`.

    Returns:
      key_cache, value_cache: as they were, but for the columns of the new tokens.
      lengths: `lengths + T`, int32 `[B]`.

    Raises:
      ValueError, TypeError: as `cache.append`; also for an axis that is not there, and a cache that does not divide.
    """
    arrays = cache._arrays(key_cache, value_cache, key, value)
    columns, devices = arrays[0].shape[-3], _devices(mesh, axis_name)
    grown = lambda x: (
        x if mesh is not None else jax.ShapeDtypeStruct((*x.shape[:-3], devices * columns, *x.shape[-2:]), x.dtype)
    )
    start, count = cache._counts(grown(arrays[0]), grown(arrays[1]), arrays[2], arrays[3], lengths, None, False)

    def run(key_cache: Array, value_cache: Array, key: Any, value: Any, start: Any, count: Any) -> tuple[Any, ...]:
        first = lax.axis_index(axis_name) * key_cache.shape[-3]
        *caches, _ = cache._append(key_cache, value_cache, key, value, start - first, count, False)
        return *caches, start + count

    if mesh is None:
        return run(*arrays, start, count)
    _check_columns("key_cache", columns, devices)
    split, all_of = _columns_of(key_cache, axis_name), PartitionSpec()
    return compat.shard_map(run, mesh, (split, split, *(all_of,) * 4), (split, split, all_of))(*arrays, start, count)
