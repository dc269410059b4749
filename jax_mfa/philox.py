"""The dropout mask: a counter-based generator, so that any tile of any implementation can make its own bits.

Philox-4×32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3). The counter of
score (b, n, t, s) is (s // 4, t, n, b), its key the two words of the seed; the four output words serve the columns
4·(s // 4) … 4·(s // 4) + 3.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def _multiply(a: int, x: Any) -> tuple[Any, Any]:
    """High and low words of the 64-bit product of a constant and uint32 `x`, in 32-bit arithmetic."""
    a_low, a_high = np.uint32(a & 0xFFFF), np.uint32(a >> 16)
    x_low, x_high = x & np.uint32(0xFFFF), x >> np.uint32(16)
    low = a_low * x_low
    middle = a_high * x_low + (low >> np.uint32(16))
    carry = a_low * x_high + (middle & np.uint32(0xFFFF))
    high = a_high * x_high + (middle >> np.uint32(16)) + (carry >> np.uint32(16))
    return high, np.uint32(a) * x


def philox(key: Any, counter: Any) -> tuple[Any, Any, Any, Any]:
    """Four uint32 words for each counter, of four uint32 arrays, by a key of two; all six broadcast together."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + np.uint32(_WEYL[0]), k1 + np.uint32(_WEYL[1])
    return c0, c1, c2, c3


def drop_below(rate: float) -> int:
    """Random words below this drop their score."""
    return min(round(rate * 2**32), 2**32 - 1)


def keep_mask(rate: float, seed: Any, batch: Any, head: Any, row: Any, first_column: Any, columns: int) -> Any:
    """Which scores of a tile dropout keeps, each with probability 1 − rate: bool `[..., columns]`.

    The two words of the seed, batch, head and row are uint32 arrays that broadcast together and end in an axis of size
    1, which becomes the columns; first_column, the index of the tile's first, is an integer or broadcasts like row.
    """
    rank = max(x.ndim for x in (*seed, batch, head, row))
    column = jnp.arange(columns, dtype=jnp.uint32).reshape((1,) * (rank - 1) + (columns,))
    column = jnp.asarray(first_column, jnp.uint32) + column
    # each column makes its group's four words and takes its own: interleaving words made once is slower on CPU
    words = philox(seed, (column // 4, row, head, batch))
    word = words[3]
    for i in range(3):
        word = jnp.where(column % 4 == i, words[i], word)
    return word >= np.uint32(drop_below(rate))
