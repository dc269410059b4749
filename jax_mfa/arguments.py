"""From a caller's arguments to a specification and operands of one layout, whatever was passed.

Arguments are checked once, here; an error names the argument, what was seen and what was expected. Nothing here
computes attention or knows which implementation will.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_mfa import checks
from jax_mfa.flex.block_mask import BlockMask
from jax_mfa.flex.program import Modifiers
from jax_mfa.kv_cache.storage import PagedArray, QuantizedArray
from jax_mfa.problem import DTYPES, MAX_POSITION, Operands, Specification, accumulation_dtype, as_operands, storage_of

_KINDS: dict[str, Any] = {"f": jnp.floating, "i": jnp.integer, "b": np.bool_, "c": jnp.complexfloating}


def unwrapped(x: Any) -> Any:
    """The array of a library's parameter or variable; anything else as it is."""
    return x.__jax_array__() if hasattr(x, "__jax_array__") and not isinstance(x, jax.Array) else x


def _as_given(name: str, x: Any, kinds: str, expected: str) -> Any:
    """`x` as an array, of numpy or JAX, whose dtype is of one of these `_KINDS`."""
    x = unwrapped(x)
    if isinstance(x, (list, tuple, numbers.Number)):
        numpy: Any = jnp if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(x)) else np
        try:
            # numpy takes an empty list for one of floating numbers
            empty = isinstance(x, (list, tuple)) and not x
            x = np.zeros(0, np.int32) if empty and "i" in kinds else numpy.asarray(x)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name} must be an array ({expected}), got a {type(x).__name__}: {error}") from error
    if isinstance(x, jax.ShapeDtypeStruct):
        raise TypeError(
            f"{name} must be an array ({expected}), got a jax.ShapeDtypeStruct: only jax_mfa.explain takes shapes "
            "for arrays; elsewhere trace the call (jax.eval_shape, jax.jit(...).lower)"
        )
    if isinstance(x, QuantizedArray):
        raise TypeError(f"{name} must be an array ({expected}), got a QuantizedArray: see its dequantize()")
    if not hasattr(x, "dtype") or not hasattr(x, "shape") or isinstance(x, type):
        raise TypeError(f"{name} must be an array ({expected}), got {type(x).__name__}")
    if not any(jnp.issubdtype(x.dtype, _KINDS[kind]) for kind in kinds):
        raise TypeError(f"{name} must be {expected}, got {x.dtype.name}{list(x.shape)}")
    return x


def as_array(name: str, x: Any, kinds: str, expected: str) -> Array:
    """`x` as an array of JAX whose dtype kind is one of `kinds`."""
    x = _as_given(name, x, kinds, expected)
    if isinstance(x, np.ndarray) and x.dtype == np.float64 and not jax.config.read("jax_enable_x64"):
        x = x.astype(np.float32)
    return jnp.asarray(x)


def as_rows(name: str, x: Any, letters: str) -> Array:
    """A floating array of three axes or more; a quantised one is dequantised."""
    x = unwrapped(x)
    x = as_array(name, x.dequantize() if isinstance(x, QuantizedArray) else x, "f", f"floating {letters}")
    checks.fits(name, x, x.ndim >= 3, letters)
    return x


def as_columns(name: str, x: Any, letters: str) -> Any:
    """The same, but that what is quantised or in pages stays so."""
    x = unwrapped(x)
    if not isinstance(x, (QuantizedArray, PagedArray)):
        return as_rows(name, x, letters)
    checks.fits(name, x, x.ndim >= 3, letters)
    return x


def _with_columns(x: Any) -> Any:
    """`x`, with one column of zeros where a head has size 0: they add nothing to a product."""
    if isinstance(x, PagedArray):
        return x._replace(pages=_with_columns(x.pages))
    return x if x.shape[-1] or isinstance(x, QuantizedArray) else jnp.zeros((*x.shape[:-1], 1), x.dtype)


