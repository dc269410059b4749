"""Guesses of a small decoder, in a chain (Leviathan et al., arXiv:2211.17192), for a large one to judge in one step.

A guess is right if it is the token that the large decoder takes at that place. It takes by seed and position, so the
tokens are those without a draft, greedy or drawn: only how many steps they need depends on the guesses.
"""

from __future__ import annotations

from generation.runner import Piece, Runner
from generation.scheduler import Request, Scheduler
from jax_mfa import OutOfPages


class Draft:
    """A small decoder that follows requests in caches of its own.

    Args:
      runner: of the small decoder; it has the vocabulary of the large one.
      length: how many tokens ahead.
    """

    def __init__(self, runner: Runner, length: int, most_tokens: int):
        if length < 1:
            raise ValueError(f"a draft must guess at least 1 token ahead, got {length}")
        self.runner, self.length, self.most_tokens = runner, length, most_tokens
        self._numbers: dict[Request, int] = {}  # of its sequence in the draft's book

    def guess(self, scheduler: Scheduler) -> None:
        """Gives every request that has only its newest token to compute guesses of what follows it; as many as its
        length and the pages allow, and none till the draft has read the prompt."""
        for gone in self._numbers.keys() - set(scheduler.running):
            self.forget(gone)
        asked = []
        for request in scheduler.decoding():
            room = min(self.length, request.most - len(request.tokens) - 1)
            if room > 0 and len(request.tokens) + room <= self.runner.most_length:
                asked.append((request, room))
        left, ready = self.most_tokens, []
        for request, room in asked:
            if request not in self._numbers:
                self._numbers[request] = self.runner.book.allocate(request.tokens)
            number = self._numbers[request]
            # without what was guessed and not taken: up to there both hold the same tokens
            known = min(self.runner.book.length(number), len(request.tokens) - 1)
            self.runner.book.truncate(number, known)
            chunk = request.tokens[known : known + left]
            if chunk:
                left -= len(chunk)
                ready.append((request, room, chunk))
        guesses: dict[Request, list[int]] = {request: [] for request, _, _ in ready}
        rooms = {request: room for request, room, _ in ready}
        pieces = self._pieces([(request, chunk) for request, _, chunk in ready])
        while pieces:
            found, _ = self.runner.run([piece for _, piece in pieces])
            following = []
            for (request, piece), (token,) in zip(pieces, found):
                if piece.start + len(piece.tokens) < len(request.tokens):
                    continue  # in the middle of its prompt
                guesses[request].append(token)
                if len(guesses[request]) < rooms[request]:
                    following.append((request, [token]))
            pieces = self._pieces(following)
        for request, found in guesses.items():
            request.guesses = found

    def _pieces(self, chunks: list[tuple[Request, list[int]]]) -> list[tuple[Request, Piece]]:
        """Pages for chunks, as far as there are any."""
        found = []
        for request, chunk in chunks:
            number = self._numbers[request]
            start = self.runner.book.length(number)
            try:
                where = self.runner.book.reserve([number], [len(chunk)], [chunk])
            except OutOfPages:
                continue
            found.append((request, Piece(number, chunk, start, where, sampling=request.sampling)))
        return found

    def forget(self, request: Request) -> None:
        if request in self._numbers:
            self.runner.book.free(self._numbers.pop(request))

    def reset(self) -> None:
        self.runner.reset()
        self._numbers = {}
