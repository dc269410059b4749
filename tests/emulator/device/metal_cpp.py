"""Finds Apple's metal-cpp headers (Apache-2.0) or fetches them once into the cache; they are never part of this
repository.

They come from the macOS wheel of `mlx-metal`, which any pip can download on any machine. Knows nothing of who includes
them.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

from .. import build as core

PACKAGE = "mlx-metal"
VERSION = "0.32.4"  # headers of the macOS 26 SDK
PLATFORMS = ("macosx_14_0_arm64", "macosx_15_0_arm64", "macosx_26_0_arm64")
_PREFIX = "mlx/include/metal_cpp/"


class NoHeaders(RuntimeError):
    """metal-cpp is not on this machine and cannot be fetched: what needs it cannot be built here."""


def _download(folder: str) -> pathlib.Path:
    tried = []
    for requirement in (f"{PACKAGE}=={VERSION}", PACKAGE):
        for platform in PLATFORMS:
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--disable-pip-version-check",
                "--no-deps",
                "--only-binary=:all:",
                "--platform",
                platform,
                "--dest",
                folder,
                requirement,
            ]
            done = subprocess.run(command, capture_output=True, text=True)
            wheels = sorted(pathlib.Path(folder).glob("*.whl"))
            if done.returncode == 0 and wheels:
                return wheels[0]
            tried.append(f"{requirement} for {platform}: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    raise NoHeaders(
        "metal-cpp headers could not be fetched; set METAL_CPP_DIR to a folder that has Metal/Metal.hpp.\n"
        + "\n".join(tried)
    )


def include_dir() -> pathlib.Path:
    """The folder to put on the include path: METAL_CPP_DIR, an installed mlx-metal, else the cached download."""
    given = os.environ.get("METAL_CPP_DIR")
    if given:
        return pathlib.Path(given)
    spec = importlib.util.find_spec("mlx")
    for place in (spec.submodule_search_locations or []) if spec else []:
        installed = pathlib.Path(place) / "include" / "metal_cpp"
        if (installed / "Metal" / "Metal.hpp").exists():
            return installed
    root = core.cache_dir() / "metal-cpp"
    target = root / VERSION
    if (target / "Metal" / "Metal.hpp").exists():
        return target
    with core.locked(root / "lock"):
        if (target / "Metal" / "Metal.hpp").exists():
            return target
        with tempfile.TemporaryDirectory(dir=root) as work:
            wheel = _download(work)
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    if name.startswith(_PREFIX) and not name.endswith("/"):
                        out = pathlib.Path(work) / "headers" / name.removeprefix(_PREFIX)
                        out.parent.mkdir(parents=True, exist_ok=True)
                        out.write_bytes(archive.read(name))
            os.replace(pathlib.Path(work) / "headers", target)
    return target
