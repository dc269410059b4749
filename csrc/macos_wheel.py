"""Makes a wheel for macOS on Apple silicon on Linux: the package's pure wheel, the native module cross-compiled and
linked against stubs of Apple's libraries, retagged.

    python csrc/macos_wheel.py [--wheel PURE.whl] [--output dist]

The wheel is for the Python that runs this. It was linked, and never loaded: what a Mac makes of it is for a Mac to
say. Needs the extra `test`; knows wheels and the emulator's cross linker.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from emulator import host_module  # noqa: E402
from emulator.device import macos  # noqa: E402

PYTHON = f"cp{sys.version_info.major}{sys.version_info.minor}"
PLATFORM = "macosx_14_0_arm64"
MODULE = f"jax_mfa/_metal.cpython-{sys.version_info.major}{sys.version_info.minor}-darwin.so"
# the same wheel from the same sources: zip's first date, unless the caller names one
_ENVIRONMENT = {"SOURCE_DATE_EPOCH": "315532800", **os.environ}


def cross_module(output: pathlib.Path, with_cxx: bool = True) -> pathlib.Path:
    """The extension module as an arm64 Mach-O file; only names of the interpreter are left to be found at load time.
    Without the C++ library, and then not optimised, it is made sooner, to be looked at alone."""
    return macos.cross_link(
        host_module.sources(),
        output,
        host_module.include_dirs(),
        host_module.DEFINES,
        kind="bundle",
        flags=[*host_module.FLAGS, *([] if with_cxx else ["-O0"])],
        allow_undefined=macos.PYTHON,
        std=host_module.STANDARD,
        with_cxx=with_cxx,
    )


def _wheel(*arguments: object) -> None:
    command = [sys.executable, "-m", "wheel", *map(str, arguments)]
    subprocess.run(command, check=True, env=_ENVIRONMENT, stdout=sys.stderr)


def assemble(pure: pathlib.Path, module: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Writes the macOS wheel from a pure one and the module."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        _wheel("unpack", "--dest", work, pure)
        (unpacked,) = pathlib.Path(work).iterdir()
        shutil.copyfile(module, unpacked / MODULE)
        (about,) = unpacked.glob("*.dist-info/WHEEL")
        about.write_text(about.read_text().replace("Root-Is-Purelib: true", "Root-Is-Purelib: false"))
        _wheel("pack", "--dest-dir", work, unpacked)
        (packed,) = pathlib.Path(work).glob("*.whl")
        _wheel("tags", "--remove", "--python-tag", PYTHON, "--abi-tag", PYTHON, "--platform-tag", PLATFORM, packed)
        (tagged,) = pathlib.Path(work).glob("*.whl")
        return pathlib.Path(shutil.move(tagged, folder / tagged.name))


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
