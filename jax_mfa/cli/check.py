"""Says what this machine has, and runs every kernel against the reference: a report to paste, and an exit status.

Each tile table that the device can run, dtype, class of head sizes and feature, forward and backward; and decoding, of
keys and values that are quantised or in pages too. Each kernel is compiled by itself first, and what Metal says of it
is a table of its own. A problem stands in its row before it runs, so that the last row of a run that hangs or crashes
names it. Last come tokens that kernels write into pages, and a program in which CPU and GPU share cache lines. Where
Metal cannot be used it says why, and checks the blockwise implementation instead.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import importlib.metadata
import itertools
import os
import pathlib
import platform
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_mfa import compat
from jax_mfa.api import attend_by_name, explain
from jax_mfa.cli import check_compile, check_writes
from jax_mfa.cli.check_problems import BATCH, GRADIENTS, HEADS, KEY_HEADS, Problem, Relative, allowed, problems, quick
from jax_mfa.cli.check_report import Report
from jax_mfa.cli.command_line import INTERRUPTED, interruptible, named, one_line, start_metal, table_line, table_lines
from jax_mfa.kv_cache.storage import PagedArray, QuantizedArray
from jax_mfa.metal import DTYPES, runtime
from jax_mfa.metal.plan import Dispatch, Kernel, Plan
from jax_mfa.tuning import calibration
from jax_mfa.tuning.tune import relative_error

HELP = "what was found on this machine, and every kernel against the reference"
RESULTS = ("out", "lse", "dq", "dk", "dv")  # results with a column each; others share one


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Errors relative to the largest entry of each result, or why there are none."""

    errors: dict[str, float]
    allowed: dict[str, float]
    failure: str = ""

    @property
    def beyond(self) -> list[str]:
        """The results that lie too far away."""
        return [name for name, error in self.errors.items() if not error <= self.allowed[name]]

    @property
    def passed(self) -> bool:
        return not self.failure and not self.beyond


def _widened(x: Any, dtype: Any) -> Any:
    """An argument with all that is floating in it converted."""
    if isinstance(x, PagedArray):
        return x._replace(pages=_widened(x.pages, dtype))
    if isinstance(x, QuantizedArray):
        parts = {name: _widened(part, dtype) for name, part in x.parts().items()}
        return dataclasses.replace(x, **parts, dtype=np.dtype(dtype))
    if isinstance(x, Relative):
        return Relative(_widened(x.table, dtype))
    return x.astype(dtype) if isinstance(x, np.ndarray) and jnp.issubdtype(x.dtype, jnp.floating) else x


def _evaluated(problem: Problem, implementation: Any, dtype: Any = None) -> dict[str, np.ndarray]:
    """All results of a problem by name, floating inputs converted to `dtype` first if one is given."""
    widened = lambda x: _widened(x, dtype) if dtype else x
    given = {name: widened(x) for name, x in problem.arguments().items()}
    arrays = {name: x for name, x in given.items() if isinstance(x, np.ndarray | QuantizedArray | PagedArray)}
    static = {name: x for name, x in given.items() if name not in arrays}
    moving: dict[str, Any] = {name: arrays.pop(name) for name in GRADIENTS if isinstance(arrays.get(name), np.ndarray)}
    backward = not problem.decoding  # decoding has the backward pass of any other problem
    if backward:  # quantised keys and values pass their gradient on to the arrays that they were made of
        moving |= {name: x.dequantize() for name, x in arrays.items() if isinstance(x, QuantizedArray)}
        if "score_mod" in static:
            moving["captured_floats"] = static["score_mod"].table
    # the reference need not be fast, and LLVM's optimiser takes most of a small program's time
    options = {"xla_backend_optimization_level": 0} if implementation == "reference" else {}
    program = jax.jit(_both(implementation, backward, **static), compiler_options=options)
    results = program(moving, arrays, *map(widened, problem.cotangents()))
    return {name: np.asarray(x).astype(np.float64) for name, x in results.items()}


