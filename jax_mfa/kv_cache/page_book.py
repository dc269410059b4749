"""Which page of a pool belongs to which sequences: plain Python, on the host, without an array of JAX.

A sequence is a number, a list of pages and a length. Pages may belong to several sequences (a fork, a common prefix);
one that is written while others own it is copied first. A page without an owner is free; if the tokens in it are
known it keeps them till it is needed, so that a later sequence with the same beginning finds them.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jax_mfa import checks

if TYPE_CHECKING:
    from jax_mfa.typing import Int32


MOST_SLOTS = 2**31 - 1  # slots are int32


class OutOfPages(RuntimeError):
    """The pool has too few free pages for new tokens; nothing has changed."""


class Write(NamedTuple):
    """Where new tokens go: a pytree of numpy arrays, which may be traced.

    Attributes:
      slots: int32 `[T]`: page · page_size + place within the page, for each of the new tokens of all sequences.
      sources, targets: int32 `[C]`: pages to be copied before that, from and to. Both may be empty.
    """

    slots: Int32[np.ndarray, "T"]
    sources: Int32[np.ndarray, "C"]
    targets: Int32[np.ndarray, "C"]


@dataclasses.dataclass
class _Sequence:
    pages: list[int]
    length: int
    tokens: list[int]  # those known, from the first on; as many as `length` where all are
    digests: list[bytes]  # of each full page of them


class PageBook:
    """The pages of a pool and their owners.

    Args:
      pages: of the pool.
      page_size: tokens of a page. The pool holds fewer than 2³¹ tokens.

    Raises:
      ValueError, TypeError: in every method, naming the argument.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = checks.integer("page_size", page_size, 1, MOST_SLOTS)
        self.pages = checks.integer("pages", pages, 1, MOST_SLOTS // self.page_size)
        self._sequences: dict[int, _Sequence] = {}
        self._next = 0  # number of the next sequence
        self._owners = [0] * self.pages
        # free pages, in the order in which they are taken: those without known tokens, then those free for longest
        self._free = collections.OrderedDict.fromkeys(range(self.pages))
        self._digest_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    def __repr__(self) -> str:
        return f"PageBook(pages={self.pages}, page_size={self.page_size})"

    @property
    def free_pages(self) -> int:
        """How many pages belong to no sequence."""
        return len(self._free)

    @property
    def sequences(self) -> tuple[int, ...]:
        return tuple(self._sequences)

    def length(self, sequence: int) -> int:
        """How many tokens a sequence has."""
        return self._of(sequence).length

    def pages_of(self, sequence: int) -> tuple[int, ...]:
        return tuple(self._of(sequence).pages)

    # --- sequences

    def allocate(self, tokens: Sequence[int] | np.ndarray = ()) -> int:
        """A new sequence, which begins with those pages of known tokens that `tokens` begin with.

        Args:
          tokens: integers, the prompt that will be appended. Of its whole pages those that the pool holds are shared,
            all but the page of its last token, of which a model needs the query: append from `length` on.

        Returns:
          The number of the sequence.
        """
        given = _tokens("tokens", tokens)
        digests = [*itertools.takewhile(self._page_of.__contains__, self._digests(b"", given[:-1]))]
        length = len(digests) * self.page_size
        return self._begin(_Sequence([self._page_of[x] for x in digests], length, given[:length], digests))

    def fork(self, sequence: int) -> int:
        """A new sequence of the same tokens, which shares all pages till either is appended to."""
        old = self._of(sequence)
        return self._begin(_Sequence(list(old.pages), old.length, list(old.tokens), list(old.digests)))

    def truncate(self, sequence: int, length: int) -> None:
        """Forgets all tokens from `length` on."""
        x, length = self._of(sequence), checks.integer("length", length, least=0)
        if length > x.length:
            raise ValueError(f"length must be at most the {x.length} tokens of sequence {sequence}, got {length}")
        keep = self._page_count(length)
        self._release(x.pages[keep:])
        x.pages, x.length, x.tokens = x.pages[:keep], length, x.tokens[:length]
        x.digests = x.digests[: length // self.page_size]

    def free(self, sequence: int) -> None:
        """Ends a sequence: its pages are free where no other holds them."""
        self._release(self._of(sequence).pages)
        del self._sequences[sequence]

    def reserve(
        self,
        sequences: Sequence[int],
        counts: Sequence[int],
        tokens: Sequence[Sequence[int] | np.ndarray] | None = None,
    ) -> Write:
        """Room for new tokens behind those of sequences; they then count as there, and must be written.

        Args:
          sequences: numbers of sequences, each once.
          counts: how many tokens come for each.
          tokens: which, `counts` integers each, for later sequences to find them; None where that is not known.

        Returns:
          A `Write`, for every pool that this book serves, of the tokens of the first sequence, then of the next.

        Raises:
          OutOfPages: where the pool has not the room; nothing has changed.
        """
        sequences = checks.integers("sequences", sequences)
        several = self._several(sequences)
        if len({*sequences}) < len(several):
            raise ValueError(f"sequences must be named once each, got {sequences}")
        coming = checks.integers("counts", counts, least=0)
        if len(coming) != len(several):
            raise ValueError(f"counts must have one number for each of {len(several)} sequences, got {len(coming)}")
        if tokens is not None:
            tokens = [_tokens("tokens", x) for x in checks.sequence("tokens", tokens, "integers of each sequence")]
            if (sizes := [len(x) for x in tokens]) != coming:
                raise ValueError(f"tokens must hold as many integers as counts, {coming}, got {sizes}")

        # a last page that is not full is written to: of the sequences that share it, all but the last owner copy it
        begun = [n > 0 and x.length % self.page_size > 0 for x, n in zip(several, coming)]
        writers = collections.Counter(x.pages[-1] for x, writes in zip(several, begun) if writes)
        copied = sum(min(count, self._owners[page] - 1) for page, count in writers.items())
        missing = [self._page_count(x.length + n) - len(x.pages) for x, n in zip(several, coming)]
        needed = sum(missing) + copied
        if needed > self.free_pages:
            raise OutOfPages(f"{needed} pages are needed for {sum(coming)} tokens, and {self.free_pages} are free")

        copies, slots = [], []
        for i, (x, n) in enumerate(zip(several, coming)):
            if begun[i] and self._owners[x.pages[-1]] > 1:
                copies.append((x.pages[-1], self._take()))
                self._release(x.pages[-1:])
                x.pages[-1] = copies[-1][1]
            elif begun[i]:
                self._forget(x.pages[-1])
            x.pages += [self._take() for _ in range(missing[i])]
            page, within = np.divmod(np.arange(x.length, x.length + n), self.page_size)
            slots.append(np.array(x.pages, np.int64)[page] * self.page_size + within)
            if tokens is not None and len(x.tokens) == x.length:
                x.tokens += tokens[i]
            x.length += n
            self._remember(x)
        sources, targets = np.array(copies, np.int32).reshape(-1, 2).T
        return Write(np.concatenate([np.zeros(0), *slots]).astype(np.int32), sources, targets)

    def tables(
        self, sequences: Sequence[int], width: int | None = None
    ) -> tuple[Int32[np.ndarray, "B pages"], Int32[np.ndarray, "B"]]:
        """What `jax_mfa.paged_attention` reads.

        Args:
          width: how many pages a row of the table has; the next power of two if None, for few shapes of programs.

        Returns:
          block_tables: int32 `[B, width]`, −1 behind the pages of a sequence.
          context_lens: int32 `[B]`.
        """
        several = self._several(sequences)
        most = max([len(x.pages) for x in several], default=0)
        width = 1 << max(most - 1, 0).bit_length() if width is None else checks.integer("width", width, 0, MOST_SLOTS)
        if width < most:
            raise ValueError(f"width must be at least {most}, the pages of the longest sequence, got {width}")
        table = np.full((len(several), width), -1, np.int32)
        for row, x in zip(table, several):
            row[: len(x.pages)] = x.pages
        return table, np.array([x.length for x in several], np.int32)

    # --- pages

    def _of(self, sequence: int, name: str = "sequence") -> _Sequence:
        if checks.integer(name, sequence) not in self._sequences:
            raise ValueError(f"{name} must be allocated and not freed, got {sequence}")
        return self._sequences[sequence]

    def _several(self, sequences: Sequence[int]) -> list[_Sequence]:
        return [self._of(x, "sequences") for x in checks.integers("sequences", sequences)]

    def _begin(self, sequence: _Sequence) -> int:
        """The number of a new sequence, whose pages have one owner more."""
        for page in sequence.pages:
            self._owners[page] += 1
            self._free.pop(page, None)
        number, self._next = self._next, self._next + 1
        self._sequences[number] = sequence
        return number

    def _page_count(self, length: int) -> int:
        return -(-length // self.page_size)

    def _release(self, pages: list[int]) -> None:
        # from the end, which is then reused first: a sequence is found by its beginning
        for page in reversed(pages):
            self._owners[page] -= 1
            if not self._owners[page]:
                self._free[page] = None
                self._free.move_to_end(page, last=page in self._digest_of)

    def _take(self) -> int:
        page, _ = self._free.popitem(last=False)
        self._forget(page)
        self._owners[page] = 1
        return page

    def _forget(self, page: int) -> None:
        """Forgets the known tokens of a page that is about to change."""
        self._page_of.pop(self._digest_of.pop(page, b""), None)

    def _remember(self, x: _Sequence) -> None:
        """Full pages of known tokens may be found from now on."""
        known = len(x.digests)
        before = x.digests[-1] if known else b""
        for page, digest in zip(x.pages[known:], self._digests(before, x.tokens[known * self.page_size :])):
            x.digests.append(digest)
            if digest not in self._page_of:
                self._digest_of[page], self._page_of[digest] = digest, page

    def _digests(self, before: bytes, tokens: list[int]) -> Iterator[bytes]:
        """Of each full page of tokens a digest, of it and of all pages before it."""
        for start in range(0, len(tokens) - self.page_size + 1, self.page_size):
            page = np.array(tokens[start : start + self.page_size], np.int64)
            before = hashlib.blake2b(before + page.tobytes(), digest_size=16).digest()
            yield before


def _tokens(name: str, x: Any) -> list[int]:
    """Tokens as Python integers, of 64 bits as digests take them."""
    tokens = checks.integers(name, x)
    if tokens and not -(2**63) <= min(tokens) <= max(tokens) < 2**63:
        raise ValueError(f"{name} must be integers of 64 bits, got {min(tokens)}..{max(tokens)}")
    return tokens