def _widened(x: Any) -> Any:
    """Integers of 32 bits or more."""
    return x.astype(np.int32) if x.dtype.itemsize < 4 else x


def clipped(x: Any, low: int, high: int) -> Any:
    """Integers as int32, brought within low..high before they become so."""
    numpy: Any = jnp if isinstance(x, jax.Array) else np
    x = _widened(x)
    return numpy.clip(x, max(low, int(jnp.iinfo(x.dtype).min)), high).astype(np.int32)


def concrete(x: Any) -> np.ndarray | None:
    """The values of `x` as numpy, or None while it is traced or lives on other hosts."""
    if isinstance(x, jax.Array) and (isinstance(x, jax.core.Tracer) or not x.is_fully_addressable):
        return None
    return np.asarray(x)


def _per_entry(name: str, x: Any, lead: tuple[int, ...], tail: tuple[int, ...], letters: str) -> Any:
    """`x` of shape `lead + tail`, `tail`, or with ones in place of leading axes, as `[entries, *tail]`."""
    n = len(tail)
    head = x.shape[: x.ndim - n]
    fits = x.ndim >= n and x.shape[x.ndim - n :] == tail and len(head) <= max(len(lead), 1)
    fits = fits and all(d in (1, full) for d, full in zip(head[::-1], (lead or (1,))[::-1]))
    checks.fits(name, x, fits, f"{letters} = {list(lead + tail)}")
    return _flatten_lead(x, head, lead, tail)


def _flatten_lead(x: Any, head: Any, lead: tuple[int, ...], tail: tuple[int, ...]) -> Any:
    if all(d == 1 for d in head):
        return x.reshape(1, *tail)
    return jnp.broadcast_to(x, lead + tail).reshape(math.prod(lead), *tail)


def _scores_like(name: str, x: Any, lead: tuple[int, ...], n: int, t: int, s: int) -> Any:
    """A bias or mask that broadcasts to `lead + [N, T, S]`, as `[entries, 1|N, 1|T, 1|S]`; never expanded."""
    rank = max(len(lead), 1) + 3
    full = (lead or (1,)) + (n, t, s)
    if x.ndim > rank or any(d not in (1, e) for d, e in zip(x.shape[::-1], full[::-1])):
        raise ValueError(
            f"{name} must broadcast to [..., N, T, S] = {list((*lead, n, t, s))}, got shape {list(x.shape)}"
        )
    x = x.reshape((1,) * (rank - x.ndim) + x.shape)
    return _flatten_lead(x, x.shape[:-3], lead or (1,), x.shape[-3:])


def known_integers(name: str, x: Any, low: int, high: int, expected: str) -> Any:
    """Integers as they were given, for JAX would narrow numpy's; within low..high where their values are known."""
    x = _as_given(name, x, "i", expected)
    info = jnp.iinfo(x.dtype)
    values = None if low <= info.min and info.max <= high else concrete(x)
    if values is not None and values.size:
        least, most = int(values.min()), int(values.max())
        if least < low or most > high:
            raise ValueError(f"{name} must lie in {low}..{high}, got {least if least < low else most}")
    return x


def known_lengths(name: str, x: Any, limit: int, lead: tuple[int, ...]) -> Any:
    """Lengths of the shape `lead`, or one for all, as they were given; within 0..limit where their values are known."""
    x = known_integers(name, x, 0, limit, "integers [B]")
    checks.fits(name, x, x.shape in ((), lead), f"[B] = {list(lead)}")
    return x


def sequence_bounds(name: str, x: Any, limit: int, letters: str, count: int | None = None) -> Array:
    """Where `count` sequences begin and the last one ends, int32 clipped to 0..limit; refused where known to fall."""
    x = known_integers(name, x, 0, limit, f"integers {letters}")
    if count is None:
        checks.fits(name, x, x.ndim == 1 and x.size > 0, letters)
    else:
        checks.fits(name, x, x.shape == (count + 1,), f"{letters} = [{count + 1}]")
    values = concrete(x)
    if values is not None and (values[1:] < values[:-1]).any():
        raise ValueError(f"{name} must not fall from one sequence to the next, got {values.tolist()}")
    return jnp.asarray(clipped(x, 0, limit))


