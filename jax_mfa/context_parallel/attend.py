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
from jax_mfa.problem import AXES, DIFFERENTIABLE, Operands, accumulation_dtype, counted_from, pack, unpack


def attention(ring: Ring, heads_axis: Any, operands: Operands) -> tuple[Array, Array]:
    """A device's rows of attention over the whole sequence: output [B, T, N, V], and log-sum-exp [B, T, N].

    The sequence is split over the ring's axis; with a heads_axis each part once more along that, over which rows are
    exchanged for heads. Operands are as in `ring.forward`.
    """
    axes = compat.varying_of(operands) | compat.varying_along(ring.axis, heads_axis)
    o = compat.vary(operands, axes)
    if heads_axis is not None:
        o = _rows_for_heads(o, heads_axis, ring.spec.mask_block)
    b, t, n, _ = o.query.shape
    if 0 in (b, t, n, o.key.shape[1]):  # no rows, or no columns
        out = jnp.zeros((b, t, n, o.value.shape[-1]), o.query.dtype)
        lse = jnp.full((b, t, n), -np.inf, accumulation_dtype(o.query.dtype))
    else:
        alone = ring.devices == 1
        results = primitives.attention(ring.spec, o, ring.implementation) if alone else _ring_attention(ring, o)
        out, lse = results[0], partial.log_sum_exp(*results[1:])
    if heads_axis is None:
        return out, lse
    back = functools.partial(lax.all_to_all, axis_name=heads_axis, split_axis=1, concat_axis=2, tiled=True)
    return back(out), back(lse)


# --- the ring's derivatives


@dataclasses.dataclass(frozen=True)
class _RingCall:
    """The static facts of the primitive."""

    ring: Ring
    names: tuple[str, ...]  # of the operands that there are
    wrt: tuple[str, ...]  # of those that have tangents
    shapes: tuple[tuple[int, ...], ...]  # of the tangents of output and log-sum-exp
    # for each `vmap` around it the mapped axes of operands and results; tangents are mapped along the first
    maps: tuple[Any, ...] = ()

    @property
    def known(self) -> int:
        """How many arrays are operands or results; tangents follow."""
        return len(self.names) + len(primitives.RESULTS)

    def run(self, walk: Callable[..., Any], compute: Callable[..., Any], *arrays: Array) -> Any:
        """`rings.tangent` or `rings.backward` of operands, results, and (co)tangents, under the `vmap`s."""
        compute = functools.partial(compute, implementation=self.ring.implementation)

        def one(*arrays: Array) -> Any:
            n, known = len(self.names), self.known
            operands, results, others = unpack(arrays[:n], self.names), arrays[n:known], arrays[known:]
            return walk(self.ring, operands, results, self.wrt, others, compute)

        for dims in self.maps:
            one = jax.vmap(one, in_axes=(*dims, *(0,) * (len(arrays) - self.known)))
        return one(*arrays)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _ring_attention(ring: Ring, operands: Operands) -> tuple[Array, Array, Array]:
    """Output, maximum and sum of each row; these have derivatives as in `primitives`."""
    return rings.forward(ring, operands, functools.partial(primitives.attention, implementation=ring.implementation))


@_ring_attention.defjvp  # without symbolic zeros, which `shard_map` does not know
def _ring_jvp(ring: Ring, primals: Any, tangents: Any) -> tuple[tuple[Any, ...], tuple[Any, Any, Array]]:
    (operands,), (moving,) = primals, tangents
    results = _ring_attention(ring, operands)
    results = tuple(checkpoint_name(x, name) for x, name in zip(results, primitives.RESIDUAL_NAMES))
    wrt = tuple(name for name in DIFFERENTIABLE if getattr(moving, name) is not None)
    arrays, names = pack(operands)
    arrays = compat.vary_alike((*arrays, *results, *(getattr(moving, name) for name in wrt)))
    call = _RingCall(ring, names, wrt, tuple(x.shape for x in results[:2]))
    zeros = jnp.zeros_like(results[2])
    zeros = jnp.where(results[2] == 0, zeros, zeros)  # `shard_map` sees them vary as the sums do
    return results, (*ring_tangent_p.bind(*arrays, call=call), zeros)


