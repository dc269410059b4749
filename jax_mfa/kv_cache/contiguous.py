"""Caches of keys and values for decoding, of all tokens or of a local window; each batch entry has its own length.

A cache is two arrays and the lengths, no object, so that it may live in any tree of JAX and be donated. A plain cache
holds the token of position p in column p. A *ring* holds it in column p mod S: of any number of tokens the S newest. A
local window `(left, 0)` sees no token but the `left + 1` newest, so a ring of as many columns serves it for ever. Keys
are turned by a rotary embedding before they are cached: their order in the ring does not matter.

Dimension letters: B batch (any leading axes, or none), T new tokens, S columns of a cache, N query heads, K key/value
heads, H head size of queries and keys, V of values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from jax_mfa import checks, compat
from jax_mfa.arguments import as_rows, as_window, clipped, concrete, known_lengths, unwrapped
from jax_mfa.choice import Implementation
from jax_mfa.flex.api import flex_attention
from jax_mfa.flex.program import MaskMod, ScoreMod
from jax_mfa.kv_cache.storage import QuantizedArray, as_bits, from_bits
from jax_mfa.problem import MAX_POSITION

if TYPE_CHECKING:
    from jax_mfa.typing import Bias, Float, Int32, Integer, Key, Lists, Mask

__all__ = ["append", "attend"]

# arguments of `attend` that `dot_product_attention` takes as they are
_FEATURES = (
    *("scale", "logits_soft_cap", "alibi_slopes", "sinks", "query_segment_ids", "key_value_segment_ids"),
    *("dropout_rate", "dropout_seed", "implementation", "bias", "mask", "score_mod", "mask_mod"),
)
_BY_COLUMN = ("bias", "mask", "query_segment_ids", "key_value_segment_ids", "score_mod", "mask_mod")


def append(
    key_cache: Float[ArrayLike, "*B S K H"],
    value_cache: Float[ArrayLike, "*B S K V"],
    lengths: Integer[ArrayLike, "*#B"] | Lists,
    key: Float[ArrayLike, "*B T K H"],
    value: Float[ArrayLike, "*B T K V"],
    new_lengths: Integer[ArrayLike, "*#B"] | Lists | None = None,
    *,
    ring: bool = False,
) -> tuple[Float[Array, "*B S K H"], Float[Array, "*B S K V"], Int32[Array, "*B"]]:
    """Writes each batch entry's new tokens behind those that its cache holds, for `jax_mfa.decode_attention`.

    Costs O(T), whatever S, where the caches are donated to `jit`; but XLA's CPU backend copies caches of bfloat16,
    which it does not with the pages of a `PagedKVCache`. Tokens that a plain cache has no column for are dropped, yet
    counted: a returned length above S says so (and is refused where it is known). A ring drops its oldest.

    Args:
      key_cache: `[B, S, K, H]`, floating.
      value_cache: `[B, S, K, V]`, floating.
      lengths: integers `[B]` (or one for all): how many tokens each batch entry's cache was given so far.
      key: `[B, T, K, H]`, the new tokens; stored in the dtype of key_cache.
      value: `[B, T, K, V]`; stored in the dtype of value_cache.
      new_lengths: integers `[B]` (or one for all): how many of the T tokens count, from the first on; the others are
        padding and are not written. Default T.
      ring: the caches are rings.

    Returns:
      key_cache, value_cache: as they were, but for the columns of the new tokens.
      lengths: `lengths + new_lengths`, int32 `[B]`.

    Raises:
      ValueError, TypeError: naming the argument, what was seen and what was expected; also where more tokens are known
        to come than a plain cache holds. Values are known where they are not traced.
    """
    arrays = checked_arrays(key_cache, value_cache, key, value)
    *lead, columns, _, _ = arrays[0].shape
    return write(*arrays, *checked_counts(lead, columns, arrays[2].shape[-3], lengths, new_lengths, ring), ring)


def write(
    key_cache: Array, value_cache: Array, key: Array, value: Array, start: Array, count: Array, ring: bool
) -> tuple[Array, Array, Array]:
    """`append` of checked arguments: `count` tokens from position `start` on. Those before position 0 are dropped."""
    columns, tokens = key_cache.shape[-3], np.arange(key.shape[-3], dtype=np.int32)

    def write_row(cache: Array, new: Array, start: Array, count: Array) -> Array:
        column = start + tokens
        counts = (tokens < count) & (column >= 0)
        if ring:
            column, counts = column % columns, counts & (tokens >= count - columns)
        # scatters drop column `columns`, which does not exist, and those beyond
        at = jnp.where(counts, column, columns)
        return _placed(cache, new.astype(cache.dtype), at)

    def written(cache: Array, new: Array) -> Array:
        spec = lambda: compat.spec_of(cache)
        return _for_each_row(write_row, spec, cache=cache, new=new, start=start, count=count)

    return written(key_cache, key), written(value_cache, value), start + count


@jax.custom_jvp
def _placed(cache: Array, new: Array, at: Array) -> Array:
    """The cache with new tokens in these columns, as bits: XLA's CPU backend would convert a whole cache of bfloat16 to
    float32 and back. Bits have no derivative, so that it is declared."""
    return from_bits(as_bits(cache).at[at].set(as_bits(new), mode="drop"))


@_placed.defjvp
def _placed_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    cache, new, at = primals
    as_numbers = lambda cache, new: cache.at[at].set(new, mode="drop")
    return _placed(*primals), jax.jvp(as_numbers, (cache, new), tuple(tangents[:2]))[1]


def _for_each_row(run: Callable[..., Array], spec: Callable[[], PartitionSpec], **arrays: Array) -> Array:
    """`run` of each batch entry's arrays, `start` among them; `spec` is that of the result on explicit meshes."""
    for _ in arrays["start"].shape:
        run = jax.vmap(run)
    return compat.without_types(lambda arrays: run(*arrays.values()), arrays, spec)