def as_window(x: Any) -> tuple[int | None, int | None]:
    if x is None:
        return (None, None)
    if checks.is_integer(x):
        x = (x, x)
    if not isinstance(x, (tuple, list)) or len(x) != 2:
        raise TypeError(f"local_window_size must be an int or a pair (left, right), got {checks.seen(x)}")
    if not all(side is None or checks.is_integer(side) for side in x):
        raise TypeError(f"local_window_size must hold static integers or None, got {checks.seen(x)}")
    if any(side is not None and side < 0 for side in x):
        raise ValueError(f"local_window_size must not be negative, got {x!r}")
    # a side that no distance can exceed is no limit
    left, right = (None if side is None or side > 2 * MAX_POSITION else int(side) for side in x)
    return left, right


def seed_words(x: Any) -> Array:
    """A dropout seed as uint32[2]: low and high word of an integer, integers of shape [2], or a `jax.random` key."""
    if checks.is_integer(x):
        x = np.asarray(int(x) & (2**64 - 1), np.uint64)
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        if x.shape != ():
            raise ValueError(f"dropout_seed must be a single key, got keys of shape {list(x.shape)}")
        words = jax.random.key_data(x).astype(jnp.uint32)
        return words[-2:] if words.size >= 2 else jnp.concatenate([words, words])
    x = _as_given("dropout_seed", x, "i", "an integer, integers [2] or a jax.random key")
    if x.shape == ():
        numpy = jnp if isinstance(x, jax.Array) else np
        x = _widened(x)
        half = x.dtype.type(16)  # twice, for the high word of 32 bits is their sign
        return jnp.asarray(numpy.stack([x, x >> half >> half]).astype(np.uint32))
    checks.fits("dropout_seed", x, x.shape == (2,), "[] or [2]")
    return jnp.asarray(known_integers("dropout_seed", x, -(2**31), 2**32 - 1, "integers [2]").astype(np.uint32))


def specify(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    value_size: Any = None,
    scale: Any = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: Any = None,
    query_offset: Any = 0,
    logits_soft_cap: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    query_segment_ids: Any = None,
    key_value_segment_ids: Any = None,
    key_value_ranges: Any = None,
    block_mask: Any = None,
    dropout_rate: Any = 0.0,
    dropout_seed: Any = None,
    modifiers: Modifiers | None = None,
    parts: Any = 1,
) -> tuple[Specification, Operands]:
    """Checks the arguments of `jax_mfa.dot_product_attention` and brings them into the layout of `Operands`.

    Of sequences in equal `parts`, query, key, value and segment ids hold one; bias, mask, block mask and ranges the
    queries of one. Their keys, and lengths and offsets, count all parts.

    Raises `ValueError` or `TypeError` naming the argument, what was seen and what was expected. Values can be checked
    only where they are known: traced lengths, offsets and ranges are clipped to what is allowed, of traced 64-bit
    segment ids the low 32 bits count.
    """
    query, key, value = _checked_arrays(query, key, value, value_size)
    builder = _Builder(query, key, parts)
    builder.spec["is_causal"] = checks.boolean("is_causal", is_causal)
    builder.spec["value_size"] = None if value_size is None else int(value_size)
    builder.spec["page_size"] = key.pages.shape[1] if isinstance(key, PagedArray) else None
    builder.spec |= {"key_storage": storage_of(key), "value_storage": storage_of(value)}
    builder.add_scores(bias, scale, query.shape[-1], logits_soft_cap, alibi_slopes, sinks)
    builder.add_positions(local_window_size, query_offset, query_seq_lengths, key_value_seq_lengths)
    builder.add_modifiers(modifiers)
    builder.add_masks(mask, query_segment_ids, key_value_segment_ids, key_value_ranges, block_mask)
    builder.add_dropout(dropout_rate, dropout_seed)
    batch = math.prod(builder.lead)
    query = _with_columns(query)
    arrays = {"query": query.reshape(batch, *query.shape[-3:]), **builder.operands}
    for name, x in (("key", key), ("value", value)):
        arrays |= {} if x is None else as_operands(name, _with_columns(x), batch)
    return Specification(**builder.spec), Operands(**arrays)


