"""Attention through pages: the tokens of a sequence lie in pages of a pool that many sequences share.

This knows where rows and tokens stand and hands on a `PagedArray`; implementations know how its tiles are read. The
pool is never copied, nor is the context of a sequence put together.

Dimension letters: B sequences, T new tokens, P pages of the pool, `page` tokens of a page, N query heads, K key/value
heads, H head size of queries and keys, V of values.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_mfa import checks, sharding
from jax_mfa.api import Columns, attend_by_name, with_modifiers
from jax_mfa.arguments import as_array, clipped, concrete, known_integers, sequence_bounds
from jax_mfa.choice import Implementation
from jax_mfa.flex.program import MaskMod, ScoreMod
from jax_mfa.kv_cache.storage import PagedArray, QuantizedArray, dtype_of

if TYPE_CHECKING:
    from jax_mfa.typing import Float, Integer, Lists, UInt16

PAGE_SIZES = tuple(2**i for i in range(3, 9))
# rows of the query that are taken together are of one sequence, and no more than this
MOST_ROWS = 512


class _Keywords(TypedDict, total=False):
    """The keyword arguments of `paged_attention` that its result's type does not depend on."""

    query_start_locs: Integer[ArrayLike, "B+1"] | Lists | None
    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    is_causal: bool
    value_size: int | None
    scale: Float[ArrayLike, ""] | int | None
    local_window_size: int | tuple[int | None, int | None] | None
    logits_soft_cap: float | None
    alibi_slopes: Float[ArrayLike, "#B N"] | Float[ArrayLike, "N"] | Lists | None
    sinks: Float[ArrayLike, "#B N"] | Float[ArrayLike, "N"] | Lists | None
    implementation: Implementation | None
    check_tables: bool


