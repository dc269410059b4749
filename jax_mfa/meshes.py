"""What versions of JAX call by different names: `shard_map`, the size of a mesh axis, types that vary by device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
from jax import lax


def shard_map(fun: Callable, mesh, in_specs, out_specs) -> Callable:
    """`jax.shard_map` without its checks of what varies over devices."""
    new: Any = getattr(jax, "shard_map", None)
    if new is not None:
        return new(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    from jax.experimental.shard_map import shard_map as old

    return old(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_rep=False)


def axis_size(axis, argument: str) -> int:
    """How many devices a mesh axis, or several together, has where this is traced.

    Raises:
      ValueError: naming the `argument`, where no such axis is there.
    """
    try:
        return int(lax.psum(1, axis))
    except NameError as error:
        raise ValueError(
            f"{argument} must name an axis of the mesh that this is traced over, got {axis!r}: call inside shard_map, "
            f"or give mesh ({error})"
        ) from None


def mesh_axis_size(mesh, axis, argument: str) -> int:
    """How many devices a mesh has along an axis, or several.

    Raises:
      ValueError: naming the `argument`, where the mesh has no such axis.
    """
    names = axis if isinstance(axis, tuple) else (axis,)
    for name in names:
        if name not in mesh.shape:
            raise ValueError(f"{argument} must name an axis of the mesh, of {list(mesh.shape)}, got {name!r}")
    return math.prod(mesh.shape[name] for name in names)


def varying(aval) -> frozenset:
    """The mesh axes along which `shard_map` lets a value of this type vary; JAX has moved the attribute."""
    kind = getattr(aval, "mat", None)
    return kind.varying if kind is not None else getattr(aval, "vma", frozenset())


def varying_of(tree) -> frozenset:
    """The mesh axes along which some array of a tree varies, as far as `shard_map` keeps account."""
    if not hasattr(jax, "typeof"):
        return frozenset()
    return frozenset().union(*(varying(jax.typeof(x)) for x in jax.tree.leaves(tree)))


def varying_along(*axes) -> frozenset:
    """These mesh axes (or tuples of them, or None), as far as `shard_map` keeps account of what varies."""
    if not hasattr(jax, "typeof"):
        return frozenset()
    return varying_of([lax.axis_index(axis) for axis in axes if axis is not None])


def vary(tree, axes: frozenset):
    """Marks arrays as varying along all of these mesh axes."""

    def mark(x):
        missing = tuple(sorted(axes - varying_of(x)))
        if not missing:
            return x
        return lax.pcast(x, missing, to="varying") if hasattr(lax, "pcast") else lax.pvary(x, missing)

    return jax.tree.map(mark, tree)
