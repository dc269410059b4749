"""Says what this machine has, and runs every kernel variant against the reference: a table, and an exit status.

Forward and backward of each tile table, dtype and class of head sizes, dense and causal, with grouped heads and lengths
that fill no tile. The problem stands in its row before it runs, so that the last row of a run that hangs or crashes
names it. Where Metal cannot be used it says why, and checks the blockwise implementation instead.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.metadata
import itertools
import os
import platform
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mfa.api import explain, flash_attention
from jax_mfa.command_line import INTERRUPTED, interruptible, start_metal
from jax_mfa.metal import DTYPES, runtime, tiles
from jax_mfa.metal.plan import ITEM_SIZES

HELP = "what was found on this machine, and every kernel against the reference"
RESULTS = ("out", "lse", "dq", "dk", "dv")
FORWARD = 2e-6  # float32 forward, of the largest output
BATCH, HEADS, KEY_HEADS = 2, 4, 2


@dataclasses.dataclass(frozen=True)
class Problem:
    """One line of the table. T and S fill no tile of any size, and reach over several tiles of most."""

    variant: str
    dtype: str
    head_size: int
    value_size: int
    causal: bool
    queries: int = 75
    keys: int = 67

    def arguments(self) -> dict[str, Any]:
        return {"is_causal": True, "query_offset": 7} if self.causal else {}

    def arrays(self) -> tuple[np.ndarray, ...]:
        """Query, key, value, and the cotangents of output and log-sum-exp, random."""
        rng = np.random.default_rng(self.head_size)
        shaped = lambda *shape: np.asarray(rng.standard_normal(shape), np.float32)
        row = (BATCH, self.queries, HEADS)
        column = (BATCH, self.keys, KEY_HEADS)
        inputs = [
            (*row, self.head_size),
            (*column, self.head_size),
            (*column, self.value_size),
            (*row, self.value_size),
        ]
        rounded = [shaped(*shape).astype(jnp.dtype(self.dtype)) for shape in inputs]
        return (*rounded, shaped(*row))


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Errors relative to the largest entry of each result, or why there are none."""

    problem: Problem
    errors: dict[str, float]
    allowed: dict[str, float]
    failure: str = ""

    @property
    def passed(self) -> bool:
        return not self.failure and all(self.errors[name] <= self.allowed[name] for name in RESULTS)


def head_sizes(variant: str, dtype: str) -> list[tuple[int, int]]:
    """Head sizes H, V for each row of a tile table: the largest that it serves, and beneath it one that is odd."""
    limits = [most for most, item in tiles.VARIANTS[variant] if item == ITEM_SIZES[dtype]]
    return [(most, most if i % 2 else most - 7) for i, most in enumerate(sorted(limits))]


def problems(variants: list[str]) -> list[Problem]:
    """Dense and causal for each row of a table; above H = 128, where kernels are slow to compile, in turns."""
    found = []
    for variant, dtype in itertools.product(variants, DTYPES):
        sizes = head_sizes(variant, dtype) if variant in tiles.VARIANTS else [(32, 25), (128, 128)]
        for i, (h, v) in enumerate(sizes):
            masks = (False, True) if h <= 128 else (i % 2 == 0,)
            found += [Problem(variant, dtype, h, v, causal) for causal in masks]
    return found


def _x64():
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64

    return enable_x64()


def _both(implementation: Any, **arguments):
    """Output, log-sum-exp and gradients, as one function of query, key, value and the cotangents."""
    attention = functools.partial(flash_attention, implementation=implementation, **arguments)

    def run(query, key, value, d_out, d_lse):
        (out, lse), pullback = jax.vjp(attention, query, key, value)
        return (out, lse, *pullback((d_out, d_lse.astype(lse.dtype))))

    return run


# a reference is the same for each variant, and its largest arrays are small
@functools.lru_cache(maxsize=64)
def _expected(problem: Problem) -> tuple[np.ndarray, ...]:
    """The reference in float64, from the same rounded inputs."""
    with _x64():
        wide = [x.astype(np.float64) for x in problem.arrays()]
        return tuple(np.asarray(x) for x in jax.jit(_both("reference", **problem.arguments()))(*wide))


