"""Which tokens of which requests go into the next step: plain Python over a `PageBook`, without an array of JAX.

The older a request, the earlier it is served. Each step gives every request in the batch that has only its newest
token left to compute this one (and what a draft guesses to follow), and spends the tokens that remain on chunks of
prompts. A request enters when there are pages for all that is known of it; where pages run out all the same, the
youngest leaves, gives all of its pages back and waits, with what it has written so far as part of its prompt.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
import time
from collections.abc import Iterable
from typing import NamedTuple

from generation.sampling import GREEDY, Sampling
from jax_mfa import OutOfPages, PageBook
from jax_mfa.kv_cache.page_book import Write


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt, and what becomes of it.

    Attributes:
      prompt: at least one token.
      max_tokens: how many more there may be.
      end_tokens: those that end the text.
      tokens: the prompt and what was generated.
      finish: None while it lives; then "stop", "length", "cancelled" or "error".
      number: of its sequence in the book while it is in the batch.
      guesses: what a draft takes to follow the newest token.
      shared: how many tokens of the prompt were found in the pool.
    """

    prompt: list[int]
    max_tokens: int
    sampling: Sampling = GREEDY
    end_tokens: frozenset[int] = frozenset()
    tokens: list[int] = dataclasses.field(init=False)
    finish: str | None = dataclasses.field(default=None, init=False)
    error: str | None = dataclasses.field(default=None, init=False)
    number: int | None = dataclasses.field(default=None, init=False)
    guesses: list[int] = dataclasses.field(default_factory=list, init=False)
    shared: int = dataclasses.field(default=0, init=False)
    preempted: int = dataclasses.field(default=0, init=False)
    arrival: int = dataclasses.field(default=-1, init=False)
    arrived: float = dataclasses.field(default_factory=time.perf_counter, init=False)
    first_token: float | None = dataclasses.field(default=None, init=False)
    ended: float | None = dataclasses.field(default=None, init=False)

    def __post_init__(self):
        if not self.prompt:
            raise ValueError("prompt must have at least one token")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        self.tokens = list(self.prompt)

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def most(self) -> int:
        """Tokens at the end; the last one is never read."""
        return len(self.prompt) + self.max_tokens


class Part(NamedTuple):
    """What a step computes of a request: `tokens` from position `start` on, and `where` in the pool they are written.

    Of the last `wanted` rows the following tokens are asked for.
    """

    request: Request
    number: int
    tokens: list[int]
    start: int
    where: Write
    wanted: int


