"""How a problem lies on a mesh, and what does not fit one: an error that names the argument."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_mfa import choice, compat
from jax_mfa.arguments import concrete, known_integers
from jax_mfa.choice import Implementation
from jax_mfa.context_parallel import axes, costs
from jax_mfa.context_parallel import order as orders
from jax_mfa.kv_cache.storage import QuantizedArray
from jax_mfa.problem import Operands, Specification


@dataclasses.dataclass(frozen=True)
class Layout:
    """How sequences, batch rows and heads are split.

    Attributes:
      function: the public function that was called, for errors.
      ring: mesh axis of the ring, None for no ring; heads: mesh axis of the exchange, likewise.
      order: of the tokens along the ring.
      batch_axis, head_axis: mesh axes that split batch rows and heads, for the bits of dropout and whole arrays.
    """

    function: str
    ring: Any
    heads: Any
    order: str
    batch_axis: Any
    head_axis: Any

    def __post_init__(self) -> None:
        orders.check(self.order)
        if self.order != "contiguous" and self.ring is None:
            raise ValueError(f"order must be 'contiguous' without a ring, got {self.order!r}: work is balanced anyway")
        if self.ring is None and self.heads is None:
            axes.names_of(None, "axis_name")
        given = [(self.ring, "axis_name"), (self.heads, "axis_name")]
        given += [(self.batch_axis, "batch_axis"), (self.head_axis, "head_axis")]
        flat = [name for axis, argument in given if axis is not None for name in axes.names_of(axis, argument)]
        if len(flat) != len(set(flat)):
            raise ValueError(f"axis_name, batch_axis and head_axis must be different mesh axes, got {flat}")

    @property
    def sequence(self) -> tuple[Any, ...]:
        """The mesh axes of the sequence, the outer first."""
        given = [x for x in (self.ring, self.heads) if x is not None]
        return tuple(name for x in given for name in (x if isinstance(x, tuple) else (x,)))

    def sizes(self, mesh: Any = None) -> tuple[int, int]:
        """How many devices the ring and the exchange of heads have, of a mesh or of that which this is traced over."""
        size = axes.axis_size if mesh is None else functools.partial(axes.mesh_axis_size, mesh)
        for name in ("batch_axis", "head_axis"):
            if getattr(self, name) is not None:
                size(getattr(self, name), name)
        ring, heads = (1 if axis is None else size(axis, "axis_name") for axis in (self.ring, self.heads))
        return ring, heads

    def own_positions(self, length: int) -> Any:
        """The positions of the `length` tokens that a device holds, int32; within `shard_map`."""
        ring, heads = self.sizes()
        index = jnp.zeros((), jnp.int32) if self.ring is None else lax.axis_index(self.ring)
        own = orders.positions_of(self.order, ring, index, length * heads)
        return own if self.heads is None else lax.dynamic_slice_in_dim(own, lax.axis_index(self.heads) * length, length)


def decided(
    function: str, implementation: Implementation | None, spec: Specification, operands: Operands
) -> str | None:
    """The implementation to take, as `jax_mfa.choice.decided` says it."""
    chosen = choice.decided(implementation, spec, operands)
    if chosen == "reference":
        raise NotImplementedError(
            f"implementation={implementation!r} cannot run {function}: the reference keeps nothing to merge"
        )
    return chosen


def refuse_quantised(function: str, **arguments: Any) -> None:
    """Raises `NotImplementedError` for a query, key or value that is a `QuantizedArray`: plain arrays alone travel."""
    for name, x in arguments.items():
        if isinstance(x, QuantizedArray):
            raise NotImplementedError(f"{function} takes no QuantizedArray, got one as {name}: pass an array")


def check_that_keys_are_split(layout: Layout, arguments: dict[str, Any]) -> None:
    """Refuses arrays that `shard_map` knows to be the same on all devices."""
    account = compat.varying_along(layout.sequence[0])
    for name in ("query", "key", "value"):
        missing = [axis for axis in layout.sequence if account and axis not in compat.varying_of(arguments[name])]
        if missing:
            raise ValueError(
                f"{name} must be split along the mesh axis {missing[0]!r}, of which each device holds its part; it is "
                "the same on all of them"
            )


def check_lengths(layout: Layout, sizes: tuple[int, int], t: int, s: int) -> None:
    multiple = sizes[0] * sizes[1] * orders.chunks_of(layout.order)
    for name, lengths, letter, size in (
        ("query", "query_seq_lengths", "T", t),
        ("key", "key_value_seq_lengths", "S", s),
    ):
        if size % multiple:
            runs = " * 2 runs of tokens" if layout.order == "zigzag" else ""
            raise ValueError(
                f"the length of {name} must be a multiple of {multiple} (devices{runs}), got {letter} = {size}: "
                f"pad it, and give {lengths}"
            )


def check_heads(layout: Layout, devices: int, o: Operands) -> None:
    refusal = costs.undivided(o.query.shape[2], o.key.shape[2], devices)
    if refusal:
        raise ValueError(f"{layout.function} exchanges heads, and {refusal}; ring_attention takes any")


def check_blocks(layout: Layout, sizes: tuple[int, int], block: tuple[int, int] | None, t: int, s: int) -> None:
    """Refuses blocks of a mask that are cut through, of t rows and s columns on each device."""
    if block is None:
        return
    chunks = orders.chunks_of(layout.order)
    rows = math.gcd(t, t * sizes[1] // chunks) if math.prod(sizes) > 1 else 0
    columns = s * sizes[1] // chunks if sizes[0] > 1 else 0
    for name, size, own in (("query", block[0], rows), ("key", block[1], columns)):
        if own % size:
            raise ValueError(
                f"block_mask must have blocks that no part of {name} cuts through: parts have {own} tokens, blocks are "
                f"{list(block)}"
            )


def in_order(layout: Layout, positions: Any, length: int, devices: int | None = None) -> Any:
    """Whether positions `[T]` are those of the order: of what a device holds, or of all tokens over so many devices.

    Raises:
      ValueError: where positions of all tokens are known to be others; and for another shape.
    """
    positions = known_integers("positions", positions, -(2**31), 2**31 - 1, "integers [T]")
    if positions.shape != (length,):
        raise ValueError(f"positions must have shape [T] = [{length}], got {list(positions.shape)}")
    if devices is None:
        return (layout.own_positions(length) == positions).all()
    wanted, values = orders.permutation(layout.order, length, devices), concrete(positions)
    if values is not None and (wanted != values).any():
        place = np.flatnonzero(wanted != values)[0]
        raise ValueError(
            f"positions must be those of order={layout.order!r} over {devices} devices: at place {place} token "
            f"{wanted[place]} was expected, got {values[place]} (see jax_mfa.zigzag)"
        )
    return True
