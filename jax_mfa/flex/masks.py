"""Ready-made masks for `flex_attention` and `BlockMask.from_function` (`jax_mfa.masks`).

A mask is a value that is called with scalars, `mask(b, n, t, s) -> bool`: batch index, query head, position of the
query and of the key. `&`, `|` and `~` combine masks with each other and with plain functions:

    from jax_mfa import masks

    gemma = masks.causal() & masks.window(1023)
    packed = masks.documents(lengths=[700, 300, 1048]) & (masks.causal() | masks.prefix(64))

All are made of comparisons, integer arithmetic and indexing, so that each implementation can run them. Knows nothing of
attention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from jax_mfa import checks
from jax_mfa.problem import MAX_POSITION

if TYPE_CHECKING:
    from jax_mfa.typing import Integer

__all__ = [
    "Mask",
    "and_masks",
    "causal",
    "chunked",
    "dilated",
    "documents",
    "neighborhood",
    "or_masks",
    "prefix",
    "sink_window",
    "top_k_blocks",
    "tree",
    "window",
]

MaskMod: TypeAlias = Callable[[Array, Array, Array, Array], Array]


@dataclasses.dataclass(frozen=True)
class Mask:
    """A `mask_mod` that combines with others.

    Args:
      function: `function(b, n, t, s) -> bool` of scalars.
      name: how it shows.
    """

    function: MaskMod
    name: str = "mask"

    def __call__(self, b: Array, n: Array, t: Array, s: Array) -> Array:
        return self.function(b, n, t, s)

    def __and__(self, other: MaskMod) -> Mask:
        return and_masks(self, other) if callable(other) else NotImplemented

    def __or__(self, other: MaskMod) -> Mask:
        return or_masks(self, other) if callable(other) else NotImplemented

    def __rand__(self, other: MaskMod) -> Mask:
        return and_masks(other, self) if callable(other) else NotImplemented

    def __ror__(self, other: MaskMod) -> Mask:
        return or_masks(other, self) if callable(other) else NotImplemented

    def __invert__(self) -> Mask:
        return Mask(lambda *at: ~self.function(*at), f"~{self.name}")

    def __repr__(self) -> str:
        return self.name


def and_masks(*functions: MaskMod) -> Mask:
    """Where all masks or functions hold; everywhere without any. Raises `TypeError` for what is no function."""
    return _combined("and_masks", " & ", jnp.logical_and, True, functions)


def or_masks(*functions: MaskMod) -> Mask:
    """Where one of the masks or functions holds; nowhere without any. Raises `TypeError` for what is no function."""
    return _combined("or_masks", " | ", jnp.logical_or, False, functions)


def _combined(name: str, sign: str, rule: Any, start: bool, functions: tuple[MaskMod, ...]) -> Mask:
    for i, x in enumerate(functions):
        if not callable(x):
            raise TypeError(f"{name} must have functions mask_mod(b, n, t, s), got {checks.seen(x)} as number {i}")

    def function(*at: Array) -> Array:
        found = [x(*at) for x in functions] or [jnp.asarray(start)]
        for x in found[1:]:
            found[0] = rule(found[0], x)
        return found[0]

    names = (x.name if isinstance(x, Mask) else getattr(x, "__name__", "function") for x in functions)
    return Mask(function, f"({sign.join(names)})" if functions else f"{name}()")


# --- by position


def causal() -> Mask:
    """Keys up to the query's position."""
    return Mask(lambda b, n, t, s: s <= t, "causal()")


def window(left: int | None, right: int | None = 0) -> Mask:
    """Keys from `left` before the query's position to `right` after it; None for no limit.

    Raises:
      TypeError, ValueError: for a side that is no integer, or negative.
    """
    sides = [x if x is None else _integer(name, x, 0) for name, x in (("left", left), ("right", right))]

    def function(b: Array, n: Array, t: Array, s: Array) -> Array:
        see = jnp.asarray(True) if sides[0] is None else s - t >= -sides[0]
        return see if sides[1] is None else see & (s - t <= sides[1])

    return Mask(function, f"window({left}, {right})")


