"""A step of a decoder over paged caches: chunks of prompts and newest tokens of many sequences in one ragged call.

Shapes are rounded up to a few buckets, and each bucket is one compiled program: the parameters and caches it is given
may change, nothing else is compiled. `programs` counts how often each was traced.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_mfa
from generation import sampling
from generation.model import Attend, Decoder
from generation.sampling import GREEDY, Sampling
from jax_mfa.kv_cache.page_book import Write

PLAIN = ("float32", "float16", "bfloat16")
QUANTIZED = ("int8", "int4", "fp8")


@dataclasses.dataclass(frozen=True)
class CacheKind:
    """How keys and values are kept.

    Attributes:
      name: a dtype, or what they are quantised to, with scales of 16 bits.
      group: how many channels share a scale, where quantised.
    """

    name: str = "float32"
    group: int = 64

    def __post_init__(self):
        if self.name not in PLAIN + QUANTIZED:
            raise ValueError(f"the cache must be one of {', '.join(PLAIN + QUANTIZED)}, got {self.name!r}")
        if self.group < 1:
            raise ValueError(f"the cache's group must be at least 1 channel, got {self.group}")

    def dtype(self, decoder: Decoder) -> str:
        """Of what attention computes with: that of the pages, or of the scales."""
        if self.name in PLAIN:
            return self.name
        return "bfloat16" if decoder.dtype == jnp.bfloat16 else "float16"

    def create(self, decoder: Decoder, pages: int, page_size: int) -> list[jax_mfa.PagedKVCache]:
        """A cache for each layer, of one book."""
        config, scheme = decoder.config, None
        if self.name in QUANTIZED:
            scheme = jax_mfa.Scheme(self.name, channels=min(self.group, config.head_size))
        book = jax_mfa.PageBook(pages, page_size)
        create = functools.partial(
            jax_mfa.PagedKVCache.create, pages, page_size, config.kv_heads, config.head_size,
            dtype=self.dtype(decoder), key_scheme=scheme, value_scheme=scheme, book=book,
        )  # fmt: skip
        return [create() for _ in range(config.layers)]


class Rows(NamedTuple):
    """Where the rows of a ragged call stand: a pytree of arrays, padded to a bucket.

    Attributes:
      tokens, positions: `[T]`.
      where: slots `[T]`, and copies of pages, at most one a sequence, `[B]`; of padding negative.
      starts: `[B + 1]`, of each sequence among them.
      tables: `[B, pages]`. lengths: `[B]`.
    """

    tokens: Any
    positions: Any
    where: Write
    starts: Any
    tables: Any
    lengths: Any


class Piece(NamedTuple):
    """Of one sequence: its new tokens, from position `start` on, and where they are written. Of the last `wanted` rows
    what follows is asked for."""

    number: int
    tokens: Sequence[int]
    start: int
    where: Write
    wanted: int = 1
    sampling: Sampling = GREEDY


def paged(caches: list[jax_mfa.PagedKVCache], rows: Rows, dtype: str, implementation: str | None) -> Attend:
    """Attention that writes what is new into the layer's pages, and attends to all that is there; `caches` changes."""

    def attend(layer, q, k, v, **facts):
        caches[layer] = cache = caches[layer].write(rows.where, k.astype(dtype), v.astype(dtype))
        out = jax_mfa.paged_attention(
            q.astype(dtype), cache.key_pages, cache.value_pages, rows.tables, rows.lengths,
            query_start_locs=rows.starts, implementation=implementation, **facts,
        )  # fmt: skip
        return out.astype(q.dtype)

    return attend


