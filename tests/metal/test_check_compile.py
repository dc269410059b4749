"""`check --compile-only` calls Apple's tools as their documentation says: another program stands in for `xcrun`."""

from __future__ import annotations

import json
import struct
import sys

import pytest

from jax_mfa.__main__ import main
from jax_mfa.cli import check_compile
from jax_mfa.cli.check_problems import Problem
from jax_mfa.metal import source

STAND_IN = """#!{python}
import json, pathlib, sys
arguments = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(json.dumps(arguments) + "\\n")
out = pathlib.Path(arguments[arguments.index("-o") + 1])
if "metal" in arguments:
    text = pathlib.Path(arguments[-3]).read_text()
    out.write_text(text[text.rindex("template"):])
elif "delta" in out.name:
    print("error: too many registers", file=sys.stderr)
    raise SystemExit(1)
else:
    script = json.loads(pathlib.Path(arguments[-1]).read_text())
    assert "host_name" in pathlib.Path(arguments[-2]).read_text()
    pathlib.Path({log!r} + "." + out.name).write_text(json.dumps(script))
    out.write_bytes(bytes.fromhex({native!r}))
"""


def macho(sections: dict[tuple[str, str], bytes]) -> bytes:
    """A Mach-O file with one segment of these sections."""
    at = 32 + 72 + 80 * len(sections)
    head, body = b"", b""
    for (segment, name), data in sections.items():
        place = (name.encode(), segment.encode(), 0, len(data), at + len(body))
        head += struct.pack("<16s16sQQI28x", *place)
        body += data
    command = struct.pack("<II56xII", 0x19, 72 + len(head), len(sections), 0)
    return struct.pack("<IIIIIIII", 0xFEEDFACF, 0, 0, 0, 1, len(command) + len(head), 0, 0) + command + head + body


def metadata(field: int, value: int) -> bytes:
    """A FlatBuffer: a root whose field 0 is a table with one field."""
    inner_vtable = struct.pack("<HH", 4 + 2 * (field + 1), 8) + b"\0\0" * field + struct.pack("<H", 4)
    inner = struct.pack("<iI", len(inner_vtable), value)
    root_vtable = struct.pack("<HHH2x", 6, 8, 4)
    start = 4 + len(root_vtable)
    root = struct.pack("<iI", len(root_vtable), 4 + len(inner_vtable))
    return struct.pack("<I", start) + root_vtable + root + inner_vtable + inner


def native(code: int, spills: int, fat: bool = False) -> bytes:
    inner = macho(
        {("__TEXT", "__text"): bytes(code), ("__GPU_METADATA", "__x"): metadata(check_compile.SPILLS, spills)}
    )
    whole = macho({("__TEXT", "__compute"): inner})
    return struct.pack("<II", 0xCBFEBABE, 1) + struct.pack("<iiIII", 0, 0, 28, len(whole), 0) + whole if fat else whole


@pytest.mark.parametrize("fat", [False, True])
def test_native_code_is_looked_into(fat):
    code, fields = check_compile.inspected(native(1234, 56, fat))
    assert code == 1234 and fields == {check_compile.SPILLS: 56}
    with pytest.raises(ValueError, match="expected a Mach-O file"):
        check_compile.inspected(bytes(64))


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    log = tmp_path / "log"
    program = tmp_path / "bin" / "xcrun"
    program.parent.mkdir()
    program.write_text(STAND_IN.format(python=sys.executable, log=str(log), native=native(1234, 56).hex()))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    few = [Problem(variant, "float16", 64, 64) for variant in ("staged", "direct")]
    monkeypatch.setattr(check_compile, "problems", lambda variants: [p for p in few if p.variant in variants])
    return log


def test_each_kernel_is_compiled_once_and_translated_for_its_family(stand_in, tmp_path, capsys):
    assert main(["check", "--quick", "--compile-only", str(tmp_path / "out")]) == 1  # delta fails
    calls = [json.loads(line) for line in stand_in.read_text().splitlines()]
    assert all(call[:2] == ["-sdk", "macosx"] for call in calls)
    metal = [call for call in calls if call[2] == "metal"]
    assert all(call[3:5] == ["-std=metal3.1", "-fno-fast-math"] and call[6] == "-o" for call in metal)
    translated = [call for call in calls if call[2] == "metal-tt"]
    wanted = {f: check_compile.kernels(f, True) for f in check_compile.FAMILIES}
    assert len(translated) == sum(map(len, wanted.values())) == 8
    for call in translated:
        assert call[3:7] == ["-platform_version", "macos", "26.0", "26.0"] and call[7] == "-gpu-family"
        assert call[9] == "-o" and call[10].endswith(".gpubin") and call[11].endswith(".metallib")
        (kernel,) = [k for k in wanted[call[8]] if call[11].endswith(f"/{check_compile.library_name(k)}.metallib")]
        assert check_compile.Native(call[8], kernel).label in call[10]
    said = capsys.readouterr().out
    assert said.count("FAIL error: too many registers") == 2 and "| 1234 | 56 | ok |" in said
    assert "FAILED: 2 of 8 were not compiled" in said
    assert (tmp_path / "out" / "report.md").read_text() == said
    assert len(json.loads((tmp_path / "out" / "report.json").read_text())) == 8


def test_kernels_that_differ_in_their_functions_alone_are_all_compiled():
    family = next(iter(check_compile.FAMILIES))
    kernels = check_compile.kernels(family, False)
    assert len({(k.name, k.constants) for k in kernels}) < len(kernels)
    assert len({check_compile.Native(family, k).label for k in kernels}) == len(kernels)
    assert len(set(map(check_compile.library_name, kernels))) == len({k.instantiation for k in kernels})


def test_a_script_has_the_constants_of_the_kernel():
    (plan, *_) = Problem("staged", "float16", 64, 64, "causal").plans()
    kernel = plan.dispatches[-1].kernel
    script = check_compile.script(kernel)
    (special,) = script["libraries"]["specialized_functions"]
    assert script["pipelines"] == {
        "compute_pipelines": [{"compute_function": f"alias:L#{special['specialized_name']}"}]
    }
    assert special["function"] == kernel.name
    values = {x["id"]["data"]: (x["value_type"], x["value"]["data"]) for x in special["constant_values"]}
    kinds = {"bool": "ConstantBool", "int": "ConstantInt"}
    assert values == {i: (kinds[kind], value) for i, _, kind, value in kernel.constants}
    for i, name, kind, _ in kernel.constants:
        assert f"constant {kind} {name} [[function_constant({i})]];" in source.base()


def test_without_apples_tools_it_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["check", "--compile-only"]) == 2
    assert "needs a Mac with Xcode" in capsys.readouterr().out
