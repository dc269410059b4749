"""Measures the figures behind `crossover.py` on this machine, for `python -m jax_mfa check --calibrate`.

Three kinds of calls, for each implementation: one that computes next to nothing, one that multiplies most of its time,
and one row against many keys, which reads most of its time. Knows how to time; the estimate is `crossover`'s.
"""

from __future__ import annotations

import datetime
import functools
import statistics
from collections.abc import Generator, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_mfa
from jax_mfa.api import dot_product_attention
from jax_mfa.arguments import specify_abstract
from jax_mfa.choice import Implementation
from jax_mfa.problem import Operands, Specification
from jax_mfa.tuning import crossover, timing

CALLS = 4  # one after another within a program, so that starting the program is not what is timed
LONG = 10e-3  # seconds: a call that takes this is not mostly its start
MOST = 8192  # T or S
HEADS, SIZE = 4, 64
Sample = tuple[float, int, int]  # seconds, FLOPs and bytes of a call


def _problem(rows: int, columns: int, heads: int = HEADS, size: int = SIZE) -> tuple[Specification, Operands]:
    shape = lambda x: jax.ShapeDtypeStruct((1, x, heads, size), jnp.float32)
    return specify_abstract(query=shape(rows), key=shape(columns), value=shape(columns))


def _chain(implementation: Implementation, query: Any, key: Any, value: Any) -> Any:
    for _ in range(CALLS):
        query = dot_product_attention(query, key, value, implementation=implementation)
    return query


def _sample(implementation: Implementation, *sizes: int) -> Sample:
    """A call's seconds are the median of several runs of a program of `CALLS` calls."""
    spec, operands = _problem(*sizes)
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in operands[:3]]
    program = jax.jit(functools.partial(_chain, implementation)).lower(*arrays).compile()
    run = functools.partial(timing.call, program, arrays)
    return statistics.median(timing.timed({"": run}, 5, 0.2)[""]) / CALLS, *crossover.work(spec, operands)


def fitted(start: float, many: Sample, wide: Sample) -> crossover.Cost:
    """The line through a smallest call and two calls of (seconds, FLOPs, bytes), one heavy in each."""
    times = np.array([max(many[0] - start, 1e-9), max(wide[0] - start, 1e-9)])
    per_flop, per_byte = np.linalg.solve(np.array([many[1:], wide[1:]], np.float64), times)
    if min(per_flop, per_byte) <= 0:  # noise: each call for itself, as if it did nothing else
        per_flop, per_byte = times[0] / many[1], times[1] / wide[2]
    return crossover.Cost(start, 1 / per_flop, 1 / per_byte)


def _measured(implementation: Implementation) -> Generator[str, None, crossover.Cost]:
    """Yields lines of a table; returns the line through what they say. Sizes double until a call is long."""
    start, *_ = _sample(implementation, 8, 8, 1, 8)
    yield f"| {implementation} | T = S = 8 | {start * 1e3:.3f} ms |"
    longest = []
    for what, size, sizes in (("T = S", 128, lambda x: (x, x)), ("T = 1, S", 1024, lambda x: (1, x))):
        sample = _sample(implementation, *sizes(size))
        while sample[0] < LONG and size < MOST:
            size *= 2
            sample = _sample(implementation, *sizes(size))
        yield f"| {implementation} | {what} = {size} | {sample[0] * 1e3:.3f} ms |"
        longest.append(sample)
    return fitted(start, *longest)


def crossing(figures: crossover.Figures) -> int | None:
    """The first T = S, a multiple of 16, from which on Metal pays, for 4 heads of 64; None where it never does."""
    for size in range(16, MOST + 1, 16):
        x = crossover.work(*_problem(size, size))
        if figures.metal.seconds(*x) <= figures.blockwise.seconds(*x):
            return size
    return None


def calibrated(device: str) -> Iterator[str]:
    """Measures, keeps the figures for this chip, and yields what a reader should see of it, line by line."""
    yield "\n| implementation | float32, 4 heads of 64 | a call |\n|---|---|---|"
    costs = {}
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        for name in ("metal", "blockwise"):
            costs[name] = yield from _measured(name)
    today = datetime.date.today().isoformat()
    source = f"measured here on {today} with jax_mfa {jax_mfa.__version__} and JAX {jax.__version__}"
    figures = crossover.Figures(**costs, source=source)
    yield ""
    for name, cost in costs.items():
        rates = f"{cost.flops / 1e9:.3g} GFLOP/s, {cost.bytes / 1e9:.3g} GB/s"
        yield f"{name}: {cost.start * 1e6:.0f} us to start a call, {rates}"
    size = crossing(figures)
    yield f"Metal pays from T = S = {size} on" if size else f"Metal pays nowhere up to T = S = {MOST}"
    yield f"kept for {device} in {crossover.MEASURED.store(device, figures)}"
