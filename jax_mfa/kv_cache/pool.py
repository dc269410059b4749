"""A cache of keys and values in pages: a pool of them on the device, and a `PageBook` on the host that says whose they
are.

Dimension letters: P pages of the pool, T new tokens of all sequences together, K key/value heads, H head size of keys,
V of values.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from jax_mfa import checks
from jax_mfa.arguments import as_array, clipped, known_integers
from jax_mfa.kv_cache.page_book import MOST_SLOTS, PageBook, Write
from jax_mfa.kv_cache.paged import PAGE_SIZES
from jax_mfa.kv_cache.quantized import quantize
from jax_mfa.kv_cache.storage import QuantizedArray, Scheme, as_bits, as_scheme, dtype_of
from jax_mfa.metal import append
from jax_mfa.problem import DTYPES

if TYPE_CHECKING:
    from jax_mfa.typing import Float


@functools.partial(jax.tree_util.register_dataclass, data_fields=["key_pages", "value_pages"], meta_fields=["book"])
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PagedKVCache:
    """Keys and values of many sequences in pages of one pool: a pytree of the pages, to be read by
    `jax_mfa.paged_attention`, with the book of who owns them.

    The layers of a model share a book: `create(…, book=first.book)`. One `book.reserve` then serves the `write` of
    each, which may be traced.

    Attributes:
      key_pages: `[P, page, K, H]`, a plain array or a `QuantizedArray`. In place of bfloat16 stand its bits, as uint16:
        XLA's CPU backend updates no array of bfloat16 in place.
      value_pages: `[P, page, K, V]`, likewise.
      book: a `PageBook`; it changes, and is no part of what JAX sees.
    """

    key_pages: Any
    value_pages: Any
    book: PageBook

    def __repr__(self) -> str:
        return f"PagedKVCache({checks.seen(self.key_pages)}, {checks.seen(self.value_pages)}, {checks.seen(self.book)})"

    @classmethod
    def create(
        cls,
        pages: int,
        page_size: int,
        heads: int,
        head_size: int,
        value_size: int | None = None,
        *,
        dtype: Any = "float32",
        key_scheme: Scheme | str | None = None,
        value_scheme: Scheme | str | None = None,
        book: PageBook | None = None,
    ) -> PagedKVCache:
        """An empty cache.

        Args:
          pages: P.
          page_size: a power of two from 8 to 256.
          heads: K.
          head_size, value_size: H and V; V = H if None.
          dtype: float16, bfloat16, float32 or float64.
          key_scheme, value_scheme: how tokens are quantised when they are written; None for plain pages. A block must
            lie within a token (tokens = 1, no center): what is written is never quantised again.
          book: of a cache of as many pages of the same size; None for a new one.

        Raises:
          ValueError, TypeError: naming the argument.
        """
        if checks.integer("page_size", page_size) not in PAGE_SIZES:
            raise ValueError(f"page_size must be one of {PAGE_SIZES}, got {page_size}")
        fresh = PageBook(pages, page_size)
        sizes = {"heads": heads, "head_size": head_size, "value_size": head_size if value_size is None else value_size}
        heads, head_size, value_size = (checks.integer(name, x, 1, MOST_SLOTS) for name, x in sizes.items())
        dtype = checks.floating_dtype("dtype", dtype, DTYPES)
        book = fresh if book is None else book
        if not isinstance(book, PageBook) or (book.pages, book.page_size) != (fresh.pages, fresh.page_size):
            raise ValueError(f"book must be a PageBook of {pages} pages of {page_size} tokens, got {checks.seen(book)}")

        def empty(name: str, size: int, scheme: Scheme | str | None) -> Any:
            plain = jnp.zeros((book.pages, book.page_size, heads, size), dtype)
            if scheme is None:
                return as_bits(plain)
            scheme = as_scheme(name, scheme)
            if scheme.tokens != 1 or scheme.center is not None:
                raise ValueError(f"{name} must have blocks within a token (tokens = 1, no center), got {scheme}")
            return jax.tree.map(as_bits, jax.jit(functools.partial(quantize, scheme=scheme))(plain))

        return cls(empty("key_scheme", head_size, key_scheme), empty("value_scheme", value_size, value_scheme), book)

    def append(
        self,
        sequences: Sequence[int],
        key: Float[ArrayLike, "T K H"],
        value: Float[ArrayLike, "T K V"],
        counts: Sequence[int],
        tokens: Sequence[Sequence[int] | np.ndarray] | None = None,
    ) -> PagedKVCache:
        """Writes new tokens behind those of sequences, in place: the cache that this is called on is donated.

        Args:
          sequences, counts, tokens: as in `PageBook.reserve`.
          key: `[T, K, H]`: the tokens of the first sequence, then those of the next; T is the sum of counts.
          value: `[T, K, V]`.

        Raises:
          OutOfPages: where the pool has not the room; nothing has then changed, and no page was written.
          ValueError, TypeError: naming the argument, or where this cache was donated already; nothing has then changed.
        """
        sequences, counts = checks.integers("sequences", sequences), checks.integers("counts", counts, least=0)
        key, value = self._checked(key, value, sum(counts), "counts")
        pages = self.key_pages, self.value_pages
        if any(not isinstance(x, jax.core.Tracer) and x.is_deleted() for x in jax.tree.leaves(pages)):
            raise ValueError("this cache was donated, to an earlier append perhaps: use what that returned")
        where = self.book.reserve(sequences, counts, tokens)
        if copies := len(where.sources):  # as many as there are sequences, or none: few shapes of programs
            padded = (np.pad(x, (0, len(sequences) - copies), constant_values=-1) for x in where[1:])
            where = Write(where.slots, *padded)
        keys, values = write_in_place(pages, key, value, where)
        return type(self)(keys, values, self.book)

    def write(self, where: Write, key: Float[ArrayLike, "T K H"], value: Float[ArrayLike, "T K V"]) -> PagedKVCache:
        """What `append` does once it is known where tokens go; may be traced, and is in place where the cache is
        donated to `jit`.

        Args:
          where: from `book.reserve`. Tokens of a negative slot are padding, as are copies from or to a negative page.
            Traced slots and pages beyond the pool are padding too.
          key, value: `[T, K, H]`, `[T, K, V]`.

        Raises:
          ValueError, TypeError: naming the argument; also for slots and pages that are known to be beyond the pool.
        """
        where = self._places(where)
        key, value = self._checked(key, value, where.slots.shape[0], "where.slots")
        keys, values = _write((self.key_pages, self.value_pages), key, value, where)
        return type(self)(keys, values, self.book)

    def _checked(self, key: Any, value: Any, tokens: int, of: str) -> list[Any]:
        new = []
        for name, x, pages in (("key", key, self.key_pages), ("value", value, self.value_pages)):
            x = as_array(name, x, "f", "floating [T, K, H]")
            shape = (tokens, *pages.shape[2:])
            checks.fits(name, x, x.shape == shape, f"{list(shape)}, for {tokens} tokens of {of}")
            if x.dtype != dtype_of(pages):
                raise TypeError(f"{name} must have the cache's dtype, {dtype_of(pages).name}, got {x.dtype.name}")
            new.append(x)
        return new

    def _places(self, where: Any) -> Write:
        """Where tokens go: −1, within the pool, or at its end, which nothing is written to."""
        if not isinstance(where, Write):
            raise TypeError(f"where must be a Write, as PageBook.reserve gives it, got {checks.seen(where)}")
        count, page = self.key_pages.shape[:2]
        places: list[Any] = []
        for name, x, letter, most in zip(Write._fields, where, "TCC", (count * page, count, count)):
            x = known_integers(f"where.{name}", x, -(2**31), most - 1, f"integers [{letter}]")
            checks.fits(f"where.{name}", x, x.ndim == 1, f"[{letter}]")
            places.append(jnp.asarray(clipped(x, -1, most)))
        _, copies, targets = (list(x.shape) for x in places)
        if copies != targets:
            raise ValueError(f"where.targets must have the shape of where.sources, {copies}, got {targets}")
        return Write(*places)


def _write(pages: Any, key: Any, value: Any, where: Write) -> tuple[Any, ...]:
    where = jax.tree.map(lambda x: jnp.asarray(x, jnp.int32), where)
    if where.slots.size and append.takes(pages):
        return lax.platform_dependent(pages, key, value, where, cpu=_on_metal, default=scattered)
    return scattered(pages, key, value, where)


write_in_place = jax.jit(_write, donate_argnums=0)


@jax.custom_batching.custom_vmap
def _on_metal(pages: Any, key: Any, value: Any, where: Write) -> tuple[Any, ...]:
    written = append.write(pages, key, value, where)
    return scattered(pages, key, value, where) if written is None else written


@_on_metal.def_vmap
def _on_metal_mapped(size: Any, mapped: Any, *arguments: Any) -> tuple[tuple[Any, ...], Any]:
    axes = jax.tree.map(lambda x: 0 if x else None, mapped)
    written = jax.vmap(scattered, in_axes=axes, axis_size=size)(*arguments)
    return written, jax.tree.map(lambda _: True, written)


def scattered(pages: Any, key: Any, value: Any, where: Write) -> tuple[Any, ...]:
    """The pages of keys and of values with new tokens in them, by scatters of XLA."""
    count, page = pages[0].shape[:2]
    slots, sources, targets = where
    # scatters drop page `count`, which does not exist
    place = lambda x: jnp.where(x < 0, count, x)

    def written(pages: Array, new: Array) -> Array:
        if sources.size:
            copied = jnp.where((sources < 0) | (sources >= count), count, place(targets))
            pages = pages.at[copied].set(pages[sources], mode="drop")
        return pages.at[place(slots // page), slots % page].set(as_bits(new), mode="drop")

    coded = lambda x, new: quantize(new, x.scheme) if isinstance(x, QuantizedArray) else new
    return tuple(jax.tree.map(written, x, coded(x, new)) for x, new in zip(pages, (key, value)))
