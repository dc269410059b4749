"""Attention over a ring of devices: each holds a part of the queries, and the keys and values travel.

With n devices, device i meets in turn the keys of devices i, i − 1, … (Ring Attention, arXiv:2310.01889, section 3);
the next ones are under way while the present ones are computed with. Partial results are merged by row maximum and sum
in float32. The backward pass sends keys and values around once more, and with them the float32 sums of their gradients:
computed from the output, maxima and sums of whole rows, each part is one of the whole gradient, and nothing but a
device's own rows is kept. Where a window or an offset is known, keys that no device sees are not sent.

The function that computes one part is a parameter, since `attend` and `sharding` both run these loops.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_mfa import compat, partial
from jax_mfa.context_parallel import layout as layouts
from jax_mfa.problem import AXES, Operands, Specification, accumulation_dtype, counted_from, pack, unpack

TRAVELLING = ("key", "value", "key_segment_ids")  # operands that are sent around
# operands with a device's rows and the columns of all: bias and masks
_OF_SCORES = tuple(name for name in Operands._fields if len({*AXES[name]} & {*"TtSs"}) == 2)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Whose keys device i computes with, in turn: those of device i − start, i − start − 1, …; `hops` steps on."""

    start: int
    hops: int

    @property
    def permutes(self) -> int:
        """How often keys and values are sent in the forward pass."""
        return self.hops + (self.start != 0)


@dataclasses.dataclass(frozen=True)
class Ring:
    """The static facts of attention over a ring."""

    spec: Specification  # of the whole sequence
    axis: Any  # the mesh axis (or axes) along which the sequence is split
    devices: int  # along the axis
    order: str = "contiguous"  # of the tokens, see `layout`
    implementation: str | None = None  # as in `primitives.attention`

    @property
    def chunks(self) -> int:
        return layouts.chunks_of(self.order)

    def start_of(self, device: Any, chunk: Any, size: int) -> Any:
        """The position of the first token of a chunk of `size` tokens."""
        return layouts.chunk_index(self.order, self.devices, device, chunk) * size

    def schedule(self, rows: int, columns: int, offset_is_known: bool = True) -> Schedule:
        """The shortest walk over the devices whose keys some device may see, of so many rows and columns on each."""
        n = self.devices
        if not offset_is_known or self.spec.band == (None, None):
            return Schedule(0, n - 1)
        rows, columns = rows // self.chunks, columns // self.chunks
        index, chunk = np.arange(n, dtype=np.int64)[:, None], np.arange(self.chunks)[None]
        row = self.start_of(index, chunk, rows)[..., None, None] + self.spec.query_offset
        column = self.start_of(index, chunk, columns)[None, None]
        meets = _in_band(self.spec, row, row + rows - 1, column, column + columns - 1).any((1, 3))
        distances = {int(i - j) % n for i, j in zip(*np.nonzero(meets))}
        walks = [Schedule(start, max((d - start) % n for d in distances)) for start in {0, *distances} if distances]
        return min(walks, key=lambda walk: (walk.permutes, walk.start), default=Schedule(0, 0))


def _in_band(spec: Specification, first_row: Any, last_row: Any, first_column: Any, last_column: Any) -> Any:
    """Whether some rows may see some columns, by causality and window; True where nothing is hidden."""
    left, right = spec.band
    sees: Any = True
    if right is not None:
        sees = first_column - last_row <= right
    if left is not None:
        sees = sees & (first_row - last_column <= left)
    return sees