def _checked_arrays(query: Any, key: Any, value: Any, value_size: Any) -> tuple[Any, Any, Any]:
    """Query, key and value as arrays (or quantised, or in pages) whose shapes and dtypes fit. Values that are channels
    of the keys are None."""
    if value is None and value_size is not None:
        query, key, _ = _checked_arrays(query, key, key, None)
        checks.integer("value_size", value_size, 1, key.shape[-1])
        return query, key, None
    if value_size is not None:
        raise ValueError(
            f"value_size says how many channels of key are the values, and value must then be None, "
            f"got {checks.seen(value_size)} and {checks.seen(value)}"
        )
    query = as_rows("query", query, "[..., T, N, H]")
    key, value = as_columns("key", key, "[..., S, K, H]"), as_columns("value", value, "[..., S, K, V]")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not all(isinstance(d, numbers.Integral) for d in x.shape[-3:]):
            raise NotImplementedError(
                f"{name} may have symbolic dimensions only in front, as batch axes, got {list(x.shape)}"
            )
    n, h = query.shape[-2:]
    for name, x, letters in (("key", key, "[..., S, K, H]"), ("value", value, "[..., S, K, V]")):
        alike = x.ndim == query.ndim and x.shape[:-3] == query.shape[:-3]
        checks.fits(name, x, alike, f"{letters} with the leading axes of query {list(query.shape)}")
    s, k = key.shape[-3:-1]
    if key.shape[-1] != h:
        raise ValueError(f"key must have the head size of query, H = {h}, got shape {list(key.shape)}")
    if value.shape[-3:-1] != (s, k):
        raise ValueError(f"value must have the S, K = {s}, {k} of key, got shape {list(value.shape)}")
    if n % k if k else n:
        raise ValueError(f"the heads of query must be a multiple of those of key and value, got N = {n}, K = {k}")
    if not query.dtype == key.dtype == value.dtype or query.dtype.name not in DTYPES:
        raise TypeError(
            f"query, key and value must share one dtype of {', '.join(DTYPES)}, "
            f"got {query.dtype.name}, {key.dtype.name}, {value.dtype.name}"
        )
    return query, key, value


