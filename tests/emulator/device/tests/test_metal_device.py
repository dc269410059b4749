"""The emulated device keeps Metal's promises: correct host programs work and leave nothing behind, each misuse is
reported under its own name, each injected fault looks to the host as it does on a Mac."""

from __future__ import annotations

import ctypes as c
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
from emulator import device
from emulator.device import Fault, Option

PROGRAMS = pathlib.Path(__file__).resolve().parent / "programs"


def clean(metal: device.Control) -> None:
    assert metal.reports() == []
    assert metal.checker()["reports"] == []
    assert metal.live_objects() == {}


def whole_path(probe: c.CDLL) -> str:
    message = c.create_string_buffer(4096)
    probe.whole_path(message, c.c_size_t(len(message)))
    return message.value.decode()


def in_new_process(probe_path: str, body: str, **environment: str) -> subprocess.CompletedProcess[str]:
    root = pathlib.Path(device.build.core.ROOT).parent
    start = f"import ctypes, sys\nsys.path.insert(0, {str(root)!r})\nfrom emulator import device\n"
    text = f"{start}probe = ctypes.CDLL({probe_path!r})\nmetal = device.load()\n{body}"
    return subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=300, env={**os.environ, **environment}
    )


def test_vector_add_from_metal_cpp_to_kernel(metal: device.Control) -> None:
    program = c.CDLL(str(device.host([PROGRAMS / "vector_add.cc"])))
    a, b = np.arange(1000, dtype=np.float32), np.full(1000, 0.5, np.float32)
    out = np.zeros_like(a)
    assert program.vector_add(*(c.c_void_p(x.ctypes.data) for x in (a, b, out)), 1000) == 0
    np.testing.assert_array_equal(out, a + b)
    totals = metal.totals()
    assert (
        totals["dispatches"],
        totals["command_buffers"],
        totals["buffers_from_bytes"],
        totals["buffers_allocated"],
    ) == (1, 1, 2, 1)
    (dispatch,) = metal.dispatches()
    assert (dispatch["kernel"], dispatch["grid"], dispatch["threads_per_threadgroup"]) == (
        "add",
        [1000, 1, 1],
        [64, 1, 1],
    )
    assert dispatch["counters"]["device_bytes_stored"] == 4000
    clean(metal)


@pytest.mark.parametrize(
    "program",
    [
        "device_facts",
        "foundation",
        "dependent_dispatches",
        "specialised_functions",
        "wrong_constants",
        "host_names",
        "threadgroup_memory",
        "handlers_and_states",
        "enqueue_keeps_order",
        "events",
        "no_copy_pages",
        "kept_while_in_flight",
        "concurrent_barrier",
        "handler_waits_for_another",
        "correct",
    ],
)
def test_correct_program_is_silent_and_leaks_nothing(program: str, probe: c.CDLL, metal: device.Control) -> None:
    assert getattr(probe, program)() == 0
    clean(metal)


@pytest.mark.parametrize(
    "program, kind",
    [
        ("committed_twice", "committed-twice"),
        ("encode_after_end", "encode-after-end"),
        ("encoder_not_ended", "encoder-not-ended"),
        ("two_encoders", "encoder-not-ended"),
        ("encode_after_commit", "encode-after-commit"),
        ("handler_after_commit", "handler-after-commit"),
        ("wait_before_commit", "wait-before-commit"),
        ("wait_in_handler", "wait-in-handler"),
        ("offset_beyond", "buffer-offset"),
        ("offset_misaligned", "buffer-alignment"),
        ("index_and_offset_swapped", "buffer-index"),
        ("too_many_threads", "threads-per-threadgroup"),
        ("zero_grid", "grid-size"),
        ("no_pipeline", "no-pipeline"),
        ("unbound_buffer", "unbound-buffer"),
        ("set_bytes_too_long", "set-bytes"),
        ("constant_too_small", "buffer-too-small"),
        ("threadgroup_memory_odd", "threadgroup-memory"),
        ("threadgroup_memory_above", "threadgroup-memory"),
        ("threadgroup_memory_unset", "unbound-threadgroup-memory"),
        ("released_in_flight", "released-in-flight"),
        ("over_release", "dead-object"),
        ("use_of_dead_object", "dead-object"),
        ("storage_mode_as_options", "resource-options"),
        ("zero_bytes", "buffer-length"),
        ("private_contents", "private-contents"),
        ("did_modify", "did-modify-range"),
        ("no_pool", "no-autorelease-pool"),
        ("message_to_nil", "message-to-nil"),
        ("concurrent_hazard", "concurrent-hazard"),
        ("no_copy_misaligned", "no-copy-alignment"),
    ],
)
def test_misuse_is_reported_by_name(program: str, kind: str, probe: c.CDLL, metal: device.Control) -> None:
    with metal.option(Option.QUIET, 1):
        assert getattr(probe, program)() == 0
        reports = metal.reports()
    assert reports and {report["kind"] for report in reports} == {kind}, reports
    assert metal.live_objects() == {}


