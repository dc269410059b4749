"""Host code against metal-cpp compiles and links for macOS arm64 on Linux; a symbol that no library has is an error."""

from __future__ import annotations

import pathlib

import pytest
from emulator.device import macos

# tests/metal/test_macos_build.py links the real module in the same way
pytestmark = pytest.mark.sweep

PROGRAMS = pathlib.Path(__file__).resolve().parent / "programs"


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> macos.Image:
    path = macos.cross_link([PROGRAMS / "vector_add.cc"], tmp_path_factory.mktemp("macos") / "libvector_add.dylib")
    return macos.Image(path.read_bytes())


def test_sample_program_links_strictly_for_apple_silicon(image: macos.Image) -> None:
    assert image.file_type == 6 and image.minimum_os == (14, 0) and image.signed
    assert "_vector_add" in image.exported
    taken = dict(image.undefined)
    assert None not in taken.values()
    assert taken["_objc_msgSend"] == "/usr/lib/libobjc.A.dylib"
    assert taken["_MTLCreateSystemDefaultDevice"].endswith("/Metal")
    assert taken["__NSConcreteStackBlock"] == "/usr/lib/libSystem.B.dylib"


def test_symbol_that_no_library_has_is_an_error(tmp_path: pathlib.Path) -> None:
    source = tmp_path / "missing.cc"
    declared = 'extern "C" int MTLNoSuchFunction(); extern "C" int PyNoSuch();'
    source.write_text(f'{declared} extern "C" int f() {{ return MTLNoSuchFunction() + PyNoSuch(); }}\n')
    with pytest.raises(macos.LinkError, match="MTLNoSuchFunction"):
        macos.cross_link([source], tmp_path / "missing.dylib")
    with pytest.raises(macos.LinkError, match=r"_MTLNoSuchFunction$"):
        macos.cross_link([source], tmp_path / "missing.dylib", allow_undefined=macos.PYTHON)
    assert not (tmp_path / "missing.dylib").exists()


def test_names_of_the_interpreter_may_stay_undefined(tmp_path: pathlib.Path) -> None:
    source = tmp_path / "module.cc"
    source.write_text('extern "C" int PySomething(); extern "C" int PyInit_module() { return PySomething(); }\n')
    made = macos.cross_link([source], tmp_path / "module.so", kind="bundle", allow_undefined=macos.PYTHON)
    assert ("_PySomething", None) in macos.Image(made.read_bytes()).undefined
