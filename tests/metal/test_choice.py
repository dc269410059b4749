"""Which implementation runs, and what a caller sees when the device fails: a driver never breaks a user's program."""

import contextlib
import functools
import os
import pathlib
import subprocess
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulator import device
from harness import assert_allclose, needs_emulator

import jax_mfa
from jax_mfa.metal import runtime

pytestmark = needs_emulator
ROOT = pathlib.Path(__file__).parents[2]


def problem(h: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.standard_normal((2, 9, 2, h)), jnp.float32) for _ in range(3))


def named(*args):
    return jax.jit(lambda *x: jax_mfa.dot_product_attention(*x, implementation="metal"))(*args)


@pytest.fixture
def fresh():
    """No compiled program, library or warning of an earlier test."""
    native = runtime.get().module
    jax.clear_caches()
    native.reset()
    runtime._prepare.cache_clear()
    runtime.warn_once.cache_clear()
    yield device.load()
    device.load().clear_faults()


def test_none_takes_metal_and_explain_says_so():
    x = problem(16)
    explanation = jax_mfa.explain(*x)
    assert explanation.implementation == "metal" and "emulated" in explanation.reasons["metal"]
    assert "custom_call" in jax.jit(jax_mfa.dot_product_attention).lower(*x).as_text()


@pytest.mark.parametrize(
    "families,expected",
    [(("apple4", "metal3"), "portable"), (("apple7",), "staged"), (("apple7", "apple8", "apple9"), "direct")],
)
def test_the_chip_decides_the_kernels(families, expected):
    assert runtime.Runtime(module=object(), device={"families": families}).variant == expected


def test_none_takes_blockwise_for_what_metal_lacks_and_says_why():
    x = jax.ShapeDtypeStruct((1, 8, 2, 600), jnp.float32)
    explanation = jax_mfa.explain(x, x, x)
    assert explanation.implementation == "blockwise" and "H = 600" in explanation.reasons["metal"]
    with pytest.raises(NotImplementedError, match=r"metal.*H = 600"):
        jax_mfa.explain(x, x, x, implementation="metal")
    assert "custom_call" not in jax.jit(jax_mfa.dot_product_attention).lower(x, x, x).as_text()


@pytest.mark.parametrize("how", ["the default backend", "the default device"])
def test_explain_names_blockwise_where_the_default_device_is_no_cpu(monkeypatch, how):
    x = jax.ShapeDtypeStruct((1, 8, 2, 16), jnp.float32)
    here = jax.device_put(problem(16), jax.devices("cpu")[0])  # a way that it names
    place = contextlib.nullcontext()
    if how == "the default backend":
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        with jax.default_device(jax.devices("cpu")[0]):
            assert jax_mfa.explain(x, x, x).implementation == "metal"
    else:
        place = jax.default_device("gpu")
    with place:
        explanation = jax_mfa.explain(x, x, x)
        assert explanation.implementation == "blockwise"
        assert "the arrays or the default backend are on gpu" in explanation.reasons["metal"]
        with pytest.raises(NotImplementedError, match=r"implementation='metal' .* are on gpu: for Metal kernels"):
            jax_mfa.explain(x, x, x, implementation="metal")
        assert jax_mfa.explain(x, x, x, implementation="reference").implementation == "reference"
        assert jax_mfa.explain(*here).implementation == "metal"


@pytest.mark.filterwarnings("ignore:jax_mfa")
def test_a_program_for_several_platforms_is_metal_on_cpu_and_jnp_elsewhere():
    x = jax.ShapeDtypeStruct((1, 8, 2, 16), jnp.float32)
    traced = jax.jit(jax_mfa.dot_product_attention).trace(x, x, x)
    assert "jax_mfa_attention_forward" in traced.lower(lowering_platforms=("cpu",)).as_text()
    for platform in ("cuda", "rocm", "tpu", "METAL", "mps"):
        assert "custom_call" not in traced.lower(lowering_platforms=(platform,)).as_text(), platform


def lowered_for(platforms, function=jax_mfa.dot_product_attention, h=16):
    x = jax.ShapeDtypeStruct((1, 8, 2, h), jnp.float32)
    gradient = jax.jit(jax.grad(lambda *x: function(*x).sum()))
    return gradient.trace(x, x, x).lower(lowering_platforms=platforms).as_text()


@pytest.mark.parametrize("platform", ["mtl", "metal", "mps", "METAL", "toaster"])
def test_a_plugin_of_a_mac_is_named_once_with_the_way_to_metal(fresh, platform):
    with pytest.warns(UserWarning) as said:
        assert "custom_call" not in lowered_for((platform,))
        jax.clear_caches()
        lowered_for((platform,))
    (text,) = [str(x.message) for x in said]
    assert f"compiled for JAX's platform {platform};" in text
    assert all(way in text for way in ("JAX_PLATFORMS=cpu", "jax.default_device", "jax.device_put"))


