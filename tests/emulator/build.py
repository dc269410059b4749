"""Builds the runtime library with zig on first use, into a cache folder, keyed by the content of its sources."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

ROOT = pathlib.Path(__file__).resolve().parent
RUNTIME = ROOT / "runtime"


def zig() -> str:
    """The zig program: EMU_ZIG, else the PyPI package `ziglang`, else `zig` on PATH."""
    given = os.environ.get("EMU_ZIG")
    if given:
        return given
    try:
        import ziglang
    except ImportError:
        found = shutil.which("zig")
        if found is None:
            raise RuntimeError("the emulator needs zig: pip install ziglang") from None
        return found
    return str(pathlib.Path(ziglang.__file__).parent / "zig")


def cache_dir() -> pathlib.Path:
    given = os.environ.get("EMU_CACHE_DIR")
    if given:
        return pathlib.Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(base) / "metal-emulator"


@contextlib.contextmanager
def locked(path: pathlib.Path) -> Iterator[None]:
    """Holds a lock file, so that concurrent processes build or fetch a thing once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _flags() -> list[str]:
    machine = platform.machine()
    if machine not in ("x86_64", "aarch64"):
        raise RuntimeError(f"the emulator runs on x86-64 and aarch64, not on {machine}")
    cpu = ["-march=x86_64_v3"] if machine == "x86_64" else []
    return [
        "-target",
        f"{machine}-linux-gnu.2.28",
        *cpu,
        "-std=c++17",
        "-O2",
        "-fPIC",
        "-g1",
        "-Wall",
        "-Wextra",
        "-fno-sanitize=undefined",
    ]


def _identity(parts: Sequence[pathlib.Path], version: str) -> str:
    key = hashlib.sha256()
    for part in parts:
        key.update(part.name.encode() + b"\0" + part.read_bytes())
    key.update(repr((_flags(), version)).encode())
    return key.hexdigest()[:32]


def runtime_library() -> pathlib.Path:
    """Path of the built library; builds it where the cache has none."""
    compiler = zig()
    version = subprocess.run([compiler, "version"], capture_output=True, text=True, check=True).stdout
    headers = [*sorted(RUNTIME.glob("*.h")), ROOT / "include" / "emulator" / "abi.h"]
    folder = cache_dir() / "runtime"
    library = folder / f"libemulator-{_identity([*sorted(RUNTIME.glob('*.cpp')), *headers], version)}.so"
    if not library.exists():
        with locked(folder / "lock"):
            if not library.exists():
                _build(compiler, version, library)
    return library


def _build(compiler: str, version: str, library: pathlib.Path) -> None:
    # compiled kernels stay good for as long as what makes them is the same
    makers = [file for file in sorted(RUNTIME.iterdir()) if file.stem in ("compile", "rewrite")]
    define = f'-DEMU_COMPILER_ID="{_identity(makers, version)}"'
    sources = sorted(RUNTIME.glob("*.cpp"))
    with tempfile.TemporaryDirectory(dir=library.parent) as work:
        jobs = []
        for source in sources:
            defines = [define] if source.stem == "compile" else []
            command = [compiler, "c++", *_flags(), *defines, "-c", str(source), "-o", f"{work}/{source.stem}.o"]
            jobs.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        failures = [output for job in jobs for output in [job.communicate()[0]] if job.returncode]
        if failures:
            raise RuntimeError("building the emulator failed:\n" + "\n".join(failures))
        temporary = f"{work}/{library.name}"
        objects = [f"{work}/{source.stem}.o" for source in sources]
        link = ["-shared", *objects, "-Wl,-z,nodelete", "-lpthread", "-ldl", "-lm"]
        done = subprocess.run([compiler, "c++", *_flags(), *link, "-o", temporary], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"linking the emulator failed:\n{done.stderr}")
        os.replace(temporary, library)


if __name__ == "__main__":
    print(runtime_library(), file=sys.stdout)
