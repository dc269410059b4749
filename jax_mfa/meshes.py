"""Axes of a mesh within `shard_map`: their sizes, and which arrays vary along them. And meshes with explicit axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from jax_mfa import checks, versions


def names_of(axis: Any, argument: str) -> tuple[Any, ...]:
    """The names of a mesh axis, or of several together. Raises `TypeError`, naming the `argument`, for no names."""
    names = axis if isinstance(axis, tuple) else (axis,)
    if not names or not all(isinstance(name, Hashable) and name is not None for name in names):
        raise TypeError(f"{argument} must be the name of a mesh axis, or a tuple of names, got {checks.seen(axis)}")
    return names


def axis_size(axis: Any, argument: str) -> int:
    """How many devices a mesh axis, or several together, has where this is traced.

    Raises:
      ValueError: naming the `argument`, where no such axis is there.
    """
    names_of(axis, argument)
    try:
        return int(lax.psum(1, axis))
    except (NameError, ValueError) as error:
        raise ValueError(
            f"{argument} must name an axis of the mesh that this is traced over, got {axis!r}: call inside shard_map, "
            f"or give mesh ({error})"
        ) from None


def mesh_axis_size(mesh: Any, axis: Any, argument: str) -> int:
    """How many devices a mesh has along an axis, or several.

    Raises:
      TypeError: where the mesh is none.
      ValueError: naming the `argument`, where the mesh has no such axis.
    """
    if not isinstance(getattr(mesh, "shape", None), Mapping):
        raise TypeError(f"mesh must be a jax.sharding.Mesh or None, got {checks.seen(mesh)}")
    names = names_of(axis, argument)
    for name in names:
        if name not in mesh.shape:
            raise ValueError(f"{argument} must name an axis of the mesh, of {list(mesh.shape)}, got {name!r}")
    return math.prod(mesh.shape[name] for name in names)


def varying_of(tree: Any) -> frozenset[Any]:
    """The mesh axes along which some array of a tree varies, as far as `shard_map` keeps account."""
    if not versions.HAS_TYPES:
        return frozenset()
    return frozenset().union(*(versions.varying(jax.typeof(x)) for x in jax.tree.leaves(tree)))


def varying_along(*axes: Any) -> frozenset[Any]:
    """These mesh axes (or tuples of them, or None), as far as `shard_map` keeps account of what varies."""
    if not versions.HAS_TYPES:
        return frozenset()
    return varying_of([lax.axis_index(axis) for axis in axes if axis is not None])


def vary(tree: Any, axes: frozenset[Any]) -> Any:
    """Marks arrays as varying along all of these mesh axes."""

    def mark(x: Any) -> Any:
        missing = tuple(sorted(axes - varying_of(x)))
        return versions.marked(x, missing) if missing else x

    return jax.tree.map(mark, tree)


def without_types(run: Callable[..., Any], arguments: dict[str, Any], results: Any) -> Any:
    """`run(arguments)` with no sharding in the types of arrays inside, and `results`, specs, in those of its results.

    The mesh is the one that the caller has set, else that of the arrays.
    """
    mesh = _explicit_mesh(arguments)
    if mesh is None:
        return run(arguments)
    placed = {n: x for n, x in arguments.items() if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(x))}
    axes = tuple(name for name, kind in zip(mesh.axis_names, mesh.axis_types) if "Explicit" in str(kind))
    inside = jax.sharding.auto_axes(
        lambda placed: run({**arguments, **placed}),
        axes=axes,
        out_sharding=jax.tree.map(lambda spec: NamedSharding(mesh, spec), results, is_leaf=_is_spec),
    )
    return inside(placed)


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _explicit_mesh(arguments: Any) -> Any:
    """The mesh that makes sharding part of types: the one that the caller has set, else that of an array; or None."""
    if not versions.HAS_EXPLICIT_SHARDING:
        return None
    meshes = [jax.sharding.get_abstract_mesh()]
    if meshes[0].empty:
        meshes = [_sharding(x).mesh for x in jax.tree.leaves(arguments) if isinstance(x, jax.Array)]
    return next((mesh for mesh in meshes if any("Explicit" in str(kind) for kind in mesh.axis_types)), None)


def _sharding(x: Array) -> Any:
    return jax.typeof(x).sharding


def spec_of(x: Any) -> PartitionSpec:
    """How the type of an array says that each of its axes is split."""
    if not isinstance(x, jax.Array) or not versions.HAS_EXPLICIT_SHARDING:
        return PartitionSpec(*(None,) * np.ndim(x))
    spec = _sharding(x).spec
    return PartitionSpec(*spec, *(None,) * (x.ndim - len(spec)))
