"""Attention as JAX primitives: what `jit`, `vmap`, `grad` and `shard_map` do with a (specification, operands) pair.

Four primitives, all over flat operands:

* `attention`: (operands) → (out, row_max, row_sum);
* `attention_transpose`: (operands, out, row_max, row_sum, d_out, d_lse) → cotangents of the wanted operands;
* `attention_tangent`: (operands, out, row_max, row_sum, tangents of the wanted operands) → tangents of (out, lse).
  Reverse mode never runs it, only its transpose, `attention_transpose`. Forward mode does;
* `attention_transpose_tangent`: (operands, out, row_max, row_sum, d_out, d_lse, tangents of some of these) → tangents
  of the cotangents. Forward mode of reverse mode runs it: a Hessian times a vector.

A row's maximum and sum together make its log-sum-exp (`log_sum_exp`), the only function of theirs that there is. So its
derivative is declared as that of `row_max`, and `row_sum` has none.

A `custom_vjp` would forbid forward mode and `custom_jvp` alone cannot name the backward pass; a linear primitive with a
transpose gives both. Reverse mode of derivatives differentiates the reference.

Batching folds the mapped axis into the batch and leaves operands that are not mapped alone.

Sharded arrays are not gathered: each device computes the batch rows and heads that it holds (`sharding`).

Each carries the `implementation` that the caller named, None where the choice is left open. Lowering for platform `cpu`
takes Metal where it is usable (on Apple silicon CPU and GPU share memory), and blockwise on every other platform, so
one traced function is right on each of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax._src.ad_checkpoint import name_p
from jax.ad_checkpoint import checkpoint_name
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_mfa import blockwise, compat, metal, recording, reference, sharding
from jax_mfa.kv_cache.storage import PARTS, field_of, pool_fields, stored
from jax_mfa.problem import Operands, Specification, accumulation_dtype

# what the transpose takes after the operands
BACKWARD_NAMES = ("out", "row_max", "row_sum", "d_out", "d_lse")
# what the backward pass needs of the forward pass, for policies of `jax.checkpoint`: saved, no kernel runs twice
RESIDUAL_NAMES = ("jax_mfa_out", "jax_mfa_lse", "jax_mfa_lse")


def pack(operands: Operands) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """The operands that are present, and their names."""
    names = tuple(name for name, x in zip(Operands._fields, operands) if x is not None)
    return tuple(getattr(operands, name) for name in names), names


def unpack(arrays: Sequence[Any], names: tuple[str, ...]) -> Operands:
    return Operands(**dict(zip(names, arrays)))


def log_sum_exp(row_max: Array, row_sum: Array) -> Array:
    """The log-sum-exp of rows: −inf where a row sees nothing, NaN where its softmax is not defined."""
    return row_max + jnp.log(lax.stop_gradient(row_sum))


def _reference_of(
    arrays: Any, spec: Specification, names: tuple[str, ...], wanted: tuple[str, ...]
) -> tuple[Any, tuple[Any, ...]]:
    """The reference as a function of the wanted operands, and where."""
    spec, operands = reference.plain(spec, unpack(arrays, names))
    fixed = operands._asdict()

    def fun(*varying: Any) -> tuple[Array, Array]:
        return reference.attention(spec, Operands(**{**fixed, **dict(zip(wanted, varying))}))

    return fun, tuple(fixed[name] for name in wanted)


def _dtypes(arrays: Any, spec: Specification, names: tuple[str, ...], wanted: tuple[str, ...]) -> list[Any]:
    """The dtypes of the cotangents of operands: of a quantised one, that of what it stands for."""
    operands = stored(spec, unpack(arrays[: len(names)], names))
    return [getattr(operands, name).dtype for name in wanted]


# --- what each primitive computes


def _attention(
    *arrays: Array, spec: Specification, names: tuple[str, ...], differentiated: bool, **_: Any
) -> tuple[Any, ...]:
    return blockwise.forward(spec, unpack(arrays, names), differentiated)


def _attention_on_metal(*arrays: Array, spec: Specification, names: tuple[str, ...], **_: Any) -> tuple[Any, ...]:
    return metal.forward(spec, unpack(arrays, names))


def _transpose(
    *arrays: Array,
    spec: Specification,
    names: tuple[str, ...],
    wanted: tuple[str, ...],
    all_columns: bool,
    **_: Any,
) -> tuple[Any, ...]:
    out, row_max, row_sum, d_out, d_lse = arrays[len(names) :]
    operands = unpack(arrays[: len(names)], names)
    return blockwise.backward(spec, operands, out, row_max, row_sum, d_out, d_lse, wanted, all_columns)


def _transpose_on_metal(
    *arrays: Array, spec: Specification, names: tuple[str, ...], wanted: tuple[str, ...], **_: Any
) -> Any:
    out, row_max, row_sum, d_out, d_lse = arrays[len(names) :]
    operands = unpack(arrays[: len(names)], names)
    return metal.backward(spec, operands, out, row_max, row_sum, d_out, d_lse, wanted)


def _no_jnp(implementation: str | None) -> None:
    if implementation == "metal":
        raise NotImplementedError(
            "implementation='metal' has no forward-mode (jvp) or second derivatives; "
            "use implementation='blockwise' or 'reference' for them"
        )


def _tangent(
    *arrays: Array,
    spec: Specification,
    names: tuple[str, ...],
    wanted: tuple[str, ...],
    implementation: str | None,
    **_: Any,
) -> Any:
    _no_jnp(implementation)
    out, row_max, row_sum, *tangents = arrays[len(names) :]
    operands = unpack(arrays[: len(names)], names)
    return blockwise.tangent(spec, operands, out, row_max, row_sum, wanted, tangents)


def _share(results: Any, rows: Any) -> tuple[Array, Any]:
    """The part that columns have in whole rows: exp(their log-sum-exp − that of the rows), and how far their own output
    is from that of the rows; 1 and 0 where the columns are all there are.

    With w that part, Δ that difference: t(out) = w · (t(own out) + Δ · t(own lse)), and t(lse) = w · t(own lse).
    """
    (own_out, own_lse), (out, row_max, row_sum) = results, rows
    seen = own_lse != -np.inf
    whole_lse = row_max + jnp.log(jnp.where(seen, row_sum, 1))
    weight = jnp.where(seen, jnp.exp(jnp.where(seen, own_lse - whole_lse, 0)), 0)
    return weight, (own_out - out).astype(own_lse.dtype)


def _differentiable_tangent(
    *arrays: Array,
    spec: Specification,
    names: tuple[str, ...],
    wanted: tuple[str, ...],
    implementation: str | None,
    **_: Any,
) -> tuple[Any, Any]:
    """`_tangent` by the reference, for derivatives of derivatives."""
    _no_jnp(implementation)
    fun, at = _reference_of(arrays[: len(names)], spec, names, wanted)
    rows, tangents = arrays[len(names) :][:3], arrays[len(names) + len(RESIDUAL_NAMES) :]
    results, (t_out, t_lse) = jax.jvp(fun, at, tuple(t.astype(x.dtype) for t, x in zip(tangents, at)))
    weight, apart = _share(results, rows)
    t_lse = weight * t_lse
    return (weight[..., None] * t_out + apart * t_lse[..., None]).astype(t_out.dtype), t_lse


def _differentiable_transpose(
    *arrays: Array,
    spec: Specification,
    names: tuple[str, ...],
    wanted: tuple[str, ...],
    implementation: str | None,
    **_: Any,
) -> tuple[Any, ...]:
    """`_transpose` written with JAX's own derivative of the reference, for derivatives of derivatives."""
    _no_jnp(implementation)
    fun, at = _reference_of(arrays[: len(names)], spec, names, wanted)
    results, pullback = jax.vjp(fun, *at)
    *rows, d_out, d_lse = arrays[len(names) :]
    weight, apart = _share(results, rows)
    d_lse = weight * (d_lse + (d_out.astype(d_lse.dtype) * apart).sum(-1))
    found = pullback(((weight[..., None] * d_out).astype(results[0].dtype), d_lse.astype(results[1].dtype)))
    return tuple(x.astype(dtype) for x, dtype in zip(found, _dtypes(arrays, spec, names, wanted)))


