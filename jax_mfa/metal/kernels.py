"""Launch plans of attention: a specification and shapes in, `Plan` out. Plain Python; needs no device.

What each kernel computes is written at its head, in `metal/`. `PARAMETERS` must agree with `struct Parameters` there,
and the numbering of function constants with its list.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from typing import Any

import numpy as np

from jax_mfa.metal import source, tiles
from jax_mfa.metal.plan import ITEM_SIZES, SCALARS, Argument, Buffer, Dispatch, Kernel, Plan
from jax_mfa.philox import drop_below
from jax_mfa.specification import MAX_POSITION, Operands, Specification

ROW_SUM_SIMDGROUPS = 8
BIAS_COLUMNS = 4  # fragments side by side in attention_d_bias
Constants = tuple[tuple[int, str, str, Any], ...]  # as of `Kernel`
_SHORT = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a plan knows of an array."""

    shape: tuple[int, ...]
    dtype: Any

    @classmethod
    def of(cls, x) -> Shape:
        return cls(tuple(x.shape), np.dtype(x.dtype))


# the arrays that a launch may carry beside query, key and value, in the order of the plan's inputs: MSL name → dtype
# (bias has its own), and the operand whose row map it has
OPTIONAL = ("limits", "numbers", "bias", "mask", "blocks", "query_segments", "key_segments", "dropout", "key_ranges")
_DTYPES = {
    "limits": "int32",
    "numbers": "float32",
    "mask": "bool",
    "blocks": "bool",
    "query_segments": "int32",
    "key_segments": "int32",
    "dropout": "uint32",
    "key_ranges": "int32",
}
# buffer indices of ATTENTION_OPERANDS; those of VISIBILITY_OPERANDS; and of a kernel's own buffers, in order
OPERANDS = {name: i for i, name in enumerate(("query", "key", "value", "parameters", *OPTIONAL[:-1]))}
OPERANDS |= {"key_ranges": 18, "lists": 19}  # bound only where they are used
OPERANDS |= {"grid": 20}
VISIBILITY = ("parameters", "limits", "mask", "blocks", "query_segments", "key_segments", "key_ranges")
OWN = 12
LISTED = ("mask", "blocks", "query_segments", "key_ranges")  # what makes a plan list visible tiles first
LIST_THREADS = 64
BIAS_TYPES = {"float32": 1, "float16": 2, "bfloat16": 3}
UNUSED = b"\0" * 4  # bound where a launch lacks an operand
PORTABLE_COST = 16  # multiply-accumulates of the matrix unit in the time of one without it: a guess, rather too high

# `struct Parameters` of metal/attention/operands.h: names and struct codes in order
PARAMETERS = (
    *((name, "i") for name in ("queries", "keys", "heads", "key_heads", "batch", "limits_stride", "numbers_stride")),
    *((f"{x}.{part}", "i") for x in ("key", "value") for part in ("rows", "repeat")),
    ("left", "i"),
    ("right", "i"),
    *(
        (f"{x}.{part}", "i")
        for x in ("bias", "mask", "blocks")
        for part in ("map.rows", "map.repeat", "heads", "queries", "keys")
    ),
    ("block_rows", "i"),
    ("block_columns", "i"),
    ("cap", "f"),
    ("drop_below", "I"),
    ("keep_factor", "f"),
)


