"""A problem cut into tiles: the layouts of its arrays, and the loop over its tiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_mfa.blockwise.arrays import (
    BARRIERS_LAST,
    ROWS_TRANSPOSED,
    after,
    all_finite,
    along_last,
    barrier,
    before,
    clip,
    cut,
    divmod_unsigned,
    element,
    finite_sums,
    laid_out,
    put,
    settled,
    tile_start,
    where,
)
from jax_mfa.blockwise.step import Attempt, Place, Product, Step
from jax_mfa.blockwise.tiling import ASKED_ROWS, CONVERTED_LENGTHS, LISTED_TOGETHER, LISTED_TURNS, Tiling
from jax_mfa.specification import Operands, Specification, accumulation_dtype, expand_rows
from jax_mfa.whole_rows import per_batch_row


class Problem:
    """A specification with its operands and its tiles.

    Columns are read in the layout [rows, K, S, ...]: what a step takes of them is then a matrix as it lies. Those that
    are met once are left as they are till then: nothing is read of a cache but the tiles that are visited. Rows and
    their results are left by token, and laid out by each step that meets them: a copy of them all is written to memory
    and read again, that of a tile stays in the caches (B1 T2048 N32 K8 H128 causal forward 387 → 343 ms; B1 T8192
    N8 H64 training takes 54 MiB of temporary memory instead of 129). Only those of a single step are laid out before,
    where XLA makes one pass of it with what is beside it.
    """

    def __init__(
        self,
        spec: Specification,
        operands: Operands,
        tiles: Tiling,
        heads_in_one: bool = False,
        keys_transposed: bool = False,
        differentiated: bool = False,
        is_backward: bool = False,
    ) -> None:
        self.spec, self.operands, self.tiles = spec, operands, tiles
        self.repeats = Operands(*spec.repeats)
        self.batch, self.t, self.n, self.h = operands.query.shape
        self.s, self.k, self.v = operands.value.shape[1:]
        self.g = self.n // self.k
        self.acc = accumulation_dtype(operands.query.dtype)
        self.row_tiles = -(-self.t // tiles.rows)
        self.column_tiles = -(-self.s // tiles.columns)
        overlap = bool(self.t % tiles.rows or self.s % tiles.columns)
        self.rows_once = self.column_tiles == 1 and self.t % tiles.rows == 0
        self.columns_once = self.row_tiles == 1 and self.s % tiles.columns == 0
        self.batch_steps = self.batch // tiles.batch_rows
        self.head_steps = self.k // tiles.key_heads
        self.whole = self.batch_steps == self.head_steps == self.row_tiles == self.column_tiles == 1
        self.met_once = self.row_tiles == 1 and (heads_in_one or not self.whole)
        # rows and their results as [B, K, G · T, ...], else as [B, T, N, ...]
        self.rows_by_head = self.whole
        # all heads in one product over the columns as they lie, of which only blocks are looked at
        self.heads_in_one = heads_in_one
        # keys laid out as [rows, K, H, S] for the scores, and values for their products, in a problem of one tile
        self.keys_transposed = keys_transposed
        # whether all factors are converted: of a problem of one tile, as laying out both takes longer than multiplying
        length = (max if BARRIERS_LAST else min)(self.g * self.t, self.s)
        self.converts = differentiated and self.whole and length < CONVERTED_LENGTHS
        # and in loops but those of the backward pass where XLA takes barriers away: it lays numbers of 16 bits out anew
        # while it cuts them, and is slow at that (B4 T8 S3000 N16 H64 bfloat16 24 → 6 ms, decode B4 S1068 N32 K8 H128
        # 5.8 → 1.6, T1024 N12 H64 causal 15.7 → 11.3; training of T1024 N12 31 → 35)
        self.converts |= not (self.whole or is_backward or BARRIERS_LAST or heads_in_one)
        # whether two products read rows as `rows_for_steps` gives them, in one program; those of 16 bits are converted
        # for one of the two, or for both, and then two copies are no slower
        self.rows_twice = differentiated and operands.query.dtype.itemsize > 2
        # whether anything that is not finite may spoil what does not see it
        self.masked = spec.has_mask(operands) or overlap or (heads_in_one and self.k > 1)
        # nor does ∞ survive weights in parts, of which some are 0
        self.masked |= self.value_dtype != self.acc
        # of all factors of the products: an array, False of what is to be found with care, None where each step asks
        self.all_finite: Any = None
        # whether attempts follow where some are not; else what is found is asked: few rows find less than they meet
        self.attempts = self.masked and not self.whole and (self.row_tiles > 1 or self.g * self.t >= ASKED_ROWS)
        # then a row's sum enters its exponents, in fewer instructions; in one tile XLA may share exponentials with the
        # forward pass, and what is made again with care shall be equal to the bit where all is finite
        self.log_norms = self.attempts
        # powers of two multiply queries in loops and not their scores, which are more and the same numbers then: XLA
        # takes a pass over those for it (T1500 N8 H64 forward 27.8 → 25.7 ms, on 0.10.2 33.7 → 32.1)
        is_power = 0 < spec.scale <= 1 and math.frexp(spec.scale)[0] == 0.5
        scales_rows = is_power and operands.scale is None and not self.whole
        self.scale_of_rows = spec.scale if scales_rows else 1.0
        self.scale_of_scores = 1.0 if scales_rows else spec.scale

    # --- layouts

    def factors(self, rows: Any, columns: Any) -> Any:
        """The dtype in which two operands are multiplied: their own if that is bfloat16, whose products are exact in
        the accumulation dtype; else that."""
        as_it_is = lambda x: isinstance(x, jax.Array) or (self.heads_in_one and x.storage is None)
        own = all(as_it_is(x) and x.dtype == jnp.bfloat16 for x in (rows, columns))
        return rows.dtype if own and not self.converts else self.acc

    @property
    def value_dtype(self) -> Any:
        """The dtype of values that are multiplied with weights: bfloat16 as they are where heads are in one product,
        for which weights are split, since few rows cost less than values that are converted."""
        return self.factors(self.operands.value, self.operands.value) if self.heads_in_one else self.acc

    def rows_for_steps(self, x: Any, dtype: Any = None) -> Array:
        """[B, T, N, ...] for `Step.rows_of`: of `rows_by_head` laid out, in this dtype or else that of accumulation;
        or as it is, but one number a row as `results` lie."""
        if not self.rows_by_head:
            return x if x.ndim > 3 else x.swapaxes(1, 2)
        tail = x.shape[3:]
        x = jnp.moveaxis(x.reshape(*x.shape[:2], self.k, self.g, *tail), 1, 3).astype(dtype or self.acc)
        if tail:
            x = laid_out(x, self.rows_twice)
        return x.reshape(*x.shape[:2], -1, *tail)

    def rows_transposed(self, x: Any) -> Any:
        """[B, T, N, x] for `Step.transposed_rows_of`: of `rows_by_head` [B, K, x, G · T] in the accumulation dtype; or
        as it is."""
        if not self.rows_by_head or not ROWS_TRANSPOSED:
            return self.rows_for_steps(x)
        x = x.reshape(*x.shape[:2], self.k, self.g, -1).transpose(0, 2, 4, 3, 1)
        return x.reshape(*x.shape[:3], -1).astype(self.acc)

    def kept(self, x: Any) -> Any:
        """A result by token, `settled` after a loop."""
        return x if self.whole or x.ndim < 4 else settled(x, 2)

    def results(self, *tail: int) -> tuple[int, ...]:
        """The shape of results of so many numbers a row: [B, K, G · T, ...] of `rows_by_head`, else [B, T, N, x], or
        [B, N, T] of one."""
        if self.rows_by_head:
            return self.batch, self.k, self.g * self.t, *tail
        return (self.batch, self.t, self.n, *tail) if tail else (self.batch, self.n, self.t)

    def along_rows(self, x: Any) -> Any:
        """`results` of one number a row, with the axes of others."""
        return x if self.rows_by_head else x.swapaxes(1, 2)

    def by_token(self, x: Any) -> Any:
        """`results` as [B, T, N, ...]; of one number a row what `along_rows` gives."""
        if not self.rows_by_head:
            return x
        tail = x.shape[3:]
        x = jnp.moveaxis(x.reshape(*x.shape[:2], self.g, self.t, *tail), 3, 1)
        return x.reshape(*x.shape[:2], self.n, *tail)

    def columns_by_head(self, x: Any, dtype: Any = None, transposed: bool = False) -> Array:
        """[rows, S, K, ...] as [rows, K, S, ...] of this dtype, or else that of accumulation; or as it is where it is
        `met_once`, or no plain array. If `transposed`, a product lays it out again, and in one pass with this. What
        enters a loop is copied in any case."""
        if self.met_once or not isinstance(x, jax.Array):
            return x
        moved = jnp.moveaxis(x, 2, 1).astype(dtype or self.acc)
        if not self.whole:
            return settled(moved, 0)
        return moved if transposed else self.laid_out_columns(moved)

    def laid_out_columns(self, x: Array) -> Array:
        """`laid_out` of columns by head; as they are if of bfloat16, which a product lays out again."""
        return laid_out(x) if x.dtype == self.acc else x

    def columns_by_token(self, x: Any, as_rows: bool) -> Any:
        """[B, K, S, x], or [B, K, x, S] if not `as_rows`, as [B, S, K, x]."""
        if not as_rows:
            return jnp.moveaxis(x, 3, 1)
        # with an axis more, XLA lays it out in one pass instead of two
        return laid_out(jnp.moveaxis(x[:, :, None], 3, 1).reshape(self.batch, self.s, self.k, x.shape[3]))

    def per_row_and_head(self, name: str) -> Any:
        """The operand `[rows, N]` of this name, of a shape that broadcasts to what `along_rows` gives."""
        x = per_batch_row(self.spec, self.operands, name, self.acc)
        if not self.rows_by_head:
            return x[:, None]
        x = jnp.broadcast_to(x.reshape(x.shape[0], self.k, self.g, 1), (x.shape[0], self.k, self.g, self.t))
        return x.reshape(*x.shape[:2], -1)

    # --- loops

    def for_products(self, make: Callable[[Problem], Any]) -> Callable[[Problem], Any]:
        """A function that gives `make(problem)`, made once for this one."""
        made = make(self)
        return lambda p: made if p is self else make(p)

    def ask_before(self, *factors: Any) -> None:
        """Asks, once for all of the loop, whether these factors of its products are finite; unless all is not read, or
        each part only once."""
        if self.attempts and self.all_finite is None and self.operands.key_lengths is None:
            if all(isinstance(x, jax.Array) for x in factors):
                self.all_finite = finite_sums(factors)

    def bounds(self) -> tuple[Any, Array]:
        """The column tiles in which a row may see something: first, and the one after the last; [batch steps, row
        tiles] each, of numpy where they are known."""
        spec, o, c = self.spec, self.operands, self.tiles
        (left, right), size = spec.band, c.columns

        def per_step(name: str) -> Any:  # [1 | batch steps, batch rows of a step]
            x = expand_rows(getattr(o, name), getattr(self.repeats, name), self.batch)
            return x.reshape(-1, 1 if x.shape[0] == 1 else c.batch_rows)

        first = tile_start(np.arange(self.row_tiles, dtype=np.int32), c.rows, self.t)[None]
        low_offset = high_offset = np.full((1, 1), spec.query_offset, np.int32)
        if o.query_offset is not None:
            offset = per_step("query_offset")
            low_offset, high_offset = offset.min(1, keepdims=True), offset.max(1, keepdims=True)
        low: Any = np.zeros_like(first)
        high: Any = np.full_like(first, self.s)
        if left is not None:
            low = clip(before(first + low_offset, left), 0, self.s)
        if right is not None:
            high = clip(after(first + c.rows - 1 + high_offset, right, self.s), 0, self.s)
        if o.key_lengths is not None:
            high = clip(per_step("key_lengths").max(1, keepdims=True), 0, high)
        if o.query_lengths is not None:
            high = jnp.where(first < per_step("query_lengths").max(1, keepdims=True), high, 0)
        end = -(-high // size)
        low = low // size + 0 * end
        return low, clip(end, low, self.column_tiles)

    def over_tiles(self, body: Callable[..., Any], carry: Any, attempts: bool = True) -> Any:
        """`body(step, carry)` over all tiles in which a row may see something. It gives the next carry, and whether
        something of the tile is not finite, if that is to be asked. If `attempts` and anything may be hidden, the
        `Attempt`s after the first follow, over all tiles again, where something is not finite."""
        attempts = attempts and self.attempts
        if self.whole and not attempts:
            return body(Step(self, self.place(0, 0, 0, 0)), carry)[0]
        low, end = self.bounds()
        tries = len(Attempt.SIGNS) if attempts else 1
        listed = self._listed_places(low, end, tries)
        turns, same, place_of = listed or self._computed_places(low, end, tries)
        if isinstance(turns, int) and not turns:
            return carry
        one_pass, all_passes = (jnp.asarray(n, jnp.int32) if isinstance(n, int) else n for n in (turns, turns * tries))
        stop: Any = None  # where that may be before `all_passes`
        if attempts and self.all_finite is not False:
            stop = one_pass if self.all_finite is None else where(self.all_finite, one_pass, all_passes)

        # all that need the place would compute it anew: if that takes more than reading lists, it stands behind a
        # barrier, or where that does not help it is computed in the turn before. (For GPUs XLA evaluates the places of
        # loops whose turns it can count, which are listed, and fails at barriers.)
        held = listed is None and BARRIERS_LAST
        carried = listed is None and not held

        def turn(state: Any) -> Any:
            index, stop, here, carry = state
            here = here if carried else barrier(place_of(index)) if held else place_of(index)
            place = {**same, **here}
            sign = place.pop("sign", None)
            carry, not_finite = body(Step(self, Place(**place), sign), carry)
            if not_finite is not None:
                stop = where(not_finite, all_passes, stop)
            index = index + index.dtype.type(1)
            return index, stop, place_of(index) if carried else None, carry

        first = all_passes.dtype.type(0)
        goes_on = lambda state: state[0] < (all_passes if state[1] is None else state[1])
        return lax.while_loop(goes_on, turn, (first, stop, place_of(first) if carried else None, carry))[3]

    def mended_products(self, sums: list[Array], products: Sequence[Product]) -> list[Array]:
        """The products of a problem of one tile; if they are not finite, by `Attempt`s at a batch row and a head at a
        time, for the memory. But for weights, these compute again what they need: XLA would keep that apart for them.
        """
        p = Problem(self.spec, self.operands, Tiling(1, 1, self.tiles.rows, self.tiles.columns))
        p.attempts, p.all_finite = True, False
        # as XLA multiplies them, lest it make another copy
        axes = [n for n in (self.batch, self.k) if n > 1] or [1]
        weights = [each.weights.reshape(*axes, *each.weights.shape[2:]) for each in products]
        # of each product the elements along one axis are sums over all of x: one of them tells as much as all
        finite = all_finite([(x, 3 if each.transposed else 2) for each, x in zip(products, sums)])
        heads = np.int32(self.batch * self.k)
        turns = heads * np.int32(len(Attempt.SIGNS))

        def turn(state: Any) -> Any:
            index, sums = state
            attempt, head = divmod_unsigned(index, jnp.asarray(heads))
            row0, head0 = divmod_unsigned(head, self.k) if self.batch > 1 else (0, head)
            # 0, of which XLA does not know that it is the same in all turns: what depends on it is not made before
            row_start = lax.shift_right_logical(index, np.int32(31))
            w = Step(p, Place(row0, head0, row_start, 0, None, None), element(np.array(Attempt.SIGNS, p.acc), attempt))
            start = row0, head0, 0, 0
            own = start if len(axes) > 1 else (head, 0, 0)
            done = []
            for each, x, old in zip(products, weights, sums):
                of_head = cut(x, (*[1] * len(axes), *x.shape[-2:]), *own).reshape(1, 1, *x.shape[-2:])
                part = w.attempted(each, of_head)
                done.append(put(old, w.later(cut(old, part.shape, *start)) + part, *start))
            return index + np.int32(1), done

        return lax.while_loop(lambda state: state[0] < turns, turn, (where(finite, turns, np.int32(0)), sums))[1]

    def _listed_places(self, low: Any, end: Any, tries: int) -> tuple[int, dict[str, Any], Callable[..., Any]] | None:
        """How many turns there are, what of their places is the same in all, and a function of an index that gives the
        rest, and the sign of the attempt; read from lists, if the bounds are known and such lists short."""
        if not isinstance(end, np.ndarray) or not isinstance(self.batch, int):  # of a program for any batch
            return None
        turns = self.batch_steps * self.head_steps * int((end - low).sum())
        if turns > LISTED_TURNS:
            return None
        if not turns:
            return 0, {}, lambda index: {}
        tiles = [(i, j) for i in range(self.row_tiles) for j in range(low[0, i], end[0, i])]
        i, j = np.array(tiles, np.int32).reshape(-1, 2).T
        batch_step, head_step, tile = np.indices((self.batch_steps, self.head_steps, len(tiles))).reshape(3, -1)
        places = self.place(batch_step, head_step, i[tile], j[tile])._asdict()
        same = {name: x if x is None else int(np.min(x)) for name, x in places.items() if x is None or not np.ptp(x)}
        lists = {name: np.tile(x, tries).astype(np.int32) for name, x in places.items() if name not in same}
        if tries > 1:
            lists["sign"] = np.repeat(Attempt.SIGNS, turns).astype(self.acc)
        # loops that read lists of a length share the kernel
        lists = {name: np.pad(x, (0, -x.size % LISTED_TOGETHER)) for name, x in lists.items()}
        return turns, same, lambda index: {name: element(x, index) for name, x in lists.items()}

    def _computed_places(self, low: Any, end: Any, tries: int) -> tuple[Any, dict[str, Any], Callable[..., Any]]:
        """The same by arithmetic."""
        lists = low.shape[0]  # of tiles: one for each step of the batch, or one for all
        counts = (end - low).reshape(-1)
        ends = counts.cumsum()
        ends, shift = (jnp.asarray(x).astype(jnp.uint32) for x in (ends, low.reshape(-1) - (ends - counts)))
        turns = ends[-1] * jnp.uint32(self.head_steps * (self.batch_steps if lists == 1 else 1))
        same = {name: x for name, x in self.place(*[np.zeros(1, np.int32)] * 4)._asdict().items() if np.ndim(x) == 0}

        def place_of(index: Any) -> dict[str, Any]:  # in numbers without a sign: quotients of others are long programs
            sign = {}
            if tries > 1:
                attempt, index = divmod_unsigned(index, jnp.maximum(turns, 1))
                sign["sign"] = element(np.array(Attempt.SIGNS, self.acc), attempt)
            step, rest = divmod_unsigned(index, jnp.maximum(ends[-1], 1))
            row = (ends <= rest).sum(dtype=jnp.uint32)
            i, j = divmod_unsigned(row, self.row_tiles)[1], rest + element(shift, row)
            if lists == 1:
                batch_step, head_step = divmod_unsigned(step, self.head_steps)
            else:
                batch_step, head_step = divmod_unsigned(row, self.row_tiles)[0], step
            place = self.place(*(x.astype(jnp.int32) for x in (batch_step, head_step, i, j)))
            return sign | {name: x for name, x in place._asdict().items() if name not in same}

        return turns, same, place_of

    def place(self, batch_step: Any, head_step: Any, i: Any, j: Any) -> Place:
        """Of tile `i` of the rows and tile `j` of the columns; numbers, or arrays of numpy for all turns."""
        c, start = self.tiles, (batch_step * self.tiles.batch_rows, head_step * self.tiles.key_heads)
        row = 0 if self.row_tiles == 1 else tile_start(i, c.rows, self.t)
        own = i * c.rows if self.t % c.rows else None, j * c.columns if self.s % c.columns else None
        return Place(*start, row, tile_start(j, c.columns, self.s), *own)

    def mended(self, run: Any) -> tuple[Any, Any]:
        """`run(problem)`: sums, and what takes no care. In loops without attempts all is made again, with them, if the
        sums are not finite."""
        sums, rest = run(self)
        if self.whole or self.attempts or not self.masked:
            return sums, rest
        careful = Problem(self.spec, self.operands, self.tiles)
        careful.attempts, careful.all_finite = True, False
        # a loop of one turn or none, for it changes its arrays in place; `lax.cond` copies what it hands on
        again = lambda _: (jnp.zeros((), bool), run(careful)[0])
        # not all tiles are visited
        return lax.while_loop(lambda state: state[0], again, (~finite_sums(sums), sums))[1], rest

    def below_maximum(self, scores: Array, row_max: Array) -> Array:
        """scores − row_max, of [..., columns] and [...]."""
        x = scores - along_last(row_max, scores)
        if self.operands.bias is not None or self.operands.alibi_slopes is not None:
            # scores that are made again may be rounded otherwise: where they are huge, and one unit in the last place
            # is a large power of e, none may pass the maximum
            x = where(x > 0, self.acc.type(0), x)
        return x

    def norms(self, row_sum: Array) -> Array:
        """What `Step.probability` takes of rows' sums."""
        return jnp.log(row_sum) if self.log_norms else 1 / row_sum