def attend(
    query: Float[ArrayLike, "*B T N H"],
    key: Float[ArrayLike, "*B T K H"],
    value: Float[ArrayLike, "*B T K V"],
    key_cache: Float[ArrayLike, "*B S K H"],
    value_cache: Float[ArrayLike, "*B S K V"],
    lengths: Integer[ArrayLike, "*#B"] | Lists,
    new_lengths: Integer[ArrayLike, "*#B"] | Lists | None = None,
    *,
    ring: bool = False,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    bias: Bias | None = None,
    mask: Mask | None = None,
    scale: Float[ArrayLike, ""] | int | None = None,
    query_seq_lengths: Integer[ArrayLike, "*#B"] | Lists | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Float[ArrayLike, "*#B N"] | Lists | None = None,
    sinks: Float[ArrayLike, "*#B N"] | Lists | None = None,
    query_segment_ids: Integer[ArrayLike, "*#B T"] | Lists | None = None,
    key_value_segment_ids: Integer[ArrayLike, "*#B S"] | Lists | None = None,
    dropout_rate: float = 0.0,
    dropout_seed: Integer[ArrayLike, ""] | Integer[ArrayLike, "2"] | Key[ArrayLike, ""] | Lists | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "*B T N V"], Float[Array, "*B S K H"], Float[Array, "*B S K V"], Int32[Array, "*B"]]:
    """`append`, and causal attention of the new tokens over all that they may see: a prompt, or the next tokens.

    A batch entry's tokens stand at positions `lengths`, `lengths + 1`, …, and see those of its cache and of their own
    up to themselves. A padding token sees nothing. A new token of one call, T = 1, reads a ring where it lies; for more
    the window is laid out in order first, which copies it.

    Args:
      query: `[B, T, N, H]`; the computation has its dtype.
      key, value, key_cache, value_cache, lengths, new_lengths: as in `append`.
      ring: the caches are rings, of `left + 1` columns for a local_window_size of `(left, right)`.
      score_mod, mask_mod, bias, mask, query_segment_ids, key_value_segment_ids: as in `jax_mfa.flex_attention`, where S
        counts the columns of the cache; not with a ring, whose columns have no position of their own.
      scale, query_seq_lengths, local_window_size, logits_soft_cap, alibi_slopes, sinks, dropout_rate, dropout_seed,
        implementation: as in `jax_mfa.dot_product_attention`.

    Returns:
      out: `[B, T, N, V]` of the query's dtype; NaN in a batch entry that was given more tokens than its plain cache has
        columns, for a wrong answer must not look like a right one.
      key_cache, value_cache, lengths: as in `append`.

    Raises:
      ValueError, TypeError: as `append` and `jax_mfa.dot_product_attention`; also for a ring without a window, or of
        another size.
      NotImplementedError: where a named implementation cannot run the call.
    """
    given = locals()
    query = _floating("query", query, "[..., T, N, H]")
    arrays = key_cache, value_cache, key, value = checked_arrays(key_cache, value_cache, key, value)
    (*lead, columns, _, _), tokens = key_cache.shape, key.shape[-3]
    start, count = checked_counts(lead, columns, tokens, lengths, new_lengths, ring)
    if query.shape[-3] != tokens:
        raise ValueError(f"query must be as long as key, [..., T = {tokens}, N, H], got {list(query.shape)}")
    if query_seq_lengths is not None:
        query_seq_lengths = known_lengths("query_seq_lengths", query_seq_lengths, tokens, start.shape)
        query_seq_lengths = jnp.minimum(clipped(query_seq_lengths, 0, tokens), count)
    elif new_lengths is not None:
        query_seq_lengths = count  # padding sees nothing
    left = ring_columns(local_window_size) - 1 if ring else 0
    for name in _BY_COLUMN if ring else ():
        if given[name] is not None:
            raise ValueError(f"{name} must not be given with a ring cache, whose columns have no fixed position")
    if ring and columns != left + 1:
        raise ValueError(
            f"a ring cache for local_window_size = {local_window_size!r} must have {left + 1} columns, "
            f"got key_cache of shape {list(key_cache.shape)}"
        )
    keys, values, total = caches = write(*arrays, start, count, ring)

    filled = jnp.minimum(total, columns)
    visible: dict[str, Any] = {"local_window_size": local_window_size}
    if not ring:
        visible |= {"query_offset": start, "key_value_seq_lengths": filled}
    elif tokens == 1 and alibi_slopes is None:  # the ring holds the columns that the one query sees, and no others
        visible = {"query_offset": filled - 1, "key_value_seq_lengths": filled}
    else:
        keys, values = (_in_order(x, new, start, left) for x, new in ((key_cache, key), (value_cache, value)))
        # column c is position start − left + c; the first `left − start` were never written
        range_of_row = lambda start, count: jnp.stack([jnp.maximum(left - start, 0), left + count])
        seen = lambda *row: jnp.broadcast_to(range_of_row(*row), (tokens, 2))
        spec = lambda: PartitionSpec(*compat.spec_of(start), None, None)
        visible |= {"query_offset": left, "key_value_ranges": _for_each_row(seen, spec, start=start, count=count)}
    out = flex_attention(
        query,
        keys.astype(query.dtype),
        values.astype(query.dtype),
        is_causal=True,
        query_seq_lengths=query_seq_lengths,
        **visible,
        **{name: given[name] for name in _FEATURES},
    )
    if not ring and isinstance(total, jax.core.Tracer):
        # traced lengths are known only at run time
        out = jnp.where((total > columns)[..., None, None, None], jnp.asarray(jnp.nan, out.dtype), out)
    return out, *caches


