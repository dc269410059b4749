"""Callers at the same time, callers that wait for each other, forked children, and a process that ends while calls
are in flight."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulator import device
from emulator.device import Option
from test_launcher import LARGE, SMALL, scale, two_dispatches

TESTS = pathlib.Path(__file__).resolve().parents[1]


def together(work: list) -> None:
    """Runs the functions on threads of their own; the first exception is raised here."""
    raised: list[BaseException] = []

    def guarded(function) -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    if raised:
        raise raised[0]


def test_threads_share_programs(native: types.ModuleType, metal: device.Control) -> None:
    programs = [jax.jit(lambda x, n=n: scale(n)(x)[0] - x) for n in (SMALL, LARGE)]
    xs = [jnp.arange(n, dtype=jnp.float32) for n in (SMALL, LARGE)]
    sums = jax.jit(two_dispatches(40))

    def work() -> None:
        for _ in range(5):
            for program, x in zip(programs, xs):
                np.testing.assert_array_equal(program(x), 2 * np.asarray(x))
            assert sums(jnp.ones((40, 64), jnp.float32))[1] == 40 * 64

    together([work] * 4)
    seen = native.statistics()
    assert (seen["calls"], seen["failures"]) == (60, 0)
    assert (seen["plans"], seen["pipelines"], seen["libraries"]) == (3, 3, 2)


def test_pipeline_is_compiled_once_for_callers_at_the_same_time(
    native: types.ModuleType, metal: device.Control
) -> None:
    text = scale(77, factor=11).text()
    together([lambda: native.prepare(text)] * 6)
    seen = native.statistics()
    assert (seen["plans"], seen["pipelines"], seen["libraries"]) == (1, 1, 1)


def test_many_calls_in_flight(native: types.ModuleType, metal: device.Control) -> None:
    programs = [scale(64, factor=factor) for factor in range(1, 41)]
    run = jax.jit(lambda x: [program(x)[0] for program in programs])
    with metal.option(Option.HANDLER_DELAY_US, 5000):
        for factor, out in enumerate(run(jnp.ones(64, jnp.float32)), 1):
            assert out[0] == factor


@pytest.mark.skipif(len(jax.devices("cpu")) < 4, reason="needs four CPU devices")
def test_devices_that_wait_for_each_other_between_calls(native: types.ModuleType, metal: device.Control) -> None:
    # a collective waits for every device inside the completion of its last call, so no completion may wait for another;
    # queues report completions in order, and all calls share one
    if not hasattr(jax, "shard_map"):
        from jax.experimental.shard_map import shard_map
    else:
        shard_map = jax.shard_map
    mesh = jax.make_mesh((4,), ("device",), devices=jax.devices("cpu")[:4])
    spec = jax.sharding.PartitionSpec("device")

    def step(x: jax.Array) -> jax.Array:
        for factor in range(1, 6):
            x = scale(16, factor)(x)[0]
            x = x + jax.lax.psum(x, "device")
        return x

    run = jax.jit(shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec, **_unchecked(shard_map)))
    x = np.arange(64, dtype=np.float32).reshape(4, 16) % 7
    expected = x
    for factor in range(1, 6):
        expected = factor * expected
        expected = expected + expected.sum(0)
    with metal.option(Option.HANDLER_DELAY_US, 1000):
        split = jax.device_put(x.reshape(64), jax.sharding.NamedSharding(mesh, spec))
        np.testing.assert_array_equal(run(split), expected.reshape(64))


def _unchecked(shard_map) -> dict[str, bool]:
    import inspect

    names = inspect.signature(shard_map).parameters
    return {"check_vma" if "check_vma" in names else "check_rep": False}


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads by the files of the system")
def test_threads_grow_with_callers_that_wait_and_not_with_calls(
    native: types.ModuleType, metal: device.Control
) -> None:
    run = jax.jit(lambda x: scale(64, 2)(scale(64)(x)[0])[0])
    x = jnp.ones(64, jnp.float32)

    def threads_after(calls: int) -> int:
        for _ in range(calls):
            run(x).block_until_ready()
        return len(os.listdir("/proc/self/task"))

    before = threads_after(50)
    assert threads_after(500) <= before + 3


def test_reset_leaves_calls_in_flight_alone(native: types.ModuleType, metal: device.Control) -> None:
    run = jax.jit(lambda x: scale(LARGE)(x)[0])
    x = jnp.ones(LARGE, jnp.float32)
    with metal.option(Option.HANDLER_DELAY_US, 20_000):
        outs = [run(x)]
        native.reset()
        outs.append(run(x))
        native.reset()
        assert all(out[0] == 3 for out in outs)


PROGRAM = """
import os, sys
sys.path[:0] = [{tests!r}, {tests!r} + "/metal"]
import jax, jax.numpy as jnp
from emulator import device
from launcher import register
from test_launcher import scale
native, metal = register(), device.load()
run = jax.jit(lambda x: scale(1000)(x)[0])
x = jnp.ones(1000, jnp.float32)
assert run(x)[0] == 3
"""


def in_new_process(body: str) -> subprocess.CompletedProcess[str]:
    code = PROGRAM.format(tests=str(TESTS)) + body
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ})


FORK = """
import threading, warnings
warnings.simplefilter("ignore")
child = os.fork()
if child == 0:
    code = 1
    try:
        for ask in (native.device, native.reset, lambda: native.prepare(scale(7).text())):
            try:
                ask()
            except RuntimeError as error:
                assert "forked" in str(error), error
            else:
                os._exit(2)
        native.statistics()
        code = 0
    finally:
        os._exit(code)
assert os.waitpid(child, 0)[1] == 0
assert run(x)[0] == 3  # the parent goes on
"""


def test_forked_child_is_told_and_does_not_hang(native: types.ModuleType) -> None:
    done = in_new_process(FORK)
    assert done.returncode == 0, done.stderr


FORK_CALL = """
child = os.fork()
if child == 0:
    try:
        run(x).block_until_ready()
    except Exception as error:
        os._exit(0 if "forked" in str(error) else 3)
    os._exit(2)
assert os.waitpid(child, 0)[1] == 0
"""


def test_call_in_a_forked_child_is_an_error(native: types.ModuleType) -> None:
    done = in_new_process(FORK_CALL)
    assert done.returncode == 0, done.stderr


END = """
metal.set(device.Option.HANDLER_DELAY_US, {delay})
big = jax.jit(lambda x: scale(100000)(x)[0])
outs = [big(jnp.ones(100000, jnp.float32)), run(x)]
print("in flight", flush=True)
"""


@pytest.mark.share(16)
@pytest.mark.parametrize("delay", [0, 50_000, 500_000])
@pytest.mark.parametrize("end", ["", "sys.exit(0)", "del outs"])
def test_process_may_end_while_calls_are_in_flight(delay: int, end: str, native: types.ModuleType) -> None:
    done = in_new_process(END.format(delay=delay) + end)
    assert (done.returncode, done.stdout) == (0, "in flight\n"), done.stderr
