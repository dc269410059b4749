"""Text out of tokens one by one: the decoders of `tokenizers`, each as a step that keeps no more than may still change.

A text is that of `Tokenizer.decode`, with two differences. What its decoder takes from the beginning of a text, as
Llama 2's takes a space, stays: what is generated goes on with a prompt. And no sequence of tokens raises. Special
tokens and numbers outside of the vocabulary are nothing, in a stream as in a whole.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tokenizers import Tokenizer, decoders

BYTE = re.compile(r"<0x([0-9A-Fa-f+][0-9A-Fa-f])>")
LOST = "\N{REPLACEMENT CHARACTER}"


class Step:
    """A decoder of a chain: the pieces that it makes of one more, and of the end. This one changes nothing."""

    def push(self, piece: str) -> Iterable[str]:
        return (piece,)

    def end(self) -> Iterable[str]:
        return ()


class Each(Step):
    """Pieces that do not depend on others."""

    def __init__(self, function: Callable[[str], str]):
        self.function = function

    def push(self, piece):
        return (self.function(piece),)


class AfterFirst(Step):
    """The first piece in another way than the others: WordPiece, and spaces between tokens."""

    def __init__(self, first: Callable[[str], str], others: Callable[[str], str]):
        self.function, self.others = first, others

    def push(self, piece):
        made, self.function = self.function(piece), self.others
        return (made,)


class BeforeLast(Step):
    """The last piece in another way than the others: the end of a word is a space, but at the end of the text."""

    def __init__(self, others: Callable[[str], str], last: Callable[[str], str]):
        self.others, self.last = others, last
        self.held: str | None = None

    def push(self, piece):
        held, self.held = self.held, piece
        return () if held is None else (self.others(held),)

    def end(self):
        return () if self.held is None else (self.last(self.held),)


class Distinct(Step):
    """Without pieces that repeat the one before: CTC."""

    def __init__(self, function: Callable[[str], str]):
        self.function, self.before = function, None

    def push(self, piece):
        before, self.before = self.before, piece
        made = "" if piece == before else self.function(piece)
        return (made,) if made else ()


class ByteRuns(Step):
    """Byte fallback: bytes that follow one another are text if together they are UTF-8, and all lost if not."""

    def __init__(self):
        self._begin()

    def _begin(self):
        self.text, self.bytes, self.utf8 = "", 0, codecs.getincrementaldecoder("utf-8")()

    def push(self, piece):
        found = BYTE.fullmatch(piece)
        if found is None:
            return (*self.end(), piece)
        self.bytes += 1
        return self._decode(bytes([int(found[1], 16)]), final=False)

    def _decode(self, data: bytes, final: bool) -> tuple[str, ...]:
        if self.utf8 is not None:
            try:
                self.text += self.utf8.decode(data, final)
            except UnicodeDecodeError:
                self.utf8 = None
        if self.utf8 is None:  # and nothing that follows can mend it
            count, self.bytes = self.bytes, 0
            return (LOST,) * count
        return (self.text,) if final and self.bytes else ()

    def end(self):
        made = self._decode(b"", final=True)
        self._begin()
        return made


class Characters(Step):
    """Byte-level tokens: a character for each byte of UTF-8, or for none, and then they are text already."""

    CODES = (*range(33, 127), *range(161, 173), *range(174, 256))
    BYTES = {chr(x): x for x in CODES} | {chr(256 + i): x for i, x in enumerate(sorted({*range(256)} - {*CODES}))}

    def __init__(self):
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, piece):
        known = all(x in self.BYTES for x in piece)
        return (self.utf8.decode(bytes(self.BYTES[x] for x in piece) if known else piece.encode()),)

    def end(self):
        return (self.utf8.decode(b"", True),)


class Replaced(Step):
    """A string replaced in the whole text."""

    def __init__(self, string: str, content: str):
        self.string, self.content, self.held = string, content, ""

    def push(self, piece):
        *done, left = (self.held + piece).split(self.string)
        cut = len(left) - overlap(left, self.string)
        self.held = left[cut:]
        return (self.content.join([*done, left[:cut]]),)

    def end(self):
        return (self.held,)


class Shortened(Step):
    """Without up to `count` of a character at the end of the whole text."""

    def __init__(self, character: str, count: int):
        self.character, self.count, self.held = character, count, ""

    def push(self, piece):
        text = self.held + piece
        cut = len(text) - min(self.count, len(text) - len(text.rstrip(self.character)))
        self.held = text[cut:]
        return (text[:cut],)


class Late(Step):
    """All pieces at once, at the end: what cannot be known before."""

    def __init__(self, function: Callable[[list[str]], str]):
        self.function, self.pieces = function, []

    def push(self, piece):
        self.pieces.append(piece)
        return ()

    def end(self):
        return (self.function(self.pieces),)


class Detokenizer:
    """What a tokenizer's tokens say; `stream` begins a text."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.special = {x.content for x in tokenizer.get_added_tokens_decoder().values() if x.special}
        decoder = tokenizer.decoder
        facts = None if decoder is None else json.loads(decoder.__getstate__())
        self.steps = [lambda: AfterFirst(str, " {}".format)] if facts is None else list(_steps(_flat(facts)))

    def stream(self) -> Stream:
        return Stream(self)

    def token(self, number: int) -> str | None:
        """None for one that says nothing."""
        token = self.tokenizer.id_to_token(number) if 0 <= number < 2**32 else None
        return None if token in self.special else token


