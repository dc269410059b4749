"""What every test shares: several CPU devices, the implementations to judge, and random bits that repeat.

The device count must be set before JAX starts; the variable is put back at once so that child processes see the
machine as it is.
"""

import os
import sys

_flags = os.environ.get("XLA_FLAGS")
if "xla_force_host_platform_device_count" not in (_flags or ""):
    os.environ["XLA_FLAGS"] = f"{_flags or ''} --xla_force_host_platform_device_count=4".strip()

_left_out = ""  # why no test of `metal` runs; empty where they do, or the caller chose

# every test of `metal` runs the real C++ and kernels: on the device of a Mac, elsewhere on the emulated one
if "JAX_MFA_DEVICE" not in os.environ and sys.platform != "darwin":
    try:
        from emulator import host_module

        host_module.build()
        os.environ["JAX_MFA_DEVICE"] = "emulator"
    except (ImportError, RuntimeError) as reason:
        _left_out = f"the emulated Metal device is left out: {reason}"
        os.environ["JAX_MFA_DEVICE"] = "none"

import jax  # noqa: E402
import pytest  # noqa: E402
from harness import AVAILABLE  # noqa: E402

jax.devices()
if _flags is None:
    os.environ.pop("XLA_FLAGS", None)
else:
    os.environ["XLA_FLAGS"] = _flags


def pytest_terminal_summary(terminalreporter):
    # at the end, and by the process that reports: `-q` hides headers, and what a worker prints is lost
    if _left_out:
        terminalreporter.write_line(_left_out, yellow=True)


def pytest_configure(config):
    # sweeps run only when asked for by name
    if not config.option.markexpr:
        config.option.markexpr = "not sweep"


@pytest.fixture(params=AVAILABLE, ids=lambda implementation: implementation.name)
def implementation(request):
    """Each implementation that this machine can run."""
    return request.param


@pytest.fixture(autouse=True)
def silent_device(request):
    """Whatever a test ran on the emulated device: kernels raced nowhere, and the Metal API was used rightly."""
    yield
    native = sys.modules.get("emulator.host_module")
    if native is None or not native.load.cache_info().currsize:
        return
    if "emulator" in request.path.parts:  # those make mistakes on purpose, and look for themselves
        return
    from emulator import device

    control = device.load()
    control.wait_idle()
    assert control.checker()["reports"] == []
    assert control.reports() == []
