"""Builds the device library, and host code against it, with zig; both are cached by content.

`library()` is the shared library that shows Objective-C's and Metal's symbols; `host()` compiles C++ written against
metal-cpp and links it to that library. Knows nothing of what the host code does.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from .. import build as core
from . import metal_cpp

ROOT = pathlib.Path(__file__).resolve().parent
SOURCE = ROOT / "source"
INCLUDE = ROOT / "include"


def target_flags() -> list[str]:
    """Target and processor, the same as the core's, so that zig builds its C++ library once for both."""
    flags = core._flags()
    chosen = flags[: flags.index("-target") + 2] + [flag for flag in flags if flag.startswith("-march=")]
    if platform.machine() == "aarch64":
        chosen.append("-D__arm64__=1")  # metal-cpp knows this architecture by Apple's name
    return chosen


def _link_flags() -> list[str]:
    # whatever decides how zig builds its C++ library is as in the core's link, so that one build of it serves all
    return [*target_flags(), "-O2", "-g1", "-fPIC", "-fno-sanitize=undefined"]


def host_flags() -> list[str]:
    """What a translation unit that includes metal-cpp is compiled with, in this library and in host code."""
    mac = ["-D__MAC_OS_X_VERSION_MIN_REQUIRED=140000"]  # metal-cpp's macOS branches
    return [
        *target_flags(),
        "-O2",
        "-g1",
        "-fPIC",
        "-fblocks",
        "-fno-sanitize=undefined",
        "-Wno-gcc-compat",
        *mac,
        "-I",
        str(INCLUDE),
        "-isystem",
        str(metal_cpp.include_dir()),
    ]


def _run(command: Sequence[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{what} failed:\n{done.stdout}{done.stderr}")


def _zig_version() -> str:
    return subprocess.run([core.zig(), "version"], capture_output=True, text=True, check=True).stdout.strip()


def _key(files: Sequence[pathlib.Path], *more: object) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    digest.update(repr((more, _zig_version())).encode())
    return digest.hexdigest()[:32]


def _object(source: str, flags: Sequence[str], headers: str) -> str:
    """Object file of one source, from the cache where neither it, its flags nor the headers changed."""
    output = (
        core.cache_dir()
        / "device"
        / "objects"
        / f"{pathlib.Path(source).stem}-{_key([pathlib.Path(source)], list(flags), headers)}.o"
    )
    if not output.exists():
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output.parent) as work:
            _run(
                [core.zig(), "c++", *flags, "-c", source, "-o", f"{work}/made.o"],
                f"compiling {pathlib.Path(source).name}",
            )
            os.replace(f"{work}/made.o", output)
    return str(output)


def _link(
    sources: Sequence[pathlib.Path], flags: Sequence[str], headers: str, link: list[str], output: pathlib.Path
) -> None:
    """Compiles side by side, links, and moves the result into place in one step."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        objects = list(pool.map(lambda source: _object(str(source), flags, headers), sources))
    with tempfile.TemporaryDirectory(dir=output.parent) as work:
        linked = f"{work}/{output.name}"
        _run([core.zig(), "c++", *link[:1], *objects, *link[1:], "-o", linked], f"linking {output.name}")
        os.replace(linked, output)


def library() -> pathlib.Path:
    """Path of the device library; built where the cache has none."""
    runtime = core.runtime_library()
    sources = sorted([*SOURCE.glob("*.cc"), *SOURCE.glob("*.S")])
    headers = _key(
        [*sorted(SOURCE.glob("*.h")), *sorted(INCLUDE.rglob("*.h")), ROOT / "device.h", core.RUNTIME / "emulator.h"]
    )
    flags = [*host_flags(), "-std=c++20", "-fvisibility=hidden", "-Wall", "-Wextra"]
    where = [f'-DMETAL_DEVICE_ZIG="{core.zig()}"', f'-DMETAL_DEVICE_INCLUDE="{core.ROOT / "include"}"']
    folder = core.cache_dir() / "device"
    output = (
        folder / f"libmetal_device-{_key([*sources, ROOT / 'exports.map'], headers, flags, where, str(runtime))}.so"
    )
    if output.exists():
        return output
    with core.locked(folder / "lock"):
        if not output.exists():
            link = [
                "-shared",
                *_link_flags(),
                str(runtime),
                f"-Wl,--version-script={ROOT / 'exports.map'}",
                "-Wl,-z,nodelete",
                f"-Wl,-soname,{output.name}",
                "-lpthread",
                "-ldl",
            ]
            _link(sources, [*flags, *where], headers, link, output)
    return output


def host(
    sources: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str] | None = None,
    *,
    include_dirs: Sequence[str | os.PathLike[str]] = (),
    defines: Sequence[str] = (),
    flags: Sequence[str] = (),
    link_flags: Sequence[str] = (),
    depends: Sequence[str | os.PathLike[str]] = (),
    std: str = "c++20",
    shared: bool = True,
) -> pathlib.Path:
    """Compiles host code written against metal-cpp into a shared object (or a program) for the emulated device.

    Args:
      sources: C++ files; exactly one of them defines NS_PRIVATE_IMPLEMENTATION and MTL_PRIVATE_IMPLEMENTATION.
      output: where to put it; None: the cache, by content of `sources` and of `depends`.
      depends: files that the sources include, so that a change to them is seen.
      include_dirs, defines, flags, link_flags: additions to the command lines; `defines` as "NAME" or "NAME=VALUE".
    """
    device = library()
    paths = [pathlib.Path(source) for source in sources]
    compile_flags = [
        *host_flags(),
        f"-std={std}",
        *(f"-D{define}" for define in defines),
        *(f"-I{folder}" for folder in include_dirs),
        *flags,
    ]
    link = [
        *(["-shared"] if shared else ["-pie"]),
        *_link_flags(),
        str(device),
        f"-Wl,-rpath,{device.parent}",
        *link_flags,
    ]
    headers = _key([*sorted(INCLUDE.rglob("*.h")), *map(pathlib.Path, depends)])
    if output is None:
        key = _key(paths, compile_flags, headers, link)
        output = core.cache_dir() / "device" / "host" / f"{paths[0].stem}-{key}{'.so' if shared else ''}"
        if not output.exists():
            with core.locked(output.with_suffix(".lock")):
                if not output.exists():
                    _link(paths, compile_flags, headers, link, output)
        return output
    output = pathlib.Path(output)
    _link(paths, compile_flags, headers, link, output)
    return output


if __name__ == "__main__":
    print(library())
