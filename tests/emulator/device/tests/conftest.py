"""Puts the folder that holds the `emulator` package on the path, and gives every test a clean device."""

import ctypes
import importlib.util
import pathlib
import sys

import pytest

if importlib.util.find_spec("emulator") is None:
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

from emulator import device

PROGRAMS = pathlib.Path(__file__).resolve().parent / "programs"


@pytest.fixture(scope="session", autouse=True)
def headers() -> None:
    try:
        device.build.metal_cpp.include_dir()
    except device.build.metal_cpp.NoHeaders as reason:
        pytest.skip(f"no metal-cpp headers, and the wheel that has them cannot be fetched: {reason}")


@pytest.fixture(scope="session")
def probe_path() -> str:
    # metal-cpp's SharedPtr sends release to nil; without the flag clang takes that as a proof that it is not nil
    return str(device.host([PROGRAMS / "probe.cc"], flags=["-fno-delete-null-pointer-checks"]))


@pytest.fixture(scope="session")
def probe(probe_path: str) -> ctypes.CDLL:
    return ctypes.CDLL(probe_path)


@pytest.fixture
def metal() -> device.Control:
    control = device.load()
    native = sys.modules.get("emulator.host_module")
    if native is not None and native.load.cache_info().currsize:  # other tests of this process have used the device
        native.load().reset()
    control.wait_idle()
    control.reset()
    return control
