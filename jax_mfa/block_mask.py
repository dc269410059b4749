"""Block masks: which blocks of the T × S score matrix are computed at all."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class BlockMask:
    """A boolean mask in blocks of rows and columns.

    Row t may see column s only where `blocks[..., t // rows, s // columns]` is true.

    Args:
      blocks: bool array that broadcasts to `[..., N, ceil(T / rows), ceil(S / columns)]`.
      block_size: `(rows, columns)` of one block, static positive integers.

    Raises:
      ValueError: for a block size that is not a pair of positive integers.
    """

    blocks: Any
    block_size: tuple[int, int]

    def __post_init__(self):
        size = self.block_size
        if (
            not isinstance(size, (tuple, list))
            or len(size) != 2
            or any(isinstance(x, bool) or not isinstance(x, numbers.Integral) or x < 1 for x in size)
        ):
            raise ValueError(f"block_size must be a pair of positive integers (rows, columns), got {size!r}")
        object.__setattr__(self, "block_size", (int(size[0]), int(size[1])))

    def tree_flatten(self):
        return (self.blocks,), self.block_size

    @classmethod
    def tree_unflatten(cls, block_size, children):
        return cls(children[0], block_size)

    def __and__(self, other: BlockMask) -> BlockMask:
        """Blocks that both allow."""
        return BlockMask(self.blocks & self._alike(other), self.block_size)

    def __or__(self, other: BlockMask) -> BlockMask:
        """Blocks that either allows."""
        return BlockMask(self.blocks | self._alike(other), self.block_size)

    def _alike(self, other: BlockMask):
        if self.block_size != other.block_size:
            raise ValueError(f"block masks must share a block size, got {self.block_size} and {other.block_size}")
        return other.blocks

    # --- builders: the smallest block mask that holds a pattern. A block counts as a whole: where a pattern cuts
    # through blocks, give the exact rule (is_causal, local_window_size, mask, segment ids) beside the block mask.

    @classmethod
    def from_mask(cls, mask, block_size: tuple[int, int]) -> BlockMask:
        """From a bool mask `[..., T, S]`: blocks in which something is visible."""
        mask = np.asarray(mask) if not isinstance(mask, jax.Array) else mask
        if mask.ndim < 2 or mask.dtype != np.bool_:
            raise TypeError(f"mask must be bool [..., T, S], got {mask.dtype.name}{list(mask.shape)}")
        rows, columns = cls(mask, block_size).block_size
        *lead, t, s = mask.shape
        numpy: Any = jnp if isinstance(mask, jax.Array) else np
        padding = [(0, 0)] * len(lead) + [(0, -t % rows), (0, -s % columns)]
        blocks = numpy.pad(mask, padding).reshape(*lead, -(-t // rows), rows, -(-s // columns), columns)
        return cls(blocks.any((-3, -1)), block_size)

    @classmethod
    def from_function(
        cls, function: Callable[[Any, Any], Any], queries: int, keys: int, block_size: tuple[int, int]
    ) -> BlockMask:
        """From `function(i, j) -> bool` of integer arrays of block indices, row `[·, 1]` and column `[1, ·]`."""
        rows, columns = cls(None, block_size).block_size
        i, j = np.arange(-(-queries // rows))[:, None], np.arange(-(-keys // columns))[None, :]
        return cls(np.broadcast_to(np.asarray(function(i, j), bool), (i.size, j.size)), block_size)

    @classmethod
    def _of_distances(cls, low, high, queries, keys, block_size) -> BlockMask:
        """Blocks in which some column − row lies in low … high (None: no limit)."""
        rows, columns = cls(None, block_size).block_size

        def some(i, j):
            nearest, farthest = j * columns - (i * rows + rows - 1), j * columns + columns - 1 - i * rows
            return (True if high is None else nearest <= high) & (True if low is None else farthest >= low)

        return cls.from_function(some, queries, keys, block_size)

    @classmethod
    def causal(cls, queries: int, keys: int, block_size: tuple[int, int], query_offset: int = 0) -> BlockMask:
        """Columns up to the row's position, t + query_offset."""
        return cls._of_distances(None, query_offset, queries, keys, block_size)

    @classmethod
    def window(
        cls, queries: int, keys: int, block_size: tuple[int, int], left: int, right: int = 0, query_offset: int = 0
    ) -> BlockMask:
        """Columns from `left` before the row's position to `right` after it."""
        return cls._of_distances(query_offset - left, query_offset + right, queries, keys, block_size)

    @classmethod
    def strided(cls, queries: int, keys: int, block_size: tuple[int, int], stride: int) -> BlockMask:
        """The diagonal, and every `stride`-th block column before it (Sparse Transformer, arXiv:1904.10509)."""
        if stride < 1:
            raise ValueError(f"stride must be at least 1, got {stride}")
        every = cls.from_function(lambda _, j: j % stride == stride - 1, queries, keys, block_size)
        diagonal = cls._of_distances(0, 0, queries, keys, block_size)
        return diagonal | (every & cls.causal(queries, keys, block_size))

    @classmethod
    def prefix_lm(cls, queries: int, keys: int, block_size: tuple[int, int], prefix: int) -> BlockMask:
        """Causal, and the first `prefix` columns for every row (arXiv:1910.10683, section 3.2)."""
        _, columns = cls(None, block_size).block_size
        start = cls.from_function(lambda i, j: j * columns < prefix, queries, keys, block_size)
        return start | cls.causal(queries, keys, block_size)

    @classmethod
    def documents(cls, lengths: Sequence[int], block_size: tuple[int, int]) -> BlockMask:
        """Documents of these lengths one after another, each of which sees itself alone; T = S = their sum."""
        rows, columns = cls(None, block_size).block_size
        ends = np.cumsum(np.asarray(lengths, np.int64))
        total = int(ends[-1])
        document = np.searchsorted(ends, np.arange(total), side="right")

        def range_of(size):
            starts = np.arange(0, total, size)
            return document[starts], document[np.minimum(starts + size, total) - 1]

        (low, high), (key_low, key_high) = range_of(rows), range_of(columns)
        return cls((low[:, None] <= key_high[None, :]) & (key_low[None, :] <= high[:, None]), block_size)
