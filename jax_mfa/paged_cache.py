"""A cache of keys and values in pages: a pool of them on the device, and a `PageBook` on the host that says whose they
are.

Dimension letters: P pages of the pool, T new tokens of all sequences together, K key/value heads, H head size of keys,
V of values.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jax_mfa import checks
from jax_mfa.arguments import as_array
from jax_mfa.metal import append
from jax_mfa.page_book import PageBook, Write
from jax_mfa.paged import PAGE_SIZES
from jax_mfa.quantization import quantize
from jax_mfa.specification import DTYPES
from jax_mfa.storage import QuantizedArray, Scheme, as_bits, as_scheme, dtype_of


@functools.partial(jax.tree_util.register_dataclass, data_fields=["key_pages", "value_pages"], meta_fields=["book"])
@dataclasses.dataclass(frozen=True)
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
        if page_size not in PAGE_SIZES:
            raise ValueError(f"page_size must be one of {PAGE_SIZES}, got {page_size!r}")
        sizes = {"pages": pages, "heads": heads, "head_size": head_size}
        for name, x in sizes.items():
            checks.integer(name, x, least=1)
        value_size = head_size if value_size is None else checks.integer("value_size", value_size, least=1)
        if jnp.dtype(dtype).name not in DTYPES:
            raise TypeError(f"dtype must be one of {', '.join(DTYPES)}, got {jnp.dtype(dtype).name}")
        if book is None:
            book = PageBook(pages, page_size)
        elif not isinstance(book, PageBook) or (book.pages, book.page_size) != (pages, page_size):
            raise ValueError(f"book must be a PageBook of {pages} pages of {page_size} tokens, got {book!r}")

        def empty(name, size, scheme):
            plain = jnp.zeros((pages, page_size, heads, size), dtype)
            if scheme is None:
                return as_bits(plain)
            scheme = as_scheme(name, scheme)
            if scheme.tokens != 1 or scheme.center is not None:
                raise ValueError(f"{name} must have blocks within a token (tokens = 1, no center), got {scheme}")
            quantized = jax.jit(functools.partial(quantize, scheme=scheme))(plain)
            return dataclasses.replace(quantized, **{name: as_bits(x) for name, x in quantized.parts().items()})

        keys, values = empty("key_scheme", head_size, key_scheme), empty("value_scheme", value_size, value_scheme)
        return cls(keys, values, book)

    def append(
        self,
        sequences: Sequence[int],
        key: ArrayLike,
        value: ArrayLike,
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
          ValueError, TypeError: naming the argument; nothing has then changed.
        """
        key, value = self._checked(key, value, sum(checks.integer("counts", n, least=0) for n in counts))
        where = self.book.reserve(sequences, counts, tokens)
        pages = write_in_place((self.key_pages, self.value_pages), key, value, _padded(where, len(sequences)))
        return dataclasses.replace(self, key_pages=pages[0], value_pages=pages[1])

    def write(self, where: Write, key: ArrayLike, value: ArrayLike) -> PagedKVCache:
        """What `append` does once it is known where tokens go; may be traced, and is in place where the cache is
        donated to `jit`.

        Args:
          where: from `book.reserve`. Tokens of a negative slot are padding, as are copies to a negative page.
          key, value: `[T, K, H]`, `[T, K, V]`.
        """
        key, value = self._checked(key, value, where.slots.shape[0])
        pages = _write((self.key_pages, self.value_pages), key, value, where)
        return dataclasses.replace(self, key_pages=pages[0], value_pages=pages[1])

    def _checked(self, key, value, tokens: int):
        new = []
        for name, x, pages in (("key", key, self.key_pages), ("value", value, self.value_pages)):
            x = as_array(name, x, "f", "floating [T, K, H]")
            if x.shape != (tokens, *pages.shape[2:]):
                raise ValueError(f"{name} must have shape {[tokens, *pages.shape[2:]]}, got {list(x.shape)}")
            if x.dtype != dtype_of(pages):
                raise TypeError(f"{name} must have the cache's dtype, {dtype_of(pages).name}, got {x.dtype.name}")
            new.append(x)
        return new


def _padded(where: Write, sequences: int) -> Write:
    """As many copies as there are sequences, or none: few shapes of programs."""
    if not len(where.sources):
        return where
    missing = (0, sequences - len(where.sources))
    return where._replace(
        sources=np.pad(where.sources, missing), targets=np.pad(where.targets, missing, constant_values=-1)
    )


def _write(pages, key, value, where: Write):
    where = jax.tree.map(lambda x: jnp.asarray(x, jnp.int32), where)
    if where.slots.size and append.takes(pages):
        return lax.platform_dependent(pages, key, value, where, cpu=_on_metal, default=scattered)
    return scattered(pages, key, value, where)


def scattered(pages, key, value, where: Write):
    return tuple(_written(x, new, where) for x, new in zip(pages, (key, value)))


@jax.custom_batching.custom_vmap
def _on_metal(pages, key, value, where: Write):
    found = append.write(pages, key, value, where)
    return scattered(pages, key, value, where) if found is None else found


@_on_metal.def_vmap
def _on_metal_mapped(size, mapped, *arguments):
    axes = jax.tree.map(lambda x: 0 if x else None, mapped)
    found = jax.vmap(scattered, in_axes=axes, axis_size=size)(*arguments)
    return found, jax.tree.map(lambda _: True, found)


write_in_place = jax.jit(_write, donate_argnums=0)


def _written(pages, new, where: Write):
    if isinstance(pages, QuantizedArray):
        coming = quantize(new, pages.scheme).parts()
        written = {name: _written(x, coming[name], where) for name, x in pages.parts().items()}
        return dataclasses.replace(pages, **written)
    count, page = pages.shape[:2]
    slots, sources, targets = where
    # there is no page `count`: what goes there is dropped
    place = lambda x: jnp.where(x < 0, count, x)
    if sources.size:
        pages = pages.at[place(targets)].set(pages[sources], mode="drop")
    return pages.at[place(slots // page), slots % page].set(as_bits(new), mode="drop")
