"""Says what this machine has, and runs every kernel against the reference: a report to paste, and an exit status.

Forward and backward of each tile table that the device can run, of each dtype, class of head sizes and feature, and
decoding, of keys and values that are quantised or in pages too; with grouped heads and lengths that fill no tile. Each
kernel is compiled by itself first, and what Metal says of it is a table of its own. A problem stands in its row before
it runs, so that the last row of a run that hangs or crashes names it; after a failure the next one runs. Last come
tokens that kernels write into pages, and a program in which CPU and GPU share cache lines. Where Metal cannot be used
it says why, and checks the blockwise implementation instead.
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
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_mfa import compat
from jax_mfa.api import attend_by_name, explain
from jax_mfa.cli import check_lines, check_pages
from jax_mfa.cli.check_problems import BATCH, GRADIENTS, HEADS, KEY_HEADS, Problem, allowed, problems, quick
from jax_mfa.cli.command_line import INTERRUPTED, interruptible, start_metal
from jax_mfa.kv_cache.storage import PagedArray, QuantizedArray
from jax_mfa.metal import DTYPES, runtime
from jax_mfa.metal.plan import Kernel, Plan
from jax_mfa.tuning import calibration, lines

HELP = "what was found on this machine, and every kernel against the reference"
RESULTS = ("out", "lse", "dq", "dk", "dv")  # with a column each; others share one


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Errors relative to the largest entry of each result, or why there are none."""

    problem: Problem
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


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A kernel with its function constants, as Metal made it: its limits, or Metal's words."""

    kernel: Kernel
    seconds: float
    limits: dict[str, int]
    failure: str = ""


def _widened(x: Any, dtype: Any) -> Any:
    """An argument with all that is floating in it converted."""
    if isinstance(x, PagedArray):
        return x._replace(pages=_widened(x.pages, dtype))
    if isinstance(x, QuantizedArray):
        parts = {name: _widened(part, dtype) for name, part in x.parts().items()}
        return dataclasses.replace(x, **parts, dtype=np.dtype(dtype))
    return x.astype(dtype) if isinstance(x, np.ndarray) and jnp.issubdtype(x.dtype, jnp.floating) else x


def _evaluated(problem: Problem, implementation: Any, dtype: Any = None) -> dict[str, np.ndarray]:
    """All results of a problem by name, floating inputs converted to `dtype` first if one is given."""
    wide = lambda x: _widened(x, dtype) if dtype else x
    given, cotangents = {name: wide(x) for name, x in problem.arguments().items()}, map(wide, problem.cotangents())
    arrays = {name: x for name, x in given.items() if isinstance(x, np.ndarray | QuantizedArray | PagedArray)}
    static = {name: x for name, x in given.items() if name not in arrays}
    moving: dict[str, Any] = {name: arrays.pop(name) for name in GRADIENTS if isinstance(arrays.get(name), np.ndarray)}
    backward = not problem.decoding  # the backward pass of decoding is that of any other problem
    if backward:  # what is quantised passes its gradient on to what it was made of
        moving |= {name: x.dequantize() for name, x in arrays.items() if isinstance(x, QuantizedArray)}
    # of the reference nobody asks for speed, and LLVM's optimiser takes most of a small program's time
    options = {"xla_backend_optimization_level": 0} if implementation == "reference" else {}
    program = jax.jit(_both(implementation, backward, **static), compiler_options=options)
    results = program(moving, arrays, *cotangents)
    return {name: np.asarray(x).astype(np.float64) for name, x in results.items()}


def _both(implementation: Any, backward: bool, **static: Any) -> Callable[..., Any]:
    """Output, log-sum-exp and gradients, as one function of the arrays and the cotangents."""

    def run(moving: dict[str, Any], arrays: Any, d_out: Array, d_lse: Array) -> Any:
        def attention(moving: dict[str, Any]) -> Any:
            kept = {name: dataclasses.replace(x, original=moving[name]) for name, x in arrays.items() if name in moving}
            given = {"bias": None, "mask": None, **arrays, **moving, **kept, **static}
            return attend_by_name(given, implementation, with_lse=True)

        if not backward:
            return dict(zip(("out", "lse"), attention(moving)))
        (out, lse), pullback = jax.vjp(attention, moving)
        (gradients,) = pullback((d_out, d_lse.astype(lse.dtype)))
        return {"out": out, "lse": lse} | {GRADIENTS[name]: x for name, x in gradients.items()}

    return run


# a reference is the same for each variant, and its largest arrays are small
@functools.lru_cache(maxsize=256)
def _expected(problem: Problem) -> dict[str, np.ndarray]:
    """The reference in float64, from the same rounded inputs."""
    with compat.x64():
        return _evaluated(problem, "reference", np.float64)


