"""Kernels and their grids: with simdgroup matrices and a table's tiles, or without.

What each computes is written at its head, in `metal/`; in which order they run, in `plans.py`.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping
from typing import Any

from jax_mfa.metal import operands, tiles
from jax_mfa.metal.plan import ITEM_SIZES, Buffer, Dispatch, Kernel
from jax_mfa.metal.problem import LaunchProblem

LISTED = ("mask", "block_mask", "query_segment_ids", "key_ranges")  # what makes a plan list visible tiles first
LIST_THREADS = 64
# Of kernels without the matrix unit, in threadgroup memory: the head sizes of rows, and floats for each thread.
ROOMS: dict[str, tuple[str, int]] = {
    "forward": ("h", 2),
    "delta": ("", 1),
    "d_query": ("hv", 1),
    "d_key_value": ("hv", 2),
    "d_bias": ("hv", 1),
    "d_captured": ("hv", 2),
}
# of the gradient of captured arrays: floats that the tables of all shares have together, but for the least of them
TABLES, LEAST_SHARES, MOST_SHARES = 2**22, 8, 256
IN_LANES = ("decode", "decode_rows")  # kernels that read keys and values straight to lanes

Grid = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Share(tiles.Tile):
    """Of a kernel that walks over no tiles: its simdgroups, its template's argument, and what a threadgroup has of a
    result."""

    simdgroups: int
    argument: int
    rows: int = 1
    columns: int = 1

    @property
    def arguments(self) -> tuple[int, ...]:
        return (self.argument,)


@dataclasses.dataclass(frozen=True)
class Family:
    """Kernels of the same names and operands, and what of a launch tiles do not say.

    Attributes:
      name: what the names of its kernels begin with.
      rows_first: whether rows vary fastest in the grid and not heads. Where each row has a threadgroup they may be too
        many for any axis but the first.
      cost: of a multiply-accumulate, in those of the matrix unit.
    """

    name: str
    delta: Share
    d_bias: Share
    rows_first: bool = False
    cost: int = 1


ROWS = Share(8, 8, rows=8)  # of kernels with a simdgroup for each row
MATRICES = Family("attention", delta=ROWS, d_bias=Share(1, 4, rows=8, columns=4 * 8))
_ALONE = Share(tiles.RowTiles().threads // 32, tiles.RowTiles().threads)
# without the matrix unit a multiply-accumulate takes sixteen times as long: a guess, rather too high
PORTABLE = Family("portable", delta=_ALONE, d_bias=_ALONE, rows_first=True, cost=16)


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel over its grid, after the one that makes the lists it walks over, and what these are kept in."""

    dispatches: tuple[Dispatch, ...]
    scratch: tuple[Buffer, ...] = ()


def _short(name: str, arguments: tuple[int, ...]) -> str:
    return "_".join([name, *(str(int(a)) for a in arguments)])


def _with_lists(x: LaunchProblem) -> dict[str, Any]:
    """Function constants of what makes or walks over lists of visible tiles. Their spans are the first and the number
    up to the last instead of each, where operands grow with T + S only."""
    return x.constants(has_lists=True, has_spans="block_mask" not in x and 1 in x.shape("mask")[2:])


