"""Kernels and their grids: with simdgroup matrices and a table's tiles, or without.

What each computes is written at its head, in `metal/`; in which order they run, in `kernels`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax_mfa.metal import operands, tiles
from jax_mfa.metal.plan import ITEM_SIZES, Buffer, Dispatch, Kernel
from jax_mfa.metal.problem import Problem

ROW_SIMDGROUPS = 8  # of kernels with a simdgroup for each row
BIAS_COLUMNS = 4  # fragments side by side in attention_d_bias
LISTED = ("mask", "block_mask", "query_segment_ids", "key_ranges")  # what makes a plan list visible tiles first
LIST_THREADS = 64
IN_LANES = ("attention_decode", "attention_decode_rows")  # kernels that read keys and values straight to lanes
PORTABLE_COST = 16  # multiply-accumulates of the matrix unit in the time of one without it: a guess, rather too high

Grid = tuple[int, int, int]


def _kernel(
    name: str, x: Problem, threads: int, arguments: tuple[int, ...], memory: int = 0, fragments: int = 0, **more: Any
) -> Kernel:
    """An instantiation; `arguments` are those of the template after the types, `more` are function constants."""
    short = "_".join([name, x.short, *(str(int(a)) for a in arguments)])
    constants = x.constants(**more) if operands.signature(name).features else ()
    types = x.types(in_lanes=name in IN_LANES)
    return Kernel(short, (name, types, *arguments), constants, threads, memory, fragments, x.rules.definitions)


@dataclasses.dataclass(frozen=True)
class TileLists:
    """Lists of visible tiles that a kernel walks over, as `attention_tile_lists` makes them: for each tile of `rows`
    rows those of `columns` columns that it meets, or the other way round."""

    rows: int
    columns: int
    for_rows: bool
    spans: bool  # the first and the number up to the last instead of each, where operands grow with T + S only
    buffer: Buffer

    @classmethod
    def wanted(cls, x: Problem, rows: int, columns: int, for_rows: bool) -> TileLists | None:
        """None where positions and lengths alone tell which tiles are visible, or where there is one tile to meet."""
        both = -(-x.t // rows), -(-x.s // columns)
        own, others = both if for_rows else both[::-1]
        if others == 1 or not any(name in x for name in LISTED):
            return None
        spans = "block_mask" not in x and 1 in x.shape("mask")[2:]
        heads = max(x.shape("mask")[1], x.shape("block_mask")[1])
        shape = (x.b, heads, own, 4 if spans else 2 + others)
        name = "row_lists" if for_rows else "column_lists"
        return cls(rows, columns, for_rows, spans, Buffer(name, "scratch", "int32", shape))

    @property
    def constants(self) -> dict[str, Any]:
        return {"has_lists": True, "has_spans": self.spans}

    def dispatch(self, x: Problem) -> Dispatch:
        arguments = (self.rows, self.columns, self.for_rows, LIST_THREADS)
        name = "attention_tile_lists"  # alike for all types but that of visibility
        kernel = Kernel(
            "_".join([name, *(str(int(a)) for a in arguments)]),
            (name, x.rules.visibility, *arguments),
            x.constants(**self.constants),
            LIST_THREADS,
            20 * LIST_THREADS,
            definitions=x.rules.definitions,
        )
        batch, heads, own, _ = self.buffer.shape
        bound = x.bound(name, {"lists": self.buffer.name})
        return Dispatch(kernel, (own, heads, batch), bound, batch * heads * x.t * x.s)


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel, its grid, its work (see `Dispatch`), and the lists it walks over."""

    kernel: Kernel
    grid: Grid
    work: int
    lists: TileLists | None = None

    @property
    def scratch(self) -> tuple[Buffer, ...]:
        return (self.lists.buffer,) if self.lists else ()

    def dispatches(self, x: Problem, own: Mapping[str, str | bytes]) -> tuple[Dispatch, ...]:
        """The kernel with its `own` operands by name, and before it the one that makes its lists."""
        name = self.kernel.template[0]
        names = operands.signature(name).names
        index = names.index("grid") if "grid" in names else None
        sizes = zip(("x", "y", "z", "width", "height", "depth"), (0, 0, 0, *self.grid))
        known = {**own, "grid": operands.packed("Grid", dict(sizes))}
        if self.lists:
            known["lists"] = self.lists.buffer.name
        made = (self.lists.dispatch(x),) if self.lists else ()
        return (*made, Dispatch(self.kernel, self.grid, x.bound(name, known), self.work, index))


def _tiled(name: str, x: Problem, tile: Any, lists: TileLists | None = None, **more: Any) -> Kernel:
    item = ITEM_SIZES[x.operand]
    sizes = (tile.threadgroup_memory(x.h, x.v, item), tile.fragment_bytes(x.h, x.v, item))
    constants = {**(lists.constants if lists else {}), **more}
    return _kernel(name, x, tile.simdgroups * 32, tuple(vars(tile).values()), *sizes, **constants)