def _both(implementation: Any, backward: bool, **static: Any) -> Callable[..., Any]:
    """Output, log-sum-exp and gradients, as one function of the arrays and the cotangents."""

    def run(moving: dict[str, Any], arrays: Any, d_out: Array, d_lse: Array) -> Any:
        def attention(moving: dict[str, Any]) -> Any:
            kept = {name: dataclasses.replace(x, original=moving[name]) for name, x in arrays.items() if name in moving}
            given = {"bias": None, "mask": None, **arrays, **moving, **kept, **static}
            if "captured_floats" in given:
                given["score_mod"] = Relative(given.pop("captured_floats"))
            return attend_by_name(given, implementation, with_lse=True)

        if not backward:
            return dict(zip(("out", "lse"), attention(moving)))
        (out, lse), pullback = jax.vjp(attention, moving)
        (gradients,) = pullback((d_out, d_lse.astype(lse.dtype)))
        return {"out": out, "lse": lse} | {GRADIENTS[name]: x for name, x in gradients.items()}

    return run


# cached: a reference serves each variant, and its largest arrays are small
@functools.lru_cache(maxsize=256)
def _expected(problem: Problem) -> dict[str, np.ndarray]:
    """The reference in float64, from the same rounded inputs."""
    with compat.x64():
        return _evaluated(problem, "reference", np.float64)


def judge(problem: Problem, implementation: str) -> Verdict:
    """Runs a problem and compares; an exception is a failure with its text."""
    expected = _expected(dataclasses.replace(problem, variant=""))
    try:
        got = _evaluated(problem, implementation)
    except Exception as error:  # list any error of the device
        return Verdict({}, {}, named(error))
    return Verdict({name: relative_error(got[name], x) for name, x in expected.items()}, allowed(problem))


HEADING = ("variant", "dtype", "T, S", "H, V", "what", *RESULTS, "others", "")


def row_start(p: Problem) -> str:
    """The columns that a problem fills before it has run."""
    return table_line([p.variant, p.dtype, f"{p.queries}, {p.keys}", f"{p.head_size}, {p.value_size}", p.feature])


def row_end(v: Verdict) -> str:
    """The other columns: errors relative to the largest entry, and pass, or FAIL with what is allowed or the reason."""
    cells = [f"{v.errors[name]:.1e}" if name in v.errors else "-" for name in RESULTS]
    others = ", ".join(f"{name} {error:.1e}" for name, error in v.errors.items() if name not in RESULTS)
    reason = one_line(v.failure) or ", ".join(f"{name} > {v.allowed[name]:.1e}" for name in v.beyond)
    return table_line([*cells, others or "-", "pass" if v.passed else f"FAIL {reason}"]).removeprefix("|")


# --- kernels by themselves


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A kernel with its function constants, as Metal made it: its limits, or Metal's words."""

    kernel: Kernel
    seconds: float
    limits: dict[str, int]
    failure: str = ""