class Shapes:
    """The sizes of a problem, from the shapes of its arrays."""

    def __init__(self, query, key, value, optional: tuple[tuple[str, Shape], ...], uses: tuple[str, ...]):
        self.batch, self.t, self.n, self.h = query.shape
        self.s, self.k, self.v = value.shape[1:]
        self.key_rows, self.value_rows = key.shape[0], value.shape[0]
        self.dtype = query.dtype.name
        self.optional = dict(optional)
        self.uses = uses

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Of an operand [rows, heads, queries, keys], which may be absent."""
        return self.optional[name].shape if name in self.optional else (1, 1, 1, 1)

    def like_query(self, name: str, role: str) -> Buffer:
        return Buffer(name, role, self.dtype, (self.batch, self.t, self.n, self.h))

    def like_out(self, name: str, role: str) -> Buffer:
        return Buffer(name, role, self.dtype, (self.batch, self.t, self.n, self.v))

    def pairs(self, spec: Specification) -> int:
        """At most so many scores: of each row with the columns of its window, or all."""
        left, right = spec.band
        columns = self.s if left is None or right is None else min(self.s, left + right + 1)
        return self.batch * self.n * self.t * max(columns, 0)

    def rows(self, name: str, role: str, *more: int) -> Buffer:
        return Buffer(name, role, "float32", (self.batch, self.t, self.n, *more))

    def results(self, role: str) -> tuple[Buffer, ...]:
        """Those of the forward pass, which the backward pass takes."""
        return self.like_out("out", role), self.rows("row_max", role), self.rows("row_sum", role)

    def inputs(self) -> tuple[Buffer, ...]:
        """Query, key, value and what else the launch carries."""
        optional = (
            Buffer(name, "input", _DTYPES.get(name, x.dtype.name), x.shape) for name, x in self.optional.items()
        )
        return (
            self.like_query("query", "input"),
            Buffer("key", "input", self.dtype, (self.key_rows, self.s, self.k, self.h)),
            Buffer("value", "input", self.dtype, (self.value_rows, self.s, self.k, self.v)),
            *optional,
        )


def _parameters(spec: Specification, x: Shapes) -> bytes:
    left, right = spec.band
    repeats = Operands(*spec.repeats)
    block = spec.mask_block or (1, 1)

    def broadcast(name, repeat):
        if name not in x.optional:
            return (1, 1, 1, 1, 1)
        rows, *axes = x.optional[name].shape
        return (rows, repeat, *axes)

    values = (
        *(x.t, x.s, x.n, x.k, x.batch),
        3 if "limits" in x.optional else 0,
        3 if "numbers" in x.optional else 0,
        *(x.key_rows, repeats.key, x.value_rows, repeats.value),
        min(left or 0, 2 * MAX_POSITION),
        min(right or 0, 2 * MAX_POSITION),
        *broadcast("bias", repeats.bias),
        *broadcast("mask", repeats.mask),
        *broadcast("blocks", repeats.block_mask),
        *(min(size, MAX_POSITION) for size in block),
        spec.logits_soft_cap or 0.0,
        drop_below(spec.dropout_rate),
        1 / (1 - spec.dropout_rate),
    )
    return struct.pack("<" + "".join(code for _, code in PARAMETERS), *values)


def _constants(spec: Specification, x: Shapes, lists: TileLists | None = None):
    left, right = spec.band
    bias = x.optional.get("bias")
    return (
        (0, "has_left", "bool", left is not None),
        (1, "has_right", "bool", right is not None),
        (2, "has_mask", "bool", "mask" in x.optional),
        (3, "has_blocks", "bool", "blocks" in x.optional),
        (4, "has_segments", "bool", "query_segments" in x.optional),
        (5, "bias_type", "int", BIAS_TYPES[bias.dtype.name] if bias is not None else 0),
        (6, "has_slopes", "bool", "slopes" in x.uses),
        (7, "has_sinks", "bool", "sinks" in x.uses),
        (8, "has_cap", "bool", spec.logits_soft_cap is not None),
        (9, "has_dropout", "bool", "dropout" in x.optional),
        (12, "has_ranges", "bool", "key_ranges" in x.optional),
        (13, "has_lists", "bool", lists is not None),
        (14, "has_spans", "bool", lists is not None and lists.spans),
    )


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
    def wanted(cls, x: Shapes, rows: int, columns: int, for_rows: bool) -> TileLists | None:
        """None where positions and lengths alone tell which tiles are visible, or where there is one tile to meet."""
        both = -(-x.t // rows), -(-x.s // columns)
        own, others = both if for_rows else both[::-1]
        if others == 1 or not any(name in x.optional for name in LISTED):
            return None
        spans = "blocks" not in x.optional and 1 in x.shape_of("mask")[2:]
        heads = max(x.shape_of("mask")[1], x.shape_of("blocks")[1])
        shape = (x.batch, heads, own, 4 if spans else 2 + others)
        name = "row_lists" if for_rows else "column_lists"
        return cls(rows, columns, for_rows, spans, Buffer(name, "scratch", "int32", shape))

    def dispatch(self, spec: Specification, x: Shapes, operands: dict[str, str | bytes]) -> Dispatch:
        arguments = (self.rows, self.columns, self.for_rows, LIST_THREADS)
        name = "_".join(str(int(a)) for a in arguments)
        kernel = Kernel(
            f"attention_tile_lists_{name}",
            ("attention_tile_lists", *arguments),
            _constants(spec, x, self),
            LIST_THREADS,
            4 * LIST_THREADS,
        )
        seen = {name: operands[name] for name in VISIBILITY if name in operands}
        batch, heads, own, _ = self.buffer.shape
        bound = (*_bound(seen), *_arguments(self.buffer.name, start=OWN))
        return Dispatch(kernel, (own, heads, batch), bound, batch * heads * x.t * x.s)


def _types(x: Shapes) -> tuple[str, str, str]:
    """Template arguments: the type of matrix operands, and the sources of keys and values."""
    scalar = SCALARS[x.dtype]
    return scalar, f"Dense<{scalar}, {x.h}>", f"Dense<{scalar}, {x.v}>"


def _kernel(
    name: str, spec: Specification, x: Shapes, threads: int, tile, *, more=(), lists: TileLists | None = None
) -> Kernel:
    arguments = tuple(vars(tile).values())
    item = ITEM_SIZES[x.dtype]
    short = "_".join(str(int(a)) for a in arguments)
    return Kernel(
        f"{name}_{_SHORT[x.dtype]}_h{x.h}_v{x.v}_{short}",
        (name, *_types(x), *arguments),
        (*_constants(spec, x, lists), *more),
        threads,
        tile.threadgroup_memory(x.h, x.v, item),
        tile.fragment_bytes(x.h, x.v, item),
    )


def _argument(index: int, x: str | bytes) -> Argument:
    return Argument(index, bytes=x) if isinstance(x, bytes) else Argument(index, buffer=x)


def _arguments(*buffers: str | bytes | None, start: int = 0) -> tuple[Argument, ...]:
    """Arguments by position; None leaves an index out."""
    return tuple(_argument(i, x) for i, x in enumerate(buffers, start) if x is not None)


def _bound(operands: dict[str, str | bytes]) -> tuple[Argument, ...]:
    """Operands by name at their indices of ATTENTION_OPERANDS."""
    return tuple(_argument(OPERANDS[name], x) for name, x in operands.items())


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel that takes ATTENTION_OPERANDS, its grid, its work (see `Dispatch`), and the lists it walks over."""

    kernel: Kernel
    grid: tuple[int, int, int]
    work: int
    lists: TileLists | None = None

    @property
    def scratch(self) -> tuple[Buffer, ...]:
        return (self.lists.buffer,) if self.lists else ()

    def dispatches(self, spec: Specification, x: Shapes, *buffers: str | bytes | None) -> tuple[Dispatch, ...]:
        """The kernel with its own `buffers`, and before it the one that makes its lists."""
        operands = _operands(spec, x)
        made: tuple[Dispatch, ...] = ()
        if self.lists:
            made = (self.lists.dispatch(spec, x, operands),)
            operands["lists"] = self.lists.buffer.name
        operands["grid"] = struct.pack("<6I", 0, 0, 0, *self.grid)
        arguments = (*_bound(operands), *_arguments(*buffers, start=OWN))
        return (*made, Dispatch(self.kernel, self.grid, arguments, self.work, OPERANDS["grid"]))


