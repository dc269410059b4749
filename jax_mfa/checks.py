"""Checks of Python numbers that a caller gives. An error names the argument, what was seen and what was expected."""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax.numpy as jnp
import numpy as np


def is_integer(x: Any) -> bool:
    """Whether `x` is an integer of Python or numpy; a bool is none."""
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)


def integer(name: str, x: Any, least: int | None = None) -> int:
    """`x` as a Python integer.

    Raises:
      TypeError: for anything but an integer; a bool is none.
      ValueError: for an integer below `least`.
    """
    if not is_integer(x):
        raise TypeError(f"{name} must be an integer, got {x!r}")
    if least is not None and x < least:
        raise ValueError(f"{name} must be at least {least}, got {x}")
    return int(x)


def boolean(name: str, x: Any) -> bool:
    """`x` as a Python bool. Raises `TypeError` for anything but a bool of Python or numpy."""
    if not isinstance(x, (bool, np.bool_)):
        raise TypeError(f"{name} must be a Python bool (it is static), got {x!r}")
    return bool(x)


def number(name: str, x: Any, expected: str = "a number", dtype: Any = None) -> float:
    """`x` as a Python float, infinite where it is beyond all of them.

    Args:
      expected: what `x` should be, in the words of an error.
      dtype: of floating point, in which `x` must be finite; None for no limit.

    Raises:
      TypeError: for anything but a real number; a bool is none.
      ValueError: for a number that is not finite in `dtype`.
    """
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        raise TypeError(f"{name} must be {expected}, got {x!r}")
    try:
        x = float(x)
    except OverflowError:
        x = math.inf if x > 0 else -math.inf
    if dtype is not None and not abs(x) <= float(jnp.finfo(dtype).max):
        raise ValueError(f"{name} must be {expected}, finite in {np.dtype(dtype).name}, got {x}")
    return x
