"""Axes of a mesh by name, and how many devices they have."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any

from jax import lax

from jax_mfa import checks


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
