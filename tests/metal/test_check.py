"""`python -m jax_mfa check` says what there is, reaches every kernel, and fails where one is wrong."""

from __future__ import annotations

import argparse
import dataclasses
import email
import itertools
import os
import pathlib
import re
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from emulator import device

import jax_mfa
from jax_mfa import BlockMask
from jax_mfa.__main__ import READER_GONE, main
from jax_mfa.api import with_modifiers
from jax_mfa.arguments import specify
from jax_mfa.cli import check, check_problems, check_report, check_writes, show
from jax_mfa.cli.check_problems import Relative, two_of_three
from jax_mfa.cli.command_line import INTERRUPTED
from jax_mfa.kv_cache import pool as paged_cache
from jax_mfa.metal import DTYPES, runtime, source, tiles
from jax_mfa.metal.plan import Kernel

ROOT = pathlib.Path(__file__).resolve().parents[2]


def command(device: str, *arguments: str, **settings: str) -> subprocess.CompletedProcess:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": paths, "JAX_MFA_DEVICE": device, **settings}
    line = [sys.executable, "-m", "jax_mfa", "check", *arguments]
    return subprocess.run(line, capture_output=True, text=True, encoding="utf-8", env=environment)


def options(**given: bool) -> argparse.Namespace:
    return argparse.Namespace(**{"quick": True, "calibrate": False, "compile_only": None, "report": False, **given})


@pytest.fixture(autouse=True)
def fewer_steps(monkeypatch):
    """Without LLVM's optimiser 1,000 steps take as long as the kernels beside them."""
    monkeypatch.setattr(check_writes, "STEPS", 1000)


class Lines:
    """A native module, as far as staging goes."""

    below = 0

    def stage_shared_lines(self, below: int) -> int:
        before, self.below = self.below, below
        return before


def rows(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("|") and line.endswith("pass |")]


EVERYTHING = [False, pytest.param(True, marks=pytest.mark.sweep)]
all_problems = check.problems


def few(variants):
    """The largest problem of each tile table, the first one, and one that decodes."""
    found = [p for p in all_problems(variants) if check_problems.quick(p)]
    return [p for p in found if p.feature == "everything" or p == found[0]]


@pytest.mark.sweep
@pytest.mark.parametrize("everything", EVERYTHING)
def test_it_passes_on_the_emulated_device(on_device, monkeypatch, capsys, everything):
    if not everything:
        monkeypatch.setattr(check, "problems", few)
    assert check.run(options()) == 0
    printed = capsys.readouterr().out
    assert "shared lines: pass" in printed
    assert "emulated" in printed and "float16: metal" in printed and "all passed: metal" in printed
    assert {line.split("|")[1].strip() for line in rows(printed)} == set(tiles.NAMES)
    (compiled,) = re.findall(
        r"^(\d+) kernels made in [\d.]+ s: \d+ compiled, 0 from archives of earlier processes; \d+ buffers",
        printed,
        re.M,
    )
    assert re.search(
        r"^A first call, forward and backward, makes \d+ at most, in \d+\.\d\d s one by one", printed, re.M
    )
    kernels = [line.split("|") for line in printed.splitlines() if line.startswith("|") and line.endswith("ok |")]
    assert sum(int(cells[2]) for cells in kernels) == int(compiled)
    assert all(0 < int(cells[4]) <= int(cells[5]) and int(cells[7]) <= tiles.THREADGROUP_BYTES for cells in kernels)


@pytest.mark.sweep
@pytest.mark.parametrize("everything", EVERYTHING)
def test_a_virtual_device_gets_the_portable_kernels_only(on_device, native, monkeypatch, capsys, everything):
    """As on a hosted runner, which shows none of the kernels that Apple silicon takes."""
    if not everything:
        monkeypatch.setattr(check, "problems", few)
    with on_device.profile("paravirtual"):
        native.reset()
        started = runtime.start()
        monkeypatch.setattr(runtime, "get", lambda: started)
        assert check.run(options()) == 0
        printed = capsys.readouterr().out
    native.reset()
    assert "Apple Paravirtual device" in printed and "variants        portable:" in printed
    assert {line.split("|")[1].strip() for line in rows(printed)} == {"portable"}
    assert "attention_forward" not in printed and "portable_forward" in printed