def test_a_dead_object_is_named_with_its_class(probe: c.CDLL, metal: device.Control) -> None:
    with metal.option(Option.QUIET, 1):
        probe.over_release()
    (report,) = metal.reports()
    assert report["class"] == "MTLBuffer" and "over-release" in report["message"]


def test_a_leak_is_counted(probe_path: str) -> None:
    done = in_new_process(
        probe_path, "probe.leak()\nassert metal.live_objects() == {'MTLBuffer': 1}, metal.live_objects()"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "body, said",
    [
        ("probe.unknown_selector()", r"-\[MTLDevice newSamplerStateWithDescriptor:\] is not modelled"),
        ("probe.unknown_class()", r"\+\[MTLTextureDescriptor alloc\] is not modelled"),
        ("probe.too_new_selector()", r"setMathMode:\] needs macOS 15.0"),
        ("metal.set(device.Option.ABORT, 1); probe.committed_twice()", r"committed-twice"),
    ],
)
def test_what_is_not_modelled_stops_the_process_with_its_name(body: str, said: str, probe_path: str) -> None:
    done = in_new_process(probe_path, body)
    assert done.returncode == -6 and re.search(said, done.stderr), done.stderr


@pytest.mark.parametrize(
    "fault, said",
    [
        (Fault.NO_DEVICE, "device: nil"),
        (Fault.COMPILE, "library: program_source:1:1: error:"),
        (Fault.FUNCTION, "function: nil"),
        (Fault.PIPELINE, "pipeline: Compiler encountered an internal error"),
        (Fault.BUFFER_NO_COPY, "staged: nil"),
        (Fault.QUEUE, "queue: nil"),
        (Fault.COMMAND_BUFFER, "command buffer: nil"),
        (Fault.ENCODER, "encoder: nil"),
        (Fault.GPU, "command buffer: code 3: "),
        (Fault.TIMEOUT, "command buffer: code 2: "),
        (Fault.OUT_OF_MEMORY, "command buffer: code 8: Insufficient Memory"),
        (Fault.INTERACTIVITY, "command buffer: code 1: Impacting Interactivity"),
        (Fault.IGNORED, "command buffer: code 4: Ignored (for causing prior/excessive GPU errors)"),
    ],
)
def test_fault_is_seen_by_the_host_once_and_then_gone(
    fault: Fault, said: str, probe: c.CDLL, metal: device.Control
) -> None:
    metal.inject(fault, times=1)
    assert whole_path(probe).startswith(said)
    assert metal.hits(fault) == 1
    assert whole_path(probe) == ""
    clean(metal)


def test_both_buffer_routes_can_fail_apart(probe: c.CDLL, metal: device.Control) -> None:
    with metal.fault(Fault.BUFFER):
        assert whole_path(probe) == ""  # no-copy needs no memory of the device
        with metal.fault(Fault.BUFFER_NO_COPY):
            assert whole_path(probe) == "buffer: nil"
    assert metal.totals()["buffers_refused"] == 2
    clean(metal)


