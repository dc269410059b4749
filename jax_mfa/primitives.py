"""Attention as JAX primitives: what `jit`, `vmap`, `grad` and `shard_map` do with a call and its arrays.

Four primitives, all over flat operands; each has a `Call` as its parameter:

* `attention`: (operands) -> (out, row_max, row_sum);
* `attention_bwd`: (operands, out, row_max, row_sum, d_out, d_lse) -> cotangents of the operands `wrt`;
* `attention_jvp`: (operands, out, row_max, row_sum, tangents of the operands `wrt`) -> tangents of (out, lse).
  Reverse mode never runs it, only its transpose, `attention_bwd`. Forward mode does;
* `attention_bwd_jvp`: (operands, out, row_max, row_sum, d_out, d_lse, tangents of `tangent_names` among these) ->
  tangents of the cotangents. Forward mode of reverse mode runs it: a Hessian times a vector.

A row's maximum and sum make its log-sum-exp, the only function of theirs that there is (`partial.log_sum_exp`). So its
derivative is declared as that of `row_max`, and `row_sum` has none.

A `custom_vjp` would forbid forward mode and `custom_jvp` alone cannot name the backward pass; a linear primitive with a
transpose gives both. Reverse mode of derivatives differentiates the reference.

Batching folds the mapped axis into the batch and leaves operands that are not mapped alone. Sharded arrays are not
gathered: each device computes the batch entries and heads that it holds (`sharding`). Lowering for platform `cpu` takes
Metal where it is usable (on Apple silicon CPU and GPU share memory), and blockwise on every other platform, so that
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
from jax import Array
from jax._src.ad_checkpoint import name_p
from jax.ad_checkpoint import checkpoint_name
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_mfa import blockwise, choice, compat, metal, recording, reference, sharding
from jax_mfa.kv_cache.storage import PARTS
from jax_mfa.metal import runtime
from jax_mfa.problem import Operands, Specification, accumulation_dtype, field_of, pack, pool_fields, unpack

RESULTS = ("out", "row_max", "row_sum")
COTANGENTS = ("d_out", "d_lse")
# what the backward pass needs of the forward pass, for policies of `jax.checkpoint`: saved, no kernel runs twice
RESIDUAL_NAMES = ("jax_mfa_out", "jax_mfa_lse", "jax_mfa_lse")
_ORIGINALS = {"key_original": "key", "value_original": "value"}


@dataclasses.dataclass(frozen=True)
class Call:
    """The static facts of a call."""

    spec: Specification
    names: tuple[str, ...]  # of the operands that there are
    implementation: str | None = None  # what the caller named, None where the choice is left open
    wrt: tuple[str, ...] = ()  # operands whose cotangents are asked for, or that have tangents
    tangent_names: tuple[str, ...] = ()  # in forward mode of the backward pass, the arrays that have tangents
    differentiated: bool = False  # whether a backward pass follows in the same program


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a primitive's arrays are: operands, then `rows`, then tangents; and what it is called in texts."""

    name: str
    text: str
    rows: tuple[str, ...] = ()
    tangents: str | None = None  # the attribute of `Call` that names them
    gives_cotangents: bool = False

    def arrays(self, call: Call) -> tuple[str, ...]:
        """The names of all arrays; a tangent has that of the array that it belongs to."""
        return (*call.names, *self.rows, *(getattr(call, self.tangents) if self.tangents else ()))

    def split(self, arrays: Sequence[Any], call: Call) -> tuple[Operands, Sequence[Any], Sequence[Any]]:
        """Operands, rows and tangents."""
        n = len(call.names)
        known = n + len(self.rows)
        return unpack(arrays[:n], call.names), arrays[n:known], arrays[known:]


FORWARD = Kind("jax_mfa_attention", "forward")
BWD = Kind("jax_mfa_attention_bwd", "backward", (*RESULTS, *COTANGENTS), gives_cotangents=True)
JVP = Kind("jax_mfa_attention_jvp", "forward mode", RESULTS, "wrt")
BWD_JVP = Kind("jax_mfa_attention_bwd_jvp", "forward mode of backward", BWD.rows, "tangent_names", True)


# --- what each primitive computes


def _attention(*arrays: Array, call: Call) -> tuple[Any, ...]:
    return blockwise.forward(call.spec, unpack(arrays, call.names), call.differentiated)


