"""Keys and values in 8 or 4 bits: schemes, and arrays that are stored by one.

A stored number stands for `scale · d + zero + mean`, where d is what is stored in few bits, and a *block* of tokens and
channels of one head shares a scale (and, unless the scheme is symmetric, a zero). The zero is the number that d = 0
stands for, kept as such: as an integer in units of the scale it would overflow in any block far from 0. A block whose
numbers are all alike is stored exactly; one that holds NaN or ∞ stands for NaN. Sums are
taken in an order that does not overflow where what is meant does not.

*Centring* subtracts from each channel its mean over a run of tokens, before blocks are made: channels of keys often
have a large offset that all tokens share. It is added back wherever it can be seen. With one mean c of all tokens a
row's scores q·(k − c) differ from q·k by q·c, the same for every column, which the softmax cancels whatever columns a
mask hides and whatever bias or ALiBi adds: output and dq do not depend on c. They do where the constant meets
something that it is not added to: a soft cap (not linear), a sink (a column without a key), the log-sum-exp (it moves
by scale · q·c), and always where a row sees columns of two means. Of values, Σ p (v − c) + c Σ p is Σ p v, and Σ p is
not 1 where there is a sink or dropout.

Dimension letters: S tokens, K heads, H channels of a head; any axes in front.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_mfa import checks, compat

if TYPE_CHECKING:
    from jax_mfa.problem import Operands, Specification

KINDS = ("int8", "int4", "fp8")
# the largest |d| of a symmetric scheme, and the largest d of an asymmetric one, which begins at 0
SYMMETRIC_LEVELS = {"int8": 127, "int4": 7, "fp8": 448}
LEVELS = {"int8": 255, "int4": 15}


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How numbers are stored. Static and hashable.

    Attributes:
      kind: "int8", "int4" (two numbers a byte, that of the even channel in the low four bits) or "fp8" (e4m3).
      symmetric: blocks have a scale alone and not also a zero.
      tokens: of how many tokens a block consists; None for all.
      channels: of how many channels of a head; None for all. 1 token and all channels is a scale for each token and
        head. All tokens and all channels is one scale for everything, all heads included. Where tokens or channels do
        not divide those of an array, its last blocks are smaller.
      center: subtract from each channel its mean over runs of as many tokens; None to leave them.

    Raises:
      ValueError, TypeError: naming the attribute.
    """

    kind: Literal["int8", "int4", "fp8"]
    symmetric: bool = False
    tokens: int | None = 1
    channels: int | None = 64
    center: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise ValueError(f"kind must be one of {KINDS}, got {checks.seen(self.kind)}")
        checks.boolean("symmetric", self.symmetric)
        for name in ("tokens", "channels", "center"):
            if getattr(self, name) is not None:
                number = checks.integer(name, getattr(self, name), 1, 2**31 - 1)
                object.__setattr__(self, name, number)

    @property
    def whole(self) -> bool:
        """Whether one scale serves tokens, heads and channels."""
        return self.tokens is None and self.channels is None

    def data_size(self, size: int) -> int:
        """How many bytes hold `size` channels."""
        return -(-size // 2) if self.kind == "int4" else size

    def tokens_of(self, part: str) -> int | None:
        """Of how many tokens an entry of "data", "scales", "zeros" or "means" consists; None for all."""
        return {"data": 1, "means": self.center}.get(part, self.tokens)


def as_scheme(name: str, scheme: Scheme | str) -> Scheme:
    if isinstance(scheme, str):
        if scheme not in KINDS:
            raise ValueError(f"{name} must be a jax_mfa.Scheme or one of {KINDS}, got {scheme!r}")
        return Scheme(scheme)  # type: ignore[arg-type]
    if not isinstance(scheme, Scheme):
        raise TypeError(f"{name} must be a jax_mfa.Scheme or one of {KINDS}, got {type(scheme).__name__}")
    return scheme


PARTS = ("data", "scales", "zeros", "means")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[*PARTS, "original"],
    meta_fields=["scheme", "head_size", "dtype"],
)
@dataclasses.dataclass(frozen=True, eq=False, repr=False)  # arrays have no one answer to ==
class QuantizedArray:
    """An array `[..., S, K, H]` stored by a scheme: a pytree that `quantize` makes, with the shape and dtype of the
    array that it stands for.

    Attributes:
      data: int8 (uint8 where asymmetric, packed or bits of fp8) `[..., S, K, H]`, of int4 `[…, S, K, ⌈H/2⌉]`.
      scales: `[..., S / tokens, K, H / channels]` rounded up, of the array's dtype; `[..., 1, 1, 1]` where one scale
        serves all.
      zeros: of the scales' shape and dtype; None in a symmetric scheme.
      means: `[..., S / center, K, H]` of the array's dtype; None without centring.
      original: the array that was quantised, which gets the gradients; None unless `quantize` was told so.
      scheme: the `Scheme`.
      head_size: H.
      dtype: of the array that it stands for.
    """

    data: Any
    scales: Any
    zeros: Any
    means: Any
    original: Any
    scheme: Scheme
    head_size: int
    dtype: Any

    def __repr__(self) -> str:
        # trees of other things than arrays have no shape
        shape = list(self.shape) if hasattr(self.data, "shape") else "[...]"
        return f"QuantizedArray({self.dtype.name}{shape}, {self.scheme})"

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.data.shape[:-1], self.head_size)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many numbers it stands for."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all that is stored."""
        return sum(x.size * x.dtype.itemsize for x in self.parts().values())

    def parts(self) -> dict[str, Any]:
        """Those of the `PARTS` that there are."""
        return {name: getattr(self, name) for name in PARTS if getattr(self, name) is not None}

    def dequantize(self, dtype: Any = None) -> Array:
        """The array `[..., S, K, H]` that is meant, of its own dtype or another floating one.

        Differentiable with respect to what was quantised if `quantize` was told `straight_through`.

        Raises:
          TypeError: for a dtype that is not floating.
        """
        dtype = self.dtype if dtype is None else checks.floating_dtype("dtype", dtype)
        wide = np.promote_types(self.dtype, np.float32)
        along = lambda name, x: spread(x, self.scheme.tokens_of(name), self.shape[-3], -3)
        read = lambda parts: decoded(
            self.scheme, self.head_size, {name: along(name, x) for name, x in parts.items()}, wide
        )
        x = compat.without_types(read, self.parts(), compat.spec_of(self.data)).astype(dtype)
        return x if self.original is None else straight_through(x, self.original.astype(x.dtype))

    def tokens(self, start: int, stop: int) -> QuantizedArray:
        """The tokens from `start` up to `stop`, without quantising anew.

        Raises:
          ValueError, TypeError: for what is no range of tokens, or a start within a block of tokens of which some are
            taken.
        """
        length = self.shape[-3]
        start, stop = checks.integer("start", start, least=0), checks.integer("stop", stop, least=0)
        if not start <= stop <= length:
            raise ValueError(f"start and stop must be a range within the {length} tokens, got {start} and {stop}")

        def cut(name: str, x: Any) -> Any:
            per = self.scheme.tokens_of(name)
            if start == stop:
                return x[..., :0, :, :]
            if per is None or (x.shape[-3] == 1 and start < per):
                return x[..., :1, :, :]
            if start % per:
                raise ValueError(f"start must be a multiple of the {per} tokens of a block, got {start}")
            return x[..., start // per : -(-stop // per), :, :]

        found = {name: cut(name, x) for name, x in self.parts().items()}
        original = None if self.original is None else self.original[..., start:stop, :, :]
        return dataclasses.replace(self, **found, original=original)


def as_bits(x: Any) -> Any:
    """bfloat16 as its bits, uint16; anything else as it is."""
    return lax.bitcast_convert_type(x, np.uint16) if x.dtype == jnp.bfloat16 else x


def from_bits(x: Any) -> Any:
    """bfloat16 where there are its bits."""
    return lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == np.uint16 else x


def dtype_of(x: Any) -> Any:
    """The dtype of an array, or of the bfloat16 whose bits it holds."""
    return np.dtype(jnp.bfloat16) if x.dtype == np.uint16 else x.dtype


def decoded(scheme: Scheme, size: int, parts: dict[str, Any], dtype: Any) -> Array:
    """The numbers `[..., size]` that `parts` stand for, in which tokens stand alike or broadcast."""
    parts = {name: from_bits(x) for name, x in parts.items()}
    data = parts["data"]
    if scheme.kind == "int4":
        shifts = np.expand_dims(np.array([0, 4], np.uint8), [*range(data.ndim)])
        pair = data[..., None] >> shifts & np.uint8(15)
        data = pair.reshape(*data.shape[:-1], 2 * data.shape[-1])[..., :size]
        if scheme.symmetric:
            data = ((data ^ np.uint8(8)).astype(np.int8) - np.int8(8)).astype(np.int8)
    elif scheme.kind == "fp8":
        data = lax.bitcast_convert_type(data, jnp.float8_e4m3fn)
    per_channel = lambda x: spread(x.astype(dtype), scheme.channels, size, -1)
    x, scales = data.astype(dtype), parts["scales"].astype(dtype)
    if "zeros" in parts:
        # of wide blocks half of scale · d before the zero and half behind it, for the whole may overflow
        halves = jnp.where(scales > huge_scale(jnp.finfo(dtype)), scales / 2, 0)
        x = x * per_channel(scales - halves) + per_channel(parts["zeros"]) + x * per_channel(halves)
    else:
        x = x * per_channel(scales)
    # rounding may have passed the largest number of what was quantised; before the mean too, which cannot mend that
    most = float(jnp.finfo(parts["scales"].dtype).max)
    x = jnp.clip(x, -most, most)
    return jnp.clip(x + parts["means"].astype(dtype), -most, most) if "means" in parts else x


def huge_scale(info: Any) -> float:
    """Above this, blocks of 2 · 448 steps or fewer may be wider than the largest number of the dtype."""
    return float(info.max) / 1024


@jax.custom_jvp
def straight_through(x: Any, original: Any) -> Any:
    return x


@straight_through.defjvp
def straight_through_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    return primals[0], tangents[1]


def spread(x: Any, per: int | None, length: int, axis: int) -> Any:
    """`x` with each entry along `axis` repeated `per` times, up to `length`; a single entry broadcasts and is kept."""
    if per == 1 or x.shape[axis] <= 1 or per is None:
        return x
    return lax.slice_in_dim(jnp.repeat(x, per, axis=axis), 0, length, axis=axis)


class PagedArray(NamedTuple):
    """Keys or values that lie in pages of a pool, as `paged_attention` hands them on: a pytree with the shape and dtype
    of the array `[..., S, K, H]` that they stand for.

    Attributes:
      pages: `[P, page, K, H]`, a plain array or a `QuantizedArray`.
      tables: int32 `[..., pages]`, S = pages · page: which page holds the tokens from each multiple of a page on. All
        of its entries are pages of the pool.
    """

    pages: Any
    tables: Any

    @property
    def shape(self) -> tuple[int, ...]:
        _, page, k, h = self.pages.shape
        return (*self.tables.shape[:-1], self.tables.shape[-1] * page, k, h)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        return dtype_of(self.pages)


# ---------------------------------------------------------------------------------------------------------------------
# Among the operands of a problem


@dataclasses.dataclass(frozen=True)
class Storage:
    """The static facts of quantised keys or values: their scheme, and the size of a head."""

    scheme: Scheme
    size: int


def as_operands(name: str, x: Any, batch: int) -> dict[str, Any]:
    """`x`, the plain, quantised or paged "key" or "value" of a batch, as fields of `Operands`."""
    if isinstance(x, PagedArray):
        # not another shape: of an array whose last axis is of size 1 XLA may make a copy for it
        pool = as_operands(name, x.pages, x.pages.shape[0])
        return {**pool, "block_tables": x.tables.reshape(batch, x.tables.shape[-1])}
    if not isinstance(x, QuantizedArray):
        return {name: x.reshape(batch, *x.shape[-3:])}
    parts = {field_of(name, part): lax.stop_gradient(a) for part, a in x.parts().items()}
    if x.original is not None:
        parts[f"{name}_original"] = x.original
    return {field: a.reshape(batch, *a.shape[-3:]) for field, a in parts.items()}


def pool_fields(names: Collection[str]) -> tuple[str, ...]:
    """Those of the operands of these names that are pages of a pool, and have no rows of their own."""
    return tuple(x for x in names if x in ("key", "value") or is_part(x)) if "block_tables" in names else ()


def storage_of(x: Any) -> Storage | None:
    """The static facts of a key or value; None where it is not quantised."""
    x = x.pages if isinstance(x, PagedArray) else x
    return Storage(x.scheme, x.head_size) if isinstance(x, QuantizedArray) else None


def page_size_of(x: Any) -> int | None:
    return x.pages.shape[1] if isinstance(x, PagedArray) else None


def field_of(name: str, part: str) -> str:
    """The field of `Operands` that holds a part of "key" or "value"."""
    return name if part == "data" else f"{name}_{part}"


@dataclasses.dataclass(frozen=True)
class Stored:
    """The keys or values among the operands of a problem where they are quantised, in pages or both: the shape and
    dtype of the plain array that they stand for, and its parts.

    Attributes:
      name: "key" or "value".
      parts: what there is of "data", "scales", "zeros", "means": `[rows, entries, 1|K, …]`, or of pages `[P, entries,
        1|K, …]`.
      storage: None where the data are plain.
      page_size, tables: None where tokens lie one after another; else tables are int32 `[rows, pages]`.
    """

    name: str
    parts: dict[str, Any]
    storage: Storage | None
    page_size: int | None
    tables: Any
    dtype: Any

    @property
    def shape(self) -> tuple[int, int, int, int]:
        rows, s, k, size = self.parts["data"].shape
        if self.page_size is not None:
            rows, s = self.tables.shape[0], self.tables.shape[1] * self.page_size
        return rows, s, k, size if self.storage is None else self.storage.size

    def tokens_of(self, part: str) -> int:
        """How many tokens share an entry of a part."""
        most = self.shape[1] if self.page_size is None else self.page_size
        tokens = 1 if self.storage is None else self.storage.scheme.tokens_of(part)
        return max(min(tokens or most, most), 1)

    def decoded(self, parts: dict[str, Any], dtype: Any) -> Any:
        """The numbers that parts of like tokens stand for."""
        if self.storage is None:
            return from_bits(parts["data"]).astype(dtype)
        return decoded(self.storage.scheme, self.storage.size, parts, dtype)


def stored(spec: Specification, operands: Operands, kind: Any = None) -> Operands:
    """The operands, with a `Stored` (or that `kind` of it) in place of a key or value that is not a plain array."""

    def of(name: str, storage: Any) -> Any:
        if storage is None and spec.page_size is None:
            return getattr(operands, name)
        parts = {part: getattr(operands, field_of(name, part)) for part in PARTS}
        parts = {part: x for part, x in parts.items() if x is not None}
        return (kind or Stored)(name, parts, storage, spec.page_size, operands.block_tables, operands.query.dtype)

    return operands._replace(key=of("key", spec.key_storage), value=of("value", spec.value_storage))


def is_part(field: str) -> bool:
    """Whether a field of `Operands` belongs to a key or value beside its data."""
    name, _, part = field.partition("_")
    return name in ("key", "value") and part in (*PARTS, "original")
