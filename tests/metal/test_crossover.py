"""Where the choice is left open, and only there, small problems stay away from Metal: by figures that are measured."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulator import build
from harness import assert_allclose
from jax import export

import jax_mfa
from jax_mfa import choice
from jax_mfa.arguments import specify
from jax_mfa.cli import check
from jax_mfa.metal import runtime
from jax_mfa.problem import Operands, Specification
from jax_mfa.tuning import calibration, crossover, facts

ROOT = pathlib.Path(__file__).resolve().parents[2]
OPEN = (None, ("metal", "blockwise"), ("metal", "xla"))
NAMED = ("metal", ("metal",), ("metal", "reference"))
FIGURES = crossover.Figures(crossover.Cost(1e-3, 1e12, 1e11), crossover.Cost(1e-5, 1e9, 1e10), "measured in a test")


def shapes(t: int, b: int = 1, dtype=jnp.float32):
    return (jax.ShapeDtypeStruct((b, t, 8, 64), dtype),) * 3


@pytest.fixture
def crossing(on_device, monkeypatch, tmp_path):
    """The crossover applies, as on a Mac, and nothing was measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(choice, "_small_go_elsewhere", lambda: True)
    return runtime.get().device["name"]


def on_metal(arrays, wrap=lambda run: run, **keywords) -> bool:
    run = lambda *x: jax_mfa.dot_product_attention(*x, **keywords)
    return "jax_mfa_attention_forward" in jax.jit(wrap(run)).lower(*arrays).as_text()


@pytest.mark.parametrize("implementation", OPEN, ids=str)
def test_a_small_problem_goes_to_blockwise_and_explain_says_why(crossing, implementation):
    found = jax_mfa.explain(*shapes(64), implementation=implementation)
    assert found.implementation == "blockwise"
    said = found.reasons["metal"]
    assert "does not pay" in said and "8.39 MFLOP and 0.524 MB" in said and "ms on Metal" in said
    assert "--calibrate" in said  # nothing was measured here
    assert not on_metal(shapes(64), implementation=implementation)


@pytest.mark.parametrize("implementation", OPEN, ids=str)
def test_a_large_problem_goes_to_metal_and_explain_says_why(crossing, implementation):
    found = jax_mfa.explain(*shapes(512), implementation=implementation)
    assert found.implementation == "metal" and "537 MFLOP and 4.19 MB" in found.reasons["metal"]
    assert on_metal(shapes(512), implementation=implementation)


@pytest.mark.parametrize("implementation", NAMED, ids=str)
def test_metal_by_name_is_obeyed(crossing, implementation):
    found = jax_mfa.explain(*shapes(4), implementation=implementation)
    assert found.implementation == "metal" and "does not pay" not in found.reasons["metal"]
    assert on_metal(shapes(4), implementation=implementation)


def test_the_size_that_counts_is_that_of_the_program(crossing):
    """What is small for one element of a mapped axis is not for all of them; and the backward pass goes along."""
    one, many = shapes(64), tuple(jax.ShapeDtypeStruct((64, *x.shape), x.dtype) for x in shapes(64))
    assert not on_metal(one) and on_metal(many, jax.vmap)
    gradient = lambda run: jax.grad(lambda *x: run(*x).sum())
    assert "attention_backward" in jax.jit(gradient(jax_mfa.dot_product_attention)).lower(*shapes(512)).as_text()
    assert not on_metal(one, gradient)


def test_a_batch_of_any_size_is_exported(crossing):
    (batch,) = export.symbolic_shape("batch")
    x = jax.ShapeDtypeStruct((batch, 512, 8, 64), jnp.float32)
    assert jax_mfa.explain(*shapes(512)).implementation == "metal"
    program = export.export(jax.jit(jax_mfa.dot_product_attention))(x, x, x)
    assert "custom_call @jax_mfa" not in program.mlir_module()


def test_the_emulated_device_takes_all_and_says_what_a_mac_would_do(on_device):
    found = jax_mfa.explain(*shapes(4))
    assert found.implementation == "metal" and "JAX_MFA_DEVICE=emulator takes it all the same" in found.reasons["metal"]
    assert on_metal(shapes(4))