def _by_rows(name: str, x: Problem) -> Kernel:
    return _kernel(name, x, ROW_SIMDGROUPS * 32, (ROW_SIMDGROUPS,))


class Matrices:
    """Kernels on simdgroup matrices, with the tiles of a table."""

    def __init__(self, x: Problem, chosen: tiles.Tiles) -> None:
        self.x, self.chosen = x, chosen

    def _over_rows(self, name: str, tile: tiles.ForwardTiles | tiles.QueryTiles, per_pair: int, **more: Any) -> Launch:
        x, lists = self.x, TileLists.wanted(self.x, tile.rows, tile.keys, True)
        grid = (x.n, -(-x.t // tile.rows) * tile.slices, x.b)
        return Launch(_tiled(name, x, tile, lists, **more), grid, x.pairs * per_pair, lists)

    def forward(self) -> Launch:
        x, tile = self.x, self.chosen.forward
        return self._over_rows("attention_forward", tile, tile.slices * x.h + x.v)

    def delta(self) -> Launch:
        x = self.x
        grid = (-(-x.t * x.n // ROW_SIMDGROUPS), 1, x.b)
        return Launch(_by_rows("attention_delta", x), grid, x.b * x.t * x.n * x.v)

    def d_query(self, **wants: bool) -> Launch:
        x, tile = self.x, self.chosen.d_query
        return self._over_rows("attention_d_query", tile, tile.slices * (x.h + x.v) + x.h, **wants)

    def d_key_value(self) -> Launch:
        x, tile = self.x, self.chosen.d_key_value
        lists = TileLists.wanted(x, tile.queries, tile.rows, False)
        grid = (x.k, -(-x.s // tile.rows) * tile.slices, x.b)
        work = x.pairs * (tile.slices + 1) * (x.h + x.v)
        return Launch(_tiled("attention_d_key_value", x, tile, lists), grid, work, lists)

    def d_bias(self) -> Launch:
        x = self.x
        rows, heads, t, s = x.shape("bias")
        grid = (-(-s // (8 * BIAS_COLUMNS)), -(-t // 8), rows * heads)
        return Launch(_kernel("attention_d_bias", x, 32, (BIAS_COLUMNS,)), grid, x.pairs * (x.h + x.v))


class Portable:
    """The same without simdgroup matrices."""

    def __init__(self, x: Problem, chosen: tiles.Portable) -> None:
        self.x, self.chosen = x, chosen

    def _launch(self, name: str, grid: Grid, work: int) -> Launch:
        threads = self.chosen.threads
        return Launch(_kernel(name, self.x, threads, (threads,)), grid, work * PORTABLE_COST)

    def _walking(self, name: str, grid: Grid, for_rows: bool, per_pair: int, **more: Any) -> Launch:
        tile = (self.chosen.rows, self.chosen.threads)
        lists = TileLists.wanted(self.x, *(tile if for_rows else tile[::-1]), for_rows)
        constants = {**(lists.constants if lists else {}), **more}
        kernel = _kernel(name, self.x, self.chosen.threads, (self.chosen.threads, self.chosen.rows), **constants)
        return Launch(kernel, grid, self.x.pairs * per_pair * PORTABLE_COST, lists)

    def forward(self) -> Launch:
        x = self.x
        return self._walking("portable_forward", (x.t, x.n, x.b), True, x.h + x.v)

    def delta(self) -> Launch:
        x = self.x
        return self._launch("portable_delta", (x.t * x.n, 1, x.b), x.b * x.t * x.n * x.v)

    def d_query(self, **wants: bool) -> Launch:
        x = self.x
        return self._walking("portable_d_query", (x.t, x.n, x.b), True, 2 * x.h + x.v, **wants)

    def d_key_value(self) -> Launch:
        x = self.x
        return self._walking("portable_d_key_value", (x.s, x.k, x.b), False, 2 * (x.h + x.v))

    def d_bias(self) -> Launch:
        x = self.x
        rows, heads, t, s = x.shape("bias")
        return self._launch("portable_d_bias", (s, t, rows * heads), x.pairs * (x.h + x.v))


def family(x: Problem, chosen: tiles.Tiles | tiles.Portable) -> Matrices | Portable:
    return Portable(x, chosen) if isinstance(chosen, tiles.Portable) else Matrices(x, chosen)


def decode(x: Problem, tile: tiles.DecodeTiles | tiles.DecodeRows, splits: int) -> tuple[Launch, Launch]:
    """Few rows against many keys in so many splits, and what merges them."""
    group = x.n // x.k * x.t
    attend = Launch(
        _tiled("attention_decode_rows" if isinstance(tile, tiles.DecodeRows) else "attention_decode", x, tile),
        (-(-splits // tile.simdgroups), -(-group // tile.rows) * tile.slices, x.k * x.b),
        x.pairs * (tile.slices * x.h + x.v),
    )
    merge = Launch(
        _by_rows("attention_merge", x),
        (-(-group // ROW_SIMDGROUPS), x.k, x.b),
        x.b * x.t * x.n * x.v * splits,
    )
    return attend, merge
