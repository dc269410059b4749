"""Text out of tokens as they come, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from generation.scheduler import Request
from generation.tokenizer import Text


class Writer:
    """The text of a request.

    A character may need several tokens, and a stop string several characters: what may still become something else is
    held back.

    Args:
      stops: strings that end the text, and are no part of it.
    """

    def __init__(self, text: Text, request: Request, stops: Sequence[str] = ()):
        self.text, self.request, self.stops = text, request, tuple(stops)
        self.stopped = False
        self.written = ""  # what was given out
        self._tokens: list[int] = []
        self._settled = 0  # of these are text for good
        self._held = ""

    def take(self, tokens: Sequence[int]) -> str:
        """New tokens; what can be given out now. Sets `stopped` where a stop string came."""
        self._tokens += [x for x in tokens if x not in self.request.end_tokens]
        # what a token looks like may depend on those before it, so a few of them are decoded again
        start = max(self._settled - 8, 0)
        whole = self.text.decode(self._tokens[start:])
        before = self.text.decode(self._tokens[start : self._settled])
        if whole.endswith("\N{REPLACEMENT CHARACTER}") or not whole.startswith(before):
            return ""
        self._settled = len(self._tokens)
        return self._give(whole[len(before) :])

    def end(self) -> str:
        """What was held back, when no more comes."""
        if self.stopped:
            return ""
        start = max(self._settled - 8, 0)
        before = self.text.decode(self._tokens[start : self._settled])
        rest = self._held + self.text.decode(self._tokens[start:])[len(before) :]
        found = [at for at in (rest.find(x) for x in self.stops) if at >= 0]
        rest, self._held = rest[: min(found, default=len(rest))], ""
        self.written += rest
        return rest

    def _give(self, new: str) -> str:
        if self.stopped:
            return ""
        held = self._held + new
        found = [at for at in (held.find(x) for x in self.stops) if at >= 0]
        if found:
            self.stopped, given, self._held = True, held[: min(found)], ""
        else:
            keep = max((_overlap(held, x) for x in self.stops), default=0)
            given, self._held = held[: len(held) - keep], held[len(held) - keep :]
        self.written += given
        return given


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text may be the beginning of a stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