def _operands(spec: Specification, x: Shapes) -> dict[str, str | bytes]:
    """What stands for each of ATTENTION_OPERANDS: a buffer of the plan, or bytes."""
    found: dict[str, str | bytes] = dict.fromkeys(OPTIONAL[:-1], UNUSED)
    found |= {
        "parameters": _parameters(spec, x),
        "limits": struct.pack("<3i", spec.query_offset, x.t, x.s),
        "numbers": struct.pack("<3f", spec.scale, 0, 0),
    }
    return found | {name: name for name in ("query", "key", "value", *x.optional)}


class _Matrices:
    """Kernels on simdgroup matrices, with the tiles of a table."""

    def __init__(self, spec: Specification, x: Shapes, chosen: tiles.Tiles):
        self.spec, self.x, self.chosen = spec, x, chosen

    def _over_rows(
        self, name: str, tile: tiles.ForwardTiles | tiles.QueryTiles, per_pair: int, more: Constants = ()
    ) -> Launch:
        x, lists = self.x, TileLists.wanted(self.x, tile.rows, tile.keys, True)
        kernel = _kernel(name, self.spec, x, tile.simdgroups * 32, tile, more=more, lists=lists)
        grid = (x.n, -(-x.t // tile.rows) * tile.slices, x.batch)
        return Launch(kernel, grid, x.pairs(self.spec) * per_pair, lists)

    def forward(self) -> Launch:
        x, tile = self.x, self.chosen.forward
        return self._over_rows("attention_forward", tile, tile.slices * x.h + x.v)

    def row_sums(self) -> Launch:
        x = self.x
        kernel = Kernel(
            f"attention_row_sums_{_SHORT[x.dtype]}_v{x.v}",
            ("attention_row_sums", SCALARS[x.dtype], x.v, ROW_SUM_SIMDGROUPS),
            (),
            ROW_SUM_SIMDGROUPS * 32,
        )
        grid = (-(-x.t * x.n // ROW_SUM_SIMDGROUPS), 1, x.batch)
        return Launch(kernel, grid, x.batch * x.t * x.n * x.v)

    def d_query(self, more: Constants) -> Launch:
        x, tile = self.x, self.chosen.d_query
        return self._over_rows("attention_d_query", tile, tile.slices * (x.h + x.v) + x.h, more)

    def d_key_value(self) -> Launch:
        x, tile = self.x, self.chosen.d_key_value
        lists = TileLists.wanted(x, tile.queries, tile.rows, False)
        kernel = _kernel("attention_d_key_value", self.spec, x, tile.simdgroups * 32, tile, lists=lists)
        grid = (x.k, -(-x.s // tile.rows) * tile.slices, x.batch)
        return Launch(kernel, grid, x.pairs(self.spec) * (tile.slices + 1) * (x.h + x.v), lists)

    def d_bias(self) -> Launch:
        x = self.x
        kernel = Kernel(
            f"attention_d_bias_{_SHORT[x.dtype]}_h{x.h}_v{x.v}_{BIAS_COLUMNS}",
            ("attention_d_bias", *_types(x), BIAS_COLUMNS),
            _constants(self.spec, x),
            32,
        )
        rows, heads, t, s = x.optional["bias"].shape
        grid = (-(-s // (8 * BIAS_COLUMNS)), -(-t // 8), rows * heads)
        return Launch(kernel, grid, x.pairs(self.spec) * (x.h + x.v))


class _Portable:
    """The same without simdgroup matrices."""

    def __init__(self, spec: Specification, x: Shapes, chosen: tiles.Portable):
        self.spec, self.x, self.chosen = spec, x, chosen

    def _kernel(self, name: str, heads: tuple[str, ...], sizes: tuple[int, ...], constants=()) -> Kernel:
        """`heads`: template arguments that come before `sizes` and follow from type and head sizes."""
        x = self.x
        short = f"{_SHORT[x.dtype]}_h{x.h}_v{x.v}_" + "_".join(map(str, sizes))
        return Kernel(f"{name}_{short}", (name, *heads, *sizes), constants, self.chosen.threads)

    def _work(self, per_pair: int) -> int:
        return self.x.pairs(self.spec) * per_pair * PORTABLE_COST

    def _walking(
        self, name: str, grid: tuple[int, int, int], for_rows: bool, per_pair: int, more: Constants = ()
    ) -> Launch:
        tile = (self.chosen.rows, self.chosen.threads)
        lists = TileLists.wanted(self.x, *(tile if for_rows else tile[::-1]), for_rows)
        constants = (*_constants(self.spec, self.x, lists), *more)
        sizes = (self.chosen.threads, self.chosen.rows)
        return Launch(self._kernel(name, _types(self.x), sizes, constants), grid, self._work(per_pair), lists)

    def forward(self) -> Launch:
        x = self.x
        return self._walking("portable_forward", (x.t, x.n, x.batch), True, x.h + x.v)

    def row_sums(self) -> Launch:
        kernel = self._kernel("portable_row_sums", (SCALARS[self.x.dtype],), (self.x.v, self.chosen.threads))
        x = self.x
        return Launch(kernel, (x.t * x.n, 1, x.batch), x.batch * x.t * x.n * x.v * PORTABLE_COST)

    def d_query(self, more: Constants) -> Launch:
        x = self.x
        return self._walking("portable_d_query", (x.t, x.n, x.batch), True, 2 * x.h + x.v, more)

    def d_key_value(self) -> Launch:
        x = self.x
        return self._walking("portable_d_key_value", (x.s, x.k, x.batch), False, 2 * (x.h + x.v))

    def d_bias(self) -> Launch:
        x = self.x
        rows, heads, t, s = x.optional["bias"].shape
        kernel = self._kernel("portable_d_bias", _types(x), (self.chosen.threads,), _constants(self.spec, x))
        return Launch(kernel, (s, t, rows * heads), self._work(x.h + x.v))


def _family(spec: Specification, x: Shapes, chosen: tiles.Tiles | tiles.Portable) -> _Matrices | _Portable:
    return _Portable(spec, x, chosen) if isinstance(chosen, tiles.Portable) else _Matrices(spec, x, chosen)


@functools.lru_cache(maxsize=1024)
def _forward(spec: Specification, key, chosen: tiles.Tiles | tiles.Portable) -> Plan:
    x = Shapes(*key)
    launch = _family(spec, x, chosen).forward()
    return Plan(
        "attention_forward",
        source.base_hash(),
        (*x.inputs(), *x.results("output"), *launch.scratch),
        launch.dispatches(spec, x, "out", "row_max", "row_sum"),
    )


@functools.lru_cache(maxsize=1024)
def _decode(spec: Specification, key, tile: tiles.DecodeTiles) -> Plan:
    x = Shapes(*key)
    group = x.n // x.k * x.t
    length = tiles.split_keys(x.s, tile.keys)
    splits = -(-x.s // length)
    operands = _operands(spec, x)
    attend = Launch(
        _kernel("attention_decode", spec, x, tile.simdgroups * 32, tile),
        (-(-splits // tile.simdgroups), -(-group // tile.rows) * tile.slices, x.k * x.batch),
        x.pairs(spec) * (tile.slices * x.h + x.v),
    )
    merge = Kernel(
        f"attention_merge_{_SHORT[x.dtype]}_v{x.v}",
        ("attention_merge", SCALARS[x.dtype], x.v, ROW_SUM_SIMDGROUPS),
        ((7, "has_sinks", "bool", "sinks" in x.uses),),
        ROW_SUM_SIMDGROUPS * 32,
    )
    count = struct.pack("<i", splits)
    return Plan(
        "attention_decode",
        source.base_hash(),
        (
            *x.inputs(),
            *x.results("output"),
            Buffer("split_out", "scratch", "float32", (x.batch, x.k, splits, group, x.v)),
            Buffer("split_state", "scratch", "float32", (x.batch, x.k, splits, group, 2)),
        ),
        (
            *attend.dispatches(spec, x, "split_out", "split_state", count, struct.pack("<i", length)),
            Dispatch(
                merge,
                (-(-group // ROW_SUM_SIMDGROUPS), x.k, x.batch),
                _arguments(
                    "split_out",
                    "split_state",
                    operands["numbers"],
                    "out",
                    "row_max",
                    "row_sum",
                    operands["parameters"],
                    count,
                ),
                x.batch * x.t * x.n * x.v * splits,
            ),
        ),
    )


@functools.lru_cache(maxsize=1024)
def _backward(spec: Specification, key, wanted: tuple[str, ...], chosen: tiles.Tiles | tiles.Portable) -> Plan:
    x = Shapes(*key)
    family = _family(spec, x, chosen)
    results = [
        x.rows("row_sums", "output" if "sinks" in wanted else "scratch"),
        x.rows("row_states", "scratch", 2),
    ]
    sums = family.row_sums()
    arguments = _arguments(
        "out", "d_out", "row_max", "row_sum", "d_lse", "row_sums", "row_states", _parameters(spec, x)
    )
    dispatches = [Dispatch(sums.kernel, sums.grid, arguments, sums.work)]

    def add(launch: Launch, *made: Buffer | None) -> None:
        results.extend(b for b in (*made, *launch.scratch) if b)
        own = (b.name if b else None for b in made)
        dispatches.extend(launch.dispatches(spec, x, "d_out", "row_states", "row_sums", *own))

    scale, slopes = "scale" in wanted, "alibi_slopes" in wanted
    if "query" in wanted or scale or slopes:
        add(
            family.d_query(((10, "wants_scale", "bool", scale), (11, "wants_slopes", "bool", slopes))),
            x.like_query("d_query", "output"),
            x.rows("d_scale", "output") if scale else None,
            x.rows("d_slopes", "output") if slopes else None,
        )
    if "key" in wanted or "value" in wanted:
        add(
            family.d_key_value(),
            Buffer("d_key", "output", x.dtype, (x.batch, x.s, x.k, x.h)),
            Buffer("d_value", "output", x.dtype, (x.batch, x.s, x.k, x.v)),
        )
    if "bias" in wanted:
        bias = x.optional["bias"]
        add(family.d_bias(), Buffer("d_bias", "output", bias.dtype.name, bias.shape))
    return Plan(
        "attention_backward",
        source.base_hash(),
        (
            *x.inputs(),
            *x.results("input"),
            x.like_out("d_out", "input"),
            x.rows("d_lse", "input"),
            *results,
        ),
        tuple(dispatches),
    )


def _key(query, key, value, uses, optional):
    """The shapes of a call, hashable; `limits=True` stands for an array of its only possible shape."""
    arrays = {name: x for name, x in optional.items() if x is not None and x is not False}
    if arrays.get("limits") is True:
        arrays["limits"] = Shape((query.shape[0], 3), np.dtype(np.int32))
    unknown = sorted(set(arrays) - set(OPTIONAL))
    if unknown:
        raise TypeError(f"a launch carries {', '.join(OPTIONAL)}, got {', '.join(unknown)}")
    found = tuple((name, Shape.of(arrays[name])) for name in OPTIONAL if name in arrays)
    return Shape.of(query), Shape.of(key), Shape.of(value), found, tuple(uses)


def _select(variant: str | tiles.Tiles | tiles.Portable, query, value) -> tiles.Tiles | tiles.Portable:
    if not isinstance(variant, str):
        return variant
    return tiles.select(variant, query.shape[-1], value.shape[-1], ITEM_SIZES[np.dtype(query.dtype).name])


def decodes(spec: Specification, query, key, value) -> tiles.DecodeTiles | None:
    """The tiles of a few queries against many keys; None where the forward pass is that of any problem."""
    t, s = query.shape[1], key.shape[1]
    if t > tiles.DECODE_QUERIES or s < tiles.DECODE_KEYS or spec.dropout_rate:
        return None
    item = ITEM_SIZES[np.dtype(query.dtype).name]
    return tiles.decode(query.shape[2] // key.shape[2] * t, query.shape[3], value.shape[3], item)


def forward(
    spec: Specification,
    query,
    key,
    value,
    *,
    variant: str | tiles.Tiles | tiles.Portable = "staged",
    uses: tuple[str, ...] = (),
    **optional,
) -> Plan:
    """The plan of the forward pass; for a few queries against many keys, that of decoding.

    Args:
      query, key, value: arrays or shapes, [B, T, N, H], [rows, S, K, H], [rows, S, K, V].
      variant: a key of `tiles.VARIANTS`, "portable", or tiles of one's own.
      uses: what of `numbers` counts beside the scale: "slopes", "sinks".
      **optional: arrays or shapes named in `OPTIONAL`:
        limits: int32 [B, 3], position of row 0, visible rows and visible columns of each batch row.
        numbers: float32 [B·N, 3], scale, slope and sink of each batch row and head.
        bias, mask, blocks: [rows, 1|N, 1|T, 1|S] (blocks: in units of the specification's mask_block).
        query_segments, key_segments: int32 [B, T] and [B, S].
        key_ranges: int32 [B, T, 2].
        dropout: uint32 [B, 6], two words of seed; batch index, head, row and column that its random counter starts at.
    """
    found = _key(query, key, value, uses, optional)
    if isinstance(variant, str) and variant in tiles.VARIANTS:
        tile = decodes(spec, query, key, value)
        if tile is not None:
            return _decode(spec, found, tile)
    return _forward(spec, found, _select(variant, query, value))


def backward(
    spec: Specification,
    query,
    key,
    value,
    *,
    wanted: tuple[str, ...] = ("query", "key", "value"),
    variant: str | tiles.Tiles | tiles.Portable = "staged",
    uses: tuple[str, ...] = (),
    **optional,
) -> Plan:
    """The plan of the backward pass for the gradients in `wanted`; other arguments as of `forward`.

    Its inputs are those of the forward pass, then out, row_max, row_sum, d_out, d_lse.
    """
    return _backward(spec, _key(query, key, value, uses, optional), wanted, _select(variant, query, value))
