"""`python -m jax_mfa check --compile-only`: every kernel through Apple's own compiler, on a Mac without a Metal device.

Each instantiation becomes a metallib (`metal`), and that with each set of function constants native code of a GPU
family (`metal-tt`). Errors, warnings and the size of the code become a table, and files beside the native code.
No documented tool tells registers or spills without a device. The metadata are a table without a published schema; a
public probe found in one of its fields what a kernel spills, in bytes a thread.

Written from documentation, never run on a Mac: Apple's manual pages metal-tt(1) and metal-pipelines-script(5), and
github.com/akakeishin/mlxturbo, tools/isa, for the options and the layout of the files. Knows plans; runs no kernel.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent import futures
from typing import Any

from jax_mfa.cli.check_problems import problems, quick
from jax_mfa.cli.command_line import one_line, table_lines
from jax_mfa.metal import source
from jax_mfa.metal.plan import LANGUAGE, Kernel

FAMILIES = {"apple7": "staged", "apple9": "direct"}  # GPU family → the tile table that its chips take
METAL = ("xcrun", "-sdk", "macosx", "metal", f"-std=metal{LANGUAGE[0]}.{LANGUAGE[1]}", "-fno-fast-math")
TRANSLATE = ("xcrun", "-sdk", "macosx", "metal-tt", "-platform_version", "macos", "26.0", "26.0")
SPILLS = 14  # field of the metadata (see above)
_VALUES = {"bool": "ConstantBool", "int": "ConstantInt", "uint": "ConstantUInt", "float": "ConstantFloat"}


def _digest(*x: Any) -> str:
    return hashlib.sha256(repr(x).encode()).hexdigest()[:8]


@dataclasses.dataclass(frozen=True)
class Native:
    """What became of a kernel with a set of constants, for a GPU family."""

    family: str
    kernel: Kernel
    said: str = ""
    failed: bool = False
    code: int | None = None  # bytes
    metadata: dict[int, int] = dataclasses.field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.family}-{self.kernel.name}-{_digest(self.kernel.instantiation, self.kernel.constants)}"


def kernels(family: str, only_quick: bool) -> list[Kernel]:
    """All that chips of a family may launch, once with each set of constants and functions."""
    plans = (plan for p in problems((FAMILIES[family],)) if quick(p) or not only_quick for plan in p.plans())
    return list(dict.fromkeys(d.kernel for plan in plans for d in plan.dispatches))


def script(kernel: Kernel) -> dict[str, Any]:
    """A pipelines script: one pipeline, of the kernel with its constants."""
    if not kernel.constants:
        return {"pipelines": {"compute_pipelines": [{"compute_function": kernel.name}]}}
    values = [
        {"id_type": "FunctionConstantIndex", "id": {"data": i}, "value_type": _VALUES[kind], "value": {"data": value}}
        for i, _, kind, value in kernel.constants
    ]
    special = {"label": "L", "function": kernel.name, "specialized_name": "special", "constant_values": values}
    return {
        "libraries": {"specialized_functions": [special]},
        "pipelines": {"compute_pipelines": [{"compute_function": "alias:L#special"}]},
    }


# --- Apple's tools


def _ran(*command: object) -> tuple[str, bool]:
    done = subprocess.run([str(x) for x in command], capture_output=True, text=True)
    return (done.stdout + done.stderr).strip(), done.returncode != 0


def library_name(kernel: Kernel) -> str:
    """The same for all constants, another one for other functions."""
    return f"{kernel.name}-{_digest(kernel.instantiation)}"


def _library(kernel: Kernel, work: pathlib.Path) -> tuple[str, bool]:
    text, library = (work / f"{library_name(kernel)}.{suffix}" for suffix in ("metal", "metallib"))
    base = source.texts()[source.digest_for([kernel])]
    text.write_text(base + "\n" + kernel.instantiation, encoding="utf-8")
    return _ran(*METAL, text, "-o", library)


def _native(family: str, kernel: Kernel, work: pathlib.Path, folder: pathlib.Path, library: tuple[str, bool]) -> Native:
    said, failed = library
    blank = Native(family, kernel, said, failed)
    if failed:
        return blank
    pipelines, out = work / f"{blank.label}.mtlp-json", folder / f"{blank.label}.gpubin"
    pipelines.write_text(json.dumps(script(kernel)), encoding="utf-8")
    given = work / f"{library_name(kernel)}.metallib", pipelines
    more, failed = _ran(*TRANSLATE, "-gpu-family", family, "-o", out, *given)
    found = Native(family, kernel, f"{said}\n{more}".strip(), failed)
    try:
        code, metadata = (None, {}) if failed else inspected(out.read_bytes())
    except (OSError, ValueError, LookupError, struct.error) as error:
        return dataclasses.replace(found, said=f"{found.said}\nnot understood: {error}".strip())
    return dataclasses.replace(found, code=code, metadata=metadata)


def _sections(data: bytes) -> dict[str, bytes]:
    """Of a 64-bit Mach-O file, by segment and name; those of its first slice, if it is Metal's kind of a fat file."""
    if data[:4] in (b"\xbe\xba\xfe\xcb", b"\xcb\xfe\xba\xbe"):
        offset, size = struct.unpack_from("<II", data, 16)
        return _sections(data[offset : offset + size])
    magic, commands = struct.unpack_from("<I12xI", data)
    if magic != 0xFEEDFACF:
        raise ValueError(f"expected a Mach-O file, its magic is {magic:#x}")
    found, at = {}, 32
    for _ in range(commands):
        kind, length = struct.unpack_from("<II", data, at)
        if kind == 0x19:  # a segment
            for place in range(at + 72, at + 72 + 80 * struct.unpack_from("<I", data, at + 64)[0], 80):
                name, segment, size, offset = struct.unpack_from("<16s16s8xQI", data, place)
                key = ",".join(x.rstrip(b"\0").decode() for x in (segment, name))
                found[key] = data[offset : offset + size]
        at += length
    return found


