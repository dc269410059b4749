"""Block masks: which blocks of the T × S score matrix are computed at all."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_mfa import checks
from jax_mfa.flex.blocks import Grid, states_of
from jax_mfa.problem import MAX_POSITION

if TYPE_CHECKING:
    from jax_mfa.typing import Bool


def _pair(size: Any) -> tuple[int, int]:
    if not isinstance(size, (tuple, list)) or len(size) != 2 or not all(checks.is_integer(x) and x >= 1 for x in size):
        raise ValueError(f"block_size must be a pair of positive integers (rows, columns), got {checks.seen(size)}")
    return int(size[0]), int(size[1])


def _parameters(function: Callable[..., Any]) -> int:
    """2 of a function of block indices, and of one that does not tell; 4 of a `mask_mod`; 0 of any other."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return 2
    any_number = any(x.kind is x.VAR_POSITIONAL for x in signature.parameters.values())
    for count in (4, 2) if any_number else (2, 4):
        with contextlib.suppress(TypeError):
            signature.bind(*range(count))
            return count
    return 0


@functools.partial(jax.tree_util.register_dataclass, data_fields=["blocks", "whole"], meta_fields=["block_size"])
@dataclasses.dataclass(frozen=True, eq=False)  # with arrays, the answer would be one too
class BlockMask:
    """A boolean mask in blocks of rows and columns.

    Row t may see column s only where `blocks[..., t // rows, s // columns]` is true. Masks of equal contents are equal
    and hash alike, so that one may be a static argument of `jit`; a traced mask equals itself alone.

    Args:
      blocks: bool array that broadcasts to `[..., N, ceil(T / rows), ceil(S / columns)]`; one of numpy is copied.
      block_size: `(rows, columns)` of one block, static positive integers.
      whole: None, or a bool array of the shape of `blocks`: true only where the `mask_mod` that goes along with this
        mask (see `flex_attention`) holds for all scores of a block, and so need not be asked.

    Raises:
      ValueError: for a block size that is not a pair of positive integers.

    The builders `from_mask`, `from_function`, `causal`, `window`, `strided`, `prefix_lm` and `documents` raise
    `ValueError` for such a size, too, for a length that is negative or 2³⁰ and more and for a stride below 1, and
    `TypeError` for a mask that is not bool `[..., T, S]`, for what is no function, and for what is no integer.
    """

    blocks: Bool[Array | np.ndarray | jax.ShapeDtypeStruct, "*BN T_blocks S_blocks"]
    block_size: tuple[int, int]
    whole: Bool[Array | np.ndarray | jax.ShapeDtypeStruct, "*BN T_blocks S_blocks"] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_size", _pair(self.block_size))
        for name in ("blocks", "whole"):
            x = getattr(self, name)
            if isinstance(x, np.ndarray) and x.flags.writeable:  # what is hashed must not change
                x = x.copy()
                x.flags.writeable = False
                object.__setattr__(self, name, x)

    @functools.cached_property
    def _contents(self) -> Any:
        """The arrays as a value that compares and hashes; those of numpy and of JAX alike."""
        return self._content(self.blocks), self._content(self.whole)

    @staticmethod
    def _content(x: Any) -> Any:
        if isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_addressable", True):
            return id(x)
        if not isinstance(x, (np.ndarray, jax.Array, list)):
            return x
        array = np.asarray(x)
        return array.dtype.str, array.shape, array.tobytes()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockMask):
            return NotImplemented
        return self is other or (self.block_size, self._contents) == (other.block_size, other._contents)

    def __hash__(self) -> int:
        return hash((self.block_size, self._contents))

    def __reduce__(self) -> tuple[Any, ...]:
        # no hash goes along: that of another process differs
        return type(self), (self.blocks, self.block_size, self.whole)

    def __str__(self) -> str:
        """A picture of the blocks of the first batch entry and head: `#` whole, `+` seen, `.` hidden.

        Of a mask with more than 64 rows or columns of blocks, one sign stands for several.
        """
        if not isinstance(self.blocks, (np.ndarray, Array)) or isinstance(self.blocks, jax.core.Tracer):
            return repr(self)
        first = lambda x: np.asarray(x).reshape(-1, *x.shape[-2:])[0].astype(int)
        states = first(self.blocks) * (1 if self.whole is None else 1 + first(self.whole))
        for axis in (0, 1):  # those of several: hidden or whole where all are
            together = max(-(-states.shape[axis] // 64), 1)
            at = np.arange(0, states.shape[axis], together)
            low, high = (f.reduceat(states, at, axis) if at.size else states for f in (np.minimum, np.maximum))
            states = np.where(low == high, low, 1)
        return "\n".join("".join(".+#"[x] for x in row) for row in states)

    def __and__(self, other: BlockMask) -> BlockMask:
        """Blocks that both allow; whole where both are. Raises ValueError where block sizes differ."""
        return self._combined(other, operator.and_)

    def __or__(self, other: BlockMask) -> BlockMask:
        """Blocks that either allows; whole where either is. Raises ValueError where block sizes differ."""
        return self._combined(other, operator.or_)

    def _combined(self, other: BlockMask, rule: Callable[[Any, Any], Any]) -> BlockMask:
        if not isinstance(other, BlockMask):
            return NotImplemented
        if self.block_size != other.block_size:
            raise ValueError(f"block masks must share a block size, got {self.block_size} and {other.block_size}")
        both: list[Any] = [self.whole, other.whole]
        if rule is operator.or_ and any(x is not None for x in both):  # none is whole of which it is not known
            both = [of.blocks != of.blocks if x is None else x for of, x in zip((self, other), both)]
        whole = None if any(x is None for x in both) else rule(*both)
        return BlockMask(rule(self.blocks, other.blocks), self.block_size, whole)

    # --- builders: the smallest block mask that holds a pattern. A block counts as a whole: where a pattern cuts
    # through blocks, give the exact rule (is_causal, local_window_size, mask, segment ids) beside the block mask.

    @classmethod
    def from_mask(cls, mask: Bool[ArrayLike, "*BN T S"] | Sequence[Any], block_size: tuple[int, int]) -> BlockMask:
        """From a bool mask `[..., T, S]`: blocks in which something is visible."""
        numpy: Any = jnp if isinstance(mask, jax.Array) else np
        try:
            whole = numpy.asarray(mask)
        except ValueError as error:
            raise TypeError(f"mask must be bool [..., T, S], got {checks.seen(mask)}: {error}") from None
        if whole.ndim < 2 or whole.dtype != np.bool_:
            raise TypeError(f"mask must be bool [..., T, S], got {whole.dtype.name}{list(whole.shape)}")
        rows, columns = _pair(block_size)
        *lead, t, s = whole.shape
        padding = [(0, 0)] * len(lead) + [(0, -t % rows), (0, -s % columns)]
        blocks = numpy.pad(whole, padding).reshape(*lead, -(-t // rows), rows, -(-s // columns), columns)
        return cls(blocks.any((-3, -1)), block_size)

    @classmethod
    def from_function(
        cls,
        function: Callable[[np.ndarray, np.ndarray], ArrayLike] | Callable[[Array, Array, Array, Array], Array],
        queries: int,
        keys: int,
        block_size: tuple[int, int],
        *,
        batch: int | None = None,
        heads: int | None = None,
        query_offset: int = 0,
        progress: bool = False,
    ) -> BlockMask:
        """From a function of scores, or of blocks.

        `mask_mod(b, n, t, s) -> bool`, as `flex_attention` takes it, is asked of all T · S scores, in chunks of bounded
        memory: blocks where it never holds are hidden, and those where it holds for every score are `whole`.
        Pass the same function along with the mask, for it cuts through the other blocks. Where arrays that it reads are
        traced, so are the results, and the work is done at each run.

        `function(i, j) -> bool` is asked of integer arrays of block indices, row `[·, 1]` and column `[1, ·]`.

        Args:
          function: of four parameters or of two.
          queries, keys: T and S.
          block_size: `(rows, columns)` of one block.
          batch, heads: how many batch entries and heads the blocks are of, for a function of `b` or `n`; blocks are
            `[batch, 1 | heads, T blocks, S blocks]`, and have no axes for what is None.
          query_offset: integer, the position of the first query.
          progress: show on stderr how much is done.

        Raises:
          TypeError, ValueError: for what is no function, or a size that is no integer, negative or 2³⁰ and more; for a
            function of `b` without `batch`, or of `n` without `heads`, and as `flex_attention` does.
        """
        rows, columns = _pair(block_size)
        parameters = _parameters(function) if callable(function) else 0
        if not parameters:
            expected = "a function of block indices i and j, or a mask_mod(b, n, t, s)"
            raise TypeError(f"function must be {expected}, got {checks.seen(function)}")
        queries = checks.integer("queries", queries, 0, MAX_POSITION)
        keys = checks.integer("keys", keys, 0, MAX_POSITION)
        offset = checks.integer("query_offset", query_offset, -MAX_POSITION, MAX_POSITION)
        batch, heads = (
            x if x is None else checks.integer(name, x, 1) for name, x in (("batch", batch), ("heads", heads))
        )
        progress = checks.boolean("progress", progress)
        if parameters == 4:
            states = states_of(function, Grid(queries, keys, rows, columns, offset), batch, heads, progress)
            return cls(states > 0, block_size, states == 2)
        if not (batch is heads is None) or offset or progress:
            raise ValueError("batch, heads, query_offset and progress go with a mask_mod(b, n, t, s), not f(i, j)")
        i, j = np.arange(-(-queries // rows))[:, None], np.arange(-(-keys // columns))[None, :]
        of_indices: Any = function
        return cls(np.broadcast_to(np.asarray(of_indices(i, j), bool), (i.size, j.size)).copy(), block_size)

    @classmethod
    def _of_distances(
        cls, low: int | None, high: int | None, queries: int, keys: int, block_size: tuple[int, int]
    ) -> BlockMask:
        """Blocks in which some column − row lies in low … high (None: no limit)."""
        rows, columns = _pair(block_size)

        def some(i: np.ndarray, j: np.ndarray) -> Any:
            last_row, last_column = np.minimum((i + 1) * rows, queries) - 1, np.minimum((j + 1) * columns, keys) - 1
            nearest, farthest = j * columns - last_row, last_column - i * rows
            return (True if high is None else nearest <= high) & (True if low is None else farthest >= low)

        return cls.from_function(some, queries, keys, block_size)

    @classmethod
    def causal(cls, queries: int, keys: int, block_size: tuple[int, int], query_offset: int = 0) -> BlockMask:
        """Columns up to the row's position, t + query_offset."""
        query_offset = checks.integer("query_offset", query_offset)
        return cls._of_distances(None, query_offset, queries, keys, block_size)

    @classmethod
    def window(
        cls, queries: int, keys: int, block_size: tuple[int, int], left: int, right: int = 0, query_offset: int = 0
    ) -> BlockMask:
        """Columns from `left` before the row's position, t + query_offset, to `right` after it."""
        left, right = checks.integer("left", left, 0), checks.integer("right", right, 0)
        query_offset = checks.integer("query_offset", query_offset)
        return cls._of_distances(query_offset - left, query_offset + right, queries, keys, block_size)

    @classmethod
    def strided(cls, queries: int, keys: int, block_size: tuple[int, int], stride: int) -> BlockMask:
        """The diagonal, and every `stride`-th block column before it (Sparse Transformer, arXiv:1904.10509)."""
        stride = min(checks.integer("stride", stride, 1), MAX_POSITION)
        every = cls.from_function(lambda _, j: j % stride == stride - 1, queries, keys, block_size)
        diagonal = cls._of_distances(0, 0, queries, keys, block_size)
        return diagonal | (every & cls.causal(queries, keys, block_size))

    @classmethod
    def prefix_lm(cls, queries: int, keys: int, block_size: tuple[int, int], prefix: int) -> BlockMask:
        """Causal, and the first `prefix` columns for every row (arXiv:1910.10683, section 3.2)."""
        _, columns = _pair(block_size)
        prefix = checks.integer("prefix", prefix, 0)
        start = cls.from_function(lambda i, j: j * columns < prefix, queries, keys, block_size)
        return start | cls.causal(queries, keys, block_size)

    @classmethod
    def documents(cls, lengths: Sequence[int], block_size: tuple[int, int]) -> BlockMask:
        """Documents of these lengths one after another, each of which sees itself alone; T = S = their sum."""
        rows, columns = _pair(block_size)
        given = np.asarray(lengths, object)  # also what numpy would round, or could not stack
        if given.ndim != 1 or not given.size:
            raise ValueError(f"lengths must be a sequence of at least one integer, got {checks.seen(lengths)}")
        ends = np.cumsum([checks.integer(f"lengths[{i}]", x, 0) for i, x in enumerate(given)], dtype=np.int64)
        total = int(ends[-1])
        document = np.searchsorted(ends, np.arange(total), side="right")

        def range_of(size: Any) -> tuple[np.ndarray, np.ndarray]:
            starts = np.arange(0, total, size)
            return document[starts], document[np.minimum(starts + size, total) - 1]

        (low, high), (key_low, key_high) = range_of(rows), range_of(columns)
        return cls((low[:, None] <= key_high[None, :]) & (key_low[None, :] <= high[:, None]), block_size)
