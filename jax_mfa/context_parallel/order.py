"""Which tokens a device holds: the order of tokens along a sequence that is split over devices.

*contiguous*: device i of n holds part i of n, in order. Under causality the last device then has n times the work of
the first. *zigzag*: of 2n parts device i holds parts i and 2n − 1 − i, so that all have the same work (as in Llama 3,
arXiv:2407.21783, section 3.3.2). Nothing here knows attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_mfa import checks
from jax_mfa.arguments import as_array

if TYPE_CHECKING:
    from jax_mfa.typing import Shaped

Order: TypeAlias = Literal["contiguous", "zigzag"]
ORDERS: tuple[str, ...] = ("contiguous", "zigzag")


def check(order: Any) -> None:
    """Raises `ValueError` for what is no order."""
    if not isinstance(order, str) or order not in ORDERS:
        raise ValueError(f"order must be one of {ORDERS}, got {checks.seen(order)}")


def chunks_of(order: str) -> int:
    """How many runs of consecutive tokens a device holds."""
    return 2 if order == "zigzag" else 1


def chunk_index(order: str, devices: int, device: Any, chunk: Any) -> Any:
    """Which of all `devices · chunks_of(order)` runs is the `chunk`-th of a device; integers, of numpy or JAX too."""
    if order == "contiguous":
        return device
    traced = any(isinstance(x, jax.Array) for x in (device, chunk))
    return (jnp if traced else np).where(chunk == 0, device, 2 * devices - 1 - device)


def zigzag_permutation(length: int, devices: int, name: str = "length") -> np.ndarray:
    """Which token stands where: place p of a sequence in zigzag order holds token `zigzag_permutation(...)[p]`."""
    checks.integer("devices", devices, least=1)
    if length % (2 * devices):
        raise ValueError(
            f"{name} must have a multiple of {2 * devices} tokens in zigzag order over {devices} devices, got {length}"
        )
    runs = np.arange(length).reshape(2 * devices, -1)
    return np.concatenate([runs[[i, 2 * devices - 1 - i]].reshape(-1) for i in range(devices)])


def permutation(order: str, length: int, devices: int) -> np.ndarray:
    """Which token stands at which place of a whole sequence in this order."""
    return np.arange(length) if order == "contiguous" else zigzag_permutation(length, devices)


def zigzag(x: Shaped[ArrayLike, "*shape"], devices: int, axis: int = 1) -> Shaped[Array | np.ndarray, "*shape"]:
    """An array in the order of tokens as one in zigzag order, for `order="zigzag"`.

    Args:
      x: any array; its `axis` counts tokens (or equal blocks of them, as a block mask does). Every argument with such
        an axis must be brought into the order: queries, keys, values, segment ids, both axes of a mask or bias.
      devices: over how many devices the sequence will be split.
      axis: of tokens.

    Returns:
      of the shape and dtype of x; of numpy for what is of numpy.

    Raises:
      ValueError: where the length is no multiple of 2 · devices.
    """
    return _taken(x, devices, axis, inverse=False)


def unzigzag(x: Shaped[ArrayLike, "*shape"], devices: int, axis: int = 1) -> Shaped[Array | np.ndarray, "*shape"]:
    """The inverse of `zigzag`."""
    return _taken(x, devices, axis, inverse=True)


def _taken(x: Any, devices: int, axis: int, inverse: bool) -> Any:
    if not isinstance(x, (np.ndarray, jax.Array)):
        x = as_array("x", x, "fibc", "an array")
    if not -x.ndim <= checks.integer("axis", axis) < x.ndim:
        raise ValueError(f"axis must be one of x, whose shape is {list(x.shape)}, got {axis}")
    size = len(zigzag_permutation(x.shape[axis], devices, "x, along its axis,")) // (2 * devices)
    runs = zigzag_permutation(2 * devices, devices)
    runs = np.argsort(runs) if inverse else runs
    numpy = np if isinstance(x, np.ndarray) else jnp
    cut = lambda run: x[(slice(None),) * (axis % x.ndim) + (slice(run * size, (run + 1) * size),)]
    return numpy.concatenate([cut(int(run)) for run in runs], axis=axis)  # no gather: whole runs


def positions_of(order: str, devices: int, device: Any, length: int) -> Any:
    """The positions of the `length` tokens that a device holds, int32, of numpy for a known device."""
    runs = chunks_of(order)
    numpy = jnp if isinstance(device, jax.Array) else np
    index = numpy.stack([numpy.asarray(chunk_index(order, devices, device, c), np.int32) for c in range(runs)])
    size = length // runs
    return (index[:, None] * size + np.arange(size, dtype=np.int32)[None]).reshape(-1)