@dataclasses.dataclass(frozen=True)
class _Pair:
    """A chunk of a device's rows and a chunk of the columns that it holds at the moment.

    Positions are functions, for XLA's partitioner, of JAX 0.4, takes no index of a device that nobody uses.
    """

    ring: Ring
    operands: Operands  # the device's own, with the keys that it holds
    row_chunk: Any  # the number of the chunk
    column_chunk: Any
    source: Callable[[], Any]  # the device that the columns belong to

    @property
    def rows(self) -> int:
        return self.operands.query.shape[1] // self.ring.chunks

    @property
    def columns(self) -> int:
        return self.operands.key.shape[1] // self.ring.chunks

    def row_position(self) -> Any:
        return self.ring.start_of(lax.axis_index(self.ring.axis), self.row_chunk, self.rows)

    def column_position(self) -> Any:
        return self.ring.start_of(self.source(), self.column_chunk, self.columns)

    def parts(self, name: str) -> list[tuple[int, Any, int]]:
        """Axis, start and size of the pair's part of an array of this name: rows, columns, both, or nothing of it."""
        row, rows, columns = self.row_chunk * self.rows, self.rows, self.columns
        if name in TRAVELLING:
            return [(1, self.column_chunk * columns, columns)]
        if name not in _OF_SCORES:
            return [(1, row, rows)] if "T" in AXES[name] else []
        column = (self.source() * self.ring.chunks + self.column_chunk) * columns  # as all columns are stored
        x, y = (self.ring.spec.mask_block if "t" in AXES[name] else None) or (1, 1)
        return [(2, row // x, rows // x), (3, column // y, columns // y)]

    def cut(self, name: str, x: Any) -> Any:
        """The pair's part of an array."""
        for axis, start, size in self.parts(name):
            x = _slice_axis(x, start, size, axis)
        return x

    def add(self, name: str, x: Any, part: Any) -> Any:
        """An array to whose part of this pair something is added."""
        return _added(x, part, self.parts(name))

    def may_see(self) -> Any:
        """Whether some of the rows may see some of the columns; True where that is known."""
        o, spec = self.operands, self.ring.spec
        sees: Any = True
        if spec.band != (None, None):
            least = most = spec.query_offset
            if o.query_offset is not None:
                least, most = o.query_offset.min(), o.query_offset.max()
            row, column = self.row_position(), self.column_position()
            sees = _in_band(spec, row + least, row + (self.rows - 1) + most, column, column + (self.columns - 1))
        if o.key_lengths is not None:
            sees = sees & (self.column_position() < o.key_lengths.max())
        if o.query_lengths is not None:
            sees = sees & (self.row_position() < o.query_lengths.max())
        return sees

    def problem(self) -> tuple[Specification, Operands]:
        """The rows against the columns, as a problem of its own."""
        o, spec = self.operands, self.ring.spec
        row, column = self.row_position, self.column_position
        arrays, names = pack(o)
        here = unpack(tuple(map(self.cut, names, arrays)), names)
        length = lambda x, start, most: None if x is None else jnp.clip(x - start(), 0, most)
        offset = None
        if spec.band != (None, None) or o.alibi_slopes is not None:  # else positions do not matter
            offset = (spec.query_offset if o.query_offset is None else o.query_offset) + (row() - column())
            offset = jnp.asarray(offset, jnp.int32).reshape(-1)
        here = here._replace(
            query_offset=offset,
            query_lengths=length(o.query_lengths, row, self.rows),
            key_lengths=length(o.key_lengths, column, self.columns),
            key_ranges=length(here.key_ranges, column, self.columns),
            sinks=None,  # they belong to whole rows
            dropout=None if o.dropout is None else counted_from(o.dropout, row=row(), column=column()),
        )
        return dataclasses.replace(spec, query_offset=0), here


def _zeros(o: Operands, shapes: dict[str, tuple[int, ...]]) -> dict[str, Array]:
    """Sums that nothing was added to yet; they vary over devices as the operands do."""
    zeros = {name: jnp.zeros(shape, accumulation_dtype(o.query.dtype)) for name, shape in shapes.items()}
    return compat.vary(zeros, compat.varying_of(o))


def _around(
    ring: Ring, o: Operands, visit: Callable[..., Any], state: Any, moving: dict[str, Any], following: dict[str, Any]
) -> dict[str, Array]:
    """The state, arrays by name, after `visit(pair, moving, state)` of each pair of chunks that may see each other.

    Keys and values, and `moving` with them, are sent on while they are computed with. Sums of the shapes `following`
    belong to them and follow them: they are under way during a computation, and its sums are added on arrival.
    """
    n, chunks = ring.devices, ring.chunks
    schedule = ring.schedule(o.query.shape[1], o.key.shape[1], offset_is_known=o.query_offset is None)
    hops = schedule.hops

    def send(tree: Any, by: int) -> Any:
        return jax.tree.map(lambda x: lax.ppermute(x, ring.axis, [(i, (i + by) % n) for i in range(n)]), tree)

    def stop(step: Any, travelling: Any, passengers: Any, state: Any) -> tuple[Any, Any]:
        source = lambda: (lax.axis_index(ring.axis) - schedule.start - step) % n

        def turn(i: Any, state: Any) -> Any:
            held, moving = travelling
            pair = _Pair(ring, o._replace(**held), i // chunks, i % chunks, source)
            go, sees = lambda state: visit(pair, moving, state), pair.may_see()
            return go(state) if sees is True else lax.cond(sees, go, lambda state: state, state)

        state = {**state, **_zeros(o, following)}
        state = turn(0, state) if chunks == 1 else lax.fori_loop(0, chunks * chunks, turn, state)
        return {name: x + state.pop(name) for name, x in passengers.items()}, state

    def hop(step: Any, carry: Any) -> tuple[Any, Any, Any]:
        travelling, passengers, state = carry
        arriving = send(travelling, 1), send(passengers, 1)  # under way while this device computes
        return arriving[0], *stop(step, travelling, arriving[1], state)

    travelling: Any = {name: getattr(o, name) for name in TRAVELLING if getattr(o, name) is not None}, moving
    passengers = _zeros(o, following)
    if schedule.start:
        travelling = send(travelling, schedule.start)
    if hops == 1:  # no sums travel to the first stop
        arriving = send(travelling, 1)
        passengers, state = stop(0, travelling, passengers, state)
        travelling = arriving
    elif hops:
        travelling, passengers, state = lax.fori_loop(0, hops, hop, (travelling, passengers, state))
    passengers, state = stop(hops, travelling, send(passengers, 1) if hops else passengers, state)
    home = -(schedule.start + hops) % n
    return {**state, **(send(passengers, home) if home else passengers)}


# --- the three passes


def forward(ring: Ring, operands: Operands, attend: Callable[..., Any]) -> tuple[Array, Array, Array]:
    """Attention of a device's rows over the columns of all devices, and maximum and sum of each row.

    Operands are a device's own; of bias and mask its rows with all columns, in the order in which these are stored;
    lengths, ranges and offsets count the whole sequence. `attend(spec, operands)` is like `blockwise.forward`.
    """
    o = operands
    b, t, n, _ = o.query.shape
    acc = accumulation_dtype(o.query.dtype)

    def visit(pair: _Pair, _: Any, state: Any) -> dict[str, Array]:
        out, row_max, row_sum = attend(*pair.problem())
        part = partial.weighed(out, row_max, row_sum, acc)
        merged = partial.merged(tuple(pair.cut("out", state[name]) for name in names), part)
        return {name: _put_axis(state[name], x, pair.row_chunk * pair.rows, 1) for name, x in zip(names, merged)}

    names = ("sums", "row_max", "row_sum")
    state = _zeros(o, dict(zip(names, ((b, t, n, o.value.shape[-1]), (b, t, n), (b, t, n)))))
    state["row_max"] -= np.inf  # no score yet
    found = _around(ring, o, visit, state, {}, {})
    whole = found["sums"], found["row_max"], found["row_sum"]
    return partial.finished(whole, partial.sinks_of(ring.spec, o, acc), o.query.dtype)


def backward(
    ring: Ring, operands: Operands, results: Any, wrt: tuple[str, ...], cotangents: Any, transpose: Callable[..., Any]
) -> tuple[Any, ...]:
    """Cotangents of the operands `wrt`: of what a device holds of them, or for arrays that serve all rows its own
    rows' part. Of the `results` of `forward` and d_out and d_lse, `transpose(spec, operands, (*results, *cotangents),
    wrt)` gives what `blockwise.backward` does."""
    o, rows = operands, (*results, *cotangents)
    acc = accumulation_dtype(o.query.dtype)
    parts = tuple(name for name in wrt if name != "sinks")

    def visit(pair: _Pair, _: Any, state: Any) -> dict[str, Array]:
        found = transpose(*pair.problem(), tuple(pair.cut("out", x) for x in rows), parts)
        return {name: pair.add(name, state[name], x.astype(acc)) for name, x in zip(parts, found)}

    shapes = {name: getattr(o, name).shape for name in parts}
    following = {name: shapes.pop(name) for name in parts if name in TRAVELLING}
    sums = _around(ring, o, visit, _zeros(o, shapes), {}, following)
    if "sinks" in wrt:
        out, row_max, row_sum, d_out, d_lse = rows
        delta = partial.delta_of(out, d_out, d_lse, acc)
        sums["sinks"] = partial.sink_gradient(ring.spec, o, row_max, row_sum, delta)
    return tuple(sums[name].astype(getattr(o, name).dtype) for name in wrt)


def tangent(
    ring: Ring, operands: Operands, results: Any, wrt: tuple[str, ...], tangents: Any, differentiate: Callable[..., Any]
) -> tuple[Any, Any]:
    """The changes of output and log-sum-exp where the operands `wrt` change by `tangents`.

    Both are sums over the columns once the maxima and sums of whole rows, of `results`, are known: each part adds its
    share, which `differentiate(spec, operands, results, wrt, tangents)` gives as `blockwise.tangent` does.
    """
    o, moving = operands, dict(zip(wrt, tangents))
    acc = accumulation_dtype(o.query.dtype)
    parts = tuple(name for name in wrt if name != "sinks")
    out, row_max, row_sum = results

    def visit(pair: _Pair, held: Any, state: Any) -> dict[str, Array]:
        changes = [pair.cut(name, {**moving, **held}[name]) for name in parts]
        found = differentiate(*pair.problem(), tuple(pair.cut("out", x) for x in results), parts, changes)
        return {name: pair.add("out", state[name], x.astype(acc)) for name, x in zip(("out", "lse"), found)}

    state = _zeros(o, {"out": out.shape, "lse": row_max.shape})
    if parts:
        travelling = {name: x for name, x in moving.items() if name in TRAVELLING}
        state = _around(ring, o, visit, state, travelling, {})
    t_out, t_lse = state["out"], state["lse"]
    if "sinks" in moving:
        t_sinks = partial.sinks_of(ring.spec, o, acc, moving["sinks"])
        moved = partial.sink_probability(ring.spec, o, row_max, row_sum) * t_sinks
        t_out, t_lse = t_out - out.astype(acc) * moved[..., None], t_lse + moved
    return t_out.astype(out.dtype), t_lse


# --- parts of arrays along an axis


def _slice_axis(x: Any, start: Any, size: int, axis: int) -> Array:
    """`size` elements along `axis` from `start`; an axis of size 1 broadcasts and is kept."""
    return x if x.shape[axis] in (1, size) else lax.dynamic_slice_in_dim(x, start, size, axis)


def _put_axis(x: Any, part: Any, start: Any, axis: int) -> Array:
    """`x` with `part` in it, from `start` on along `axis`."""
    return part if x.shape == part.shape else lax.dynamic_update_slice_in_dim(x, part, start, axis)


def _added(x: Any, part: Any, places: list[tuple[int, Any, int]]) -> Any:
    """`x` with `part` added to it at these places of axes, if any."""
    if not places:
        return x + part
    (axis, start, _), *others = places
    return _put_axis(x, _added(_slice_axis(x, start, part.shape[axis], axis), part, others), start, axis)