class Runner:
    """A decoder, its caches and its compiled steps.

    Args:
      decoder: a `Decoder`.
      pages, page_size: of the caches.
      most_sequences, most_tokens: of a step.
      most_length: of a sequence.
      guesses: how many tokens a draft may guess ahead.
      implementation: of `jax_mfa.paged_attention`.
      jit: or something with the same arguments.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        pages: int,
        page_size: int = 16,
        most_sequences: int = 16,
        most_tokens: int = 256,
        most_length: int | None = None,
        guesses: int = 0,
        kind: CacheKind | None = None,
        implementation: str | None = None,
        jit: Any = jax.jit,
    ):
        self.config, self.kind = decoder.config, kind or CacheKind()
        self.most_length = min(most_length or self.config.context, pages * page_size)
        self.width = -(-self.most_length // page_size)
        self.implementation, self._dtype = implementation, self.kind.dtype(decoder)
        self._graph, self._state = nnx.split(decoder)
        self._decoder, self._size = decoder, (pages, page_size)
        self.sequence_buckets = _buckets(most_sequences)
        # newest tokens alone, a part of a prompt beside them, and as much of prompts as a step takes
        self.row_buckets = {
            b: sorted({b * (guesses + 1), *(x for x in (most_tokens // 4, most_tokens) if x > b)})
            for b in self.sequence_buckets
        }
        self._guesses = guesses
        self.programs: collections.Counter[tuple[int, int]] = collections.Counter()
        self._jit = jit
        self._step = jit(self._traced, donate_argnums=1)
        self.reset()

    def reset(self) -> None:
        """Empty caches, and a book of them."""
        self.caches = self.kind.create(self._decoder, *self._size)
        self.book = self.caches[0].book

    @property
    def cache_bytes(self) -> int:
        return sum(x.nbytes for cache in self.caches for x in jax.tree.leaves(cache))

    def run(self, pieces: Sequence[Piece]) -> tuple[list[list[int]], list[bool]]:
        """A step.

        Returns:
          Of each piece the tokens that follow its wanted rows, and whether all their logits were finite.
        """
        total, b = sum(len(x.tokens) for x in pieces), _bucket(self.sequence_buckets, len(pieces))
        return self._run(pieces, b, _bucket(self.row_buckets[b], total))

    def _run(self, pieces, b: int, t: int):
        rows = self._rows(pieces, b, t)
        ends = np.cumsum([len(x.tokens) for x in pieces])
        at, samplings, positions = [], [], []
        for end, x in zip(ends, pieces):
            at += range(end - x.wanted, end)
            samplings += [x.sampling] * x.wanted
            positions += range(x.start + len(x.tokens) - x.wanted + 1, x.start + len(x.tokens) + 1)
        size = b * (self._guesses + 1)
        wanted = np.pad(np.array(at, np.int32), (0, size - len(at)))
        tokens, finite, caches = self._step(
            self._state, _stripped(self.caches), rows, wanted, sampling.rows(samplings, positions, size)
        )
        self.caches = [dataclasses.replace(x, book=self.book) for x in caches]
        cuts = np.cumsum([x.wanted for x in pieces])[:-1]
        found = np.split(np.asarray(tokens)[: len(at)], cuts)
        whole = np.split(np.asarray(finite)[: len(at)], cuts)
        return [x.tolist() for x in found], [bool(x.all()) for x in whole]

    def buckets(self) -> list[tuple[int, int]]:
        """Sequences and rows of each program that there may be."""
        return [(b, t) for b, sizes in self.row_buckets.items() for t in sizes]

    def warm_up(self, sequences: int, rows: int) -> None:
        """Compiles the program of a bucket."""
        self._run([], sequences, rows)

    def _rows(self, pieces: Sequence[Piece], b: int, t: int) -> Rows:
        tables, lengths = self.book.tables([x.number for x in pieces], self.width)
        counts = [len(x.tokens) for x in pieces]
        total, missing = sum(counts), b - len(pieces)
        where = zip([()] * 3, *(x.where for x in pieces))
        starts = np.full(b + 1, total, np.int32)
        starts[: len(pieces)] = np.cumsum([0, *counts])[:-1]
        padded = lambda x, n, value: np.pad(np.asarray(x, np.int32), (0, n - len(x)), constant_values=value)
        return Rows(
            tokens=padded([token for x in pieces for token in x.tokens], t, 0),
            positions=padded([x.start + i for x, n in zip(pieces, counts) for i in range(n)], t, 0),
            where=Write(*(padded(np.concatenate(of), n, -1) for of, n in zip(where, (t, b, b)))),
            starts=starts,
            tables=np.pad(tables, ((0, missing), (0, 0))),
            lengths=padded(lengths, b, 0),
        )

    def _traced(self, state, caches, rows: Rows, wanted, choice):
        self.programs[rows.starts.shape[0] - 1, rows.tokens.shape[0]] += 1
        decoder, caches = nnx.merge(self._graph, state), list(caches)
        hidden = decoder(rows.tokens, rows.positions, paged(caches, rows, self._dtype, self.implementation))
        logits = decoder.logits(hidden[wanted])
        return sampling.choose(logits, **choice), jnp.isfinite(logits).all(axis=-1), caches

    def log_probabilities(self, pieces: Sequence[Piece]) -> np.ndarray:
        """float32 `[T]`: of each token of the pieces but the last of each, the logarithm of how likely the next one
        was held; for perplexities."""
        total, b = sum(len(x.tokens) for x in pieces), _bucket(self.sequence_buckets, len(pieces))
        rows = self._rows(pieces, b, _bucket(self.row_buckets[b], total))
        found, caches = self._scores(self._state, _stripped(self.caches), rows)
        self.caches = [dataclasses.replace(x, book=self.book) for x in caches]
        last = np.cumsum([len(x.tokens) for x in pieces]) - 1
        return np.delete(np.asarray(found)[:total], last)

    @functools.cached_property
    def _scores(self):
        def traced(state, caches, rows: Rows):
            decoder, caches = nnx.merge(self._graph, state), list(caches)
            hidden = decoder(rows.tokens, rows.positions, paged(caches, rows, self._dtype, self.implementation))
            known = jax.nn.log_softmax(decoder.logits(hidden))
            return jnp.take_along_axis(known, jnp.roll(rows.tokens, -1)[:, None], axis=-1)[:, 0], caches

        return self._jit(traced, donate_argnums=1)


def _stripped(caches):
    """Without the book: a program does not depend on whose pages are whose."""
    return [dataclasses.replace(x, book=None) for x in caches]


def _buckets(most: int) -> list[int]:
    return [*(4**i for i in range(most.bit_length()) if 4**i < most), most]


def _bucket(buckets: Sequence[int], size: int) -> int:
    return next(x for x in buckets if x >= size)
