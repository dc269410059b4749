"""What the commands of `python -m jax_mfa` share: kinds of options, work that Ctrl-C ends, tables, and text.

An option that contradicts another is an `argparse.ArgumentTypeError` too; the program says it as argparse says its own.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import importlib.resources
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent import futures
from typing import Any, TypeVar

from jax_mfa.metal import runtime

INTERRUPTED = 130  # status that a shell reports of a program that Ctrl-C ends
_ASCII = {"×": "x", "·": "*", "–": "-", "−": "-", "→": ">", "…": "...", "≤": "<=", "≠": "!=", "²": "^2", "ᵀ": "^T"}
_ASCII |= {"∞": "inf", "Σ": "sum", "√": "sqrt"}
Item = TypeVar("Item")


def positive(text: str) -> int:
    """A positive integer."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def positives(text: str) -> list[int]:
    """Different positive integers, comma separated."""
    return list(dict.fromkeys(positive(x) for x in text.split(",")))


def some_of(*known: str) -> tuple[Callable[[str], list[str]], str]:
    """A kind of option, different ones of these names, comma separated; and these names in words."""

    def names(text: str) -> list[str]:
        chosen = list(dict.fromkeys(text.split(",")))
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        return chosen

    return names, f"of {', '.join(known)}"


@contextlib.contextmanager
def errors_of(option: str = "") -> Iterator[None]:
    """Reports errors of values and files as those of an option."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise argparse.ArgumentTypeError(f"argument {option}: {error}" if option else str(error)) from None


def start_metal() -> runtime.Runtime:
    """The runtime. Says beforehand, on stderr, that it may have to be built. Raises ValueError on an unknown device."""
    module, _ = runtime.named()
    if module:
        notice = f"asking {module} for a native module, which it may have to build: minutes the first time"
        print(notice, file=sys.stderr)
    return runtime.get()


def interruptible(items: Iterator[Item]) -> Iterator[Item]:
    """The items, each made by another thread when it is asked for: Ctrl-C ends the wait, and leaves the thread behind.

    Within JAX an interrupt may be lost (its callback of the garbage collector), or crash the interpreter at its end.
    """
    end: Any = object()
    thread = futures.ThreadPoolExecutor(1)
    try:
        while (item := thread.submit(next, items, end).result()) is not end:
            yield item
    finally:
        thread.shutdown(wait=False)


def named(error: BaseException) -> str:
    """An error with its kind."""
    return f"{type(error).__name__}: {error}"


def one_line(text: str, most: int = 300) -> str:
    """A text on one line, as far as a reader of a table goes."""
    return " ".join(text.split())[:most]


def data(name: str) -> Any:
    """The content of a JSON file of this folder."""
    return json.loads(importlib.resources.files("jax_mfa.cli").joinpath(name).read_text(encoding="utf-8"))


def cell(form: str, value: float | None, unit: float = 1) -> str | None:
    """A number of a table in its unit and format; nothing where there is none."""
    return None if value is None else form.format(value / unit)


def table_line(cells: Iterable[str]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(cells)}".rstrip() + " |"


def table_lines(columns: Mapping[str, Callable[[Any], str | None]], rows: Iterable[Any]) -> list[str]:
    """A Markdown table: each column by its heading, a function of a row; "-" where that has nothing to say."""
    heading = [table_line(columns), f"{'|---' * len(columns)}|"]
    return heading + [table_line(cell(row) or "-" for cell in columns.values()) for row in rows]


def _in_ascii(error: Any) -> tuple[str, int]:
    """An error handler of encoders: what the encoding lacks is written in ASCII."""
    return "".join(_ASCII.get(x, "?") for x in error.object[error.start : error.end]), error.end


codecs.register_error("jax_mfa_in_ascii", _in_ascii)


def _wants_ascii() -> bool:
    """Whether the locale is C or POSIX by name. Python writes UTF-8 there, and sets LC_CTYPE itself to do so."""
    if os.environ.get("PYTHONIOENCODING") or os.environ.get("PYTHONUTF8"):
        return False
    names = [os.environ.get(name, "") for name in ("LC_ALL", "LC_CTYPE", "LANG")]
    if names[1] in ("C.UTF-8", "C.utf8", "UTF-8"):
        names[1] = ""
    return next(filter(None, names), "") in ("C", "POSIX")


def fit_output_to_the_terminal() -> None:
    """From here on stdout and stderr write any text in the terminal's encoding: ASCII stands in for what that lacks."""
    encoding = "ascii" if _wants_ascii() else None
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding=encoding, errors="jax_mfa_in_ascii")
