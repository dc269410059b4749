"""The rule that cuts a problem into tiles: three cases, eight tuned sizes, the same on every version of JAX.

1. Few scores are one tile: the dense program.
2. Many go by equal tiles, an outer loop over tiles of queries and an inner one over the tiles of keys that they see.
3. Few queries of a head against many keys (decoding) take all heads in a step, whose keys are read as they lie.

Knows shapes alone; `jax_mfa.tune` overrides what it says.
"""

from __future__ import annotations

import dataclasses
import math

from jax_mfa.problem import Operands, Specification, pool_fields
from jax_mfa.tuning import tuned

LARGEST = 2**20  # elements of a step's largest array: stays in caches, and is large enough to multiply fast
DENSE = 2**21  # elements of the largest array of a problem that is one tile
BLOCK = 1024, 1024  # queries and keys of a tile
BLOCK_IN_BAND = 512, 256  # and where a band of positions hides some of them
FEW_QUERIES = 16  # queries of a key head up to which small factors are transposed, and a step takes all heads
LARGEST_OF_FEW = 2**16  # elements of the keys of such a step, which stay in a core's cache
FEW_KEYS = 128  # and the fewest keys
ALIGNMENT = 16  # of tiles that do not divide a length
TUNED_BLOCKS = (128, 256, 512, 1024, 2048)  # of which `tune` tries all pairs


@dataclasses.dataclass(frozen=True)
class Tiles:
    """A step holds `batch` batch entries and `heads` key heads, and of those block_q queries × block_kv keys."""

    batch: int
    heads: int
    block_q: int
    block_kv: int

    def __str__(self) -> str:
        return f"tiles of {self.block_q} x {self.block_kv}, {self.batch} x {self.heads} heads at a time"


def usual(spec: Specification, operands: Operands, differentiated: bool) -> Tiles:
    """The tiles of a pass; `differentiated` where a gradient is computed, or follows."""
    batch, t, n, h = operands.query.shape
    s, k, v = operands.value.shape[1:]
    few = not differentiated and s > FEW_KEYS and t * (n // k) <= FEW_QUERIES
    # one tile would make float32 of a whole cache of 16 bits
    if is_dense(operands, LARGEST if few and operands.query.dtype.itemsize <= 2 else DENSE):
        return Tiles(max(batch, 1), max(k, 1), max(t, 1), max(s, 1))
    if few:
        of_key = k * max(h, v)
        block_kv = _equal(s, max(LARGEST_OF_FEW // of_key, FEW_KEYS), spec.page_size)
        alone = operands.key_lengths is not None or not isinstance(batch, int)  # exported for any batch
        return Tiles(1 if alone else _divisor(batch, LARGEST_OF_FEW // (block_kv * of_key)), k, t, block_kv)
    size = lambda block_q: max(block_q // (n // k), 64)
    whole = max(t, s) <= _equal(t, size(BLOCK_IN_BAND[0]))  # one tile of queries sees all tiles of keys
    block_q, block_kv = BLOCK if whole or spec.band == (None, None) else BLOCK_IN_BAND
    return step_of(spec, operands, size(block_q), block_kv)


def is_dense(operands: Operands, largest: int = DENSE) -> bool:
    """Whether a problem, of arrays up to so many elements, is one tile. Long caches with lengths, of which a part may
    be read, are not."""
    (batch, t, n, h), (s, k, v) = operands.query.shape, operands.value.shape[1:]
    if not isinstance(batch, int) or (operands.key_lengths is not None and s > 4 * BLOCK[1]):
        return False
    return batch * max(n * t * max(s, h, v), s * k * max(h, v)) <= largest


def tiles_of(plan: str, spec: Specification, operands: Operands, differentiated: bool) -> Tiles:
    """The usual tiles, or those that `tune` has found for a plan ("blockwise forward", "blockwise backward")."""
    tiles = usual(spec, operands, differentiated)
    allowed = lambda numbers: numbers in map(dataclasses.astuple, candidates(spec, operands, tiles))
    found = tuned.of(plan, lambda: spec.summary(operands), allowed)
    tiles = tiles if found is None else Tiles(*found)
    # rows of an operand that recur in the batch do not follow one another
    named = {name: x for name, x in operands._asdict().items() if x is not None}
    rows = {name: x for name, x in named.items() if name not in pool_fields(named)}
    recur = any(x.shape[0] != 1 and not spec.has_own_entries(operands, name) for name, x in rows.items())
    return dataclasses.replace(tiles, batch=1) if recur and tiles.batch > 1 else tiles


def candidates(spec: Specification, operands: Operands, tiles: Tiles) -> list[Tiles]:
    """Tiles that `tune` may take, those nearest to the usual ones first."""
    if not isinstance(operands.query.shape[0], int) or spec.page_size is not None:
        return [tiles]
    found = [step_of(spec, operands, q, kv) for q in TUNED_BLOCKS for kv in TUNED_BLOCKS]
    most = LARGEST * operands.value.shape[2] // operands.query.shape[2]
    distance = lambda x: sum(abs(math.log(a / b)) for a, b in zip(dataclasses.astuple(x), dataclasses.astuple(tiles)))
    found = [x for x in dict.fromkeys(found) if x.block_q * x.block_kv <= most and x != tiles]
    return [tiles, *sorted(found, key=distance)]


def step_of(spec: Specification, operands: Operands, block_q: int, block_kv: int) -> Tiles:
    """A step of tiles of about this size, with as many heads and batch entries as fit `LARGEST`."""
    batch, t, n, h = operands.query.shape
    s, k, v = operands.value.shape[1:]
    block_q, block_kv = _equal(t, block_q), _equal(s, block_kv, spec.page_size)
    group = n // k
    units = LARGEST // max(group * block_q * block_kv, group * block_q * max(h, v), block_kv * max(h, v))
    heads = _divisor(k, units)
    fits = units // k if heads == k and isinstance(batch, int) else 1
    return Tiles(_divisor(batch, fits) if fits > 1 else 1, heads, block_q, block_kv)


def _equal(length: int, target: int, page: int | None = None) -> int:
    """The size of a length's equal tiles: near the target; a divisor if it can be, else a multiple of `ALIGNMENT`;
    of whole pages always."""
    if page is not None:
        return max(min(max(target // page, 1) * page, length), 1)
    count = max(round(length / target), 1)
    for n in (count, count + 1):
        if length % n == 0:
            return max(length // n, 1)
    return min(-(-length // (ALIGNMENT * count)) * ALIGNMENT, length)


def _divisor(n: int, limit: int) -> int:
    """The largest divisor of n up to a limit; 1 of 0."""
    return max((d for d in range(1, max(1, min(n, limit)) + 1) if n % d == 0), default=1)
