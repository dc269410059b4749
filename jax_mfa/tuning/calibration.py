"""Measures the figures behind `crossover.py` on this machine, for `python -m jax_mfa check --calibrate`.

Three kinds of calls, for each implementation: one that computes next to nothing, one that multiplies most of its time,
and one row against many keys, which reads most of its time. Knows how to time; the estimate is `crossover`'s.
"""

from __future__ import annotations

import datetime
import functools
import statistics
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_mfa
from jax_mfa.api import dot_product_attention
from jax_mfa.arguments import specify_abstract
from jax_mfa.choice import Implementation
from jax_mfa.tuning import crossover, timing

CALLS = 4  # one after another within a program, so that starting the program is not what is timed
LONG = 10e-3  # seconds: a call that takes this is not mostly its start
MOST = 8192  # T or S
HEADS, SIZE = 4, 64


def _shapes(rows: int, columns: int, heads: int = HEADS, size: int = SIZE) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((1, x, heads, size), jnp.float32) for x in (rows, columns, columns)]


def _chain(implementation: Implementation, query: Any, key: Any, value: Any) -> Any:
    for _ in range(CALLS):
        query = dot_product_attention(query, key, value, implementation=implementation)
    return query


def _seconds(implementation: Implementation, shapes: list[jax.ShapeDtypeStruct]) -> float:
    """Of one call: the median of several runs of a program of `CALLS` calls."""
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in shapes]
    program = jax.jit(functools.partial(_chain, implementation)).lower(*arrays).compile()
    run = functools.partial(timing.call, program, arrays)
    return statistics.median(timing.timed({"": run}, 5, 0.2)[""]) / CALLS


def fitted(start: float, many: tuple[float, int, int], wide: tuple[float, int, int]) -> crossover.Cost:
    """The line through a smallest call and two calls of (seconds, FLOPs, bytes), one heavy in each."""
    times = np.array([max(many[0] - start, 1e-9), max(wide[0] - start, 1e-9)])
    per_flop, per_byte = np.linalg.solve(np.array([many[1:], wide[1:]], np.float64), times)
    if min(per_flop, per_byte) <= 0:  # noise: each call for itself, as if it did nothing else
        per_flop, per_byte = times[0] / many[1], times[1] / wide[2]
    return crossover.Cost(start, 1 / per_flop, 1 / per_byte)


def _grown(implementation: Implementation, shapes_of: Any, first: int) -> tuple[int, tuple[float, int, int]]:
    """The smallest doubling of a size at which a call is long, with its seconds, FLOPs and bytes."""
    size = first
    while True:
        shapes = shapes_of(size)
        seconds = _seconds(implementation, shapes)
        if seconds >= LONG or size >= MOST:
            return size, (seconds, *_work(shapes))
        size *= 2


def _work(shapes: Any) -> tuple[int, int]:
    """FLOPs and bytes."""
    return crossover.work(*specify_abstract(**dict(zip(("query", "key", "value"), shapes))))


def _measured(implementation: Implementation) -> Iterator[str | crossover.Cost]:
    """Lines of a table, then the line through what they say."""
    start = _seconds(implementation, _shapes(8, 8, 1, 8))
    yield f"| {implementation} | T = S = 8 | {start * 1e3:.3f} ms |"
    size, many = _grown(implementation, lambda x: _shapes(x, x), 128)
    yield f"| {implementation} | T = S = {size} | {many[0] * 1e3:.3f} ms |"
    size, wide = _grown(implementation, lambda x: _shapes(1, x), 1024)
    yield f"| {implementation} | T = 1, S = {size} | {wide[0] * 1e3:.3f} ms |"
    yield fitted(start, many, wide)


def crossing(figures: crossover.Figures) -> int | None:
    """The first T = S, a multiple of 16, from which on Metal pays, for 4 heads of 64; None where it never does."""
    for size in range(16, MOST + 1, 16):
        x = _work(_shapes(size, size))
        if figures.metal.seconds(*x) <= figures.blockwise.seconds(*x):
            return size
    return None


def calibrated(device: str) -> Iterator[str]:
    """Measures, keeps the figures for this chip, and yields what a reader should see of it, line by line."""
    yield "\n| implementation | float32, 4 heads of 64 | a call |\n|---|---|---|"
    costs = {}
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        for name in ("metal", "blockwise"):
            for found in _measured(name):
                if isinstance(found, crossover.Cost):
                    costs[name] = found
                else:
                    yield found
    today = datetime.date.today().isoformat()
    source = f"measured here on {today} with jax_mfa {jax_mfa.__version__} and JAX {jax.__version__}"
    figures = crossover.Figures(costs["metal"], costs["blockwise"], source)
    yield ""
    for name, cost in costs.items():
        rates = f"{cost.flops / 1e9:.3g} GFLOP/s, {cost.bytes / 1e9:.3g} GB/s"
        yield f"{name}: {cost.start * 1e6:.0f} us to start a call, {rates}"
    size = crossing(figures)
    yield f"Metal pays from T = S = {size} on" if size else f"Metal pays nowhere up to T = S = {MOST}"
    yield f"kept for {device} in {crossover.store(device, figures)}"