def _tangent(*arrays: Array, call: _RingCall) -> Any:
    return call.run(rings.tangent, primitives.attention_jvp, *arrays)


def _transpose(cotangents: Any, *arrays: Array, call: _RingCall) -> list[Any]:
    n = call.known
    linear = tuple(name for name, x in zip(call.wrt, arrays[n:]) if ad.is_undefined_primal(x))
    arrays = compat.vary_alike((*arrays[:n], *(ad.instantiate_zeros(x) for x in cotangents)))
    found = dataclasses.replace(call, wrt=linear).run(rings.backward, primitives.attention_bwd, *arrays)
    return [None] * n + [dict(zip(linear, found)).get(name) for name in call.wrt]


def _batching(arrays: Any, dims: Any, *, call: _RingCall) -> tuple[Any, tuple[int, int]]:
    n = call.known
    size = next(x.shape[d] for x, d in zip(arrays, dims) if d is not None)
    tangents = [primitives.mapped_in_front(x, d, size) for x, d in zip(arrays[n:], dims[n:])]
    shapes = tuple((size, *shape) for shape in call.shapes)
    call = dataclasses.replace(call, shapes=shapes, maps=(*call.maps, tuple(dims[:n])))
    return ring_tangent_p.bind(*arrays[:n], *tangents, call=call), (0, 0)


def _shapes(*avals: Any, call: _RingCall) -> list[Any]:
    return [x.update(shape=shape, weak_type=False) for x, shape in zip(avals[len(call.names) :], call.shapes)]


# (operands, results, tangents of the operands `wrt`) → tangents of (out, lse)
ring_tangent_p = Primitive("jax_mfa_ring_tangent")
ring_tangent_p.multiple_results = True
ring_tangent_p.def_impl(_tangent)
ring_tangent_p.def_abstract_eval(_shapes)
mlir.register_lowering(ring_tangent_p, mlir.lower_fun(_tangent, multiple_results=True))
batching.primitive_batchers[ring_tangent_p] = _batching
ad.primitive_jvps[ring_tangent_p] = primitives.jvp_by_jax(_tangent)
ad.primitive_transposes[ring_tangent_p] = _transpose
compat.register_with_shard_map(ring_tangent_p)


# --- rows for heads


def _rows_for_heads(o: Operands, axis: Any, mask_block: tuple[int, int] | None) -> Operands:
    """Operands with a device's rows of all heads as those with all rows of its share of the heads, over a mesh axis
    (DeepSpeed Ulysses, arXiv:2309.14509, section 3)."""
    devices, rows = lax.psum(1, axis), o.query.shape[1]
    own_rows = {"T": rows, "t": rows // (mask_block or (1, 1))[0]}
    if o.key.shape[2] % devices:  # fewer key heads than devices are sent more than once
        key, value = (jnp.repeat(x, devices // x.shape[2], axis=2) for x in (o.key, o.value))
        o = o._replace(key=key, value=value)

    def exchanged(name: str, x: Any) -> Array:
        letters, whole = AXES[name], name in ("query", "key", "value")
        tokens, heads = (next((i for i, x in enumerate(letters) if x in kind), 0) for kind in ("TtS", "NK"))
        by_row = tokens and x.shape[tokens] == own_rows.get(letters[tokens], x.shape[tokens])
        by_head = heads and (x.shape[heads] > 1 or whole)  # else one row, or head, serves all
        if by_row and by_head:
            return lax.all_to_all(x, axis, heads, tokens, tiled=True)
        if by_row:
            return lax.all_gather(x, axis, axis=tokens, tiled=True)
        if by_head:
            size = x.shape[heads] // devices
            return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * size, size, heads)
        return x

    arrays, names = pack(o)
    return numbered(unpack(tuple(map(exchanged, names, arrays)), names), None, axis)


def numbered(operands: Operands, batch_axis: Any, head_axis: Any) -> Operands:
    """Operands whose dropout has the bits of one device, where mesh axes split batch entries and heads too."""
    if operands.dropout is None:
        return operands
    batch, _, heads, _ = operands.query.shape
    split = {"batch": (batch_axis, batch), "head": (head_axis, heads)}
    first = {name: lax.axis_index(axis) * size for name, (axis, size) in split.items() if axis is not None}
    return operands._replace(dropout=counted_from(operands.dropout, **first))