def _transpose_tangent(
    *arrays: Array,
    spec: Specification,
    names: tuple[str, ...],
    wanted: tuple[str, ...],
    moving: tuple[str, ...],
    implementation: str | None,
    all_columns: bool,
) -> tuple[Any, ...]:
    """The derivative of `_transpose`. Loops have one in forward mode, in the memory that they have."""
    _no_jnp(implementation)
    known = (*names, *BACKWARD_NAMES)
    # numbers of 16 bits are taken as integers somewhere in there, and integers have no tangent
    wide = lambda x: x.astype(np.float32) if x.dtype.itemsize == 2 else x
    given = {name: wide(x) for name, x in zip(known, arrays)}
    tangents = tuple(wide(x) for x in arrays[len(known) :])

    def fun(*varying: Any) -> Any:
        now = {**given, **dict(zip(moving, varying))}
        operands = Operands(**{name: now[name] for name in names})
        out, row_max, row_sum, d_out, d_lse = (now[name] for name in BACKWARD_NAMES)
        return blockwise.backward(spec, operands, out, row_max, row_sum, d_out, d_lse, wanted, all_columns)

    results = jax.jvp(fun, tuple(given[name] for name in moving), tangents)[1]
    return tuple(x.astype(dtype) for x, dtype in zip(results, _dtypes(arrays, spec, names, wanted)))


