"""The definition of attention: O(T·S) memory, differentiable by JAX in every mode.

Everything else in the package is judged against this page. It is written for reading, shares no code with the
implementations it judges but the random bits of dropout, and is slow on purpose.

For query row t of head n, at position(t) = t + query_offset, and key column s:

1. x = scale · Σ q[t, ·] k[s, ·], summed in float32 (float64 for float64).
2. x += bias[t, s], and slope[n] · (s − position(t)) with ALiBi; then x = score_mod(x, b, n, position(t), s).
3. x = cap · tanh(x / cap) with a soft cap.
4. Column s is visible to row t where every mask given allows it: boolean mask, causality (s ≤ position(t)), window
   (position(t) − left ≤ s ≤ position(t) + right), lengths, equal segment ids, range of columns, block mask,
   mask_mod(b, n, position(t), s); and where neither its bias is −∞ nor score_mod makes −∞ of what is not, unless there
   is a soft cap, under which −∞ is a score of −cap. What is invisible takes no part: nothing of it, not even NaN or ∞,
   reaches a result or a gradient.
5. p = softmax(x) over the visible columns, and one more of logit sink[n] without a value where there are sinks.
6. Dropout multiplies p by 0 or 1 / (1 − rate), which of them a function of seed, batch entry, n, t and s (`philox`).
7. out = Σ p v[s, ·], rounded once to the query's dtype.

A row that sees nothing gives zeros, a log-sum-exp of −∞, and no gradient. Among what a row does see, NaN and ∞ do what
they do in plain arithmetic: a value of ∞ reaches its own component of the output; a score of ∞, or scores that are −∞
all, make the row's softmax, and so its output and its log-sum-exp, NaN.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_mfa.kv_cache.storage import straight_through
from jax_mfa.philox import keep_mask
from jax_mfa.problem import KeyValueView, Operands, Specification, accumulation_dtype, expand_entries, is_part


@jax.custom_jvp
def tanh(x: Any) -> Any:
    """tanh, whose derivatives keep their digits where it is nearly ±1."""
    return jnp.tanh(x)


@jax.custom_jvp
def _sech_squared(x: Any) -> Any:
    """The derivative of tanh. JAX takes 1 − tanh², of which little is left where the soft cap is nearly reached."""
    e = jnp.exp(-2 * jnp.abs(x))
    return 4 * e / jnp.square(1 + e)


@tanh.defjvp
def _tanh_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    return tanh(*primals), _sech_squared(*primals) * tangents[0]


@_sech_squared.defjvp
def _sech_squared_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    y = _sech_squared(*primals)
    return y, -2 * tanh(*primals) * y * tangents[0]


def plain(spec: Specification, operands: Operands) -> tuple[Specification, Operands]:
    """The same problem with plain keys and values: all of them read from their pages and dequantised."""
    if spec.is_plain:
        return spec, operands
    repeats = Operands(*spec.repeats)
    if spec.page_size is not None:  # what is read has the entries of the tables
        repeats = repeats._replace(key=repeats.block_tables, value=repeats.block_tables)
    views = spec.viewed(operands)
    parts: dict[str, Any] = {x: None for x in Operands._fields if is_part(x)}
    key = _all_of(views.key, operands.key_original)
    value = key[..., : spec.value_size] if operands.value is None else _all_of(views.value, operands.value_original)
    spec = dataclasses.replace(spec, key_storage=None, value_storage=None, value_size=None, page_size=None)
    operands = operands._replace(**parts, key=key, value=value, block_tables=None)
    return dataclasses.replace(spec, repeats=tuple(repeats)), operands


def _all_of(x: Any, original: Any) -> Array:
    """`[entries, S, K, H]` of an array or of `KeyValueView`: as wide as sums are, where it was quantised."""
    if not isinstance(x, KeyValueView):
        return x
    token = np.arange(x.shape[1])

    def along(part: Any, a: Array) -> Array:  # a row of it for each token, or one for all
        per = x.tokens_of(part)
        if x.page_size is None:
            return a if a.shape[1] == 1 else a[:, token // per]
        return a[x.tables[:, token // x.page_size], token % x.page_size // per]

    dtype = x.dtype if x.storage is None else accumulation_dtype(x.dtype)
    values = x.decoded({part: along(part, a) for part, a in x.parts.items()}, dtype)
    return values if original is None else straight_through(values, original.astype(dtype))


def _places(spec: Specification, o: Operands) -> tuple[Array, Array]:
    """position(t) and s: [B|1, 1, T, 1] and [1, 1, 1, S]."""
    offset = spec.query_offset if o.query_offset is None else o.query_offset.reshape(-1, 1, 1, 1)
    position = jnp.arange(o.query.shape[1], dtype=jnp.int32).reshape(1, 1, -1, 1) + offset
    return position, jnp.arange(o.key.shape[1], dtype=jnp.int32).reshape(1, 1, 1, -1)


def visible(spec: Specification, operands: Operands) -> Array:
    """Which columns each row may see: bool [B|1, N|1, T, S]."""
    o = operands
    t = jnp.arange(o.query.shape[1], dtype=jnp.int32).reshape(1, 1, -1, 1)
    position, s = _places(spec, o)
    distance = s - position
    per_entry = lambda x: x.reshape(-1, 1, 1, 1)
    left, right = spec.window
    see = jnp.ones((1, 1, t.size, s.size), bool)
    if o.mask is not None:
        see &= o.mask
    if spec.is_causal:
        see &= distance <= 0
    if left is not None:
        see &= distance >= -left
    if right is not None:
        see &= distance <= right
    if o.key_lengths is not None:
        see &= s < per_entry(o.key_lengths)
    if o.query_lengths is not None:
        see &= t < per_entry(o.query_lengths)
    if o.query_segment_ids is not None:
        see &= o.query_segment_ids[:, None, :, None] == o.key_segment_ids[:, None, None, :]
    if o.key_ranges is not None:
        start, end = (o.key_ranges[:, None, :, i, None] for i in range(2))
        see &= (s >= start) & (s < end)
    if spec.mask_block is not None:
        rows, columns = spec.mask_block
        see &= jnp.repeat(jnp.repeat(o.block_mask != 0, rows, 2), columns, 3)[:, :, : t.size, : s.size]
    if spec.bias_hides(o):
        see &= o.bias != -jnp.inf
    if spec.mask_mod is not None:
        see &= spec.mask_mod.over(_indices(spec, o), o.captured_floats, o.captured_integers)
    return see


def _indices(spec: Specification, o: Operands) -> tuple[Array, ...]:
    """b, n, t and s of a caller's functions, as `[B|1, N|1, T|1, S|1]`."""
    b, first = (o.origin[:, i].reshape(-1, 1, 1, 1) for i in range(2))
    n = first + jnp.arange(o.query.shape[2], dtype=jnp.int32).reshape(1, -1, 1, 1)
    return b, n, *_places(spec, o)