@overload
def paged_attention(
    query: Float[Columns, "*B T N H"],
    key_pages: Float[Columns, "P page K H"] | UInt16[ArrayLike, "P page K H"],
    value_pages: Float[Columns, "P page K V"] | UInt16[ArrayLike, "P page K V"] | None,
    block_tables: Integer[ArrayLike, "B pages"] | Lists,
    context_lens: Integer[ArrayLike, "B"] | Lists,
    *,
    return_residual: Literal[False] = False,
    **keywords: Unpack[_Keywords],
) -> Float[Array, "*B T N V"]: ...
@overload
def paged_attention(
    query: Float[Columns, "*B T N H"],
    key_pages: Float[Columns, "P page K H"] | UInt16[ArrayLike, "P page K H"],
    value_pages: Float[Columns, "P page K V"] | UInt16[ArrayLike, "P page K V"] | None,
    block_tables: Integer[ArrayLike, "B pages"] | Lists,
    context_lens: Integer[ArrayLike, "B"] | Lists,
    *,
    return_residual: Literal[True],
    **keywords: Unpack[_Keywords],
) -> tuple[Float[Array, "*B T N V"], Float[Array, "*B T N"]]: ...
def paged_attention(
    query: Float[Columns, "*B T N H"],
    key_pages: Float[Columns, "P page K H"] | UInt16[ArrayLike, "P page K H"],
    value_pages: Float[Columns, "P page K V"] | UInt16[ArrayLike, "P page K V"] | None,
    block_tables: Integer[ArrayLike, "B pages"] | Lists,
    context_lens: Integer[ArrayLike, "B"] | Lists,
    *,
    query_start_locs: Integer[ArrayLike, "B+1"] | Lists | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    is_causal: bool = True,
    value_size: int | None = None,
    scale: Float[ArrayLike, ""] | int | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Float[ArrayLike, "#B N"] | Float[ArrayLike, "N"] | Lists | None = None,
    sinks: Float[ArrayLike, "#B N"] | Float[ArrayLike, "N"] | Lists | None = None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
    check_tables: bool = False,
) -> Float[Array, "*B T N V"] | tuple[Float[Array, "*B T N V"], Float[Array, "*B T N"]]:
    """Attention of the newest tokens of sequences over all of their tokens, which lie in pages (Kwon et al.,
    arXiv:2309.06180).

    Token p of sequence b is token `p % page` of page `block_tables[b, p // page]`. With T_b new tokens of it in the
    query, row t of these has position `context_lens[b] − T_b + t`: causality, windows and ALiBi go by positions, so
    whole prompts, chunks of them and single tokens may be mixed. Pages and entries of a table behind a context's length
    are never read, whatever they hold.

    Args:
      query: `[B, T, N, H]`, float16, bfloat16, float32 or float64: T new tokens of each sequence. With
        query_start_locs `[T, N, H]`: those of all sequences, one after another.
      key_pages: `[P, page, K, H]` of the query's dtype (bfloat16 also as its bits, uint16, as a `PagedKVCache` holds
        it), or quantised as such an array. `page` is a power of two from 8 to 256.
      value_pages: `[P, page, K, V]`, plain or quantised, perhaps by another scheme; None with a value_size.
      block_tables: integers `[B, pages]`, of any width that holds the longest context. A traced entry outside of the
        pool is taken for the nearest page.
      context_lens: integers `[B]`: how many tokens each sequence has, the new ones included, which the pages must
        already hold. A traced length is clipped to what its table holds.
      query_start_locs: integers `[B + 1]` that do not fall: sequence b has the rows `query_start_locs[b]` …
        `query_start_locs[b + 1] − 1` of the query. Other rows see nothing.
      score_mod, mask_mod: as in `jax_mfa.flex_attention`: b is the sequence, t and s are positions in it.
      is_causal: False lets each row see the whole context.
      alibi_slopes, sinks: `[N]` or `[B, N]`.
      value_size, scale, local_window_size, logits_soft_cap, implementation: as in `jax_mfa.dot_product_attention`.
      return_residual: also return the log-sum-exp.
      check_tables: warn (`RuntimeWarning`) when the program runs with entries outside of the pool. Costs a callback.

    Returns:
      `[B, T, N, V]` or `[T, N, V]` of the query's dtype; with `return_residual` also the log-sum-exp, `[B, T, N]` or
      `[T, N]` float32 (float64 for float64). Differentiable in query, scale, alibi_slopes, sinks and in floating
      arrays that score_mod reads.

    Raises:
      ValueError, TypeError: naming the argument, what was seen and what was expected; also for entries outside of the
        pool where they and context_lens are known.
      NotImplementedError: where a named implementation cannot run the call, and for derivatives of pages.
    """
    ragged = query_start_locs is not None
    query = query.dequantize() if isinstance(query, QuantizedArray) else query
    new = as_array("query", query, "f", "floating [T, N, H]" if ragged else "floating [B, T, N, H]")
    letters = "[T, N, H] with query_start_locs" if ragged else "[B, T, N, H] without query_start_locs"
    checks.fits("query", new, new.ndim == (3 if ragged else 4), letters)
    keys, values = _checked_pages(new, key_pages, key_pages if value_pages is None else value_pages)
    values = values if value_pages is not None else None
    count, page = keys.shape[:2]
    tables = known_integers("block_tables", block_tables, -(2**31), 2**31 - 1, "integers [B, pages]")
    tables = tables.reshape(0, 0) if tables.shape == (0,) else tables  # the list of no sequences
    letters = "[B, pages]" if ragged else f"[B, pages] with B = {new.shape[0]}"
    checks.fits("block_tables", tables, tables.ndim == 2 and (ragged or tables.shape[0] == new.shape[0]), letters)
    batch, width = tables.shape
    lengths = known_integers("context_lens", context_lens, 0, width * page, "integers [B]")
    checks.fits("context_lens", lengths, lengths.shape == (batch,), f"[B] = [{batch}]")
    _refuse_outside(tables, lengths, count, page)
    tables = jnp.asarray(clipped(tables, -(2**31), 2**31 - 1))
    lengths = jnp.asarray(clipped(lengths, 0, width * page))
    if checks.boolean("check_tables", check_tables):
        jax.debug.callback(_report, tables, _outside(tables, lengths, count, page), count)
    tables = _read_tables(tables, lengths, count, page)
    lengths = lengths if tables.size else jnp.zeros_like(lengths)  # there is nothing to read

    arguments: dict[str, Any] = dict(query=new, keys=keys, values=values, tables=tables, lengths=lengths)
    arguments |= dict(is_causal=is_causal, value_size=value_size, scale=scale)
    arguments |= dict(local_window_size=local_window_size, logits_soft_cap=logits_soft_cap)
    arguments = with_modifiers(arguments | dict(score_mod=score_mod, mask_mod=mask_mod))
    n = new.shape[-2]
    for name, x in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if x is not None:
            arguments[name] = x = as_array(name, x, "f", "floating [N]")
            checks.fits(name, x, x.shape in ((n,), (batch, n)), f"[N] = [{n}] or [B, N], B = {batch}")
    if ragged:
        arguments["starts"] = sequence_bounds("query_start_locs", query_start_locs, new.shape[0], "[B + 1]", batch)

    def attend(arguments: dict[str, Any]) -> Any:
        rows, specified = _specified(**arguments)
        results = attend_by_name(specified, implementation, return_residual)
        if rows is None:
            return results
        if return_residual:
            return rows.apart(results[0], 0), rows.apart(results[1], -jnp.inf)
        return rows.apart(results, 0)

    return sharding.automatically(attend, arguments, return_residual)