def test_platforms_without_an_apple_gpu_and_choices_by_name_are_not_warned_of(fresh):
    blockwise = functools.partial(jax_mfa.dot_product_attention, implementation="blockwise")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for platforms in (("cuda",), ("rocm",), ("tpu",), ("cpu", "cuda", "tpu")):
            lowered_for(platforms)
        lowered_for(("mtl",), blockwise)
        lowered_for(("mtl",), h=600)  # nothing for Metal


def test_a_host_without_metal_is_not_sent_there(fresh, monkeypatch):
    monkeypatch.setattr(runtime, "get", lambda: runtime.Runtime(reason=runtime.NOT_APPLE, expected=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowered_for(("xpu",))
    jax.clear_caches()
    monkeypatch.setattr(runtime, "get", lambda: runtime.Runtime(reason="cannot be loaded"))
    with pytest.warns(UserWarning, match="Metal cannot be used.*: cannot be loaded$"):
        lowered_for(("mtl",))


@pytest.mark.parametrize("platform", ["mtl", "toaster"])
def test_metal_named_for_a_plugin_is_an_error_that_names_it(platform):
    metal = functools.partial(jax_mfa.dot_product_attention, implementation="metal")
    with pytest.raises(NotImplementedError, match=rf"'metal' .* compiled for {platform}: .*JAX_PLATFORMS=cpu"):
        lowered_for((platform,), metal)


@pytest.mark.parametrize("fault", [device.Fault.COMPILE, device.Fault.FUNCTION, device.Fault.PIPELINE], ids=str)
def test_kernels_that_do_not_compile_warn_once_and_fall_back(fresh, fault):
    x = problem(11)
    wanted = jax_mfa.dot_product_attention(*x, implementation="blockwise")
    with fresh.fault(fault):
        with pytest.warns(UserWarning, match="Metal cannot be used"):
            out = jax.jit(jax_mfa.dot_product_attention)(*x)
        assert_allclose(out, wanted, atol=1e-6)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            jax.clear_caches()
            jax.jit(jax_mfa.dot_product_attention)(*x)
        with pytest.raises(RuntimeError, match="implementation='metal'"):
            named(*x)
    assert_allclose(named(*x), wanted, atol=1e-6)


@pytest.mark.parametrize("fault", [device.Fault.GPU, device.Fault.TIMEOUT, device.Fault.OUT_OF_MEMORY], ids=str)
def test_a_fault_while_running_is_an_error_and_the_next_call_works(fresh, fault):
    x = problem(12)
    wanted = np.asarray(named(*x))
    with fresh.fault(fault, times=1):
        with pytest.raises(Exception, match="attention_forward"):
            jax.block_until_ready(named(*x))
    np.testing.assert_array_equal(named(*x), wanted)
    fresh.reports()  # an injected fault is nobody's misuse


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


SHOW = """
import jax, jax_mfa
x = jax.numpy.ones((1, 4, 1, 8))
print(jax_mfa.explain(x, x, x))
try:
    jax_mfa.dot_product_attention(x, x, x, implementation="metal")
except NotImplementedError as error:
    print(error)
"""


def test_metal_can_be_forbidden():
    said = run(SHOW, JAX_MFA_DEVICE="none")
    assert "-> blockwise" in said and said.count("JAX_MFA_DEVICE=none forbids Metal") == 2


@pytest.mark.parametrize(
    ("device", "seen"),
    [
        ("a_gpu", "No module named 'a_gpu'"),
        ("json", "module 'json' has no attribute 'jax_mfa_native'"),
        ("emulator:", ""),
        ("./emulator", ""),
    ],
)
def test_a_device_that_there_is_not_is_named(monkeypatch, device, seen):
    monkeypatch.setenv("JAX_MFA_DEVICE", device)
    with pytest.raises(ValueError) as error:
        runtime.start()
    expected = "JAX_MFA_DEVICE must be unset, 'none', or MODULE[:MACHINE] where MODULE offers jax_mfa_native(machine)"
    assert str(error.value) == f"{expected}, got {device!r}" + (f": {seen}" if seen else "")


@pytest.mark.parametrize("machine", [None, "m9"])
def test_any_module_may_offer_a_device(monkeypatch, machine):
    def refuses(machine):
        raise RuntimeError(f"asked for {machine}")

    monkeypatch.setitem(sys.modules, "a_device_of_its_own", types.SimpleNamespace(jax_mfa_native=refuses))
    monkeypatch.setenv("JAX_MFA_DEVICE", "a_device_of_its_own" + (f":{machine}" if machine else ""))
    assert runtime.start().reason == f"the native module could not be loaded: asked for {machine}"
