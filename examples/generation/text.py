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
        return self._give(self._stream.end(), last=True)

    def _give(self, new: str, last: bool = False) -> str:
        if self.stopped:
            return ""
        held = self._held + new
        found = min((at for at in map(held.find, self.stops) if at >= 0), default=len(held))
        # a stop string that is not complete yet comes first if it begins before one that is
        begun = len(held) - max((overlap(held, x) for x in self.stops if not last), default=0)
        self.stopped = found < len(held) and found <= begun
        given = held[: min(found, begun)]
        self._held = "" if self.stopped else held[len(given) :]
        self.written += given
        return given