_attention_on_metal = lambda *arrays, call: metal.forward(call.spec, unpack(arrays, call.names))


def _bwd(*arrays: Array, call: Call, module: Any = blockwise) -> tuple[Any, ...]:
    operands, rows, _ = BWD.split(arrays, call)
    return module.backward(call.spec, operands, rows[:3], call.wrt, rows[3:])


def _bwd_on_metal(*arrays: Array, call: Call) -> tuple[Any, ...]:
    """Cotangents by kernels; that of the arrays that a `score_mod` reads by `blockwise` where MSL has not all of it."""
    of = lambda module, *wrt: dict(
        zip(wrt, _bwd(*arrays, call=dataclasses.replace(call, wrt=wrt), module=module) if wrt else ())
    )
    by_tiles = set() if metal.differentiates(call.spec) else {"captured_floats"} & {*call.wrt}
    if by_tiles and call.implementation == "metal":
        raise NotImplementedError(
            "implementation='metal' has no gradient of the arrays that this score_mod reads; "
            "leave the choice open, or use implementation='blockwise' or 'reference'"
        )
    cotangents = of(metal, *(x for x in call.wrt if x not in by_tiles)) | of(blockwise, *by_tiles)
    return tuple(cotangents[x] for x in call.wrt)


def _jvp(*arrays: Array, call: Call, module: Any = blockwise) -> tuple[Any, Any]:
    _refuse_metal(call)
    operands, rows, tangents = JVP.split(arrays, call)
    return module.tangent(call.spec, operands, rows, call.wrt, tangents)


def _bwd_jvp(*arrays: Array, call: Call, module: Any = blockwise) -> tuple[Any, ...]:
    """The derivative of `_bwd`. Loops have one in forward mode, in the memory that they have."""
    _refuse_metal(call)
    known = BWD.arrays(call)
    # floats of 16 bits are integers somewhere in the loops, and integers have no tangent
    wide = lambda x: x.astype(np.float32) if x.dtype.itemsize == 2 and jnp.issubdtype(x.dtype, jnp.floating) else x
    given = {name: wide(x) for name, x in zip(known, arrays)}
    tangents = tuple(wide(x) for x in arrays[len(known) :])

    def fun(*moving: Any) -> Any:
        now = {**given, **dict(zip(call.tangent_names, moving))}
        return _bwd(*(now[name] for name in known), call=call, module=module)

    results = jax.jvp(fun, tuple(given[name] for name in call.tangent_names), tangents)[1]
    operands = call.spec.viewed(BWD.split(arrays, call)[0])
    return tuple(x.astype(getattr(operands, name).dtype) for name, x in zip(call.wrt, results))


def _refuse_metal(call: Call) -> None:
    if call.implementation == "metal":
        raise NotImplementedError(
            "implementation='metal' has no forward-mode (jvp) or second derivatives; "
            "use implementation='blockwise' or 'reference' for them"
        )


# --- shapes


def _row_shapes(*avals: Any, call: Call) -> tuple[Any, Any, Any]:
    o = call.spec.viewed(unpack(avals[: len(call.names)], call.names))
    b, t, n, _ = o.query.shape
    rows = o.query.update(shape=(b, t, n), dtype=accumulation_dtype(o.query.dtype), weak_type=False)
    return o.query.update(shape=(b, t, n, o.value.shape[-1]), weak_type=False), rows, rows


def _tangent_shapes(*avals: Any, call: Call) -> tuple[Any, Any]:
    return _row_shapes(*avals, call=call)[:2]


def _cotangent_shapes(*avals: Any, call: Call) -> tuple[Any, ...]:
    o = call.spec.viewed(unpack(avals[: len(call.names)], call.names))._asdict()
    return tuple(o["query"].update(shape=o[x].shape, dtype=o[x].dtype, weak_type=False) for x in call.wrt)


# --- vmap


def _entries(x: Any, dim: Any) -> int:
    """Batch entries of an array whose mapped axis, if any, is `dim`."""
    return x.shape[1] if dim == 0 else x.shape[0]


def mapped_in_front(x: Any, dim: Any, size: int) -> Array:
    """`x` with a leading mapped axis, broadcast if it had none."""
    return jnp.moveaxis(x, dim, 0) if dim is not None else jnp.broadcast_to(x[None], (size, *x.shape))


