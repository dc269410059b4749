"""Text out of tokens as they come, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

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
        self._stream = DecodeStream(skip_special_tokens=True)
        self._tokens: list[int] = []
        self._decoded = 0  # characters of them that the stream gave
        self._held = ""

    def take(self, tokens: Sequence[int]) -> str:
        """New tokens; what can be given out now. Sets `stopped` where a stop string came."""
        new = ""
        for token in tokens:
            if token not in self.request.end_tokens:
                self._tokens.append(token)
                new += self._stream.step(self.text.tokenizer, token) or ""
        self._decoded += len(new)
        return self._give(new)

    def end(self) -> str:
        """What was held back, when no more comes."""
        given = self._give(self.text.decode(self._tokens)[self._decoded :])
        if self.stopped:
            return given
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
            keep = max((_overlap(held, x) for x in self.stops), default=0)
            given, self._held = held[: len(held) - keep], held[len(held) - keep :]
        self.written += given
        return given


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text may be the beginning of a stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
