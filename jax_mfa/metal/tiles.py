"""Tile sizes as data, with the arithmetic of registers and threadgroup memory that they must satisfy.

A fragment is 8 × 8; each of 32 threads holds two of its elements. A thread has at most 512 bytes of registers on Apple
GPUs (github.com/philipturner/metal-benchmarks); `FRAGMENT_BUDGET` of them may go to fragments, the rest is for
addresses, row maxima and sums and operands on their way. Threadgroup memory is 32,768 bytes.

There is a table for chips of Apple families 7 and 8 (M1, M2), which stage tiles in threadgroup memory, and one for
family 9 and later. Starting points were the published block tables of metal-flash-attention and MLX: 32 rows × 16 … 32
columns staged, by 4 simdgroups of 8 rows; 16 to 32 rows × 64 to 128 columns where device memory is read directly. A
simdgroup of 16 rows uses a fragment that it loaded for two products instead of one, for twice the registers: the more
registers, the fewer simdgroups a core holds. A 16-bit entry up to 128 channels is, of the tiles that are predicted to
spend nearly the largest share of their interior's cycles in the matrix unit, the one that ran fastest where the same
text was compiled for another GPU. What fewer simdgroups cost is unknown: 24 keep a core's arithmetic busy, and no
published row has fewer than 12. `python tests/metal/compiled.py --alternatives 64` prints the alternatives, with all
figures and their sources, and without the option what each entry comes to. Not seen on Apple hardware.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, ClassVar

REGISTER_BYTES = 512
FRAGMENT_BUDGET = 448
THREADGROUP_BYTES = 32768
LATENT = 32  # channels of keys and of values within them are multiples of it: 16 bytes of any storage
MAX_HEAD = 576  # the keys of latent attention
MAX_GRID = 65535  # heads and batch entries: grid axes of which no more is known to be safe


def padded(size: int) -> int:
    return -(-size // 8) * 8


def _staged(rows: int, size: int, item: int) -> int:
    """Bytes of a tile in threadgroup memory, whose rows are longer than needed."""
    return rows * (padded(size) + 16) * item


def _sliced(size: int, slices: int) -> int:
    """Columns of a sum that one of `slices` threadgroups holds."""
    return padded(-(-padded(size) // slices))


def _fragments(rows: int, columns: int, item: int) -> int:
    """Bytes per thread of rows × columns elements of `item` bytes held by a simdgroup."""
    return rows * columns * item // 32


class Tile:
    """What kernels are told of a tile: the fields, as template arguments in their order."""

    simdgroups: int

    @property
    def arguments(self) -> tuple[Any, ...]:
        return tuple(vars(self).values())

    @property
    def threads(self) -> int:
        return self.simdgroups * 32

    def fragment_bytes(self, h: int, v: int, item: int) -> int:
        return 0

    def threadgroup_memory(self, h: int, v: int, item: int) -> int:
        return 0


class _Blocks(Tile):
    """What kernels share whose simdgroups have rows of queries, or of keys, and walk over tiles of the others."""

    blocks: int

    @property
    def rows(self) -> int:
        """Of a threadgroup."""
        return self.blocks * self.simdgroups * 8

    @property
    def listed_rows(self) -> int:
        """That share a list of visible tiles."""
        return self.rows

    def _gradient_fragments(self, item: int, columns: int, sums: int, *loaded: tuple[int, bool]) -> int:
        """Bytes of `sums` columns of gradients, two tiles of scores, and what is loaded: its size, and whether whole
        rows are kept."""
        rows = self.blocks * 8
        own = sum(_fragments(rows, padded(size) if kept else 8, item) for size, kept in loaded)
        return _fragments(rows, sums, 4) + 2 * _fragments(rows, columns * 8, 4) + own


@dataclasses.dataclass(frozen=True)
class ForwardTiles(_Blocks):
    """Template arguments of `attention_forward`, in its order."""

    blocks: int
    simdgroups: int
    keys: int
    buffers: int
    cache_q: bool
    slices: int = 1

    def fragment_bytes(self, h: int, v: int, item: int) -> int:
        rows = self.blocks * 8
        own = _fragments(rows, padded(h) if self.cache_q else 8, item)
        return own + _fragments(rows, _sliced(v, self.slices), 4) + _fragments(rows, self.keys, 4)

    def threadgroup_memory(self, h: int, v: int, item: int) -> int:
        return self.buffers * (_staged(self.keys, h, item) + _staged(self.keys, v, item))


# Few query rows against many keys: up to this many rows, and from this many keys on, keys are split among simdgroups.
DECODE_QUERIES = 16
DECODE_KEYS = 512


@dataclasses.dataclass(frozen=True)
class DecodeTiles(Tile):
    """Template arguments of `attention_decode`, in its order.

    Paired rows stand twice in a fragment, which has four of them (`metal/core/scaled.h`).
    """

    blocks: int
    simdgroups: int
    keys: int
    slices: int
    paired: bool = False

    @property
    def rows(self) -> int:
        return self.blocks * (4 if self.paired else 8)

    def fragment_bytes(self, h: int, v: int, item: int) -> int:
        rows = self.blocks * 8
        output = _fragments(rows, _sliced(v, self.slices), 4)
        return output + _fragments(rows, padded(h), item) + _fragments(rows, self.keys, 4)

    def stored_bytes(self, h: int, v: int, bits: tuple[int, int]) -> int:
        """Bytes per thread of a tile of keys as they are stored, in so many bits, and of two tiles of values."""
        return self.keys * (h * bits[0] + 2 * _sliced(v, self.slices) * bits[1]) // 256


@dataclasses.dataclass(frozen=True)
class DecodeRows(Tile):
    """Template arguments of `attention_decode_rows`, in its order."""

    rows: int
    simdgroups: int
    keys: int
    lanes: int
    slices: ClassVar[int] = 1

    def fragment_bytes(self, h: int, v: int, item: int) -> int:
        """So many lanes share a query and an output, in eights of channels and float32 both, and products."""
        channels = sum(padded(-(-size // self.lanes)) for size in (h, v))
        return self.rows * (channels + self.keys * self.lanes // 32) * 4


@dataclasses.dataclass(frozen=True)
class MergeTile(Tile):
    """Template arguments of `attention_merge`, in its order: a threadgroup's simdgroups deal the splits of a row."""

    simdgroups: int = 8

    def threadgroup_memory(self, h: int, v: int, item: int) -> int:
        return self.simdgroups * (v + 2) * 4