def _error(got: np.ndarray, expected: np.ndarray) -> float:
    """The largest error over the largest entry; infinite where what is not finite differs."""
    finite = np.isfinite(expected)
    if not np.array_equal(got[~finite], expected[~finite], equal_nan=True):
        return float("inf")
    largest = np.abs(expected[finite]).max(initial=np.finfo(np.float32).tiny)
    relative = float(np.abs(got[finite] - expected[finite]).max(initial=0.0) / largest)
    return relative if np.isfinite(relative) else float("inf")


def judge(problem: Problem, implementation: str) -> Verdict:
    """Runs a problem and compares; an exception is a failure with its text."""
    expected = _expected(dataclasses.replace(problem, variant=""))
    try:
        got = _evaluated(problem, implementation)
    except Exception as error:  # whatever the device says belongs in the table
        return Verdict(problem, {}, {}, f"{type(error).__name__}: {error}")
    return Verdict(problem, {name: _error(got[name], x) for name, x in expected.items()}, allowed(problem))


# --- kernels by themselves


class Kernels:
    """Compiles the kernels of problems one by one, each once."""

    def __init__(self) -> None:
        self.compiled: dict[tuple[Any, ...], Compiled] = {}
        self.most, self.longest = 0, 0.0  # kernels, and seconds, that a first call of both passes needs

    def prepare(self, problem: Problem) -> list[Compiled]:
        """Those of a problem."""
        found = [self._one(plan, i) for plan in problem.plans() for i in range(len(plan.dispatches))]
        needed = {id(x): x.seconds for x in found}
        self.most, self.longest = max(self.most, len(needed)), max(self.longest, sum(needed.values()))
        return found

    def _one(self, plan: Plan, i: int) -> Compiled:
        kernel = plan.dispatches[i].kernel
        key = (kernel.name, kernel.constants)
        if key not in self.compiled:
            alone = dataclasses.replace(plan, dispatches=plan.dispatches[i : i + 1])
            start, limits, failure = time.perf_counter(), {}, ""
            try:
                limits = dict(runtime.get().module.prepare(alone.json)[kernel.name])
            except Exception as error:  # Metal's words belong in the table
                failure = f"{type(error).__name__}: {error}"
            self.compiled[key] = Compiled(kernel, time.perf_counter() - start, limits, failure)
        return self.compiled[key]


KERNELS_HEADING = (
    "| kernel | constants | seconds | threads | at most | SIMD width | threadgroup memory | fragments | |\n"
    f"{'|---' * 9}|"
)


def kernel_rows(compiled: Iterable[Compiled]) -> Iterator[str]:
    """A line for each kernel: in how many sets of constants, and of these the slowest and the tightest."""
    by_name: dict[str, list[Compiled]] = {}
    for x in compiled:
        by_name.setdefault(x.kernel.name, []).append(x)
    for name, group in by_name.items():
        kernel, known = group[0].kernel, [x.limits for x in group if x.limits]
        at_most = lambda what, pick, known=known: str(pick(x[what] for x in known)) if known else "-"
        failures = [" ".join(x.failure.split())[:600] for x in group if x.failure]
        cells = [
            name,
            str(len(group)),
            f"{max(x.seconds for x in group):.2f}",
            str(kernel.threads),
            at_most("max_threads", min),
            at_most("simd_width", min),
            at_most("static_threadgroup_memory", max),
            str(kernel.fragment_bytes or "-"),
            f"FAIL {failures[0]}" if failures else "ok",
        ]
        yield f"| {' | '.join(cells)} |"


# --- the table of problems

HEADING = f"| variant | dtype | T, S | H, V | what | {' | '.join(RESULTS)} | others | |\n{'|---' * (len(RESULTS) + 7)}|"


def row_start(p: Problem) -> str:
    """The columns that a problem fills before it has run."""
    sizes = f"{p.queries}, {p.keys} | {p.head_size}, {p.value_size}"
    return f"| {p.variant} | {p.dtype} | {sizes} | {p.feature} |"


def row_end(v: Verdict) -> str:
    """The other columns: errors relative to the largest entry, and pass, or FAIL with what is allowed or the reason."""
    cells = [f"{v.errors[name]:.1e}" if name in v.errors else "-" for name in RESULTS]
    others = [f"{name} {error:.1e}" for name, error in v.errors.items() if name not in RESULTS]
    if v.failure:
        last = "FAIL " + " ".join(v.failure.split())[:300]
    else:
        beyond = [f"{name} > {v.allowed[name]:.1e}" for name in v.beyond]
        last = f"FAIL {', '.join(beyond)}" if beyond else "pass"
    return f" {' | '.join([*cells, ', '.join(others) or '-'])} | {last} |"