def _differentiable_transpose_tangent(
    *arrays: Array,
    spec: Specification,
    names: tuple[str, ...],
    wanted: tuple[str, ...],
    moving: tuple[str, ...],
    implementation: str | None,
    **_: Any,
) -> Any:
    """`_transpose_tangent` by the reference."""
    known = (*names, *BACKWARD_NAMES)
    given, tangents = dict(zip(known, arrays)), tuple(arrays[len(known) :])

    def fun(*varying: Any) -> tuple[Any, ...]:
        now = {**given, **dict(zip(moving, varying))}
        static: Any = {"spec": spec, "names": names, "wanted": wanted, "implementation": implementation}
        return _differentiable_transpose(*(now[name] for name in known), **static)

    return jax.jvp(fun, tuple(given[name] for name in moving), tangents)[1]


# --- shapes


def _attention_shapes(*avals: Any, spec: Specification, names: tuple[str, ...], **_: Any) -> tuple[Any, Any, Any]:
    o = stored(spec, unpack(avals, names))
    b, t, n, _ = o.query.shape
    rows = o.query.update(shape=(b, t, n), dtype=accumulation_dtype(o.query.dtype), weak_type=False)
    return o.query.update(shape=(b, t, n, o.value.shape[-1]), weak_type=False), rows, rows


def _transpose_shapes(
    *avals: Any, spec: Specification, names: tuple[str, ...], wanted: tuple[str, ...], **_: Any
) -> tuple[Any, ...]:
    o = stored(spec, unpack(avals[: len(names)], names))
    return tuple(o.query.update(shape=x.shape, dtype=x.dtype, weak_type=False) for x in (getattr(o, n) for n in wanted))


def _transpose_tangent_shapes(*avals: Any, moving: tuple[str, ...], **params: Any) -> tuple[Any, ...]:
    return _transpose_shapes(*avals, **params)


def _tangent_shapes(
    *avals: Any, spec: Specification, names: tuple[str, ...], wanted: tuple[str, ...], **_: Any
) -> tuple[Any, Any]:
    out, lse, _ = _attention_shapes(*avals[: len(names)], spec=spec, names=names)
    return out, lse


# --- vmap


def _rows(x: Any, dim: Any) -> int:
    """Operand rows of an array whose mapped axis, if any, is `dim`."""
    return x.shape[1] if dim == 0 else x.shape[0]


def _mapped(x: Any, dim: Any, size: int) -> Array:
    """`x` with a leading mapped axis, broadcast if it had none."""
    return jnp.moveaxis(x, dim, 0) if dim is not None else jnp.broadcast_to(x[None], (size, *x.shape))


