"""Metal Shading Language compute kernels on Linux, run and checked: the Python face of runtime/emulator.h.

    library = emulator.compile(source)
    kernel = library.kernel("scale", constants={"factor": np.float32(2)})
    result = kernel(threads=1024, threadgroup=256, buffers=[x, out], outputs=[1])
    assert not result.reports, result

NumPy arrays are bound as buffers and written in place; scalars, bytes and ctypes structures as with setBytes.
"""

from __future__ import annotations

import ctypes as c
import dataclasses
import enum
import functools
import pathlib
import types
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from . import build

INCLUDE = pathlib.Path(__file__).resolve().parent / "include"
_GUARD = 1 << 16  # bytes kept free on both sides of a buffer in checked runs, so that an overrun hits nothing else


class ReportClass(enum.IntEnum):
    """EMU_REPORT_* of emulator.h."""

    OUT_OF_BOUNDS = 1
    RACE = 2
    RACE_BETWEEN_THREADGROUPS = 3
    RACE_EQUAL_VALUE = 4
    UNINITIALISED_THREADGROUP = 5
    UNINITIALISED_PRIVATE = 6
    UNINITIALISED_DEVICE = 7
    DIVERGENT_BARRIER = 8
    DIVERGENT_SIMDGROUP = 9
    THREADGROUP_MEMORY = 10
    UNWRITTEN_OUTPUT = 11
    MISALIGNED = 12
    ENDLESS = 13
    INVALID_VALUE = 14


class Status(enum.IntEnum):
    """EMU_STATUS_* of emulator.h."""

    OK = 0
    INVALID = 1
    FAULT = 2
    TIMEOUT = 3
    CANCELLED = 4


class CompileError(Exception):
    """The source does not compile; the text is clang's, with the source's own file and lines."""


class PipelineError(Exception):
    """No pipeline: an unknown function, a missing function constant, or a failing compilation."""


class DispatchError(Exception):
    """The dispatch was refused before it ran."""


class _Macro(c.Structure):
    _fields_ = [("name", c.c_char_p), ("value", c.c_char_p)]


class _CompileOptions(c.Structure):
    _fields_ = [
        ("size", c.c_size_t),
        ("file_name", c.c_char_p),
        ("language_version", c.c_uint32),
        ("fast_math", c.c_int32),
        ("macros", c.POINTER(_Macro)),
        ("macro_count", c.c_size_t),
        ("include_paths", c.POINTER(c.c_char_p)),
        ("include_path_count", c.c_size_t),
    ]


class _FunctionConstant(c.Structure):
    _fields_ = [
        ("name", c.c_char_p),
        ("index", c.c_uint32),
        ("type", c.c_uint32),
        ("data_size", c.c_uint32),
        ("required", c.c_int32),
    ]


class _ConstantValue(c.Structure):
    _fields_ = [("name", c.c_char_p), ("index", c.c_uint32), ("type", c.c_uint32), ("data", c.c_char_p)]


class _PipelineOptions(c.Structure):
    _fields_ = [
        ("size", c.c_size_t),
        ("function", c.c_char_p),
        ("constants", c.POINTER(_ConstantValue)),
        ("constant_count", c.c_size_t),
        ("simd_width", c.c_uint32),
        ("max_total_threads", c.c_uint32),
        ("fast", c.c_int32),
    ]


class _PipelineInfo(c.Structure):
    _fields_ = [
        ("thread_execution_width", c.c_uint32),
        ("max_total_threads_per_threadgroup", c.c_uint32),
        ("static_threadgroup_memory_length", c.c_uint32),
        ("argument_count", c.c_uint32),
    ]


class _Argument(c.Structure):
    _fields_ = [
        ("name", c.c_char_p),
        ("index", c.c_uint32),
        ("kind", c.c_uint32),
        ("element_size", c.c_uint32),
        ("element_align", c.c_uint32),
        ("is_reference", c.c_int32),
        ("is_writable", c.c_int32),
        ("is_active", c.c_int32),
    ]


class _Buffer(c.Structure):
    _fields_ = [
        ("index", c.c_uint32),
        ("flags", c.c_uint32),
        ("data", c.c_void_p),
        ("length", c.c_uint64),
        ("offset", c.c_uint64),
    ]


class _ThreadgroupMemory(c.Structure):
    _fields_ = [("index", c.c_uint32), ("length", c.c_uint32)]


