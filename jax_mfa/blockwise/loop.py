"""The loops over a problem's tiles: which tiles are seen, in what order, and again where something is not finite."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_mfa.blockwise.tile import SIGNS, Tile
from jax_mfa.blockwise.tiles import Tiles
from jax_mfa.specification import Operands, Specification, accumulation_dtype, expand_rows


def tile_starts(length: int, block: int) -> np.ndarray:
    """First indices of a length's tiles; the last one of a ragged length reaches back over its neighbour."""
    return np.minimum(np.arange(0, length, block), max(length - block, 0)).astype(np.int32)


def seen(spec: Specification, operands: Operands, tiles: Tiles) -> Any:
    """Which tiles hold a score that may be visible, by positions, lengths, segments, ranges and mask blocks:
    bool [1 | steps of the batch, tiles of queries, tiles of keys], of numpy where it is known."""
    o, batch = operands, operands.query.shape[0]
    t0, s0 = (tile_starts(n, b) for n, b in ((o.query.shape[1], tiles.block_q), (o.key.shape[1], tiles.block_kv)))
    t0, s0 = t0[None, :, None], s0[None, None, :]
    t1, s1 = t0 + tiles.block_q, s0 + tiles.block_kv

    def per_step(name: str, reduce: Any) -> Any:  # the entries of each step's batch rows reduced: [1 | steps, ...]
        x = getattr(o, name)
        x = expand_rows(x, getattr(Operands(*spec.repeats), name), batch)
        return x if x.shape[0] == 1 else reduce(x.reshape(-1, tiles.batch, *x.shape[1:]), axis=1)

    per_tile = lambda x, start, block, reduce: reduce(x[:, start.reshape(-1, 1) + np.arange(block)], axis=2)
    low = high = np.full((1, 1, 1), spec.query_offset, np.int32)
    if o.query_offset is not None:
        low, high = (per_step("query_offset", reduce).reshape(-1, 1, 1) for reduce in (jnp.min, jnp.max))
    left, right = spec.band
    see = np.ones((1, t0.size, s0.size), bool)
    if right is not None:
        see = see & (s0 - (t1 - 1 + high) <= right)
    if left is not None:
        see = see & (s1 - 1 - (t0 + low) >= -left)
    if o.key_lengths is not None:
        see = see & (s0 < per_step("key_lengths", jnp.max).reshape(-1, 1, 1))
    if o.query_lengths is not None:
        see = see & (t0 < per_step("query_lengths", jnp.max).reshape(-1, 1, 1))
    if o.query_segment_ids is not None:
        (q0, k0), (q1, k1) = (
            (
                per_tile(per_step("query_segment_ids", reduce), t0, tiles.block_q, reduce)[:, :, None],
                per_tile(per_step("key_segment_ids", reduce), s0, tiles.block_kv, reduce)[:, None],
            )
            for reduce in (jnp.min, jnp.max)
        )
        see = see & (q0 <= k1) & (k0 <= q1)
    if o.key_ranges is not None:
        start, end = (x[..., None] for x in (o.key_ranges[..., 0], o.key_ranges[..., 1]))
        some = (start < s1) & (end > s0) & (start < end)  # [rows, T, tiles of keys]
        some = per_tile(some, t0, tiles.block_q, jnp.any)
        some = expand_rows(some, Operands(*spec.repeats).key_ranges, batch)
        see = see & (some if some.shape[0] == 1 else some.reshape(-1, tiles.batch, *some.shape[1:]).any(1))
    if spec.mask_block is not None:
        # a block touches a tile where both hold some query and some key
        inside = lambda start, end, size, count: (
            (start.reshape(-1, 1) < (np.arange(count) + 1) * size) & (end.reshape(-1, 1) > np.arange(count) * size)
        ).astype(np.float32)
        blocks = per_step("block_mask", jnp.max).max(1).astype(np.float32)
        rows, columns = spec.mask_block
        touched = inside(t0, t1, rows, blocks.shape[1]), inside(s0, s1, columns, blocks.shape[2])
        see = see & (jnp.einsum("tr,brc,sc->bts", touched[0], blocks, touched[1]) > 0)
    return see


