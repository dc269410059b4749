"""Makes a wheel for macOS on Apple silicon on Linux: the package's pure wheel, the native module cross-compiled and
linked against stubs of Apple's libraries, retagged.

    python csrc/macos_wheel.py [--wheel PURE.whl] [--output dist]

The wheel is for the Python that runs this. It was linked, and never loaded: what a Mac makes of it is for a Mac to
say. Needs the extra `test`; knows wheels and the emulator's cross linker.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import pathlib
import subprocess
import sys
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from emulator import host_module  # noqa: E402
from emulator.device import macos  # noqa: E402

PYTHON = f"cp{sys.version_info.major}{sys.version_info.minor}"
TAG = f"{PYTHON}-{PYTHON}-macosx_14_0_arm64"
MODULE = f"jax_mfa/_metal.cpython-{sys.version_info.major}{sys.version_info.minor}-darwin.so"
_STAMP = (1980, 1, 1, 0, 0, 0)  # the same wheel from the same sources


def cross_module(output: pathlib.Path) -> pathlib.Path:
    """The extension module as an arm64 Mach-O file; only names of the interpreter are left to be found at load time."""
    return macos.cross_link(
        host_module.sources(),
        output,
        host_module.include_dirs(),
        host_module.DEFINES,
        kind="bundle",
        flags=host_module.FLAGS,
        allow_undefined=macos.PYTHON,
        std=host_module.STANDARD,
    )


def _hash(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _retagged(text: str) -> str:
    lines = [line for line in text.splitlines() if not line.startswith(("Tag:", "Root-Is-Purelib:"))]
    at = next((i for i, line in enumerate(lines) if not line), len(lines))
    return "\n".join([*lines[:at], "Root-Is-Purelib: false", f"Tag: {TAG}", *lines[at:]]) + "\n"


def assemble(pure: pathlib.Path, module: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Writes the macOS wheel from a pure one and the module; RECORD is made anew."""
    name, version = pure.name.split("-")[:2]
    with zipfile.ZipFile(pure) as archive:
        files = {entry: archive.read(entry) for entry in archive.namelist() if not entry.endswith("/")}
    info = next(entry.split("/")[0] for entry in files if entry.endswith(".dist-info/WHEEL"))
    files.pop(f"{info}/RECORD")
    files[f"{info}/WHEEL"] = _retagged(files[f"{info}/WHEEL"].decode()).encode()
    files[MODULE] = module.read_bytes()
    rows = [f"{entry},{_hash(data)},{len(data)}" for entry, data in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"{name}-{version}-{TAG}.whl"
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry, data in files.items():
            archive.writestr(zipfile.ZipInfo(entry, _STAMP), data, zipfile.ZIP_DEFLATED)
    return made


def pure_wheel(folder: pathlib.Path) -> pathlib.Path:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", str(ROOT), "--wheel-dir", str(folder)]
    subprocess.run(command, check=True)
    return next(folder.glob("*-none-any.whl"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes a wheel for macOS on Apple silicon on Linux.")
    parser.add_argument("--wheel", type=pathlib.Path, help="a pure wheel of the package; made where not given")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("dist"), help="folder for the result")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        pure = given.wheel or pure_wheel(pathlib.Path(work))
        module = cross_module(pathlib.Path(work) / pathlib.Path(MODULE).name)
        print(assemble(pure, module, given.output))


if __name__ == "__main__":
    main()