def _product(see: Array | None, a: Array, b: Array, axis: int) -> Array:
    """Σ a · b along `axis` over what is visible, from `a` and `b` that broadcast to [B, N, T, S, H|V].

    0 · NaN is NaN: where something is hidden (`see` is not None), products of matrices run over the finite numbers
    alone, and terms with others are added one by one.
    """

    def of_matrices(a: Array, b: Array) -> Array:
        return jnp.einsum("bntxh,bnysh->bnts" if axis == 4 else "bntsx,bnysv->bntv", a, b)

    if see is None:
        return of_matrices(a, b)

    @jax.checkpoint
    def of_others(a: Array, b: Array) -> Array:
        meet = see[..., None] & ~(jnp.isfinite(a) & jnp.isfinite(b))
        a, b = (jnp.where(meet, x, jnp.zeros_like(x)) for x in (a, b))
        return (a * b).sum(axis)

    finite = [jnp.isfinite(x) for x in (a, b)]
    sums = of_matrices(*(jnp.where(ok, x, jnp.zeros_like(x)) for ok, x in zip(finite, (a, b))))
    return sums + lax.cond(finite[0].all() & finite[1].all(), lambda a, b: jnp.zeros_like(sums), of_others, a, b)


def attention(spec: Specification, operands: Operands) -> tuple[Array, Array]:
    """Attention, [B, T, N, V] of the query's dtype, and its log-sum-exp, [B, T, N] float32 (float64 for float64)."""
    spec, o = plain(spec, operands)
    batch, t, n, _ = o.query.shape
    o = Operands(*(expand_entries(x, repeat, batch) for x, repeat in zip(o, spec.repeats)))
    group = n // o.key.shape[2]
    acc = accumulation_dtype(o.query.dtype)
    q, k, v = (x.astype(acc) for x in (o.query, o.key, o.value))
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    see = jnp.broadcast_to(visible(spec, o), (batch, n, t, k.shape[2]))

    may_hide = spec.has_mask(o)
    product = lambda *factors: _product(see if may_hide else None, *factors)

    # 1-3: scores
    # invisible ones may be infinite, and so would derivatives: they are hidden from every product and function
    hidden = lambda x: jnp.where(see, x, jnp.zeros_like(x))
    scale = spec.scale if o.scale is None else o.scale.astype(acc).reshape(-1, 1, 1, 1)

    def scores() -> Array:
        x = scale * hidden(product(q[:, :, :, None], k[:, :, None], 4))
        if o.bias is not None:
            x = x + o.bias.astype(acc)
        if o.alibi_slopes is not None:
            position, s = _places(spec, o)
            x = x + o.alibi_slopes.astype(acc)[:, :, None, None] * (s - position).astype(acc)
        return hidden(x)

    x = scores()
    if spec.score_mod is not None:
        modified = lambda x, see: spec.score_mod.over(
            (x, *_indices(spec, o)), o.captured_floats, o.captured_integers, see
        )
        if spec.score_hides:
            see = see & ((modified(x, None) != -jnp.inf) | (x == -jnp.inf))
            x = scores()  # once more, whose derivatives pass where its result is visible
        x = hidden(modified(x, see).astype(acc))
    if spec.logits_soft_cap is not None:
        x = spec.logits_soft_cap * tanh(x / spec.logits_soft_cap)

    # 4-5: softmax over what is visible, and the sink
    x = jnp.where(see, x, -jnp.inf)
    high = x.max(-1, keepdims=True, initial=-jnp.inf)
    empty = ~see.any(-1, keepdims=True)
    if o.sinks is not None:
        sinks = o.sinks.astype(acc)[:, :, None, None]
        high = jnp.maximum(high, sinks)
    high = lax.stop_gradient(jnp.where(high == -jnp.inf, jnp.zeros_like(high), high))  # it cancels
    p = jnp.where(see, jnp.exp(jnp.where(see, x, high) - high), jnp.zeros_like(x))
    total = p.sum(-1, keepdims=True)
    if o.sinks is not None:
        total = total + jnp.exp(jnp.where(empty, jnp.zeros_like(high), sinks - high))
    total = jnp.where(empty, jnp.ones_like(total), jnp.where(total == 0, jnp.nan, total))
    p = jnp.where(empty, jnp.zeros_like(p), p / total)
    lse = jnp.where(empty, -jnp.inf, high + jnp.log(total))[..., 0]

    # 6: dropout
    if o.dropout is not None:
        seed0, seed1, index, head0, row0, column0 = (o.dropout[:, i].reshape(-1, 1, 1, 1) for i in range(6))
        head = head0 + jnp.arange(n, dtype=jnp.uint32).reshape(1, -1, 1, 1)
        row = row0 + jnp.arange(t, dtype=jnp.uint32).reshape(1, 1, -1, 1)
        keep = keep_mask(spec.dropout_rate, (seed0, seed1), index, head, row, column0, k.shape[2])
        p = p * jnp.where(keep, 1 / (1 - spec.dropout_rate), 0).astype(acc)

    # 7; p is 0 already where hidden, and so is, with this, its cotangent, which a huge value makes infinite
    out = product(hidden(p)[..., None], v[:, :, None], 3)
    out = jnp.where(empty, jnp.zeros_like(out), out)  # whatever its cotangent may be
    return out.transpose(0, 2, 1, 3).astype(o.query.dtype), lse.transpose(0, 2, 1)