def decode(
    rows: int, h: int, v: int, item: int, bits: tuple[int, int] = (0, 0), paired: bool = False
) -> DecodeTiles | DecodeRows | None:
    """Tiles for `rows` rows of a group, as many at once as registers allow; None where not even eight fit. Of keys and
    values, elements of so many `bits` are in registers too, as they are stored.

    Up to four rows, which would leave half of a fragment empty, do without the matrix unit: as many lanes share a key
    as leave each eight channels. Where they may be `paired`, three or four fill a fragment.
    """

    def fits(tile: DecodeTiles) -> bool:
        needed = tile.fragment_bytes(h, v, item) + tile.stored_bytes(h, v, bits)
        return needed <= FRAGMENT_BUDGET and (tile.slices == 1 or padded(v) % (8 * tile.slices) == 0)

    sizes = (32, 16, 8) if any(bits) else (16,)  # in keys
    if paired and rows in (3, 4):
        for keys in sizes:
            if fits(tile := DecodeTiles(1, 4, keys, 1, True)):
                return tile
    lanes = next((x for x in (8, 16) if max(h, v) <= x * 8), 32)
    few = DecodeRows(1 if rows == 1 else 2 if rows == 2 else 4, 4, 16 if rows <= 2 or lanes == 8 else 8, lanes)
    if rows <= few.rows and few.fragment_bytes(h, v, item) <= FRAGMENT_BUDGET:
        return few
    for slices, blocks, keys in itertools.product((1, 2, 4), (2, 1) if rows > 8 else (1,), sizes):
        if fits(tile := DecodeTiles(blocks, 4, keys, slices)):
            return tile
    return None