class _DispatchOptions(c.Structure):
    _fields_ = [
        ("size", c.c_size_t),
        ("grid", c.c_uint32 * 3),
        ("threads_per_threadgroup", c.c_uint32 * 3),
        ("grid_in_threads", c.c_int32),
        ("fast", c.c_int32),
        ("buffers", c.POINTER(_Buffer)),
        ("buffer_count", c.c_size_t),
        ("threadgroup_memory", c.POINTER(_ThreadgroupMemory)),
        ("threadgroup_memory_count", c.c_size_t),
        ("seed", c.c_uint64),
        ("host_threads", c.c_uint32),
        ("max_reports", c.c_uint32),
        ("time_limit", c.c_double),
        ("cancel", c.c_void_p),
        ("count_lines", c.c_int32),
    ]


class _ThreadPosition(c.Structure):
    _fields_ = [("threadgroup", c.c_uint32 * 3), ("thread", c.c_uint32 * 3)]


class _Report(c.Structure):
    _fields_ = [
        ("report_class", c.c_uint32),
        ("is_error", c.c_uint32),
        ("message", c.c_char_p),
        ("file", c.c_char_p),
        ("line", c.c_uint32),
        ("other_file", c.c_char_p),
        ("other_line", c.c_uint32),
        ("thread_count", c.c_uint32),
        ("threads", _ThreadPosition * 8),
        ("involved", c.c_uint64),
        ("buffer_index", c.c_int32),
        ("threadgroup_index", c.c_int32),
        ("offset", c.c_uint64),
        ("access_size", c.c_uint64),
        ("is_write", c.c_int32),
        ("occurrences", c.c_uint64),
    ]


_COUNTERS = (
    "matrix_multiply_accumulates",
    "exponentials",
    "device_bytes_loaded",
    "device_bytes_stored",
    "threadgroup_bytes_loaded",
    "threadgroup_bytes_stored",
    "atomics",
    "barriers",
    "simdgroup_barriers",
    "simdgroup_operations",
    "divergences",
    "threads",
    "threadgroups",
    "device_lines_loaded",
)


class _Counters(c.Structure):
    _fields_ = [(name, c.c_uint64) for name in _COUNTERS]


@functools.cache
def _api() -> c.CDLL:
    api = c.CDLL(str(build.runtime_library()))
    p, s = c.c_void_p, c.c_char_p
    for name, result, arguments in [
        ("emu_configure", None, [s, s, s]),
        ("emu_string_free", None, [p]),
        ("emu_library_create", p, [s, c.POINTER(_CompileOptions), c.POINTER(p)]),
        ("emu_strict_check", c.c_int, [s, c.POINTER(_CompileOptions), c.POINTER(p)]),
        ("emu_library_release", None, [p]),
        ("emu_library_function_count", c.c_size_t, [p]),
        ("emu_library_function_name", s, [p, c.c_size_t]),
        ("emu_library_constant_count", c.c_size_t, [p]),
        ("emu_library_constant", c.c_int, [p, c.c_size_t, c.POINTER(_FunctionConstant)]),
        ("emu_pipeline_create", p, [p, c.POINTER(_PipelineOptions), c.POINTER(p)]),
        ("emu_pipeline_release", None, [p]),
        ("emu_pipeline_get_info", c.c_int, [p, c.POINTER(_PipelineInfo)]),
        ("emu_pipeline_argument", c.c_int, [p, c.c_size_t, c.POINTER(_Argument)]),
        ("emu_dispatch", p, [p, c.POINTER(_DispatchOptions)]),
        ("emu_result_free", None, [p]),
        ("emu_result_status", c.c_int, [p]),
        ("emu_result_message", s, [p]),
        ("emu_result_report_count", c.c_size_t, [p]),
        ("emu_result_report", c.POINTER(_Report), [p, c.c_size_t]),
        ("emu_result_counters", c.POINTER(_Counters), [p]),
        ("emu_result_seconds", c.c_double, [p]),
    ]:
        function = getattr(api, name)
        function.restype, function.argtypes = result, arguments
    api.emu_configure(build.zig().encode(), str(INCLUDE).encode(), str(build.cache_dir()).encode())
    return api


def _take_string(pointer: c.c_void_p) -> str:
    if not pointer.value:
        return ""
    text = c.string_at(pointer.value).decode(errors="replace")
    _api().emu_string_free(pointer)
    return text