# --- its derivatives, of some of the keys that rows see: as `blockwise.tangent` and `blockwise.backward`, by JAX


def _of(spec: Specification, operands: Operands, wrt: tuple[str, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Attention as a function of the operands `wrt`, and these."""
    value_size = spec.value_size
    spec, operands = plain(spec, operands)

    def fun(*moving: Array) -> Any:
        now = operands._replace(**dict(zip(wrt, moving)))
        return attention(spec, now if value_size is None else now._replace(value=now.key[..., :value_size]))

    return fun, tuple(getattr(operands, name) for name in wrt)


def _share(own: Any, out: Array, row_max: Array, row_sum: Array) -> tuple[Array, Any]:
    """Softmax weight of these keys in the full row, exp(their log-sum-exp − that of the row), and how far their own
    output is from that of the row; 1 and 0 where these keys are all.

    With w that weight, Δ that difference: t(out) = w · (t(own out) + Δ · t(own lse)), and t(lse) = w · t(own lse).
    """
    own_out, own_lse = own
    seen = own_lse != -np.inf
    whole_lse = row_max + jnp.log(jnp.where(seen, row_sum, 1))
    weight = jnp.where(seen, jnp.exp(jnp.where(seen, own_lse - whole_lse, 0)), 0)
    return weight, (own_out - out).astype(own_lse.dtype)


def tangent(
    spec: Specification, operands: Operands, results: Any, wrt: tuple[str, ...], tangents: Any
) -> tuple[Array, Array]:
    fun, at = _of(spec, operands, wrt)
    own, (t_out, t_lse) = jax.jvp(fun, at, tuple(t.astype(x.dtype) for t, x in zip(tangents, at)))
    weight, apart = _share(own, *results)
    t_lse = weight * t_lse
    return (weight[..., None] * t_out + apart * t_lse[..., None]).astype(t_out.dtype), t_lse


def backward(
    spec: Specification, operands: Operands, results: Any, wrt: tuple[str, ...], cotangents: Any
) -> tuple[Array, ...]:
    fun, at = _of(spec, operands, wrt)
    (d_out, d_lse), (own, pullback) = cotangents, jax.vjp(fun, *at)
    weight, apart = _share(own, *results)
    d_lse = weight * (d_lse + (d_out.astype(d_lse.dtype) * apart).sum(-1))
    found = pullback(((weight[..., None] * d_out).astype(own[0].dtype), d_lse.astype(own[1].dtype)))
    dtypes = (getattr(spec.viewed(operands), name).dtype for name in wrt)
    return tuple(x.astype(dtype) for x, dtype in zip(found, dtypes))
