"""Attention over a ring of devices: each holds a part of the queries, and the keys and values travel.

With n devices, device i meets in turn the keys of devices i, i − 1, … (Ring Attention, arXiv:2310.01889, section 3);
the next ones are under way while the present ones are computed with. Partial results are merged by row maximum and sum
in float32. The backward pass sends keys and values around once more, and with them the float32 sums of their gradients:
each part of it is computed from the output, maxima and sums of whole rows, so it is a part of the whole gradient, and
nothing but a device's own rows is kept. Where a window or an offset is known, keys that no device sees are not sent.

Here are the loops alone. What computes one part is a parameter, for `primitives` and `sharding` both run these loops.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_mfa import partial
from jax_mfa.context_parallel import order as orders
from jax_mfa.problem import Operands, Specification, accumulation_dtype, counted_from

# what of the operands travels
_TRAVELLING = ("key", "value", "key_segment_ids")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Whose keys a device computes with, in turn: those of device i − start, i − start − 1, …; `hops` steps on."""

    start: int
    hops: int

    @property
    def permutes(self) -> int:
        """How often keys and values are sent in the forward pass."""
        return self.hops + (self.start != 0)


@dataclasses.dataclass(frozen=True)
class Ring:
    """The static facts of attention over a ring.

    Attributes:
      spec: of the whole sequence.
      axis: the mesh axis (or axes) along which the sequence is split.
      devices: along the axis.
      order: of the tokens, see `order`.
      implementation: as in `primitives.attention`.
    """

    spec: Specification
    axis: Any
    devices: int
    order: str = "contiguous"
    implementation: str | None = None

    @property
    def chunks(self) -> int:
        return orders.chunks_of(self.order)

    def start_of(self, device: Any, chunk: Any, size: int) -> Array:
        """The position of the first token of a chunk of `size` tokens."""
        return orders.chunk_index(self.order, self.devices, device, chunk) * size

    def schedule(self, rows: int, columns: int, offset_is_known: bool = True) -> Schedule:
        """The shortest walk over the devices whose keys some device may see, as far as that is known.

        Args:
          rows, columns: tokens of queries and keys on each device.
        """
        n = self.devices
        if not offset_is_known or self.spec.band == (None, None):
            return Schedule(0, n - 1)
        rows, columns = rows // self.chunks, columns // self.chunks
        index, chunk = np.arange(n, dtype=np.int64)[:, None], np.arange(self.chunks)[None]
        first_row = self.start_of(index, chunk, rows)[:, :, None, None]
        first_column = self.start_of(index, chunk, columns)[None, None]
        offset = self.spec.query_offset
        meets = np.asarray(_in_band(self.spec, first_row, rows, first_column, columns, offset, offset)).any((1, 3))
        distances = {int(i - j) % n for i, j in zip(*np.nonzero(meets))}
        walks = [Schedule(start, max((d - start) % n for d in distances)) for start in {0, *distances} if distances]
        return min(walks, key=lambda walk: (walk.permutes, walk.start), default=Schedule(0, 0))