@dataclasses.dataclass(frozen=True)
class Report:
    """One finding of the checker. `threads` holds (threadgroup, thread) positions; the first is the one at `line`."""

    kind: ReportClass
    is_error: bool
    message: str
    file: str
    line: int
    other_file: str
    other_line: int
    threads: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    involved: int
    buffer: int | None
    threadgroup_argument: int | None
    offset: int
    access_size: int
    is_write: bool
    occurrences: int

    def __str__(self) -> str:
        return self.message


@dataclasses.dataclass(frozen=True)
class Counters:
    """What a dispatch did, exact and repeatable. Byte counts need a checked run, and lines one with `count_lines`."""

    matrix_multiply_accumulates: int
    exponentials: int
    device_bytes_loaded: int
    device_bytes_stored: int
    threadgroup_bytes_loaded: int
    threadgroup_bytes_stored: int
    atomics: int
    barriers: int
    simdgroup_barriers: int
    simdgroup_operations: int
    divergences: int
    threads: int
    threadgroups: int
    device_lines_loaded: int


@dataclasses.dataclass(frozen=True)
class Result:
    """How a dispatch went. `reports` holds every finding, `errors` only those that make a kernel wrong."""

    status: Status
    message: str
    reports: tuple[Report, ...]
    counters: Counters
    seconds: float

    @property
    def errors(self) -> tuple[Report, ...]:
        return tuple(r for r in self.reports if r.is_error)

    @property
    def ok(self) -> bool:
        return self.status == Status.OK and not self.errors

    def of(self, kind: ReportClass) -> tuple[Report, ...]:
        return tuple(r for r in self.reports if r.kind == kind)

    def __str__(self) -> str:
        lines = [f"{self.status.name} {self.message}".strip(), *(r.message for r in self.reports)]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Argument:
    """A bound argument of a kernel: kind is "device", "constant" or "threadgroup"."""

    name: str
    index: int
    kind: str
    element_size: int
    element_align: int
    is_reference: bool
    is_writable: bool
    is_active: bool


@dataclasses.dataclass(frozen=True)
class FunctionConstant:
    name: str
    index: int
    type: int
    data_size: int
    required: bool


_TYPE_DTYPES = {
    3: "f4",
    16: "f2",
    29: "i4",
    33: "u4",
    37: "i2",
    41: "u2",
    45: "i1",
    49: "u1",
    53: "?",
    81: "i8",
    85: "u8",
}


def _constant_bytes(value: Any, type_code: int, size: int) -> bytes:
    if isinstance(value, bytes):
        return value.ljust(size, b"\0")
    if type_code in range(121, 125):  # bfloat, whose dtype NumPy lacks: rounded here
        bits = np.atleast_1d(np.asarray(value, np.float32)).view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes().ljust(size, b"\0")
    base = max(t for t in _TYPE_DTYPES if t <= type_code)
    return np.atleast_1d(np.asarray(value)).astype(_TYPE_DTYPES[base]).tobytes().ljust(size, b"\0")


def _triple(value: int | Sequence[int]) -> tuple[int, int, int]:
    parts = (value,) if isinstance(value, (int, np.integer)) else tuple(value)
    return tuple(int(x) for x in (*parts, 1, 1, 1)[:3])  # type: ignore[return-value]


