"""The MSL text that the launcher compiles: `metal/` flattened, because Metal's runtime compiler takes no files."""

from __future__ import annotations

import functools
import hashlib
import itertools
import pathlib
import re
from collections.abc import Iterable, Iterator

from jax_mfa.metal import operands
from jax_mfa.metal.plan import Kernel

# The files of kernels that a program may begin with: Metal reads them for every program again, so each has one pass.
TOGETHER = (
    ("append",),
    ("decode",),
    ("tile_lists", "forward"),
    ("portable",),
    ("tile_lists", "backward"),
    ("tile_lists", "backward", "portable"),  # with the gradient of captured arrays
)
ENTRY_FILES = tuple(dict.fromkeys(itertools.chain.from_iterable(TOGETHER)))
GENERATED = {"attention/operands.h": operands.text}
_KERNEL = re.compile(r"^\[\[kernel\b.*\]\] void (\w+)\(", re.M)
_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"\s*$')


@functools.cache
def folder() -> pathlib.Path:
    """Where the sources are: inside an installed package, or beside it in a checkout."""
    package = pathlib.Path(__file__).resolve().parent.parent
    for candidate in (package / "_msl", package.parent / "metal"):
        if (candidate / "attention" / f"{ENTRY_FILES[0]}.metal").exists():
            return candidate
    raise FileNotFoundError(f"no MSL sources in {package / '_msl'} or {package.parent / 'metal'}")


@functools.cache
def _file(name: str) -> list[str]:
    text = GENERATED[name]() if name in GENERATED else (folder() / name).read_text(encoding="utf-8")
    return text.splitlines()


def _lines(name: str, seen: set[str]) -> Iterator[str]:
    if name in seen:
        return
    seen.add(name)
    yield f"// ---- {name}"
    for line in _file(name):
        include = _INCLUDE.match(line)
        if include:
            yield from _lines(include[1], seen)
        elif line.strip() != "#pragma once":
            yield line


def _flattened(files: tuple[str, ...]) -> str:
    seen: set[str] = set()
    return "\n".join(line for name in files for line in _lines(f"attention/{name}.metal", seen)) + "\n"


@functools.cache
def base() -> str:
    """All kernels as templates."""
    return _flattened(ENTRY_FILES)


@functools.cache
def texts() -> dict[str, str]:
    """By its SHA-256, each text that a plan's instantiations may follow."""
    return {hashlib.sha256(x.encode()).hexdigest(): x for x in map(_flattened, TOGETHER)}


@functools.cache
def _defined(digest: str) -> frozenset[str]:
    return frozenset(_KERNEL.findall(texts()[digest]))


def digest_for(kernels: Iterable[Kernel]) -> str:
    """Of the shortest text that has the templates of these kernels, as a plan names it."""
    wanted = {kernel.template[0] for kernel in kernels}
    return min((x for x in texts() if wanted <= _defined(x)), key=lambda x: len(texts()[x]))