def _specified(
    query: Array, keys: Any, values: Any, tables: Array, lengths: Array, starts: Array | None = None, **features: Any
) -> tuple[_Rows | None, dict[str, Any]]:
    """Arguments of `attend_by_name`, and how ragged rows (where there are `starts`) were put together for it."""
    rows = None
    if starts is None:
        features["query_offset"] = lengths - query.shape[1]
    else:
        rows = _Rows(query.shape[0], starts, tables.shape[0])
        query, tables, lengths = rows.together(query), _taken(tables, rows.sequence), _taken(lengths, rows.sequence)
        for name in ("alibi_slopes", "sinks"):
            if name in features and features[name].ndim == 2:
                features[name] = _taken(features[name], rows.sequence)
        if "modifiers" in features:
            features["modifiers"] = dataclasses.replace(features["modifiers"], batch=rows.sequence)
        features |= {"query_offset": lengths - rows.after, "query_seq_lengths": rows.counts}
    pages = lambda x: None if x is None else PagedArray(x, tables)
    arrays = {"query": query, "key": pages(keys), "value": pages(values)}
    return rows, {**arrays, **features, "key_value_seq_lengths": lengths}


def _checked_pages(query: Any, key_pages: Any, value_pages: Any) -> list[Any]:
    """The pages as they are or as arrays, of shapes that fit."""
    n, h = query.shape[-2:]
    pages = []
    for name, x, size in (("key_pages", key_pages, "H"), ("value_pages", value_pages, "V")):
        letters = f"[P, page, K, {size}]"
        if not isinstance(x, QuantizedArray) and getattr(x, "dtype", None) != np.uint16:
            x = as_array(name, x, "f", f"floating {letters} or quantised")
        checks.fits(name, x, x.ndim == 4, letters)
        if x.shape[1] not in PAGE_SIZES:
            raise ValueError(f"{name} must have pages of {', '.join(map(str, PAGE_SIZES))} tokens, got {list(x.shape)}")
        if dtype_of(x) != query.dtype:
            raise TypeError(f"{name} must have the dtype of query, {query.dtype.name}, got {x.dtype.name}")
        pages.append(x)
    key, value = pages
    if key.shape[-1] != h:
        raise ValueError(f"key_pages must have the head size of query, H = {h}, got shape {list(key.shape)}")
    checks.same_shape("value_pages", value, "key_pages", key, -1, "head size")
    if n % key.shape[2] if key.shape[2] else n:
        raise ValueError(f"the heads of query must be a multiple of those of key_pages, got {n} and {key.shape[2]}")
    return pages


# --- tables


