"""The package's native module over the emulated device: builds `csrc/`, unmodified, and imports it as `_metal`.

    from emulator import host_module
    module = host_module.load()

Knows how to build, and nothing of what the module does. Needs nanobind, zig, metal-cpp's headers, and XLA's FFI
headers of API minor 1, so that the binary serves every JAX from 0.4.38 on, as the one for a Mac does.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import pathlib
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import types
import zipfile

from . import build as core
from . import device

CSRC = core.ROOT.parent.parent / "csrc"
FFI_MINOR = 1
JAXLIB = "jaxlib==0.4.38"  # the oldest supported, with headers of that API
EXPORTS = core.ROOT / "host_module.map"
_PREFIX = "jaxlib/include/"


class Unavailable(RuntimeError):
    """Something that the build needs is neither on this machine nor can be fetched."""


def _minor(include: pathlib.Path) -> int | None:
    header = include / "xla" / "ffi" / "api" / "c_api.h"
    found = re.search(r"#define XLA_FFI_API_MINOR (\d+)", header.read_text()) if header.exists() else None
    return int(found.group(1)) if found else None


def ffi_include_dir() -> pathlib.Path:
    """Headers of FFI API minor 1: XLA_FFI_DIR, the installed jaxlib if it has them, else a download into the cache."""
    given = os.environ.get("XLA_FFI_DIR")
    if given:
        return pathlib.Path(given)
    spec = importlib.util.find_spec("jaxlib")
    for place in (spec.submodule_search_locations or []) if spec else []:
        if _minor(pathlib.Path(place) / "include") == FFI_MINOR:
            return pathlib.Path(place) / "include"
    root = core.cache_dir() / "xla-ffi"
    target = root / JAXLIB.replace("==", "-")
    with core.locked(root / "lock"):
        if _minor(target) != FFI_MINOR:
            with tempfile.TemporaryDirectory(dir=root) as work:
                _download(pathlib.Path(work))
                os.replace(pathlib.Path(work) / "include", target)
    return target


def _download(work: pathlib.Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", "3.12", "--platform", "manylinux2014_x86_64"]
    done = subprocess.run([*command, "--dest", str(work), JAXLIB], capture_output=True, text=True)
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        raise Unavailable(
            f"headers of {JAXLIB} could not be fetched; set XLA_FFI_DIR to a folder that has xla/ffi/api/ffi.h of API "
            f"minor {FFI_MINOR}\n{done.stderr.strip()[-500:]}"
        )
    with zipfile.ZipFile(wheels[0]) as archive:
        for name in archive.namelist():
            if name.startswith(f"{_PREFIX}xla/ffi/api/") and name.endswith(".h"):
                out = work / "include" / name.removeprefix(_PREFIX)
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_bytes(archive.read(name))


def nanobind_dir() -> pathlib.Path:
    spec = importlib.util.find_spec("nanobind")
    if spec is None or spec.origin is None:
        raise Unavailable("nanobind is not installed; it comes with the extra `test`")
    return pathlib.Path(spec.origin).parent


def sources() -> list[pathlib.Path]:
    return [
        CSRC / "module.cc",
        *sorted({*CSRC.glob("*.cc")} - {CSRC / "module.cc"}),
        nanobind_dir() / "src" / "nb_combined.cpp",
    ]


def headers() -> list[pathlib.Path]:
    """What the sources include and a change may touch; metal-cpp and Python have their place in the command line."""
    root = nanobind_dir()
    parts = [*sorted((root / "src").iterdir()), *sorted((root / "include").rglob("*.h"))]
    return [*sorted(CSRC.glob("*.h")), *(part for part in parts if part.is_file())]


def include_dirs() -> list[pathlib.Path]:
    root = nanobind_dir()
    return [
        CSRC,
        root / "include",
        root / "ext" / "robin_map" / "include",
        ffi_include_dir(),
        pathlib.Path(sysconfig.get_path("include")),
    ]


# As CMakeLists.txt has them. metal-cpp's SharedPtr sends release to nil, which clang takes as a proof that it is not.
FLAGS = [
    "-fno-delete-null-pointer-checks",
    "-fno-strict-aliasing",
    "-fvisibility=hidden",
    "-Wno-deprecated-declarations",
]
DEFINES = ["NDEBUG", "NB_COMPACT_ASSERTIONS", "METALCPP_SYMBOL_VISIBILITY_HIDDEN"]
STANDARD = "c++17"


def _metal_cpp() -> None:
    """Asks for metal-cpp's headers, which are fetched where they are not there."""
    if not CSRC.is_dir():
        raise Unavailable(f"the host code, {CSRC}, is not there: it is part of a source checkout")
    try:
        device.build.metal_cpp.include_dir()
    except device.build.metal_cpp.NoHeaders as reason:
        raise Unavailable(str(reason)) from None


def clang_flags() -> list[str]:
    """How another clang than zig's reads the sources: with the headers and the macros that zig gives its own."""
    _metal_cpp()
    command = [core.zig(), "c++", *device.build.host_flags(), "-###", "-c", "-x", "c++", os.devnull, "-o", os.devnull]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    words = shlex.split(next(line for line in said.splitlines() if '"-cc1"' in line))
    told = [x for pair in itertools.pairwise(words) if pair[0] in ("-D", "-I", "-isystem") for x in pair]
    own, *others = include_dirs()
    return [
        *("-nostdinc", "-nostdinc++", "-fPIC", "-fblocks", f"-std={STANDARD}", *FLAGS, *told, f"-I{own}"),
        *(x for folder in others for x in ("-isystem", str(folder))),
        *(f"-D{define}" for define in DEFINES),
    ]


def build() -> pathlib.Path:
    """Path of the extension for this Python over the emulated device; built where the cache has none."""
    _metal_cpp()
    made = device.host(
        sources(),
        include_dirs=include_dirs(),
        defines=DEFINES,
        flags=FLAGS,
        link_flags=[f"-Wl,--version-script={EXPORTS}"],
        depends=[*headers(), EXPORTS],
        std=STANDARD,
    )
    return made


@functools.cache
def load() -> types.ModuleType:
    """The module, imported once per process, under whatever name this one goes."""
    path = str(build())
    known = sys.modules.get("_metal")
    if known is not None and known.__file__ == path:
        return known
    spec = importlib.util.spec_from_file_location("_metal", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["_metal"] = module
    return module


if __name__ == "__main__":
    print(build())
