"""Cross-compiles host code for macOS on Apple silicon, on Linux, and links it strictly: a symbol that no library is
known to have is an error.

zig brings clang, libc and libSystem; Apple's metal-cpp headers are fetched (metal_cpp.py); the rest is here: two stub
headers in include/ and text stubs of the libraries, generated below. Nothing made here is run on Linux, only looked at.
"""

from __future__ import annotations

import os
import pathlib
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence

from ... import build as core
from .. import metal_cpp

ROOT = pathlib.Path(__file__).resolve().parent
TARGET = "aarch64-macos.14.0"
PYTHON = r"_?_Py.*"  # what an extension module takes from the interpreter that loads it
# what host code takes from the C++ library: std, its run-time type information, new and delete, exceptions
CXX = r"__Z(T[ISTV])?N?K?St.*|__ZT[ISV](N10__cxxabiv1.*|\w{1,3})|__Z(n[wa]|d[la])\w+|___cxa_\w+|___gxx_personality_v0"

# What each library is known to export, beyond the constants that metal-cpp's own headers name.
LIBRARIES = {
    "libobjc": (
        "/usr/lib/libobjc.A.dylib",
        (
            "_objc_msgSend",
            "_objc_lookUpClass",
            "_objc_getClass",
            "_objc_getProtocol",
            "_sel_registerName",
            "_sel_getName",
            "_object_getClass",
            "_object_getClassName",
            "_class_getName",
            "_class_getSuperclass",
            "_class_respondsToSelector",
            "_class_getMethodImplementation",
            "_objc_autoreleasePoolPush",
            "_objc_autoreleasePoolPop",
            "_objc_retain",
            "_objc_release",
            "_objc_autorelease",
        ),
    ),
    "Foundation": ("/System/Library/Frameworks/Foundation.framework/Versions/C/Foundation", ()),
    "CoreFoundation": (
        "/System/Library/Frameworks/CoreFoundation.framework/Versions/A/CoreFoundation",
        ("___CFConstantStringClassReference",),
    ),
    "CoreGraphics": ("/System/Library/Frameworks/CoreGraphics.framework/Versions/A/CoreGraphics", ()),
    "Metal": (
        "/System/Library/Frameworks/Metal.framework/Versions/A/Metal",
        (
            "_MTLCreateSystemDefaultDevice",
            "_MTLCopyAllDevices",
            "_MTLCopyAllDevicesWithObserver",
            "_MTLRemoveDeviceObserver",
        ),
    ),
}


class LinkError(RuntimeError):
    """Compiling or linking for macOS failed; the text is the compiler's, or the list of undefined symbols."""


def header_constants(headers: pathlib.Path) -> dict[str, tuple[str, ...]]:
    """Names of the constants that metal-cpp links to weakly: {"Foundation": ..., "Metal": ...}."""
    found = {}
    for library, prefix, macro in (
        ("Foundation", "NS", "_NS_PRIVATE_DEF_CONST"),
        ("Metal", "MTL", "_MTL_PRIVATE_DEF_(?:STR|CONST|WEAK_CONST)"),
    ):
        names = set()
        for file in sorted((headers / library).glob("*.hpp")):
            if file.name.endswith("Private.hpp"):
                continue
            names |= {
                f"_{prefix}{name}"
                for name in re.findall(rf"^\s*{macro}\([^,]+,\s*(\w+)\s*\)", file.read_text(errors="replace"), re.M)
            }
        found[library] = tuple(sorted(names))
    return found


def _stub(install_name: str, symbols: Sequence[str]) -> str:
    lines = "".join(f"\n                     {symbol}," for symbol in sorted(symbols)).rstrip(",")
    return (
        f"--- !tapi-tbd\ntbd-version: 4\ntargets: [ arm64-macos ]\ninstall-name: '{install_name}'\n"
        f"exports:\n  - targets: [ arm64-macos ]\n    symbols: [{lines} ]\n...\n"
    )


def write_stubs(folder: pathlib.Path, extra: dict[str, Sequence[str]] | None = None) -> None:
    """Writes the libraries' text stubs; `extra` adds symbols, by library."""
    constants = header_constants(metal_cpp.include_dir())
    for name, (install_name, symbols) in LIBRARIES.items():
        known = {*symbols, *constants.get(name, ()), *(extra or {}).get(name, ())}
        place = folder / (f"{name}.tbd" if name.startswith("lib") else f"{name}.framework/{name}.tbd")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(_stub(install_name, sorted(known) or ["_unused"]))