def _fold(x: Any, size: int, batch: int, repeat: int) -> tuple[Any, int]:
    """A mapped operand `[size, entries, ...]` with its mapped axis in front of its entries, and its new repeat."""
    entries = x.shape[1]
    if entries == 1:
        return x.reshape(size, *x.shape[2:]), batch
    if entries * repeat != batch:  # its entries recur within the batch: one for each batch entry
        x = jnp.tile(jnp.repeat(x, repeat, 1), (1, batch // (entries * repeat)) + (1,) * (x.ndim - 2))
        repeat = 1
    return x.reshape(size * x.shape[1], *x.shape[2:]), repeat


def _fold_operands(
    arrays: Any, dims: Any, size: int, spec: Specification, names: tuple[str, ...], mapped: Any = ()
) -> tuple[list[Any], Specification, int]:
    """Folds a mapped axis into the batch; the query and the operands in `mapped` get that axis if they lack it.

    An operand that is not mapped stays as it is: its entries recur for each element of the mapped axis.
    """
    query = names.index("query")
    batch = _entries(arrays[query], dims[query])
    moving = {name for name, dim in zip(names, dims) if dim is not None}
    mapped = {*mapped, *moving, "query"}
    for name in ("key", "value"):
        parts = {field_of(name, part) for part in PARTS}
        mapped |= parts if parts & mapped else set()  # all of a quantised array get the same entries
    repeats = dict(zip(Operands._fields, spec.repeats))
    folded = []
    pools, pages = {*pool_fields(names)}, 0
    if pools & moving:  # they then follow one another
        mapped |= {*pools, "block_tables"}
        key = names.index("key")
        pages = _entries(arrays[key], dims[key])
    for name, x, dim in zip(names, arrays, dims):
        if name in mapped:
            x = mapped_in_front(x, dim, size)
            if name in pools:
                x = x.reshape(-1, *x.shape[2:])
            else:
                if name == "block_tables":
                    x = x + pages * jnp.arange(size, dtype=x.dtype).reshape(-1, 1, 1)
                x, repeats[name] = _fold(x, size, batch, repeats[name])
        folded.append(x)
    if spec.value_size is not None:
        repeats["value"] = repeats["key"]
    return folded, dataclasses.replace(spec, repeats=tuple(repeats[name] for name in Operands._fields)), batch


def _batching(kind: Kind, primitive: Any, shapes: Any) -> Callable[..., Any]:
    """A primitive's batching rule: each array is folded as its name says."""

    def fold_like(name: str, x: Any, dim: Any, size: int, batch: int, spec: Specification) -> Array:
        x = mapped_in_front(x, dim, size)
        if name in BWD.rows:  # an entry for each of the batch
            return x.reshape(size * batch, *x.shape[2:])
        return _fold(x, size, batch, spec.repeats[Operands._fields.index(name)])[0]

    def rule(arrays: Any, dims: Any, *, call: Call) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        size, n = next(x.shape[d] for x, d in zip(arrays, dims) if d is not None), len(call.names)
        if size == 0:
            one = [
                ShapedArray(tuple(n for i, n in enumerate(x.shape) if i != d), x.dtype) for x, d in zip(arrays, dims)
            ]
            empty = tuple(jnp.zeros((0, *x.shape), x.dtype) for x in shapes(*one, call=call))
            return empty, (0,) * len(empty)
        names = kind.arrays(call)
        mapped = {*call.wrt, *call.tangent_names}
        operands, spec, batch = _fold_operands(arrays[:n], dims[:n], size, call.spec, call.names, mapped)
        others = (fold_like(*x, size, batch, call.spec) for x in zip(names[n:], arrays[n:], dims[n:]))
        results = primitive.bind(*operands, *others, call=dataclasses.replace(call, spec=spec))
        results = [x.reshape(size, x.shape[0] // size, *x.shape[1:]) for x in results]
        if kind.gives_cotangents:
            for i, name in enumerate(call.wrt):
                at = call.names.index(name)
                entries, x = _entries(arrays[at], dims[at]), results[i]
                if x.shape[1] != entries:  # `_fold` gave each batch entry an operand's entry of its own
                    repeat = call.spec.repeats[Operands._fields.index(name)]
                    results[i] = x.reshape(size, -1, entries, repeat, *x.shape[2:]).sum((1, 3), dtype=x.dtype)
        return tuple(results), (0,) * len(results)

    return rule


# --- derivatives


def _refuse_pages(call: Call, names: Sequence[str]) -> None:
    if call.spec.page_size is not None and {"key", "value"} & {*names}:
        raise NotImplementedError("key_pages, value_pages: attention has no derivative with respect to pages")


def _attention_jvp(primals: Any, tangents: Any, *, call: Call) -> tuple[tuple[Any, ...], tuple[Any, Any, Any]]:
    results = attention_p.bind(*primals, call=dataclasses.replace(call, differentiated=True))
    results = tuple(checkpoint_name(x, name) for x, name in zip(results, RESIDUAL_NAMES))
    # an original's tangent is that of what is stored; itself it is not kept for the backward pass
    moving = [(_ORIGINALS.get(name, name), t) for name, t in zip(call.names, tangents) if type(t) is not ad.Zero]
    wrt = tuple(name for name, _ in moving)
    _refuse_pages(call, wrt)
    kept = [(name, x) for name, x in zip(call.names, primals) if name not in _ORIGINALS]
    call = Call(call.spec, tuple(name for name, _ in kept), call.implementation, wrt)
    t_out, t_lse = attention_jvp_p.bind(*(x for _, x in kept), *results, *(t for _, t in moving), call=call)
    return results, (t_out, t_lse, ad.Zero(t_lse.aval))


def _attention_transpose(cotangents: Any, *arrays: Any, call: Call) -> list[Any]:
    """The output is linear in values, for `jax.linear_transpose`; nothing else is."""
    linear = [name for name, x in zip(call.names, arrays) if ad.is_undefined_primal(x)]
    _refuse_pages(call, linear)
    if linear != ["value"]:
        raise NotImplementedError(f"attention is not linear in {', '.join(linear)}: it has a transpose in value alone")
    known = [jnp.zeros(x.aval.shape, x.aval.dtype) if ad.is_undefined_primal(x) else x for x in arrays]
    out, row_max, row_sum = attention_p.bind(*known, call=dataclasses.replace(call, differentiated=True))
    rows = (out, row_max, row_sum, ad.instantiate_zeros(cotangents[0]), jnp.zeros_like(row_sum))
    (found,) = attention_bwd_p.bind(*known, *rows, call=dataclasses.replace(call, wrt=("value",)))
    return [found if name == "value" else None for name in call.names]


def _jvp_transpose(cotangents: Any, *arrays: Array, call: Call) -> list[Any]:
    n = len(call.names) + len(RESULTS)
    known, tangents = arrays[:n], arrays[n:]
    linear = tuple(name for name, t in zip(call.wrt, tangents) if ad.is_undefined_primal(t))
    cotangents = [ad.instantiate_zeros(ct) for ct in cotangents]
    found = attention_bwd_p.bind(*known, *cotangents, call=dataclasses.replace(call, wrt=linear))
    return [None] * n + [dict(zip(linear, found)).get(name) for name in call.wrt]


def _bwd_jvp_rule(primals: Any, tangents: Any, *, call: Call) -> tuple[Any, Any]:
    results = attention_bwd_p.bind(*primals, call=call)
    moving = [(name, t) for name, t in zip(BWD.arrays(call), tangents) if type(t) is not ad.Zero]
    call = dataclasses.replace(call, tangent_names=tuple(name for name, _ in moving))
    return results, attention_bwd_jvp_p.bind(*primals, *(t for _, t in moving), call=call)


def _bwd_jvp_transpose(cotangents: Any, *arrays: Array, call: Call) -> list[Any]:
    n = len(BWD.arrays(call))
    known, tangents = arrays[:n], arrays[n:]
    linear = [i for i, t in enumerate(tangents) if ad.is_undefined_primal(t)]

    def fun(*moving: Any) -> Any:
        now = {**dict(enumerate(tangents)), **dict(zip(linear, moving))}
        return _bwd_jvp(*known, *now.values(), call=call, module=reference)

    zeros = [jnp.zeros(tangents[i].aval.shape, tangents[i].aval.dtype) for i in linear]
    # linear in them, so that its derivative anywhere is itself
    cotangents = tuple(ad.instantiate_zeros(ct) for ct in cotangents)
    found = dict(zip(linear, jax.vjp(fun, *compat.vary(zeros, compat.varying_of(known)))[1](cotangents)))
    return [None] * n + [found.get(i) for i in range(len(tangents))]


def jvp_by_jax(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The derivative rule of a primitive that only derivatives meet: `fun` is plain JAX, so JAX differentiates it."""

    def rule(primals: Any, tangents: Any, **params: Any) -> tuple[Any, ...]:
        tangents = [ad.instantiate_zeros(t) for t in tangents]
        return jax.jvp(functools.partial(fun, **params), tuple(primals), tuple(tangents))

    return rule


# --- registration


def _by_shares(kind: Kind, fun: Callable[..., Any], mesh: Any) -> Callable[..., Any]:
    """`fun` of a primitive, each device of the mesh computing its share."""

    def run(*arrays: Array, call: Call) -> Any:
        names, results = kind.arrays(call), call.wrt if kind.gives_cotangents else RESULTS

        def pair(spec: Specification, operands: Operands, rows: Any = (), wrt: tuple[str, ...] | None = None) -> Any:
            own, present = pack(operands)
            changed = dataclasses.replace(call, spec=spec, names=present, wrt=call.wrt if wrt is None else wrt)
            return fun(*own, *rows, call=changed)

        # no `functools.partial`, whose keywords JAX would make positions of
        return sharding.partitioned(lambda *x: fun(*x, call=call), pair, call.spec, names, results, mesh)(*arrays)

    return run


def _lowering(kind: Kind, fun: Callable[..., Any], name: str, shares: bool = True) -> Callable[..., Any]:
    def run(*args: Any, call: Call) -> Any:
        return fun(*args, call=call)

    run.__name__ = run.__qualname__ = name
    # jitted, so that a model's many equal layers are traced and lowered once; profilers show the name
    jitted = jax.jit(run, static_argnames="call")
    lower = mlir.lower_fun(jitted, multiple_results=True)

    def rule(ctx: Any, *args: Any, **params: Any) -> Any:
        # loops inside start from constants, which shard_map's types would tell from data that varies by device
        avals = [ShapedArray(a.shape, a.dtype) if compat.varying(a) else a for a in ctx.avals_in]
        mesh = compat.shared_mesh(ctx) if shares else None
        chosen = lower if mesh is None else mlir.lower_fun(_by_shares(kind, jitted, mesh), multiple_results=True)
        return chosen(ctx.replace(avals_in=avals), *args, **params)

    return rule


def _primitive(kind: Kind, fun: Callable[..., Any], shapes: Any, on_metal: Any = None) -> Any:
    """A primitive that runs `fun` on every platform, and `on_metal` on `cpu` where Metal can be used."""
    primitive = Primitive(kind.name)
    primitive.multiple_results = True
    compiled = jax.jit(primitive.bind, static_argnames="call")

    def run(*arrays: Array, call: Call) -> Any:
        config: Any = jax.config
        if not config.jax_disable_jit:
            return compiled(*arrays, call=call)
        return (on_metal if on_metal and call.implementation == "metal" else fun)(*arrays, call=call)

    primitive.def_impl(run)
    primitive.def_abstract_eval(shapes)
    batching.primitive_batchers[primitive] = _batching(kind, primitive, shapes)
    lowered = _lowering(kind, fun, f"{kind.name}_blockwise", shares=on_metal is not None)

    def operands_of(ctx: Any, call: Call) -> Operands:
        return unpack(ctx.avals_in[: len(call.names)], call.names)

    def tell(ctx: Any, call: Call, implementation: str, reason: str = "") -> None:
        operands = operands_of(ctx, call)
        recording.choose(lambda: (_choice(kind, call, operands, implementation, reason), (call.spec, operands)))

    def portable(ctx: Any, *args: Any, call: Call, why_not_metal: str) -> Any:
        tell(ctx, call, "blockwise", why_not_metal)
        results = lowered(ctx, *args, call=call)
        dense = blockwise.in_one_tile(call.spec, operands_of(ctx, call))
        return results if dense else compat.compiled_once(ctx, kind.name, results)

    def elsewhere(ctx: Any, *args: Any, call: Call) -> Any:
        platforms = getattr(ctx, "platforms", None) or ctx.module_context.platforms
        why_not = choice.at_lowering_elsewhere(call.implementation, call.spec, operands_of(ctx, call), platforms)
        return portable(ctx, *args, call=call, why_not_metal=why_not)

    if on_metal is None:
        mlir.register_lowering(primitive, functools.partial(portable, why_not_metal="Metal has no forward mode"))
        return primitive
    compat.need_devices(primitive)
    native = _lowering(kind, on_metal, f"{kind.name}_metal")

    def on_cpu(ctx: Any, *args: Any, call: Call) -> Any:
        why_not = choice.at_lowering(call.implementation, call.spec, operands_of(ctx, call))
        if why_not:
            return portable(ctx, *args, call=call, why_not_metal=why_not)
        try:
            found = native(ctx, *args, call=call)
        except metal.Failed as error:
            if call.implementation == "metal":
                raise RuntimeError(f"implementation='metal': {error}") from error
            runtime.warn_once(str(error))
            return portable(ctx, *args, call=call, why_not_metal=str(error))
        tell(ctx, call, "metal")
        return found

    mlir.register_lowering(primitive, elsewhere)
    mlir.register_lowering(primitive, on_cpu, platform="cpu")
    return primitive


def _choice(kind: Kind, call: Call, operands: Operands, implementation: str, reason: str) -> recording.Choice:
    """What is told of an attention in a program; its operands are abstract."""
    spec = call.spec
    if implementation == "metal":
        wrt = call.wrt if kind.gives_cotangents else None
        plan = metal.plan_of(spec, operands, kind.text, metal.tiles_of(spec, operands, kind.text), wrt)
        text = ", ".join(f"{d.kernel.name} x {d.threadgroups}" for d in plan.dispatches)
    else:
        text = str(blockwise.tiling_of(spec, operands, "backward" in kind.text, call.differentiated))
    return recording.Choice(kind.text, spec.summary(spec.viewed(operands)), implementation, text, reason)


attention_p = _primitive(FORWARD, _attention, _row_shapes, _attention_on_metal)
attention_bwd_p = _primitive(BWD, _bwd, _cotangent_shapes, _bwd_on_metal)
attention_jvp_p = _primitive(JVP, _jvp, _tangent_shapes)
attention_bwd_jvp_p = _primitive(BWD_JVP, _bwd_jvp, _cotangent_shapes)
ad.primitive_jvps[attention_p] = _attention_jvp
ad.primitive_transposes[attention_p] = _attention_transpose
ad.primitive_transposes[attention_jvp_p] = _jvp_transpose
ad.primitive_jvps[attention_jvp_p] = jvp_by_jax(functools.partial(_jvp, module=reference))
ad.primitive_jvps[attention_bwd_p] = _bwd_jvp_rule
ad.primitive_jvps[attention_bwd_jvp_p] = jvp_by_jax(functools.partial(_bwd_jvp, module=reference))
ad.primitive_transposes[attention_bwd_jvp_p] = _bwd_jvp_transpose
compat.register_with_shard_map(attention_p, attention_bwd_p, attention_jvp_p, attention_bwd_jvp_p, name_p)


def attention(spec: Specification, operands: Operands, implementation: str | None = None) -> Any:
    """Attention, and maximum and sum of each row (see `blockwise.forward`): [B, T, N, V], and [B, T, N] twice.

    `implementation` is "metal", "blockwise", or None for the best of the two at the place where it is compiled.
    """
    arrays, names = pack(operands)
    return attention_p.bind(*compat.vary_alike(arrays), call=Call(spec, names, implementation))


def attention_bwd(
    spec: Specification, operands: Operands, rows: Any, wrt: tuple[str, ...], implementation: str | None = None
) -> Any:
    """Cotangents of the operands `wrt` (see `blockwise.backward`), of `rows`: out, row_max, row_sum, d_out and d_lse.
    Where rows see more keys than the operands hold, they are those of all keys, and the cotangents the part that these
    keys have."""
    arrays, names = pack(operands)
    return attention_bwd_p.bind(*compat.vary_alike((*arrays, *rows)), call=Call(spec, names, implementation, wrt))


def attention_jvp(
    spec: Specification,
    operands: Operands,
    results: Any,
    wrt: tuple[str, ...],
    tangents: Any,
    implementation: str | None = None,
) -> Any:
    """What output and log-sum-exp change by (see `blockwise.tangent`), of `results`: out, row_max and row_sum, of all
    keys as those of `attention_bwd`."""
    arrays, names = pack(operands)
    arrays = compat.vary_alike((*arrays, *results, *tangents))
    return attention_jvp_p.bind(*arrays, call=Call(spec, names, implementation, wrt))
