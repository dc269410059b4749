"""Block masks: which blocks of the T × S score matrix are computed at all."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any

import jax


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