class _Builder:
    """The sizes of a problem, and the fields of its `Specification` and `Operands` as arguments are checked."""

    def __init__(self, query: Any, key: Any, parts: int) -> None:
        (*lead, self.t, self.n, _), self.s = query.shape, key.shape[-3]
        self.lead = tuple(lead)  # the batch axes
        self.all_t, self.all_s = parts * self.t, parts * self.s  # of sequences in parts, the length of all of them
        if max(self.all_t, self.all_s) > MAX_POSITION:
            raise ValueError(
                f"query and key must be at most {MAX_POSITION} long, got T = {self.all_t}, S = {self.all_s}"
            )
        self.acc = accumulation_dtype(query.dtype)
        self.spec: dict[str, Any] = {}
        self.operands: dict[str, Any] = {}

    def add_scores(self, bias: Any, scale: Any, head_size: int, soft_cap: Any, alibi_slopes: Any, sinks: Any) -> None:
        """Whatever changes scores."""
        if bias is not None:
            bias = as_array("bias", bias, "f", "floating, broadcastable to [..., N, T, S] (a boolean belongs in mask)")
            self.operands["bias"] = _scores_like("bias", bias, self.lead, self.n, self.t, self.all_s)
        self.spec["scale"] = 1.0 / math.sqrt(max(head_size, 1))
        if isinstance(scale, numbers.Real):
            self.spec["scale"] = checks.number("scale", scale, dtype=self.acc)
        elif scale is not None:
            scale = as_array("scale", scale, "f", "a floating scalar")
            if scale.shape != ():
                raise ValueError(f"scale must be a scalar, got shape {list(scale.shape)}")
            self.operands["scale"] = scale.reshape(1).astype(self.acc)
        if soft_cap is not None:
            soft_cap = checks.number("logits_soft_cap", soft_cap, "a positive static number or None", self.acc)
            # below, the cap is flushed to zero, and so are, above, scores over the cap that still count
            low = float(jnp.finfo(self.acc).tiny)
            high = float(jnp.finfo(self.acc).eps) / low
            if not low <= soft_cap <= high:
                expected = f"positive, in {low:.2g}..{high:.2g} of {self.acc.name}, or None"
                raise ValueError(f"logits_soft_cap must be {expected}, got {soft_cap}")
            self.spec["logits_soft_cap"] = soft_cap
        for name, x in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
            if x is not None:
                x = as_array(name, x, "f", "floating [N]")
                self.operands[name] = _per_entry(name, x, self.lead, (self.n,), f"[N] = [{self.n}] or [..., N]")

    def add_positions(self, window: Any, offset: Any, query_lengths: Any, key_lengths: Any) -> None:
        """Where queries stand, how far they see, and where sequences end."""
        self.spec["window"] = as_window(window)
        if query_lengths is not None:
            x = known_integers("query_seq_lengths", query_lengths, 0, self.all_t, "integers [B]")
            self.operands["query_lengths"] = self._integers("query_seq_lengths", x, 0, self.all_t)
        if key_lengths is not None:
            x = known_integers("key_value_seq_lengths", key_lengths, 0, self.all_s, "integers [B]")
            self.operands["key_lengths"] = self._integers("key_value_seq_lengths", x, 0, self.all_s)
        farthest = MAX_POSITION - self.all_t
        if checks.is_integer(offset):
            if abs(int(offset)) > farthest:
                raise ValueError(f"query_offset must lie in {-farthest}..{farthest}, got {offset}")
            self.spec["query_offset"] = int(offset)
        elif offset is not None:
            offset = known_integers("query_offset", offset, -farthest, farthest, "an integer or integers [B]")
            self.operands["query_offset"] = self._integers("query_offset", offset, -farthest, farthest)

    def add_masks(self, mask: Any, query_ids: Any, key_ids: Any, ranges: Any, block_mask: Any) -> None:
        """Arrays that say which keys a query sees."""
        if mask is not None:
            expected = "bool, broadcastable to [..., N, T, S] (an additive mask belongs in bias)"
            mask = as_array("mask", mask, "b", expected)
            self.operands["mask"] = _scores_like("mask", mask, self.lead, self.n, self.t, self.all_s)
        if (query_ids is None) != (key_ids is None):
            missing = "query_segment_ids" if query_ids is None else "key_value_segment_ids"
            raise ValueError(f"{missing} must be given too: segment ids need both sides")
        if query_ids is not None:
            for field, name, x, length, letters in (
                ("query_segment_ids", "query_segment_ids", query_ids, self.t, "[..., T]"),
                ("key_segment_ids", "key_value_segment_ids", key_ids, self.s, "[..., S]"),
            ):
                x = known_integers(name, x, -(2**31), 2**31 - 1, f"integers {letters}").astype(np.int32)
                self.operands[field] = jnp.asarray(_per_entry(name, x, self.lead, (length,), letters))
        if ranges is not None:
            ranges = _as_given("key_value_ranges", ranges, "i", "integers [..., T, 2]")
            shape = (self.t, 2), "[..., T, 2]"
            self.operands["key_ranges"] = self._integers("key_value_ranges", ranges, 0, self.all_s, *shape)
        if block_mask is not None:
            if not isinstance(block_mask, BlockMask):
                raise TypeError(f"block_mask must be a jax_mfa.BlockMask, got {type(block_mask).__name__}")
            rows, columns = self.spec["mask_block"] = block_mask.block_size
            tiles = -(-self.t // rows), -(-self.all_s // columns)
            blocks = as_array("block_mask", block_mask.blocks, "b", "bool [..., N, T blocks, S blocks]")
            if blocks.ndim < 2 or blocks.shape[-2:] != tiles:
                raise ValueError(
                    f"block_mask with blocks of {(rows, columns)} must end in {list(tiles)} for T = {self.t}, "
                    f"S = {self.all_s}, got shape {list(blocks.shape)}"
                )
            if block_mask.whole is not None and self.spec.get("mask_mod") is not None:
                whole = as_array("block_mask.whole", block_mask.whole, "b", "bool, of the shape of its blocks")
                checks.fits(
                    "block_mask.whole", whole, whole.shape == blocks.shape, f"that of blocks, {list(blocks.shape)}"
                )
                blocks = blocks.astype(np.uint8) + (blocks & whole).astype(np.uint8)
            self.operands["block_mask"] = _scores_like("block_mask", blocks, self.lead, self.n, *tiles)

    def add_modifiers(self, x: Modifiers | None) -> None:
        """The caller's functions of scores, and what they read."""
        if x is None:
            return
        self.spec |= {"score_mod": x.score, "mask_mod": x.mask}
        for name, vector in (("captured_floats", x.floats), ("captured_integers", x.integers)):
            if vector is not None:
                self.operands[name] = vector[None]
        index = jnp.arange(math.prod(self.lead), dtype=jnp.int32) if x.batch is None else x.batch
        self.operands["origin"] = jnp.stack([index, jnp.zeros_like(index)], axis=1)

    def add_dropout(self, rate: Any, seed: Any) -> None:
        """Rate and seed, which is checked also where it is not used."""
        rate = checks.number("dropout_rate", rate, "a static number in [0, 1)")
        if not 0 <= rate < 1:
            raise ValueError(f"dropout_rate must lie in [0, 1), got {rate}")
        seed = None if seed is None else seed_words(seed)
        if rate == 0:
            return
        if seed is None:
            raise ValueError(f"dropout_seed must be given with dropout_rate = {rate}, got None")
        self.spec["dropout_rate"] = rate
        batch = math.prod(self.lead)
        index = jnp.arange(batch, dtype=jnp.uint32)[:, None]
        seed = jnp.broadcast_to(seed[None], (batch, 2))
        self.operands["dropout"] = jnp.concatenate([seed, index, jnp.zeros((batch, 3), jnp.uint32)], axis=1)

    def _integers(
        self, name: str, x: Any, low: int, high: int, tail: tuple[int, ...] = (), letters: str = "[B]"
    ) -> Array:
        """Integers as an operand, clipped to low..high."""
        return jnp.asarray(_per_entry(name, clipped(x, low, high), self.lead, tail, letters))


def specify_abstract(**arguments: Any) -> tuple[Specification, Operands]:
    """`specify`, of arguments of which arrays may be `jax.ShapeDtypeStruct`s; the operands are that, too."""
    leaves, tree = jax.tree.flatten(arguments)
    abstract = {i: x for i, x in enumerate(leaves) if isinstance(x, jax.ShapeDtypeStruct)}
    known = {}

    def check(arrays: Any) -> Operands:
        whole = [arrays.get(i, x) for i, x in enumerate(leaves)]
        known["spec"], operands = specify(**jax.tree.unflatten(tree, whole))
        return operands

    operands = jax.eval_shape(check, abstract)
    return known["spec"], operands