def _in_band(
    spec: Specification, row: Any, rows: int, column: Any, columns: int, least_offset: Any, most_offset: Any
) -> Any:
    """Whether some of the rows may see some of the columns, by causality and window; True where nothing is hidden."""
    left, right = spec.band
    sees: Any = True
    if right is not None:
        sees = column - (row + (rows - 1) + most_offset) <= right
    if left is not None:
        sees = sees & ((row + least_offset) - (column + (columns - 1)) <= left)
    return sees


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where chunks begin: rows and columns among those that are here, the columns among all as they are stored, and the
    positions of both. What depends on the device is a function: XLA's partitioner, of JAX 0.4, takes no index of a
    device that nobody uses.
    """

    row: Any
    column: Any
    column_of_all: Callable[[], Any]
    row_position: Callable[[], Any]
    column_position: Callable[[], Any]


class _Pairs:
    """One device's rows and the columns that it holds at the moment, chunk by chunk."""

    def __init__(self, ring: Ring, operands: Operands) -> None:
        self.ring, self.operands = ring, operands
        self.rows, self.columns = (x.shape[1] // ring.chunks for x in (operands.query, operands.key))

    def over(self, source: Any, held: dict[str, Any], visit: Callable[..., Any], state: Any) -> Any:
        """`visit(problem, place, state)` for each chunk of rows and of columns that may see each other.

        Args:
          source: gives the device that the columns belong to.
          held: the travelling operands that are here.
        """
        ring, chunks = self.ring, self.ring.chunks

        def turn(pair: Any, state: Any) -> Any:
            a, b = pair // chunks, pair % chunks
            place = _Place(
                row=a * self.rows,
                column=b * self.columns,
                column_of_all=lambda: (source() * chunks + b) * self.columns,
                row_position=lambda: ring.start_of(lax.axis_index(ring.axis), a, self.rows),
                column_position=lambda: ring.start_of(source(), b, self.columns),
            )
            go = lambda state: visit(self.problem(held, place), place, state)
            sees = self.may_see(place)
            return go(state) if sees is True else lax.cond(sees, go, lambda state: state, state)

        return turn(0, state) if chunks == 1 else lax.fori_loop(0, chunks * chunks, turn, state)

    def may_see(self, place: _Place) -> Any:
        """Whether the chunks at a place may see each other; True where that is known."""
        o, spec = self.operands, self.ring.spec
        least = most = spec.query_offset
        if o.query_offset is not None:
            least, most = o.query_offset.min(), o.query_offset.max()
        sees: Any = True
        if spec.band != (None, None):
            starts = place.row_position(), self.rows, place.column_position(), self.columns
            sees = _in_band(spec, *starts, least, most)
        if o.key_lengths is not None:
            sees = sees & (place.column_position() < o.key_lengths.max())
        if o.query_lengths is not None:
            sees = sees & (place.row_position() < o.query_lengths.max())
        return sees

    def cut(self, o: Operands, held: dict[str, Any], place: _Place) -> Operands:
        """What operands, or arrays like them, have at a place; what counts tokens still counts them from the first."""
        rows, columns = self.rows, self.columns
        block_rows, block_columns = self.ring.spec.mask_block or (1, 1)

        def of_rows(x: Any) -> Array | None:
            return None if x is None else slice_axis(x, place.row, rows, 1)

        # of all columns, in the order as stored
        def scores(x: Any, row_block: int = 1, column_block: int = 1) -> Array | None:
            if x is None:
                return None
            x = slice_axis(x, place.row // row_block, rows // row_block, 2)
            return slice_axis(x, place.column_of_all() // column_block, columns // column_block, 3)

        return o._replace(
            query=of_rows(o.query),
            **{name: slice_axis(x, place.column, columns, 1) for name, x in held.items()},
            bias=scores(o.bias),
            mask=scores(o.mask),
            block_mask=scores(o.block_mask, block_rows, block_columns),
            query_segment_ids=of_rows(o.query_segment_ids),
            key_ranges=of_rows(o.key_ranges),
            sinks=None,  # those of whole rows
        )

    def problem(self, held: dict[str, Any], place: _Place) -> tuple[Specification, Operands]:
        """The rows of one chunk against the columns of another, as a problem of its own."""
        o, spec, rows, columns = self.operands, self.ring.spec, self.rows, self.columns

        row0, column0 = place.row_position, place.column_position

        def length(x: Any, start: Callable[..., Any], most: int) -> Array | None:
            return None if x is None else jnp.clip(x - start(), 0, most)

        # where nothing asks for places, a problem without an offset is the simpler one
        offset = None
        if spec.band != (None, None) or o.alibi_slopes is not None:
            offset = (spec.query_offset if o.query_offset is None else o.query_offset) + (row0() - column0())
            offset = jnp.asarray(offset, jnp.int32).reshape(-1)
        here = self.cut(o, held, place)
        here = here._replace(
            query_offset=offset,
            query_lengths=length(o.query_lengths, row0, rows),
            key_lengths=length(o.key_lengths, column0, columns),
            key_ranges=length(here.key_ranges, column0, columns),
            dropout=None if o.dropout is None else counted_from(o.dropout, row=row0(), column=column0()),
        )
        return dataclasses.replace(spec, query_offset=0), here


def _travelling(operands: Operands) -> dict[str, Any]:
    return {name: getattr(operands, name) for name in _TRAVELLING if getattr(operands, name) is not None}


def _schedule(ring: Ring, o: Operands) -> Schedule:
    return ring.schedule(o.query.shape[1], o.key.shape[1], offset_is_known=o.query_offset is None)


def _walk(
    ring: Ring, schedule: Schedule, travelling: Any, passengers: Any, compute: Callable[..., Any], state: Any
) -> tuple[Any, Any]:
    """Runs `compute(source, travelling, state)` at each stop of the keys' way over the devices.

    Args:
      travelling: what is sent on while it is computed with.
      passengers: zeros; sums that belong to `travelling` and follow it. They are under way during a computation, and
        what that finds is added when they have arrived.
      compute: gives what is to be added to the passengers, and the state.

    Returns:
      The passengers, at home, and the state.
    """
    n, hops = ring.devices, schedule.hops

    def send(tree: Any, by: int) -> Any:
        return jax.tree.map(lambda x: lax.ppermute(x, ring.axis, [(i, (i + by) % n) for i in range(n)]), tree)

    def stop(step: Any, travelling: Any, passengers: Any, state: Any) -> tuple[Any, Any]:
        source = lambda: (lax.axis_index(ring.axis) - schedule.start - step) % n
        found, state = compute(source, travelling, state)
        return jax.tree.map(jnp.add, passengers, found), state

    def turn(step: Any, carry: Any) -> tuple[Any, Any, Any]:
        travelling, passengers, state = carry
        following, arriving = send(travelling, 1), send(passengers, 1)  # under way while this device computes
        return following, *stop(step, travelling, arriving, state)

    if schedule.start:
        travelling = send(travelling, schedule.start)
    if hops == 1:  # nobody is on the way to the first stop
        following = send(travelling, 1)
        passengers, state = stop(0, travelling, passengers, state)
        travelling = following
    elif hops:
        travelling, passengers, state = lax.fori_loop(0, hops, turn, (travelling, passengers, state))
    passengers, state = stop(hops, travelling, send(passengers, 1) if hops else passengers, state)
    home = -(schedule.start + hops) % n
    return (send(passengers, home) if home else passengers), state


# ---------------------------------------------------------------------------------------------------------------------
# Forward


def forward(
    ring: Ring, operands: Operands, attend: Callable[..., Any], vary: Callable[..., Any] = lambda x: x
) -> tuple[Array, Array, Array]:
    """Attention of a device's rows over the columns of all devices, and maximum and sum of each row.

    Args:
      operands: a device's own; of bias and mask its rows with all columns, in the order in which the columns are
        stored; lengths, ranges and offsets count the whole sequence.
      attend: `(spec, operands)` to what `blockwise.forward` returns.
      vary: marks arrays as different on each device, where the types of `shard_map` need to be told.

    Returns:
      as `blockwise.forward`.
    """
    o = operands
    acc = accumulation_dtype(o.query.dtype)
    b, t, n, _ = o.query.shape
    pairs = _Pairs(ring, o)

    def visit(problem: Any, place: Any, state: Any) -> tuple[Array, ...]:
        sums, row_max, row_sum = (slice_axis(x, place.row, pairs.rows, 1) for x in state)
        out, own_max, own_sum = attend(*problem)
        merged = partial.merged((sums, row_max, row_sum), partial.weighed(out, own_max, own_sum, acc))
        return tuple(put_axis(x, new, place.row, 1) for x, new in zip(state, merged))

    def compute(source: Any, held: Any, state: Any) -> tuple[tuple[()], Any]:
        return (), pairs.over(source, held, visit, state)

    empty = jnp.zeros((b, t, n, o.value.shape[-1]), acc), jnp.full((b, t, n), -np.inf, acc), jnp.zeros((b, t, n), acc)
    _, (sums, row_max, row_sum) = _walk(ring, _schedule(ring, o), _travelling(o), (), compute, vary(empty))
    return partial.finished(ring.spec, o, (sums, row_max, row_sum))


# ---------------------------------------------------------------------------------------------------------------------
# Backward


def backward(
    ring: Ring,
    operands: Operands,
    rows: tuple[Any, ...],
    wanted: tuple[str, ...],
    transpose: Callable[..., Any],
    vary: Callable[..., Any] = lambda x: x,
) -> tuple[Any, ...]:
    """Cotangents of the operands named in `wanted`: of what a device holds of them, or for arrays that serve all rows
    its own rows' part.

    Args:
      operands, vary: as in `forward`.
      rows: out, row_max and row_sum as `forward` gave them, d_out and d_lse.
      transpose: `(spec, operands, rows, wanted)` to what `blockwise.backward` returns.
    """
    o = operands
    acc = accumulation_dtype(o.query.dtype)
    pairs = _Pairs(ring, o)
    parts = tuple(name for name in wanted if name != "sinks")
    follow = tuple(name for name in parts if name in _TRAVELLING)
    zeros = lambda names: vary({name: jnp.zeros(getattr(o, name).shape, acc) for name in names})

    def visit(problem: Any, place: Any, state: Any) -> dict[str, Array]:
        spec, now = problem
        found = transpose(spec, now, [slice_axis(x, place.row, pairs.rows, 1) for x in rows], parts)
        return {name: _gathered(name, state[name], x.astype(acc), place) for name, x in zip(parts, found)}

    def compute(source: Any, held: Any, state: Any) -> tuple[dict[str, Any], Any]:
        new = pairs.over(source, held, visit, {**state, **zeros(follow)})
        return {name: new.pop(name) for name in follow}, new

    staying = tuple(name for name in parts if name not in follow)
    followed, stayed = _walk(ring, _schedule(ring, o), _travelling(o), zeros(follow), compute, zeros(staying))
    sums = {**followed, **stayed}
    if "sinks" in wanted:
        out, row_max, row_sum, d_out, d_lse = rows
        shift = partial.delta_of(out, d_out, d_lse, acc)
        sums["sinks"] = partial.sink_gradient(ring.spec, o, row_max, row_sum, shift)
    return tuple(sums[name].astype(getattr(o, name).dtype) for name in wanted)


def _gathered(name: str, x: Any, part: Any, place: _Place) -> Array:
    """A pair's share of a gradient, added to the whole."""
    if name == "query":
        return add_axis(x, part, place.row, 1)
    if name in _TRAVELLING:
        return add_axis(x, part, place.column, 1)
    if name != "bias":
        return x + part
    rows = slice_axis(x, place.row, part.shape[2], 2)  # or one for all, and of columns too
    return put_axis(x, add_axis(rows, part, place.column_of_all(), 3), place.row, 2)


# ---------------------------------------------------------------------------------------------------------------------
# Forward mode


def tangent(
    ring: Ring,
    operands: Operands,
    results: tuple[Any, ...],
    wanted: tuple[str, ...],
    tangents: tuple[Any, ...],
    differentiate: Callable[..., Any],
    vary: Callable[..., Any] = lambda x: x,
) -> tuple[Any, Any]:
    """What output and log-sum-exp change by where the operands named in `wanted` change by `tangents`.

    Both are sums over the columns once the maxima and sums of whole rows are known, so each part adds its share.

    Args:
      operands, vary: as in `forward`.
      results: out, row_max and row_sum as `forward` gave them.
      differentiate: `(spec, operands, results, wanted, tangents)` to what `blockwise.tangent` returns.
    """
    o = operands
    acc = accumulation_dtype(o.query.dtype)
    pairs = _Pairs(ring, o)
    moving = Operands(**{**dict.fromkeys(Operands._fields), **dict(zip(wanted, tangents))})
    parts = tuple(name for name in wanted if name != "sinks")

    def compute(source: Any, travelling: Any, state: Any) -> tuple[tuple[()], Any]:
        held, held_tangents = travelling

        def visit(problem: Any, place: Any, state: Any) -> tuple[Array, ...]:
            spec, now = problem
            at = pairs.cut(moving, held_tangents, place)
            own = [slice_axis(x, place.row, pairs.rows, 1) for x in results]
            found = differentiate(spec, now, own, parts, [getattr(at, name) for name in parts])
            return tuple(add_axis(x, part.astype(acc), place.row, 1) for x, part in zip(state, found))

        return (), pairs.over(source, held, visit, state)

    out, row_max, row_sum = results
    t_out, t_lse = vary((jnp.zeros(out.shape, acc), jnp.zeros(row_max.shape, acc)))
    if parts:
        travelling = _travelling(o), _travelling(moving)
        _, (t_out, t_lse) = _walk(ring, _schedule(ring, o), travelling, (), compute, (t_out, t_lse))
    if moving.sinks is not None:
        t_sinks = partial.per_batch_row(ring.spec, o, "sinks", acc, moving.sinks)[:, None]
        moved = partial.sink_probability(ring.spec, o, row_max, row_sum) * t_sinks
        t_out, t_lse = t_out - out.astype(acc) * moved[..., None], t_lse + moved
    return t_out.astype(out.dtype), t_lse


# --- parts of arrays along an axis


def slice_axis(x: Any, start: Any, size: int, axis: int) -> Array:
    """`size` elements along `axis` from `start`; an axis of size 1 broadcasts and is kept."""
    return x if x.shape[axis] in (1, size) else lax.dynamic_slice_in_dim(x, start, size, axis)


def put_axis(x: Any, part: Any, start: Any, axis: int) -> Array:
    """`x` with `part` in it, from `start` on along `axis`."""
    return part if x.shape == part.shape else lax.dynamic_update_slice_in_dim(x, part, start, axis)


def add_axis(x: Any, part: Any, start: Any, axis: int) -> Array:
    """`x` with `part` added to it, from `start` on along `axis`."""
    return put_axis(x, slice_axis(x, start, part.shape[axis], axis) + part, start, axis)
