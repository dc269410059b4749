"""What versions of JAX call differently, have not yet, or have no more: from 0.4.38 on."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.mlir import ir
from jax.interpreters import ad
from jax.sharding import NamedSharding, PartitionSpec

ffi: Any = jax.ffi if hasattr(jax, "ffi") else importlib.import_module("jax.extend.ffi")  # before 0.5

HAS_TYPES = hasattr(jax, "typeof")  # with what varies along which axis of a mesh
# keywords of slices whose indices are not counted from the end, where JAX knows that there are others
NOT_NEGATIVE = {x: False for x in inspect.signature(lax.dynamic_slice).parameters if x == "allow_negative_indices"}
HAS_EXPLICIT_SHARDING = hasattr(jax.sharding, "auto_axes")
BARRIERS_HAVE_DERIVATIVES = lax.optimization_barrier_p in ad.primitive_jvps


def x64() -> contextlib.AbstractContextManager[Any]:
    """Within it, 64-bit dtypes stay what they are."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    return importlib.import_module("jax.experimental").enable_x64()


def no_mesh() -> contextlib.AbstractContextManager[Any]:
    """Within it, whatever mesh the caller has set is none."""
    if hasattr(jax.sharding, "use_abstract_mesh"):
        return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))
    return contextlib.nullcontext()


