"""The native module over the emulated device, clean before every test and checked for leaks and misuse after it."""

from __future__ import annotations

import types
from collections.abc import Iterator

import jax
import pytest
import runners
from emulator import device, host_module

from jax_mfa.metal import runtime


@pytest.fixture(scope="session")
def native() -> types.ModuleType:
    """`_metal`, its handler registered; the test skips where the build's parts cannot be had."""
    try:
        host_module.build()
    except host_module.Unavailable as reason:
        pytest.skip(str(reason))
    from launcher import register

    return register()


@pytest.fixture
def metal(native: types.ModuleType) -> Iterator[device.Control]:
    """The device's control. Whatever the test did, the API was used rightly, kernels were too, and nothing is left."""
    control = device.load()
    control.wait_idle()
    native.reset()
    control.reset()
    yield control
    control.clear_faults()
    control.wait_idle()
    assert native.statistics()["in_flight"] == 0
    native.reset()
    assert native.statistics()["staging_bytes"] == 0
    assert control.reports() == []
    assert control.checker()["reports"] == []
    assert control.live_objects() == {}


@pytest.fixture
def on_device(request, monkeypatch):
    """`implementation="metal"` runs within the test: on a Mac's own device, elsewhere on the emulated one, whatever the
    process was started with."""
    emulated = None if runners.on_a_mac() else request.getfixturevalue("metal")
    if emulated:
        monkeypatch.setenv("JAX_MFA_DEVICE", "emulator")
    started = runtime.start()
    assert not started.reason, started.reason
    monkeypatch.setattr(runtime, "get", lambda: started)
    runtime._prepare.cache_clear()
    jax.clear_caches()
    yield emulated
    runtime._prepare.cache_clear()
    jax.clear_caches()