# --- what there is


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _plugins() -> str:
    found = sorted({p.name for p in importlib.metadata.entry_points(group="jax_plugins")})
    return ", ".join(found) or "none"


def findings() -> Iterator[tuple[str, str]]:
    """What there is on this machine, as names and values. Raises what JAX or Metal raise where they cannot start."""
    mac = platform.mac_ver()[0]
    yield (
        "machine",
        f"{platform.machine()}, {f'macOS {mac}' if mac else platform.system()}, Python {platform.python_version()}",
    )
    yield "jax_mfa", _version("jax-mfa")
    yield "JAX", f"{jax.__version__}, jaxlib {_version('jaxlib')}, flax {_version('flax')}"
    yield "plugins", _plugins()
    yield "backend", f"{jax.default_backend()}: {jax.devices()[0].device_kind}, {jax.device_count()} of them"
    yield "JAX_MFA_DEVICE", os.environ.get("JAX_MFA_DEVICE") or "not set"
    found = start_metal()
    if found.reason:
        yield "Metal", f"cannot be used: {found.reason}"
        return
    device = found.device
    yield "Metal", f"{device.get('name', '?')}, {device.get('os', '?')}"
    yield "families", ", ".join(device.get("families", ())) or "none known"
    yield "threadgroup", f"{device.get('max_threadgroup_memory', '?')} bytes of memory"
    yield "variants", f"{', '.join(found.variants)}: the tile tables that it can run; the first unless told otherwise"


def choices() -> Iterator[str]:
    """Which implementation each dtype takes, and why."""
    for dtype in (*DTYPES, "float64"):
        with compat.x64():
            shape = jax.ShapeDtypeStruct((1, 512, 4, 64), jnp.dtype(dtype))
            found = explain(shape, shape, shape)
        verdicts = str(found).splitlines()
        yield f"{dtype}: {found.implementation}"
        yield from (f"    {line}" for line in verdicts)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `python -m jax_mfa check`."""
    parser.add_argument("--quick", action="store_true", help="float16 and the smallest head sizes only")
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="instead, measure from which size on Metal pays, and keep it for this chip",
    )


def _judge_all(todo: list[Problem], implementation: str, kernels: Kernels) -> Iterator[Problem | Verdict]:
    """Each problem before it runs, and then its verdict."""
    metal = implementation == "metal"
    # Metal runs what is compiled for cpu, whatever else JAX has here
    pinned = jax.default_device(jax.local_devices(backend="cpu")[0]) if metal else contextlib.nullcontext()
    with pinned:
        for variant, its_problems in itertools.groupby(todo, key=lambda p: p.variant):
            with runtime.variant(variant) if metal else contextlib.nullcontext():
                for problem in its_problems:
                    yield problem
                    failed = [x for x in kernels.prepare(problem) if x.failure] if metal else []
                    if failed:
                        reasons = "; ".join(f"{x.kernel.name}: {x.failure}" for x in failed)
                        yield Verdict(problem, {}, {}, reasons)
                    else:
                        yield judge(problem, implementation)


def _filled_pages() -> Iterator[tuple[str, bool]]:
    """Whether kernels write new tokens into the pages of a pool: in words, and whether all is well."""
    try:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            wrong = check_pages.differing()
        cases = ", ".join(wrong or check_pages.CASES)
        yield (f"FAIL pages of {cases} differ from what XLA writes" if wrong else f"pass: pages of {cases}"), not wrong
    except Exception as error:  # whatever the device says
        yield f"FAIL {type(error).__name__}: {' '.join(str(error).split())[:300]}", False


def _shared_lines(chip: str) -> Iterator[tuple[str, bool]]:
    """Whether work is lost where CPU and GPU write to one cache line: in words, and whether all is well.

    Where it is, and is not with outputs staged, they are staged from here on, in this process and every later one.
    """
    try:
        module = runtime.get().module
        staged_below = module.stage_shared_lines(0)
        try:
            with jax.default_device(jax.local_devices(backend="cpu")[0]):
                lost = check_lines.lost(module)
                module.stage_shared_lines(check_lines.ALL)
                staged = check_lines.lost(module) if lost else 0
            if lost and not staged:
                staged_below = check_lines.ALL
        finally:
            module.stage_shared_lines(staged_below)
        if lost:
            found = (
                f"FAIL {lost} entries lost where CPU and GPU write to one line at once; {staged} with outputs staged"
            )
            yield found + ("" if staged else f", as they are from here on{_kept_staged(chip)}"), False
        else:
            still = "; they stay staged, as found before" if staged_below else ""
            yield f"pass: nothing is lost where CPU and GPU write to one line at once{still}", True
    except Exception as error:  # whatever the device says
        yield f"FAIL {type(error).__name__}: {' '.join(str(error).split())[:300]}", False


def _kept_staged(chip: str) -> str:
    source = f"found by `python -m jax_mfa check` on {datetime.date.today().isoformat()}"
    try:
        return f" on this chip ({lines.keep_staged_below(chip, check_lines.ALL, source)})"
    except (OSError, RuntimeError) as error:
        return f" in this process only, for nothing can be kept: {error}"


def _sources() -> str:
    """Where compiled kernels came from, as the native module counts them."""
    try:
        found = runtime.get().module.statistics()
        return f": {found['pipelines']} compiled, {found['pipelines_loaded']} from archives of earlier processes"
    except Exception:  # a report has no use for a traceback
        return ""


def _memory() -> str:
    """How XLA's memory reached the device, of the calls so far."""
    try:
        found = runtime.get().module.statistics()
        return f"{found['buffers_no_copy']} buffers without a copy, {found['buffers_staged']} staged"
    except Exception as error:  # a report has no use for a traceback
        return f"not known: {error}"