def splits(keys: int, step: int, groups: int) -> list[int]:
    """Columns of a split, multiples of `step`, the usual ones first: enough splits to fill a GPU, of which `groups`
    stand side by side, none so short that merging costs more. For `tune` then halves and doubles, the nearest first."""
    usual = -(-max(256, -(-keys // max(64, 1024 // groups))) // step) * step
    others = (usual // 2, usual * 2, usual // 4, usual * 4, usual // 8, usual * 8)
    return list(dict.fromkeys(-(-min(x, keys) // step) * step for x in (usual, *others)))


@dataclasses.dataclass(frozen=True)
class Split:
    """In place of a table's name: that table, and so many columns of a split where a problem is one of decoding."""

    variant: str
    columns: int


@dataclasses.dataclass(frozen=True)
class QueryTiles(_Blocks):
    """Template arguments of `attention_d_query`, in its order."""

    blocks: int
    simdgroups: int
    keys: int
    columns: int
    buffers: int
    cache_q: bool
    cache_do: bool
    slices: int = 1

    def fragment_bytes(self, h: int, v: int, item: int) -> int:
        sums = _sliced(h, self.slices)
        return self._gradient_fragments(item, self.columns, sums, (h, self.cache_q), (v, self.cache_do))

    def threadgroup_memory(self, h: int, v: int, item: int) -> int:
        return self.buffers * (_staged(self.keys, h, item) + _staged(self.keys, v, item))


@dataclasses.dataclass(frozen=True)
class KeyTiles(_Blocks):
    """Template arguments of `attention_d_key_value`, in its order."""

    blocks: int
    simdgroups: int
    queries: int
    columns: int
    buffers: int
    cache_k: bool
    cache_v: bool
    parts: int = 0  # none: a simdgroup has dK and dV. Else two share keys, and so many threadgroups the columns.

    @property
    def slices(self) -> int:
        return max(self.parts, 1)

    @property
    def rows(self) -> int:
        return super().rows // (2 if self.parts else 1)

    def fragment_bytes(self, h: int, v: int, item: int) -> int:
        own = ((h, self.cache_k), (v, self.cache_v))
        if not self.parts:
            return self._gradient_fragments(item, self.columns, padded(h) + padded(v), *own)
        return max(self._gradient_fragments(item, self.columns, _sliced(max(h, v), self.parts), x) for x in own)

    def threadgroup_memory(self, h: int, v: int, item: int) -> int:
        states = 12 * self.queries
        scores = 2 * self.rows * self.columns * 8 * 4 if self.parts else 0
        return self.buffers * (_staged(self.queries, h, item) + _staged(self.queries, v, item) + states) + scores


@dataclasses.dataclass(frozen=True)
class RowTiles(Tile):
    """Template arguments of kernels without simdgroup matrices, in their order: a threadgroup for each query (or key),
    and in it a thread for each one of a tile of the others."""

    threads: int = 64  # a power of two
    listed_rows: int = 16
    rows: ClassVar[int] = 1
    slices: ClassVar[int] = 1

    @property
    def keys(self) -> int:
        return self.threads

    queries = keys


@dataclasses.dataclass(frozen=True)
class Tiles:
    forward: ForwardTiles | RowTiles
    d_query: QueryTiles | RowTiles
    d_key_value: KeyTiles | RowTiles


def _row(forward: tuple[Any, ...], d_query: tuple[Any, ...], d_key_value: tuple[Any, ...]) -> Tiles:
    """A row of the tables, each kernel's tiles as their fields."""
    return Tiles(ForwardTiles(*forward), QueryTiles(*d_query), KeyTiles(*d_key_value))


# Larger heads: no simdgroup can hold a row of output, so several threadgroups share it, and each computes the scores.
# Their tiles would fill threadgroup memory too: fragments come straight from device memory.
_WIDE = _row((1, 4, 16, 0, False, 2), (1, 4, 16, 1, 0, False, False, 2), (1, 8, 16, 2, 0, False, False, 2))

# (largest head size, bytes of an element) → tiles that stage K and V (Q and dO) in threadgroup memory: families 7 and 8
STAGED = {
    (64, 2): _row((2, 8, 32, 1, True), (2, 8, 32, 4, 1, True, True), (2, 8, 32, 1, 1, True, True)),
    (128, 2): _row((2, 8, 16, 2, True), (2, 8, 32, 1, 1, True, False), (1, 8, 32, 1, 1, True, True)),
    (256, 2): _row((1, 4, 16, 1, True), (1, 4, 16, 1, 1, True, False), (1, 8, 16, 1, 1, True, True, 1)),
    (64, 4): _row((1, 8, 32, 1, True), (1, 8, 32, 2, 1, True, True), (1, 8, 16, 2, 1, True, True)),
    (128, 4): _row((1, 4, 16, 1, True), (1, 8, 16, 2, 1, True, True), (1, 4, 8, 1, 1, True, False)),
    (256, 4): _row((1, 4, 8, 1, False), (1, 4, 8, 1, 1, False, False), (1, 8, 8, 1, 1, False, False, 1)),
    (MAX_HEAD, 2): _WIDE,
    (MAX_HEAD, 4): _WIDE,
}

# the same for chips whose caches serve fragments straight from device memory (Apple family 9, M3, and newer)
DIRECT = {
    (64, 2): _row((2, 4, 64, 0, True), (2, 4, 32, 4, 0, True, True), (2, 4, 32, 1, 0, True, True)),
    (128, 2): _row((2, 4, 32, 0, True), (2, 4, 16, 1, 0, True, False), (2, 4, 32, 2, 0, True, True, 1)),
    (256, 2): _row((1, 4, 16, 0, True), (1, 4, 16, 2, 0, True, False), (1, 4, 32, 2, 0, True, True, 1)),
    (64, 4): _row((2, 4, 32, 0, True), (1, 4, 32, 2, 0, True, True), (1, 4, 16, 2, 0, True, True)),
    (128, 4): _row((1, 4, 32, 0, True), (1, 4, 32, 2, 0, True, True), (1, 4, 16, 1, 0, True, False)),
    (256, 4): _row((1, 4, 16, 0, False), (1, 4, 16, 1, 0, False, False), (1, 4, 32, 2, 0, False, False, 1)),
    (MAX_HEAD, 2): _WIDE,
    (MAX_HEAD, 4): _WIDE,
}


# What `tune` tries for the fields of a kernel's tiles; `slices` stay.
TUNED_FIELDS = {
    **dict.fromkeys(("blocks", "columns"), (1, 2)),
    "simdgroups": (4, 8),
    **dict.fromkeys(("keys", "queries"), (8, 16, 32, 64)),
    "buffers": (0, 1, 2),
    **dict.fromkeys(("cache_q", "cache_do", "cache_k", "cache_v"), (False, True)),
}


def candidates(usual: Any, h: int, v: int, item: int) -> list[Any]:
    """Tiles of the kind of the usual ones that registers and threadgroup memory allow: those first, then by how many
    fields differ."""
    fields = dataclasses.asdict(usual)
    choices = itertools.product(*(TUNED_FIELDS.get(name, (value,)) for name, value in fields.items()))

    def fits(x: Any) -> bool:
        small = x.fragment_bytes(h, v, item) <= FRAGMENT_BUDGET
        return small and x.threadgroup_memory(h, v, item) <= THREADGROUP_BYTES

    def differing(x: Any) -> int:
        return sum(a != b for a, b in zip(dataclasses.astuple(x), fields.values()))

    others = [x for x in (type(usual)(*values) for values in choices) if x != usual and fits(x)]
    return [usual, *sorted(others, key=differing)]


PORTABLE = Tiles(RowTiles(), RowTiles(), RowTiles())  # without simdgroup matrices, for any head size

VARIANTS = {"staged": STAGED, "direct": DIRECT}
# of chips before family 9, which emulate bfloat16: it goes to the matrix unit as float32, as in metal-flash-attention
EMULATED_BFLOAT = ("staged",)
NAMES = (*VARIANTS, "portable")


def select(variant: str, h: int, v: int, item: int) -> Tiles:
    """The tiles for head sizes H and V of `item` bytes an element."""
    most = max(h, v)
    if variant == "portable" and most <= MAX_HEAD:
        return PORTABLE
    for (limit, size), tiles in VARIANTS.get(variant, {}).items():
        if size == item and most <= limit:
            return tiles
    raise ValueError(f"no tiles for head sizes H = {h}, V = {v}: the largest is {MAX_HEAD}")