class Kernels:
    """Compiles the kernels of problems one by one, each once."""

    def __init__(self) -> None:
        self.compiled: dict[Kernel, Compiled] = {}
        self.most, self.longest = 0, 0.0  # kernels, and seconds, that a first call of both passes needs

    def prepare(self, problem: Problem) -> list[Compiled]:
        """Those of a problem."""
        kernels = [self._one(plan, dispatch) for plan in problem.plans() for dispatch in plan.dispatches]
        needed = {id(x): x.seconds for x in kernels}
        self.most, self.longest = max(self.most, len(needed)), max(self.longest, sum(needed.values()))
        return kernels

    def _one(self, plan: Plan, dispatch: Dispatch) -> Compiled:
        kernel = dispatch.kernel
        if kernel not in self.compiled:
            alone = dataclasses.replace(plan, dispatches=(dispatch,))
            start, limits, failure = time.perf_counter(), {}, ""
            try:
                limits = dict(runtime.get().module.prepare(alone.json)[kernel.name])
            except Exception as error:  # list Metal's words
                failure = named(error)
            self.compiled[kernel] = Compiled(kernel, time.perf_counter() - start, limits, failure)
        return self.compiled[kernel]

    def report(self) -> list[str]:
        """A line for each kernel: in how many sets of constants, and of these the slowest and the tightest; and where
        compiled kernels and XLA's memory came from, as the native module counts them."""
        by_name: dict[str, list[Compiled]] = {}
        for x in self.compiled.values():
            by_name.setdefault(x.kernel.name, []).append(x)
        limits = lambda group, name: [x.limits[name] for x in group if x.limits]
        failed = lambda group: next((f"FAIL {one_line(x.failure, 600)}" for x in group if x.failure), "ok")
        columns: dict[str, Callable[[list[Compiled]], str | None]] = {
            "kernel": lambda group: group[0].kernel.name,
            "constants": lambda group: str(len(group)),
            "seconds": lambda group: f"{max(x.seconds for x in group):.2f}",
            "threads": lambda group: str(group[0].kernel.threads),
            "at most": lambda group: str(min(limits(group, "max_threads"), default="-")),
            "SIMD width": lambda group: str(min(limits(group, "simd_width"), default="-")),
            "threadgroup memory": lambda group: str(max(limits(group, "static_threadgroup_memory"), default="-")),
            "fragments": lambda group: str(group[0].kernel.fragment_bytes or "-"),
            "": failed,
        }
        counts = runtime.get().module.statistics()
        seconds = sum(x.seconds for x in self.compiled.values())
        sources = f"{counts['pipelines']} compiled, {counts['pipelines_loaded']} from archives of earlier processes"
        memory = f"{counts['buffers_no_copy']} buffers without a copy, {counts['buffers_staged']} staged"
        first = f"makes {self.most} at most, in {self.longest:.2f} s one by one"
        return [
            *table_lines(columns, by_name.values()),
            "",
            f"{len(self.compiled)} kernels made in {seconds:.1f} s: {sources}; {memory}.",
            f"A first call, forward and backward, {first}.",
            "Registers: Metal does not tell, but `at most` falls with them; fragments: bytes of them, as planned.",
        ]


def _on_cpu() -> Any:
    """Metal runs what is compiled for cpu, whatever else JAX has here."""
    return jax.default_device(jax.local_devices(backend="cpu")[0])


def _judged(todo: list[Problem], implementation: str, kernels: Kernels) -> Iterator[tuple[str, bool]]:
    """The start of each problem's row before it runs, and then its end; and whether it passed."""
    metal = implementation == "metal"
    with _on_cpu() if metal else contextlib.nullcontext():
        for variant, its_problems in itertools.groupby(todo, key=lambda p: p.variant):
            with runtime.variant(variant) if metal else contextlib.nullcontext():
                for problem in its_problems:
                    yield row_start(problem), True
                    failed = [x for x in kernels.prepare(problem) if x.failure] if metal else []
                    reasons = "; ".join(f"{x.kernel.name}: {x.failure}" for x in failed)
                    verdict = Verdict({}, {}, reasons) if failed else judge(problem, implementation)
                    yield f"{row_end(verdict)}\n", verdict.passed


# --- writes of kernels: a line of the report each, and whether all is well


def _filled_pages() -> tuple[str, bool]:
    """Whether kernels write new tokens into the pages of a pool."""
    if wrong := check_writes.differing():
        return f"FAIL pages of {', '.join(wrong)} differ from what XLA writes", False
    return f"pass: pages of {', '.join(check_writes.CASES)}", True