def _calibrate(found: runtime.Runtime) -> int:
    if found.reason:
        print(f"FAILED: without Metal there is nothing to calibrate: {found.reason}")
        return 2
    try:
        for line in interruptible(calibration.calibrated(found.device.get("name", ""))):
            print(line, flush=True)
    except KeyboardInterrupt:
        print("interrupted: nothing was kept")
        return INTERRUPTED
    except Exception as error:  # of the device, or of the folder
        print(f"FAILED: {type(error).__name__}: {error}")
        return 1
    return 0


def run(options: argparse.Namespace) -> int:
    """Prints what was found and the tables.

    0: everything passed. 1: something did not, or Metal should be here and cannot be used. 2: nothing could be run.
    130: interrupted.
    """
    try:
        for name, value in findings():
            print(f"{name:15} {value}", flush=True)
        found = runtime.get()
    except OSError:  # of the output
        raise
    except Exception as error:  # whatever keeps JAX or Metal from starting is a finding
        print(f"{'FAILED':15} {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        return 2
    if options.calibrate:
        return _calibrate(found)
    print("\nimplementations")
    for line in choices():
        print(f"  {line}")
    print(flush=True)
    implementation = "blockwise" if found.reason else "metal"
    todo = problems(["blockwise"] if found.reason else runtime.get().variants)
    if options.quick:
        todo = [p for p in todo if quick(p)]
    start, interrupted, others_failed = time.perf_counter(), False, 0
    verdicts: list[Verdict] = []
    kernels = Kernels()
    try:
        print(HEADING, flush=True)
        for step in interruptible(_judge_all(todo, implementation, kernels)):
            if isinstance(step, Problem):
                print(row_start(step), end="", flush=True)
            else:
                print(row_end(step), flush=True)
                verdicts.append(step)
        if implementation == "metal":
            print()
            others = {"pages filled": _filled_pages(), "shared lines": _shared_lines(found.device.get("name", ""))}
            for name, steps in others.items():
                print(f"{name}:", end=" ", flush=True)
                for text, passed in interruptible(steps):
                    print(text, flush=True)
                    others_failed += not passed
    except KeyboardInterrupt:
        interrupted = True
        print(" interrupted")
    failed = sum(not v.passed for v in verdicts) + others_failed
    seconds = time.perf_counter() - start
    what = f"{implementation}, {len(verdicts)} problems in {seconds:.0f} s"
    print(f"\nB = {BATCH}, N/K = {HEADS}/{KEY_HEADS}; errors are relative to the largest entry.")
    print("To report a problem, paste all of this.")
    compiled = list(kernels.compiled.values())
    if compiled:
        print(f"\n{KERNELS_HEADING}")
        for row in kernel_rows(compiled):
            print(row)
        print(f"\n{len(compiled)} kernels made in {sum(x.seconds for x in compiled):.1f} s{_sources()}; {_memory()}.")
        print(
            f"A first call, forward and backward, makes {kernels.most} at most, in {kernels.longest:.2f} s one by one."
        )
        print("Registers: Metal does not tell, but `at most` falls with them; fragments: bytes of them, as planned.")
    if found.reason:
        print(f"Metal was not checked ({found.reason}); blockwise, which runs in its place, was.")
    if interrupted:
        print(f"interrupted: {failed} failed of {what}; {len(todo) - len(verdicts)} did not run")
        return INTERRUPTED
    if found.reason and not found.expected:
        print(f"FAILED: Metal should be here and cannot be used; besides, {failed} of {what}")
        return 1
    print(f"FAILED: {failed} of {what}" if failed else f"all passed: {what}")
    return 1 if failed else 0
