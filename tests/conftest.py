"""What every test shares: several CPU devices, the implementations to judge, and random bits that repeat.

XLA's flags must be set before JAX starts; the variable is put back at once so that child processes see the machine
as it is.
"""

import ctypes
import gc
import importlib.metadata
import os
import signal
import sys
import zlib

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


# the first tier: what most often goes wrong, in two and a half minutes on two cores where JAX_MFA_DEVICE=none
QUICK_FILES = (
    "test_bad_input.py",
    "test_block_mask.py",
    "test_code_quality.py",
    "test_contract.py",
    "test_philox.py",
)
# of those files, what takes most of the time: many programs that say little more than one
NOT_QUICK = (
    "test_any_two_features_work_together",
    "test_what_a_mask_hides_reaches_neither_output_nor_gradient",
    "test_lengths_of_more_than_one_tile",
    "test_the_gradient_of_a_broadcast_bias_is_summed_over_the_broadcast_axes",
    "test_a_document_that_is_not_finite_does_not_touch_its_neighbour",
    "test_what_is_seen_and_not_finite_does_what_plain_arithmetic_does",
    "test_a_row_that_sees_nothing_gives_zeros_and_no_gradient",
)


# where the definition is held to the oracle and to stock; elsewhere it is jnp like any other, and runs in sweeps
FILES_OF_THE_DEFINITION = (
    "test_contract.py",
    "test_jax_parity.py",
    "test_paged.py",
    "test_quantized_attention.py",
    "test_transformations.py",
    "test_zero_sizes.py",
)


# of these files, what `metal` runs by default: tests/metal/test_serving.py holds its kernels to the same
OF_STORAGE = ("test_paged.py", "test_quantized_attention.py")
OF_STORAGE_ON_METAL = ("test_queries_may_be_quantised", "test_rows_of_equal_numbers_and_bits_of_bfloat16")

# many cases that take long and say nearly the same: half of them, drawn by name, run in sweeps
HALVED = {
    "test_annotations.py": {"test_what_a_signature_says_of_shapes_is_so"},
    "test_contract.py": {
        "test_16_bit_inputs_are_accumulated_in_32_bits_and_rounded_once",
        "test_a_row_that_sees_nothing_gives_zeros_and_no_gradient",
        "test_a_static_offset_and_an_array_of_it_agree",
        "test_any_two_features_work_together",
        "test_lengths_of_more_than_one_tile",
        "test_positions_and_windows_may_be_huge_together",
        "test_the_gradient_of_a_broadcast_bias_is_summed_over_the_broadcast_axes",
        "test_values_and_gradients_are_right",
        "test_what_a_mask_hides_reaches_neither_output_nor_gradient",
    },
    "test_cost.py": {
        "test_dense_backward_does_at_most_seven_products",
        "test_threadgroup_memory_is_what_the_table_says",
    },
    "test_kernels.py": {
        "test_a_planted_mistake_is_noticed",
        "test_any_head_size_and_length",
        "test_masks",
        "test_through_jit_and_the_launcher",
        "test_tile_settings_that_no_table_has",
    },
    "test_launcher_concurrency.py": {"test_process_may_end_while_calls_are_in_flight"},
    "test_philox.py": {"test_a_tile_anywhere_holds_the_same_bits"},
    "test_profiles_work.py": {"test_attention_in_parts_is_the_same", "test_estimates_are_bounds"},
    "test_sharding.py": {
        "test_answers_are_those_of_one_device",
        "test_nothing_is_gathered",
        "test_where_lengths_are_split_keys_travel",
    },
    "test_structure.py": {
        "test_no_array_is_as_large_as_the_scores",
        "test_temporary_memory_grows_linearly_with_the_length",
        "test_tiles_that_no_row_can_see_are_not_computed",
    },
    "test_tile_lists.py": {
        "test_a_planted_mistake_is_noticed",
        "test_values_and_gradients_are_right",
    },
    "test_transformations.py": {
        "test_a_hessian_vector_product_is_that_of_the_reference_and_maps",
        "test_nested_vmap_over_different_arguments",
        "test_remat_changes_no_gradient",
        "test_rows_that_see_nothing_trip_no_alarm",
        "test_shard_map_over_batch_and_heads_with_its_default_checks",
        "test_vmap_over_any_axis",
        "test_vmap_over_some_arguments_alone",
    },
    "test_variants.py": {"test_values_and_gradients_are_right"},
    "test_zero_sizes.py": {"test_a_head_of_no_size_adds_nothing_to_scores_or_output"},
}
# and of these a quarter runs by default
QUARTERED = {
    "test_jax_parity.py": {"test_equals_jax_nn_wherever_a_row_sees_something"},
    "test_known_mistakes.py": {"test_a_known_mistake_is_noticed"},
    "test_tile_lists.py": {"test_a_list_names_the_visible_tiles_and_no_other"},
}


def pytest_collection_modifyitems(items):
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        implementation = getattr(params.get("implementation"), "name", "")
        if implementation == "reference" and item.path.name not in FILES_OF_THE_DEFINITION:
            item.add_marker("sweep")
        if implementation == "metal" and item.path.name in OF_STORAGE and item.originalname not in OF_STORAGE_ON_METAL:
            item.add_marker("sweep")
        for parts, names in ((2, HALVED), (4, QUARTERED)):
            if item.originalname in names.get(item.path.name, ()) and zlib.crc32(item.name.encode()) % parts:
                item.add_marker("sweep")
        quick = item.path.name in QUICK_FILES and item.originalname not in NOT_QUICK
        if quick and implementation in ("", "blockwise"):
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