def shard_map(fun: Callable[..., Any], mesh: Any, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`jax.shard_map` without its checks of what varies over devices. Splits arrays on explicit meshes too."""
    if hasattr(jax, "shard_map"):
        mapped = jax.shard_map(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        if not HAS_EXPLICIT_SHARDING or jax.sharding.AxisType.Explicit not in mesh.axis_types:
            return mapped
        of = lambda spec, tree: jax.tree.map(lambda x: jax.sharding.reshard(x, NamedSharding(mesh, spec)), tree)
        is_spec = lambda x: isinstance(x, PartitionSpec)
        return lambda *arrays: mapped(*jax.tree.map(of, in_specs, arrays, is_leaf=is_spec))
    old: Any = importlib.import_module("jax.experimental.shard_map")
    return old.shard_map(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_rep=False)


def varying(aval: Any) -> frozenset[Any]:
    """The mesh axes along which `shard_map` lets a value of this type vary; JAX has moved the attribute."""
    kind = getattr(aval, "mat", None)
    return kind.varying if kind is not None else getattr(aval, "vma", frozenset())


def register_with_shard_map(*primitives: Any) -> None:
    """Before 0.6 `shard_map` asks each primitive how it maps replication: as any elementwise one does."""
    with contextlib.suppress(ImportError, AttributeError):  # newer JAX reads the types of the results
        old: Any = importlib.import_module("jax.experimental.shard_map")
        for primitive in primitives:
            old.register_standard_check(primitive)
            old.register_standard_rewrite(primitive)


def bind(primitive: Any, arguments: Any, params: dict[str, Any]) -> list[Any]:
    """The results of a primitive with the parameters of an equation of it."""
    arguments = vary_alike(list(arguments))
    if primitive.name == "custom_vjp_call_jaxpr":  # before 0.6, of which a mapped equation has no derivative
        return list(_custom_vjp(params)(*arguments))
    found = primitive.get_bind_params(params)
    functions, params = ((), found) if isinstance(found, dict) else found  # functions apart, before 0.10
    results = primitive.bind(*functions, *arguments, **params)
    return list(results) if primitive.multiple_results else [results]


def _custom_vjp(params: dict[str, Any]) -> Any:
    """The function with a derivative rule that an equation of old has in its parameters."""
    run: Any = lambda jaxpr, consts, xs: tuple(jax.core.eval_jaxpr(jaxpr, consts, *xs))
    fun = jax.custom_vjp(lambda *xs: run(params["fun_jaxpr"].jaxpr, params["fun_jaxpr"].consts, xs))
    closed_over = params["num_consts"]  # of the inputs, the first, which the rule has itself

    def forward(*xs: Any) -> Any:
        xs = xs[closed_over:]
        found = run(*params["fwd_jaxpr_thunk"](*(True for _ in xs)), xs)
        kept = params["out_trees"]()[1].num_leaves
        return found[kept:], found[:kept]

    def backward(kept: Any, cotangents: Any) -> Any:
        found = params["bwd"](*kept, *cotangents)
        return (*[None] * closed_over, *(None if type(x).__name__ == "Zero" else x for x in found))

    fun.defvjp(forward, backward)
    return fun


def has_ended(x: Any) -> bool:
    """Whether a value is known to belong to a transformation that has ended: within `jax.jit` JAX itself finds out."""
    if not isinstance(x, jax.core.Tracer):
        return False
    core: Any = importlib.import_module("jax._src.core")
    valid = getattr(getattr(x, "_trace", None), "is_valid", lambda: True)
    return core.trace_state_clean() or not valid()


def source_line(eqn: Any) -> str:
    """Where the caller wrote what an equation came from, as "file:line (function)"; empty where JAX does not tell."""
    try:
        return str(importlib.import_module("jax._src.source_info_util").summarize(eqn.source_info))
    except (ImportError, AttributeError):
        return ""


# --- what types say: along which axes of a mesh arrays vary, and where sharding is explicit


def varying_of(tree: Any) -> frozenset[Any]:
    """The mesh axes along which some array of a tree varies, as far as `shard_map` keeps account."""
    if not HAS_TYPES:
        return frozenset()
    return frozenset().union(*(varying(jax.typeof(x)) for x in jax.tree.leaves(tree)))


def varying_along(*axes: Any) -> frozenset[Any]:
    """These mesh axes (or tuples of them, or None), as far as `shard_map` keeps account of what varies."""
    if not HAS_TYPES:
        return frozenset()
    return varying_of([lax.axis_index(axis) for axis in axes if axis is not None])


def vary(tree: Any, axes: frozenset[Any]) -> Any:
    """Marks arrays as varying along all of these mesh axes."""

    def mark(x: Any) -> Any:
        missing = tuple(sorted(axes - varying_of(x)))
        if not missing:
            return x
        old: Any = lax
        return lax.pcast(x, missing, to="varying") if hasattr(lax, "pcast") else old.pvary(x, missing)

    return jax.tree.map(mark, tree)


def without_types(run: Callable[..., Any], arguments: dict[str, Any], results: Callable[[], Any]) -> Any:
    """`run(arguments)` with no sharding in the types of arrays inside, and specs, `results()`, in those of its results.

    The mesh is the one that the caller has set, else that of the arrays. `results` is called only where it is explicit.
    """
    mesh = _explicit_mesh(arguments)
    if mesh is None:
        return run(arguments)
    placed = {n: x for n, x in arguments.items() if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(x))}
    axes = tuple(name for name, kind in zip(mesh.axis_names, mesh.axis_types) if "Explicit" in str(kind))
    is_spec = lambda x: isinstance(x, PartitionSpec)
    inside = jax.sharding.auto_axes(
        lambda placed: run({**arguments, **placed}),
        axes=axes,
        out_sharding=jax.tree.map(lambda spec: NamedSharding(mesh, spec), results(), is_leaf=is_spec),
    )
    return inside(placed)


def _explicit_mesh(arguments: Any) -> Any:
    """The mesh that makes sharding part of types: the one that the caller has set, else that of an array; or None."""
    if not HAS_EXPLICIT_SHARDING:
        return None
    meshes = [jax.sharding.get_abstract_mesh()]
    if meshes[0].empty:
        meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arguments) if isinstance(x, jax.Array)]
    return next((mesh for mesh in meshes if any("Explicit" in str(kind) for kind in mesh.axis_types)), None)


def spec_of(x: Any) -> PartitionSpec:
    """How the type of an array says that each of its axes is split."""
    if not isinstance(x, jax.Array) or not HAS_EXPLICIT_SHARDING:
        return PartitionSpec(*(None,) * np.ndim(x))
    spec = jax.typeof(x).sharding.spec
    return PartitionSpec(*spec, *(None,) * (x.ndim - len(spec)))


def vary_alike(arrays: Any) -> Any:
    """Under `shard_map`, marks every array as varying along each mesh axis that any of them varies along."""
    return vary(arrays, varying_of(arrays))


# --- lowering


def shared_mesh(ctx: Any) -> Any:
    """The mesh of several devices for which a program is lowered whose sharding is left to the compiler, or None."""
    module = ctx.module_context
    mesh = getattr(module.axis_context, "abstract_mesh", None)
    # none: shard_map's own devices; a program for export is compiled elsewhere, where nobody can be asked
    return None if mesh is None or mesh.size == 1 or module.lowering_parameters.for_export else mesh


def compiled_once(ctx: Any, name: str, results: Any) -> Any:
    """Results of a call, which XLA on one CPU compiles once for all layers of a model that make it.

    XLA inlines calls that do not say otherwise, and compiles each copy anew. JAX before 0.5 does so all the same.
    """
    module = ctx.module_context
    alone = getattr(module.axis_context, "num_devices", None) == 1 and tuple(module.platforms) == ("cpu",)
    if alone and not module.lowering_parameters.for_export and results:
        call = (results[0][0] if isinstance(results[0], (tuple, list)) else results[0]).owner
        call = getattr(call, "operation", call)
        if getattr(call, "name", "") == "func.call":
            said = {"inlineable": "false", "compilation_unit": name}
            call.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(
                {key: ir.StringAttr.get(value) for key, value in said.items()}
            )
    return results


def need_devices(primitive: Any) -> None:
    """Tells JAX that lowering looks at the devices, which JAX otherwise withholds."""
    with contextlib.suppress(ImportError, AttributeError):  # sharded arrays are gathered then
        from jax._src import dispatch

        dispatch.prim_requires_devices_during_lowering.add(primitive)


def ffi_api() -> tuple[int, int] | None:
    """The FFI API of the installed jaxlib, read from its headers."""
    header = pathlib.Path(ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    if not header.exists():
        return None
    text = header.read_text(encoding="utf-8")
    found = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    return (int(found[0][1]), int(found[1][1])) if found[0] and found[1] else None
