"""The native module builds for a Mac, seen from Linux: csrc compiles against Apple's headers and links strictly for
arm64, CMakeLists.txt says the same as the emulator's build, and wheels hold what they should. Nothing made here is
loaded."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import types
import zipfile

import pytest
from emulator import device, host_module
from emulator.device import macos

ROOT = pathlib.Path(__file__).resolve().parents[2]


def load_script() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("macos_wheel", ROOT / "csrc" / "macos_wheel.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load_script()


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.sweep)], ids=["alone", "with C++"])
def with_cxx(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(scope="module")
def module(native: types.ModuleType, tmp_path_factory: pytest.TempPathFactory, with_cxx: bool) -> pathlib.Path:
    return script.cross_module(tmp_path_factory.mktemp("macos") / pathlib.Path(script.MODULE).name, with_cxx)


def check_image(image: macos.Image, with_cxx: bool = True) -> None:
    assert image.minimum_os == (14, 0) and image.signed
    taken = dict(image.undefined)
    loose = [name for name, library in taken.items() if library is None]
    if not with_cxx:
        loose = [name for name in loose if not re.fullmatch(macos.CXX, name)]
    assert loose and all(re.fullmatch(r"__?Py\w+", name) for name in loose), loose
    assert taken["_MTLCreateSystemDefaultDevice"].endswith("/Metal")
    assert all(library.startswith(("/usr/lib/lib", "/System/Library/Frameworks/")) for library in image.libraries)
    # nothing of it is called, so nothing but the load command keeps it: Metal wants it for the default device
    assert any(library.endswith("/CoreGraphics") for library in image.libraries), image.libraries
    # beside the entry and the interface for hosts only what every C++ library has or nanobind shows on purpose
    shown = [name for name in image.exported if not re.match(r"__Z[nd][wla]|__ZNK?8nanobind|__mh_|___dso_handle", name)]
    for_hosts = re.findall(r"^JAX_MFA_HOST_EXPORT .*?(\w+)\(", (ROOT / "csrc" / "host.h").read_text(), re.MULTILINE)
    assert sorted(shown) == sorted(["_PyInit__metal", *(f"_{name}" for name in for_hosts)]) and len(for_hosts) == 8


@pytest.mark.sweep
def test_module_links_strictly_for_apple_silicon(module: pathlib.Path, with_cxx: bool) -> None:
    check_image(macos.Image(module.read_bytes()), with_cxx)


def test_cmake_and_the_emulators_build_agree_on_what_the_code_needs() -> None:
    text = (ROOT / "csrc" / "CMakeLists.txt").read_text()
    needed = ["-fno-delete-null-pointer-checks", "-fvisibility=hidden", "METALCPP_SYMBOL_VISIBILITY_HIDDEN"]
    for word in needed:
        assert word in text and word in [*host_module.FLAGS, *host_module.DEFINES]
    assert f"CMAKE_CXX_STANDARD {host_module.STANDARD.removeprefix('c++')}" in text
    assert f"XLA_FFI_API_MINOR {host_module.FFI_MINOR}$" in text


WRAPPER = """#!/bin/sh
# zig takes the target as one word; its linker has no bundles, and does not know the response file of Apple's
# that names the interpreter's symbols
for word do
  shift
  case $word in
    -mmacosx-version-min=* | -Wl,-dead_strip) ;;
    -bundle) set -- "$@" -dynamiclib ;;
    -Wl,@*) set -- "$@" -Wl,-undefined,dynamic_lookup ;;
    *) set -- "$@" "$word" ;;
  esac