def inspected(data: bytes) -> tuple[int, dict[int, int]]:
    """Bytes of native code, and the fields of its metadata that hold 32 bits: of a FlatBuffer's first table."""
    inner = _sections(_sections(data)["__TEXT,__compute"])
    code = sum(len(x) for name, x in inner.items() if name == "__TEXT,__text")
    blob = next((x for name, x in inner.items() if name.startswith("__GPU_METADATA")), b"")
    return code, _fields(blob) if blob else {}


def _fields(blob: bytes) -> dict[int, int]:
    """Of the table that field 0 of the root leads to."""
    root = struct.unpack_from("<I", blob)[0]
    place = lambda table, i: table - struct.unpack_from("<i", blob, table)[0] + 4 + 2 * i
    offset = struct.unpack_from("<H", blob, place(root, 0))[0]
    table = root + offset + struct.unpack_from("<I", blob, root + offset)[0]
    count = (struct.unpack_from("<H", blob, place(table, -2))[0] - 4) // 2
    offsets = {i: struct.unpack_from("<H", blob, place(table, i))[0] for i in range(count)}
    return {
        i: struct.unpack_from("<I", blob, table + x)[0] for i, x in offsets.items() if x and table + x + 4 <= len(blob)
    }


# --- the report


def compiled(family: str, chosen: Sequence[Kernel], folder: pathlib.Path) -> Iterator[Native]:
    """Each kernel translated, as many at once as there are processors."""
    with tempfile.TemporaryDirectory() as name, futures.ThreadPoolExecutor(os.cpu_count()) as threads:
        work = pathlib.Path(name)
        by_name = {library_name(kernel): kernel for kernel in chosen}
        libraries = {name: threads.submit(_library, kernel, work) for name, kernel in by_name.items()}
        one = lambda kernel: _native(family, kernel, work, folder, libraries[library_name(kernel)].result())
        yield from threads.map(one, chosen)


def run(folder: pathlib.Path, only_quick: bool) -> int:
    """Prints the table and writes it to the folder, with the native code and all that the tools said.

    0: all was compiled. 1: something was not. 2: Apple's tools are not here.
    """
    if shutil.which("xcrun") is None:
        print("FAILED: xcrun is not here; --compile-only needs a Mac with Xcode and its Metal toolchain")
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    found: list[Native] = []
    for family in FAMILIES:
        found += compiled(family, kernels(family, only_quick), folder)
    columns = {
        "family": lambda x: x.family,
        "kernel": lambda x: x.kernel.name,
        "file": lambda x: x.label,
        "fragments": lambda x: str(x.kernel.fragment_bytes or "-"),
        "code": lambda x: None if x.code is None else str(x.code),
        "spills": lambda x: str(x.metadata.get(SPILLS, 0)) if x.metadata else None,
        "": lambda x: f"{'FAIL ' if x.failed else 'ok '}{one_line(x.said)}".strip(),
    }
    failed = sum(x.failed for x in found)
    lines = [
        *table_lines(columns, found),
        "",
        "Fragments, as planned, and spills, of a field without a published schema: bytes a thread. Code: bytes.",
        f"FAILED: {failed} of {len(found)} were not compiled" if failed else f"all compiled: {len(found)}",
    ]
    print("\n".join(lines))
    (folder / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    facts = [dict(file=x.label, constants=x.kernel.constants, said=x.said, metadata=x.metadata) for x in found]
    (folder / "report.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
    return 1 if failed else 0