class Scheduler:
    """Requests that wait and requests in the batch.

    Args:
      book: of the pages.
      most_requests: in the batch at a time.
      most_tokens: of a step, at least most_requests.
    """

    def __init__(self, book: PageBook, most_requests: int, most_tokens: int):
        if not 1 <= most_requests <= most_tokens:
            raise ValueError(f"a step needs a token for each of {most_requests} requests, got {most_tokens}")
        self.book, self.most_requests, self.most_tokens = book, most_requests, most_tokens
        self.waiting: collections.deque[Request] = collections.deque()  # oldest first
        self.running: list[Request] = []  # oldest first
        self.preemptions = 0
        self._arrivals = itertools.count()

    def check(self, request: Request) -> None:
        """Raises `ValueError` for a request that not even an empty pool could hold."""
        needed, there = self._pages(request.most), self.book.pages
        if needed > there:
            raise ValueError(f"{request.most} tokens need {needed} pages, and the cache has {there}")

    def add(self, request: Request) -> None:
        self.check(request)
        request.arrival = next(self._arrivals)
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it is: it is done, cancelled or failed."""
        if request.number is not None:
            self._release(request)
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def computed(self, request: Request) -> int:
        """How many of its tokens have keys and values in the pool."""
        return 0 if request.number is None else self.book.length(request.number)

    def decoding(self) -> list[Request]:
        """Those in the batch with only their newest token to compute."""
        return [x for x in self.running if self.computed(x) == len(x.tokens) - 1]

    def plan(self) -> list[Part]:
        """The next step, oldest request first; pages for it are reserved. Empty if there is nothing to do."""
        decoding = set(map(id, self.decoding()))
        left = self.most_tokens - len(decoding)  # for chunks and guesses
        parts: list[Part] = []
        for request in list(self.running):
            if request.number is None:
                continue  # an older one needed its pages
            start = self.computed(request)
            if id(request) in decoding:
                guesses = request.guesses[: min(left, request.most - len(request.tokens) - 1)]
                chunk, wanted = [request.tokens[-1], *guesses], 1 + len(guesses)
                left -= len(guesses)
            else:
                chunk = request.tokens[start : start + left]
                wanted = int(start + len(chunk) == len(request.tokens))
                left -= len(chunk)
            if chunk and not self._reserve(request, chunk, start, wanted, parts):
                left += len(chunk) - (id(request) in decoding)
        while self.waiting and len(self.running) < self.most_requests and left > 0:
            request = self.waiting[0]
            if not self._enter(request):
                break
            start = self.computed(request)
            chunk = request.tokens[start : start + left]
            left -= len(chunk)
            self._reserve(request, chunk, start, int(start + len(chunk) == len(request.tokens)), parts)
        return parts

    def accept(self, part: Part, following: Iterable[int]) -> list[int]:
        """Adds the tokens that a step found to follow those of a part, as far as its guesses were right.

        Returns:
          What was added; none where no token was asked for.
        """
        request, added = part.request, []
        guesses = part.tokens[len(part.tokens) - part.wanted + 1 :]
        for i, token in enumerate(following):
            added.append(token)
            if token in request.end_tokens:
                request.finish = "stop"
            elif len(request.tokens) + len(added) == request.most:
                request.finish = "length"
            if request.finish or i == len(guesses) or guesses[i] != token:
                break
        request.tokens += added
        request.guesses = []
        if part.wanted > 1:
            self.book.truncate(part.number, min(len(request.tokens) - 1, self.computed(request)))
        return added

    def forget(self, book: PageBook) -> None:
        """Nothing of the pool is left: whoever is in the batch waits, before all others, for a new one."""
        for request in self.running:
            request.number, request.guesses = None, []
            request.preempted += 1
        waiting = sorted([*self.running, *self.waiting], key=lambda x: x.arrival)
        self.running, self.waiting, self.book = [], collections.deque(waiting), book

    # --- pages

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.book.page_size)

    def _enter(self, request: Request) -> bool:
        """Moves the oldest that waits into the batch, if there are pages for all of its tokens and the next one."""
        number = self.book.allocate(request.tokens)
        missing = lambda x, number: self._pages(min(len(x.tokens) + 1, x.most)) - len(self.book.pages_of(number))
        # those in the batch are still to get theirs
        needed = missing(request, number) + sum(max(missing(x, x.number), 0) for x in self.running)
        if needed > self.book.free_pages and self.running:
            self.book.free(number)
            return False
        self.waiting.popleft()
        request.number = number
        if not request.preempted:
            request.shared = self.book.length(number)
        bisect.insort(self.running, request, key=lambda x: x.arrival)
        return True

    def _reserve(self, request: Request, chunk: list[int], start: int, wanted: int, parts: list[Part]) -> bool:
        """Pages for a chunk, at the expense of younger requests that are not in the step yet."""
        planned = {id(part.request) for part in parts}
        while True:
            try:
                where = self.book.reserve([request.number], [len(chunk)], [chunk])
            except OutOfPages:
                younger = [x for x in self.running if x.arrival > request.arrival and id(x) not in planned]
                if younger:
                    self._preempt(younger[-1])
                    continue
                if len(chunk) == 1:  # else the rest of a prompt waits where it is
                    self._preempt(request)
                    return False
                if wanted > 1:  # without guesses
                    chunk, wanted = chunk[:1], 1
                    continue
                return False
            parts.append(Part(request, request.number, chunk, start, where, wanted))
            return True

    def _preempt(self, request: Request) -> None:
        self._release(request)
        self.running.remove(request)
        request.preempted += 1
        self.preemptions += 1
        at = bisect.bisect_left(self.waiting, request.arrival, key=lambda x: x.arrival)
        self.waiting.insert(at, request)

    def _release(self, request: Request) -> None:
        self.book.free(request.number)
        request.number, request.guesses = None, []