done
exec "{zig}" c++ -target {target} "$@"
"""


@pytest.mark.sweep
@pytest.mark.skipif(not (shutil.which("cmake") and shutil.which("ninja")), reason="needs cmake and ninja")
def test_cmake_builds_the_same_module(native: types.ModuleType, tmp_path: pathlib.Path) -> None:
    zig = device.build.core.zig()
    tools = {"c++": WRAPPER.format(zig=zig, target=macos.TARGET), "ar": f'#!/bin/sh\nexec "{zig}" ar "$@"\n'}
    for name, text in {**tools, "nothing": "#!/bin/sh\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    # the packages that a build on a Mac requires, as far as it looks into them
    (tmp_path / "packages" / "mlx" / "include").mkdir(parents=True)
    (tmp_path / "packages" / "mlx" / "include" / "metal_cpp").symlink_to(device.build.metal_cpp.include_dir())
    (tmp_path / "packages" / "jaxlib").mkdir()
    (tmp_path / "packages" / "jaxlib" / "__init__.py").touch()
    (tmp_path / "packages" / "jaxlib" / "include").symlink_to(host_module.ffi_include_dir())
    macos.write_stubs(tmp_path / "stubs")
    settings = {
        "CMAKE_BUILD_TYPE": "Debug",  # compiles sooner
        "CMAKE_SYSTEM_NAME": "Darwin",
        "CMAKE_SYSTEM_PROCESSOR": "arm64",
        "CMAKE_CXX_COMPILER": tmp_path / "c++",
        "CMAKE_CXX_COMPILER_WORKS": 1,
        "CMAKE_AR": tmp_path / "ar",
        "CMAKE_RANLIB": tmp_path / "nothing",
        "CMAKE_STRIP": tmp_path / "nothing",
        "CMAKE_INSTALL_NAME_TOOL": tmp_path / "nothing",
        "CMAKE_CXX_FLAGS": f"-fno-sanitize=undefined -I{macos.ROOT / 'include'}",
        "CMAKE_MODULE_LINKER_FLAGS": f"-F{tmp_path / 'stubs'} -L{tmp_path / 'stubs'}",
        "Python_EXECUTABLE": sys.executable,
    }
    defines = [f"-D{name}={value}" for name, value in settings.items()]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "packages")}
    environment.pop("MACOSX_DEPLOYMENT_TARGET", None)
    build = tmp_path / "build"
    for command in (
        ["cmake", "-S", str(ROOT / "csrc"), "-B", str(build), "-G", "Ninja", *defines],
        ["cmake", "--build", str(build)],
        ["cmake", "--install", str(build), "--prefix", str(tmp_path / "installed")],
    ):
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
    (made,) = (tmp_path / "installed" / "jax_mfa").iterdir()
    assert made.name.startswith("_metal.")
    check_image(macos.Image(made.read_bytes()))


@pytest.fixture(scope="module")
def pure(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    try:
        return script.pure_wheel(tmp_path_factory.mktemp("wheel"))
    except subprocess.CalledProcessError:
        pytest.skip("pip cannot build a wheel here: the build backend cannot be fetched")


def test_wheel_for_other_machines_is_pure_and_has_the_kernels(pure: pathlib.Path) -> None:
    assert pure.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(pure) as archive:
        names = set(archive.namelist())
        for source in filter(pathlib.Path.is_file, (ROOT / "metal").rglob("*")):
            assert archive.read(f"jax_mfa/_msl/{source.relative_to(ROOT / 'metal')}") == source.read_bytes()
        assert archive.read("jax_mfa/include/host.h") == (ROOT / "csrc" / "host.h").read_bytes()
    assert "jax_mfa/__init__.py" in names
    assert not [name for name in names if name.endswith((".so", ".dylib", ".cc")) or name.startswith("tests/")]


@pytest.mark.sweep
def test_wheel_for_a_mac_installs_there(
    pure: pathlib.Path, module: pathlib.Path, with_cxx: bool, tmp_path: pathlib.Path
) -> None:
    made = script.assemble(pure, module, tmp_path / "dist")
    interpreter = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert made.name.endswith(f"-{interpreter}-{interpreter}-macosx_14_0_arm64.whl")
    assert script.assemble(pure, module, tmp_path / "again").read_bytes() == made.read_bytes()
    with zipfile.ZipFile(made) as archive:
        (about,) = (name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        lines = archive.read(about).decode().splitlines()
        assert [line for line in lines if line.startswith("Tag:")] == [
            f"Tag: {interpreter}-{interpreter}-macosx_14_0_arm64"
        ]
        assert "Root-Is-Purelib: false" in lines
        record = next(name for name in archive.namelist() if name.endswith(".dist-info/RECORD"))
        rows = list(csv.reader(archive.read(record).decode().splitlines()))
        assert {row[0] for row in rows} == set(archive.namelist())
        for name, digest, size in rows:
            if name == record:
                continue
            data = archive.read(name)
            expected = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert (digest, int(size)) == (f"sha256={expected}", len(data)), name
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--only-binary=:all:"]
    command += ["--platform", "macosx_14_0_arm64", "--python-version", python, "--implementation", "cp"]
    done = subprocess.run([*command, "--target", str(tmp_path / "site"), str(made)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    check_image(macos.Image((tmp_path / "site" / script.MODULE).read_bytes()), with_cxx)
    assert (tmp_path / "site" / "jax_mfa" / "_msl").is_dir()
