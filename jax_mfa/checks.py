"""Checks of what a caller gives beside arrays: an error names the argument, what was seen and what was expected."""

from __future__ import annotations

import contextlib
import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def seen(x: Any) -> str:
    """`x` in the words of an error, however large it is."""
    if not isinstance(x, type) and hasattr(x, "dtype") and hasattr(x, "shape") and len(x.shape):
        return f"{type(x).__name__} {x.dtype}{list(x.shape)}"
    text = repr(x)
    return text if len(text) <= 80 else f"{text[:60]}... ({type(x).__name__})"


def fits(name: str, x: Any, right: bool, expected: str) -> None:
    """Raises `ValueError` for an array whose shape is not `right`, in the words of what was `expected`."""
    if not right:
        raise ValueError(f"{name} must have shape {expected}, got {list(x.shape)}")


def same_shape(name: str, x: Any, of: str, model: Any, axis: int, but: str) -> None:
    """Raises `ValueError` for an array that differs from another in more than the size of one axis, `but` for which."""
    others = lambda shape: (*shape[:axis], *shape[len(shape) + axis + 1 :])
    if others(x.shape) != others(model.shape):
        raise ValueError(
            f"{name} must have the shape of {of}, {list(model.shape)}, but for the {but}, got {list(x.shape)}"
        )


def is_integer(x: Any) -> bool:
    """Whether `x` is an integer of Python or numpy; a bool is none."""
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)


def integer(name: str, x: Any, least: int | None = None, most: int | None = None) -> int:
    """`x` as a Python integer. Raises `TypeError` for anything else, `ValueError` where not in least..most."""
    if not is_integer(x):
        raise TypeError(f"{name} must be an integer, got {seen(x)}")
    if least is not None and x < least:
        raise ValueError(f"{name} must be at least {least}, got {x}")
    if most is not None and x > most:
        raise ValueError(f"{name} must be at most {most}, got {x}")
    return int(x)


def sequence(name: str, x: Any, expected: str) -> list[Any]:
    """`x` as a list. Raises `TypeError` for what has no order, and for text."""
    if isinstance(x, (np.ndarray, jax.Array)):
        right = x.ndim == 1 and not isinstance(x, jax.core.Tracer)
    else:
        right = isinstance(x, Iterable) and not isinstance(x, (str, bytes, Mapping, set, frozenset))
    if not right:
        raise TypeError(f"{name} must be a sequence of {expected}, got {seen(x)}")
    return list(np.asarray(x) if isinstance(x, jax.Array) else x)


def integers(name: str, x: Any, least: int | None = None) -> list[int]:
    """`x` as Python integers, in a list. Raises as `sequence` and `integer` do."""
    return [integer(name, i, least) for i in sequence(name, x, "integers")]


def floating_dtype(name: str, x: Any, among: tuple[str, ...] = ()) -> np.dtype[Any]:
    """`x` as a dtype of floating point, one `among` these names if there are any. Raises `TypeError` for others."""
    found = None
    with contextlib.suppress(TypeError):
        found = jnp.dtype(x) if isinstance(x, (str, type, np.dtype)) else None
    if found is None or not jnp.issubdtype(found, jnp.floating) or (among and found.name not in among):
        expected = f"one of {', '.join(among)}" if among else "a floating dtype"
        raise TypeError(f"{name} must be {expected}, got {seen(x)}")
    return found


def boolean(name: str, x: Any) -> bool:
    """`x` as a Python bool. Raises `TypeError` for anything but a bool of Python or numpy."""
    if not isinstance(x, (bool, np.bool_)):
        raise TypeError(f"{name} must be a Python bool (it is static), got {seen(x)}")
    return bool(x)


def number(name: str, x: Any, expected: str = "a number", dtype: Any = None) -> float:
    """`x` as a Python float, infinite where it is beyond all of them.

    Raises `TypeError` for anything but a real number, `ValueError` for one that is not finite in `dtype`, if given.
    """
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        raise TypeError(f"{name} must be {expected}, got {seen(x)}")
    try:
        x = float(x)
    except OverflowError:
        x = math.inf if x > 0 else -math.inf
    if dtype is not None and not abs(x) <= float(jnp.finfo(dtype).max):
        raise ValueError(f"{name} must be {expected}, finite in {np.dtype(dtype).name}, got {x}")
    return x
