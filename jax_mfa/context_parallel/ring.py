"""Attention over a ring of devices: each holds a part of the queries, and the keys and values travel.

With n devices, device i meets in turn the keys of devices i, i − 1, … (Ring Attention, arXiv:2310.01889, section 3);
the next ones are under way while the present ones are computed with. Partial results are merged by row maximum and sum
in float32. The backward pass sends keys and values around once more, and with them the float32 sums of their gradients:
each part of it is computed from the output and the statistics of whole rows, so it is a part of the whole gradient, and
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
from jax import lax

from jax_mfa.blockwise.step import slice_axis
from jax_mfa.context_parallel import order as orders
from jax_mfa.specification import Operands, Specification, accumulation_dtype, counted_from, expand_rows, reduce_rows

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

    def start_of(self, device, chunk, size: int):
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


def _in_band(spec: Specification, row, rows: int, column, columns: int, least_offset, most_offset):
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
    """Where chunks begin: rows and columns among those that are here, and the columns among all that there are."""

    row: Any
    column: Any
    column_of_all: Any


class _Pairs:
    """One device's rows and the columns that it holds at the moment, chunk by chunk."""

    def __init__(self, ring: Ring, operands: Operands):
        self.ring, self.operands = ring, operands
        self.me = lax.axis_index(ring.axis)
        self.rows, self.columns = (x.shape[1] // ring.chunks for x in (operands.query, operands.key))

    def over(self, source, held: dict, visit: Callable, state):
        """`visit(problem, place, state)` for each chunk of rows and of columns that may see each other.

        Args:
          source: the device that the columns belong to.
          held: the travelling operands that are here.
        """
        ring, chunks = self.ring, self.ring.chunks

        def turn(pair, state):
            a, b = pair // chunks, pair % chunks
            row0 = ring.start_of(self.me, a, self.rows)
            column0 = ring.start_of(source, b, self.columns)
            place = _Place(a * self.rows, b * self.columns, (source * chunks + b) * self.columns)
            go = lambda state: visit(self.problem(held, row0, column0, place), place, state)
            sees = self.may_see(row0, column0)
            return go(state) if sees is True else lax.cond(sees, go, lambda state: state, state)

        return turn(0, state) if chunks == 1 else lax.fori_loop(0, chunks * chunks, turn, state)

    def may_see(self, row0, column0):
        """Whether the chunks that start at these positions may see each other; True where that is known."""
        o, spec = self.operands, self.ring.spec
        least = most = spec.query_offset
        if o.query_offset is not None:
            least, most = o.query_offset.min(), o.query_offset.max()
        sees = _in_band(spec, row0, self.rows, column0, self.columns, least, most)
        if o.key_lengths is not None:
            sees = sees & (column0 < o.key_lengths.max())
        if o.query_lengths is not None:
            sees = sees & (row0 < o.query_lengths.max())
        return sees

    def problem(self, held: dict, row0, column0, place: _Place) -> tuple[Specification, Operands]:
        """The rows of one chunk against the columns of another, as a problem of its own."""
        o, spec, rows, columns = self.operands, self.ring.spec, self.rows, self.columns
        block_rows, block_columns = spec.mask_block or (1, 1)

        def of_rows(x):
            return None if x is None else slice_axis(x, place.row, rows, 1)

        def scores(x, row_block: int = 1, column_block: int = 1):  # of all columns, in the order as stored
            if x is None:
                return None
            x = slice_axis(x, place.row // row_block, rows // row_block, 2)
            return slice_axis(x, place.column_of_all // column_block, columns // column_block, 3)

        def length(x, start, most: int):
            return None if x is None else jnp.clip(x - start, 0, most)

        # where nothing asks for places, a problem without an offset is the simpler one
        offset = None
        if spec.band != (None, None) or o.alibi_slopes is not None:
            offset = (spec.query_offset if o.query_offset is None else o.query_offset) + (row0 - column0)
            offset = jnp.asarray(offset, jnp.int32).reshape(-1)
        dropout = o.dropout
        if dropout is not None:
            dropout = counted_from(dropout, row=row0, column=column0)
        ranges = of_rows(o.key_ranges)
        problem = Operands(
            query=of_rows(o.query),
            **{name: slice_axis(x, place.column, columns, 1) for name, x in held.items()},
            bias=scores(o.bias),
            mask=scores(o.mask),
            block_mask=scores(o.block_mask, block_rows, block_columns),
            scale=o.scale,
            query_offset=offset,
            query_lengths=length(o.query_lengths, row0, rows),
            key_lengths=length(o.key_lengths, column0, columns),
            query_segment_ids=of_rows(o.query_segment_ids),
            key_ranges=None if ranges is None else jnp.clip(ranges - column0, 0, columns),
            alibi_slopes=o.alibi_slopes,
            dropout=dropout,
        )
        return dataclasses.replace(spec, query_offset=0), problem


def _put(x, part, start, axis: int = 1):
    """`x` with `part` in it, from `start` on along an axis."""
    return part if x.shape == part.shape else lax.dynamic_update_slice_in_dim(x, part, start, axis)


def _add(x, part, start, axis: int = 1):
    """`x` with `part` added to it, from `start` on along an axis."""
    return _put(x, slice_axis(x, start, part.shape[axis], axis) + part, start, axis)


def _travelling(operands: Operands) -> dict:
    return {name: getattr(operands, name) for name in _TRAVELLING if getattr(operands, name) is not None}


def _schedule(ring: Ring, o: Operands) -> Schedule:
    return ring.schedule(o.query.shape[1], o.key.shape[1], offset_is_known=o.query_offset is None)


def _walk(ring: Ring, schedule: Schedule, travelling, passengers, compute: Callable, state):
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
    me = lax.axis_index(ring.axis)

    def send(tree, by: int):
        return jax.tree.map(lambda x: lax.ppermute(x, ring.axis, [(i, (i + by) % n) for i in range(n)]), tree)

    def stop(step, travelling, passengers, state):
        found, state = compute((me - schedule.start - step) % n, travelling, state)
        return jax.tree.map(jnp.add, passengers, found), state

    def turn(step, carry):
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


def forward(ring: Ring, operands: Operands, attend: Callable, vary: Callable = lambda x: x):
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

    def visit(problem, place, state):
        own = [slice_axis(x, place.row, pairs.rows, 1) for x in state]
        merged = merge_parts(own, part(*attend(*problem), acc))
        return tuple(_put(x, new, place.row) for x, new in zip(state, merged))

    def compute(source, held, state):
        return (), pairs.over(source, held, visit, state)

    empty = jnp.zeros((b, t, n, o.value.shape[-1]), acc), jnp.full((b, t, n), -np.inf, acc), jnp.zeros((b, t, n), acc)
    _, (sums, row_max, row_sum) = _walk(ring, _schedule(ring, o), _travelling(o), (), compute, vary(empty))
    return finished(ring.spec, o, (sums, row_max, row_sum))


def finished(spec: Specification, operands: Operands, merged):
    """Output, maximum and sum of whole rows, their sinks included, from merged parts without them."""
    sums, row_max, row_sum = merged
    acc = sums.dtype.type
    if operands.sinks is not None:
        sinks = _per_batch_row(spec, operands, "sinks", sums.dtype)[:, None]
        seen = (row_max != -np.inf) | jnp.isnan(row_sum)
        sink = jnp.zeros_like(sums), jnp.where(seen, sinks, -np.inf), jnp.where(seen, acc(1), acc(0))
        sums, row_max, row_sum = merge_parts(merged, sink)
    out = sums / jnp.where(row_sum == 0, acc(1), row_sum)[..., None]
    return out.astype(operands.query.dtype), jnp.where(row_max == -np.inf, acc(0), row_max), row_sum


def part(out, row_max, row_sum, acc):
    """A partial result as sums: of weighted values, the maximum, −∞ where no score is above that, and of weights.

    A row that sees scores of −∞ alone has the sum NaN beside a finite maximum; other columns may yet define its
    softmax.
    """
    lost = (row_sum == 0) | (jnp.isnan(row_sum) & jnp.isfinite(row_max))
    sums = jnp.where(lost[..., None], acc.type(0), out.astype(acc) * row_sum[..., None])
    return sums, jnp.where(lost, acc.type(-np.inf), row_max), row_sum


def merge_parts(a, b):
    """Two partial results of disjoint columns as one."""
    high = jnp.maximum(a[1], b[1])  # NaN where either is
    lost = high == -np.inf

    def weighed(sums, row_max, row_sum):
        nothing = row_max == -np.inf
        weight = jnp.where(nothing, 0, jnp.exp(jnp.where(nothing, 0, row_max - jnp.where(nothing, 0, high))))
        return jnp.where(nothing[..., None], 0, sums * weight[..., None]), jnp.where(nothing, 0, row_sum * weight)

    (sums_a, sum_a), (sums_b, sum_b) = weighed(*a), weighed(*b)
    return sums_a + sums_b, high, jnp.where(lost, a[2] + b[2], sum_a + sum_b)


def _per_batch_row(spec: Specification, operands: Operands, name: str, acc):
    """`[rows, N]` as `[B|1, N]`."""
    x, batch = getattr(operands, name), operands.query.shape[0]
    return (x if x.shape[0] == 1 else expand_rows(x, getattr(Operands(*spec.repeats), name), batch)).astype(acc)


# ---------------------------------------------------------------------------------------------------------------------
# Backward


def backward(
    ring: Ring,
    operands: Operands,
    rows: tuple,
    wanted: tuple[str, ...],
    transpose: Callable,
    vary: Callable = lambda x: x,
):
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

    def visit(problem, place, state):
        spec, now = problem
        found = transpose(spec, now, [slice_axis(x, place.row, pairs.rows, 1) for x in rows], parts)
        return {name: _gathered(name, state[name], x.astype(acc), place) for name, x in zip(parts, found)}

    def compute(source, held, state):
        new = pairs.over(source, held, visit, {**state, **zeros(follow)})
        return {name: new.pop(name) for name in follow}, new

    staying = tuple(name for name in parts if name not in follow)
    followed, stayed = _walk(ring, _schedule(ring, o), _travelling(o), zeros(follow), compute, zeros(staying))
    sums = {**followed, **stayed}
    if "sinks" in wanted:
        sums["sinks"] = _of_sinks(ring.spec, o, rows, acc)
    return tuple(sums[name].astype(getattr(o, name).dtype) for name in wanted)


def _gathered(name: str, x, part, place: _Place):
    """A pair's share of a gradient, added to the whole."""
    if name == "query":
        return _add(x, part, place.row)
    if name in _TRAVELLING:
        return _add(x, part, place.column)
    if name != "bias":
        return x + part
    rows = slice_axis(x, place.row, part.shape[2], 2)  # or one for all, and of columns too
    return _put(x, _add(rows, part, place.column_of_all, 3), place.row, 2)


def _of_sinks(spec: Specification, o: Operands, rows, acc):
    """The gradient of the sinks, from whole rows."""
    out, row_max, row_sum, d_out, d_lse = rows
    shift = jnp.einsum("...v,...v->...", d_out.astype(acc), out.astype(acc), precision="highest") - d_lse.astype(acc)
    empty = row_sum == 0
    sinks = _per_batch_row(spec, o, "sinks", acc)[:, None]
    weight = jnp.exp(jnp.where(empty, 0, sinks - row_max)) / jnp.where(empty, acc.type(1), row_sum)
    x = -jnp.where(empty, 0, weight * shift).sum(1)
    return reduce_rows(x, Operands(*spec.repeats).sinks, o.sinks.shape[0])