def prefix(length: int | Integer[ArrayLike, "B"]) -> Mask:
    """The first keys, for every query: with `causal() | prefix(length)` a prefix language model (arXiv:1910.10683).

    Args:
      length: integer, or one for each batch entry.

    Raises:
      TypeError, ValueError: for a length that is no integer, or negative; for an array of another rank.
    """
    lengths = _by_batch("length", length)
    return Mask(lambda b, n, t, s: s < lengths(b), f"prefix({checks.seen(length)})")


def sink_window(sinks: int, window: int) -> Mask:
    """The query itself, `window` keys before it and the first `sinks` keys, if not later (arXiv:2309.17453).

    Raises:
      TypeError, ValueError: for a size that is no integer, or negative.
    """
    sinks, window = _integer("sinks", sinks, 0), _integer("window", window, 0)
    see = lambda b, n, t, s: (s <= t) & ((s < sinks) | (s - t >= -window))
    return Mask(see, f"sink_window({sinks}, {window})")


def dilated(window: int, dilation: int) -> Mask:
    """Every `dilation`-th key around the query, `window` on each side (Longformer, arXiv:2004.05150, section 3.1).

    Raises:
      TypeError, ValueError: for a window that is no integer, or negative, or a dilation below 1.
    """
    window, dilation = _integer("window", window, 0), _integer("dilation", dilation, 1)
    most = min(window * dilation, MAX_POSITION)
    see = lambda b, n, t, s: (abs(s - t) <= most) & (lax.rem(s - t, jnp.int32(dilation)) == 0)
    return Mask(see, f"dilated({window}, {dilation})")


def chunked(size: int) -> Mask:
    """Keys of the query's own chunk of this size, up to the query (the local layers of Llama 4).

    Raises:
      TypeError, ValueError: for a size that is no integer, or below 1.
    """
    size = _integer("size", size, 1)
    chunk = lambda x: lax.div(x, jnp.int32(size))
    return Mask(lambda b, n, t, s: (s <= t) & (chunk(t) == chunk(s)), f"chunked({size})")


