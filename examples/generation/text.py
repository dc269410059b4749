"""Text out of tokens as they come, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from generation.detokenizer import overlap
from generation.scheduler import Request
from generation.tokenizer import Text


class Writer:
    """The text of a request.

    What is given out, together, is `Text.decode` of its tokens, up to the first stop string. A character may need
    several tokens, and a stop string several characters: what may still become something else is held back.

    Args:
      stops: strings that end the text, and are no part of it.
    """

    def __init__(self, text: Text, request: Request, stops: Sequence[str] = ()):
        self.request, self.stops = request, tuple(stops)
        self.stopped = False
        self.written = ""  # what was given out
        self._stream = text.detokenizer.stream()
        self._held = ""

    def take(self, tokens: Sequence[int]) -> str:
        """New tokens; what can be given out now. Sets `stopped` where a stop string came."""
        new = (self._stream.push(token) for token in tokens if token not in self.request.end_tokens)
        return "".join(map(self._give, new))  # one by one, so that a text does not depend on how many come together

    def end(self) -> str:
        """What was held back, when no more comes. Sets `stopped` where a stop string stands in it."""
        given = self._give(self._stream.end())
        held, self._held = self._held, ""
        self.written += held
        return given + held

    def _give(self, new: str) -> str:
        if self.stopped:
            return ""
        held = self._held + new
        found = [at for at in (held.find(x) for x in self.stops) if at >= 0]
        if found:
            self.stopped, given, self._held = True, held[: min(found)], ""
        else:
            keep = max((overlap(held, x) for x in self.stops), default=0)
            given, self._held = held[: len(held) - keep], held[len(held) - keep :]
        self.written += given
        return given
