"""Where Metal begins to pay: what a call costs on either side, estimated from its shapes.

A call of Metal costs wrapping, a commit, an interrupt and a change of threads before anything is computed; below some
size `blockwise` is done by then. The estimate is a line for each implementation, `start + FLOPs / rate + bytes /
bandwidth`, with figures from public sources, or from `python -m jax_mfa check --calibrate`, which keeps them for each
chip in the user's cache folder. Knows shapes and static facts; no arrays, no kernels.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import warnings
from typing import Any

import numpy as np

from jax_mfa.problem import Operands, Specification
from jax_mfa.tuning import kept


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


def _clipped_sum(last: int, most: int) -> int:
    """Sum of y, at most `most`, over y = 1 … last."""
    inside = max(min(last, most), 0)
    return inside * (inside + 1) // 2 + max(last - most, 0) * most


def _visible(spec: Specification, o: Operands) -> int:
    """Scores of one head of one batch entry that static positions leave visible."""
    t, s = o.query.shape[1], spec.viewed(o).key.shape[1]
    left, right = spec.band
    if o.query_offset is not None or (left is None and right is None):
        return t * s
    # row r sees the columns below r + offset + right + 1, but for those below r + offset - left
    below = lambda bound: _clipped_sum(t - 1 + bound, s) - _clipped_sum(bound - 1, s)
    seen = t * s if right is None else below(spec.query_offset + right + 1)
    return max(seen - (0 if left is None else below(spec.query_offset - left)), 0)


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
    v = spec.viewed(o).value.shape[-1]
    flops = 2 * b * n * _visible(spec, o) * (h + v)
    sizes = [math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in o if x is not None]
    return flops, sum(sizes) + b * t * n * v * np.dtype(o.query.dtype).itemsize


def estimate(spec: Specification, o: Operands, device: str) -> Estimate | None:
    """For the chip `device`; None where a size is not known."""
    if not all(isinstance(size, int) for x in o if x is not None for size in x.shape):
        return None
    flops, moved = work(spec, o)
    known = figures(device)
    metal, blockwise = (x.seconds(flops, moved) for x in (known.metal, known.blockwise))
    return Estimate(flops, moved, metal, blockwise, known.source)


# --- what was measured, kept for each chip


def path() -> pathlib.Path:
    """The file in the user's cache folder."""
    return kept.folder() / "crossover.json"


def _cost(name: str, x: Any) -> Cost:
    found = {}
    for field in dataclasses.fields(Cost):
        value = x[field.name]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ValueError(f"{name}.{field.name} must be a positive number, got {value!r}")
        found[field.name] = float(value)
    return Cost(**found)


def _read(file: pathlib.Path) -> dict[str, Figures]:
    """Raises one of `kept.BROKEN` for a file that is not one that `store` wrote."""
    return {
        chip: Figures(_cost("metal", x["metal"]), _cost("blockwise", x["blockwise"]), str(x["source"]))
        for chip, x in kept.read(file).items()
    }


@functools.cache
def _stored(file: pathlib.Path) -> dict[str, Figures]:
    try:
        return _read(file)
    except FileNotFoundError:
        return {}
    except kept.BROKEN as error:
        warnings.warn(
            f"jax_mfa: {file} is ignored ({type(error).__name__}: {error}); "
            "`python -m jax_mfa check --calibrate` writes it anew",
            stacklevel=2,
        )
        return {}


def figures(device: str) -> Figures:
    """Those measured on this chip, else those of `APPLE`."""
    try:
        return _stored(path()).get(device, APPLE)
    except RuntimeError:  # no home folder
        return APPLE


def store(device: str, measured: Figures) -> pathlib.Path:
    """Keeps figures for a chip beside those of others. Raises OSError where the cache folder cannot be written."""
    file = path()
    try:
        _read(file)
    except kept.BROKEN:
        file.unlink(missing_ok=True)
    kept.store(file, device, dataclasses.asdict(measured))
    _stored.cache_clear()
    return file
