"""Whether CPU and GPU may write to one cache line at once, for `python -m jax_mfa check`.

XLA aligns to 64 bytes, and Apple's lines have 128: the end of what a kernel writes without a copy may share one with
what the CPU writes meanwhile. The program here makes that happen: outputs of attention lie between counters, which a
loop on the CPU counts up while kernels run. What is lost shows as a wrong count, or as an output that differs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_mfa import primitives
from jax_mfa.arguments import specify

# rows of 64 bytes: an odd number of them ends in the middle of a line; more than 32 KiB are not staged
ROWS = tuple(range(535, 512, -2))
COUNTERS = (16 * (ROWS[0] + 1), *(16 * (rows - 1) for rows in ROWS))  # the largest keeps outputs off the arrays' end
STEPS = 20000
ROUNDS = 5
ALL = 2**62  # bytes: more than any array has


def _inputs() -> list[tuple[np.ndarray, ...]]:
    rng = np.random.default_rng(0)
    normal = lambda *shape: np.asarray(rng.standard_normal(shape), np.float32)
    return [(normal(1, rows, 1, 16), normal(1, 8, 1, 16), normal(1, 8, 1, 16)) for rows in ROWS]


def _outputs(inputs: Any) -> list[Any]:
    """All that kernels write, so that none of it is free for others while a loop runs."""
    found = [primitives.attention(*specify(*x), "metal") for x in inputs]
    return [x.ravel() for outputs in found for x in outputs]


@jax.jit
def _beside(inputs: Any, one: Any, steps: Any) -> Array:
    """The outputs, and counters of 64 bytes less and more: XLA lays temporary arrays out by size, and these take turns.

    One array takes all of them at last: until then each keeps its memory, and nothing waits for another's.
    """
    zeros = [jnp.zeros(n, jnp.float32) for n in COUNTERS]
    counters = jax.lax.fori_loop(0, steps, lambda _, counters: [c + one for c in counters], zeros)
    return jnp.concatenate([*_outputs(inputs), *counters])


def lost(module: Any) -> int:
    """Entries of outputs and counters that came out wrong, over all rounds, as the native module is set."""
    inputs, one = _inputs(), jnp.ones((), jnp.float32)
    as_set = module.stage_shared_lines(ALL)
    try:
        alone = [np.asarray(x) for x in jax.jit(_outputs)(inputs)]
    finally:
        module.stage_shared_lines(as_set)
    wanted = np.concatenate([*alone, np.full(sum(COUNTERS), STEPS, np.float32)])
    return sum(int((np.asarray(_beside(inputs, one, STEPS)) != wanted).sum()) for _ in range(ROUNDS))