def test_without_metal_it_says_so_and_checks_blockwise():
    done = command("none", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "JAX_MFA_DEVICE=none forbids Metal" in done.stdout and "Metal was not checked" in done.stdout
    assert "float32: blockwise" in done.stdout and "all passed: blockwise" in done.stdout and rows(done.stdout)


def test_a_device_that_there_is_not_is_a_finding():
    done = command("bogus", "--quick")
    assert done.returncode == 2 and done.stderr.startswith("asking bogus for a native module")
    assert done.stderr.count("\n") == 1
    last = done.stdout.splitlines()[-1]
    assert last.split(None, 1) == [
        "FAILED",
        "ValueError: JAX_MFA_DEVICE must be unset, 'none', or MODULE[:MACHINE] where MODULE offers "
        "jax_mfa_native(machine), got 'bogus': No module named 'bogus'",
    ]


def test_a_jax_that_cannot_start_is_a_finding():
    done = command("none", "--quick", JAX_PLATFORMS="bogus")
    assert done.returncode == 2 and not done.stderr
    assert done.stdout.startswith("machine ") and "'bogus'" in done.stdout.splitlines()[-1]


def test_a_reader_that_stops_reading_is_no_error():
    line = [sys.executable, "-m", "jax_mfa", "source"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_MFA_DEVICE": "none"}
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout and process.stderr
        assert process.stdout.readline()
        process.stdout.close()
        assert not process.stderr.read()
    assert process.returncode == READER_GONE


@pytest.fixture
def passing(monkeypatch):
    """Every problem passes without being run."""

    def judge(problem, implementation):
        return check.Verdict(dict.fromkeys(check.RESULTS, 0.0), dict.fromkeys(check.RESULTS, 0.0))

    monkeypatch.setattr(check, "judge", judge)
    monkeypatch.setattr(check_writes, "lost", lambda module: 0)
    monkeypatch.setattr(check_writes, "differing", lambda: [])
    return judge


@pytest.mark.parametrize("expected, status", [(True, 0), (False, 1)])
def test_metal_that_should_be_here_and_is_not_is_a_failure(monkeypatch, capsys, passing, expected, status):
    monkeypatch.setattr(runtime, "get", lambda: runtime.Runtime(reason="no such module", expected=expected))
    assert check.run(options()) == status
    printed = capsys.readouterr().out
    assert "Metal was not checked (no such module)" in printed and rows(printed)
    assert ("FAILED: Metal should be here and cannot be used" in printed) == (status == 1)
    assert ("all passed" in printed) == (status == 0)


def test_what_may_have_to_be_built_is_said_before(monkeypatch, capsys, passing):
    def get():
        said.append(capsys.readouterr().err)
        return runtime.Runtime(reason="cannot be built")

    said: list[str] = []
    monkeypatch.setattr(runtime, "get", get)
    monkeypatch.setenv("JAX_MFA_DEVICE", "emulator")
    assert check.run(options()) == 1
    assert said[0].startswith("asking emulator for a native module, which it may have to build")


def pasted(printed: str) -> tuple[list[str], list[str]]:
    """The lines to paste of a report, and those of what to do next."""
    assert printed.count(check_report.BEGIN) == printed.count(check_report.END) == 1
    text, after = printed.split(check_report.BEGIN)[1].split(check_report.END)
    return text.strip().splitlines(), after.strip().splitlines()


def test_a_report_ends_with_one_text_of_what_failed_and_what_to_do(monkeypatch, capsys, passing):
    def judge(problem, implementation):
        verdict = passing(problem, implementation)
        return dataclasses.replace(verdict, failure="broken\nkernel") if problem.feature == "causal" else verdict

    monkeypatch.setattr(check, "judge", judge)
    monkeypatch.setattr(runtime, "get", lambda: runtime.Runtime(reason="not here", expected=True))
    assert check.run(options(report=True)) == 1
    printed = capsys.readouterr().out
    text, after = pasted(printed)
    assert text[0].startswith("machine ") and any(x.startswith("JAX ") for x in text) and "  float32: blockwise" in text
    failed = [x for x in text if "FAIL broken kernel" in x]
    assert len(failed) == sum(p.feature == "causal" and check_problems.quick(p) for p in check.problems(["blockwise"]))
    assert not rows("\n".join(text)) and text[-1].startswith(f"FAILED: {len(failed)} of blockwise")
    assert after[:2] == [
        "What to do next:",
        "1. Open an issue, also where all passed, and paste the text between the two lines.",
    ]
    assert "implementation='blockwise'" in after[2] and "not here" in after[3] and len(after) == 4


def test_a_report_names_what_was_interrupted(monkeypatch, capsys, passing):
    def judge(problem, implementation):
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "judge", judge)
    monkeypatch.setattr(runtime, "get", lambda: runtime.Runtime(reason="not here", expected=True))
    assert check.run(options(report=True)) == INTERRUPTED
    text, _ = pasted(capsys.readouterr().out)
    first = next(filter(check_problems.quick, check.problems(["blockwise"])))
    assert text[-2] == f"{check.row_start(first)} did not end" and text[-1].startswith("interrupted: 0 failed")


def test_a_report_of_a_jax_that_cannot_start_says_why():
    done = command("none", "--report", JAX_PLATFORMS="bogus")
    text, after = pasted(done.stdout)
    assert done.returncode == 2 and "'bogus'" in text[-1] and "Open an issue" in after[1]


def test_a_report_names_the_check_of_writes_that_failed(monkeypatch, capsys, passing):
    monkeypatch.setattr(runtime, "get", lambda: runtime.Runtime(module=Lines(), device={"families": ["apple7"]}))
    monkeypatch.setattr(check.Kernels, "prepare", lambda self, problem: [])
    monkeypatch.setattr(check_writes, "differing", lambda: ["int8"])
    assert check.run(options(report=True)) == 1
    text, after = pasted(capsys.readouterr().out)
    assert "pages filled: FAIL pages of int8 differ from what XLA writes" in text
    assert not any("did not end" in x for x in text) and "Open an issue" in after[1]


def test_implementations_name_a_plugin_and_the_way_to_metal(on_device, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "mtl")
    text = "\n".join(check.choices())
    assert (
        "float16: blockwise" in text and "are on mtl: for Metal kernels keep the program on JAX's CPU backend" in text
    )


@pytest.mark.parametrize("backend", ["cpu", "mtl"])
def test_a_report_of_a_plugin_names_it_and_the_way_to_metal(monkeypatch, capsys, backend):
    report = check_report.Report(platform=backend, verdict="all passed")
    _, after = pasted("\n".join(report.lines(passed=True)))
    assert ("The default backend is mtl" in after[-1] and "JAX_PLATFORMS=cpu" in after[-1]) == (backend == "mtl")


def test_a_published_package_says_where_its_issues_are(monkeypatch):
    known = email.message_from_string(
        "Project-URL: Source, https://x.org/a\nProject-URL: Issues, https://x.org/a/issues\n"
    )
    monkeypatch.setattr(check_report.importlib.metadata, "metadata", lambda name: known)
    assert any("1. Open an issue at https://x.org/a/issues, also" in x for x in check_report.Report().lines(True))


def test_a_report_takes_no_calibration(capsys):
    with pytest.raises(SystemExit):
        main(["check", "--calibrate", "--report"])
    assert "--report: not allowed with argument --calibrate" in capsys.readouterr().err


def test_a_row_names_its_problem_before_it_runs(monkeypatch, capsys, passing):
    def judge(problem, implementation):
        printed.append(capsys.readouterr().out)
        return passing(problem, implementation)

    printed: list[str] = []
    monkeypatch.setattr(check, "judge", judge)
    monkeypatch.setattr(runtime, "get", lambda: runtime.Runtime(reason="not here", expected=True))
    assert check.run(options(quick=False)) == 0
    todo = check.problems(["blockwise"])
    assert [text.splitlines()[-1] for text in printed] == [check.row_start(problem) for problem in todo]


def test_an_interrupted_check_says_how_far_it_came(monkeypatch, capsys, passing):
    def judge(problem, implementation):
        if problem.feature == "causal":
            raise KeyboardInterrupt
        return passing(problem, implementation)

    monkeypatch.setattr(check, "judge", judge)
    monkeypatch.setattr(runtime, "get", lambda: runtime.Runtime(reason="not here", expected=True))
    assert check.run(options()) == INTERRUPTED
    printed = capsys.readouterr().out
    assert len(rows(printed)) == 1 and "| causal | interrupted" in printed
    left = sum(map(check_problems.quick, check.problems(["blockwise"]))) - 1
    assert "interrupted: 0 failed of blockwise, 1 problems" in printed and printed.endswith(f"{left} did not run\n")


def test_ctrl_c_ends_a_check_at_once_and_without_a_traceback():
    line = [sys.executable, "-m", "jax_mfa", "check"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_MFA_DEVICE": "none"}
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout and process.stderr
        while "|---" not in process.stdout.readline():  # the first problem is being traced and compiled
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED and not errors
    assert "interrupted: 0 failed" in printed


def test_metal_is_judged_on_cpu_whatever_the_default_device(monkeypatch, capsys):
    monkeypatch.setattr(runtime, "get", lambda: runtime.Runtime(module=Lines(), device={"families": ["apple7"]}))
    places = []

    def judge(problem, implementation):
        places.append((implementation, getattr(jax.config.jax_default_device, "platform", None)))
        return check.Verdict(dict.fromkeys(check.RESULTS, 0.0), dict.fromkeys(check.RESULTS, 0.0))

    monkeypatch.setattr(check, "judge", judge)
    monkeypatch.setattr(check.Kernels, "prepare", lambda self, problem: [])
    monkeypatch.setattr(check_writes, "lost", lambda module: 0)
    monkeypatch.setattr(check_writes, "differing", lambda: [])
    assert check.run(options()) == 0
    assert places and set(places) == {("metal", "cpu")}
    assert "all passed: metal" in capsys.readouterr().out


@pytest.mark.share(2)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_report_says_where_metal_is_left_out(tmp_path, workers):
    (tmp_path / "no_emulator.py").write_text("import sys\nsys.modules['emulator'] = None\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    environment.pop("JAX_MFA_DEVICE", None)
    line = [sys.executable, "-m", "pytest", "-p", "no_emulator", "-n", str(workers)]
    line += ["tests/test_philox.py", "-k", "agrees_with_64_bit"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the emulated Metal device is left out: ") == 1


# ------------------------------------------------------------------------------------------------ what it reaches


def parameters() -> dict[str, tuple[str, ...]]:
    """The kernels that the MSL text defines, each with the names of its template's parameters."""
    text = re.sub(r"//.*", "", source.base())
    found = re.findall(r"template\s*<([^>]*)>\s*\[\[kernel[^\]]*\]\]\s*void (\w+)\(", text)
    return {name: tuple(re.findall(r"(\w+)\s*(?:,|$)", declared.strip())) for declared, name in found}


def without_sizes(kernel: Kernel) -> tuple:
    """Which kernel, of which dtype and tiles, whatever the head sizes and functions."""
    function, *arguments = kernel.template
    names = parameters()[function]
    assert len(names) == len(arguments), function
    plain = lambda x: re.sub(r"Modified(\w+)<\w+>", r"\1", x)  # with a caller's functions or without
    sized = lambda x: re.sub(r"(, \d+)+>", ">", plain(x)) if isinstance(x, str) else x  # sources say their sizes
    return (function, *(sized(x) for x in arguments))


N, T, S = 4, 90, 80
SHAPED = {  # features, as shapes and static arguments, and not those of the problems
    "nothing": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (5, 4)},
    "lengths": {"key_value_seq_lengths": np.array([3, 4])},
    "mask": {"mask": ("bool", (1, 1, "T", "S"))},
    "padding": {"mask": ("bool", (2, 1, 1, "S"))},
    "blocks": {"block_mask": BlockMask(np.ones((1, 1, 1), bool), (640, 640))},
    "segments": {"query_segment_ids": ("int32", (2, "T")), "key_value_segment_ids": ("int32", (2, "S"))},
    "ranges": {"key_value_ranges": ("int32", (2, "T", 2))},
    "score": {
        "scale": ("float32", ()),
        "alibi_slopes": ("float32", (N,)),
        "sinks": ("float32", (N,)),
        "logits_soft_cap": 2.0,
    },
    "dropout": {"dropout_rate": 0.5, "dropout_seed": 1},
    "functions": {"score_mod": Relative(np.ones((N, 128), np.float32)), "mask_mod": two_of_three},
    **{f"bias of {dtype}": {"bias": (dtype, (1, N, "T", "S"))} for dtype in DTYPES},
}


def planned(variant: str) -> set[Kernel]:
    """What the planner emits for this variant: every row of its table, dtype, feature and pass, and decoding."""
    sizes = [most for most, _ in tiles.VARIANTS[variant]] if variant in tiles.VARIANTS else [tiles.MAX_HEAD]
    found: set[Kernel] = set()
    widths = [(h, h) for h in sizes]
    decoding = [(8, v) for v in range(8, tiles.MAX_HEAD + 1, 8)] + [(v, v) for v in range(8, tiles.MAX_HEAD + 1, 8)]
    lengths = [(T, S, widths, SHAPED), (2, 600, decoding, {"nothing": {}}), (9, 600, decoding, {"nothing": {}})]
    lengths.append((3, 600, [(8, 8)], SHAPED))
    for (t, s, heads, features), dtype in itertools.product(lengths, DTYPES):
        for (h, v), feature in itertools.product(heads, features.values()):
            static = {name: x for name, x in feature.items() if not isinstance(x, tuple) or name == "local_window_size"}
            sized = lambda shape, t=t, s=s: tuple({"T": t, "S": s}.get(x, x) for x in shape)
            arrays = {
                "query": jax.ShapeDtypeStruct((2, t, N, h), dtype),
                "key": jax.ShapeDtypeStruct((2, s, 2, h), dtype),
                "value": jax.ShapeDtypeStruct((2, s, 2, v), dtype),
                **{name: jax.ShapeDtypeStruct(sized(x[1]), x[0]) for name, x in feature.items() if name not in static},
            }
            known = {}

            def check_call(arrays, static=static, known=known):
                known["spec"], operands = specify(**with_modifiers({**arrays, **static}))
                return operands

            operands = jax.eval_shape(check_call, arrays)
            for of_pass in show.PASSES if t == T else show.PASSES[:1]:
                plan = show.plan_of(known["spec"], operands, of_pass, variant)
                found |= {x.kernel for x in plan.dispatches}
    return found


def reached(variants) -> dict[str, set[Kernel]]:
    """By variant, what the problems of check launch."""
    found: dict[str, set[Kernel]] = {variant: set() for variant in variants}
    for problem in check.problems(variants):
        found[problem.variant] |= {x.kernel for plan in problem.plans() for x in plan.dispatches}
    return found


def switched(kernels: set[Kernel]) -> set[tuple]:
    """Each function with each value of each of its constants."""
    return {(x.template[0], name, value) for x in kernels for _, name, _, value in x.constants}


@pytest.mark.sweep
def test_every_kernel_of_every_tile_and_dtype_is_reached():
    found, wanted = reached(tiles.NAMES), {variant: planned(variant) for variant in tiles.NAMES}
    everything = set().union(*wanted.values())
    # the planner uses all that the text defines, but for what fills a pool of pages: see test_append.py
    assert {x.template[0] for x in everything} | {"append_tokens", "copy_pages"} == set(parameters())
    shapes = lambda kernels: {without_sizes(x) for x in kernels}
    assert shapes(everything) <= shapes(set().union(*found.values()))
    for variant in tiles.NAMES:
        decoding = {
            x
            for x in wanted[variant]
            if x.template[0] in ("attention_decode", "attention_decode_rows", "attention_merge")
        }
        rest = wanted[variant] - decoding  # the kernels of decoding are the same whatever the variant
        assert shapes(rest) <= shapes(found[variant]), variant
        assert switched(rest) <= switched(found[variant]), variant
    assert switched(everything) <= switched(set().union(*found.values()))


@pytest.mark.share(4)
@pytest.mark.parametrize("variants", [("portable",), tiles.NAMES, ("direct", "staged", "portable")], ids=str)
def test_only_kernels_of_the_variants_are_reached(variants):
    found = reached(variants)
    assert {p.variant for p in check.problems(variants)} == set(variants)
    for variant, kernels in found.items():
        # the gradient of captured arrays has one kernel for all variants
        own = {x.template[0] for x in kernels} - {"portable_d_captured"}
        families = {x.split("_")[0] for x in own} - {"attention"}
        assert families == ({"portable"} if variant == "portable" else set())


@pytest.mark.parametrize(
    "families, variants",
    [
        (("apple5",), ("portable",)),
        (("apple7", "metal3"), ("staged", "direct", "portable")),
        (("apple7", "apple9"), ("direct", "staged", "portable")),
    ],
)
def test_a_device_gets_what_it_can_run(monkeypatch, capsys, passing, families, variants):
    """A hosted runner's device has no simdgroup matrices."""
    monkeypatch.setattr(runtime, "get", lambda: runtime.Runtime(module=Lines(), device={"families": families}))
    monkeypatch.setattr(check.Kernels, "prepare", lambda self, problem: [])
    assert runtime.get().variants == variants
    assert check.run(options()) == 0
    table = rows(capsys.readouterr().out)
    assert tuple(dict.fromkeys(line.split("|")[1].strip() for line in table)) == variants


@pytest.mark.sweep
def test_each_way_to_store_keys_and_values_is_reached():
    """By every kernel that reads them, in this and that tile table and without one."""
    kinds = ("int8_kind", "int4_kind", "fp8_kind", f", {check_problems.PAGE}>")
    readers = {"forward", "d_query", "d_key_value"}
    for variant, kernels in reached(tiles.NAMES).items():
        split = {"decode", "decode_rows"} if variant == tiles.NAMES[0] else set()
        paired = [x for x in kernels if x.template[0] == "attention_decode" and x.template[-1] is True]
        for kind in kinds:
            found = {x.template[0].partition("_")[2] for x in kernels if kind in str(x.template[1])}
            # pages have no gradient
            assert found >= (readers - {"d_key_value"} if kind == kinds[-1] else readers) | split, (variant, kind)
            assert any(kind in str(x.template[1]) for x in paired) == bool(split)


@pytest.mark.sweep
def test_no_problem_is_empty():
    """Rows see something, and results are of the size of the inputs."""
    for problem in {(p.feature, p.decoding): p for p in reversed(check.problems(["staged"]))}.values():
        arguments = dataclasses.replace(problem, dtype="float32").arguments()
        arrays = {name: x for name, x in arguments.items() if isinstance(x, np.ndarray)}
        static = {name: x for name, x in arguments.items() if name not in arrays}
        keywords = {**static, "implementation": "reference", "return_residual": True}
        run = lambda x, keywords=keywords: jax_mfa.flex_attention(**x, **keywords)
        results = jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})(arrays)
        for name, x in zip(("out", "lse"), map(np.asarray, results)):
            finite = x[np.isfinite(x)]
            assert finite.size >= 0.4 * x.size and np.abs(finite).max() > 1e-3, (problem, name)


# ---------------------------------------------------------------------------------------------------- on the device


def some(*features: str) -> list[check.Problem]:
    return [check.Problem("staged", "float16", 16, 9, feature, 20, 40) for feature in features]


@pytest.mark.sweep
def test_the_kernels_compiled_one_by_one_are_those_that_run(on_device, monkeypatch):
    launched: set[Kernel] = set()

    def failure(plan):
        launched.update(x.kernel for x in plan.dispatches)
        return ""

    monkeypatch.setattr(runtime, "failure", failure)
    monkeypatch.setattr(check, "_expected", lambda problem: {})  # what comes out is not the question
    kernels = check.Kernels()
    problems = [*some("dense", "everything"), check.Problem("staged", "bfloat16", 16, 16, "everything", 3, 530)]
    with runtime.variant("staged"):
        for problem in problems:
            kernels.prepare(problem)
            assert check.judge(problem, "metal").passed
    assert {x.kernel for x in kernels.compiled.values()} == launched


@pytest.mark.sweep
@pytest.mark.parametrize("fault", [device.Fault.COMPILE, device.Fault.PIPELINE], ids=lambda x: x.name)
def test_after_a_kernel_that_does_not_compile_the_next_problem_runs(on_device, monkeypatch, capsys, fault):
    monkeypatch.setattr(check, "problems", lambda variants: some("dense", "causal"))
    with on_device.fault(fault, times=1):
        assert check.run(options()) == 1
    printed = capsys.readouterr().out
    assert [x.split("|")[5].strip() for x in rows(printed)] == ["causal"]
    failures = [line for line in printed.splitlines() if line.startswith("|") and "FAIL" in line]
    assert len(failures) == 2  # the problem, and the kernel with Metal's words
    assert all("attention_forward_f16_h16_v9" in line and "injected" in line for line in failures), failures
    assert "FAILED: 1 of metal, 2 problems" in printed


@pytest.mark.sweep
def test_after_a_gpu_fault_the_next_problem_runs(on_device, monkeypatch, capsys):
    monkeypatch.setattr(check, "problems", lambda variants: some("dense", "causal", "mask"))
    with on_device.fault(device.Fault.GPU, times=1):
        assert check.run(options()) == 1
    printed = capsys.readouterr().out
    assert [x.split("|")[5].strip() for x in rows(printed)] == ["causal", "mask"]
    assert "FAILED: 1 of metal, 3 problems" in printed
    on_device.reports()  # an injected fault is nobody's misuse


@pytest.mark.sweep
def test_work_lost_in_shared_lines_is_noticed_and_staging_helps(on_device, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(check, "problems", lambda variants: [])
    monkeypatch.setattr(check_writes, "differing", lambda: [])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    module, chip = runtime.get().module, runtime.get().device["name"]
    assert check.run(options()) == 0
    assert "shared lines: pass" in capsys.readouterr().out and not runtime.STAGED_BELOW.path().exists()
    try:
        with on_device.option(device.Option.LINE_BYTES, 128):
            assert check.run(options()) == 1
        printed = capsys.readouterr().out
        assert re.search(
            r"shared lines: FAIL [1-9]\d* entries lost .*; 0 with outputs staged, as .* on this chip", printed
        )
        assert "FAILED: 1 of metal, 0 problems" in printed
        assert runtime.STAGED_BELOW.of(chip, 0) == check_writes.ALL and runtime.STAGED_BELOW.of("Apple M9", 0) == 0
        # in this process, and in each that starts later
        assert module.stage_shared_lines(0) == check_writes.ALL
        runtime.start()
        with on_device.option(device.Option.LINE_BYTES, 128), jax.default_device(jax.devices("cpu")[0]):
            assert check_writes.lost(module) == 0
        # one run without a loss is no proof that there is none
        assert check.run(options()) == 0
        assert "they stay staged, as found before" in capsys.readouterr().out
        assert module.stage_shared_lines(0) == check_writes.ALL
    finally:
        module.stage_shared_lines(0)


def test_pages_that_a_kernel_fills_wrongly_are_noticed(on_device, monkeypatch, capsys):
    monkeypatch.setattr(check, "problems", lambda variants: [])
    monkeypatch.setattr(check_writes, "lost", lambda module: 0)
    assert check.run(options()) == 0
    assert "pages filled: pass: pages of float16, int8, int4, fp8" in capsys.readouterr().out
    written = paged_cache.write_in_place
    a_token_too_far = lambda *given: written(*given[:-1], given[-1]._replace(slots=given[-1].slots + 1))
    monkeypatch.setattr(paged_cache, "write_in_place", a_token_too_far)
    assert check.run(options()) == 1
    assert "pages filled: FAIL pages of float16, int8, int4, fp8 differ" in capsys.readouterr().out


@pytest.mark.parametrize("lost", [(3, 0), (3, 2), (0, 0)], ids=str)
def test_what_cannot_be_kept_is_staged_in_this_process(monkeypatch, tmp_path, lost):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    module, answers = Lines(), list(lost)
    monkeypatch.setattr(runtime, "get", lambda: runtime.Runtime(module=module, device={"name": "Apple M1"}))
    monkeypatch.setattr(check_writes, "lost", lambda module: answers.pop(0))
    text, passed = check._shared_lines()
    assert passed == (lost == (0, 0)) and ("in this process only" in text) == (lost == (3, 0))
    assert module.below == (check_writes.ALL if lost == (3, 0) else 0)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"Apple M1": 7}',
        *(f'{{"Apple M1": {{"staged_below": {x}}}}}' for x in ("true", "-1", '"9"', 1e9, 2**70)),
    ],
)
def test_a_broken_file_of_lines_says_nothing(monkeypatch, tmp_path, content):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert runtime.STAGED_BELOW.of("Apple M1", 0) == 0
    runtime.STAGED_BELOW.store("Apple M1", {"staged_below": 4096, "source": "a test"})
    runtime.STAGED_BELOW.store("Apple M2", {"staged_below": 8192, "source": "a test"})
    assert [runtime.STAGED_BELOW.of(chip, 0) for chip in ("Apple M1", "Apple M2")] == [4096, 8192]
    runtime.STAGED_BELOW.path().write_text(content)
    assert runtime.STAGED_BELOW.of("Apple M1", 0) == 0