def _shared_lines() -> tuple[str, bool]:
    """Whether work is lost where CPU and GPU write to one cache line.

    Where it is, and is not with outputs staged, they are staged from here on, in this process and every later one.
    """
    module = runtime.get().module
    staged_below = module.stage_shared_lines(0)
    try:
        lost = check_writes.lost(module)
        module.stage_shared_lines(check_writes.ALL)
        staged = check_writes.lost(module) if lost else 0
        if lost and not staged:
            staged_below = check_writes.ALL
    finally:
        module.stage_shared_lines(staged_below)
    if not lost:
        still = "; they stay staged, as found before" if staged_below else ""
        return f"pass: nothing is lost where CPU and GPU write to one line at once{still}", True
    failure = f"FAIL {lost} entries lost where CPU and GPU write to one line at once; {staged} with outputs staged"
    if staged:
        return failure, False
    source = f"found by `python -m jax_mfa check` on {datetime.date.today().isoformat()}"
    found = {"staged_below": check_writes.ALL, "source": source}
    try:
        file = runtime.STAGED_BELOW.store(runtime.get().device.get("name", ""), found)
        where = f"on this chip ({file})"
    except (OSError, RuntimeError) as error:
        where = f"in this process only, for nothing can be kept: {error}"
    return f"{failure}, as they are from here on {where}", False


def _writes() -> Iterator[tuple[str, bool]]:
    """The name of each check of what kernels write, and then what it found."""
    for name, check in {"pages filled": _filled_pages, "shared lines": _shared_lines}.items():
        yield f"{name}: ", True
        try:
            with _on_cpu():
                text, passed = check()
        except Exception as error:  # report any error of the device
            text, passed = f"FAIL {one_line(named(error))}", False
        yield f"{text}\n", passed


# --- findings


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def findings() -> Iterator[tuple[str, str]]:
    """What there is on this machine, as names and values. Raises what JAX or Metal raise where they cannot start."""
    mac = platform.mac_ver()[0]
    system = f"macOS {mac}" if mac else platform.system()
    plugins = sorted({p.name for p in importlib.metadata.entry_points(group="jax_plugins")})
    yield "machine", f"{platform.machine()}, {system}, Python {platform.python_version()}"
    yield "jax_mfa", _version("jax-mfa")
    yield "JAX", f"{jax.__version__}, jaxlib {_version('jaxlib')}, flax {_version('flax')}"
    yield "plugins", ", ".join(plugins) or "none"
    yield "backend", f"{jax.default_backend()}: {jax.devices()[0].device_kind}, {jax.device_count()} of them"
    yield "JAX_MFA_DEVICE", os.environ.get("JAX_MFA_DEVICE") or "not set"
    metal_runtime = start_metal()
    if metal_runtime.reason:
        yield "Metal", f"cannot be used: {metal_runtime.reason}"
        return
    device = metal_runtime.device
    yield "Metal", f"{device.get('name', '?')}, {device.get('os', '?')}"
    yield "families", ", ".join(device.get("families", ())) or "none known"
    yield "threadgroup", f"{device.get('max_threadgroup_memory', '?')} bytes of memory"
    variants = ", ".join(metal_runtime.variants)
    yield "variants", f"{variants}: the tile tables that it can run; the first unless told otherwise"


def choices() -> Iterator[str]:
    """Which implementation each dtype takes, and why."""
    for dtype in (*DTYPES, "float64"):
        with compat.x64():
            choice = explain(*[jax.ShapeDtypeStruct((1, 512, 4, 64), jnp.dtype(dtype))] * 3)
        yield f"  {dtype}: {choice.implementation}"
        yield textwrap.indent(str(choice), " " * 6)


# --- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `python -m jax_mfa check`."""
    parser.add_argument("--quick", action="store_true", help="float16 and the smallest head sizes only")
    other = parser.add_mutually_exclusive_group()
    calibrate = "instead, measure from which size on Metal pays, and keep it for this chip"
    other.add_argument("--calibrate", action="store_true", help=calibrate)
    compile_only = (
        "instead, put every kernel through Apple's compiler, for which a Mac needs Xcode and no Metal device; native "
        "code and a report go to this folder, default: %(const)s"
    )
    kind: Any = {"nargs": "?", "const": "compiled", "type": pathlib.Path, "metavar": "FOLDER"}
    other.add_argument("--compile-only", help=compile_only, **kind)
    report = "end with one short text to paste into an issue, and what to do next"
    other.add_argument("--report", action="store_true", help=report)