def ring_columns(local_window_size: int | tuple[int | None, int | None] | None) -> int:
    """How many columns a ring cache has for a window: those that one query sees. `ValueError` where that sees all."""
    left, _ = as_window(local_window_size)
    if left is None:
        raise ValueError(f"a ring cache needs a local_window_size with a limit on the left, got {local_window_size!r}")
    return left + 1


def _in_order(cache: Array, new: Array, start: Array, count: int) -> Array:
    """The `count` tokens before position `start` of a ring of `count + 1` columns, in order, and the new ones."""
    tokens = np.arange(count, dtype=np.int32)

    def row_in_order(cache: Array, new: Array, start: Array) -> Array:
        old = jnp.take(cache, (start + 1 + tokens) % (count + 1), axis=0, mode="clip")
        return jnp.concatenate([old, new.astype(cache.dtype)], axis=0)

    def spec() -> PartitionSpec:
        *rows, _, heads, size = compat.spec_of(cache)
        return PartitionSpec(*rows, None, heads, size)

    return _for_each_row(row_in_order, spec, cache=cache, new=new, start=start)


# ---------------------------------------------------------------------------------------------------------------------
# Checks


def _floating(name: str, x: Any, shape: str) -> Array:
    if isinstance(unwrapped(x), QuantizedArray):
        raise TypeError(
            f"{name} must be floating {shape}, got a QuantizedArray: tokens are quantised as they come by a "
            "PagedKVCache, and not in a plain cache or a ring"
        )
    return as_rows(name, x, shape)


def checked_arrays(
    key_cache: ArrayLike, value_cache: ArrayLike, key: ArrayLike, value: ArrayLike
) -> tuple[Array, Array, Array, Array]:
    """The arrays of `append`, of JAX and of shapes that fit."""
    key_cache = _floating("key_cache", key_cache, "[..., S, K, H]")
    value_cache = _floating("value_cache", value_cache, "[..., S, K, V]")
    key, value = _floating("key", key, "[..., T, K, H]"), _floating("value", value, "[..., T, K, V]")
    checks.same_shape("value_cache", value_cache, "key_cache", key_cache, -1, "head size")
    checks.same_shape("key", key, "key_cache", key_cache, -3, "length")
    checks.same_shape("value", value, "value_cache", value_cache, -3, "length")
    if value.shape[-3] != key.shape[-3]:
        raise ValueError(f"value must have the length T = {key.shape[-3]} of key, got {list(value.shape)}")
    return key_cache, value_cache, key, value


def checked_counts(
    lead: Sequence[int], columns: int, tokens: int, lengths: Any, new_lengths: Any, ring: bool
) -> tuple[Array, Array]:
    """How many tokens each batch entry has and how many come, int32 with the leading axes of the cache."""
    lead, limit = tuple(lead), MAX_POSITION if checks.boolean("ring", ring) else columns
    lengths = known_lengths("lengths", lengths, limit, lead)
    new_lengths = np.int32(tokens) if new_lengths is None else known_lengths("new_lengths", new_lengths, tokens, lead)
    by_row = lambda x, most: jnp.broadcast_to(clipped(x, 0, most), lead)
    start, count = by_row(lengths, MAX_POSITION), by_row(new_lengths, tokens)
    # integers that are traced or live on other hosts are taken for 0
    known = lambda x: np.int64(0) if (values := concrete(x)) is None else values.astype(np.int64)
    written, coming = np.broadcast_arrays(known(lengths), known(new_lengths))
    if not ring and written.size and (written + coming).max() > columns:
        row = np.argmax(written + coming)
        raise ValueError(
            f"key_cache holds {columns} tokens; {written.flat[row]} known to be written, by lengths, "
            f"it cannot take {coming.flat[row]} more of key"
        )
    return start, count
