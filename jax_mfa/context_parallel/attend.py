"""Attention of a device's own rows within `shard_map`, by ring, by an exchange of heads, or both.

Operands in, output and log-sum-exp out. The ring has derivatives of its own, for JAX would keep the keys of every
device: a tangent that goes around once more, as a primitive whose transpose is the backward pass. The exchange has
JAX's.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_mfa import compat, partial, primitives
from jax_mfa.context_parallel import ring as rings
from jax_mfa.context_parallel.ring import Ring
from jax_mfa.problem import DIFFERENTIABLE, Operands, accumulation_dtype, counted_from, pack, unpack


def attention(ring: Ring, heads_axis: Any, operands: Operands) -> tuple[Any, ...]:
    """A device's rows of attention over the whole sequence.

    Args:
      ring: over its axis the sequence is split; with a heads_axis, each part once more along that.
      heads_axis: mesh axis over which rows are exchanged for heads; None for no exchange.
      operands: as in `ring.forward`.

    Returns:
      out: [B, T, N, V] of the query's dtype; lse: [B, T, N].
    """
    axes = compat.varying_of(operands) | compat.varying_along(ring.axis, heads_axis)
    operands = compat.vary(operands, axes)
    if heads_axis is None:
        return _whole_or_ring(ring, operands)
    exchange = Exchange(heads_axis, lax.psum(1, heads_axis), operands.query.shape[2], operands.key.shape[2])
    out, lse = _whole_or_ring(ring, exchange.operands(operands, ring.spec.mask_block))
    return exchange.rows(out), exchange.rows(lse)


def _whole_or_ring(ring: Ring, o: Operands) -> tuple[Array, Array]:
    b, t, n, _ = o.query.shape
    if 0 in (b, t, n, o.key.shape[1]):  # nobody looks, or there is nothing to see
        acc = accumulation_dtype(o.query.dtype)
        return jnp.zeros((b, t, n, o.value.shape[-1]), o.query.dtype), jnp.full((b, t, n), -np.inf, acc)
    attend = functools.partial(primitives.attention, implementation=ring.implementation)
    out, row_max, row_sum = _ring_attention(ring, o) if ring.devices > 1 else attend(ring.spec, o)
    return out, partial.log_sum_exp(row_max, row_sum)


# ---------------------------------------------------------------------------------------------------------------------
# The ring's derivatives


def _vary(operands: Operands) -> Any:
    return functools.partial(compat.vary, axes=compat.varying_of(operands))


def _forward(ring: Ring, operands: Operands) -> tuple[Array, Array, Array]:
    attend = lambda spec, operands: primitives.attention(spec, operands, ring.implementation)
    return rings.forward(ring, operands, attend, _vary(operands))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _ring_attention(ring: Ring, operands: Operands) -> tuple[Array, Array, Array]:
    """Output, maximum and sum of each row; these have derivatives as in `primitives`."""
    return _forward(ring, operands)


@_ring_attention.defjvp  # without symbolic zeros, which `shard_map` does not know
def _ring_jvp(ring: Ring, primals: Any, tangents: Any) -> tuple[tuple[Any, ...], tuple[Any, Any, Array]]:
    (operands,), (moving,) = primals, tangents
    results = _ring_attention(ring, operands)
    results = tuple(checkpoint_name(x, name) for x, name in zip(results, primitives.RESIDUAL_NAMES))
    wanted = tuple(name for name in DIFFERENTIABLE if getattr(moving, name) is not None)
    arrays, names = pack(operands)
    changes = (getattr(moving, name) for name in wanted)
    arrays = compat.vary_alike((*arrays, *results, *changes))
    t_out, t_lse = ring_tangent_p.bind(*arrays, ring=ring, names=names, wanted=wanted, maps=())
    zeros = jnp.zeros_like(results[2])
    zeros = jnp.where(results[2] == 0, zeros, zeros)  # `shard_map` sees them vary as the sums do
    return results, (t_out, t_lse, zeros)


def _tangent(ring: Ring, names: tuple[str, ...], wanted: tuple[str, ...], *arrays: Array) -> tuple[Any, Any]:
    n, known = len(names), len(names) + len(primitives.RESIDUAL_NAMES)
    operands = unpack(arrays[:n], names)
    differentiate = functools.partial(primitives.attention_jvp, implementation=ring.implementation)
    return rings.tangent(ring, operands, arrays[n:known], wanted, arrays[known:], differentiate, _vary(operands))


def _transpose(ring: Ring, names: tuple[str, ...], wanted: tuple[str, ...], *arrays: Array) -> tuple[Any, ...]:
    n = len(names)
    operands = unpack(arrays[:n], names)
    transpose = functools.partial(primitives.attention_bwd, implementation=ring.implementation)
    return rings.backward(ring, operands, arrays[n:], wanted, transpose, _vary(operands))


def _of_each(fun: Callable[..., Any], maps: Any, count: int) -> Callable[..., Any]:
    """`fun` under `vmap`s, given for each the mapped axes of its first arrays; those of `count` more are the first."""
    for dims in maps:
        fun = jax.vmap(fun, in_axes=(*dims, *(0,) * count))
    return fun


def _ring_tangent(*arrays: Array, ring: Any, names: tuple[str, ...], wanted: tuple[str, ...], maps: Any) -> Any:
    return _of_each(functools.partial(_tangent, ring, names, wanted), maps, len(wanted))(*arrays)


def _ring_tangent_transpose(
    cotangents: Any, *arrays: Array, ring: Any, names: tuple[str, ...], wanted: tuple[str, ...], maps: Any
) -> list[None]:
    n = len(names) + len(primitives.RESIDUAL_NAMES)
    linear = tuple(name for name, x in zip(wanted, arrays[n:]) if ad.is_undefined_primal(x))
    arrays = compat.vary_alike((*arrays[:n], *(ad.instantiate_zeros(x) for x in cotangents)))
    results = _of_each(functools.partial(_transpose, ring, names, linear), maps, 2)(*arrays)
    found = dict(zip(linear, results))
    return [None] * n + [found.get(name) for name in wanted]


def _ring_tangent_batching(
    arrays: Any, dims: Any, *, ring: Any, names: tuple[str, ...], wanted: tuple[str, ...], maps: Any
) -> tuple[Any, tuple[int, int]]:
    n = len(names) + len(primitives.RESIDUAL_NAMES)
    size = next(x.shape[d] for x, d in zip(arrays, dims) if d is not None)
    changes = [primitives.mapped_in_front(x, d, size) for x, d in zip(arrays[n:], dims[n:])]
    maps = (*maps, tuple(dims[:n]))
    return ring_tangent_p.bind(*arrays[:n], *changes, ring=ring, names=names, wanted=wanted, maps=maps), (0, 0)


def _ring_tangent_shapes(*avals: Any, names: tuple[str, ...], maps: Any, **_: Any) -> tuple[Any, Any]:
    def of_result(i: int) -> Any:
        shape = list(avals[i].shape)
        for dims in reversed(maps):
            if dims[i] is not None:
                del shape[dims[i]]
        return avals[i].update(shape=(*avals[-1].shape[: len(maps)], *shape), weak_type=False)

    return of_result(len(names)), of_result(len(names) + 1)


# (operands, results, tangents of the wanted operands) → tangents of (out, lse). `maps`: for each `vmap` around it the
# mapped axes of operands and results; tangents are mapped along the first.
ring_tangent_p = Primitive("jax_mfa_ring_tangent")
ring_tangent_p.multiple_results = True
ring_tangent_p.def_impl(_ring_tangent)
ring_tangent_p.def_abstract_eval(_ring_tangent_shapes)
mlir.register_lowering(ring_tangent_p, mlir.lower_fun(_ring_tangent, multiple_results=True))
batching.primitive_batchers[ring_tangent_p] = _ring_tangent_batching
ad.primitive_jvps[ring_tangent_p] = primitives.jvp_by_jax(_ring_tangent)
ad.primitive_transposes[ring_tangent_p] = _ring_tangent_transpose
compat.register_with_shard_map(ring_tangent_p)


# ---------------------------------------------------------------------------------------------------------------------
# Rows for heads


@dataclasses.dataclass(frozen=True)
class Exchange:
    """An exchange of rows for heads over a mesh axis: of its part of the rows a device has all heads, and gets all
    parts' rows of its own share of the heads (DeepSpeed Ulysses, arXiv:2309.14509, section 3).

    Attributes:
      axis: of the mesh.
      devices: along it.
      heads: N, of the query.
      key_heads: K. Fewer than devices are sent more than once.
    """

    axis: Any
    devices: int
    heads: int
    key_heads: int

    def rows(self, x: Any) -> Any:
        """`[B, all T, own N, ...]` as `[B, own T, all N, ...]`."""
        return lax.all_to_all(x, self.axis, 1, 2, tiled=True)

    def by_head(self, x: Any) -> Any:
        """`[B, own T, all N, ...]` as `[B, all T, own N, ...]`."""
        return lax.all_to_all(x, self.axis, 2, 1, tiled=True)

    def of_keys(self, x: Any) -> Any:
        if self.key_heads % self.devices:
            x = jnp.repeat(x, self.devices // self.key_heads, axis=2)
        return self.by_head(x)

    def all_rows(self, x: Any, axis: int) -> Any:
        """What has no heads: all parts of it, one after the other."""
        return None if x is None else lax.all_gather(x, self.axis, axis=axis, tiled=True)

    def own_heads(self, x: Any, axis: int = 1) -> Array | None:
        """A device's share of what has heads but no rows."""
        if x is None or x.shape[axis] == 1 < self.heads:
            return x
        size = x.shape[axis] // self.devices
        return lax.dynamic_slice_in_dim(x, lax.axis_index(self.axis) * size, size, axis)

    def scores_like(self, x: Any, own_rows: int) -> Array | None:
        """`[rows, 1|N, 1|T, columns]`, where a device has so many rows; one alone may be its own, or that of all."""
        if x is None:
            return None
        by_head, by_row = x.shape[1] > 1, x.shape[2] == own_rows
        if by_head and by_row:
            return lax.all_to_all(x, self.axis, 1, 2, tiled=True)
        if by_row:
            return self.all_rows(x, 2)
        return self.own_heads(x)

    def operands(self, o: Operands, mask_block: tuple[int, int] | None) -> Operands:
        dropout, own_rows = o.dropout, o.query.shape[1]
        if dropout is not None:
            first = lax.axis_index(self.axis) * (self.heads // self.devices)
            dropout = counted_from(dropout, head=first)
        return o._replace(
            query=self.by_head(o.query),
            key=self.of_keys(o.key),
            value=self.of_keys(o.value),
            bias=self.scores_like(o.bias, own_rows),
            mask=self.scores_like(o.mask, own_rows),
            block_mask=self.scores_like(o.block_mask, own_rows // (mask_block or (1, 1))[0]),
            query_segment_ids=self.all_rows(o.query_segment_ids, 1),
            key_segment_ids=self.all_rows(o.key_segment_ids, 1),
            key_ranges=self.all_rows(o.key_ranges, 1),
            alibi_slopes=self.own_heads(o.alibi_slopes),
            sinks=self.own_heads(o.sinks),
            dropout=dropout,
        )


def numbered(operands: Operands, batch_axis: Any, head_axis: Any) -> Operands:
    """Operands whose dropout has the bits of one device, where batch rows and heads are split over mesh axes too."""
    dropout = operands.dropout
    if dropout is None:
        return operands
    batch, _, heads, _ = operands.query.shape
    for name, axis, size in (("batch", batch_axis, batch), ("head", head_axis, heads)):
        if axis is not None:
            dropout = counted_from(dropout, **{name: lax.axis_index(axis) * size})
    return operands._replace(dropout=dropout)