def test_fault_can_wait_for_its_turn(probe: c.CDLL, metal: device.Control) -> None:
    metal.inject(Fault.GPU, times=1, skip=1)
    assert [whole_path(probe)[:15] for _ in range(3)] == ["", "command buffer:", ""]


def test_old_macos_refuses_a_newer_language(probe: c.CDLL, metal: device.Control) -> None:
    with metal.option(Option.OS_VERSION, 130000):
        assert "language version 3.1 is not supported" in whole_path(probe)
    clean(metal)


def test_other_simd_width_is_visible(probe: c.CDLL, metal: device.Control) -> None:
    with metal.option(Option.SIMD_WIDTH, 64):
        assert whole_path(probe) == "simd width: nil"


def test_memory_limit_refuses_buffers(probe: c.CDLL, metal: device.Control) -> None:
    with metal.option(Option.MEMORY_LIMIT, 16384), metal.fault(Fault.BUFFER_NO_COPY):
        assert whole_path(probe) == "staged: nil"
    with metal.option(Option.MEMORY_LIMIT, 8192), metal.fault(Fault.BUFFER_NO_COPY):
        assert whole_path(probe) == "buffer: nil"
    clean(metal)


def test_compile_error_has_the_compilers_text(probe: c.CDLL, metal: device.Control) -> None:
    message = c.create_string_buffer(16384)
    source = b"\n\n\nkernel void k(device float* x [[buffer(0)]]) { x[0] = undeclared; }\n"
    assert probe.compile_text(source, message, c.c_size_t(len(message))) == 1
    text = message.value.decode()
    assert "program_source:4:" in text and "undeclared" in text
    clean(metal)


def test_checker_finds_an_overrun_and_names_the_line(probe: c.CDLL, metal: device.Control) -> None:
    with metal.option(Option.QUIET, 1):
        probe.kernel_beyond()
    (found,) = [report for report in metal.checker()["reports"] if report["class"] == "out of bounds"]
    assert found["kernel"] == "beyond" and found["line"] > 0 and found["buffer_index"] == 0


@pytest.mark.parametrize("step", [1, -1, 128, -4096, 4096, 12288, 1 << 40])
@pytest.mark.parametrize("writes", [0, 1])
def test_overrun_of_a_buffer_is_found_and_hits_no_other(
    step: int, writes: int, probe: c.CDLL, metal: device.Control
) -> None:
    with metal.option(Option.QUIET, 1):
        assert probe.kernel_far(writes, c.c_int64(step)) == 0
    found = [report for report in metal.checker()["reports"] if report["class"] == "out of bounds"]
    assert found and all(report["line"] > 0 for report in found)
    if abs(step) < 1 << 32:
        assert found[0]["buffer_index"] == 0
    assert metal.live_objects() == {}


@pytest.mark.parametrize("step", [4096, -4096])
@pytest.mark.parametrize("writes", [0, 1])
def test_unchecked_overrun_meets_unreadable_pages(step: int, writes: int, probe: c.CDLL, metal: device.Control) -> None:
    with metal.option(Option.QUIET, 1), metal.option(Option.CHECKED, 0):
        assert probe.kernel_far(writes, c.c_int64(step)) == 0  # and the process lives
    assert metal.live_objects() == {}


def test_debug_marker_bounds_memory_bound_without_a_copy(probe: c.CDLL, metal: device.Control) -> None:
    with metal.option(Option.QUIET, 1):
        for marked, excess in ((1, 0), (0, 64)):
            assert probe.no_copy_excess(marked, excess) == 0
            assert metal.checker()["reports"] == []
        assert probe.no_copy_excess(1, 1) == 0
    (found,) = metal.checker()["reports"]
    assert found["class"] == "out of bounds" and found["buffer_index"] == 0


def test_debug_marker_bounds_a_binding_within_a_larger_buffer(probe: c.CDLL, metal: device.Control) -> None:
    with metal.option(Option.QUIET, 1):
        probe.kernel_beyond_marker(0)
        assert metal.checker()["reports"] == []
        probe.kernel_beyond_marker(1)
        assert {report["class"] for report in metal.checker()["reports"]} == {"out of bounds"}