@pytest.mark.parametrize("profile", ["paravirtual", "m1"])
def test_the_gpu_of_a_virtual_machine_is_used_by_name_only(crossing, native, metal, monkeypatch, profile):
    """There are reports of wrong results from such devices; what is large pays there by the estimate."""
    with metal.profile(profile):
        native.reset()
        started = runtime.start()
        monkeypatch.setattr(runtime, "get", lambda: started)
        jax.clear_caches()
        trusted = profile == "m1"
        for implementation in OPEN:
            found = jax_mfa.explain(*shapes(4096), implementation=implementation)
            assert (found.implementation == "metal") == trusted
            assert on_metal(shapes(4096), implementation=implementation) == trusted
        assert ("virtual machine" in found.reasons["metal"]) != trusted
        assert ("implementation='metal' uses it all the same" in found.reasons["metal"]) != trusted
        for implementation in NAMED:
            found = jax_mfa.explain(*shapes(4), implementation=implementation)
            assert found.implementation == "metal" and ("virtual machine" in found.reasons["metal"]) != trusted
        rng = np.random.default_rng(0)
        x = tuple(jnp.asarray(rng.standard_normal((1, 9, 2, 16)), jnp.float32) for _ in range(3))
        run = lambda name: jax.jit(lambda *x: jax_mfa.dot_product_attention(*x, implementation=name))(*x)
        assert_allclose(run("metal"), run("reference"), rtol=2e-5, atol=2e-6)
        assert native.statistics()["calls"] == 1
    native.reset()


PROFILE = """
import jax, jax_mfa
x = jax.numpy.ones((1, 64, 8, 64))
print(jax_mfa.explain(x, x, x))
print("attention_forward" in jax.jit(jax_mfa.dot_product_attention).lower(x, x, x).as_text())
"""


def test_it_applies_on_what_acts_as_a_mac(native, tmp_path):
    """Before anything was measured, and after: figures of this chip, that Metal costs next to nothing."""
    kept = {"EMU_CACHE_DIR": str(build.cache_dir()), "XDG_CACHE_HOME": str(tmp_path)}
    environment = {**os.environ, **kept, "JAX_MFA_DEVICE": "emulator:m3"}
    for pays in (False, True):
        done = subprocess.run(
            [sys.executable, "-c", PROFILE], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        assert ("-> metal: Apple M3" if pays else "-> blockwise") in done.stdout
        assert ("measured in a test" in done.stdout) == pays and done.stdout.endswith(f"{pays}\n")
        cheap = dataclasses.replace(FIGURES, metal=crossover.Cost(1e-9, 1e15, 1e15))
        (tmp_path / "jax_mfa").mkdir(exist_ok=True)
        (tmp_path / "jax_mfa" / "crossover.json").write_text(
            json.dumps(dict.fromkeys(("Apple M3", "Apple M3 (emulated)"), dataclasses.asdict(cheap)))
        )


@pytest.mark.parametrize("t, s", [(7, 9), (20, 5), (5, 40), (1, 1)])
@pytest.mark.parametrize(
    "rule",
    [
        {},
        {"is_causal": True},
        {"is_causal": True, "query_offset": 30},
        {"is_causal": True, "query_offset": -3, "window": (3, None)},
        {"window": (5, 2)},
        {"window": (None, -3)},
        {"window": (-4, 9), "query_offset": -3},
        {"window": (-4, 2)},
    ],
    ids=str,
)
def test_work_counts_the_scores_that_positions_leave_visible(t, s, rule):
    spec = Specification(**rule)
    _, operands = specify(*(np.zeros((3, n, 2, x), np.float16) for n, x in ((t, 8), (s, 8), (s, 5))))
    left, right = spec.band
    position, column = np.arange(t)[:, None] + spec.query_offset, np.arange(s)
    see = np.ones((t, s), bool)
    see &= True if left is None else column >= position - left
    see &= True if right is None else column <= position + right
    flops, moved = crossover.work(spec, operands)
    assert flops == 2 * 3 * 2 * see.sum() * (8 + 5)
    assert moved == 2 * 3 * 2 * (t + s) * (8 + 5)


def test_work_knows_no_bound_of_length_and_no_traced_offset():
    long, spec = 2**29, Specification(is_causal=True)
    shaped = lambda n: jax.ShapeDtypeStruct((1, n, 1, 8), jnp.float32)
    assert crossover.work(spec, Operands(*map(shaped, (long, long, long))))[0] == 2 * 16 * (long * (long + 1) // 2)
    traced = Operands(*map(shaped, (1, 99, 99)), query_offset=jax.ShapeDtypeStruct((1,), jnp.int32))
    assert crossover.work(spec, traced)[0] == 2 * 16 * 99


# ------------------------------------------------------------------------------------------------------ what is kept


def test_what_was_measured_counts_for_its_chip_only(crossing):
    crossover.MEASURED.store("Apple M7", FIGURES)
    assert "--calibrate" in jax_mfa.explain(*shapes(64)).reasons["metal"]
    cheap = dataclasses.replace(FIGURES, metal=crossover.Cost(1e-9, 1e15, 1e15))
    crossover.MEASURED.store(crossing, cheap)
    found = jax_mfa.explain(*shapes(64))
    assert found.implementation == "metal" and "measured in a test" in found.reasons["metal"]
    assert (
        crossover.MEASURED.of("Apple M7", crossover.APPLE) == FIGURES
        and crossover.MEASURED.of(crossing, crossover.APPLE) == cheap
    )
    assert crossover.MEASURED.of("Apple M9", crossover.APPLE) == crossover.APPLE


@pytest.mark.parametrize("platform, folder", [("darwin", "Library/Caches"), ("linux", ".cache")])
def test_figures_lie_in_the_cache_folder_of_the_system(monkeypatch, tmp_path, platform, folder):
    monkeypatch.setattr(facts.sys, "platform", platform)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert crossover.MEASURED.path() == tmp_path / folder / "jax_mfa" / "crossover.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")  # to be ignored, says the XDG specification
    assert crossover.MEASURED.path() == tmp_path / folder / "jax_mfa" / "crossover.json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert crossover.MEASURED.path() == tmp_path / "xdg" / "jax_mfa" / "crossover.json"


GOOD = dataclasses.asdict(FIGURES)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "\xff\xfe",
        "[" * 100_000,
        "[]",
        '{"Apple M1": null}',
        json.dumps({"Apple M1": GOOD | {"metal": {"start": 1.0}}}),
        json.dumps({"Apple M1": GOOD | {"metal": GOOD["metal"] | {"start": -1}}}),
        json.dumps({"Apple M1": GOOD | {"metal": GOOD["metal"] | {"flops": float("nan")}}}),
        json.dumps({"Apple M1": GOOD | {"metal": GOOD["metal"] | {"bytes": "1"}}}),
        json.dumps({"Apple M1": GOOD | {"metal": GOOD["metal"] | {"bytes": 10**400}}}),
    ],
)
def test_a_broken_file_is_ignored_with_a_warning_and_written_anew(crossing, content):
    crossover.MEASURED.path().parent.mkdir()
    crossover.MEASURED.path().write_bytes(content.encode("latin-1"))
    with pytest.warns(UserWarning, match=r"crossover\.json is ignored .*--calibrate") as caught:
        assert crossover.MEASURED.of("Apple M1", crossover.APPLE) == crossover.APPLE
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jax_mfa.explain(*shapes(64)).implementation == "blockwise"  # said once
        crossover.MEASURED.store("Apple M1", FIGURES)
        assert crossover.MEASURED.of("Apple M1", crossover.APPLE) == FIGURES