def _outside(tables: Any, lengths: Any, count: int, page: int) -> Any:
    """Which entries within the lengths are no pages of the pool."""
    numpy: Any = jnp if isinstance(tables, jax.Array) else np
    used = numpy.arange(tables.shape[1], dtype=np.int32)[None] * page < lengths[:, None]
    return used & ((tables < 0) | (tables >= count))


def _refuse_outside(tables: Any, lengths: Any, count: int, page: int) -> None:
    tables, lengths = concrete(tables), concrete(lengths)
    outside = tables is not None and lengths is not None and _outside(tables, lengths, count, page)
    if np.any(outside):
        raise ValueError(
            f"block_tables must hold pages 0..{count - 1} within context_lens, got {_first(outside, tables)}"
        )


def _report(tables: Any, outside: Any, count: Any) -> None:
    if wrong := np.sum(outside):
        text = f"block_tables: {wrong} entries outside of the pool's {count} pages, the first {_first(outside, tables)}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def _first(outside: Any, tables: Any) -> str:
    at = tuple(np.argwhere(outside)[0].tolist())
    return f"{tables[at]} at {list(at)}"


def _read_tables(tables: Any, lengths: Any, count: int, page: int) -> Any:
    """Tables of which every entry may be read: behind a length they repeat its last page."""
    if 0 in (count, *tables.shape):
        return tables[:, :0]
    last = jnp.maximum(-(-lengths // page) - 1, 0)
    entries = jnp.arange(tables.shape[1], dtype=jnp.int32)[None]
    tables = jnp.take_along_axis(tables, jnp.minimum(entries, last[:, None]), axis=1)
    return jnp.clip(jnp.where(lengths[:, None] > 0, tables, 0), 0, count - 1)


# --- rows of unequal sequences


def _taken(x: Any, at: Any) -> Array:
    """`x[at]` with indices clipped; zeros where there is nothing to take, or to take from."""
    return jnp.take(x, at, axis=0, mode="clip") if at.size and len(x) else jnp.zeros((*at.shape, *x.shape[1:]), x.dtype)


class _Rows:
    """Rows of sequences of unequal lengths in lots of one size, each of one sequence: as many lots as the worst lengths
    need, one for each sequence more than without padding. Of each lot, `sequence` is the one that it belongs to,
    `counts` its rows that are no padding, and `after` the rows of its sequence from its first on: all [lots]."""

    def __init__(self, total: int, starts: Any, batch: int) -> None:
        # as many rows as sequences have on average; up to a power of two, for few shapes of programs
        size = min(1 << (max(-(-total // max(batch, 1)), 1) - 1).bit_length(), MOST_ROWS)
        lots = (total + batch * (size - 1)) // size if total * batch else 0
        lots_of = -(-jnp.maximum(starts[1:] - starts[:-1], 0) // size)
        ends = jnp.cumsum(lots_of, dtype=jnp.int32)
        # from a row's number to its place among those of all lots
        shift = (ends - lots_of) * size - starts[:-1]
        lot, row = jnp.arange(lots, dtype=jnp.int32), jnp.arange(total, dtype=jnp.int32)
        self.sequence = jnp.clip(jnp.searchsorted(ends, lot, side="right").astype(jnp.int32), 0, max(batch - 1, 0))
        first = lot * size - _taken(shift, self.sequence)
        self.after = _taken(starts[1:], self.sequence) - first
        self.counts = jnp.clip(self.after, 0, size)
        self._rows = first[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
        owner = jnp.searchsorted(starts[1:], row, side="right").astype(jnp.int32)
        self._owned = (row >= starts[0]) & (owner < batch)
        self._places = jnp.where(self._owned, row + _taken(shift, owner), 0)

    def together(self, x: Any) -> Array:
        """[T, ...] as [lots, size, ...]."""
        return _taken(x, self._rows)

    def apart(self, x: Any, nothing: Any) -> Array:
        """[lots, size, ...] as [T, ...]; `nothing` in rows of no sequence."""
        taken = _taken(x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), self._places)
        return jnp.where(self._owned.reshape(-1, *(1,) * (x.ndim - 2)), taken, nothing)