def test_what_cannot_be_calibrated_says_so(monkeypatch, capsys):
    monkeypatch.setattr(runtime, "get", lambda: runtime.Runtime(reason="not here", expected=True))
    assert check.run(options(calibrate=True)) == 2
    assert "FAILED: without Metal there is nothing to calibrate: not here" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------- wrong results


@pytest.mark.parametrize("wrong", ["a little", "nan", "an exception"])
def test_a_wrong_result_fails_with_its_error(monkeypatch, capsys, wrong):
    """One value of one gradient is off by 1 % of the largest."""
    real = check._both

    def both(implementation, backward, **static):
        attention = real(implementation, backward, **static)
        if implementation == "reference":
            return attention

        def spoilt(*arrays):
            if wrong == "an exception":
                raise RuntimeError("no such kernel")
            results = attention(*arrays)
            amount = np.nan if wrong == "nan" else 0.01 * abs(results["dv"]).max()
            return results | {"dv": results["dv"].at[0, 3, 0, 1].add(amount)}

        return spoilt

    monkeypatch.setattr(check, "_both", both)
    monkeypatch.setattr(check, "problems", lambda variants: check_problems.problems(variants)[:1])
    monkeypatch.setattr(runtime, "get", lambda: runtime.Runtime(reason="not here", expected=True))
    assert check.run(options(quick=False)) == 1
    printed = capsys.readouterr().out
    assert "FAILED: 1 of blockwise" in printed and not rows(printed)
    assert ("no such kernel" if wrong == "an exception" else "FAIL dv >") in printed


def test_a_variant_can_be_named_for_a_while(monkeypatch):
    monkeypatch.setattr(runtime, "get", lambda: runtime.Runtime(device={"families": ["apple7"]}))
    traced = []

    @jax.jit
    def program(x):
        traced.append(runtime.get().variant)
        return x

    program(1)
    with runtime.variant("direct"):
        program(1)
        program(1)
    program(1)
    assert traced == ["staged", "direct", "staged"]