class Loop:
    """The tiles of one pass over a problem."""

    def __init__(
        self,
        spec: Specification,
        operands: Operands,
        tiles: Tiles,
        all_heads: bool = False,
        once: bool = False,
    ) -> None:
        """`once`: whether a query may be met once only, and not in both of two tiles that overlap."""
        self.spec, self.operands, self.tiles = spec, operands, tiles
        self.t, self.s = operands.query.shape[1], operands.key.shape[1]
        self.queries, self.keys = tile_starts(self.t, tiles.block_q), tile_starts(self.s, tiles.block_kv)
        self.steps = operands.query.shape[0] // tiles.batch, operands.value.shape[2] // tiles.heads
        self.all_heads, self._acc = all_heads, accumulation_dtype(operands.query.dtype)
        self.ragged = bool(self.s % tiles.block_kv), once and bool(self.t % tiles.block_q)
        self._make = functools.partial(Tile, spec, operands, tiles, all_heads=all_heads)

    @functools.cached_property
    def hides(self) -> bool:
        """Whether a product may meet what does not count."""
        return (
            self.spec.has_mask(self.operands)
            or any(self.ragged)
            or (self.all_heads and self.steps[1] * self.tiles.heads > 1)
        )

    @functools.cached_property
    def _order(self) -> tuple[Any, Any]:
        """For each tile of queries how many tiles of keys it sees, and these before the others."""
        see = seen(self.spec, self.operands, self.tiles)
        numpy: Any = np if isinstance(see, np.ndarray) else jnp
        order = numpy.argsort(~see, axis=-1, stable=True).astype(np.int32)
        return see.sum(-1, dtype=np.int32), order

    def over_queries(self, body: Callable[[Tile, Any, Any], tuple[Any, Any]], results: Any) -> Any:
        """`body(tile, place, results)` over all tiles of queries; `place` is for `over_keys`.

        The body gives the next results, and whether a factor of its products is not finite. Where something is hidden
        and a factor was, all tiles are visited twice more, to add what is visible and ∞, and what is −∞: see `Tile`.
        """
        (batch, heads), count = self.steps, len(self.queries)
        _ = self._order  # before the loops
        turns = batch * heads * count

        def turn(index: Any, results: Any) -> tuple[Any, Any]:
            sign = None
            if self.hides:
                attempt, index = divmod_(index, turns)
                sign = jnp.asarray(SIGNS, self._acc)[attempt]
            step, i = divmod_(index, count)
            b, e = divmod_(step, heads)
            start = self.queries[0] if count == 1 else jnp.asarray(self.queries)[i]
            own = {"T": i * self.tiles.block_q} if self.ragged[1] else {}
            starts = {"B": b * self.tiles.batch, "K": e * self.tiles.heads, "T": start, "S": 0}
            return body(self._make(starts=starts, own=own, sign=sign), (b, i), results)

        if isinstance(turns, int) and not turns:
            return results
        if not self.hides and isinstance(turns, int) and turns == 1:
            return turn(0, results)[0]

        def step(state: Any) -> Any:
            index, stop, results = state
            results, spoilt = turn(index, results)
            return index + 1, jnp.where(spoilt, all_turns, stop) if self.hides else stop, results

        stop = jnp.asarray(turns, jnp.int32)
        all_turns = stop * len(SIGNS)
        return lax.while_loop(lambda state: state[0] < state[1], step, (jnp.int32(0), stop, results))[2]

    def over_keys(self, tile: Tile, place: Any, body: Callable[[Tile, Any], Any], carry: Any, first: Any = None) -> Any:
        """`body(tile, carry)` over the tiles of keys that a tile of queries sees; of a single one `first(tile)`."""
        count = len(self.keys)

        def at(j: Any) -> Tile:
            start = self.keys[0] if count == 1 else jnp.asarray(self.keys)[j]
            own = {**tile.own, "S": j * self.tiles.block_kv} if self.ragged[0] else tile.own
            return self._make(starts={**tile.starts, "S": start}, own=own, sign=tile.sign)

        if count <= 1:
            return (body(at(0), carry) if first is None else first(at(0))) if count else carry
        counts, order = (jnp.asarray(x) for x in self._order)
        b = place[0] if counts.shape[0] > 1 else 0
        turn = lambda j, carry: body(at(order[b, place[1], j]), carry)
        return lax.fori_loop(jnp.int32(0), counts[b, place[1]], turn, carry)


def divmod_(a: Any, b: Any) -> tuple[Any, Any]:
    """Quotient and remainder of what is not negative."""
    if isinstance(a, int) or (isinstance(b, int) and b == 1):
        return (a // b, a % b) if isinstance(a, int) else (a, 0)
    b = jnp.asarray(b, a.dtype)
    return lax.div(a, b), lax.rem(a, b)