def _tile_lists(x: LaunchProblem, rows: int, columns: int, for_rows: bool) -> Launch | None:
    """Lists of visible tiles that a kernel walks over: for each tile of `rows` rows those of `columns` columns that it
    meets, or the other way round.

    None where positions and lengths alone tell which tiles are visible, or where there is one tile to meet.
    """
    both = -(-x.t // rows), -(-x.s // columns)
    own, others = both if for_rows else both[::-1]
    if others == 1 or not any(name in x for name in LISTED):
        return None
    name, constants, arguments = "attention_tile_lists", _with_lists(x), (rows, columns, for_rows, LIST_THREADS)
    kernel = Kernel(
        _short(name, arguments),
        (name, x.rules.visibility, *arguments),  # alike for all types but that of visibility
        operands.constants(constants),
        LIST_THREADS,
        (20 if "mask" in x else 4) * LIST_THREADS,
        definitions=x.rules.definitions,
    )
    grid = own, max(x.shape("mask")[1], x.shape("block_mask")[1]), x.b
    shape = (*grid[::-1], 4 if constants["has_spans"] else 2 + others)
    buffer = Buffer("row_lists" if for_rows else "column_lists", "scratch", "int32", shape)
    bound = x.bound(name, grid, constants, {"lists": buffer.name})
    return Launch((Dispatch(kernel, grid, bound, x.b * grid[1] * x.t * x.s),), (buffer,))


def _launch(
    family: Family,
    name: str,
    x: LaunchProblem,
    tile: tiles.Tile,
    grid: Grid,
    work: int,
    lists: Launch | None = None,
    numbers: Mapping[str, bytes] | None = None,
    **more: Any,
) -> Launch:
    """A kernel for a tile over a grid. `work` is its multiply-accumulates (see `Dispatch`), `numbers` are arguments,
    `more` function constants."""
    function, sizes = f"{family.name}_{name}", (x.h, x.v, ITEM_SIZES[x.operand])
    known, constants = operands.signature(function), (_with_lists(x) if lists else x.constants()) | more
    memory = tile.threadgroup_memory(*sizes)
    if family is PORTABLE:
        letters, floats = ROOMS[name]
        rows = sum(-(-getattr(x, size) // 4) * 16 for size in letters)
        memory = rows + 4 * tile.threads * (floats + more.get("wants_sums", False))
    kernel = Kernel(
        _short(f"{function}_{x.short}", tile.arguments),
        (function, x.types(in_lanes=name in IN_LANES), *tile.arguments),
        operands.constants(constants) if known.features else (),
        tile.threads,
        memory,
        tile.fragment_bytes(*sizes),
        x.rules.definitions,
    )
    before, own = lists or Launch(()), dict[str, str | bytes](numbers or {})
    if lists:
        own["lists"] = lists.scratch[0].name
    split = known.names.index("p") if known.in_parts else None
    dispatch = Dispatch(kernel, grid, x.bound(function, grid, constants, own), work * family.cost, split)
    return Launch((*before.dispatches, dispatch), before.scratch)


class Launches:
    """The kernels of a problem with these tiles."""

    def __init__(self, x: LaunchProblem, chosen: tiles.Tiles) -> None:
        self.x, self.chosen = x, chosen
        self.family = PORTABLE if isinstance(chosen.forward, tiles.RowTiles) else MATRICES

    def _walking(self, name: str, tile: Any, for_rows: bool, per_pair: int, **more: Any) -> Launch:
        """For each tile of rows a walk over columns, or the other way round."""
        x = self.x
        length, heads = (x.t, x.n) if for_rows else (x.s, x.k)
        groups = -(-length // tile.rows) * tile.slices
        grid = (groups, heads, x.b) if self.family.rows_first else (heads, groups, x.b)
        sizes = (tile.listed_rows, tile.keys) if for_rows else (tile.queries, tile.listed_rows)
        return _launch(self.family, name, x, tile, grid, x.pairs * per_pair, _tile_lists(x, *sizes, for_rows), **more)

    def forward(self) -> Launch:
        x, tile = self.x, self.chosen.forward
        return self._walking("forward", tile, True, tile.slices * x.h + x.v)

    def delta(self) -> Launch:
        x, share = self.x, self.family.delta
        grid = (-(-x.t * x.n // share.rows), 1, x.b)
        return _launch(self.family, "delta", x, share, grid, x.b * x.t * x.n * x.v)

    def d_query(self, **wants: bool) -> Launch:
        x, tile = self.x, self.chosen.d_query
        return self._walking("d_query", tile, True, tile.slices * (x.h + x.v) + x.h, **wants)

    def d_key_value(self) -> Launch:
        x, tile = self.x, self.chosen.d_key_value
        return self._walking("d_key_value", tile, False, (tile.slices + 1) * (x.h + x.v))

    def d_bias(self) -> Launch:
        x, share = self.x, self.family.d_bias
        rows, heads, t, s = x.shape("bias")
        grid = (-(-s // share.columns), -(-t // share.rows), rows * heads)
        return _launch(self.family, "d_bias", x, share, grid, x.pairs * (x.h + x.v), wants_bias=True)

    def d_captured(self) -> tuple[Launch, Buffer]:
        """With its result, a table for each share: few where they are large."""
        x, rows = self.x, self.x.shape("captured")[0]
        most = max(TABLES // max(rows * x.rules.floats, 1), LEAST_SHARES)
        shares = min(most, MOST_SHARES, x.n * x.t)
        result = Buffer("d_captured", "output", "float32", (rows, shares, x.rules.floats))
        return _launch(PORTABLE, "d_captured", x, _ALONE, (shares, 1, rows), x.pairs * (x.h + x.v)), result


def decode(x: LaunchProblem, tile: tiles.DecodeTiles | tiles.DecodeRows, split_keys: int) -> tuple[Launch, Launch]:
    """Few rows against many keys in splits of so many, and what merges them."""
    group, splits = x.n // x.k * x.t, -(-x.s // split_keys)
    numbers = {"splits": struct.pack("<i", splits), "split_keys": struct.pack("<i", split_keys)}
    name = "decode_rows" if isinstance(tile, tiles.DecodeRows) else "decode"
    grid = (-(-splits * x.k // tile.simdgroups), -(-group // tile.rows) * tile.slices, x.b)
    attend = _launch(MATRICES, name, x, tile, grid, x.pairs * (tile.slices * x.h + x.v), numbers=numbers)
    rows = lambda name, size: Buffer(name, "scratch", "float32", (x.b, x.k, splits, group, size))
    attend = dataclasses.replace(attend, scratch=(rows("split_out", x.v), rows("split_state", 2)))
    grid, work = (group, x.k, x.b), x.b * x.t * x.n * x.v * splits
    return attend, _launch(MATRICES, "merge", x, tiles.MergeTile(), grid, work, numbers=numbers)
