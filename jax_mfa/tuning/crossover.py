"""Where Metal begins to pay: what a call costs on either side, estimated from its shapes.

A call of Metal costs wrapping, a commit, an interrupt and a change of threads before anything is computed; below some
size `blockwise` is done by then. The estimate is a line for each implementation, `start + FLOPs / rate + bytes /
bandwidth`, with figures from public sources, or from `python -m jax_mfa check --calibrate`, which keeps them for
this chip. Knows shapes and static facts; no arrays, no kernels.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from jax_mfa.problem import Operands, Specification
from jax_mfa.tuning import facts


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one implementation: seconds that a call takes whatever its size, and what it does in a second."""

    start: float
    flops: float
    bytes: float

    def seconds(self, flops: float, bytes: float) -> float:
        return self.start + flops / self.flops + bytes / self.bytes


@dataclasses.dataclass(frozen=True)
class Figures:
    """Both lines for a chip, and where they are from."""

    metal: Cost
    blockwise: Cost
    source: str


# Not measured with this package: no Mac has run it. Meant for the smallest chip, an M1; `--calibrate` replaces it.
# * metal.start: public reports of committing an empty command buffer and waiting for it range from 80 to 450 µs, e.g.
#   120 to 210 µs for a copy of 4 K floats (github.com/tracel-ai/cubecl/pull/1175).
# * metal.flops: half of the peak of an M1's 8 cores, 2.6 TFLOP/s (github.com/philipturner/metal-benchmarks).
# * blockwise.flops: half of the peak of an M1's four performance cores, each with four 128-bit multiply-adds a cycle at
#   3.2 GHz, 102 GFLOP/s; XLA's CPU backend does not use the matrix coprocessor.
# * blockwise.start: operations of XLA's CPU backend, as seen on x86-64 for the smallest problems.
# * bytes: CPU and GPU share one memory of 68 GB/s nominal, of which either reaches about 60 (arXiv:2502.05317).
APPLE = Figures(
    Cost(200e-6, 1.3e12, 60e9),
    Cost(20e-6, 0.2e12, 60e9),
    "public figures for an M1; `python -m jax_mfa check --calibrate` measures this chip",
)


def _figures(entry: Any) -> Figures:
    costs = {}
    for name in ("metal", "blockwise"):
        rates = {x.name: entry[name][x.name] for x in dataclasses.fields(Cost)}
        for field, value in rates.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ValueError(f"{name}.{field} must be a positive number, got {value!r}")
        costs[name] = Cost(*map(float, rates.values()))
    return Figures(**costs, source=str(entry["source"]))


MEASURED = facts.Kind("crossover.json", _figures, "`python -m jax_mfa check --calibrate` writes it anew")


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a forward pass is expected to take: seconds on either side, and from what."""

    flops: int
    bytes: int
    metal: float
    blockwise: float
    source: str

    @property
    def pays(self) -> bool:
        return self.metal <= self.blockwise

    def __str__(self) -> str:
        size = f"{self.flops / 1e6:.3g} MFLOP and {self.bytes / 1e6:.3g} MB"
        times = f"about {self.metal * 1e3:.2g} ms on Metal, {self.blockwise * 1e3:.2g} ms as blockwise"
        return f"{size} take {times} ({self.source})"


def work(spec: Specification, o: Operands) -> tuple[int, int]:
    """Floating-point operations of a forward pass, two for each multiply-add, and bytes that it reads and writes."""
    b, t, n, h = o.query.shape
    _, s, _, v = spec.viewed(o).value.shape
    pairs = t * s if o.query_offset is not None else spec.pairs_within(t, s, spec.query_offset)
    flops = 2 * b * n * pairs * (h + v)
    sizes = [math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in o if x is not None]
    return flops, sum(sizes) + b * t * n * v * np.dtype(o.query.dtype).itemsize


def estimate(spec: Specification, o: Operands, device: str) -> Estimate | None:
    """For the chip `device`; None where a size is not known."""
    if not all(isinstance(size, int) for x in o if x is not None for size in x.shape):
        return None
    flops, moved = work(spec, o)
    known = MEASURED.of(device, APPLE)
    metal, blockwise = (x.seconds(flops, moved) for x in (known.metal, known.blockwise))
    return Estimate(flops, moved, metal, blockwise, known.source)