def test_debug_marker_named_output_wants_every_byte_written(probe: c.CDLL, metal: device.Control) -> None:
    with metal.option(Option.QUIET, 1):
        probe.kernel_half()
    (found,) = metal.checker()["reports"]
    assert found["class"] == "unwritten output" and found["buffer_index"] == 0


@pytest.mark.parametrize("profile", device.profiles())
def test_profile_is_kept_over_a_reset_and_left_behind(profile: str, probe: c.CDLL, metal: device.Control) -> None:
    before = {option: metal.get(option) for option in Option}
    with metal.profile(profile):
        acting = {option: metal.get(option) for option in Option}
        assert acting != before
        metal.reset()
        assert {option: metal.get(option) for option in Option} == acting
    assert {option: metal.get(option) for option in Option} == before
    assert whole_path(probe) == ""


def test_unknown_profile_is_refused(metal: device.Control) -> None:
    with pytest.raises(ValueError, match="there are intel, m1, m3, m5, paravirtual"), metal.profile("m0"):
        pass


def test_watchdog_kills_by_modelled_time_and_then_ignores_the_process(probe: c.CDLL, metal: device.Control) -> None:
    assert whole_path(probe) == ""
    metal.set(Option.RATE, 1000)
    metal.set(Option.INTERACTIVITY_MS, 1)
    metal.set(Option.IGNORED_AFTER, 2)
    said = [whole_path(probe) for _ in range(3)]
    assert [text.split("code ")[1][0] for text in said] == ["1", "1", "4"]
    metal.reset()
    assert whole_path(probe) == ""


def test_default_device_and_list_can_be_hidden_apart(probe: c.CDLL, metal: device.Control) -> None:
    with metal.option(Option.LISTED, 0):
        assert whole_path(probe) == ""
    with metal.option(Option.DEFAULT_DEVICE, 0):
        assert whole_path(probe) == "device: nil"


def test_endless_kernel_ends_in_a_timeout(probe: c.CDLL, metal: device.Control) -> None:
    with metal.option(Option.TIMEOUT_MS, 300), metal.option(Option.QUIET, 1):
        assert probe.kernel_endless() == 0


@pytest.mark.parametrize("checked", [1, 0])
def test_many_threads_at_once(checked: int, probe: c.CDLL, metal: device.Control) -> None:
    with metal.option(Option.CHECKED, checked):
        assert probe.many_threads(6, 20) == 0
    assert metal.totals()["dispatches"] == 120
    clean(metal)


def test_late_handlers_lose_nothing(probe: c.CDLL, metal: device.Control) -> None:
    with metal.option(Option.HANDLER_DELAY_US, 2000):
        assert probe.many_threads(4, 5) == 0
    clean(metal)


def test_nothing_grows_over_many_command_buffers(probe: c.CDLL, metal: device.Control) -> None:
    def resident() -> int:
        return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    with metal.option(Option.CHECKED, 0):
        probe.repeat(3000)  # fills the lists of dead objects
        before = resident()
        probe.repeat(5000)
    assert resident() - before < 2 << 20
    clean(metal)


@pytest.mark.parametrize("body", ["assert probe.forked_child() == 0", "probe.correct()", "probe.many_threads(4, 3)"])
def test_fork_and_exit_do_not_crash(body: str, probe_path: str) -> None:
    done = in_new_process(probe_path, body)
    assert done.returncode == 0, done.stderr


def test_python_fork_after_use_exits_well(probe_path: str) -> None:
    fork = "import os\nprobe.many_threads(4, 3)\npid = os.fork()\n"
    body = f"{fork}if pid == 0:\n    metal.live_objects()\n    sys.exit(0)\nassert os.waitpid(pid, 0)[1] == 0"
    done = in_new_process(probe_path, body)
    assert done.returncode == 0, done.stderr
