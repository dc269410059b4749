"""What a launch costs is counted: barriers where a dispatch meets what another wrote and nowhere else, and one
compilation for each kernel, however many plans, lengths and steps it serves."""

from __future__ import annotations

import types
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulator import device
from emulator.device import Option
from launcher import Program
from test_launcher import SCALE, instantiate, two_dispatches

import jax_mfa
from jax_mfa.metal import runtime
from jax_mfa.metal.plan import Plan

N = 64


def scales(*steps: tuple[str, str]) -> Program:
    """`x` and the buffers that the steps, pairs of names, scale by 2 in order."""
    program = Program("scales", SCALE, instantiate("scale_it", "float"))
    program.buffer("x", "input", "float32", [N])
    written = {"x"}
    for source, target in steps:
        if target not in written:
            program.buffer(target, "output", "float32", [N])
        constants = [("int", 2), ("bool", False), ("float", 0.0)]
        program.dispatch("scale_it", [1, 1, 1], [source, target], [N], constants, reads=[source])
        written.add(target)
    return program


@pytest.mark.parametrize(
    "steps, barriers",
    [
        ([("x", "a")], 0),
        ([("x", "a"), ("x", "b"), ("x", "c")], 0),
        ([("x", "a"), ("a", "b")], 1),  # reads what was written
        ([("x", "a"), ("x", "b"), ("a", "c"), ("b", "d")], 1),  # one barrier serves both
        ([("x", "a"), ("a", "b"), ("b", "c")], 2),
        ([("x", "a"), ("x", "a")], 1),  # writes what was written
        ([("x", "a"), ("a", "b"), ("x", "a")], 2),  # writes what was read
    ],
)
def test_barriers_stand_where_dispatches_meet(
    steps: list[tuple[str, str]], barriers: int, native: types.ModuleType, metal: device.Control
) -> None:
    outs = jax.jit(scales(*steps))(jnp.ones(N))
    factors = {"x": 1}
    for source, target in steps:
        factors[target] = 2 * factors[source]
    del factors["x"]
    for out, factor in zip(outs, factors.values()):
        np.testing.assert_array_equal(out, np.full(N, factor))
    seen = native.statistics()
    assert (seen["barriers"], seen["command_buffers"], seen["dispatches"]) == (barriers, 1, len(steps))


def test_a_plan_that_hides_a_write_is_found_out(native: types.ModuleType, metal: device.Control) -> None:
    program = scales(("x", "a"), ("a", "b"))
    program.body["dispatches"][0]["arguments"][1]["written"] = False
    with metal.option(Option.QUIET, 1):
        jax.block_until_ready(jax.jit(program)(jnp.ones(N)))
        metal.wait_idle()
        assert [report["kind"] for report in metal.reports()] == ["concurrent-hazard"]


def test_an_input_is_never_written(native: types.ModuleType, metal: device.Control) -> None:
    program = scales(("x", "a"))
    program.body["dispatches"][0]["arguments"][0]["written"] = True
    with pytest.raises(RuntimeError, match="written is true of an input"):
        native.prepare(program.text())


def test_a_plan_that_says_nothing_gets_its_barriers(native: types.ModuleType, metal: device.Control) -> None:
    _, out = jax.jit(two_dispatches(3))(jnp.ones((3, 64)))
    assert out == 3 * 64 and native.statistics()["barriers"] == 1


# --- attention ------------------------------------------------------------------------------------------------------


@pytest.fixture
def planned(on_device: device.Control, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Plan]]:
    """The plans that the package makes within a test."""
    plans: list[Plan] = []
    failure = runtime.failure

    def remember(plan: Plan) -> str:
        plans.append(plan)
        return failure(plan)

    monkeypatch.setattr(runtime, "failure", remember)
    yield plans


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(3).standard_normal(shape), jnp.float32)


def attend(*operands: jax.Array, **keywords) -> jax.Array:
    return jax_mfa.dot_product_attention(*operands, implementation="metal", **keywords)


def distinct(plans: list[Plan]) -> tuple[int, int]:
    """Kernels by their instantiation, and by what else specialises them."""
    kernels = [d.kernel for plan in plans for d in plan.dispatches]
    return len({k.instantiation for k in kernels}), len({(k.instantiation, k.constants) for k in kernels})


def compiled(native: types.ModuleType) -> tuple[int, int]:
    seen = native.statistics()
    return seen["libraries"], seen["pipelines"]


def test_gradients_of_queries_and_of_keys_run_side_by_side(planned: list[Plan], native: types.ModuleType) -> None:
    x = draw(1, 40, 2, 16)
    jax.block_until_ready(jax.jit(jax.grad(lambda *o: attend(*o).sum(), (0, 1, 2)))(x, x, x))
    assert [len(plan.dispatches) for plan in planned] == [1, 3]
    # after the row sums, which both read
    assert native.statistics()["barriers"] == 1


def test_a_training_step_compiles_each_kernel_once(planned: list[Plan], native: types.ModuleType) -> None:
    x = draw(1, 40, 2, 16)

    def loss(x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = attend(x, x, x, is_causal=True)
        return attend(x, x, x).sum()  # another mask: other constants, the same libraries

    jax.block_until_ready(jax.jit(jax.value_and_grad(loss))(x))
    frozen = jax.grad(lambda query: attend(query, x, x, is_causal=True).sum())  # another plan of the same kernels
    jax.block_until_ready(jax.jit(frozen)(x))
    assert compiled(native) == distinct(planned)
    before = compiled(native)
    for _ in range(3):
        x = x - 0.1 * jax.jit(jax.grad(loss))(x)
    jax.block_until_ready(x)
    assert compiled(native) == before


def test_a_decode_loop_compiles_each_kernel_once(planned: list[Plan], native: types.ModuleType) -> None:
    keys = draw(1, 600, 2, 16)
    step = jax.jit(lambda query, length: attend(query, keys, keys, key_value_seq_lengths=length))
    for length in range(500, 510):
        jax.block_until_ready(step(keys[:, length : length + 1], jnp.asarray([length])))
    assert compiled(native) == distinct(planned) == (2, 2)


def test_lengths_are_not_compiled_in(planned: list[Plan], native: types.ModuleType) -> None:
    for length in range(33, 33 + 20 * 7, 7):
        x = draw(1, length, 2, 16)
        jax.jit(jax.grad(lambda x: attend(x, x, x).sum())).lower(x)  # lowering compiles the kernels
    assert native.statistics()["plans"] == 40
    # forward, row sums, dQ, dK and dV
    assert compiled(native) == distinct(planned) == (4, 4)
