"""The launcher on machines that are not kind to it: devices that one way of asking does not find, other families and
page sizes, and a system that kills long command buffers. Each machine is a file of tests/emulator/profiles."""

from __future__ import annotations

import ctypes
import json
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulator import device
from emulator.device import Fault, Option
from launcher import TARGET, Program, ffi
from test_launcher import LARGE, SMALL, scale, two_dispatches

from jax_mfa.metal import runtime

# what `device()` says of each machine
FACTS = {
    "intel": {"families": [], "unified_memory": False},
    "m1": {"families": [f"apple{n}" for n in range(1, 8)] + ["metal3"], "unified_memory": True},
    "m3": {"families": [f"apple{n}" for n in range(1, 10)] + ["metal3"], "unified_memory": True},
    "m5": {"families": [f"apple{n}" for n in range(1, 11)] + ["metal3", "metal4"], "unified_memory": True},
    "paravirtual": {"families": [f"apple{n}" for n in range(1, 6)], "unified_memory": True},
}
VARIANTS = {"intel": "portable", "m1": "staged", "m3": "direct", "m5": "direct", "paravirtual": "portable"}


@pytest.fixture(params=device.profiles())
def machine(request: pytest.FixtureRequest, native: types.ModuleType, metal: device.Control) -> Iterator[str]:
    with metal.profile(request.param):
        native.reset()
        yield request.param
    native.reset()


def test_every_profile_has_its_facts() -> None:
    assert sorted(FACTS) == sorted(VARIANTS) == device.profiles()


def test_the_device_is_found_and_runs(machine: str, native: types.ModuleType) -> None:
    facts = native.device()
    assert {name: facts[name] for name in FACTS[machine]} == FACTS[machine]
    assert facts["max_threadgroup_memory"] == 32768
    assert runtime.Runtime(native, device=facts).variant == VARIANTS[machine]
    for n in (SMALL, LARGE):
        (out,) = jax.jit(scale(n))(jnp.arange(n, dtype=jnp.float32))
        np.testing.assert_array_equal(out, 3 * np.arange(n, dtype=np.float32))
    seen = native.statistics()
    assert (seen["buffers_staged"], seen["buffers_no_copy"], seen["failures"]) == (2, 2, 0)


@pytest.mark.parametrize("hidden", [Option.DEFAULT_DEVICE, Option.LISTED])
def test_either_way_of_asking_finds_the_device(hidden: Option, native: types.ModuleType, metal: device.Control) -> None:
    with metal.option(hidden, 0):
        native.reset()
        assert native.device()["name"].startswith("Apple M1")
    native.reset()


def test_refusal_says_which_ways_were_tried(native: types.ModuleType, metal: device.Control) -> None:
    with metal.option(Option.DEFAULT_DEVICE, 0), metal.option(Option.LISTED, 0):
        native.reset()
        with pytest.raises(
            RuntimeError, match=r"MTLCreateSystemDefaultDevice answers nil, and .*MTLCopyAllDevices is empty"
        ):
            native.device()
    assert native.device()["name"].startswith("Apple M1")