def _fold(x: Any, size: int, batch: int, repeat: int) -> tuple[Any, int]:
    """A mapped operand `[size, rows, ...]` with its mapped axis in front of its rows, and its new repeat."""
    rows = x.shape[1]
    if rows == 1:
        return x.reshape(size, *x.shape[2:]), batch
    if rows * repeat != batch:  # its rows recur within the batch: one row for each batch row
        x = jnp.tile(jnp.repeat(x, repeat, 1), (1, batch // (rows * repeat)) + (1,) * (x.ndim - 2))
        repeat = 1
    return x.reshape(size * x.shape[1], *x.shape[2:]), repeat


def _parts_of_mapped(names: tuple[str, ...], dims: Any) -> set[str]:
    """The operands that belong to a quantised key or value of which something is mapped: rows of all are then alike."""
    groups = [{field_of(name, part) for part in PARTS} for name in ("key", "value")]
    moving = {name for name, dim in zip(names, dims) if dim is not None}
    return {name for group in groups if group & moving for name in group}


def _fold_operands(
    arrays: Any, dims: Any, size: int, spec: Specification, names: tuple[str, ...], mapped: Any = ()
) -> tuple[list[Any], Specification, int]:
    """Folds a mapped axis into the batch; the query and the operands in `mapped` get that axis if they lack it.

    An operand that is not mapped stays as it is: its rows recur for each element of the mapped axis.
    """
    query = names.index("query")
    batch = _rows(arrays[query], dims[query])
    mapped = {*mapped, *_parts_of_mapped(names, dims)}
    repeats = dict(zip(Operands._fields, spec.repeats))
    folded = []
    pools, pages = pool_fields(names), 0
    if any(dim is not None for name, dim in zip(names, dims) if name in pools):  # they then follow one another
        mapped |= {*pools, "block_tables"}
        key = names.index("key")
        pages = _rows(arrays[key], dims[key])
    for name, x, dim in zip(names, arrays, dims):
        if dim is not None or name == "query" or name in mapped:
            x = _mapped(x, dim, size)
            if name in pools:
                x = x.reshape(-1, *x.shape[2:])
            else:
                if name == "block_tables":
                    x = x + pages * jnp.arange(size, dtype=x.dtype).reshape(-1, 1, 1)
                x, repeats[name] = _fold(x, size, batch, repeats[name])
        folded.append(x)
    return folded, dataclasses.replace(spec, repeats=tuple(repeats[name] for name in Operands._fields)), batch


def _unfold(x: Any, size: int) -> Any:
    return x.reshape(size, x.shape[0] // size, *x.shape[1:])


def _batched(rule: Any, shapes: Any) -> Callable[..., Any]:
    """A primitive's batching rule from a `rule` for axes that are not empty and the `shapes` of its results."""

    def batch(arrays: Any, dims: Any, **params: Any) -> tuple[tuple[Array, ...], tuple[int, ...]]:
        size = next(x.shape[d] for x, d in zip(arrays, dims) if d is not None)
        if size > 0:
            return rule(arrays, dims, size, **params)
        one = [ShapedArray(tuple(n for i, n in enumerate(x.shape) if i != d), x.dtype) for x, d in zip(arrays, dims)]
        results = shapes(*one, **params)
        return tuple(jnp.zeros((0, *x.shape), x.dtype) for x in results), (0,) * len(results)

    return batch


def _attention_batching(
    arrays: Any, dims: Any, size: int, *, spec: Specification, names: tuple[str, ...], **static: Any
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    operands, spec, _ = _fold_operands(arrays, dims, size, spec, names)
    results = attention_p.bind(*operands, spec=spec, names=names, **static)
    return tuple(_unfold(x, size) for x in results), (0,) * len(results)


def _fold_results(arrays: Any, dims: Any, size: int, batch: int) -> list[Array]:
    """Folds arrays that have one row for each batch row."""
    return [_mapped(x, d, size).reshape(size * batch, *_mapped(x, d, size).shape[2:]) for x, d in zip(arrays, dims)]


def _fold_like(name: str, x: Any, dim: Any, size: int, batch: int, spec: Specification) -> Array:
    """Folds an array like the operand, or else the result, of this name."""
    if name in BACKWARD_NAMES:
        return _fold_results([x], [dim], size, batch)[0]
    return _fold(_mapped(x, dim, size), size, batch, spec.repeats[Operands._fields.index(name)])[0]


def _transpose_batching(
    arrays: Any,
    dims: Any,
    size: int,
    *,
    spec: Specification,
    names: tuple[str, ...],
    wanted: tuple[str, ...],
    **static: Any,
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    n = len(names)
    operands, folded, batch = _fold_operands(arrays[:n], dims[:n], size, spec, names, mapped=wanted)
    extra = _fold_results(arrays[n:], dims[n:], size, batch)
    static |= {"spec": folded, "names": names, "wanted": wanted}
    results = transpose_p.bind(*operands, *extra, **static)
    return _unfold_cotangents(results, arrays, dims, size, spec, names, wanted)


def _unfold_cotangents(
    results: Any,
    arrays: Any,
    dims: Any,
    size: int,
    spec: Specification,
    names: tuple[str, ...],
    wanted: tuple[str, ...],
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Cotangents of folded operands as those of the operands."""
    out = []
    for name, x in zip(wanted, results):
        i = names.index(name)
        rows, x = _rows(arrays[i], dims[i]), _unfold(x, size)
        if x.shape[1] != rows:  # `_fold` gave each batch row a row of its own
            repeat = spec.repeats[Operands._fields.index(name)]
            x = x.reshape(size, -1, rows, repeat, *x.shape[2:]).sum((1, 3), dtype=x.dtype)
        out.append(x)
    return tuple(out), (0,) * len(out)


def _tangent_batching(
    arrays: Any,
    dims: Any,
    size: int,
    *,
    spec: Specification,
    names: tuple[str, ...],
    wanted: tuple[str, ...],
    **static: Any,
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    n, known = len(names), len(names) + len(RESIDUAL_NAMES)
    operands, folded, batch = _fold_operands(arrays[:n], dims[:n], size, spec, names, mapped=wanted)
    results = _fold_results(arrays[n:known], dims[n:known], size, batch)
    tangents = [_fold_like(*x, size, batch, spec) for x in zip(wanted, arrays[known:], dims[known:])]
    static |= {"spec": folded, "names": names, "wanted": wanted}
    results = tangent_p.bind(*operands, *results, *tangents, **static)
    return tuple(_unfold(x, size) for x in results), (0,) * len(results)


def _transpose_tangent_batching(
    arrays: Any,
    dims: Any,
    size: int,
    *,
    spec: Specification,
    names: tuple[str, ...],
    wanted: tuple[str, ...],
    moving: tuple[str, ...],
    **static: Any,
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    # the same fold of the known arrays, and of the tangents as of what they belong to
    n, known = len(names), len(names) + len(BACKWARD_NAMES)
    mapped = {*wanted, *moving}
    operands, folded, batch = _fold_operands(arrays[:n], dims[:n], size, spec, names, mapped)
    extra = _fold_results(arrays[n:known], dims[n:known], size, batch)
    tangents = [_fold_like(*x, size, batch, spec) for x in zip(moving, arrays[known:], dims[known:])]
    static |= {"spec": folded, "names": names, "wanted": wanted, "moving": moving}
    results = transpose_tangent_p.bind(*operands, *extra, *tangents, **static)
    return _unfold_cotangents(results, arrays, dims, size, spec, names, wanted)


# --- derivatives

_ORIGINALS = {f"{name}_original": name for name in ("key", "value")}


def _attention_jvp(
    primals: Any,
    tangents: Any,
    *,
    spec: Specification,
    names: tuple[str, ...],
    implementation: str | None,
    differentiated: bool,
) -> tuple[tuple[Any, ...], tuple[Any, Any, Any]]:
    static = {"spec": spec, "names": names, "implementation": implementation}
    results = attention_p.bind(*primals, **static, differentiated=True)
    results = tuple(checkpoint_name(x, name) for x, name in zip(results, RESIDUAL_NAMES))
    # an original's tangent is that of what is stored; itself it is not kept for the backward pass
    moving = [(_ORIGINALS.get(name, name), t) for name, t in zip(names, tangents) if type(t) is not ad.Zero]
    wanted = tuple(name for name, _ in moving)
    if spec.page_size is not None and {"key", "value"} & {*wanted}:
        raise NotImplementedError("key_pages, value_pages: attention has no derivative with respect to pages")
    kept = [(name, x) for name, x in zip(names, primals) if name not in _ORIGINALS]
    static["names"] = tuple(name for name, _ in kept)
    arrays = *(x for _, x in kept), *results, *(t for _, t in moving)
    t_out, t_lse = tangent_p.bind(*arrays, **static, wanted=wanted, all_columns=True)
    return results, (t_out, t_lse, ad.Zero(t_lse.aval))


def _tangent_transpose(
    cotangents: Any, *arrays: Array, names: tuple[str, ...], wanted: tuple[str, ...], **static: Any
) -> list[None]:
    n = len(names) + len(RESIDUAL_NAMES)
    known, tangents = arrays[:n], arrays[n:]
    linear = tuple(name for name, t in zip(wanted, tangents) if ad.is_undefined_primal(t))
    cotangents = [ad.instantiate_zeros(ct) for ct in cotangents]
    results = transpose_p.bind(*known, *cotangents, names=names, wanted=linear, **static)
    found = dict(zip(linear, results))
    return [None] * n + [found.get(name) for name in wanted]


def _transpose_jvp(primals: Any, tangents: Any, *, names: tuple[str, ...], **static: Any) -> tuple[Any, Any]:
    results = transpose_p.bind(*primals, names=names, **static)
    known = (*names, *BACKWARD_NAMES)
    moving = [(name, t) for name, t in zip(known, tangents) if type(t) is not ad.Zero]
    changes = tuple(t for _, t in moving)
    moved = tuple(name for name, _ in moving)
    return results, transpose_tangent_p.bind(*primals, *changes, names=names, moving=moved, **static)


def _transpose_tangent_transpose(
    cotangents: Any, *arrays: Array, names: tuple[str, ...], moving: tuple[str, ...], **static: Any
) -> list[None]:
    n = len(names) + len(BACKWARD_NAMES)
    known, tangents = arrays[:n], arrays[n:]
    linear = [i for i, t in enumerate(tangents) if ad.is_undefined_primal(t)]

    def fun(*varying: Any) -> Any:
        now = {**dict(enumerate(tangents)), **dict(zip(linear, varying))}
        return _differentiable_transpose_tangent(*known, *now.values(), names=names, moving=moving, **static)

    zeros = [jnp.zeros(tangents[i].aval.shape, tangents[i].aval.dtype) for i in linear]
    # linear in them, so that its derivative anywhere is itself
    cotangents = tuple(ad.instantiate_zeros(ct) for ct in cotangents)
    found = dict(zip(linear, jax.vjp(fun, *zeros)[1](cotangents)))
    return [None] * n + [found.get(i) for i in range(len(tangents))]


def _jvp_by_jax(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The derivative rule of a primitive that only derivatives meet: `fun` is plain JAX, so JAX differentiates it."""

    def rule(primals: Any, tangents: Any, **params: Any) -> tuple[Any, ...]:
        tangents = [ad.instantiate_zeros(t) for t in tangents]
        return jax.jvp(functools.partial(fun, **params), tuple(primals), tuple(tangents))

    return rule


# --- registration


def _shared_mesh(ctx: Any) -> Any:
    """The mesh of several devices for which a program is lowered whose sharding is left to the compiler, or None."""
    module = ctx.module_context
    mesh = getattr(module.axis_context, "abstract_mesh", None)
    # none: shard_map's own devices; a program for export is compiled elsewhere, where nobody can be asked
    return None if mesh is None or mesh.size == 1 or module.lowering_parameters.for_export else mesh


def _by_shares(fun: Callable[..., Any], mesh: Any) -> Callable[..., Any]:
    """`fun` of a primitive, each device of the mesh computing its share."""

    def run(*arrays: Array, **params: Any) -> Any:
        names, results = params["names"], BACKWARD_NAMES[:3]
        if "wanted" in params:
            names, results = (*names, *BACKWARD_NAMES), params["wanted"]

        def pair(spec: Specification, operands: Operands, rows: Any = (), wanted: tuple[str, ...] | None = None) -> Any:
            own, names = pack(operands)
            changed = {"spec": spec, "names": names}
            if wanted is not None:
                changed |= {"wanted": wanted, "all_columns": False}
            return fun(*own, *rows, **{**params, **changed})

        times = sharding.repeated_heads(names, arrays, mesh)
        own = [sharding.repeat_heads(name, x, times) for name, x in zip(names, arrays)]
        found = sharding.partitioned(lambda *x: fun(*x, **params), pair, params["spec"], names, results)(*own)
        return tuple(sharding.fold_heads(name, x, times) for name, x in zip(results, found))

    return run


def _named(fun: Callable[..., Any], name: str) -> Callable[..., Any]:
    def run(*args: Any, **params: Any) -> Any:
        return fun(*args, **params)

    run.__name__ = run.__qualname__ = name
    return run


def _lowering(fun: Callable[..., Any], static: Any, name: str, shares: bool = True) -> Callable[..., Any]:
    # jitted, so that a model's many equal layers are traced and lowered once; profilers show the name
    fun = jax.jit(_named(fun, name), static_argnames=static)
    lower = mlir.lower_fun(fun, multiple_results=True)

    def rule(ctx: Any, *args: Any, **params: Any) -> Any:
        # loops inside start from constants, which shard_map's types would tell from data that varies by device
        avals = [ShapedArray(a.shape, a.dtype) if compat.varying(a) else a for a in ctx.avals_in]
        mesh = _shared_mesh(ctx) if shares else None
        chosen = lower if mesh is None else mlir.lower_fun(_by_shares(fun, mesh), multiple_results=True)
        return chosen(ctx.replace(avals_in=avals), *args, **params)

    return rule


def _need_devices(primitive: Any) -> None:
    """Tells JAX that lowering looks at the devices, which JAX otherwise withholds."""
    try:
        from jax._src import dispatch

        dispatch.prim_requires_devices_during_lowering.add(primitive)
    except (ImportError, AttributeError):  # sharded arrays are gathered then
        pass


def _primitive(name: str, fun: Callable[..., Any], shapes: Any, batch: Any, static: Any, on_metal: Any = None) -> Any:
    """A primitive that runs `fun` on every platform, and `on_metal` on `cpu` where Metal can be used.

    Args:
      static: names of its parameters; each primitive has `implementation` among them.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    compiled = jax.jit(primitive.bind, static_argnames=static)

    def run(*arrays: Array, **params: Any) -> Any:
        config: Any = jax.config
        if not config.jax_disable_jit:
            return compiled(*arrays, **params)
        return (on_metal if on_metal and params["implementation"] == "metal" else fun)(*arrays, **params)

    primitive.def_impl(run)
    primitive.def_abstract_eval(shapes)
    batching.primitive_batchers[primitive] = _batched(batch, shapes)
    lowered = _lowering(fun, static, f"{name}_blockwise", shares=on_metal is not None)

    def tell(ctx: Any, params: Any, implementation: str, reason: str = "") -> None:
        spec, operands = params["spec"], unpack(ctx.avals_in[: len(params["names"])], params["names"])
        details = params.get("wanted"), params.get("differentiated", False)
        make = lambda: (_choice(name, spec, operands, *details, implementation, reason), (spec, operands))
        recording.choose(make)

    def portable(ctx: Any, *args: Any, why_not_metal: str, **params: Any) -> Any:
        tell(ctx, params, "blockwise", why_not_metal)
        return lowered(ctx, *args, **params)

    def elsewhere(ctx: Any, *args: Any, **params: Any) -> Any:
        if params["implementation"] == "metal":
            raise NotImplementedError(
                "implementation='metal' runs on JAX's platform cpu of an Apple silicon host, and is being compiled for "
                f"{_platforms(ctx)}"
            )
        return portable(ctx, *args, why_not_metal=f"compiled for {_platforms(ctx)}", **params)

    if on_metal is None:
        only = functools.partial(portable, why_not_metal="Metal has no forward mode")
        mlir.register_lowering(primitive, only)
        return primitive
    _need_devices(primitive)
    native = _lowering(on_metal, static, f"{name}_metal")

    def on_cpu(ctx: Any, *args: Any, **params: Any) -> Any:
        named = params["implementation"] == "metal"
        why_not = "" if named else _why_not_metal(ctx, params)
        if why_not:
            return portable(ctx, *args, why_not_metal=why_not, **params)
        try:
            found = native(ctx, *args, **params)
        except metal.Failed as error:
            if named:
                raise RuntimeError(f"implementation='metal': {error}") from error
            metal.runtime.warn_once(str(error))
            return portable(ctx, *args, why_not_metal=str(error), **params)
        tell(ctx, params, "metal")
        return found

    mlir.register_lowering(primitive, elsewhere)
    mlir.register_lowering(primitive, on_cpu, platform="cpu")
    return primitive


def _platforms(ctx: Any) -> str:
    return ", ".join(getattr(ctx, "platforms", None) or ctx.module_context.platforms)


def _why_not_metal(ctx: Any, params: Any) -> str:
    """Why an attention that did not name Metal runs elsewhere; empty where Metal takes it."""
    if params["implementation"] is not None:
        return "by name"
    operands = unpack(ctx.avals_in[: len(params["names"])], params["names"])
    declined = metal.declined(params["spec"], operands)
    if declined:
        return declined
    found = metal.runtime.get()
    if found.reason and not found.expected:
        metal.runtime.warn_once(found.reason)
    return found.reason


_CALLS = {
    "jax_mfa_attention": "forward",
    "jax_mfa_attention_transpose": "backward",
    "jax_mfa_attention_tangent": "forward mode",
    "jax_mfa_attention_transpose_tangent": "forward mode of backward",
}


def _choice(
    name: str,
    spec: Specification,
    operands: Operands,
    wanted: tuple[str, ...] | None,
    differentiated: bool,
    implementation: str,
    reason: str,
) -> recording.Choice:
    """What is told of an attention in a program; its operands are abstract."""
    call = _CALLS[name]
    if implementation == "metal":
        plan = metal.plan_of(spec, operands, call, metal.tiles_of(spec, operands, call), wanted)
        text = ", ".join(f"{d.kernel.name} x {d.threadgroups}" for d in plan.dispatches)
    else:
        text = str(blockwise.tiling_of(spec, operands, "backward" in call, differentiated))
    return recording.Choice(call, spec.summary(stored(spec, operands)), implementation, text, reason)


_STATIC = ("spec", "names", "implementation")
# the last says whether the operands hold all columns that their rows see: not where a ring takes some of them at a time
_DERIVATIVE = (*_STATIC, "wanted", "all_columns")
attention_p = _primitive(
    "jax_mfa_attention",
    _attention,
    _attention_shapes,
    _attention_batching,
    (*_STATIC, "differentiated"),
    _attention_on_metal,
)
transpose_p = _primitive(
    "jax_mfa_attention_transpose",
    _transpose,
    _transpose_shapes,
    _transpose_batching,
    _DERIVATIVE,
    _transpose_on_metal,
)
tangent_p = _primitive("jax_mfa_attention_tangent", _tangent, _tangent_shapes, _tangent_batching, _DERIVATIVE)
ad.primitive_jvps[attention_p] = _attention_jvp
ad.primitive_transposes[tangent_p] = _tangent_transpose
ad.primitive_jvps[tangent_p] = _jvp_by_jax(_differentiable_tangent)
transpose_tangent_p = _primitive(
    "jax_mfa_attention_transpose_tangent",
    _transpose_tangent,
    _transpose_tangent_shapes,
    _transpose_tangent_batching,
    (*_DERIVATIVE, "moving"),
)
ad.primitive_jvps[transpose_p] = _transpose_jvp
ad.primitive_jvps[transpose_tangent_p] = _jvp_by_jax(_differentiable_transpose_tangent)
ad.primitive_transposes[transpose_tangent_p] = _transpose_tangent_transpose


def _vary_alike(arrays: Any) -> Any:
    """Under `shard_map`, marks every array as varying along each mesh axis that any of them varies along."""
    return compat.vary(arrays, compat.varying_of(arrays))


compat.register_with_shard_map(attention_p, transpose_p, tangent_p, transpose_tangent_p, name_p)


def attention(spec: Specification, operands: Operands, implementation: str | None = None) -> Any:
    """Attention, and maximum and sum of each row (see `blockwise.forward`): [B, T, N, V], and [B, T, N] twice.

    `implementation` is "metal", "blockwise", or None for the best of the two at the place where it is compiled.
    """
    arrays, names = pack(operands)
    static = {"spec": spec, "names": names, "implementation": implementation}
    return attention_p.bind(*_vary_alike(arrays), **static, differentiated=False)


def attention_transpose(
    spec: Specification, operands: Operands, rows: Any, wanted: tuple[str, ...], implementation: str | None = None
) -> Any:
    """Cotangents of the wanted operands (see `blockwise.backward`).

    `rows` are out, row_max, row_sum, d_out and d_lse. Where rows see more columns than the operands hold, they are
    those of all columns, and the cotangents the part that these columns have.
    """
    arrays, names = pack(operands)
    static = {"spec": spec, "names": names, "implementation": implementation, "wanted": wanted, "all_columns": False}
    return transpose_p.bind(*_vary_alike((*arrays, *rows)), **static)


def attention_tangent(
    spec: Specification,
    operands: Operands,
    results: Any,
    wanted: tuple[str, ...],
    tangents: Any,
    implementation: str | None = None,
) -> Any:
    """What output and log-sum-exp change by (see `blockwise.tangent`).

    `results` are out, row_max and row_sum. Where rows see more columns than the operands hold, they are those of all
    columns, and what is found is the part that these columns have.
    """
    arrays, names = pack(operands)
    static = {"spec": spec, "names": names, "implementation": implementation, "wanted": wanted, "all_columns": False}
    return tangent_p.bind(*_vary_alike((*arrays, *results, *tangents)), **static)
