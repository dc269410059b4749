"""A model of Apple's GPU cores: cycles of counted work.

Knows no kernel; `compiled.py` counts the package's kernels, and `published.py` those whose times were published and
from which the fitted constants come.

A core has four schedulers; each issues for one simdgroup of 32 lanes a cycle. On families 7 and 8 (M1, M2) the
instructions of a scheduler add up, and rows that come through threadgroup memory between two barriers add their time.
On family 9 and later (M3, M4) matrix, scalar and memory instructions of different simdgroups overlap; were they
perfectly apart, the slowest would decide. Occupancy has no place: forward at 832, 896 and 1024 threads a core ran at
3935, 3940 and 3942 GINSTR/s (the source of `published.json`, sheet "Mixed Precision Benchmarks"). Nor has what float32
rows and sums cost that stay in registers on M1, by which `kept` rows are slower than predicted: no law was found.

Sources: B is github.com/philipturner/metal-benchmarks, A the source of `published.json`, F fitted by `published.py`.
"""

from __future__ import annotations

import dataclasses

SCHEDULERS = 4
LANES = 32
CORE_BYTES = 64  # that a core's memory gives in a cycle (B, "On-Core Data BW/Cycle")
# of an 8 × 8 × 8 product: of half to half (A, its precisions), of half to float, with an operand in float (B); and in a
# chain of two products that wait for each other instead of four
# (github.com/joshuaswarren/mlx-omarchy, receipts/2026-09-11-fma-ceiling: 2003 for 2148 GFLOP/s)
HALF_SUM, HALF, FLOAT, IN_PAIRS = 16, 17, 18, 1.2
# of scalar arithmetic: in 16 bits and in 32 where two instructions are independent, and where many are
# (B, "ALU Bottlenecks", at 88 simdgroups a core)
HALF_ARITHMETIC, FLOAT_ARITHMETIC, INDEPENDENT = 1.0, 1.9, 1.0

LOAD = 0.67  # cycles of a load on families 7 and 8 (F)
OVERLAP = 3.04  # exponent of the sum of pipes on family 9: 1 would add them, infinity take the slowest (F)
SUM_BYTE = 0.47  # cycles of a byte of sums that are written and read again, on family 9 (F)
CACHED = 163  # KiB of own rows that a core of family 9 reads again without a miss (F)


@dataclasses.dataclass(frozen=True)
class Work:
    """What a simdgroup does in a round of its loop.

    Attributes:
      half_sum, half, single: products of half to half, of half to float, and with an operand in float.
      paired: of all products those in chains of two.
      scalar: cycles of other arithmetic.
      loads: instructions that load operands, and `bytes` of all their lanes.
      rows: bytes of own rows that are read again in every round, `rows_of_core` KiB of them in use by a core.
      sums: bytes of sums that are read and written in every round.
    """

    half_sum: float = 0
    half: float = 0
    single: float = 0
    paired: float = 0
    scalar: float = 0
    loads: float = 0
    bytes: float = 0
    rows: float = 0
    rows_of_core: float = 0
    sums: float = 0

    @property
    def products(self) -> float:
        return self.half_sum + self.half + self.single


@dataclasses.dataclass(frozen=True)
class Model:
    """The fitted constants; those of this module, unless others are tried."""

    load: float = LOAD
    overlap: float = OVERLAP
    sum_byte: float = SUM_BYTE
    cached: float = CACHED

    def cycles(self, x: Work, family: int) -> float:
        """Of a scheduler."""
        byte = SCHEDULERS / CORE_BYTES
        if family < 9:
            products = HALF_SUM * x.half_sum + HALF * x.half + FLOAT * x.single + IN_PAIRS * x.paired
            return products + x.scalar + self.load * x.loads + byte * (x.rows + x.sums)
        missed = max(0.0, 1 - self.cached / x.rows_of_core) if x.rows else 0.0
        memory = byte * (x.bytes + x.rows) + self.sum_byte * (missed * x.rows + x.sums)
        pipes = (HALF * x.products, x.scalar, memory)
        return sum(pipe**self.overlap for pipe in pipes) ** (1 / self.overlap)

    def share(self, x: Work, family: int) -> float:
        """Of the cycles, those that products in half would take: of the matrix unit's time."""
        return HALF * x.products / self.cycles(x, family)


MODEL = Model()