def _calibrate(metal_runtime: runtime.Runtime) -> int:
    if metal_runtime.reason:
        print(f"FAILED: without Metal there is nothing to calibrate: {metal_runtime.reason}")
        return 2
    try:
        for line in interruptible(calibration.calibrated(metal_runtime.device.get("name", ""))):
            print(line, flush=True)
    except KeyboardInterrupt:
        print("interrupted: nothing was kept")
        return INTERRUPTED
    except Exception as error:  # report errors of the device and of the folder
        print(f"FAILED: {named(error)}")
        return 1
    return 0


def run(options: argparse.Namespace) -> int:
    """Prints what was found and the tables, and at last the report where one is wanted.

    0: everything passed. 1: something did not, or Metal should be here and cannot be used. 2: nothing could be run.
    130: interrupted.
    """
    if options.compile_only:
        return check_compile.run(options.compile_only, options.quick)
    report = Report()
    status = _run(options, report)
    if options.report:
        print(*report.lines(passed=status == 0), sep="\n")
    return status


def _run(options: argparse.Namespace, report: Report) -> int:
    def verdict(text: str) -> None:
        report.verdict = text
        print(text)

    try:
        for name, value in findings():
            report.found.append(f"{name:15} {value}")
            print(report.found[-1], flush=True)
        metal_runtime = runtime.get()
    except OSError:  # output that nobody reads
        raise
    except Exception as error:  # report whatever keeps JAX or Metal from starting
        verdict(f"{'FAILED':15} {one_line(named(error))}")
        return 2
    if options.calibrate:
        return _calibrate(metal_runtime)
    report.platform, report.without_metal = jax.default_backend(), metal_runtime.reason
    chosen = ["", "implementations", *choices()]
    report.found += chosen
    print(*chosen, "", sep="\n", flush=True)
    implementation = "blockwise" if metal_runtime.reason else "metal"
    variants = ["blockwise"] if metal_runtime.reason else metal_runtime.variants
    todo = [p for p in problems(variants) if quick(p) or not options.quick]
    start, interrupted, done = time.perf_counter(), False, 0
    kernels = Kernels()
    try:
        print(*table_lines(dict.fromkeys(HEADING, str), []), sep="\n", flush=True)
        for text, passed in interruptible(_judged(todo, implementation, kernels)):
            report.step(text, passed)
            done += not report.running
        if implementation == "metal":
            print()
            for text, passed in interruptible(_writes()):
                report.step(text, passed)
    except KeyboardInterrupt:
        interrupted = True
        print(" interrupted")
    failed = len(report.failures)
    what = f"{implementation}, {done} problems in {time.perf_counter() - start:.0f} s"
    print(f"\nB = {BATCH}, N/K = {HEADS}/{KEY_HEADS}; errors are relative to the largest entry.")
    if not options.report:
        print("To report a problem, paste all of this, or the end of what `--report` prints.")
    if kernels.compiled:
        print("", *kernels.report(), sep="\n")
    if metal_runtime.reason:
        print(f"Metal was not checked ({metal_runtime.reason}); blockwise, which runs in its place, was.")
    if interrupted:
        verdict(f"interrupted: {failed} failed of {what}; {len(todo) - done} did not run")
        return INTERRUPTED
    if metal_runtime.reason and not metal_runtime.expected:
        verdict(f"FAILED: Metal should be here and cannot be used; besides, {failed} of {what}")
        return 1
    verdict(f"FAILED: {failed} of {what}" if failed else f"all passed: {what}")
    return 1 if failed else 0
