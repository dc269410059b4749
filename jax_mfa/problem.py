"""What an attention problem is: one frozen specification and a flat tuple of operands.

`arguments` makes them of what a caller passed; nothing here checks, or computes attention.

Dimension letters: B batch, T query length, S key length, N query heads, K key/value heads, G = N // K, H head size of
queries and keys, V head size of values and of the output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_mfa.flex.program import Program
from jax_mfa.kv_cache.storage import PARTS, PagedArray, QuantizedArray, Scheme, decoded, from_bits

DTYPES = ("float16", "bfloat16", "float32", "float64")
# lengths and offsets stay below this, so that the distance of any two positions fits 32 bits
MAX_POSITION = 2**30 - 1


class Operands(NamedTuple):
    """The arrays of an attention problem; None where a feature is not used.

    The leading axis of an operand holds its *entries*. Batch entry b reads entry `(b // repeat) % entries`, with
    `repeat` from `Specification.repeats`: one entry serves a whole batch, and an operand that `vmap` did not map is
    never copied.
    """

    query: Any  # [B, T, N, H]
    key: Any  # [entries, S, K, H]
    value: Any = None  # [entries, S, K, V]; None where the specification has a value_size
    bias: Any = None  # [entries, 1|N, 1|T, 1|S], floating
    mask: Any = None  # [entries, 1|N, 1|T, 1|S], bool
    # [entries, 1|N, ceil(T/block), ceil(S/block)], bool; or uint8, 2 where mask_mod holds for all
    block_mask: Any = None
    scale: Any = None  # [entries], float
    query_offset: Any = None  # [entries], int32
    query_lengths: Any = None  # [entries], int32
    key_lengths: Any = None  # [entries], int32
    query_segment_ids: Any = None  # [entries, T], int32
    key_segment_ids: Any = None  # [entries, S], int32
    key_ranges: Any = None  # [entries, T, 2], int32: first visible column, and the one after the last
    alibi_slopes: Any = None  # [entries, N], float
    sinks: Any = None  # [entries, N], float
    # [entries, 6], uint32: two words of seed, then where the random counter starts: batch index, head, row and column
    dropout: Any = None
    # what a caller's functions of scores read, see `flex.program`, and where their indices begin
    captured_floats: Any = None  # [entries, F], float32 or float64
    captured_integers: Any = None  # [entries, I], int32 or int64
    origin: Any = None  # [entries, 2], int32: batch index and first head
    # of keys and values that are quantised, in pages or both: see `KeyValueView`. key and value are then the data
    key_scales: Any = None
    key_zeros: Any = None
    key_means: Any = None
    key_original: Any = None  # gets the gradient of a quantised key, and is never read
    value_scales: Any = None
    value_zeros: Any = None
    value_means: Any = None
    value_original: Any = None
    block_tables: Any = None  # [entries, pages], int32, all within the pool


# what each axis of an operand is, and of results and their cotangents: an axis of size 1 serves all
AXES = {
    "query": "BTNH",
    "key": "BSKH",
    "value": "BSKV",
    "bias": "BNTS",
    "mask": "BNTS",
    "block_mask": "BNts",  # blocks of T and S
    "scale": "B",
    "query_offset": "B",
    "query_lengths": "B",
    "key_lengths": "B",
    "query_segment_ids": "BT",
    "key_segment_ids": "BS",
    "key_ranges": "BT_",
    "alibi_slopes": "BN",
    "sinks": "BN",
    "dropout": "B_",
    "captured_floats": "B_",
    "captured_integers": "B_",
    "origin": "B_",
    "block_tables": "B_",
    **{f"{name}_{part}": "BSK_" for name in ("key", "value") for part in ("scales", "zeros", "means", "original")},
    "out": "BTNV",
    "row_max": "BTN",
    "row_sum": "BTN",
    "d_out": "BTNV",
    "d_lse": "BTN",
    "rows": "BTN_",  # several numbers of each row
    "dk": "BSKH",  # of each batch entry
    "dv": "BSKV",
}

DIFFERENTIABLE = ("query", "key", "value", "bias", "scale", "alibi_slopes", "sinks", "captured_floats")


# --- keys and values that are quantised, in pages or both


@dataclasses.dataclass(frozen=True)
class Storage:
    """The static facts of quantised keys or values: their scheme, and the size of a head."""

    scheme: Scheme
    size: int


def field_of(name: str, part: str) -> str:
    """The field of `Operands` that holds a part of "key" or "value"."""
    return name if part == "data" else f"{name}_{part}"


# fields beside the data of "key" and "value"
_BESIDE = frozenset(field_of(name, part) for name in ("key", "value") for part in (*PARTS[1:], "original"))


def is_part(field: str) -> bool:
    """Whether a field of `Operands` belongs to a key or value beside its data."""
    return field in _BESIDE


def pool_fields(names: Collection[str]) -> tuple[str, ...]:
    """Those of the operands of these names that are pages of a pool, and have no entries of their own."""
    return tuple(x for x in names if x in ("key", "value") or is_part(x)) if "block_tables" in names else ()


def storage_of(x: Any) -> Storage | None:
    """The static facts of a key or value; None where it is not quantised."""
    x = x.pages if isinstance(x, PagedArray) else x
    return Storage(x.scheme, x.head_size) if isinstance(x, QuantizedArray) else None


def as_operands(name: str, x: Any, batch: int) -> dict[str, Any]:
    """`x`, the plain, quantised or paged "key" or "value" of a batch, as fields of `Operands`."""
    if isinstance(x, PagedArray):
        # the pool keeps its shape: of an array whose last axis is of size 1 XLA may make a copy for another one
        pool = as_operands(name, x.pages, x.pages.shape[0])
        return {**pool, "block_tables": x.tables.reshape(batch, x.tables.shape[-1])}
    fields = {name: x}
    if isinstance(x, QuantizedArray):
        fields = {field_of(name, part): lax.stop_gradient(a) for part, a in x.parts().items()}
        fields |= {} if x.original is None else {f"{name}_original": x.original}
    return {field: a.reshape(batch, *a.shape[-3:]) for field, a in fields.items()}


@dataclasses.dataclass(frozen=True)
class KeyValueView:
    """The keys or values among the operands of a problem where they are quantised, in pages or both: the shape and
    dtype of the plain array that they stand for, and its parts."""

    name: str  # "key" or "value"
    parts: dict[str, Any]  # those of `PARTS` that there are, [entries or pages, groups of tokens, 1|K, …]
    storage: Storage | None  # None where the data are plain
    page_size: int | None  # None where tokens lie one after another
    tables: Any  # [entries, pages], int32; None without pages
    dtype: Any
    size: int | None = None  # how many of the stored channels there are, from the first on; None for all

    @property
    def shape(self) -> tuple[int, int, int, int]:
        entries, s, k, size = self.parts["data"].shape
        if self.page_size is not None:
            entries, s = self.tables.shape[0], self.tables.shape[1] * self.page_size
        return entries, s, k, self.size or (size if self.storage is None else self.storage.size)

    def tokens_of(self, part: str) -> int:
        """How many tokens share an entry of a part."""
        most = self.shape[1] if self.page_size is None else self.page_size
        tokens = 1 if self.storage is None else self.storage.scheme.tokens_of(part)
        return max(min(tokens or most, most), 1)

    def decoded(self, parts: dict[str, Any], dtype: Any) -> Any:
        """The array that parts of like tokens stand for."""
        if self.storage is None:
            x = from_bits(parts["data"]).astype(dtype)
        else:
            x = decoded(self.storage.scheme, self.storage.size, parts, dtype)
        return x[..., : self.size]


# --- a problem


@dataclasses.dataclass(frozen=True)
class Specification:
    """The static facts of an attention problem. Hashable: it keys traces, compiled programs and launch plans."""

    is_causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    scale: float = 1.0  # used where operands.scale is None
    query_offset: int = 0  # used where operands.query_offset is None
    logits_soft_cap: float | None = None
    finite_bias: bool = False  # whether operands.bias is taken for finite, so that it hides nothing
    dropout_rate: float = 0.0
    mask_block: tuple[int, int] | None = None  # rows and columns of one entry of operands.block_mask
    key_storage: Storage | None = None  # of quantised keys
    value_storage: Storage | None = None
    value_size: int | None = None  # V where the values are the first channels of the keys, and operands.value is None
    page_size: int | None = None  # tokens of a page, where operands.block_tables says which
    score_mod: Program | None = None  # of a score after bias and slopes, before the cap
    mask_mod: Program | None = None
    repeats: tuple[int, ...] = (1,) * len(Operands._fields)

    @property
    def is_plain(self) -> bool:
        """Whether keys and values are plain arrays, neither quantised nor in pages."""
        stored = self.key_storage, self.value_storage, self.value_size, self.page_size
        return all(x is None for x in stored)

    @property
    def band(self) -> tuple[int | None, int | None]:
        """How many columns left and right of its position a row sees, by window and causality; None for no limit."""
        left, right = self.window
        if self.is_causal:
            right = 0 if right is None else min(right, 0)
        return left, right

    def pairs_within(self, t: int, s: int, offset: int) -> int:
        """How many of T · S pairs window and causality leave, where the first row stands at `offset`."""

        def before(shift: int) -> int:  # columns before row + shift, of all rows: the first have none, the last all
            full = min(max(s - shift, 0), t)
            first = min(max(-shift, 0), full)
            count = full - first
            return count * (first + shift) + count * (count - 1) // 2 + (t - full) * s

        left, right = self.band
        until = t * s if right is None else before(offset + right + 1)
        return max(until - (0 if left is None else before(offset - left)), 0)

    def viewed(self, operands: Operands, kind: type[KeyValueView] = KeyValueView) -> Operands:
        """The operands, with a view of this kind in place of a key or value that is not a plain array."""

        def view(name: str, storage: Storage | None, size: int | None = None) -> Any:
            if storage is None and self.page_size is None and size is None:
                return getattr(operands, name)
            parts = {part: getattr(operands, field_of(name, part)) for part in PARTS}
            parts = {part: x for part, x in parts.items() if x is not None}
            return kind(name, parts, storage, self.page_size, operands.block_tables, operands.query.dtype, size)

        key = view("key", self.key_storage)
        if self.value_size is None:
            return operands._replace(key=key, value=view("value", self.value_storage))
        return operands._replace(key=key, value=view("key", self.key_storage, self.value_size))

    def summary(self, operands: Operands) -> str:
        """A problem as text: shapes, dtype and features, without the values of cap, scale and rate."""
        (b, t, n, h), (s, k, v) = operands.query.shape, operands.value.shape[1:]
        facts = [f"B{b} T{t} S{s} N{n} K{k} H{h} V{v} {np.dtype(operands.query.dtype).name}"]
        facts += ["causal"] * self.is_causal
        if self.window != (None, None):
            facts.append("window={},{}".format(*("" if x is None else x for x in self.window)))
        facts += [f"offset={self.query_offset}"] * (self.query_offset != 0)
        facts += ["latent"] * (self.value_size is not None)
        for side, storage in (("key", self.key_storage), ("value", self.value_storage)):
            facts += [] if storage is None else [f"{side}={storage.scheme.kind}"]
        facts += ["cap"] * (self.logits_soft_cap is not None)
        facts += [name for name in ("score_mod", "mask_mod") if getattr(self, name) is not None]
        present = [name for name, x in operands._asdict().items() if x is not None]
        return " ".join([*facts, *(name for name in present[3:] if not name.startswith(("key_sc", "key_z", "value_")))])

    def has_mask(self, operands: Operands) -> bool:
        """Whether any rule can make a column invisible."""
        lengths = operands.query_lengths, operands.key_lengths
        if self.band != (None, None) or any(x is not None for x in lengths):
            return True
        return not self.only_bounds_hide(operands)

    def every_row_sees(self, operands: Operands) -> bool:
        """Whether each row is known to see something: nothing hides but the band, and that leaves no row without."""
        o, (left, right) = operands, self.band
        others = o.query_offset, o.query_lengths, o.key_lengths
        if o.key.shape[1] == 0 or not self.only_bounds_hide(o) or any(x is not None for x in others):
            return False
        first, last = self.query_offset, self.query_offset + o.query.shape[1] - 1
        return (right is None or first + right >= 0) and (left is None or last - left < o.key.shape[1])

    def only_bounds_hide(self, operands: Operands) -> bool:
        """Whether nothing hides but band and lengths: a row then sees all columns from one to another, or none."""
        o = operands
        others = o.mask, o.block_mask, o.query_segment_ids, o.key_ranges, self.mask_mod
        return not (self.bias_hides(o) or self.score_hides) and all(x is None for x in others)

    def has_own_entries(self, operands: Operands, name: str) -> bool:
        """Whether each batch entry has an entry of its own of the operand of this name."""
        own = self.repeats[Operands._fields.index(name)] == 1
        return own and getattr(operands, name).shape[0] == operands.query.shape[0]

    @property
    def score_hides(self) -> bool:
        """Whether a `score_mod` that makes −∞ of a score hides its column; under a soft cap it is a score of −cap."""
        return self.score_mod is not None and self.logits_soft_cap is None

    def bias_hides(self, operands: Operands) -> bool:
        """Whether a bias of −∞ hides its column as a mask does; under a soft cap it is a score of −cap."""
        return operands.bias is not None and self.logits_soft_cap is None and not self.finite_bias


def accumulation_dtype(dtype: Any) -> Any:
    """float64 for float64 inputs, float32 for everything else."""
    return np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)


def sees_nothing(row_sum: Any) -> Any:
    """Whether rows see nothing, by what is kept of them beside the output: `row_max`, the largest of a row's scores and
    its sink, and `row_sum`, the sum of exp(score − row_max). For every implementation alike:

                                             row_max       row_sum    log-sum-exp
      it sees nothing, sink or not           finite        0          −∞
      it sees −∞ alone, and has no sink      0 or less     NaN        NaN
      it sees NaN or ∞                       not finite    NaN        NaN
      any other row                          finite        positive   finite

    While columns are still to come the maximum is −∞ where no score is above that. Whether such a row has seen a score
    the sum says too: in partial results of `context_parallel` by 0 or NaN, as above; in kernels by −0 or 0, since a sum
    that starts from −0 stays so only without weights (`absent_weight` of `metal/core/product.h`). `blockwise` asks the
    masks again.
    """
    return row_sum == 0


def counted_from(dropout: Any, **places: Any) -> Any:
    """The operand `dropout` of a part of a problem, whose batch entries, heads, rows or columns begin there."""
    for name, place in places.items():
        word = 2 + ("batch", "head", "row", "column").index(name)
        dropout = dropout.at[:, word].add(jnp.asarray(place).astype(dropout.dtype))
    return dropout


def entry_index(b: Any, repeat: int, entries: int) -> Any:
    """The operand's entry that batch entry `b` reads."""
    return (b // repeat) % entries


def expand_entries(x: Any, repeat: int, batch: int) -> Any:
    """`x` with one entry for each of the batch; an operand with a single entry keeps it."""
    if x is None or (x.shape[0] in (1, batch) and repeat == 1):
        return x
    return x[entry_index(np.arange(batch), repeat, x.shape[0])]


def reduce_entries(x: Any, repeat: int, entries: int) -> Any:
    """The transpose of `expand_entries` from so many entries: sums `x` over the batch entries that share one."""
    if x.shape[0] == entries and repeat == 1:
        return x
    return x.reshape(-1, entries, repeat, *x.shape[1:]).sum((0, 2), dtype=x.dtype)


def pack(operands: Operands) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """The operands that are present, and their names."""
    names = tuple(name for name, x in zip(Operands._fields, operands) if x is not None)
    return tuple(getattr(operands, name) for name in names), names


def unpack(arrays: Sequence[Any], names: tuple[str, ...]) -> Operands:
    return Operands(**dict(zip(names, arrays)))
