"""The loops over a problem's tiles: which tiles are seen, and in what order."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_mfa.blockwise.key_values import KeyValueTiles
from jax_mfa.blockwise.tile import Tile, part_of
from jax_mfa.blockwise.tiles import Tiles, tiles_of
from jax_mfa.kv_cache.storage import as_bits, from_bits
from jax_mfa.problem import Operands, Specification, accumulation_dtype, expand_entries


def tile_starts(length: int, block: int) -> np.ndarray:
    """First indices of a length's tiles; the last one of a ragged length reaches back over its neighbour."""
    return np.minimum(np.arange(0, length, block), max(length - block, 0)).astype(np.int32)


def seen(spec: Specification, operands: Operands, tiles: Tiles) -> Any:
    """Which tiles hold a score that may be visible, by positions, lengths, segments, ranges and mask blocks:
    bool [1 | steps of the batch, tiles of queries, tiles of keys], of numpy where it is known."""
    o, batch, repeats = operands, operands.query.shape[0], Operands(*spec.repeats)
    t0, s0 = tile_starts(o.query.shape[1], tiles.block_q), tile_starts(o.key.shape[1], tiles.block_kv)
    t0, s0 = t0[None, :, None], s0[None, None]
    t1, s1 = t0 + tiles.block_q, s0 + tiles.block_kv
    rules: list[Any] = [np.ones((1, t0.size, s0.size), bool)]

    def by_step(name: str, x: Any, reduce: Any) -> Any:  # [1 | steps, …] of the rows of an operand
        x = expand_entries(x, getattr(repeats, name), batch)
        return x if x.shape[0] == 1 else reduce(x.reshape(-1, tiles.batch, *x.shape[1:]), axis=1)

    # least and largest entry in each step
    bounds = lambda name: [by_step(name, getattr(o, name), reduce) for reduce in (jnp.min, jnp.max)]
    by_tile = lambda x, start, block, reduce: reduce(x[:, start.reshape(-1, 1) + np.arange(block)], axis=2)
    low = high = np.full((1, 1, 1), spec.query_offset, np.int32)
    if o.query_offset is not None:
        low, high = (x.reshape(-1, 1, 1) for x in bounds("query_offset"))
    left, right = spec.band
    if right is not None:
        rules.append(s0 - (t1 - 1 + high) <= right)
    if left is not None:
        rules.append(s1 - 1 - (t0 + low) >= -left)
    for name, first in (("key_lengths", s0), ("query_lengths", t0)):
        if getattr(o, name) is not None:
            rules.append(first < bounds(name)[1].reshape(-1, 1, 1))
    if o.query_segment_ids is not None:
        (q0, q1), (k0, k1) = bounds("query_segment_ids"), bounds("key_segment_ids")
        q0, q1 = (by_tile(x, t0, tiles.block_q, f)[..., None] for x, f in ((q0, jnp.min), (q1, jnp.max)))
        k0, k1 = (by_tile(x, s0, tiles.block_kv, f)[:, None] for x, f in ((k0, jnp.min), (k1, jnp.max)))
        rules.append((q0 <= k1) & (k0 <= q1))
    if o.key_ranges is not None:
        start, end = o.key_ranges[..., :1], o.key_ranges[..., 1:]
        some = by_step("key_ranges", (start < s1) & (end > s0) & (start < end), jnp.any)
        rules.append(by_tile(some, t0, tiles.block_q, jnp.any))
    if spec.mask_block is not None:  # a block touches a tile where both hold some query and some key
        blocks = by_step("block_mask", o.block_mask, jnp.any).any(1).astype(np.float32)
        q0, k0 = (size * np.arange(count) for size, count in zip(spec.mask_block, blocks.shape[1:]))
        q1, k1 = q0 + spec.mask_block[0], k0 + spec.mask_block[1]
        touched = (t0[0] < q1) & (t1[0] > q0), (s0[0].T < k1) & (s1[0].T > k0)
        rules.append(jnp.einsum("tq,bqk,sk->bts", touched[0], blocks, touched[1]) > 0)
    return functools.reduce(lambda a, b: a & b, rules)