class Kernel:
    """A compute pipeline: a function with its function constants."""

    def __init__(self, library: Library, handle: int, name: str) -> None:
        self._library, self._handle, self.name = library, handle, name
        info = _PipelineInfo()
        _api().emu_pipeline_get_info(handle, info)
        weakref.finalize(self, _api().emu_pipeline_release, handle)
        self.thread_execution_width: int = info.thread_execution_width
        self.max_total_threads_per_threadgroup: int = info.max_total_threads_per_threadgroup
        self.static_threadgroup_memory_length: int = info.static_threadgroup_memory_length
        self.arguments: list[Argument] = []
        for i in range(info.argument_count):
            a = _Argument()
            _api().emu_pipeline_argument(handle, i, a)
            kind = {1: "device", 2: "constant", 3: "threadgroup"}[a.kind]
            self.arguments.append(
                Argument(
                    a.name.decode(),
                    a.index,
                    kind,
                    a.element_size,
                    a.element_align,
                    bool(a.is_reference),
                    bool(a.is_writable),
                    bool(a.is_active),
                )
            )

    def __call__(
        self,
        buffers: Sequence[Any] | Mapping[int, Any] = (),
        *,
        threadgroups: int | Sequence[int] | None = None,
        threads: int | Sequence[int] | None = None,
        grid: int | Sequence[int] | None = None,
        threadgroup: int | Sequence[int] = 1,
        offsets: Mapping[int, int] | None = None,
        outputs: Sequence[int] = (),
        uninitialised: Sequence[int] = (),
        threadgroup_memory: Mapping[int, int] | None = None,
        checked: bool = True,
        seed: int = 0,
        host_threads: int = 0,
        max_reports: int = 0,
        time_limit: float = 0.0,
        in_place: bool = False,
        vary_private: bool = False,
        count_lines: bool = False,
        _zeros: bool = False,
    ) -> Result:
        """Runs the kernel.

        Args:
          buffers: a list (by position) or a mapping from buffer index, of NumPy arrays, bytes, scalars or ctypes
            structures. None leaves an index unbound. Writable arrays receive what the kernel wrote.
          threadgroups, threads: the grid, as dispatchThreadgroups or dispatchThreads take it; one of them. `grid` is
            another name for threadgroups.
          threadgroup: threads per threadgroup.
          offsets: byte offset of a buffer's binding.
          outputs: buffers of which every byte must be written.
          uninitialised: buffers that hold nothing yet.
          threadgroup_memory: bytes for each [[threadgroup(n)]].
          checked: False runs without the checker, and without byte counters.
          seed: nonzero permutes the order in which threads run.
          in_place: bind the arrays' own memory; otherwise a checked run works on copies with free space around each.
          vary_private: run a second time, on one host thread, with private variables that start as zeros in place of a
            pattern. Output that differs came from a variable without a value, be it an integer: reported as such.
          count_lines: count `device_lines_loaded` in a checked run, which takes a little longer.

        Raises:
          DispatchError: the dispatch was refused, for example for too many threads.
        """
        if threadgroups is None and grid is not None:
            threadgroups = grid
        if (threadgroups is None) == (threads is None):
            raise TypeError("give either threadgroups= or threads=")
        items = dict(buffers) if isinstance(buffers, Mapping) else dict(enumerate(buffers))
        varied: dict[int, Any] = {}
        if vary_private:
            if not checked or in_place:
                raise TypeError("vary_private= needs a checked run on copies")
            varied = {i: x.copy() if isinstance(x, np.ndarray) and x.flags.writeable else x for i, x in items.items()}
            host_threads = 1
        offsets = offsets or {}
        keep: list[Any] = []
        copies: list[tuple[np.ndarray, np.ndarray]] = []
        bound: list[_Buffer] = []
        for index, value in items.items():
            if value is None:
                continue
            flags = (1 if index in outputs else 0) | (2 if index in uninitialised else 0)
            writable = isinstance(value, np.ndarray) and value.flags.writeable
            if isinstance(value, np.ndarray):
                if not value.flags.c_contiguous:
                    raise TypeError(f"buffer {index} is not C-contiguous")
                data = value.view(np.uint8).reshape(-1) if value.ndim else value.reshape(1).view(np.uint8)
            elif isinstance(value, (c.Structure, c.Array)):
                data = np.frombuffer(bytes(value), np.uint8)
            elif isinstance(value, (bytes, bytearray)):
                data = np.frombuffer(bytes(value), np.uint8)
            elif isinstance(value, bool):
                data = np.frombuffer(np.bool_(value).tobytes(), np.uint8)
            elif isinstance(value, int):
                data = np.frombuffer((value & 0xFFFFFFFF).to_bytes(4, "little"), np.uint8)
            elif isinstance(value, float):
                data = np.frombuffer(np.float32(value).tobytes(), np.uint8)
            else:
                data = np.frombuffer(np.asarray(value).tobytes(), np.uint8)
            if not in_place or not writable:
                room = np.empty(data.size + 2 * _GUARD + 256, np.uint8)
                start = _GUARD + (-(room.ctypes.data + _GUARD)) % 256
                copy = room[start : start + data.size]
                copy[:] = data
                keep.append(room)
                if writable:
                    copies.append((data, copy))
                data = copy
            keep.append(data)
            bound.append(_Buffer(index, flags, data.ctypes.data, data.size, offsets.get(index, 0)))
        memory = [_ThreadgroupMemory(i, n) for i, n in (threadgroup_memory or {}).items()]
        options = _DispatchOptions(
            c.sizeof(_DispatchOptions),
            (c.c_uint32 * 3)(*_triple(threads if threads is not None else threadgroups)),  # type: ignore[arg-type]
            (c.c_uint32 * 3)(*_triple(threadgroup)),
            threads is not None,
            2 if _zeros else not checked,
            (_Buffer * len(bound))(*bound),
            len(bound),
            (_ThreadgroupMemory * len(memory))(*memory),
            len(memory),
            seed,
            host_threads,
            max_reports,
            time_limit,
            None,
            count_lines,
        )
        api = _api()
        handle = api.emu_dispatch(self._handle, options)
        for original, copy in copies:
            original[:] = copy
        try:
            result = self._result(handle)
        finally:
            api.emu_result_free(handle)
        if not vary_private or result.status != Status.OK:
            return result
        again = self(
            varied,
            threadgroups=threadgroups,
            threads=threads,
            threadgroup=threadgroup,
            offsets=offsets,
            uninitialised=uninitialised,
            threadgroup_memory=threadgroup_memory,
            seed=seed,
            host_threads=1,
            time_limit=time_limit,
            _zeros=True,
        )
        found = [
            self._varied(index, x, varied[index])
            for index, x in items.items()
            if isinstance(x, np.ndarray) and x.flags.writeable and x.tobytes() != varied[index].tobytes()
        ]
        known = {r.buffer for r in result.of(ReportClass.UNINITIALISED_PRIVATE)}
        if again.status != Status.OK:
            found = [self._varied(None, None, None)]
        return dataclasses.replace(result, reports=(*result.reports, *(r for r in found if r.buffer not in known)))

    @staticmethod
    def _varied(index: int | None, x: np.ndarray | None, y: np.ndarray | None) -> Report:
        """A result that depends on what private variables held at first; None: whether it ends well does."""
        offset = 0
        what = "whether the kernel ends well"
        if x is not None and y is not None:
            differ = np.frombuffer(x.tobytes(), np.uint8) != np.frombuffer(y.tobytes(), np.uint8)
            offset = int(differ.argmax())
            what = f"buffer({index}), first at byte {offset},"
        message = f"uninitialised private memory: {what} depends on private variables that were never given a value"
        kind = ReportClass.UNINITIALISED_PRIVATE
        return Report(kind, True, message, "", 0, "", 0, (), 0, index, None, offset, 0, True, 1)

    def _result(self, handle: int) -> Result:
        api = _api()
        reports = []
        for i in range(api.emu_result_report_count(handle)):
            r = api.emu_result_report(handle, i).contents
            positions = tuple((tuple(t.threadgroup), tuple(t.thread)) for t in r.threads[: r.thread_count])
            offset = r.offset - (1 << 64) if r.offset >> 63 else r.offset
            reports.append(
                Report(
                    ReportClass(r.report_class),
                    bool(r.is_error),
                    r.message.decode(errors="replace"),
                    r.file.decode(),
                    r.line,
                    r.other_file.decode(),
                    r.other_line,
                    positions,
                    r.involved,
                    None if r.buffer_index < 0 else r.buffer_index,
                    None if r.threadgroup_index < 0 else r.threadgroup_index,
                    offset,
                    r.access_size,
                    bool(r.is_write),
                    r.occurrences,
                )
            )
        counters = api.emu_result_counters(handle).contents
        result = Result(
            Status(api.emu_result_status(handle)),
            api.emu_result_message(handle).decode(errors="replace"),
            tuple(reports),
            Counters(*(getattr(counters, n) for n in _COUNTERS)),
            api.emu_result_seconds(handle),
        )
        if result.status == Status.INVALID:
            error = DispatchError(result.message)
            error.result = result  # type: ignore[attr-defined]
            raise error
        return result