def cross_link(
    sources: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    include_dirs: Sequence[str | os.PathLike[str]] = (),
    defines: Sequence[str] = (),
    *,
    kind: str = "dylib",
    flags: Sequence[str] = (),
    link_flags: Sequence[str] = (),
    allow_undefined: str | None = None,
    extra_symbols: dict[str, Sequence[str]] | None = None,
    std: str = "c++20",
    target: str = TARGET,
    with_cxx: bool = True,
) -> pathlib.Path:
    """Compiles and strictly links C++ for macOS arm64.

    Args:
      sources: C++ files (or objects made for the same target).
      output: where to put the result.
      kind: "dylib", "bundle" (what Python loads) or "executable".
      allow_undefined: pattern of whole symbol names that may stay undefined, for example `PYTHON`; nothing by default.
      extra_symbols: {"Metal": [...], ...} known to exist on a Mac, which this room's lists lack.
      with_cxx: put the C++ library in, as what is loaded needs it. zig compiles it first, for most of a minute; without
        it names that match `CXX` stay undefined.

    Raises:
      LinkError: with the compiler's text, or naming every symbol that nothing defines.
    """
    output = pathlib.Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    compile_flags = [
        "-target",
        target,
        f"-std={std}",
        "-O2",
        "-fblocks",
        "-fPIC",
        "-fno-sanitize=undefined",
        *(f"-D{define}" for define in defines),
        *(f"-I{folder}" for folder in include_dirs),
        "-I",
        str(ROOT / "include"),
        "-isystem",
        str(metal_cpp.include_dir()),
        *flags,
    ]
    kinds = {
        "dylib": ["-dynamiclib", f"-Wl,-install_name,@rpath/{output.name}"],
        "bundle": ["-dynamiclib"],
        "executable": [],
    }
    with tempfile.TemporaryDirectory(dir=output.parent) as work:
        stubs = pathlib.Path(work) / "stubs"
        write_stubs(stubs, extra_symbols)
        objects = []
        for at, source in enumerate(sources):
            source = pathlib.Path(source)
            if source.suffix == ".o":
                objects.append(str(source))
                continue
            objects.append(f"{work}/{at}.o")
            _run(
                [core.zig(), "c++", *compile_flags, "-c", str(source), "-o", objects[-1]],
                f"compiling {source.name} for macOS",
            )
        linked = f"{work}/{output.name}"
        loosely = "|".join(filter(None, [allow_undefined, None if with_cxx else CXX]))
        lenient = ["-Wl,-undefined,dynamic_lookup"] if loosely else []
        _run(
            [
                core.zig(),
                "c++",
                "-target",
                target,
                "-O2",
                "-fno-sanitize=undefined",
                *kinds[kind],
                *([] if with_cxx else ["-nostdlib++"]),
                *objects,
                f"-L{stubs}",
                f"-F{stubs}",
                "-lobjc",
                *(word for name in LIBRARIES if not name.startswith("lib") for word in ("-framework", name)),
                *lenient,
                *link_flags,
                "-o",
                linked,
            ],
            f"linking {output.name} for macOS",
        )
        image = Image(pathlib.Path(linked).read_bytes())
        loose = [
            name
            for name, library in image.undefined
            if library is None and not (loosely and re.fullmatch(loosely, name))
        ]
        if loose:
            raise LinkError(f"{output.name}: no library is known to define " + ", ".join(sorted(loose)))
        os.replace(linked, output)
    return output


def _run(command: Sequence[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise LinkError(f"{what} failed:\n{done.stdout}{done.stderr}")


class Image:
    """A thin 64-bit Mach-O file, as far as a test wants to look at it.

    Attributes:
      undefined: [(symbol, install name of the library it comes from, None where it is looked up by name at load time)].
      exported: names of defined external symbols.
      libraries: install names.
      minimum_os: (major, minor); signed: whether it carries a code signature (arm64 refuses to load it without).
    """

    def __init__(self, data: bytes) -> None:
        magic, cpu, _, self.file_type, count, _, _, _ = struct.unpack_from("<8I", data)
        if magic != 0xFEEDFACF or cpu != 0x0100000C:
            raise ValueError("not a thin arm64 Mach-O file")
        self.libraries: list[str] = []
        self.undefined: list[tuple[str, str | None]] = []
        self.exported: list[str] = []
        self.minimum_os, self.signed = (0, 0), False
        symbols = None
        for command, at, size in self._commands(data, count):
            if command in (0xC, 0x80000018, 0x8000001F):  # load, weak, re-exported dylib
                (name,) = struct.unpack_from("<I", data, at + 8)
                self.libraries.append(data[at + name : at + size].split(b"\0")[0].decode())
            elif command == 0x2:
                symbols = struct.unpack_from("<4I", data, at + 8)
            elif command == 0x32:
                (version,) = struct.unpack_from("<I", data, at + 12)
                self.minimum_os = (version >> 16, version >> 8 & 0xFF)
            elif command == 0x1D:
                self.signed = True
        if symbols is None:
            return
        offset, number, strings, _ = symbols
        for at in range(offset, offset + 16 * number, 16):
            name_at, kind, _, description, _ = struct.unpack_from("<IBBHQ", data, at)
            if kind & 0xE0 or not kind & 0x01:  # debugging entry, or local
                continue
            name = data[strings + name_at : data.index(b"\0", strings + name_at)].decode()
            if kind & 0x0E:
                self.exported.append(name)
                continue
            ordinal = description >> 8
            self.undefined.append((name, self.libraries[ordinal - 1] if 0 < ordinal <= len(self.libraries) else None))

    @staticmethod
    def _commands(data: bytes, count: int) -> Iterator[tuple[int, int, int]]:
        at = 32
        for _ in range(count):
            command, size = struct.unpack_from("<2I", data, at)
            yield command, at, size
            at += size