def allowed(problem: Problem) -> dict[str, float]:
    """How far results may lie from the reference, relative to the largest entry of each.

    * out: 2e-6 for arithmetic in float32, and for 16 bits one unit in the last place, for the rounding at the end.
    * lse: it is float32 whatever the inputs.
    * gradients: float32 sums of as many terms as the group has rows, whose errors add up like a random walk, beside a
      handful for exp and division; and three units of the dtype: one for the rounding at the end, and two because the
      rounded output enters the row sums.
    """
    unit = float(jnp.finfo(jnp.dtype(problem.dtype)).eps)
    single = float(jnp.finfo(jnp.float32).eps)
    terms = max(problem.keys, problem.queries * HEADS // KEY_HEADS) + problem.head_size
    gradient = single * (8 + terms**0.5) + 3 * unit
    rounding = unit if problem.dtype != "float32" else 0.0
    return {"out": FORWARD + rounding, "lse": FORWARD, "dq": gradient, "dk": gradient, "dv": gradient}


def judge(problem: Problem, implementation: str) -> Verdict:
    """Runs a problem and compares; an exception is a failure with its text."""
    expected = _expected(dataclasses.replace(problem, variant=""))
    try:
        results = jax.jit(_both(implementation, **problem.arguments()))(*problem.arrays())
        got = [np.asarray(x).astype(np.float64) for x in results]
    except Exception as error:  # whatever the device says belongs in the table
        return Verdict(problem, {}, {}, f"{type(error).__name__}: {error}")
    errors = {}
    for name, x, y in zip(RESULTS, got, expected):
        relative = float(np.abs(x - y).max() / np.abs(y).max())
        errors[name] = relative if np.isfinite(relative) else float("inf")
    return Verdict(problem, errors, allowed(problem))


HEADING = f"| variant | dtype | H, V | mask | {' | '.join(RESULTS)} | |\n{'|---' * (len(RESULTS) + 5)}|"


def row_start(p: Problem) -> str:
    """The columns that a problem fills before it has run."""
    mask = "causal" if p.causal else "dense"
    return f"| {p.variant} | {p.dtype} | {p.head_size}, {p.value_size} | {mask} |"


def row_end(v: Verdict) -> str:
    """The other columns: errors relative to the largest entry, and pass, or FAIL with what is allowed or the reason."""
    if v.failure:
        cells, last = ["–"] * len(RESULTS), "FAIL " + " ".join(v.failure.split())[:300]
    else:
        cells = [f"{v.errors[name]:.1e}" for name in RESULTS]
        beyond = [f"{name} > {v.allowed[name]:.1e}" for name in RESULTS if not v.errors[name] <= v.allowed[name]]
        last = f"FAIL {', '.join(beyond)}" if beyond else "pass"
    return f" {' | '.join(cells)} | {last} |"


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
    families = device.get("families", ())
    yield (
        "Metal",
        f"{device.get('name', '?')}, {device.get('os', '?')}, {families[-1] if families else 'no family known'}",
    )
    yield "threadgroup", f"{device.get('max_threadgroup_memory', '?')} bytes of memory"
    yield "variant", f"{found.variant}: the tile table that this chip takes unless told otherwise"


def choices() -> Iterator[str]:
    """Which implementation each dtype takes, and why."""
    for dtype in (*DTYPES, "float64"):
        with _x64():
            shape = jax.ShapeDtypeStruct((1, 128, 4, 64), jnp.dtype(dtype))
            found = explain(shape, shape, shape)
        lines = str(found).splitlines()
        yield f"{dtype}: {found.implementation}"
        yield from (f"    {line}" for line in lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `python -m jax_mfa check`."""
    parser.add_argument("--quick", action="store_true", help="float16 and the smallest head sizes only")


def _judge_all(todo: list[Problem], implementation: str) -> Iterator[Problem | Verdict]:
    """Each problem before it runs, and then its verdict."""
    metal = implementation == "metal"
    # Metal runs what is compiled for cpu, whatever else JAX has here
    pinned = jax.default_device(jax.local_devices(backend="cpu")[0]) if metal else contextlib.nullcontext()
    with pinned:
        for variant, its_problems in itertools.groupby(todo, key=lambda p: p.variant):
            with runtime.variant(variant) if metal else contextlib.nullcontext():
                for problem in its_problems:
                    yield problem
                    yield judge(problem, implementation)


def run(options: argparse.Namespace) -> int:
    """Prints what was found and the table.

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
    print("\nimplementations")
    for line in choices():
        print(f"  {line}")
    print(flush=True)
    implementation = "blockwise" if found.reason else "metal"
    todo = problems(["blockwise"] if found.reason else list(tiles.NAMES))
    if options.quick:
        todo = [p for p in todo if p.dtype == "float16" and p.head_size <= 64]
    start, interrupted = time.perf_counter(), False
    verdicts: list[Verdict] = []
    try:
        print(HEADING, flush=True)
        for step in interruptible(_judge_all(todo, implementation)):
            if isinstance(step, Problem):
                print(row_start(step), end="", flush=True)
            else:
                print(row_end(step), flush=True)
                verdicts.append(step)
    except KeyboardInterrupt:
        interrupted = True
        print(" interrupted")
    failed = sum(not v.passed for v in verdicts)
    seconds = time.perf_counter() - start
    what = f"{implementation}, {len(verdicts)} problems in {seconds:.0f} s"
    sizes = f"B = {BATCH}, N/K = {HEADS}/{KEY_HEADS}, T = {Problem.queries}, S = {Problem.keys}"
    print(f"\n{sizes}; errors are relative to the largest entry.")
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
