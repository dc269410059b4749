"""The launcher keeps a plan's promises: the right kernels over the right buffers, by either route, and a clear
error where plan and call differ. Small kernels of the tests' own, through jit, FFI, csrc and the emulated device."""

from __future__ import annotations

import json
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulator import device
from emulator.device import Fault, Option
from launcher import TARGET, Program, ffi

SMALL, LARGE = 1000, 50_000  # elements, below and above what is staged

SCALE = """
#include <metal_stdlib>
using namespace metal;
constant int factor [[function_constant(0)]];
constant bool negate [[function_constant(1)]];
constant float add [[function_constant(2)]];
template <typename T>
kernel void scale(device const T* x [[buffer(0)]], device T* out [[buffer(1)]], constant int& n [[buffer(2)]],
                  uint i [[thread_position_in_grid]]) {
  if (int(i) < n) out[i] = T((negate ? -1 : 1) * factor * float(x[i]) + add);
}
"""


def instantiate(host_name: str, msl: str) -> str:
    arguments = f"device const {msl}*, device {msl}*, constant int&, uint"
    return f'template [[host_name("{host_name}")]] kernel void scale<{msl}>({arguments});\n'


def scale(n: int, factor: int = 3, negate: bool = False, add: float = 0.0, dtype: str = "float32") -> Program:
    msl = {"float32": "float", "float16": "half", "bfloat16": "bfloat", "int32": "int", "uint8": "uchar"}[dtype]
    program = Program("scale", SCALE, instantiate("scale_it", msl))
    program.buffer("x", "input", dtype, [n]).buffer("out", "output", dtype, [n])
    constants = [("int", factor), ("bool", negate), ("float", add)]
    return program.dispatch("scale_it", [-(-n // 64), 1, 1], ["x", "out"], [n], constants)


# every third number of a buffer, in its place
UPDATE = """
#include <metal_stdlib>
using namespace metal;
kernel void update(device const ushort* add [[buffer(0)]], device ushort* x [[buffer(1)]],
                   constant int& n [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  if (int(3 * i) < n) x[3 * i] += add[i];
}
"""


def update(n: int) -> Program:
    program = Program("update", UPDATE).buffer("add", "input", "uint16", [n]).buffer("x", "updated", "uint16", [n])
    return program.dispatch("update", [-(-n // 192), 1, 1], ["add", "x"], [n])


@pytest.mark.parametrize("n", [100, 100_000], ids=["staged", "no copy"])
def test_a_buffer_is_updated_in_place_and_keeps_what_nobody_writes(native, metal, n):
    program = update(n)
    call = lambda add, x, **how: ffi.ffi_call(TARGET, program.results(), **how)(add, x, plan=program.text())[0]
    run = jax.jit(lambda add, x: call(add, x, input_output_aliases={1: 0}), donate_argnums=1)
    add, x = (np.arange(n, dtype=np.uint16) * i for i in (7, 1))
    wanted = x.copy()
    wanted[::3] += add[: len(wanted[::3])]
    compiled = run.lower(add, x).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == x.nbytes
    np.testing.assert_array_equal(run(add, jnp.array(x)), wanted)
    np.testing.assert_array_equal(x, np.arange(n, dtype=np.uint16))
    with pytest.raises(Exception, match="x is updated in place, and the call has another place for the result"):
        jax.block_until_ready(jax.jit(call)(add, x))


# sums of rows of 64, in two dispatches: a scratch of partial sums, then their total through dynamic threadgroup memory
SUMS = """
#include <metal_stdlib>
using namespace metal;
kernel void row_sums(device const float* x [[buffer(0)]], device float* sums [[buffer(1)]],
                     threadgroup float* shared [[threadgroup(0)]], uint row [[threadgroup_position_in_grid]],
                     uint lane [[thread_index_in_threadgroup]]) {
  shared[lane] = x[row * 64 + lane];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lane == 0) {
    float sum = 0;
    for (uint i = 0; i < 64; ++i) sum += shared[i];
    sums[row] = sum;
  }
}
kernel void total(device const float* sums [[buffer(0)]], device float* out [[buffer(1)]], constant int& rows
                  [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  if (i != 0) return;
  float sum = 0;
  for (int row = 0; row < rows; ++row) sum += sums[row];
  out[0] = sum;
}
"""


def two_dispatches(rows: int) -> Program:
    program = Program("total", SUMS)
    program.buffer("x", "input", "float32", [rows, 64])
    program.buffer("sums", "scratch", "float32", [rows]).buffer("out", "output", "float32", [])
    program.dispatch("row_sums", [rows, 1, 1], ["x", "sums"], threadgroup_memory=[256])
    return program.dispatch("total", [1, 1, 1], ["sums", "out"], [rows])


@pytest.mark.parametrize("n", [1, SMALL, LARGE])
def test_values_by_either_route(n: int, native: types.ModuleType, metal: device.Control) -> None:
    x = jnp.arange(n, dtype=jnp.float32)
    (out,) = jax.jit(scale(n))(x)
    np.testing.assert_array_equal(out, 3 * np.arange(n, dtype=np.float32))
    copied = n * 4 <= 32 * 1024
    seen = native.statistics()
    assert (seen["buffers_staged"], seen["buffers_no_copy"]) == ((2, 0) if copied else (0, 2))
    assert seen["bytes_staged"] == (8 * n if copied else 0)
    assert metal.totals()["buffers_no_copy"] == (0 if copied else 2)
    assert (seen["calls"], seen["dispatches"], seen["failures"], seen["plans"]) == (1, 1, 0, 1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int32", "uint8"])
def test_dtypes(dtype: str, metal: device.Control) -> None:
    x = jnp.arange(64).astype(dtype)
    (out,) = jax.jit(scale(64, factor=2, dtype=dtype))(x)
    assert out.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(out, np.float32), 2.0 * np.arange(64))


def test_memory_that_metal_will_not_wrap_is_staged(native: types.ModuleType, metal: device.Control) -> None:
    x = jnp.arange(LARGE, dtype=jnp.float32)
    with metal.fault(Fault.BUFFER_NO_COPY):
        (out,) = jax.jit(scale(LARGE))(x)
        np.testing.assert_array_equal(out, 3 * np.arange(LARGE, dtype=np.float32))
    seen = native.statistics()
    assert (seen["buffers_staged"], seen["buffers_no_copy"], seen["failures"]) == (2, 0, 0)


def test_arrays_of_other_alignments_in_one_program(metal: device.Control) -> None:
    # XLA packs temporaries side by side: several ranges of the same pages in flight at once
    sizes = [9000, 9001, 17, 12345]
    programs = [scale(n, factor=i + 1) for i, n in enumerate(sizes)]

    @jax.jit
    def run(*xs: jax.Array) -> list[jax.Array]:
        return [program(program(x + 1)[0])[0] for program, x in zip(programs, xs)]

    outs = run(*(jnp.arange(n, dtype=jnp.float32) for n in sizes))
    for i, (n, out) in enumerate(zip(sizes, outs)):
        np.testing.assert_array_equal(out, (i + 1) ** 2 * (np.arange(n, dtype=np.float32) + 1))


def test_constants_specialise_one_kernel(native: types.ModuleType, metal: device.Control) -> None:
    x = jnp.arange(64, dtype=jnp.float32)

    @jax.jit
    def run(x: jax.Array) -> list[jax.Array]:
        return [
            scale(64, *constants)(x)[0] for constants in ((2, False, 0.0), (2, True, 0.5), (7, False, float("inf")))
        ]

    plain, negative, infinite = run(x)
    np.testing.assert_array_equal(plain, 2 * np.arange(64.0))
    np.testing.assert_array_equal(negative, -2 * np.arange(64.0) + 0.5)
    assert np.isinf(infinite).all()
    seen = native.statistics()
    assert (seen["libraries"], seen["pipelines"], seen["plans"]) == (1, 3, 3)
    run(x)
    assert native.statistics()["pipelines"] == 3


@pytest.mark.parametrize("rows", [1, 33, 700])
def test_two_dispatches_share_scratch(rows: int, native: types.ModuleType, metal: device.Control) -> None:
    x = jnp.ones((rows, 64), jnp.float32)
    _, out = jax.jit(two_dispatches(rows))(x)
    assert out == rows * 64
    assert metal.totals()["command_buffers"] == 1
    assert native.statistics()["dispatches"] == 2


def test_buffers_of_no_bytes_and_grids_of_no_threads(native: types.ModuleType, metal: device.Control) -> None:
    (out,) = jax.jit(scale(0))(jnp.zeros(0, jnp.float32))
    assert out.shape == (0,)
    assert native.statistics()["dispatches"] == 0
    program = scale(64).buffer("nothing", "input", "float32", [0])
    program.body["dispatches"][0]["arguments"].append({"index": 5, "buffer": "nothing"})
    (out,) = jax.jit(program)(jnp.ones(64, jnp.float32), jnp.zeros(0, jnp.float32))
    np.testing.assert_array_equal(out, 3 * np.ones(64))


def test_staging_buffers_are_used_again(native: types.ModuleType, metal: device.Control) -> None:
    run = jax.jit(lambda x: scale(SMALL)(x)[0])
    x = jnp.ones(SMALL, jnp.float32)
    run(x).block_until_ready()
    held, objects = native.statistics()["staging_bytes"], metal.live_objects()
    for _ in range(200):
        x = run(x) / 3
    assert x[0] == 1
    assert native.statistics()["staging_bytes"] == held == 2 * 4 * SMALL
    assert metal.live_objects() == objects
    assert metal.totals()["buffers_allocated"] == 2


@pytest.mark.parametrize("n, calls", [(5_000_000, 5), (17_000_000, 1)], ids=["together", "alone"])  # of 8n bytes each
def test_idle_staging_memory_is_bounded(native: types.ModuleType, metal: device.Control, n: int, calls: int) -> None:
    with metal.fault(Fault.BUFFER_NO_COPY), metal.option(Option.CHECKED, 0):
        for size in range(n, n + calls):
            jax.block_until_ready(jax.jit(scale(size))(jnp.ones(size, jnp.float32)))
    assert native.statistics()["staging_bytes"] <= 64 * 1024 * 1024


def test_prepare_compiles_and_tells_limits(native: types.ModuleType, metal: device.Control) -> None:
    limits = native.prepare(two_dispatches(4).text())
    expected = {"static_threadgroup_memory": 0, "max_threads": 1024, "simd_width": 32}
    assert limits == {"row_sums": expected, "total": expected}
    assert native.statistics()["libraries"] == 1 and native.statistics()["calls"] == 0


def test_device_facts(native: types.ModuleType, metal: device.Control) -> None:
    facts = native.device()
    assert facts["name"].startswith("Apple M1") and "14.0" in facts["os"] and facts["unified_memory"]
    assert facts["max_threadgroup_memory"] == 32768
    assert "apple7" in facts["families"] and "metal3" in facts["families"] and "apple8" not in facts["families"]
    assert native.api_version() == (0, 1)  # serves every JAX from 0.4.38 on


@pytest.mark.parametrize("os_version", [140000, 150000, 260000])
def test_each_macos_gets_the_methods_it_has(os_version: int, native: types.ModuleType, metal: device.Control) -> None:
    with metal.option(Option.OS_VERSION, os_version):
        native.reset()
        (out,) = jax.jit(scale(64, factor=os_version // 10000))(jnp.ones(64, jnp.float32))
        assert out[0] == os_version // 10000


def test_older_macos_is_refused(native: types.ModuleType, metal: device.Control) -> None:
    with metal.option(Option.OS_VERSION, 130600):
        native.reset()
        with pytest.raises(RuntimeError, match="macOS 14 or newer is needed"):
            native.device()


def failure(call: Any, *operands: Any) -> str:
    with pytest.raises(Exception) as caught:  # each JAX has types of its own
        jax.block_until_ready(jax.jit(call)(*operands))
    return str(caught.value)


def test_call_that_differs_from_its_plan(native: types.ModuleType, metal: device.Control) -> None:
    program = scale(64)
    one = jax.ShapeDtypeStruct((64,), jnp.float32)

    def call(results: Any, *operands: Any) -> str:
        return failure(lambda *xs: ffi.ffi_call(TARGET, results)(*xs, plan=program.text()), *operands)

    x = jnp.zeros(64, jnp.float32)
    assert "operand 0 (x) is float32[65], the plan says float32[64]" in call(one, jnp.zeros(65, jnp.float32))
    assert "operand 0 (x) is float16[64], the plan says float32[64]" in call(one, x.astype(jnp.float16))
    assert "operand 0 (x) is float32[8, 8], the plan says float32[64]" in call(one, x.reshape(8, 8))
    assert "is another dtype[64]" in call(one, x.astype(jnp.complex64))
    wrong = jax.ShapeDtypeStruct((64,), jnp.int32)
    assert "result 0 (out) is int32[64], the plan says float32[64]" in call(wrong, x)
    assert "has 1 operands, the call has 2" in call(one, x, x)
    assert "has 1 results, the call has 2" in call([one, one], x)
    no_plan = failure(lambda x: ffi.ffi_call(TARGET, one)(x, plane=1), x)
    assert "no string attribute `plan`" in no_plan
    assert native.statistics()["dispatches"] == 0


def spoilt(path: list[Any], value: Any) -> str:
    body: Any = json.loads(scale(64).text())
    at = body
    for key in path[:-1]:
        at = at[key]
    if value is KeyError:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return json.dumps(body)


@pytest.mark.parametrize(
    "path, value, message",
    [
        (["name"], KeyError, "name is missing"),
        (["library", "source"], 7, "library.source must be a string"),
        (["library", "source"], "0" * 64, "no source is registered under 0000"),
        (["library", "language"], [3], "library.language must have 2 entries"),
        (["buffers", 0, "role"], "both", "must be input, output, scratch or updated"),
        (["buffers", 0, "dtype"], "float8", "not a known dtype"),
        (["buffers", 0, "shape"], [-1], r"buffers\[0\].shape\[0\] must be an integer from 0"),
        (["buffers", 0, "shape"], [2**40, 2**40], "too large"),
        (["buffers", 1, "name"], "x", "repeats the name"),
        (["dispatches", 0, "kernel"], "missing", "could not make the function"),
        (["dispatches", 0, "threads"], [0, 1, 1], "must be an integer from 1 to 1024"),
        (["dispatches", 0, "threads"], [64, 64, 1], "more than 1024"),
        (["dispatches", 0, "threadgroups"], 1, "threadgroups must be a list"),
        (["dispatches", 0, "threadgroups"], [1, 1, 1.5], "must be an integer"),
        (["dispatches", 0, "threadgroup_memory"], [24], "multiple of 16"),
        (["dispatches", 0, "threadgroup_memory"], [65536], "65536 bytes of threadgroup memory"),
        (["dispatches", 0, "arguments", 0, "buffer"], "y", "names no buffer"),
        (["dispatches", 0, "arguments", 1, "index"], 0, "repeats an index"),
        (["dispatches", 0, "arguments", 1, "index"], 31, "from 0 to 30"),
        (["dispatches", 0, "arguments", 2, "bytes"], "0", "in hexadecimal"),
        (["dispatches", 0, "arguments", 2, "bytes"], "zz", "must be hexadecimal"),
        (["dispatches", 0, "constants", 0, "type"], "double", "not a known type of constant"),
        (["dispatches", 0, "constants", 0, "value"], 2**31, "must be an integer from -2147483648"),
        (["dispatches", 0, "constants", 1, "value"], 1, "must be true or false"),
        (["dispatches", 0, "constants"], [], "could not make the function"),
        (["dispatches", 0, "instantiation"], 7, r"dispatches\[0\].instantiation must be a string"),
        (["dispatches", 0, "arguments", 0, "written"], 1, "written must be true or false"),
    ],
)
def test_wrong_plan_is_refused_with_its_place(
    path: list[Any], value: Any, message: str, native: types.ModuleType, metal: device.Control
) -> None:
    with pytest.raises(RuntimeError, match=message):
        native.prepare(spoilt(path, value))


@pytest.mark.parametrize(
    "text", ["", "{", "[1, 2", '{"a" 1}', '{"a": tru}', "{} {}", '"\\x"', "[" * 1000, "1e5e", '{"a": "']
)
def test_text_that_is_not_json(text: str, native: types.ModuleType, metal: device.Control) -> None:
    with pytest.raises(RuntimeError, match=r"is not JSON: .* at byte"):
        native.prepare(text)


def test_source_that_does_not_compile_gives_the_compilers_text(native: types.ModuleType, metal: device.Control) -> None:
    program = Program("broken", "kernel void broken(device float* out) { out[0] = undeclared; }")
    with pytest.raises(RuntimeError, match="undeclared"):
        native.prepare(program.dispatch("broken", [1, 1, 1], []).text())
