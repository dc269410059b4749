"""What versions of JAX call differently, have not yet, or have no more: from 0.4.38 on."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

ffi: Any
if hasattr(jax, "ffi"):
    ffi = jax.ffi
else:  # before 0.5
    ffi = importlib.import_module("jax.extend.ffi")

HAS_TYPES = hasattr(jax, "typeof")  # with what varies along which axis of a mesh
HAS_EXPLICIT_SHARDING = hasattr(jax.sharding, "auto_axes")


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
    """`jax.shard_map` without its checks of what varies over devices."""
    new: Any = getattr(jax, "shard_map", None)
    if new is not None:
        return new(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    from jax.experimental.shard_map import shard_map as old

    return old(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_rep=False)


def varying(aval: Any) -> frozenset[Any]:
    """The mesh axes along which `shard_map` lets a value of this type vary; JAX has moved the attribute."""
    kind = getattr(aval, "mat", None)
    return kind.varying if kind is not None else getattr(aval, "vma", frozenset())


def marked(x: Any, axes: tuple[str, ...]) -> Any:
    """`x`, which varies along none of these mesh axes, as one that does."""
    if hasattr(lax, "pcast"):
        return lax.pcast(x, axes, to="varying")
    old: Any = lax
    return old.pvary(x, axes)


def register_with_shard_map(*primitives: Any) -> None:
    """Before 0.6 `shard_map` asks each primitive how it maps replication: as any elementwise one does."""
    try:
        old: Any = importlib.import_module("jax.experimental.shard_map")
        for primitive in primitives:
            old.register_standard_check(primitive)
            old.register_standard_rewrite(primitive)
    except (ImportError, AttributeError):  # newer JAX reads the types of the results
        pass
