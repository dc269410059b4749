"""What goes wrong on the device becomes the documented error (csrc/README.md) or the documented fallback: other
callers are not touched, nothing is left behind, and the next call works."""

from __future__ import annotations

import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulator import device
from emulator.device import Fault, Option
from launcher import Program
from test_launcher import LARGE, scale

# fault: what the caller reads; XLA's status code first
ERRORS = {
    Fault.NO_DEVICE: "UNAVAILABLE.*no Metal device was found",
    Fault.COMPILE: "FAILED_PRECONDITION.*plan scale: Metal could not compile its library: .*",
    Fault.FUNCTION: "FAILED_PRECONDITION.*plan scale, kernel scale_it: Metal could not make the function: ",
    Fault.PIPELINE: "FAILED_PRECONDITION.*plan scale, kernel scale_it: Metal could not make the pipeline: ",
    Fault.BUFFER: "RESOURCE_EXHAUSTED.*Metal gave no buffer of 4000 bytes",
    Fault.QUEUE: "UNAVAILABLE.*the Metal device gave no command queue",
    Fault.COMMAND_BUFFER: "INTERNAL.*plan scale: the Metal queue gave no command buffer",
    Fault.ENCODER: "INTERNAL.*plan scale: the Metal command buffer gave no encoder",
    Fault.GPU: "INTERNAL.*plan scale: the GPU stopped: .*PageFault",
    Fault.TIMEOUT: "DEADLINE_EXCEEDED.*plan scale: the GPU stopped: .*Timeout.*COMMAND_BUFFER_MS to less than 100",
    Fault.INTERACTIVITY: "DEADLINE_EXCEEDED.*plan scale: the GPU stopped: .*Impacting.*drawing the screen: set JAX_MFA",
    Fault.IGNORED: "UNAVAILABLE.*plan scale: the GPU stopped: .*Ignored.*takes no more GPU work from this process",
    Fault.OUT_OF_MEMORY: "RESOURCE_EXHAUSTED.*plan scale: the GPU stopped: .*Insufficient Memory",
}


def test_every_fault_is_documented() -> None:
    assert {*ERRORS, Fault.BUFFER_NO_COPY} == {*Fault}


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
