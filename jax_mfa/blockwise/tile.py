"""A tile: its part of the operands, what is visible in it, its scores and its products.

Scores are [R, E, T, G, S]: R batch entries, E key heads, T queries, G query heads of a key head, S keys. What belongs
to queries is `aligned` to the first four of these axes; keys and values stay as they lie, [R|1, S, E, H|V].
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_mfa import compat
from jax_mfa.blockwise.tiles import FEW_QUERIES, Tiles
from jax_mfa.flex.program import Program
from jax_mfa.kv_cache.storage import as_bits, dtype_of, from_bits
from jax_mfa.philox import keep_mask
from jax_mfa.problem import AXES, Operands, Specification, accumulation_dtype, entry_index
from jax_mfa.reference import tanh

OF_SCORES = "bias", "scale", "alibi_slopes", "captured_floats"  # what scores depend on beside queries and keys


@dataclasses.dataclass
class Tile:
    """One tile of one step."""

    spec: Specification
    operands: Operands
    tiles: Tiles
    starts: dict[str, Any]  # where its batch entries, key heads, queries and keys begin, by letter: B, K, T, S
    own: dict[str, Any]  # the first query and key, by T and S, that the tile before does not hold too, if it may

    def __post_init__(self) -> None:
        self.batch = self.operands.query.shape[0]
        self.group = self.operands.query.shape[2] // self.operands.value.shape[2]
        self.acc = accumulation_dtype(self.operands.query.dtype)
        self.few = self.tiles.block_q * self.group <= FEW_QUERIES  # so that products transpose what has their size

    # --- parts of arrays

    def corner(self, name: str, x: Any) -> tuple[list[Any], list[int]]:
        """Where the tile's part of `x`, an array like the operand of this name, begins, and its shape."""
        c, at, group, rows = self.tiles, self.starts, self.group, x.shape[0]
        spans = {"N": (at["K"] * group, c.heads * group), "K": (at["K"], c.heads)}
        spans |= {"T": (at["T"], c.block_q), "S": (at["S"], c.block_kv)}
        start, shape = [0] * x.ndim, [*x.shape]
        for axis, letter in enumerate(AXES[name]):
            if letter in spans and x.shape[axis] > 1:
                start[axis], shape[axis] = spans[letter]
        if rows != 1:
            own, repeat = rows == self.batch, getattr(Operands(*self.spec.repeats), name, 1)
            start[0], shape[0] = (at["B"], c.batch) if own else (entry_index(at["B"], repeat, rows), 1)
        return start, shape

    def cut(self, name: str, x: Any = None) -> Any:
        """The tile's part of an operand, or of an array like it; None where there is none."""
        x = getattr(self.operands, name) if x is None else x
        if x is None:
            return None
        start, shape = self.corner(name, x)
        return part_of(tied(x, start), start, shape)

    def put(self, name: str, x: Any, part: Array) -> Any:
        """`x`, of `over_queries`, with `part` as the tile's part of it."""
        part, start = as_bits(part.astype(dtype_of(x))), _int32(self.corner(name, x)[0])
        return part if x.shape == part.shape else lax.dynamic_update_slice(x, part, start, **compat.NOT_NEGATIVE)

    def add(self, name: str, x: Any, part: Array) -> Any:
        """`x`, of `over_queries`, with `part` added to the tile's part of it."""
        return self.put(name, x, from_bits(part_of(x, *self.corner(name, x))).astype(part.dtype) + part)

    def aligned(self, name: str, x: Any) -> Array:
        """A part [R|1, …] of an array like the operand of this name in the order of scores, [R|1, E|1, T|1, G|1, last],
        the last axis that of S, H, V or what else the operand has."""
        letters, shape = AXES[name], [*x.shape]
        if "N" in letters:
            at = letters.index("N")
            shape[at : at + 1] = [1, 1] if shape[at] == 1 else [self.tiles.heads, self.group]
            letters = letters.replace("N", "KG")
        order = sorted(range(len(shape)), key=lambda i: "BKTG".find(letters[i]) % 9)
        x = x.reshape(shape).transpose(order)
        present = [letters[i] for i in order]
        full = [x.shape[present.index(letter)] if letter in present else 1 for letter in "BKTG"]
        last = x.shape[-1] if present[-1] not in "BKTG" else 1
        return x.reshape(*full, last)

    def natural(self, name: str, x: Any) -> Array:
        """The inverse of `aligned` for [R, E, T, G, last], of an operand with axes B, T, N and perhaps one more."""
        r, e, t, g, last = x.shape
        x = x.transpose(0, 2, 1, 3, 4).reshape(r, t, e * g, last)
        return x if len(AXES[name]) == 4 else x[..., 0]

    def operand(self, name: str, x: Any = None) -> Array:
        """The tile's part of an operand, or of an array like it, aligned."""
        return self.aligned(name, self.cut(name, x))

    def keys(self, name: str, x: Any = None) -> Callable[[], Array]:
        """What cuts the tile's part of "key" or "value", or of an array like it, as wide as sums: [R|1, S, E, H|V]."""
        x = getattr(self.operands, name) if x is None else x
        if not isinstance(x, jax.Array):
            return lambda: x.tile(self).astype(self.acc)

        def part() -> Array:
            found = self.cut(name, x)
            # what is not converted it would else cut and transpose in one loop, which is slow on some versions
            alone = self.few and found is not x and found.dtype == self.acc
            return lax.optimization_barrier(found) if alone else found.astype(self.acc)

        return part

    # --- what is visible

    def _places(self) -> tuple[Array, Array, Any]:
        """Indices of queries [1, 1, T, 1, 1] and keys [1, 1, 1, 1, S], and the positions of the queries."""
        t = self.starts["T"] + jnp.arange(self.tiles.block_q, dtype=jnp.int32).reshape(1, 1, -1, 1, 1)
        s = self.starts["S"] + jnp.arange(self.tiles.block_kv, dtype=jnp.int32).reshape(1, 1, 1, 1, -1)
        traced = self.operands.query_offset is not None
        return t, s, t + (self.operand("query_offset") if traced else self.spec.query_offset)

    @functools.cached_property
    def visible(self) -> Array | None:
        """Which scores count, bool that broadcasts to them; None where all do."""
        spec, rules, (t, s, position) = self.spec, [], self._places()
        left, right = spec.band
        if left is not None:
            rules.append(s - position >= -left)
        if right is not None:
            rules.append(s <= position if right == 0 else s - position <= right)
        for name, place in (("key_lengths", s), ("query_lengths", t)):
            if getattr(self.operands, name) is not None:
                rules.append(place < self.operand(name))
        if self.operands.mask is not None:
            rules.append(self.operand("mask"))
        if self.operands.query_segment_ids is not None:
            rules.append(self.operand("query_segment_ids") == self.cut("key_segment_ids")[:, None, None, None])
        if self.operands.key_ranges is not None:
            ranges = self.operand("key_ranges")
            rules.append((s >= ranges[..., :1]) & (s < ranges[..., 1:]))
        if spec.mask_block is not None:
            blocks = self.cut("block_mask") != 0
            at = [x.reshape(-1) // size for x, size in zip((t, s), spec.mask_block)]
            rules.append(self.aligned("mask", jnp.take(jnp.take(blocks, at[0], axis=2), at[1], axis=3)))
        if spec.bias_hides(self.operands):
            rules.append(self.operand("bias") != -jnp.inf)
        if spec.mask_mod is not None:
            rules.append(self._modified(spec.mask_mod, (), self.cut("captured_floats"), None))
        for letter, x in (("T", t), ("S", s)):
            if self.own.get(letter) is not None:
                rules.append(x >= self.own[letter])
        return functools.reduce(jnp.logical_and, rules) if rules else None

    def _modified(self, program: Program, score: tuple[Array, ...], floats: Array | None, see: Array | None) -> Array:
        """A caller's function of scores, which it may take, and of indices; derivatives pass where `see`."""
        _, s, position = self._places()
        origin = self.operand("origin")
        indices = origin[..., :1], origin[..., 1:] + self._heads(np.int32), position, s
        return program.over((*score, *indices), floats, self.cut("captured_integers"), see)

    def _heads(self, dtype: Any) -> Array:
        """Query heads, [1, E, 1, G, 1]."""
        first = jnp.asarray(self.starts["K"], dtype)
        return dtype(self.group) * (first + _count(dtype, 1, self.tiles.heads)) + _count(dtype, 3, self.group)

    # --- scores and weights

    def terms(self, arrays: Any = None) -> dict[str, Any]:
        """The tile's part of what scores depend on beside queries and keys, or of arrays like these, by operand."""
        arrays = {name: getattr(self.operands, name) for name in OF_SCORES} if arrays is None else arrays
        wide = lambda name, x: x if name == "captured_floats" else x.astype(self.acc)
        return {name: wide(name, self.cut(name, x)) for name, x in arrays.items() if x is not None}

    def scores(self, products: Array, terms: dict[str, Any], differentiated: bool = True) -> tuple[Array, Array | None]:
        """Scores, −∞ where hidden, of products of queries and keys; and what is visible, now that scores are known."""
        spec, see = self.spec, self.visible
        # of derivatives too: 0 · NaN is NaN
        hidden = lambda x: x if see is None else jnp.where(see, x, 0)
        floats = terms.get("captured_floats")
        aligned = {name: self.aligned(name, x) for name, x in terms.items()}
        x = hidden(products) * aligned["scale"] if "scale" in terms else products * self.acc.type(spec.scale)
        if "bias" in terms:
            x = x + aligned["bias"]
        if "alibi_slopes" in terms:
            _, s, position = self._places()
            x = x + aligned["alibi_slopes"] * (s - position).astype(x.dtype)
        if spec.score_mod is not None:
            given = hidden(x)
            modified = functools.partial(self._modified, spec.score_mod, (given,), floats)
            x = modified(None)
            if spec.score_hides:
                kept = (x != -jnp.inf) | (given == -jnp.inf)
                see = kept if see is None else see & kept
            # once more, for derivatives pass where its result is visible; XLA computes the same values once
            x = (modified(see) if differentiated and see is not None else x).astype(self.acc)
        if spec.logits_soft_cap is not None:
            x = spec.logits_soft_cap * tanh(hidden(x) / spec.logits_soft_cap)
        return x if see is None else jnp.where(see, x, -jnp.inf), see

    def largest(self, scores: Array) -> Array:
        """The maximum of each row's scores; −∞ of rows that see nothing alone, where there may be any."""
        if self.visible is not None and not self.spec.every_row_sees(self.operands):
            lowest = self.acc.type(jnp.finfo(self.acc).min)
            scores = jnp.where(self.visible & (scores < lowest), lowest, scores)
        return scores.max(-1, keepdims=True)

    def probability(self, scores: Array, row_max: Array, inverse: Array) -> Array:
        """Probabilities of scores that are made again, of the maxima of their rows and 1 / their sums."""
        x, o = scores - row_max, self.operands
        if o.bias is not None or o.alibi_slopes is not None or self.spec.score_mod is not None:
            # huge ones may be rounded otherwise than those that the maximum was found of; with their derivatives
            x = x - lax.stop_gradient(jnp.where(x > 0, x, 0))
        p = jnp.exp(x) * inverse
        return p if self.visible is None else jnp.where(self.visible, p, 0)  # NaN in rows that see it

    def dropped(self) -> Array | None:
        """What dropout multiplies probabilities with, [R, E, T, G, S]; None where it is off."""
        words = self.cut("dropout")
        if words is None:
            return None
        seed0, seed1, index, head0, row0, column0 = (words[:, i].reshape(-1, 1, 1, 1, 1) for i in range(6))
        start, c = {x: jnp.uint32(i) for x, i in self.starts.items()}, self.tiles
        head = head0 + self._heads(np.uint32)
        row, column = row0 + start["T"] + _count(np.uint32, 2, c.block_q), column0 + start["S"]
        keep = keep_mask(self.spec.dropout_rate, (seed0, seed1), index, head, row, column, c.block_kv)
        return jnp.where(keep, 1 / (1 - self.spec.dropout_rate), 0).astype(self.acc)

    # --- products

    def rows_by_keys(self, a: Array, b: Callable[[], Array]) -> Array:
        """Σ over channels of [R, E, T, G, x] and keys [R|1, S, E, x]: [R, E, T, G, S]."""
        if self.few:  # scores are transposed, and not keys
            return jnp.einsum("rsex,retgx->restg", b(), a).transpose(0, 1, 3, 4, 2)
        return jnp.einsum("retgx,rsex->retgs", a, b())

    def weights_by_keys(self, w: Array, b: Array) -> Array:
        """Σ over keys of [R, E, T, G, S] and [R|1, S, E, x]: [R, E, T, G, x]."""
        return jnp.einsum("retgs,rsex->retgx", w, b)

    def weights_by_rows(self, w: Array, a: Array) -> Array:
        """Σ over queries of [R, E, T, G, S] and [R, E, T, G, x], as it comes; `like_keys` transposes it."""
        if self.few:  # weights are transposed, and not what they give
            return jnp.einsum("retgs,retgx->resx", w, a)
        return jnp.einsum("retgx,retgs->rexs", a, w)

    def like_keys(self, x: Array) -> Array:
        """A result of `weights_by_rows` in the order of keys, [R, S, E, x]."""
        order = (0, 2, 1, 3) if self.few else (0, 3, 1, 2)
        return x[..., None].transpose(*order, 4)[..., 0]  # with an axis more XLA's CPU backend copies once, not twice

    def products(self, *factors: tuple[Callable[..., Array], Array, Callable[[], Array], bool]) -> Sequence[Array]:
        """Products of weights, 0 where hidden, and what they weigh: each the function, the weights, what cuts the other
        factor, and whether the weights are probabilities. Hidden NaN and infinities are mended: only what is visible of
        them counts. The factor is cut again for that: XLA's CPU backend would copy once more what a loop carries."""
        hides = self.own or self.spec.has_mask(self.operands)  # keys that do not count may be met
        if hides and not self.few and compat.BARRIERS_HAVE_DERIVATIVES:  # made once, for products and for mending
            weights = {id(w): w for _, w, _, _ in factors}
            weights = dict(zip(weights, lax.optimization_barrier([*weights.values()])))
            factors = tuple((f, weights[id(w)], b, p) for f, w, b, p in factors)
        found = [product(w, b()) for product, w, b, _ in factors]
        return mended(found, lambda: [self._again(f, w, b(), p) for f, w, b, p in factors]) if hides else found

    def trusted(self, results: Callable[[Tile], Any]) -> Any:
        """`results(tile)`, as if the bias were finite, which takes less time: where it is −∞ a probability is 0 by
        itself. Results that are not finite, as of rows that see nothing, are mended: with what the bias hides."""
        finite = dataclasses.replace(self.spec, finite_bias=True)
        if self.spec.every_row_sees(self.operands) or not finite.every_row_sees(self.operands):
            return results(self)
        return mended(results(dataclasses.replace(self, spec=finite)), lambda: results(self))

    def _again(self, product: Callable[..., Array], w: Array, b: Array, probable: bool) -> Array:
        see = jnp.ones((), bool) if self.visible is None else self.visible
        finite, many = jnp.isfinite(b), float(2 ** max(w.shape).bit_length())  # more than there are terms
        # 1 for ∞, `many` for −∞, and both for NaN: what is visible of them is counted
        count = jnp.where(finite, 0, jnp.where(b < 0, 0, 1) + jnp.where(b > 0, 0, many)).astype(b.dtype)
        sums = product(w, jnp.where(finite, b, 0))
        counts = product(jnp.where(see, 1, jnp.zeros_like(w)), count)
        low = jnp.floor(counts / many)
        # an infinity counts though its probability may have been rounded to 0; any other weight makes NaN of it
        high, low = (jnp.where(x > 0, np.inf if probable else np.nan, 0) for x in (counts - many * low, low))
        return sums + high - low


def mended(found: Any, again: Callable[[], Any]) -> Any:
    """`found`, or where that is not finite what `again` makes: 0 · NaN is NaN, and so what spoils a result shows."""
    fine = jnp.isfinite(sum(x.sum() for x in jax.tree.leaves(found)))
    # a loop of no turn or one: in a conditional XLA's CPU backend copies what it returns
    return lax.while_loop(lambda state: ~state[0], lambda _: (jnp.ones((), bool), again()), (fine, found))[1]


def _count(dtype: Any, axis: int, size: int) -> Array:
    """0, 1, 2, … along an axis of scores."""
    return lax.broadcasted_iota(dtype, [size if i == axis else 1 for i in range(5)], axis)


def tied(x: Any, indices: Any) -> Array:
    """`x`, whose parts from these indices on are read in loops.

    Keeps XLA's CPU backend from converting all of an array of 16 bits or less before the loops: it comes anew with each
    index that they have.
    """
    for index in indices if x.dtype.itemsize <= 2 else ():
        if isinstance(index, jax.Array):
            x, _ = lax.optimization_barrier((x, index))
    return x


def part_of(x: Any, start: Sequence[Any], shape: Sequence[int]) -> Array:
    """The part of `x` of this shape from `start` on."""
    return x if x.shape == tuple(shape) else lax.dynamic_slice(x, _int32(start), shape, **compat.NOT_NEGATIVE)


def _int32(indices: Sequence[Any]) -> list[Any]:
    return [np.int32(i) if isinstance(i, (int, np.integer)) else jnp.asarray(i, jnp.int32) for i in indices]