class Library:
    """A compiled source; `functions` holds the names a pipeline can be made of."""

    def __init__(self, handle: int, warnings: str) -> None:
        self._handle, self.warnings = handle, warnings
        api = _api()
        weakref.finalize(self, api.emu_library_release, handle)
        self.functions = [
            api.emu_library_function_name(handle, i).decode() for i in range(api.emu_library_function_count(handle))
        ]
        self.constants: list[FunctionConstant] = []
        for i in range(api.emu_library_constant_count(handle)):
            f = _FunctionConstant()
            api.emu_library_constant(handle, i, f)
            self.constants.append(FunctionConstant(f.name.decode(), f.index, f.type, f.data_size, bool(f.required)))

    def kernel(
        self,
        name: str | None = None,
        constants: Mapping[str | int, Any] | None = None,
        *,
        simd_width: int = 32,
        max_total_threads: int = 0,
        checked: bool = True,
    ) -> Kernel:
        """A pipeline for `name` (or for the only function). Constants are given by name or by index.

        Raises:
          PipelineError: no such function, a constant that it reads has no value, or the compilation fails.
        """
        if name is None:
            if len(self.functions) != 1:
                raise PipelineError(f"the library has {len(self.functions)} functions; name one")
            name = self.functions[0]
        values = []
        for key, value in (constants or {}).items():
            known = next(
                (f for f in self.constants if (f.name == key if isinstance(key, str) else f.index == key)), None
            )
            if known is None:
                raise PipelineError(f"the library has no function constant {key!r}")
            data = _constant_bytes(value, known.type, known.data_size)
            values.append(_ConstantValue(known.name.encode(), known.index, 0, data))
        options = _PipelineOptions(
            c.sizeof(_PipelineOptions),
            name.encode(),
            (_ConstantValue * len(values))(*values),
            len(values),
            simd_width,
            max_total_threads,
            not checked,
        )
        error = c.c_void_p()
        handle = _api().emu_pipeline_create(self._handle, options, error)
        text = _take_string(error)
        if not handle:
            raise PipelineError(text)
        return Kernel(self, handle, name)