class Loop:
    """One pass over a problem, tile by tile."""

    def __init__(
        self, plan: str, spec: Specification, operands: Operands, differentiated: bool = True, once: bool = False
    ) -> None:
        """Cuts the problem of a plan that `tune` knows.

        Args:
          differentiated: whether a gradient is computed, or follows in the same program.
          once: whether a query may be met once only, and not in both of two tiles that overlap.
        """
        self.spec, self.operands = spec, spec.viewed(operands, KeyValueTiles)
        o = self.operands
        self.tiles = c = tiles_of(plan, spec, o, differentiated)
        self.acc = accumulation_dtype(o.query.dtype)
        (batch, t), (s, k) = o.query.shape[:2], o.value.shape[1:3]
        self.tiles_of_queries, self.tiles_of_keys = -(-t // c.block_q), -(-s // c.block_kv)
        self.steps = batch // c.batch, k // c.heads
        self.ragged = bool(s % c.block_kv), once and bool(t % c.block_q)

    @functools.cached_property
    def _order(self) -> tuple[Any, Any]:
        """For each tile of queries how many tiles of keys it sees, and these before the others."""
        see = seen(self.spec, self.operands, self.tiles)
        numpy: Any = np if isinstance(see, np.ndarray) else jnp
        order = numpy.argsort(~see, axis=-1, stable=True).astype(np.int32)
        return see.sum(-1, dtype=np.int32), order

    def over_queries(self, body: Callable[[Tile, Any, Any], Any], results: Any) -> Any:
        """The arrays `results` after `body(tile, place, bits)` of all tiles of queries; `place` is for `over_keys`."""
        turns = math.prod((*self.steps, self.tiles_of_queries))
        if self.tiles_of_keys > 1:
            _ = self._order  # before the loops

        def turn(index: Any, bits: Any) -> Any:
            rest, i = _divided(index, self.tiles_of_queries)
            b, e = _divided(rest, self.steps[1])
            b = 0 if self.steps[0] == 1 else b
            start, own = _start(i, self.tiles.block_q, self.operands.query.shape[1])
            starts = {"B": b * self.tiles.batch, "K": e * self.tiles.heads, "T": start, "S": 0}
            own = {"T": own} if self.ragged[1] else {}
            tile = Tile(self.spec, self.operands, self.tiles, starts, own)
            return body(tile, (b, i), bits)

        if isinstance(turns, int) and turns == 0:
            return results
        bits = jax.tree.map(as_bits, results)  # XLA's CPU backend converts all of bfloat16 to write a part of it
        # the number of turns may be known at run time only, in a program for batches of any size
        once = isinstance(turns, int) and turns == 1
        bits = turn(0, bits) if once else lax.fori_loop(jnp.int32(0), jnp.asarray(turns, jnp.int32), turn, bits)
        return jax.tree.map(from_bits, bits)

    def over_keys(self, tile: Tile, place: Any, body: Callable[[Tile, Any], Any], carry: Any) -> Any:
        """`body(tile, carry)` over the tiles of keys that a tile of queries sees."""

        def at(j: Any) -> Tile:
            start, own = _start(j, self.tiles.block_kv, self.operands.key.shape[1])
            own = {**tile.own, "S": own} if self.ragged[0] else tile.own
            return dataclasses.replace(tile, starts={**tile.starts, "S": start}, own=own)

        if self.tiles_of_keys <= 1:
            return body(at(0), carry) if self.tiles_of_keys else carry
        counts, order = (jnp.asarray(x) for x in self._order)
        b = place[0] if counts.shape[0] > 1 else 0
        look_up = lambda x, *index: part_of(x, index, (1,) * len(index)).reshape(())
        turn = lambda j, carry: body(at(look_up(order, b, place[1], j)), carry)
        return lax.fori_loop(jnp.int32(0), look_up(counts, b, place[1]), turn, carry)


def _start(i: Any, block: int, length: int) -> tuple[Any, Any]:
    """Where tile i of a length begins, as `tile_starts` has it, and the first index that tiles before do not hold."""
    first, last = i * block, max(length - block, 0)
    return (jnp.minimum(first, last) if length % block else first), first


def _divided(index: Any, size: int) -> tuple[Any, Any]:
    """Quotient and remainder of an index; by 1 without arithmetic, so that the remainder is known."""
    return (index, 0) if size == 1 else (lax.div(index, jnp.int32(size)), lax.rem(index, jnp.int32(size)))
