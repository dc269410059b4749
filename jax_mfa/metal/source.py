"""The MSL text that the launcher compiles: `metal/` flattened, because Metal's runtime compiler takes no files."""

from __future__ import annotations

import functools
import hashlib
import pathlib
import re
from collections.abc import Iterator

from jax_mfa.metal import operands

ENTRY_FILES = tuple(
    f"attention/{name}.metal" for name in ("tile_lists", "forward", "decode", "backward", "portable", "append")
)
GENERATED = {"attention/operands.h": operands.text}
_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"\s*$')


@functools.cache
def folder() -> pathlib.Path:
    """Where the sources are: inside an installed package, or beside it in a checkout."""
    package = pathlib.Path(__file__).resolve().parent.parent
    for candidate in (package / "_msl", package.parent / "metal"):
        if (candidate / ENTRY_FILES[0]).exists():
            return candidate
    raise FileNotFoundError(f"no MSL sources in {package / '_msl'} or {package.parent / 'metal'}")


def _lines(name: str, seen: set[str]) -> Iterator[str]:
    if name in seen:
        return
    seen.add(name)
    yield f"// ---- {name}"
    text = GENERATED[name]() if name in GENERATED else (folder() / name).read_text(encoding="utf-8")
    for line in text.splitlines():
        include = _INCLUDE.match(line)
        if include:
            yield from _lines(include[1], seen)
        elif line.strip() != "#pragma once":
            yield line


@functools.cache
def base() -> str:
    """All kernels as templates; a plan's instantiations follow it."""
    seen: set[str] = set()
    return "\n".join(line for name in ENTRY_FILES for line in _lines(name, seen)) + "\n"


@functools.cache
def base_hash() -> str:
    return hashlib.sha256(base().encode()).hexdigest()