def _compile_options(
    language_version: tuple[int, int],
    fast_math: bool,
    macros: Mapping[str, Any] | None,
    file_name: str | None,
    include_paths: Sequence[str | pathlib.Path],
) -> _CompileOptions:
    entries = [_Macro(k.encode(), None if v is None else str(v).encode()) for k, v in (macros or {}).items()]
    paths = [str(p).encode() for p in include_paths]
    return _CompileOptions(
        c.sizeof(_CompileOptions),
        file_name.encode() if file_name else None,
        language_version[0] << 16 | language_version[1],
        1 if fast_math else -1,
        (_Macro * len(entries))(*entries),
        len(entries),
        (c.c_char_p * len(paths))(*paths),
        len(paths),
    )


def strict_check(
    source: str | pathlib.Path,
    *,
    language_version: tuple[int, int] = (3, 1),
    fast_math: bool = True,
    macros: Mapping[str, Any] | None = None,
    file_name: str | None = None,
    include_paths: Sequence[str | pathlib.Path] = (),
) -> str:
    """The strict dialect check: "" if the source compiles and never changes an address space, else the messages."""
    if isinstance(source, pathlib.Path):
        file_name = file_name or str(source)
        source = source.read_text()
    error = c.c_void_p()
    _api().emu_strict_check(
        source.encode(), _compile_options(language_version, fast_math, macros, file_name, include_paths), error
    )
    return _take_string(error)


def jax_mfa_native(machine: str | None) -> types.ModuleType:
    """What `JAX_MFA_DEVICE=emulator[:MACHINE]` asks for: the project's native module over the emulated device.

    Raises:
      host_module.Unavailable: something that the build needs cannot be had.
      ValueError: there is no profile of that name.
    """
    from . import device, host_module

    native = host_module.load()
    if machine is not None:
        device.load().act_as(machine)
    return native


def compile(
    source: str | pathlib.Path,
    *,
    language_version: tuple[int, int] = (3, 1),
    fast_math: bool = True,
    macros: Mapping[str, Any] | None = None,
    file_name: str | None = None,
    include_paths: Sequence[str | pathlib.Path] = (),
) -> Library:
    """Compiles MSL text, or a file if `source` is a path.

    Raises:
      CompileError: with clang's messages.
    """
    if isinstance(source, pathlib.Path):
        file_name = file_name or str(source)
        source = source.read_text()
    options = _compile_options(language_version, fast_math, macros, file_name, include_paths)
    error = c.c_void_p()
    handle = _api().emu_library_create(source.encode(), options, error)
    text = _take_string(error)
    if not handle:
        raise CompileError(text)
    return Library(handle, text)
