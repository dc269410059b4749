"""Whether all that kernels write arrives, for `python -m jax_mfa check`: in pages of a pool, and beside the CPU.

Pages: kernels write new tokens in place, and should write what XLA scatters.

Cache lines: XLA aligns to 64 bytes, and Apple's lines have 128: the end of what a kernel writes without a copy may
share one with what the CPU writes meanwhile. The program here makes that happen: outputs of attention lie between
counters, which a loop on the CPU counts up while kernels run. What is lost shows as a wrong count, or as an output that
differs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_mfa import primitives
from jax_mfa.arguments import specify
from jax_mfa.kv_cache import pool
from jax_mfa.kv_cache.page_book import Write
from jax_mfa.kv_cache.storage import QuantizedArray, Scheme, from_bits, spread

# --- pages

PAGES, PAGE, HEADS, SIZE = 5, 16, 2, 40
# slots at both ends of the pool, in pages begun and full, and padding; a page copied before it is written, and padding
WHERE = Write(np.array([3, 79, -1, 0, 33, 34, 16], np.int32), np.array([1, 4], np.int32), np.array([2, -1], np.int32))
CASES = {
    "float16": ("float16", None),
    "int8": ("float32", Scheme("int8")),
    "int4": ("bfloat16", Scheme("int4", channels=16)),
    "fp8": ("float16", Scheme("fp8", True)),
}


def steps_apart(got: Any, wanted: Any) -> np.ndarray:
    """By how many steps of their scheme the numbers of two pools differ: of plain pages 0, or infinite where they do at
    all. Steps of fp8 are those of its largest numbers."""
    if not isinstance(wanted, QuantizedArray):
        same = np.array_equal(np.asarray(from_bits(got)), np.asarray(from_bits(wanted)), equal_nan=True)
        return np.full((), 0.0 if same else np.inf)
    a, b = (np.asarray(x.dequantize(np.float32), np.float64) for x in (got, wanted))
    if not np.array_equal(np.isnan(a), np.isnan(b)):
        return np.full((), np.inf)
    scales = from_bits(jnp.asarray(wanted.scales)).astype(np.float32)
    step = np.asarray(spread(scales, wanted.scheme.channels, wanted.head_size, -1))
    return np.nan_to_num(np.abs(a - b) / (step * (32 if wanted.scheme.kind == "fp8" else 1)))


def differing() -> list[str]:
    """The cases that lie more than a step apart: a scale may be rounded otherwise, and a number with it."""
    wrong = []
    for name, (dtype, scheme) in CASES.items():
        create = pool.PagedKVCache.create
        cache = create(PAGES, PAGE, HEADS, SIZE, dtype=dtype, key_scheme=scheme, value_scheme=scheme)
        rng = np.random.default_rng(3)
        new = [rng.standard_normal((len(WHERE.slots), HEADS, SIZE)).astype(jnp.dtype(dtype)) for _ in range(2)]
        pages = cache.key_pages, cache.value_pages
        wanted = jax.jit(pool.scattered)(pages, *new, WHERE)
        got = pool.write_in_place(pages, *new, WHERE)  # donates the pages
        if any(steps_apart(a, b).max() > 1.05 for a, b in zip(got, wanted)):
            wrong.append(name)
    return wrong


# --- cache lines

# rows of 64 bytes: an odd number of them ends in the middle of a line; more than 32 KiB are not staged
ROWS = tuple(range(535, 512, -2))
COUNTERS = (16 * (ROWS[0] + 1), *(16 * (rows - 1) for rows in ROWS))  # the largest keeps outputs off the arrays' end
STEPS = 20000
ROUNDS = 5
ALL = 2**62  # more bytes than any array has


def _outputs(inputs: Any) -> list[Any]:
    """All that kernels write, so that none of it is free for others while a loop runs."""
    results = [primitives.attention(*specify(*x), "metal") for x in inputs]
    return [x.ravel() for outputs in results for x in outputs]


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
    rng = np.random.default_rng(0)
    normal = lambda length: np.asarray(rng.standard_normal((1, length, 1, 16)), np.float32)
    inputs, one = [(normal(rows), normal(8), normal(8)) for rows in ROWS], jnp.ones((), jnp.float32)
    as_set = module.stage_shared_lines(ALL)
    try:
        alone = [np.asarray(x) for x in jax.jit(_outputs)(inputs)]
    finally:
        module.stage_shared_lines(as_set)
    wanted = np.concatenate([*alone, np.full(sum(COUNTERS), STEPS, np.float32)])
    return sum(int((np.asarray(_beside(inputs, one, STEPS)) != wanted).sum()) for _ in range(ROUNDS))
