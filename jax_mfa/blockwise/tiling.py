"""How the loops of `blockwise` cut a problem, and why: every number here was measured, on x86-64 with two cores.

XLA's CPU backend runs a matrix product at full speed only when it is large. A *step* takes a few batch rows and key
heads, a *tile* is a part of their scores.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from jax_mfa import tuned
from jax_mfa.specification import Operands, Specification
from jax_mfa.storage import Stored

_SMALL_PRODUCTS = jax.__version_info__ >= (0, 11)  # which are faster there

# A problem of no more scores than this, over all heads and batch rows, is one tile: loops cost more than they save.
WHOLE_SCORES = 2**21
# Twice as many, where those of a key head are no more than this: a loop would run over products that small. Of a
# forward pass alone no more than that, for which JAX 0.12 has one kernel whatever its heads (B8 T200 N8 H64 3.8 → 2.3
# ms, on 0.10.2 3.6 → 2.6; T577 N12 bfloat16 5.1 → 2.4); but not where it hides something, and holds more arrays at once
# (B16 T128 N16 H64 causal 25 → 14 ms).
SMALL_HEAD = 2**14
# There so many, of larger heads on 0.10.2 (T700 N6 H64 causal forward 3.7 → 2.7 ms, on 0.10.2 4.4 → 3.9).
MASKED_SCORES, MASKED_HEAD = 3 * 2**20, 0 if _SMALL_PRODUCTS else 2**17
SMALL_HEAD_ALONE = math.inf if _SMALL_PRODUCTS else 2**16
# Rows and columns of a tile. Below about 512 × 512 scores a product slows down; 1024 × 1024 are better still.
FORWARD_TILE = 1024, 1024
# The gradients are faster in whole rows on JAX 0.12, and in fewer columns on 0.10.2 (B1 T1500 N8 H64 training 121 → 110
# and 335 → 124 ms). With fewer columns a tile has more rows.
BACKWARD_TILE = (512, 2048) if _SMALL_PRODUCTS else (1024, 512)
# Lengths and segments leave out whole tiles, of which there are few then.
BACKWARD_TILE_MASKED = (1024, 1024) if _SMALL_PRODUCTS else BACKWARD_TILE
# Where positions hide columns, smaller tiles compute less that is hidden (B1 T2048 N32 K8 H128 forward 354 → 296 ms).
FORWARD_TILE_HIDDEN = (256, 256) if _SMALL_PRODUCTS else (512, 512)
# But not where all batch rows have no more key heads than this, which makes small steps (B1 T3000 N4 H64 28 → 20 ms);
# rows of several query heads may then be as many (T1500 N16 K1 H64 38 → 25 ms, on 0.10.2 29 → 26).
FEW_HEADS, FORWARD_TILE_OF_FEW_HEADS, FORWARD_TILE_OF_FEW_GROUPS = 4, (512, 512), (1024, 256)
BACKWARD_TILE_HIDDEN = 512, 512
# Instead of two rows of such tiles, of which three quarters are computed (B1 T1024 N12 H64 training 64 → 57 ms).
BACKWARD_TILE_OF_TWO = (384, 384) if _SMALL_PRODUCTS else BACKWARD_TILE_HIDDEN
# What a step of few rows, or of a cache, is measured by.
COLUMNS = 512
# So few rows, over all heads, are multiplied with the keys of all heads: keys and values are then read once, as they
# lie, and reading is what takes the time.
FEW_ROWS = 16
# Of bfloat16 twice as many, if columns are so many times as many and keys more elements than `FEW_ELEMENTS`: their
# weights are split into three of bfloat16, and values are not converted. With AMX it takes half to two thirds of the
# time for 32 rows, on either version, and no less for 64 (B1 T1 S1024 N32 K8 H128 0.93 → 0.57 ms, on 0.10.2 0.99 →
# 0.65; B4 T2 S1900 N5 H128 16 → 1.6 and 5.5 → 2.3; but B1 T4 S112 N8 H128 takes 1.8 times as long).
FEW_ROWS_BFLOAT16, COLUMNS_TO_FEW_ROWS = 32, 12
# In a problem of one tile only so few products of a row and a head, and more elements than this to a head (B1 T1 S2000
# N4 H128 takes half the time in one, B8 T1 S196 N8 H64 1.3 to 2 times as long), or so many columns and either so few
# rows or `SHORT_ROWS`. On 0.10.2 more (B1 T1 S1778 N16 K8 H96 1.39 → 0.61 ms; on 0.12 as before).
FEW_PRODUCTS = 64 if _SMALL_PRODUCTS else 128
FEW_ELEMENTS = 2**16
FEWEST_ROWS, FEW_COLUMNS = 4, 128
# Scores of a key head are laid out anew for the gradients of keys and values, and not their rows, if they are no more
# than so many times the elements of those (T300 N8 H64 training 2.0 → 1.8 ms, bfloat16 1.7 → 1.5). On 0.10.2 as many
# are too many: such lengths are multiples of powers of two (T128 N12 H64 causal 0.84 → 0.70 ms).
LAID_OUT_SCORES, LAID_OUT_SCORES_MASKED = (3, 1) if _SMALL_PRODUCTS else (0.99, 0.99)
# So few rows of a key head are multiplied with its keys as [H, S], in a problem of one tile: on 0.12 (B16 T30 N8 H96
# forward 0.75 → 0.66 ms), and on 0.10.2 if the size of a head is no multiple of 32 (B64 T27 N8 H48 causal 4.0 → 3.1).
# Fewer rows need 0.12 and many columns: half to three quarters of the time for 4 rows and 700 columns. With a backward
# pass it is so on 0.12 alone (B2 T29 N12 H48 training 0.50 → 0.39; on 0.10.2 B8 T16 N8 H48 takes 1.1 times as long),
# and not in `parts` there, of which XLA makes one kernel with the cut (B64 T20 S300 N8 H128 forward 30 → 12 ms).
TRANSPOSED_ROWS = range(8, 33) if _SMALL_PRODUCTS else range(16, 33)
TRANSPOSED_UNLESS_MULTIPLE = math.inf if _SMALL_PRODUCTS else 32
FEWER_ROWS = range(2, 8) if _SMALL_PRODUCTS else ()
TRANSPOSED_COLUMNS = 256
# Heads of fewer elements make rows that JAX 0.12 is slow to copy: their keys are laid out so for any number of rows
# (B64 T49 N32 H32 bfloat16 15 → 13 ms), or met in one product (B16 T1 S500 N4 H32 0.50 → 0.27).
SHORT_ROWS = 64 if _SMALL_PRODUCTS else 0
# A cache whose columns are one tile is read whole; of no more elements than this without a loop (B8 T1 S600 N16 K4 H64
# 0.55 → 0.38 ms, B8 T1 S700 N32 K8 H64 bfloat16 1.11 → 0.78).
SMALL_CACHE = 1_250_000
SMALL_CACHE_BFLOAT16 = 4 * SMALL_CACHE if _SMALL_PRODUCTS else SMALL_CACHE
# Of so few elements any cache is read whole (B1 T1 S8192 N8 K1 H64 0.76 → 0.43 ms, on 0.10.2 0.79 → 0.44): a tile of
# others holds twice as many.
TINY_CACHE = 2**19
# Keys of more elements, which caches do not hold, are laid out tile by tile where four times as many rows meet them. Of
# bfloat16, which JAX 0.12 multiplies as they are, four times as many (B1 T1 S4096 N32 K8 H128 takes 0.6 of the time),
# but on 0.10.2 fewer (that problem 2.1 → 1.3 ms, B1 T1 S3000 N8 H64 0.43 → 0.27), and also where no more than so many
# rows of a key head meet so many times as many columns (B16 T16 S512 N16 H64 9.7 → 4.6, B64 T20 S300 N8 H128 21 → 12).
BEYOND_CACHES = 2**21
BEYOND_CACHES_BFLOAT16 = 4 * BEYOND_CACHES if _SMALL_PRODUCTS else SMALL_CACHE
ROWS_BEYOND_CACHES, COLUMNS_BEYOND_CACHES = 0 if _SMALL_PRODUCTS else 32, 8
# glibc asks the system for 32 MiB and more anew at each call, in pages that must all be cleared. Where the keys, values
# and scores of a forward pass are that many bytes, its rows few to a key head and nothing hidden, it goes by tiles
# (B16 T16 S512 N16 H64 24 → 12 ms).
# Training that hides nothing is one tile on JAX 0.12 if two arrays of scores and three of rows or columns are no more,
# the scores of a key head are no more than `TRAINED_HEAD`, and columns no more than twice the rows (T640 N8 H64 15 → 11
# ms; B16 T200 N6 takes 1.6 times as long in one, T900 N4 1.3 times, T179 S1638 N8 1.7 times).
FRESH_BYTES = 2**25
TRAINED_HEAD = 2**19 if _SMALL_PRODUCTS else 0
ROWS_FOR_FRESH_BYTES = 128
# Problems of several batch rows that would take so much memory go in parts of about so many elements of rows, columns
# or scores (B256 T16 N8 H128 training 33 → 18 ms, of bfloat16 34 → 14; on 0.10.2 30 → 16 and 39 → 14; B64 T77 N8 H64
# causal forward 14.0 → 5.8).
PART_ELEMENTS = 2**19
# Training of so many times more columns than rows holds less (B8 T4 S3000 N8 H64 bfloat16 in parts 45 → 17 ms, on
# 0.10.2 48 → 26; B4 T4 S1504 N12 H80 27 → 10; B64 T4 S300 N8 on 0.10.2 53 → 32). But where most is read and written
# once, it is one tile all the same: on 0.12 of float32 for one row of a key head (B8 T1 S1500 N8 H64 27 → 5), on 0.10.2
# if a batch row has keys `BEYOND_CACHES` (B4 T2 S4000 N8 H128 bfloat16 81 → 62, B2 T4 S4000 N16 85 → 69).
COLUMNS_TO_A_ROW = 16
# With no more outputs than this, of one batch row, or fewer scores, of all, probabilities are divided by their sum and
# not outputs. JAX 0.12 divides such outputs and lays them out again in one slow loop (64 µs became 49 at T = 32); and
# where a sum is found beside a product, it hands one of them to another thread, which costs more than either (B = 16,
# T = 23 and one head: 108 µs became 75). Larger problems of several batch rows are faster without.
DIVIDED_OUTPUTS = DIVIDED_SCORES = 2**15
# Where the rows of a key head and its columns are fewer than this, and on 0.10.2 where either are, training converts
# all that it multiplies (B512 T16 N4 H32 bfloat16 3.5 → 3.1 ms, on 0.10.2 4.2 → 3.4; there B4 T1 S3911 N16 H80 112 →
# 76); else numbers of 16 bits are laid out both as they are, for half of the products, and converted.
CONVERTED_LENGTHS = 32
# Several heads share a step up to this many scores. Passes of alike steps share kernels, and are compiled in less time.
STEP_SCORES = 2**20
# Loops over so many rows of a key head ask of what these meet whether it is finite, and not of what they found.
ASKED_ROWS = 128
# Loops of no more turns than this read from lists where each of them is; longer lists make longer programs.
LISTED_TURNS = 2**12
LISTED_TOGETHER = 64  # such lists are of a multiple of this
# Tiles that do not divide a length are of equal size, a multiple of this, and overlap a little.
ALIGNMENT = 16
# What `tune` tries for rows and columns.
TUNED_SIZES = (64, 128, 256, 512, 1024, 2048)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """A step holds `batch_rows` × `key_heads`, a tile `rows` × `columns` scores of each query head."""

    batch_rows: int
    key_heads: int
    rows: int
    columns: int

    def __str__(self) -> str:
        return f"tiles of {self.rows} x {self.columns}, {self.batch_rows} x {self.key_heads} heads at a time"


def _largest_divisor(n: int, limit: int) -> int:
    return max(d for d in range(1, max(1, min(n, limit)) + 1) if n % d == 0)


def tile_size(length: int, target: int) -> int:
    """The size of equal tiles of a length, near the target; one that divides the length if there is such a number."""
    count = max(round(length / target), 1)
    for n in (count, count + 1):
        if length % n == 0:
            return max(length // n, 1)
    size = -(-length // count)
    return min(-(-size // ALIGNMENT) * ALIGNMENT, length)


def forward_tiling(spec: Specification, operands: Operands, differentiated: bool = False) -> Tiling:
    """The tiles of the forward pass; `differentiated` as of `forward`."""
    batch, n, k = operands.query.shape[0], operands.query.shape[2], operands.key.shape[2]
    if not _positions_hide(spec):
        tile = FORWARD_TILE
    elif isinstance(batch, int) and batch * k <= FEW_HEADS:
        tile = FORWARD_TILE_OF_FEW_HEADS if n == k else FORWARD_TILE_OF_FEW_GROUPS
    else:
        tile = FORWARD_TILE_HIDDEN
    return _chosen("blockwise forward", spec, operands, tile, not differentiated)


def backward_tiling(spec: Specification, operands: Operands) -> Tiling:
    t, s = operands.query.shape[1], operands.key.shape[1]
    if not _positions_hide(spec):
        rows, columns = BACKWARD_TILE_MASKED if spec.has_mask(operands) else BACKWARD_TILE
        tile = rows * columns // max(tile_size(s, columns), 1), columns
    elif round(t / BACKWARD_TILE_HIDDEN[0]) == 2:
        tile = BACKWARD_TILE_OF_TWO
    else:
        tile = BACKWARD_TILE_HIDDEN
    return _chosen("blockwise backward", spec, operands, tile, False)


def _positions_hide(spec: Specification) -> bool:
    return spec.is_causal or spec.window != (None, None)


def heads_in_one(operands: Operands, tiles: Tiling, differentiated: bool) -> bool:
    """Whether a step of the forward pass multiplies all of its heads in one product."""
    (batch, t, _, h), (s, k), rows = operands.query.shape, operands.value.shape[1:3], _rows_of(operands)
    one_tile = _one_tile(operands, tiles)
    if (one_tile and differentiated) or tiles.rows != t or tiles.key_heads != k:
        return False
    if _is_bfloat16(operands) or not one_tile:
        return _are_few(operands)
    short = h < SHORT_ROWS or batch * rows <= FEWEST_ROWS
    enough = s * h > FEW_ELEMENTS or (short and s >= FEW_COLUMNS)
    return rows * k <= FEW_PRODUCTS and enough


def _is_bfloat16(operands: Operands) -> bool:
    """Whether columns are bfloat16 as they lie, in pages or not."""
    quantised = any(isinstance(x, Stored) and x.storage is not None for x in (operands.key, operands.value))
    return operands.key.dtype == jnp.bfloat16 and not quantised


def _are_few(operands: Operands) -> bool:
    """Whether rows are `FEW_ROWS`, or of bfloat16 `FEW_ROWS_BFLOAT16`."""
    rows, (s, k), h = _rows_of(operands), operands.value.shape[1:3], operands.query.shape[-1]
    if _is_bfloat16(operands):
        return rows <= FEW_ROWS_BFLOAT16 and rows * COLUMNS_TO_FEW_ROWS <= s and s * k * h > FEW_ELEMENTS
    return rows <= FEW_ROWS


def keys_transposed(operands: Operands, tiles: Tiling, differentiated: bool, is_part: bool = False) -> bool:
    """Whether scores of a problem of one tile, and what its backward pass multiplies with values, are products with
    keys and values as [H, S]; `differentiated` as of `forward`, and in the backward pass; `is_part` as of both."""
    if (
        (differentiated and not _SMALL_PRODUCTS)
        or (is_part and _SMALL_PRODUCTS)
        or not _one_tile(operands, tiles)
        or heads_in_one(operands, tiles, differentiated)
    ):
        return False
    (s, k, h), rows = operands.key.shape[1:], _rows_of(operands)
    if rows // k in TRANSPOSED_ROWS and h % TRANSPOSED_UNLESS_MULTIPLE:
        return True
    return h < SHORT_ROWS or (rows // k in FEWER_ROWS and s > TRANSPOSED_COLUMNS)


def divides_first(spec: Specification, operands: Operands, differentiated: bool) -> bool:
    """Whether the forward pass of one tile divides probabilities, and not outputs, by their sum.

    So it does if the backward pass is to follow, which needs them divided (B16 T53 N2 H32 training 0.9 of the time); on
    JAX 0.12 not under a mask, where that needs them masked again.
    """
    (batch, t, n, _), (s, _, v) = operands.query.shape, operands.value.shape[1:]
    if differentiated and not (_SMALL_PRODUCTS and spec.has_mask(operands)):
        return True
    return (batch == 1 and t * n * v <= DIVIDED_OUTPUTS) or batch * t * n * s < DIVIDED_SCORES


def gradients_as_rows(spec: Specification, operands: Operands, tiles: Tiling) -> bool:
    """Whether the gradients of keys and values are products of scores laid out anew, and not of rows.

    Rows and such gradients, laid out anew, have H elements for each row and each column. Where the scores are fewer,
    their layout costs less; where they are more, it may still, but takes room that rows would not.
    """
    (t, _, h), (s, k) = operands.query.shape[1:], operands.key.shape[1:3]
    rows, most = _rows_of(operands) // k, LAID_OUT_SCORES_MASKED if spec.has_mask(operands) else LAID_OUT_SCORES
    scores, elements = rows * s, (rows + s) * h
    if tiles.rows != t or tiles.columns != s or scores > most * elements:
        return False
    one_tile = _one_tile(operands, tiles)
    return scores <= elements or not (one_tile and _takes_fresh_memory(spec, operands, False, transposed_too=True))


def _one_tile(operands: Operands, tiles: Tiling) -> bool:
    (batch, t), (s, k) = operands.query.shape[:2], operands.value.shape[1:3]
    return tiles == Tiling(batch, k, t, s)


def _rows_of(operands: Operands) -> int:
    return operands.query.shape[1] * operands.query.shape[2]


def _has_few_rows(operands: Operands) -> bool:
    """Whether keys `BEYOND_CACHES` are laid out tile by tile."""
    rows, (s, k) = _rows_of(operands), operands.value.shape[1:3]
    if rows <= 4 * FEW_ROWS:
        return True
    of_head = rows // k
    few = of_head <= ROWS_BEYOND_CACHES and COLUMNS_BEYOND_CACHES * of_head <= s
    return few and operands.key.dtype == jnp.bfloat16


def _is_cache(operands: Operands) -> bool:
    """Whether the keys of a forward pass are as long as those of a cache, of which what lies behind its length is not
    even read. (Training of few rows in one tile takes half the time: B2 T2 S3000 N8 H64 bfloat16 11.5 → 4.8 ms, on
    0.10.2 12.1 → 4.8.)"""
    if operands.key_lengths is None or operands.value.shape[1] <= COLUMNS:
        return False
    if _rows_of(operands) > COLUMNS:
        return True
    small = SMALL_CACHE_BFLOAT16 if operands.key.dtype == jnp.bfloat16 else SMALL_CACHE
    return _keys_read(operands) > (small if operands.value.shape[1] <= 4 * COLUMNS else TINY_CACHE)


def _keys_read(operands: Operands) -> int:
    """Elements of keys, or of values where those are more; of one batch row where nobody knows how many there are."""
    batch, h = operands.query.shape[0], operands.query.shape[-1]
    s, k, v = operands.value.shape[1:]
    return (batch if isinstance(batch, int) else 1) * s * k * max(h, v)


def _chosen(plan: str, spec: Specification, operands: Operands, tile: tuple[int, int], alone: bool) -> Tiling:
    """What `tune` found for a problem, else `_tiling`."""
    usual = _tiling(spec, operands, tile, alone)
    allowed = lambda numbers: numbers in map(dataclasses.astuple, candidates(spec, operands, usual))
    found = tuned.of(plan, lambda: spec.summary(operands), allowed)
    return usual if found is None else Tiling(*found)


def candidates(spec: Specification, operands: Operands, usual: Tiling) -> list[Tiling]:
    """Tiles that `tune` may take, the nearest to the usual ones first; none holds more scores than those, or 2²⁰."""
    batch, t = operands.query.shape[:2]
    if not isinstance(batch, int) or spec.page_size is not None:
        return [usual]
    s, group = operands.key.shape[1], operands.query.shape[2] // operands.key.shape[2]
    rows = {tile_size(t, x) for x in TUNED_SIZES} | {usual.rows}
    columns = {tile_size(s, x) for x in TUNED_SIZES} | {usual.columns}
    found = [usual]
    for scores in (STEP_SCORES, STEP_SCORES // 2, STEP_SCORES // 4):
        found += [_with_heads(operands, r, c, scores) for r in rows for c in columns]
    held = lambda x: math.prod(dataclasses.astuple(x)) * group
    distance = lambda x: sum(abs(math.log(a / b)) for a, b in zip(dataclasses.astuple(x), dataclasses.astuple(usual)))
    return sorted((x for x in dict.fromkeys(found) if held(x) <= max(STEP_SCORES, held(usual))), key=distance)


def _tiling(spec: Specification, operands: Operands, tile: tuple[int, int], alone: bool) -> Tiling:
    """The tile sizes for a problem; a step has at most `STEP_SCORES`, or elements of keys, if a head has no more.

    Args:
      tile: its rows and columns, about.
      alone: whether of a forward pass without a backward pass, which reads keys once.
    """
    batch, t, n, h = operands.query.shape
    s, k, v = operands.value.shape[1:]
    known = isinstance(batch, int)  # not of a program that is exported for any batch
    cache = alone and _is_cache(operands)
    few_rows = alone and _has_few_rows(operands)
    is_stored = any(isinstance(x, Stored) for x in (operands.key, operands.value))
    as_they_lie = few_rows and not is_stored and _is_bfloat16(operands) and _are_few(operands)
    # else what a step reads of keys is laid out anew
    beyond_caches = BEYOND_CACHES_BFLOAT16 if operands.key.dtype == jnp.bfloat16 else BEYOND_CACHES
    held = STEP_SCORES if is_stored else beyond_caches if few_rows else math.inf
    copied = known and _keys_read(operands) > held and not as_they_lie
    if known and not cache and not copied and _fits_one_tile(spec, operands, alone):
        whole = Tiling(max(batch, 1), max(k, 1), max(t, 1), max(s, 1))
        return _in_parts(operands, whole) if _takes_fresh_memory(spec, operands, alone) else whole
    rows, columns = tile_size(t, max(tile[0] // (n // k), 1)), tile[1]
    if t * n <= COLUMNS:
        columns = 4 * COLUMNS
    if few_rows:  # all heads in a step (length 100 of S32768 N32 K8 H128 on 0.10.2 2.2 → 1.3 ms)
        columns = min(columns, max(STEP_SCORES // (k * max(h, v)), 1))
    if spec.page_size is None:
        columns = tile_size(s, columns)
    else:  # whole pages
        columns = min(max(columns // spec.page_size, 1) * spec.page_size, s)
    tiles = _with_heads(operands, rows, columns, STEP_SCORES)
    return _in_parts(operands, tiles) if are_parts(spec, operands, tiles, alone) else tiles


def _fits_one_tile(spec: Specification, operands: Operands, alone: bool) -> bool:
    """Whether a problem is small enough for one tile."""
    (batch, t, n), (s, k) = operands.query.shape[:3], operands.value.shape[1:3]
    scores, masked = batch * n * t * s, spec.has_mask(operands)
    if alone and _fresh(spec, operands):
        return False
    if not alone and masked and batch == 1 and _takes_fresh_memory(spec, operands, alone):  # of one part
        return False
    if scores <= WHOLE_SCORES:
        return True
    if alone and masked:
        return scores <= MASKED_SCORES and n * t * s > k * MASKED_HEAD
    if scores <= 2 * WHOLE_SCORES and n * t * s <= k * (SMALL_HEAD_ALONE if alone else SMALL_HEAD):
        return True
    if alone or masked or s > 2 * t or n * t * s > k * TRAINED_HEAD:
        return False
    return not _takes_fresh_memory(spec, operands, alone)


def _takes_fresh_memory(spec: Specification, operands: Operands, alone: bool, transposed_too: bool = False) -> bool:
    """Whether a problem of one tile would take as much memory as `FRESH_BYTES`, about; `transposed_too`: scores are
    then held in both layouts."""
    batch, t, n, h = operands.query.shape
    s, k, v = operands.value.shape[1:]
    size, masked = operands.query.dtype.itemsize, spec.has_mask(operands)
    if alone:  # no arrays of scores where one kernel makes probabilities of them
        scores = 3 * 4 * n * t * s if masked else 0
        return batch * (scores + t * n * h * size + s * k * (h * size + v * max(size, 4))) >= FRESH_BYTES
    # arrays of scores, of which some are held for attempts; and of rows or columns, some also converted
    of_scores, of_rows = (20, 12 if size >= 4 else 18) if masked else (8, 3 * size if size >= 4 else 24)
    if s > COLUMNS_TO_A_ROW * t:
        one_row, beyond_caches = t * n == k, s * k * max(h, v) > BEYOND_CACHES
        if (size >= 4 and one_row) if _SMALL_PRODUCTS else beyond_caches:
            return False
        of_rows = 8 if _SMALL_PRODUCTS or size < 4 else 4
    of_scores += 4 * transposed_too
    return batch * (of_scores * n * t * s + of_rows * max(t * n, s * k) * max(h, v)) > FRESH_BYTES


def _in_parts(operands: Operands, tiles: Tiling) -> Tiling:
    """These tiles of all heads, rows and columns, of as many batch rows as a part has."""
    batch, t, n, h = operands.query.shape
    s, k, v = operands.value.shape[1:]
    largest = batch * max(t * n * max(h, v), s * k * max(h, v), n * t * s)
    size = -(-batch // max(round(largest / PART_ELEMENTS), 1))
    even = _largest_divisor(batch, size)
    return dataclasses.replace(tiles, batch_rows=even if 2 * even > size else size)


def are_parts(spec: Specification, operands: Operands, tiles: Tiling, alone: bool) -> bool:
    """Whether each step of these tiles is a problem of its own: of some batch rows, with all of their heads; `alone` as
    of `_tiling`."""
    (batch, t), (s, k) = operands.query.shape[:2], operands.value.shape[1:3]
    if not isinstance(batch, int) or not spec.is_plain or tiles.batch_rows >= batch:
        return False
    if alone and (_is_cache(operands) or _has_few_rows(operands)):
        return False
    return tiles == Tiling(tiles.batch_rows, k, t, s)


def of_steps(operands: Operands, tiles: Tiling) -> Tiling:
    """The same, with as many batch rows as divide those that there are."""
    batch = operands.query.shape[0]
    even = tiles.batch_rows if not isinstance(batch, int) else _largest_divisor(batch, tiles.batch_rows)
    return dataclasses.replace(tiles, batch_rows=even)


def _fresh(spec: Specification, operands: Operands) -> bool:
    """Whether a forward pass of one tile would take memory that is cleared for it: see `FRESH_BYTES`."""
    batch, t, n, h = operands.query.shape
    s, k, v = operands.value.shape[1:]
    acc = 8 if operands.query.dtype == jnp.float64 else 4
    laid_out = batch * s * (k * (h * operands.key.dtype.itemsize + v * acc) + t * n * acc)
    return t * n < k * ROWS_FOR_FRESH_BYTES and laid_out >= FRESH_BYTES and not spec.has_mask(operands)


def _with_heads(operands: Operands, rows: int, columns: int, scores: int) -> Tiling:
    """A step of such tiles with as many heads and batch rows as `scores` allow."""
    batch, _, n, h = operands.query.shape
    k, v = operands.value.shape[2:]
    units = max(scores // (columns * max(n // k * rows, h, v)), 1)
    key_heads = _largest_divisor(k, units)
    batch_rows = _largest_divisor(batch, units // k) if key_heads == k and isinstance(batch, int) else 1
    return Tiling(batch_rows, key_heads, rows, columns)