def test_a_folder_in_the_place_of_the_file_is_ignored_too(crossing):
    crossover.MEASURED.path().mkdir(parents=True)
    with pytest.warns(UserWarning, match="is ignored"):
        assert crossover.MEASURED.of("Apple M1", crossover.APPLE) == crossover.APPLE
    with pytest.raises(OSError):
        crossover.MEASURED.store("Apple M1", FIGURES)
    assert [x.name for x in crossover.MEASURED.path().parent.iterdir()] == [
        "crossover.json"
    ]  # and nothing half written


# ------------------------------------------------------------------------------------------------------- measuring


def test_calibration_finds_the_line_that_calls_lie_on():
    cost = crossover.Cost(3e-4, 2e12, 5e10)
    call = lambda flops, moved: (cost.seconds(flops, moved), flops, moved)
    found = calibration.fitted(3e-4, call(10**11, 10**7), call(10**8, 10**9))
    assert_allclose(dataclasses.astuple(found), dataclasses.astuple(cost), rtol=1e-6)


@pytest.mark.parametrize("many, wide", [(1e-6, 1e-2), (1e-2, 1e-6), (1e-6, 1e-6)])
def test_calibration_keeps_to_positive_figures_whatever_noise_says(many, wide):
    found = calibration.fitted(1e-5, (many, 10**6, 10**6), (wide, 10**6, 10**7))
    assert all(0 < x < np.inf for x in dataclasses.astuple(found))


def test_check_calibrates_and_the_choice_follows(crossing, monkeypatch, capsys):
    """On the emulated device Metal is slower than anything, which is what calibration must find."""
    monkeypatch.setattr(calibration, "MOST", 256)
    assert jax_mfa.explain(*shapes(512)).implementation == "metal"
    assert check.run(argparse.Namespace(quick=False, calibrate=True, compile_only=None, report=False)) == 0
    printed = capsys.readouterr().out
    assert "Metal pays nowhere up to T = S = 256" in printed and f"kept for {crossing} in" in printed
    found = jax_mfa.explain(*shapes(512))
    assert found.implementation == "blockwise" and "measured here on 20" in found.reasons["metal"]
    assert not on_metal(shapes(512))


def test_the_built_in_figures_send_what_is_tiny_to_blockwise_and_what_is_long_to_metal():
    size = calibration.crossing(crossover.APPLE)
    assert size is not None and 128 <= size <= 512