def test_environment_chooses_the_machine(
    native: types.ModuleType, metal: device.Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_MFA_DEVICE", "emulator:m3")
    try:
        native.reset()
        started = runtime.start()
        assert started.device["name"] == "Apple M3 (emulated)" and started.variant == "direct"
    finally:
        runtime._registered.cache_clear()
        metal.act_as("")
        native.reset()
    monkeypatch.setenv("JAX_MFA_DEVICE", "emulator:m0")
    with pytest.raises(ValueError, match="no profile 'm0' of the emulated device: there are intel, m1, m3, m5"):
        runtime.start()


def test_a_python_under_rosetta_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(chosen: str) -> None:
        raise ModuleNotFoundError("no module", name="jax_mfa._metal")

    monkeypatch.setattr(runtime, "_load", missing)
    monkeypatch.setattr(runtime, "sys", types.SimpleNamespace(platform="darwin"))
    monkeypatch.setattr(runtime.platform, "machine", lambda: "x86_64")
    for translated, expected in ((True, runtime.Runtime(reason=runtime.ROSETTA)), (False, None)):
        monkeypatch.setattr(runtime, "_translated", lambda answer=translated: answer)
        found = runtime._registered.__wrapped__("")
        assert found == (expected or runtime.Runtime(reason=runtime.NOT_APPLE, expected=True))


# --- the watchdog ---------------------------------------------------------------------------------------------------

# every thread loads `work` floats, so that the modelled time of a dispatch is known: threads · work / rate
BUSY = """
#include <metal_stdlib>
using namespace metal;
struct Grid { uint x, y, z, width, height, depth; };
kernel void busy(device const float* x [[buffer(0)]], device float* out [[buffer(1)]], constant int& work [[buffer(2)]],
                 constant Grid& grid [[buffer(3)]], uint3 place [[threadgroup_position_in_grid]],
                 uint lane [[thread_index_in_threadgroup]]) {
  const uint at = ((grid.z + place.z) * grid.height + grid.y + place.y) * grid.width + grid.x + place.x;
  float sum = 0;
  for (int i = 0; i < work; ++i) sum += x[i];
  out[at * 32 + lane] = sum + float(at);
}
"""
WORK = 64


def busy(groups: tuple[int, int, int], splits: bool = True) -> Program:
    n = groups[0] * groups[1] * groups[2] * 32
    program = Program("busy", BUSY, threads=32)
    program.buffer("x", "input", "float32", [WORK]).buffer("out", "output", "float32", [n])
    program.dispatch("busy", groups, ["x", "out"], [WORK], whole_grid=groups)
    dispatch = program.body["dispatches"][0]
    dispatch["multiply_accumulates"] = n * WORK
    if not splits:
        del dispatch["grid_argument"]
    return program


def expected(groups: tuple[int, int, int]) -> np.ndarray:
    count = groups[0] * groups[1] * groups[2]
    return WORK + np.repeat(np.arange(count, dtype=np.float32), 32)


GRIDS = [(1000, 1, 1), (10, 100, 1), (7, 5, 30), (3, 1, 333), (1, 1, 1000)]
SLOWER = 1e6  # than an M1, so that a kernel of a millisecond is one of minutes


@pytest.fixture
def slow_m1(native: types.ModuleType, metal: device.Control, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An M1 that is slower by a factor, with a launcher that is told so."""
    with metal.profile("m1"):
        metal.set(Option.RATE, int(metal.get(Option.RATE) / SLOWER))
        monkeypatch.setenv("JAX_MFA_COMMAND_BUFFER_MS", str(100 / SLOWER))
        native.reset()
        yield
    native.reset()


@pytest.mark.parametrize("groups", GRIDS)
def test_long_grids_become_short_command_buffers(
    groups: tuple[int, int, int], slow_m1: None, native: types.ModuleType, metal: device.Control
) -> None:
    # 2.05 million multiply-accumulates: 3.2 s of this device, which kills what takes 2 s, and 41 buffers of 50,000
    (out,) = jax.jit(busy(groups))(jnp.ones(WORK))
    np.testing.assert_array_equal(out, expected(groups))
    seen = native.statistics()
    assert 25 <= seen["command_buffers"] <= 70 and seen["failures"] == 0
    assert metal.totals()["command_buffers"] == seen["command_buffers"]


def test_a_grid_that_cannot_be_split_is_killed_with_a_message(
    slow_m1: None, native: types.ModuleType, metal: device.Control
) -> None:
    run = jax.jit(busy((1000, 1, 1), splits=False))
    x = jnp.ones(WORK)
    with pytest.raises(
        Exception, match=r"DEADLINE_EXCEEDED.*ImpactingInteractivity.*JAX_MFA_COMMAND_BUFFER_MS to less"
    ):
        jax.block_until_ready(run(x))
    metal.set(Option.GPU_TIMEOUT_MS, 3000)
    with pytest.raises(Exception, match=r"DEADLINE_EXCEEDED.*ErrorTimeout.*longer than macOS allows: set JAX_MFA_COMM"):
        jax.block_until_ready(run(x))
    # from the second on nothing is taken from this process
    with pytest.raises(Exception, match=r"UNAVAILABLE.*SubmissionsIgnored.*start it again"):
        jax.block_until_ready(jax.jit(scale(SMALL))(jnp.ones(SMALL)))


def test_the_first_error_of_a_split_call_is_told_once(
    slow_m1: None, native: types.ModuleType, metal: device.Control
) -> None:
    run = jax.jit(busy((1000, 1, 1)))
    x = jnp.ones(WORK)
    with metal.fault(Fault.GPU, times=2, skip=3), pytest.raises(Exception, match=r"INTERNAL.*PageFault"):
        jax.block_until_ready(run(x))
    assert native.statistics()["failures"] == 1
    with metal.fault(Fault.COMMAND_BUFFER, times=1, skip=3):
        with pytest.raises(Exception, match=r"INTERNAL.*gave no command buffer"):
            jax.block_until_ready(run(x))
    assert native.statistics()["failures"] == 2
    np.testing.assert_array_equal(run(x)[0], expected((1000, 1, 1)))


def test_many_split_calls_at_once(slow_m1: None, native: types.ModuleType, metal: device.Control) -> None:
    # more command buffers than a queue takes at once
    programs = [busy((100, 1, 1)) for _ in range(30)]
    outs = jax.jit(lambda x: [program(x * i)[0] for i, program in enumerate(programs, 1)])(jnp.ones(WORK))
    for i, out in enumerate(outs, 1):
        np.testing.assert_array_equal(out, expected((100, 1, 1)) + (i - 1) * WORK)
    assert native.statistics()["command_buffers"] > 100


@pytest.mark.parametrize("groups", [*GRIDS, (1, 1, 1), (4096, 32, 4), (65537, 1, 1)])
@pytest.mark.parametrize("most", [1.0, 3.3, 40.0, 1e9])
def test_pieces_cover_a_grid_once_and_fit(
    groups: tuple[int, int, int],
    most: float,
    native: types.ModuleType,
    metal: device.Control,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if groups[0] * groups[1] * groups[2] / most > 1e5:
        pytest.skip("a list for nobody to read")
    # the work of one threadgroup is 2048, of a command buffer `most` times that
    monkeypatch.setenv("JAX_MFA_COMMAND_BUFFER_MS", repr(most * 2048 / 5e11 * 1e3))
    native.reset()
    seen = np.zeros(groups, np.int32)
    buffers = native.split(busy(groups).text())
    for pieces in buffers:
        assert sum(piece["multiply_accumulates"] for piece in pieces) <= most * 2048 * (1 + 1e-9)
        for piece in pieces:
            seen[tuple(slice(o, o + n) for o, n in zip(piece["origin"], piece["threadgroups"]))] += 1
    assert (seen == 1).all()
    assert len(buffers) <= 3 * max(1, seen.size / most)
    monkeypatch.undo()
    native.reset()


@pytest.mark.parametrize("given", ["0", "-1", "soon", "inf"])
def test_time_of_a_command_buffer_must_be_a_number(
    given: str, native: types.ModuleType, metal: device.Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_MFA_COMMAND_BUFFER_MS", given)
    native.reset()
    with pytest.raises(RuntimeError, match="JAX_MFA_COMMAND_BUFFER_MS must be a positive number"):
        native.device()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"grid_argument": 2}, "grid_argument is no argument of 24 bytes or more"),
        ({"grid_argument": 7}, "grid_argument is no argument of 24 bytes or more"),
        ({"multiply_accumulates": -1}, "must be a finite number from 0"),
        ({"multiply_accumulates": "many"}, "must be a number"),
    ],
)
def test_wrong_work_of_a_dispatch_is_refused(
    change: dict[str, Any], message: str, native: types.ModuleType, metal: device.Control
) -> None:
    program = busy((1, 1, 1))
    program.body["dispatches"][0].update(change)
    with pytest.raises(RuntimeError, match=message):
        native.prepare(json.dumps(program.body))


def test_dispatches_of_little_work_share_a_command_buffer(
    slow_m1: None, native: types.ModuleType, metal: device.Control
) -> None:
    _, out = jax.jit(two_dispatches(33))(jnp.ones((33, 64), jnp.float32))
    assert out == 33 * 64
    assert native.statistics()["command_buffers"] == 1


# --- what a GPU takes -----------------------------------------------------------------------------------------------

REDUCE = """
#include <metal_stdlib>
using namespace metal;
kernel void reduce(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                   uint i [[thread_position_in_grid]]) { out[i] = simd_sum(x[i]); }
"""
MATRICES = """
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;
kernel void square(device const float* x [[buffer(0)]], device float* out [[buffer(1)]]) {
  simdgroup_float8x8 a, b;
  simdgroup_load(a, x, 8);
  simdgroup_multiply(b, a, a);
  simdgroup_store(b, out, 8);
}
"""


def on_64(kernel: str, source: str, threads: int) -> Program:
    program = Program(kernel, source, threads=threads)
    program.buffer("x", "input", "float32", [64]).buffer("out", "output", "float32", [64])
    groups = 64 // threads if kernel == "reduce" else 1
    return program.dispatch(kernel, [groups, 1, 1], ["x", "out"])


@pytest.mark.parametrize("kernel, source", [("reduce", REDUCE), ("square", MATRICES)])
def test_simdgroup_functions_are_refused_where_a_gpu_lacks_them(
    kernel: str, source: str, machine: str, native: types.ModuleType
) -> None:
    run = jax.jit(on_64(kernel, source, 32))
    if VARIANTS[machine] == "portable":
        with pytest.raises(Exception, match=r"FAILED_PRECONDITION.*make the pipeline: .*unlowered .*air\.simd"):
            run(jnp.ones(64))
    else:
        (out,) = run(jnp.ones(64))
        np.testing.assert_array_equal(out, np.full(64, 32.0 if kernel == "reduce" else 8.0))


def test_threads_fall_with_the_registers_of_a_kernel(native: types.ModuleType, metal: device.Control) -> None:
    plain, matrices = on_64("reduce", REDUCE, 32).text(), on_64("square", MATRICES, 32).text()
    with metal.profile("m1"):
        native.reset()
        assert native.prepare(plain)["reduce"]["max_threads"] == 1024
        assert native.prepare(matrices)["square"]["max_threads"] == 384
        with pytest.raises(RuntimeError, match=r"512 threads per threadgroup are asked .* at most 384"):
            native.prepare(on_64("square", MATRICES, 512).text())
    native.reset()


# --- memory beside outputs ------------------------------------------------------------------------------------------


MAPPED = 9_000_000  # floats: so large that malloc maps pages for them alone, and 256 bytes beyond one


def in_place_beside_the_cpu(metal: device.Control) -> bytes:
    """What the CPU wrote right after the output of a kernel while that ran, as it is afterwards."""
    program = Program("fill", FILL)
    program.buffer("x", "input", "float32", [MAPPED]).buffer("out", "output", "float32", [MAPPED])
    program.dispatch("fill", [100, 1, 1], ["x", "out"], [MAPPED])
    call = ffi.ffi_call(TARGET, program.results(), input_output_aliases={0: 0})
    run = jax.jit(lambda x: call(x, plan=program.text())[0], donate_argnums=0)
    x = jnp.zeros(MAPPED) + 1
    run = run.lower(x).compile()
    end = x.unsafe_buffer_pointer() + 4 * MAPPED
    assert end % 128 and end % 4096 <= 2048
    beside = (ctypes.c_char * 16).from_address(end)
    beside.raw = b"before".ljust(16, b"\0")

    def meanwhile() -> None:
        while metal.totals(clear=False)["command_buffers"] == before:
            time.sleep(0.001)
        time.sleep(0.05)  # the kernel runs
        beside.raw = b"while it ran".ljust(16, b"\0")

    before = metal.totals(clear=False)["command_buffers"]
    cpu = threading.Thread(target=meanwhile)
    cpu.start()
    out = run(x)
    assert out[0] == 2 and out[-1] == 2
    cpu.join()
    assert out.unsafe_buffer_pointer() + 4 * MAPPED == end
    return beside.raw.rstrip(b"\0")


FILL = """
#include <metal_stdlib>
using namespace metal;
kernel void fill(device const float* x [[buffer(0)]], device float* out [[buffer(1)]], constant int& n [[buffer(2)]],
                 uint i [[thread_position_in_grid]], uint threads [[threads_per_grid]]) {
  for (int at = i; at < n; at += threads) out[at] = x[at] + 1;
}
"""


def test_lines_shared_with_the_cpu_can_be_staged(native: types.ModuleType, metal: device.Control) -> None:
    with metal.option(Option.LINE_BYTES, 128):
        assert in_place_beside_the_cpu(metal) == b"before"  # the CPU's work is lost
        assert native.stage_shared_lines(4 * MAPPED + 1) == 0
        try:
            assert in_place_beside_the_cpu(metal) == b"while it ran"
            native.stage_shared_lines(4 * MAPPED)  # not ranges of so many bytes
            assert in_place_beside_the_cpu(metal) == b"before"
        finally:
            assert native.stage_shared_lines(0) == 4 * MAPPED
