"""What goes wrong on the device becomes the documented error (csrc/README.md) or the documented fallback: other
callers are not touched, nothing is left behind, and the next call works."""

from __future__ import annotations

import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulator import device
from emulator.device import Fault, Option
from launcher import TARGET, Program, ffi
from test_launcher import LARGE, scale

LONG = 2_000_000  # elements that keep the emulated device busy for a while

# fault: what the caller reads; XLA's status code first
ERRORS = {
    Fault.NO_DEVICE: "UNAVAILABLE.*no Metal device was found",
    Fault.COMPILE: "(?s)FAILED_PRECONDITION.*plan scale: Metal could not compile its library: .*report it, with what",
    Fault.FUNCTION: "FAILED_PRECONDITION.*plan scale, kernel scale_it: Metal could not make the function: .*report it",
    Fault.PIPELINE: "FAILED_PRECONDITION.*plan scale, kernel scale_it: Metal could not make the pipeline: .*report it",
    Fault.BUFFER: "RESOURCE_EXHAUSTED.*Metal gave no buffer of 4000 bytes: let arrays go",
    Fault.QUEUE: "UNAVAILABLE.*the Metal device gave no command queue: start the process again",
    Fault.COMMAND_BUFFER: "INTERNAL.*plan scale: the Metal queue gave no command buffer. Please report it",
    Fault.ENCODER: "INTERNAL.*plan scale: the Metal command buffer gave no encoder. Please report it",
    Fault.GPU: "INTERNAL.*plan scale: the GPU stopped: .*PageFault.*Please report it, with what",
    Fault.HANG: "DEADLINE_EXCEEDED.*plan scale: the GPU stopped: .*ErrorHang.*COMMAND_BUFFER_MS to less than 100",
    Fault.TIMEOUT: "DEADLINE_EXCEEDED.*plan scale: the GPU stopped: .*Timeout.*COMMAND_BUFFER_MS to less than 100",
    Fault.INTERACTIVITY: "DEADLINE_EXCEEDED.*plan scale: the GPU stopped: .*Impacting.*drawing the screen: set JAX_MFA",
    Fault.UNNAMED: r"DEADLINE_EXCEEDED.*: Internal Error \(0000000e:Internal Error\)\. .*drawing the screen: set",
    Fault.REMOVED: "UNAVAILABLE.*plan scale: the GPU stopped: .*removed.*start the process again",
    Fault.IGNORED: "UNAVAILABLE.*plan scale: the GPU stopped: .*Ignored.*takes no more GPU work from this process",
    Fault.OUT_OF_MEMORY: "RESOURCE_EXHAUSTED.*plan scale: the GPU stopped: .*Insufficient Memory.*divide the batch",
}


def test_every_fault_is_documented() -> None:
    no_errors = {Fault.BUFFER_NO_COPY, Fault.VICTIM, Fault.ARCHIVE, Fault.ARCHIVE_ADD, Fault.ARCHIVE_WRITE}
    assert {*ERRORS} == {*Fault} - no_errors


@pytest.mark.parametrize("fault", ERRORS, ids=lambda fault: fault.name.lower())
def test_fault_gives_its_error_and_the_next_call_works(
    fault: Fault, native: types.ModuleType, metal: device.Control
) -> None:
    x = jnp.arange(1000, dtype=jnp.float32)
    run = jax.jit(lambda x: scale(1000)(x)[0] + 1)
    ways = 2 if fault == Fault.NO_DEVICE else 1  # of asking for it
    with metal.fault(fault, times=ways):
        with pytest.raises(Exception, match=ERRORS[fault]):
            jax.block_until_ready(run(x))
        assert metal.hits(fault) == ways
    assert native.statistics()["failures"] == 1
    np.testing.assert_array_equal(run(x), 3 * np.arange(1000, dtype=np.float32) + 1)
    assert native.statistics()["failures"] == 1


