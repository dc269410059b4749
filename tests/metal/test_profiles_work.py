"""Attention on a machine that kills long command buffers: its work is known beforehand, and no buffer has much of
it."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import plans
import pytest
from emulator import device
from emulator.device import Option
from harness import assert_allclose

import jax_mfa
from jax_mfa.metal import runtime

PASSES = ("forward", "backward")


@pytest.mark.parametrize("variant", ["staged", "direct", "portable"])
@pytest.mark.parametrize("of_pass", PASSES)
@pytest.mark.parametrize("profile", ["m1", "m3", "m5", "paravirtual"])
def test_no_command_buffer_of_a_long_sequence_is_long(profile: str, of_pass: str, variant: str, native, metal) -> None:
    plan = plans.Problem(T=32768, S=32768, H=128, B=1, N=32, K=32, dtype="float16", variant=variant).plan(of_pass)
    with metal.profile(profile):
        native.reset()
        buffers = native.split(plan.json)
        rate = metal.get(Option.RATE)
    native.reset()
    # the portable kernels' work is counted in that of the matrix unit, which this device gives them at no less a rate
    seconds = [sum(piece["multiply_accumulates"] for piece in pieces) / rate for pieces in buffers]
    assert len(buffers) > 50 and max(seconds) < 0.25
    counted = sum(d.multiply_accumulates for d in plan.dispatches)
    assert sum(seconds) * rate == pytest.approx(counted, rel=1e-6)


MASKS: dict[str, dict] = {"dense": {}, "causal": {"is_causal": True}, "window": {"local_window_size": (64, 0)}}
# staged and dense of every size, all else of the least and the largest; sweeps have them all
ESTIMATED = [
    pytest.param(
        variant,
        h,
        MASKS[mask],
        id=f"{mask}-{h}-{variant}",
        marks=() if h in (64, 320) or (mask, variant) == ("dense", "staged") else pytest.mark.sweep,
    )
    for mask in MASKS
    for h in (64, 128, 256, 320)
    for variant in ("staged", "direct")
]


@pytest.mark.share(16)
@pytest.mark.parametrize("variant,h,options", ESTIMATED)
def test_estimates_are_bounds(variant: str, h: int, options: dict, metal: device.Control) -> None:
    problem = plans.Problem(T=256, S=256, H=h, B=1, N=2, K=1, dtype="float16", variant=variant, **options)
    counted = plans.evaluate(problem).counters
    for of_pass in PASSES:
        for dispatch in problem.plan(of_pass).dispatches:
            name = dispatch.kernel.template[0]
            done = 512 * counted[name].matrix_multiply_accumulates
            # a tile at the edge of a window is computed whole
            slack = 2.5 if "local_window_size" in options else 1.0
            assert done <= slack * dispatch.multiply_accumulates, name
            if not options and done:
                assert done >= 0.6 * dispatch.multiply_accumulates, name


SLOWER = 1e6
EXPECTED: dict[str, tuple[jax.Array, ...]] = {}  # of the reference, by problem


@pytest.fixture(params=["staged", "direct", "portable"])
def slow_m1(request, on_device: device.Control, native, monkeypatch: pytest.MonkeyPatch) -> Iterator[device.Control]:
    """An M1 that is slower by a factor, with a launcher that is told so."""
    with on_device.profile("m1"), runtime.variant(request.param):
        on_device.set(Option.RATE, int(on_device.get(Option.RATE) / SLOWER))
        monkeypatch.setenv("JAX_MFA_COMMAND_BUFFER_MS", str(100 / SLOWER))
        native.reset()
        runtime._prepare.cache_clear()
        yield on_device
    native.reset()


@pytest.mark.share(16)
@pytest.mark.parametrize(
    "problem",
    [
        {"is_causal": True},
        {"local_window_size": (20, 30)},
        {"query_seq_lengths": np.array([65, 3]), "key_value_seq_lengths": np.array([70, 90])},
        {"mask": True},
        {"bias": True},
    ],
    ids=lambda problem: "_".join(problem),
)
def test_attention_in_parts_is_the_same(problem: dict, slow_m1: device.Control, native) -> None:
    rng = np.random.default_rng(5)
    b, t, s, n, k, h = 2, 65, 90, 4, 2, 16
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    query, key, value, d_out = draw(b, t, n, h), draw(b, s, k, h), draw(b, s, k, h), draw(b, t, n, h)
    keywords = dict(problem)
    if "mask" in keywords:
        keywords["mask"] = jnp.asarray(rng.random((1, n, t, s)) < 0.5)
    wanted = (query, key, value)
    if "bias" in keywords:
        wanted, keywords = (*wanted, draw(1, n, t, s)), {}

    def run(implementation, d_out, *wanted):
        def attend(query, key, value, *bias):
            more = {**keywords, **({"bias": bias[0]} if bias else {})}
            return jax_mfa.dot_product_attention(query, key, value, implementation=implementation, **more)

        out, pullback = jax.vjp(attend, *wanted)
        return out, *pullback(d_out)

    run = jax.jit(run, static_argnums=0)
    name = "_".join(problem)
    if name not in EXPECTED:  # the same for each variant
        EXPECTED[name] = run("reference", d_out, *wanted)
    got = run("metal", d_out, *wanted)
    for x, y in zip(got, EXPECTED[name], strict=True):
        assert_allclose(x, y, rtol=2e-5, atol=2e-5)
    seen = native.statistics()
    assert seen["command_buffers"] > 8 and seen["failures"] == 0
    assert seen["dispatches"] > seen["command_buffers"] / 2


def test_decoding_in_parts_is_the_same(slow_m1: device.Control, native) -> None:
    rng = np.random.default_rng(6)
    query, key = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((2, 1, 4, 16), (2, 1500, 2, 16)))
    run = lambda name: jax.jit(lambda: jax_mfa.dot_product_attention(query, key, key, implementation=name))()
    assert_allclose(run("metal"), run("reference"), rtol=2e-5, atol=2e-5)
    assert native.statistics()["command_buffers"] > 2