class Stream:
    """The text of tokens as they come: what is given out does not change any more, and together is the whole text."""

    def __init__(self, detokenizer: Detokenizer):
        self.detokenizer = detokenizer
        self.steps = [step() for step in detokenizer.steps]

    def push(self, number: int) -> str:
        token = self.detokenizer.token(number)
        return "" if token is None else "".join(self._from(0, (token,)))

    def end(self) -> str:
        """What was held back."""
        return "".join(x for i, step in enumerate(self.steps) for x in self._from(i + 1, step.end()))

    def _from(self, first: int, pieces: Iterable[str]) -> Iterable[str]:
        for step in self.steps[first:]:
            pieces = [x for piece in pieces for x in step.push(piece)]
        return pieces


def overlap(text: str, string: str) -> int:
    """How many characters at the end of a text may be the beginning of a string."""
    return next((n for n in range(min(len(text), len(string) - 1), 0, -1) if text.endswith(string[:n])), 0)


def _flat(facts: dict[str, Any]) -> list[dict[str, Any]]:
    return [y for x in facts["decoders"] for y in _flat(x)] if facts["type"] == "Sequence" else [facts]


def _made(facts: Iterable[dict[str, Any]]) -> decoders.Decoder:
    """The package's own."""
    decoder = decoders.Fuse()
    decoder.__setstate__(json.dumps({"type": "Sequence", "decoders": list(facts)}).encode())
    return decoder


def _steps(chain: list[dict[str, Any]]) -> Iterator[Callable[[], Step]]:
    """What makes the steps of a chain. Behind a decoder that joins its pieces the others see a single one."""
    joined = False
    for i, facts in enumerate(chain):
        kind = facts["type"]
        string = facts["pattern"].get("String") if kind == "Replace" else None
        if kind == "Strip":
            character, start, stop = facts["content"], facts["start"], facts["stop"]
            if not joined:
                yield functools.partial(Each, _strip(character, start, stop))
            elif stop:
                yield lambda facts=(character, stop): Shortened(*facts)
        elif kind == "Fuse":
            joined = True
        elif string and joined:
            yield lambda facts=(string, facts["content"]): Replaced(*facts)
        elif joined:
            decode_one = _made([facts]).decode
            yield lambda decode=decode_one: Late(lambda pieces: decode(["".join(pieces)]))
        elif kind not in KINDS:
            yield functools.partial(Late, _made(chain[i:]).decode)
            return
        else:
            yield KINDS[kind](facts)
            joined = kind == "ByteLevel"


def _strip(character: str, start: int, stop: int) -> Callable[[str], str]:
    def strip(piece: str) -> str:
        cut = min(start, len(piece) - len(piece.lstrip(character)))
        piece = piece[cut:]
        return piece[: len(piece) - min(stop, len(piece) - len(piece.rstrip(character)))]

    return strip


def _replace(facts):
    decoder = _made([facts])
    return lambda: Each(lambda piece: decoder.decode([piece]))


def _metaspace(facts):
    return lambda: Each(lambda piece: piece.replace(facts["replacement"], " "))


def _word_piece(facts):
    decoder = _made([facts])
    return lambda: AfterFirst(lambda piece: decoder.decode([piece]), lambda piece: decoder.decode(["", piece]))


def _word_end(facts):
    suffix = facts["suffix"]
    return lambda: BeforeLast(lambda piece: piece.replace(suffix, " "), lambda piece: piece.replace(suffix, ""))


def _ctc(facts):
    decoder = _made([facts])
    return lambda: Distinct(lambda piece: decoder.decode([piece]))


KINDS = {
    "Replace": _replace, "Metaspace": _metaspace, "WordPiece": _word_piece, "BPEDecoder": _word_end, "CTC": _ctc,
    "ByteFallback": lambda facts: ByteRuns, "ByteLevel": lambda facts: Characters,
}  # fmt: skip