@pytest.mark.parametrize("n", [1000, LARGE])
@pytest.mark.parametrize("fault", [Fault.GPU, Fault.TIMEOUT, Fault.OUT_OF_MEMORY, Fault.ENCODER])
def test_fault_of_one_caller_leaves_the_others_alone(
    fault: Fault, n: int, native: types.ModuleType, metal: device.Control
) -> None:
    callers, rounds = 4, 8
    runs = [jax.jit(lambda x, factor=factor: scale(n, factor)(x)[0]) for factor in range(1, callers + 1)]
    x = jnp.arange(n, dtype=jnp.float32)
    for run in runs:
        run(x).block_until_ready()
    failed: list[str] = []
    wrong: list[int] = []

    def caller(factor: int) -> None:
        for _ in range(rounds):
            try:
                out = np.asarray(runs[factor - 1](x))
            except Exception as error:
                failed.append(str(error))
                continue
            if not np.array_equal(out, factor * np.arange(n, dtype=np.float32)):
                wrong.append(factor)

    with metal.fault(fault, times=3, skip=5):
        threads = [threading.Thread(target=caller, args=(factor,)) for factor in range(1, callers + 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(failed) == 3 and wrong == []
    assert native.statistics()["failures"] == 3


@pytest.mark.share(4)
@pytest.mark.parametrize("n", [1000, LARGE])
@pytest.mark.parametrize("fault", [Fault.GPU, Fault.HANG, Fault.UNNAMED], ids=lambda fault: fault.name.lower())
def test_work_that_a_fault_of_another_takes_along_is_done_again(
    fault: Fault, n: int, native: types.ModuleType, metal: device.Control
) -> None:
    long, callers = jax.jit(lambda x: scale(LONG)(x)[0]), 5
    runs = [jax.jit(lambda x, factor=factor: scale(n, factor)(x)[0]) for factor in range(1, callers + 1)]
    x = jnp.arange(n, dtype=jnp.float32)
    jax.block_until_ready([long(jnp.ones(LONG)), *(run(x) for run in runs)])
    native.reset()
    jax.block_until_ready([long(jnp.ones(LONG)), *(run(x) for run in runs)])
    before = native.statistics()["command_buffers"]
    outs: dict[int, np.ndarray | str] = {}

    def caller(factor: int) -> None:
        try:
            outs[factor] = np.asarray(runs[factor - 1](x))
        except Exception as error:
            outs[factor] = str(error)

    with metal.option(Option.VICTIMS, 1), metal.fault(fault, times=1, skip=1):
        threads = [threading.Thread(target=lambda: jax.block_until_ready(long(jnp.ones(LONG))))]
        threads += [threading.Thread(target=caller, args=(factor,)) for factor in range(1, callers + 1)]
        for thread in threads:
            thread.start()
            while native.statistics()["command_buffers"] == before:  # the long one first
                time.sleep(1e-3)
        for thread in threads:
            thread.join()
    failed = [out for out in outs.values() if isinstance(out, str)]
    assert len(failed) == 1 and "the GPU stopped" in failed[0]
    for factor, out in outs.items():
        if not isinstance(out, str):
            np.testing.assert_array_equal(out, factor * np.arange(n, dtype=np.float32))
    seen = native.statistics()
    assert 0 < seen["retries"] < callers and seen["failures"] == 1 and seen["in_flight"] == 0


def test_callers_do_not_notice_that_their_work_was_lost(native: types.ModuleType, metal: device.Control) -> None:
    run = jax.jit(lambda x: scale(LARGE)(scale(LARGE)(x)[0])[0])
    x = jnp.arange(LARGE, dtype=jnp.float32)
    expected = 9 * np.arange(LARGE, dtype=np.float32)
    with metal.fault(Fault.VICTIM, times=3):
        np.testing.assert_array_equal(run(x), expected)
    assert (native.statistics()["retries"], native.statistics()["failures"]) == (3, 0)
    with (
        metal.fault(Fault.VICTIM),
        pytest.raises(Exception, match=r"ABORTED.*victim of GPU error.*run it again, or look for"),
    ):
        jax.block_until_ready(run(x))
    assert (native.statistics()["retries"], native.statistics()["failures"]) == (6, 1)
    # a call that fails while it is done again fails for its own reason
    with metal.fault(Fault.VICTIM, times=1), metal.fault(Fault.OUT_OF_MEMORY, times=1, skip=0):
        with pytest.raises(Exception, match=r"RESOURCE_EXHAUSTED.*Insufficient Memory|ABORTED"):
            jax.block_until_ready(run(x))
            jax.block_until_ready(run(x))
    metal.clear_faults()
    with metal.fault(Fault.VICTIM, times=1), metal.fault(Fault.COMMAND_BUFFER, times=1, skip=1):
        with pytest.raises(Exception, match=r"INTERNAL.*gave no command buffer"):
            jax.block_until_ready(run(x))
    np.testing.assert_array_equal(run(x), expected)


def test_work_in_place_is_not_done_twice(native: types.ModuleType, metal: device.Control) -> None:
    program = scale(LARGE)
    call = ffi.ffi_call(TARGET, program.results(), input_output_aliases={0: 0})
    run = jax.jit(lambda x: call(x, plan=program.text())[0], donate_argnums=0)
    with metal.fault(Fault.VICTIM, times=1), pytest.raises(Exception, match=r"ABORTED.*victim"):
        jax.block_until_ready(run(jnp.ones(LARGE)))
    assert native.statistics()["retries"] == 0
    np.testing.assert_array_equal(run(jnp.ones(LARGE)), np.full(LARGE, 3, np.float32))


def test_memory_limit_is_an_error_and_no_crash(native: types.ModuleType, metal: device.Control) -> None:
    run = jax.jit(lambda x: scale(LARGE)(x)[0])
    x = jnp.ones(LARGE, jnp.float32)
    with metal.option(Option.MEMORY_LIMIT, 100_000):
        with pytest.raises(Exception, match=r"RESOURCE_EXHAUSTED.*gave no buffer of 200000 bytes"):
            run(x).block_until_ready()
    assert run(x)[0] == 3


OVERRUN = """
#include <metal_stdlib>
kernel void overrun(device const float* x [[buffer(0)]], device float* out [[buffer(1)]], constant int& n [[buffer(2)]],
                    uint i [[thread_position_in_grid]]) { if (int(i) < n) out[i] = x[0]; }
"""


@pytest.mark.parametrize("n", [100, LARGE])
@pytest.mark.parametrize("excess", [-1, 1])
def test_kernels_are_held_to_their_range_by_either_route(
    n: int, excess: int, native: types.ModuleType, metal: device.Control
) -> None:
    program = Program("overrun", OVERRUN)
    program.buffer("x", "input", "float32", [1]).buffer("out", "output", "float32", [n])
    program.dispatch("overrun", [-(-(n + 1) // 64), 1, 1], ["x", "out"], [n + excess])
    with metal.option(Option.QUIET, 1):
        try:
            jax.block_until_ready(jax.jit(program)(jnp.ones(1, jnp.float32)))
        except Exception as error:
            assert "the GPU stopped" in str(error)
        metal.wait_idle()
    classes = {report["class"] for report in metal.checker()["reports"]}
    assert classes == {"out of bounds" if excess > 0 else "unwritten output"}
