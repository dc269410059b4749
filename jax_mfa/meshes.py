"""Axes of a mesh, as functions within `shard_map` see them: their sizes, and which arrays vary along them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any

import jax
from jax import lax

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
