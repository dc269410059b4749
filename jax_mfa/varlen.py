"""Attention of packed sequences of any lengths, without padding: each row's columns are one of `key_value_ranges`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jax_mfa import checks
from jax_mfa.api import Columns, flash_attention
from jax_mfa.arguments import as_columns, as_rows, as_window, clipped, known_integers, sequence_bounds
from jax_mfa.choice import Implementation
from jax_mfa.problem import MAX_POSITION, Specification

if TYPE_CHECKING:
    from jax_mfa.typing import Float, Integer, Key, Lists


def flash_attention_varlen(
    query: Float[Columns, "T N H"],
    key: Float[Columns, "S K H"],
    value: Float[Columns, "S K V"],
    cu_seqlens_q: Integer[ArrayLike, "bounds"] | Lists,
    cu_seqlens_k: Integer[ArrayLike, "bounds"] | Lists | None = None,
    *,
    is_causal: bool = False,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    query_offset: Integer[ArrayLike, ""] | Integer[ArrayLike, "bounds-1"] | Lists = 0,
    scale: Float[ArrayLike, ""] | int | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Float[ArrayLike, "N"] | Lists | None = None,
    sinks: Float[ArrayLike, "N"] | Lists | None = None,
    dropout_rate: float = 0.0,
    dropout_seed: Integer[ArrayLike, ""] | Integer[ArrayLike, "2"] | Key[ArrayLike, ""] | Lists | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "T N V"], Float[Array, "T N"]]:
    """Attention of R sequences of unequal lengths, packed one after another, each of which sees its own keys alone.

    Sequence r has the rows `cu_seqlens_q[r]` … `cu_seqlens_q[r + 1] − 1` of the query, and the columns
    `cu_seqlens_k[r]` … `cu_seqlens_k[r + 1] − 1` of key and value. Causality and windows count rows and columns from
    the start of their sequence. Rows before the first sequence and behind the last see nothing; tiles of scores that
    no row sees are not computed.

    Letters: T rows of all sequences together, S columns; the others as in `dot_product_attention`.

    Args:
      query, key, value: `[T, N, H]`, `[S, K, H]` and `[S, K, V]`, else as in `dot_product_attention`.
      cu_seqlens_q: integers `[R + 1]` that do not fall: where each sequence's rows begin, and where the last ends.
      cu_seqlens_k: the same of key and value; default cu_seqlens_q (self-attention).
      is_causal: the row at position i of its sequence sees columns up to position i + query_offset.
      local_window_size: `(left, right)` or one number for both, None for no limit: it sees the columns at positions
        i + query_offset − left … i + query_offset + right.
      query_offset: integer or integers `[R]`: the position of each sequence's first row. 0 aligns rows and columns
        top-left, as everywhere here; the lengths of the keys less those of the queries align bottom-right, as
        FlashAttention does since 2.1.
      alibi_slopes: `[N]`, for self-attention only (no cu_seqlens_k, no query_offset): elsewhere distances within a
        sequence are not those within the pack.
      scale, logits_soft_cap, sinks, dropout_rate, dropout_seed, implementation: as in `dot_product_attention`.
        Dropout's bits are those of rows and columns of the pack.

    Returns:
      out: `[T, N, V]` of the query's dtype.
      lse: `[T, N]` float32 (float64 for float64); −inf for a row that sees nothing.

    Raises:
      ValueError, TypeError: naming the argument, what was seen and what was expected. Traced cu_seqlens cannot be
        checked: they are clipped to what is there.
      NotImplementedError: where a named implementation cannot run the call.
    """
    q, k = as_rows("query", query, "[T, N, H]"), as_columns("key", key, "[S, K, H]")
    checks.fits("query", q, q.ndim == 3, "[T, N, H]")
    checks.fits("key", k, k.ndim == 3, "[S, K, H]")
    rows, columns = q.shape[0], k.shape[0]
    # where a row's distance to a column is the same in its sequence and in the pack
    same_pack = cu_seqlens_k is None or cu_seqlens_k is cu_seqlens_q
    same_distances = same_pack and checks.is_integer(query_offset) and bool(query_offset == 0)
    if alibi_slopes is not None and not same_distances:
        raise ValueError(
            "alibi_slopes must be None where cu_seqlens_k or query_offset is given: distances would differ"
        )
    bounds = sequence_bounds("cu_seqlens_q", cu_seqlens_q, rows, "[R + 1]")
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    key_bounds = sequence_bounds("cu_seqlens_k", cu_seqlens_k, columns, "[R + 1]")
    if key_bounds.shape != bounds.shape:
        raise ValueError(
            f"cu_seqlens_k must have the shape of cu_seqlens_q, {list(bounds.shape)}, got {list(key_bounds.shape)}"
        )
    count = bounds.size - 1
    farthest = MAX_POSITION - rows
    offset = known_integers("query_offset", query_offset, -farthest, farthest, "an integer or integers [R]")
    checks.fits("query_offset", offset, offset.shape in ((), (count,)), f"[] or [R] = [{count}]")
    band = Specification(checks.boolean("is_causal", is_causal), as_window(local_window_size)).band
    return flash_attention(
        q,
        k,
        value,
        # the ranges say as much, but these spare an implementation a look at them
        is_causal=is_causal and same_distances,
        local_window_size=local_window_size if same_distances else None,
        key_value_ranges=_ranges(rows, bounds, key_bounds, jnp.asarray(clipped(offset, -farthest, farthest)), band),
        scale=scale,
        logits_soft_cap=logits_soft_cap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        dropout_rate=dropout_rate,
        dropout_seed=dropout_seed,
        implementation=implementation,
    )


def _ranges(rows: int, bounds: Array, key_bounds: Array, offset: Any, band: tuple[int | None, int | None]) -> Array:
    """Which columns each row sees, int32 `[T, 2]`: those of its sequence within `band` around its position."""
    t = jnp.arange(rows, dtype=jnp.int32)
    # −1 before the first sequence, R behind the last
    own = jnp.searchsorted(bounds, t, side="right").astype(jnp.int32) - 1
    inside, own = (own >= 0) & (own < bounds.size - 1), jnp.clip(own, 0, max(bounds.size - 2, 0))
    start = key_bounds[own]
    length = jnp.where(inside, key_bounds[own + 1] - start, 0)
    position = t - bounds[own] + (offset[own] if offset.size > 1 else offset.sum(dtype=jnp.int32))
    left, right = band
    # distances are compared before they are added, which might overflow
    first = 0 if left is None else position - jnp.minimum(left, position)
    end = length if right is None else position + 1 + jnp.minimum(right, length - 1 - position)
    return start[:, None] + jnp.clip(jnp.stack(jnp.broadcast_arrays(first, end), 1), 0, length[:, None])
