"""Requests from beginning to end: plan a step, run it, hand out what it found."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from generation.runner import Piece, Runner
from generation.scheduler import Part, Request, Scheduler
from generation.speculative import Draft


@dataclasses.dataclass
class Counts:
    """What an engine has done so far."""

    steps: int = 0
    prompt_tokens: int = 0  # computed; those that were found in the pool are not
    shared_tokens: int = 0
    generated_tokens: int = 0
    guessed_tokens: int = 0
    right_guesses: int = 0
    faults: int = 0


class Engine:
    """Continuous batching over a runner.

    Args:
      runner: of the decoder.
      draft: guesses ahead, of what the runner then judges; None to do without.
    """

    def __init__(self, runner: Runner, most_requests: int, most_tokens: int, draft: Draft | None = None):
        self.runner, self.draft = runner, draft
        self.scheduler = Scheduler(runner.book, most_requests, most_tokens)
        self.counts = Counts()

    @property
    def idle(self) -> bool:
        return not (self.scheduler.waiting or self.scheduler.running)

    def check(self, request: Request) -> None:
        """Raises `ValueError` for a request that can never be served. Any thread may ask."""
        if request.most > self.runner.most_length:
            raise ValueError(
                f"{len(request.prompt)} tokens of prompt and {request.max_tokens} more are too many: "
                f"a sequence has at most {self.runner.most_length}"
            )
        outside = [x for x in request.prompt if not 0 <= x < self.runner.config.vocabulary]
        if outside:
            raise ValueError(f"tokens must lie in 0..{self.runner.config.vocabulary - 1}, got {outside[0]}")
        self.scheduler.check(request)

    def submit(self, request: Request) -> None:
        """Puts a request behind those that wait. Raises as `check` does."""
        self.check(request)
        self.scheduler.add(request)

    def finish(self, request: Request, reason: str, error: str | None = None) -> None:
        """Ends a request at once; its pages are free."""
        if self.draft is not None:
            self.draft.forget(request)
        self.scheduler.remove(request)
        request.finish, request.error, request.ended = request.finish or reason, error, time.perf_counter()

    def step(self) -> list[tuple[Request, list[int]]]:
        """Computes a step.

        Returns:
          The requests that got tokens or ended, and which tokens. A step that fails ends its requests with "error";
          the others begin again with what they have.
        """
        parts: list[Part] = []
        try:
            if self.draft is not None:
                self.draft.guess(self.scheduler)
            parts = self.scheduler.plan()
            if not parts:
                return []
            pieces = [Piece(*x[1:], x.request.sampling) for x in parts]
            found, finite = self.runner.run(pieces)
        except Exception as error:
            return self._failed([x.request for x in parts] or list(self.scheduler.running), error)
        self.counts.steps += 1
        given = []
        for part, following, whole in zip(parts, found, finite):
            request = part.request
            if not whole:
                self.counts.faults += 1
                self.finish(request, "error", "the model's logits are not finite")
                given.append((request, []))
                continue
            if request.number != part.number:
                continue
            new = len(request.tokens) > len(request.prompt)
            if not new:
                self.counts.prompt_tokens += len(part.tokens)
            added = self.scheduler.accept(part, following)
            self.counts.generated_tokens += len(added)
            self.counts.guessed_tokens += max(part.wanted - 1, 0)
            self.counts.right_guesses += max(len(added) - 1, 0)
            if added and request.first_token is None:
                request.first_token = time.perf_counter()
                self.counts.shared_tokens += request.shared
            if request.finish:
                self.finish(request, request.finish)
            if added or request.finish:
                given.append((request, added))
        return given

    def run(self, requests: list[Request], seen: Callable[[Request, list[int]], None] | None = None) -> list[list[int]]:
        """Serves requests together; what each generated."""
        for request in requests:
            self.submit(request)
        while not self.idle:
            for request, added in self.step():
                if seen is not None:
                    seen(request, added)
        return [x.generated for x in requests]

    def _failed(self, requests: list[Request], error: Exception) -> list[tuple[Request, list[int]]]:
        """Caches were given to the step that failed: there are new ones, and whoever was not in it computes anew."""
        self.counts.faults += 1
        for request in requests:
            self.finish(request, "error", f"{type(error).__name__}: {error}")
        self.runner.reset()
        if self.draft is not None:
            self.draft.reset()
        self.scheduler.forget(self.runner.book)
        return [(request, []) for request in requests]
