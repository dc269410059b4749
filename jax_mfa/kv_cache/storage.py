"""Keys and values in 8 or 4 bits: schemes, and arrays that are stored by one, in pages or not.

A stored element stands for `scale · d + zero + mean`, where d is stored in few bits, and a *block* of tokens and
channels of one head shares a scale (and, unless the scheme is symmetric, a zero). The zero is the value of d = 0, kept
in the array's dtype: as an integer in units of the scale it would overflow in any block far from 0. The mean is that
of a channel over a run of tokens. Readers add it back, also for keys: the softmax cancels q · mean only where all
columns of a row share one mean, and a soft cap, a sink and the log-sum-exp see it.

Dimension letters: S tokens, K heads, H channels of a head; any axes in front.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_mfa import checks, compat

KINDS = ("int8", "int4", "fp8")
# the largest |d| of a symmetric scheme and of fp8, and the largest d of other asymmetric ones, which begin at 0
SYMMETRIC_LEVELS = {"int8": 127, "int4": 7, "fp8": 448}
LEVELS = {"int8": 255, "int4": 15}


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How elements of an array are stored. Static and hashable.

    Attributes:
      kind: "int8", "int4" (two elements a byte, that of the even channel in the low four bits) or "fp8" (e4m3).
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
                object.__setattr__(self, name, checks.integer(name, getattr(self, name), 1, 2**31 - 1))

    @property
    def whole(self) -> bool:
        """Whether one scale serves tokens, heads and channels."""
        return self.tokens is None and self.channels is None

    @property
    def levels(self) -> tuple[int, int]:
        """The least and the largest d."""
        if self.symmetric or self.kind == "fp8":
            return -SYMMETRIC_LEVELS[self.kind], SYMMETRIC_LEVELS[self.kind]
        return 0, LEVELS[self.kind]

    def data_size(self, size: int) -> int:
        """How many bytes hold `size` channels."""
        return -(-size // 2) if self.kind == "int4" else size

    def tokens_of(self, part: str) -> int | None:
        """Of how many tokens an entry of "data", "scales", "zeros" or "means" consists; None for all."""
        return {"data": 1, "means": self.center}.get(part, self.tokens)


def as_scheme(name: str, scheme: Scheme | str) -> Scheme:
    """A scheme, or that of a kind's name. Raises `ValueError` for other names and `TypeError` for anything else."""
    if isinstance(scheme, Scheme):
        return scheme
    expected = f"{name} must be a jax_mfa.Scheme or one of {KINDS}"
    if not isinstance(scheme, str):
        raise TypeError(f"{expected}, got {type(scheme).__name__}")
    if scheme not in KINDS:
        raise ValueError(f"{expected}, got {scheme!r}")
    return Scheme(scheme)  # type: ignore[arg-type]


PARTS = ("data", "scales", "zeros", "means")


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=[*PARTS, "original"], meta_fields=["scheme", "head_size", "dtype"]
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
        shape = list(self.shape) if hasattr(self.data, "shape") else "[...]"  # in trees of anything
        return f"QuantizedArray({self.dtype.name}{shape}, {self.scheme})"

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.data.shape[:-1], self.head_size)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many elements it stands for."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all that is stored."""
        return sum(x.size * x.dtype.itemsize for x in self.parts().values())

    def parts(self) -> dict[str, Any]:
        """Those of the `PARTS` that there are."""
        return {name: getattr(self, name) for name in PARTS if getattr(self, name) is not None}

    def dequantize(self, dtype: Any = None) -> Array:
        """The array `[..., S, K, H]` that it stands for, of its own dtype or another floating one.

        Differentiable with respect to what was quantised if `quantize` was told `straight_through`.

        Raises:
          TypeError: for a dtype that is not floating.
        """
        dtype = self.dtype if dtype is None else checks.floating_dtype("dtype", dtype)

        def read(parts: dict[str, Any]) -> Array:
            alike = {n: spread(x, self.scheme.tokens_of(n), self.shape[-3], -3) for n, x in parts.items()}
            return decoded(self.scheme, self.head_size, alike, np.promote_types(self.dtype, np.float32))

        x = compat.without_types(read, self.parts(), lambda: compat.spec_of(self.data)).astype(dtype)
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

        cut = {} if self.original is None else {"original": self.original[..., start:stop, :, :]}
        for name, x in self.parts().items():
            per = self.scheme.tokens_of(name) or 1
            if start == stop:
                cut[name] = x[..., :0, :, :]
            elif x.shape[-3] > 1:  # else the one entry of all tokens
                if start % per:
                    raise ValueError(f"start must be a multiple of the {per} tokens of a block, got {start}")
                cut[name] = x[..., start // per : -(-stop // per), :, :]
        return dataclasses.replace(self, **cut)


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
    """The array `[..., size]` that `parts` stand for, whose entries are one for each token, or one for all."""
    parts = {name: from_bits(x) for name, x in parts.items()}
    data = parts["data"]
    if scheme.kind == "int4":
        shifts = np.expand_dims(np.array([0, 4], np.uint8), tuple(range(data.ndim)))
        pair = data[..., None] >> shifts & np.uint8(15)
        data = pair.reshape(*data.shape[:-1], 2 * data.shape[-1])[..., :size]
        if scheme.symmetric:
            data = ((data ^ np.uint8(8)).astype(np.int8) - np.int8(8)).astype(np.int8)
    elif scheme.kind == "fp8":
        data = lax.bitcast_convert_type(data, jnp.float8_e4m3fn)
    per_channel = lambda x: spread(x.astype(dtype), scheme.channels, size, -1)
    x, scales = data.astype(dtype), parts["scales"].astype(dtype)
    if "zeros" in parts:
        # halves of scale · d before and behind the zero of wide blocks, for the whole may overflow
        halves = jnp.where(scales > huge_scale(jnp.finfo(dtype)), scales / 2, 0)
        x = x * per_channel(scales - halves) + per_channel(parts["zeros"]) + x * per_channel(halves)
    else:
        x = x * per_channel(scales)
    # rounding may have passed the largest number of the dtype; clipped before the mean too, which cannot mend that
    most = float(jnp.finfo(parts["scales"].dtype).max)
    x = jnp.clip(x, -most, most)
    return jnp.clip(x + parts["means"].astype(dtype), -most, most) if "means" in parts else x


def huge_scale(info: Any) -> float:
    """Above this, blocks of 2 · 448 steps or fewer may be wider than the largest number of the dtype."""
    return float(info.max) / 1024


@jax.custom_jvp
def straight_through(x: Any, original: Any) -> Any:
    """`x`, with the derivative of `original`."""
    return x


straight_through.defjvps(None, lambda tangent, *_: tangent)


def spread(x: Any, per: int | None, length: int, axis: int) -> Any:
    """`x` with each entry along `axis` repeated `per` times, up to `length`; a single entry broadcasts and is kept."""
    if per == 1 or x.shape[axis] <= 1 or per is None:
        return x
    return lax.slice_in_dim(jnp.repeat(x, per, axis=axis), 0, length, axis=axis)


class PagedArray(NamedTuple):
    """Keys or values that lie in pages of a pool, as `paged_attention` hands them on: a pytree with the shape and dtype
    of the array `[..., S, K, H]` that they stand for, S = pages · page."""

    pages: Any  # `[P, page, K, H]`, a plain array or a `QuantizedArray`
    tables: Any  # int32 `[..., pages]`: which page of the pool holds the tokens from each multiple of a page on

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