def neighborhood(
    shape: int | Sequence[int],
    kernel_size: int | Sequence[int],
    dilation: int | Sequence[int] = 1,
    is_causal: bool | Sequence[bool] = False,
) -> Mask:
    """Neighbourhood attention over a line, an image or a volume (NATTEN; arXiv:2204.07143, dilated arXiv:2209.15001).

    Tokens are the elements of an array of this shape in C order. On each axis a query sees `kernel_size` keys, every
    `dilation`-th, around it; near a border the window shifts inwards and keeps its size. On a causal axis it sees
    itself and the `kernel_size` − 1 before, of which there are fewer near the start.

    Args:
      shape: size of each of one, two or three axes; their product is T = S.
      kernel_size, dilation, is_causal: one for all axes, or one for each.

    Raises:
      TypeError, ValueError: for other than positive integers or bools, other numbers of axes, or a kernel that with its
        dilation is larger than its axis.
    """
    sizes = [
        _integer("shape", x, 1) for x in ([shape] if checks.is_integer(shape) else checks.integers("shape", shape))
    ]
    if len(sizes) not in (1, 2, 3):
        raise ValueError(f"shape must have 1, 2 or 3 axes, got {len(sizes)}")

    def by_axis(name: str, x: Any, check: Callable[[str, Any], Any]) -> list[Any]:
        found = list(x) if isinstance(x, (Sequence, np.ndarray)) else [x] * len(sizes)
        if len(found) != len(sizes):
            raise ValueError(f"{name} must have one entry for each of {len(sizes)} axes, got {len(found)}")
        return [check(name, i) for i in found]

    kernels, dilations = (
        by_axis(name, x, lambda name, i: _integer(name, i, 1))
        for name, x in (("kernel_size", kernel_size), ("dilation", dilation))
    )
    causal = by_axis("is_causal", is_causal, checks.boolean)
    for size, kernel, step in zip(sizes, kernels, dilations):
        if kernel * step > size:
            raise ValueError(f"kernel_size times dilation must fit its axis of {size}, got {kernel} times {step}")

    def function(b: Array, n: Array, t: Array, s: Array) -> Array:
        see = None
        for size, kernel, step, past in reversed([*zip(sizes, kernels, dilations, causal)]):
            (t, query), (s, key) = _divided(t, size), _divided(s, size)  # the last axis varies fastest
            place, group = _divided(query, step)
            other, other_group = _divided(key, step)
            if past:
                seen = (other <= place) & (other > place - kernel)
            else:
                length = lax.div(size - 1 - group, jnp.int32(step)) + 1  # how many keys are of the query's group
                start = jnp.minimum(jnp.maximum(place - kernel // 2, 0), length - kernel)
                seen = (other >= start) & (other < start + kernel)
            seen = seen & (group == other_group)
            see = seen if see is None else see & seen
        assert see is not None
        return see

    facts = [tuple(x) for x in (sizes, kernels, dilations, causal)]
    return Mask(function, f"neighborhood({', '.join(map(str, facts))})")


def _divided(x: Array, by: int) -> tuple[Array, Array]:
    """Quotient and remainder of a number that is not negative."""
    return lax.div(x, jnp.int32(by)), lax.rem(x, jnp.int32(by))


# --- by arrays


def documents(
    ids: Integer[ArrayLike, "S"] | Integer[ArrayLike, "B S"] | None = None, *, lengths: Sequence[int] | None = None
) -> Mask:
    """Tokens of the query's own document, in sequences packed of several.

    Args:
      ids: integers [S], or [B, S] for each batch entry: equal ones see each other. They index queries by position, too.
      lengths: in their place, the lengths of documents that stand one after another. What is behind the last one is one
        more document.

    Raises:
      TypeError, ValueError: unless one of the two is given; for ids that are no integers or of another rank; for
        lengths that are no integers, or negative.
    """
    if (ids is None) == (lengths is None):
        raise ValueError("ids or lengths must be given, and not both")
    if lengths is not None:
        counts = [*checks.integers("lengths", lengths, 0), 1]  # an index beyond the last is the last
        ids = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    table = _integers("ids", ids, (1, 2), "[S] or [B, S]")

    def function(b: Array, n: Array, t: Array, s: Array) -> Array:
        id_of = lambda i: jnp.asarray(table)[(i,) if table.ndim == 1 else (b, i)]
        return id_of(t) == id_of(s)

    return Mask(function, f"documents({list(table.shape)})")


def tree(parents: Integer[ArrayLike, "nodes"] | Integer[ArrayLike, "B nodes"], start: int | Array = 0) -> Mask:
    """A tree of tokens behind a prefix, as speculative decoding verifies it (SpecInfer, arXiv:2305.09781).

    A node sees its ancestors, itself and all before the tree; before the tree the mask is causal. The queries of a call
    may be the nodes alone, with `query_offset` their place.

    Args:
      parents: integers [nodes], or [B, nodes] for each batch entry: the node that each follows, an earlier one, or −1.
      start: position of the first node, integer or an integer array [B].

    Raises:
      TypeError, ValueError: for parents that are no integers, of another rank, or no earlier nodes; for a start that is
        neither.
    """
    up = _integers("parents", parents, (1, 2), "[nodes] or [B, nodes]")
    nodes = np.arange(up.shape[-1], dtype=np.int32)
    if isinstance(up, np.ndarray) and not ((up >= -1) & (up < nodes)).all():
        raise ValueError(f"parents must be earlier nodes, or -1, got {checks.seen(up.tolist())}")
    numpy: Any = np if isinstance(up, np.ndarray) else jnp
    reached = (up[..., None] == nodes) | (nodes[:, None] == nodes)
    for _ in range(max(nodes.size - 1, 0).bit_length()):  # paths of twice as many steps
        reached = numpy.matmul(reached.astype(np.float32), reached.astype(np.float32)) > 0
    starts = _by_batch("start", start)

    def function(b: Array, n: Array, t: Array, s: Array) -> Array:
        first = starts(b)
        node, other = (jnp.maximum(x - first, 0) for x in (t, s))
        ancestor = jnp.asarray(reached)[(node, other) if up.ndim == 1 else (b, node, other)]
        return (s <= t) & ((s < first) | ancestor)

    return Mask(function, f"tree({list(up.shape)})")


def top_k_blocks(indices: Integer[ArrayLike, "*BN T_blocks k"], block_size: int | tuple[int, int]) -> Mask:
    """The blocks of keys that each block of queries has chosen (as MoBA, arXiv:2502.13189, and NSA, arXiv:2502.11089).

    Args:
      indices: integers [T blocks, k], or with leading axes [N] or [B, N], of which a size of 1 serves all: the blocks
        of keys that a block of queries sees, in any order; −1 for none.
      block_size: rows and columns of a block, or one integer for both.

    Raises:
      TypeError, ValueError: for indices that are no integers or of another rank, or a bad block size.
    """
    size = [block_size] * 2 if checks.is_integer(block_size) else checks.sequence("block_size", block_size, "integers")
    size = [_integer("block_size", i, 1) for i in size]
    if len(size) != 2:
        raise ValueError(f"block_size must be one integer or two, got {checks.seen(block_size)}")
    chosen = _integers("indices", indices, (2, 3, 4), "[..., T blocks, k]")
    numpy: Any = np if isinstance(chosen, np.ndarray) else jnp
    steps = chosen.shape[-1].bit_length()
    missing = 2**steps - chosen.shape[-1]
    padding = numpy.full((*chosen.shape[:-1], missing), -1, np.int32)
    ordered = numpy.sort(numpy.concatenate([padding, chosen], axis=-1), axis=-1)

    def function(b: Array, n: Array, t: Array, s: Array) -> Array:
        table = jnp.asarray(ordered)
        lead = [i if count > 1 else 0 for i, count in zip((b, n)[4 - table.ndim :], table.shape)]
        row, column = lax.div(t, jnp.int32(size[0])), lax.div(s, jnp.int32(size[1]))
        at: Any = jnp.int32(0)  # of the last index that is no larger, by bisection
        for step in (2**i for i in reversed(range(steps))):
            at = jnp.where(table[(*lead, row, at + step)] <= column, at + step, at)
        return table[(*lead, row, at)] == column

    return Mask(function, f"top_k_blocks({list(chosen.shape)}, {tuple(size)})")


def _integer(name: str, x: Any, least: int) -> int:
    """`x`, and the largest position for anything beyond it."""
    return min(checks.integer(name, x, least), MAX_POSITION)


def _by_batch(name: str, x: Any) -> Callable[[Array], Any]:
    """An integer, or one for each batch entry, as a function of b."""
    if checks.is_integer(x):
        value = _integer(name, x, 0)
        return lambda b: value
    array = _integers(name, x, (0, 1), "[], or [B] for each batch entry")
    return lambda b: jnp.asarray(array)[b] if array.ndim else jnp.asarray(array)


def _integers(name: str, x: Any, ranks: tuple[int, ...], shape: str) -> Any:
    """An int32 array, of numpy unless it is one of JAX."""
    found = x if isinstance(x, jax.Array) else np.asarray(x)
    if not jnp.issubdtype(found.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers {shape}, got {checks.seen(x)}")
    if found.ndim not in ranks or not found.size:
        raise ValueError(f"{name} must be integers {shape}, got shape {list(found.shape)}")
    return found.astype(np.int32)
