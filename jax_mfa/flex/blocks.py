"""Which blocks of the T × S scores a `mask_mod` hides, and which it leaves whole, without an array of T × S.

Every score is asked, in chunks of blocks, so the answer is exact. Knows nothing of `BlockMask`, which keeps it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_mfa.flex.program import INDICES, Program, modifiers

CHUNK = 2**22  # scores that are held at once
PIECE = 2048  # rows and columns of a large block that are asked at once


@dataclasses.dataclass(frozen=True)
class Grid:
    """T queries and S keys in blocks.

    A chunk may reach beyond the last block, and a piece beyond its block: every index from there on is the last one
    within, for what is asked twice changes neither "some" nor "all".
    """

    queries: int
    keys: int
    rows: int
    columns: int
    query_offset: int

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows and columns of a block that is no larger than all."""
        return min(self.rows, max(self.queries, 1)), min(self.columns, max(self.keys, 1))

    @property
    def blocks(self) -> tuple[int, int]:
        return -(-self.queries // self.rows), -(-self.keys // self.columns)

    @property
    def piece(self) -> tuple[int, int]:
        """Rows and columns of a block that are asked at once."""
        return min(self.sizes[0], PIECE), min(self.sizes[1], PIECE)

    @property
    def chunk(self) -> tuple[int, int]:
        """Rows and columns of blocks that are asked at once: some rows, for what depends on a key alone is shared."""
        (i, j), (rows, columns) = self.blocks, self.piece
        wide = min(max(CHUNK // (8 * rows * columns), 1), max(j, 1))
        return min(max(CHUNK // (wide * rows * columns), 1), max(i, 1)), wide


def states_of(mask_mod: Any, grid: Grid, batch: int | None, heads: int | None, progress: bool) -> Any:
    """0, 1 or 2 of each block where the function holds for none, some or all of its scores.

    Returns:
      uint8 [batch, 1 | heads, T blocks, S blocks], without axes of what is None; of numpy unless the function reads
      traced arrays.
    """
    found = modifiers(None, mask_mod, np.float32)
    assert found is not None and found.mask is not None
    for name, index, size in (("batch", 0, batch), ("heads", 1, heads)):
        if size is None and found.mask.depends_on(index):
            raise ValueError(f"{name} must be given for a mask_mod that depends on {INDICES[index]}, got None")
    lead = () if batch is None and heads is None else (heads or 1,) if batch is None else (batch, heads or 1)
    starts = [range(0, size, step) for size, step in zip(grid.blocks + grid.sizes, grid.chunk + grid.piece)]
    chunks = np.array([*itertools.product(range(batch or 1), range(heads or 1), *starts)], np.int32)
    if not chunks.size:
        return np.zeros((*lead, *grid.blocks), np.uint8)
    vectors = [x if x is None else x[None] for x in (found.floats, found.integers)]
    numpy: Any = np
    states: Any = []
    if any(isinstance(x, jax.core.Tracer) for x in vectors):
        numpy, states = jnp, lax.map(functools.partial(_chunk, found.mask, grid, vectors), chunks)
    else:
        with jax.ensure_compile_time_eval():
            for i, start in enumerate(chunks, 1):
                states.append(np.asarray(_chunk(found.mask, grid, vectors, start)))
                if progress:
                    _show(i, len(chunks))
    down, across, *pieces = map(len, starts)
    states = numpy.asarray(states).reshape(-1, down, across, *pieces, *grid.chunk)
    low, high = states.min((3, 4)), states.max((3, 4))
    states = numpy.where(low == high, low, 1).transpose(0, 1, 3, 2, 4)
    states = states.reshape(-1, down * grid.chunk[0], across * grid.chunk[1])
    return states[:, : grid.blocks[0], : grid.blocks[1]].reshape(*lead, *grid.blocks)


def _show(done: int, of: int) -> None:
    """A bar on stderr, drawn anew at each percent."""
    if (percent := 100 * done // of) != 100 * (done - 1) // of:
        end = "\n" if done == of else ""
        print(f"\rblocks |{'#' * (percent // 4):25}| {percent} %", end=end, file=sys.stderr, flush=True)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _chunk(program: Program, grid: Grid, vectors: Any, start: Array) -> Array:
    """The states of pieces of a chunk of blocks; it starts at this batch entry, head, row and column of blocks, and row
    and column of each block."""

    def indices(axis: int, length: int) -> Array:  # [blocks, piece]
        block = jnp.minimum(start[2 + axis] + jnp.arange(grid.chunk[axis]), grid.blocks[axis] - 1)
        place = jnp.minimum(start[4 + axis] + jnp.arange(grid.piece[axis]), grid.sizes[axis] - 1)
        return jnp.minimum(block[:, None] * grid.sizes[axis] + place[None], length - 1).astype(np.int32)

    t, s = indices(0, grid.queries)[None, :, None, :, None], indices(1, grid.keys)[None, None, :, None]
    b, n = (start[i].reshape(1, 1, 1, 1, 1) for i in (0, 1))
    see = program.over((b, n, t + np.int32(grid.query_offset), s), *vectors)[0]
    count = see.sum(2, dtype=np.min_scalar_type(grid.piece[0]))  # in few bits: more of them fit a register
    return (count > 0).any(-1).astype(np.uint8) + (count == grid.piece[0]).all(-1).astype(np.uint8)
