"""What every test shares: several CPU devices, the implementations to judge, and random bits that repeat.

XLA's flags must be set before JAX starts; the variable is put back at once so that child processes see the machine
as it is.
"""

import collections
import ctypes
import gc
import hashlib
import importlib.metadata
import math
import os
import signal
import sys

_flags = os.environ.get("XLA_FLAGS")
_wanted = {"xla_force_host_platform_device_count": 8}
# Compiling is two thirds of a test's time, and most of that LLVM's optimiser, which small problems do not need. Where
# `.ci/run` repeats tests on other versions of JAX, it sets the level to 3 itself: as users compile.
_wanted |= {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
# Of the rest half are XLA's fusion emitters, where they can be left out: JAX 0.12 and later have nothing else, 0.8 and
# before do not know the flag, and an unknown flag ends the process.
if (0, 9) <= tuple(int(part) for part in importlib.metadata.version("jaxlib").split(".")[:2]) < (0, 12):
    _wanted["xla_cpu_use_fusion_emitters"] = "false"
os.environ["XLA_FLAGS"] = " ".join(
    [_flags or "", *(f"--{name}={value}" for name, value in _wanted.items() if name not in (_flags or ""))]
).strip()

# child processes too find `emulator` beside this file, whatever way the package is installed
_tests = os.path.dirname(os.path.abspath(__file__))
if _tests not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), _tests]))

# tests interrupt child processes, which a script's background command starts deaf to that
signal.signal(signal.SIGINT, signal.default_int_handler)

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


# of a test's cases with an implementation one in so many runs by default, and all in sweeps: the definition compiles
# longer than `blockwise`, and kernels still longer
ONE_IN = {"blockwise": 2, "reference": 3, "metal": 6}

QUICK_ONE_IN = 4  # of the cases of a test of an implementation, one in so many is of the first tier

# where the definition is held to the oracle and to stock; elsewhere it is jnp like any other, and runs in sweeps
FILES_OF_THE_DEFINITION = (
    "test_contract.py",
    "test_flex.py",
    "test_jax_parity.py",
    "test_paged.py",
    "test_quantized_attention.py",
    "test_transformations.py",
    "test_zero_sizes.py",
)


# of these files, what `metal` runs by default: tests/metal/test_serving.py holds its kernels to the same
OF_STORAGE = ("test_paged.py", "test_quantized_attention.py")
OF_STORAGE_ON_METAL = ("test_queries_may_be_quantised", "test_rows_of_equal_numbers_and_bits_of_bfloat16")


def _some(cases: list, one_in: int) -> list:
    """One in so many, at least one, drawn by name: by place all of one value of a parameter would be left out."""
    drawn = sorted(cases, key=lambda item: hashlib.blake2s(item.name.encode()).digest())
    return drawn[: math.ceil(len(cases) / one_in)]


def pytest_collection_modifyitems(config, items):
    if os.environ.get("EMULATOR_TESTS") == "0":  # as `.ci/run` has it where the emulator has not changed
        left_out = [item for item in items if "emulator" in item.path.parts]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if "emulator" not in item.path.parts]
    tests = collections.defaultdict(list)
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        implementation = getattr(params.get("implementation"), "name", "")
        if implementation == "reference" and item.path.name not in FILES_OF_THE_DEFINITION:
            item.add_marker("sweep")
        if implementation == "metal" and item.path.name in OF_STORAGE and item.originalname not in OF_STORAGE_ON_METAL:
            item.add_marker("sweep")
        if not item.get_closest_marker("sweep"):
            tests[item.path, item.originalname, implementation].append(item)
    for (_, _, implementation), cases in tests.items():
        share = cases[0].get_closest_marker("share")
        kept = _some(cases, (share.args[0] if share else 1) * ONE_IN.get(implementation, 1))
        for item in set(cases) - set(kept):
            item.add_marker("sweep")
        if implementation in ("", "blockwise"):
            for item in _some(kept, QUICK_ONE_IN if implementation else 1):
                if item.get_closest_marker("first_tier") and not item.get_closest_marker("slow"):
                    item.add_marker("quick")


def pytest_collection_finish():
    """What is there now stays: Python's collector, which JAX's many small objects call often, need not look at it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 50)


def pytest_configure(config):
    # sweeps run only when asked for by name
    if not config.option.markexpr:
        config.option.markexpr = "not sweep"


@pytest.fixture(params=AVAILABLE, ids=lambda implementation: implementation.name)
def implementation(request):
    """Each implementation that this machine can run."""
    return request.param


RESIDENT_LIMIT = 1 << 30  # bytes


def _resident() -> int:
    """Bytes of memory that this process holds; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@pytest.fixture(autouse=True)
def bounded_memory():
    """JAX keeps all that it compiles, a megabyte or more a test: a worker that has grown lets it go between tests."""
    yield
    if _resident() > RESIDENT_LIMIT:
        jax.clear_caches()
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc keeps what is freed
        if trim is not None:
            trim(0)


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
