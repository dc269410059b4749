"""How a sequence lies on the devices of a mesh, and errors that name the argument where it does not fit.

Tokens have one of two orders. *contiguous*: device i of n holds part i of n. Under causality the last device then has n
times the work of the first. *zigzag*: of 2n parts device i holds parts i and 2n − 1 − i, so that all have the same work
(as in Llama 3, arXiv:2407.21783, section 3.3.2). Nothing here knows how attention is computed.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from jax_mfa import checks, compat
from jax_mfa.arguments import as_array, concrete, known_integers, unwrapped
from jax_mfa.kv_cache.storage import QuantizedArray

if TYPE_CHECKING:
    from jax_mfa.typing import Shaped

Order: TypeAlias = Literal["contiguous", "zigzag"]
ORDERS: tuple[str, ...] = get_args(Order)


# --- axes of a mesh


def names_of(axis: Any, argument: str) -> tuple[Any, ...]:
    """The names of a mesh axis, or of several together. Raises `TypeError`, naming the `argument`, for no names."""
    names = axis if isinstance(axis, tuple) else (axis,)
    if not names or not all(isinstance(name, Hashable) and name is not None for name in names):
        raise TypeError(f"{argument} must be the name of a mesh axis, or a tuple of names, got {checks.seen(axis)}")
    return names


def axis_size(axis: Any, argument: str, mesh: Any = None) -> int:
    """How many devices a mesh axis, or several together, has: of a mesh, or by default where this is traced.

    Raises `TypeError` for no name or no mesh, and `ValueError`, naming the `argument`, where no such axis is there.
    """
    if mesh is not None and not isinstance(getattr(mesh, "shape", None), Mapping):
        raise TypeError(f"mesh must be a jax.sharding.Mesh or None, got {checks.seen(mesh)}")
    names = names_of(axis, argument)
    if mesh is None:
        try:
            return int(lax.psum(1, axis))
        except (NameError, ValueError) as error:
            raise ValueError(
                f"{argument} must name an axis of the mesh that this is traced over, got {axis!r}: call inside "
                f"shard_map, or give mesh ({error})"
            ) from None
    for name in names:
        if name not in mesh.shape:
            raise ValueError(f"{argument} must name an axis of the mesh, of {list(mesh.shape)}, got {name!r}")
    return math.prod(mesh.shape[name] for name in names)


# --- order of tokens


def check_order(order: Any) -> None:
    """Raises `ValueError` for an unknown order."""
    if not isinstance(order, str) or order not in ORDERS:
        raise ValueError(f"order must be one of {ORDERS}, got {checks.seen(order)}")


def chunks_of(order: str) -> int:
    """How many runs of consecutive tokens a device holds."""
    return 2 if order == "zigzag" else 1


def chunk_index(order: str, devices: int, device: Any, chunk: Any) -> Any:
    """Which of all `devices · chunks_of(order)` runs is the `chunk`-th of a device; integers, or arrays of them."""
    return device if order == "contiguous" else device + chunk * (2 * devices - 1 - 2 * device)


def positions_of(order: str, devices: int, device: Any, length: int) -> Any:
    """The positions of the `length` tokens that a device holds, int32, of numpy for a known device."""
    chunks = np.arange(chunks_of(order), dtype=np.int32)[:, None]
    size = length // len(chunks)
    return (chunk_index(order, devices, device, chunks) * size + np.arange(size, dtype=np.int32)).reshape(-1)


def permutation(order: str, length: int, devices: int, name: str = "length") -> np.ndarray:
    """Which token stands at which place of a whole sequence in this order. Raises `ValueError`, naming the length."""
    if order == "contiguous":
        return np.arange(length)
    checks.integer("devices", devices, least=1)
    if length % (2 * devices):
        raise ValueError(
            f"{name} must have a multiple of {2 * devices} tokens in zigzag order over {devices} devices, got {length}"
        )
    return np.concatenate([positions_of(order, devices, i, length // devices) for i in range(devices)])


def zigzag(x: Shaped[ArrayLike, "*shape"], devices: int, axis: int = 1) -> Shaped[Array | np.ndarray, "*shape"]:
    """An array in the order of tokens as one in zigzag order, for `order="zigzag"`.

    Args:
      x: any array; its `axis` counts tokens (or equal blocks of them, as a block mask does). Every argument with such
        an axis must be brought into the order: queries, keys, values, segment ids, both axes of a mask or bias.
      devices: over how many devices the sequence will be split.
      axis: of tokens.

    Returns:
      of the shape and dtype of x; a numpy array for one of numpy.

    Raises:
      ValueError: where the length is no multiple of 2 · devices.
    """
    return _reordered(x, devices, axis, lambda runs: runs)


def unzigzag(x: Shaped[ArrayLike, "*shape"], devices: int, axis: int = 1) -> Shaped[Array | np.ndarray, "*shape"]:
    """The inverse of `zigzag`."""
    return _reordered(x, devices, axis, np.argsort)


def _reordered(x: Any, devices: int, axis: int, taken: Any) -> Any:
    """An array whose runs of tokens are those that `taken` makes of the zigzag order of runs."""
    if not isinstance(x, (np.ndarray, jax.Array)):
        x = as_array("x", x, "fibc", "an array")
    if not -x.ndim <= checks.integer("axis", axis) < x.ndim:
        raise ValueError(f"axis must be one of x, whose shape is {list(x.shape)}, got {axis}")
    size = len(permutation("zigzag", x.shape[axis], devices, "x, along its axis,")) // (2 * devices)
    before, numpy = (slice(None),) * (axis % x.ndim), np if isinstance(x, np.ndarray) else jnp
    runs = [int(run) * size for run in taken(permutation("zigzag", 2 * devices, devices))]
    return numpy.concatenate([x[(*before, slice(run, run + size))] for run in runs], axis=axis)  # whole runs: no gather


# --- a call's layout


@dataclasses.dataclass(frozen=True)
class Layout:
    """How sequences, batch entries and heads are split."""

    function: str  # the public function that was called, for errors
    ring: Any  # mesh axis of the ring, None for no ring
    heads: Any  # mesh axis of the exchange of heads, likewise
    order: str = "contiguous"
    batch_axis: Any = None  # mesh axes that split batch entries and heads, for the bits of dropout and whole arrays
    head_axis: Any = None
    mesh: Any = None  # of a call with whole arrays; None within `shard_map`

    def __post_init__(self) -> None:
        check_order(self.order)
        if self.order != "contiguous" and self.ring is None:
            raise ValueError(f"order must be 'contiguous' without a ring, got {self.order!r}: work is balanced anyway")
        names = list(self.sequence or names_of(None, "axis_name"))
        for argument in ("batch_axis", "head_axis"):
            axis = getattr(self, argument)
            names += [] if axis is None else names_of(axis, argument)
        if len(names) != len(set(names)):
            raise ValueError(f"axis_name, batch_axis and head_axis must be different mesh axes, got {names}")

    @property
    def sequence(self) -> tuple[Any, ...]:
        """The mesh axes of the sequence, the outer first."""
        axes = [axis for axis in (self.ring, self.heads) if axis is not None]
        return tuple(name for axis in axes for name in names_of(axis, "axis_name"))

    def sizes(self) -> tuple[int, int, int, int]:
        """How many devices split batch entries, heads, the ring and the exchange of heads; raises as `axis_size`."""
        along = lambda axis, argument: 1 if axis is None else axis_size(axis, argument, self.mesh)
        batch, heads = along(self.batch_axis, "batch_axis"), along(self.head_axis, "head_axis")
        return batch, heads, along(self.ring, "axis_name"), along(self.heads, "axis_name")

    def positions(self, length: int) -> Any:
        """The positions `[length]` of the tokens that a device holds, int32; with a mesh those of all, of numpy."""
        *_, ring, heads = self.sizes()
        if self.mesh is not None:
            return permutation(self.order, length, ring)
        own = positions_of(self.order, ring, 0 if self.ring is None else lax.axis_index(self.ring), length * heads)
        return own if self.heads is None else lax.dynamic_slice_in_dim(own, lax.axis_index(self.heads) * length, length)

    def has_positions(self, positions: Any, length: int) -> Any:
        """Whether positions `[T]` are those of the order. Raises `ValueError` where all are known to be others."""
        positions = known_integers("positions", positions, -(2**31), 2**31 - 1, "integers [T]")
        checks.fits("positions", positions, positions.shape == (length,), f"[T] = [{length}]")
        expected, values = self.positions(length), None if self.mesh is None else concrete(positions)
        if values is not None and (expected != values).any():
            place = np.flatnonzero(expected != values)[0]
            raise ValueError(
                f"positions must be those of order={self.order!r} over {self.sizes()[2]} devices: at place {place} "
                f"token {expected[place]} was expected, got {values[place]} (see jax_mfa.zigzag)"
            )
        return (expected == positions).all()

    def check_lengths(self, t: int, s: int, mask_block: tuple[int, int] | None) -> None:
        """Refuses whole sequences of t rows and s columns that devices do not divide, or that cut blocks of a mask."""
        (*_, ring, heads), chunks = self.sizes(), chunks_of(self.order)
        devices = ring * heads
        runs = " * 2 runs of tokens" if chunks == 2 else ""
        for name, lengths, size in (("query", "query_seq_lengths", t), ("key", "key_value_seq_lengths", s)):
            if size % (devices * chunks):
                raise ValueError(
                    f"the length of {name} must be a multiple of {devices * chunks} (devices{runs}), got "
                    f"{'T' if name == 'query' else 'S'} = {size}: pad it, and give {lengths}"
                )
        rows = math.gcd(t // devices, t // (ring * chunks)) if devices > 1 else 0
        columns = s // (ring * chunks) if ring > 1 else 0
        blocks = mask_block or (1, 1)
        for name, part, block in zip(("query", "key"), (rows, columns), blocks):
            if part % block:
                raise ValueError(
                    f"block_mask must have blocks that no part of {name} cuts through: parts have {part} tokens, "
                    f"blocks are {list(blocks)}"
                )

    def check_that_keys_are_split(self, arrays: Mapping[str, Any]) -> None:
        """Refuses a query, key or value that `shard_map` knows to be the same on all devices."""
        known = compat.varying_along(self.sequence[0])
        for name, axis in itertools.product(("query", "key", "value"), self.sequence):
            if known and axis not in compat.varying_of(arrays[name]):
                raise ValueError(
                    f"{name} must be split along the mesh axis {axis!r}, of which each device holds its part; it is "
                    "the same on all of them"
                )


def undivided(heads: int, key_heads: int, devices: int) -> str:
    """Why heads cannot be exchanged over so many devices; empty where they can."""
    if heads % devices:
        return f"{devices} devices do not divide N = {heads} heads"
    if key_heads % devices and devices % key_heads:
        return f"{devices} devices neither divide K = {key_heads} key heads nor are a multiple of them"
    return ""


def refuse_quantised(function: str, arguments: Mapping[str, Any]) -> None:
    """Raises `NotImplementedError` for a `QuantizedArray`, or values within keys: plain arrays alone travel."""
    if arguments.get("value_size") is not None:
        raise NotImplementedError(f"{function} takes no value_size: pass value = key[..., :value_size]")
    for name, x in arguments.items():
        if isinstance(unwrapped(x), QuantizedArray):
            raise NotImplementedError(f"{function} takes no QuantizedArray, got one as {name}: pass an array")
