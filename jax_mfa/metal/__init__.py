"""Attention on Apple GPUs. The implementation wherever Metal can be used and pays.

`operands` declares each array and number that kernels are given, and `source` is their text. `problem` and `tiles` are
the facts of a launch, `kernels` the kernels and their grids, `plans` which of them a pass takes, `plan` the format that
the native module behind `runtime` runs. `attention` runs the passes, `append` writes new tokens into pages. `functions`
puts a caller's functions of scores into MSL, by `expressions` and `shapes`.
"""

from jax_mfa.metal.attention import (
    PARTS,
    Failed,
    backward,
    candidates,
    differentiates,
    forward,
    launch_arrays,
    plan_of,
    tiles_of,
)
from jax_mfa.metal.plan import DTYPES

__all__ = [
    "DTYPES",
    "PARTS",
    "Failed",
    "backward",
    "candidates",
    "differentiates",
    "forward",
    "launch_arrays",
    "plan_of",
    "tiles_of",
]
