"""Whether new tokens reach the pages of a pool, for `python -m jax_mfa check`: kernels write them in place, and should
write what XLA scatters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mfa.kv_cache import pool as paged_cache
from jax_mfa.kv_cache.page_book import Write
from jax_mfa.kv_cache.storage import QuantizedArray, Scheme, from_bits, spread

PAGES, PAGE, HEADS, SIZE = 5, 16, 2, 40
# both ends of the pool, pages begun and full, and padding; a page that is copied before it is written, and padding
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
    numbers = [np.asarray(x.dequantize(np.float32), np.float64) for x in (got, wanted)]
    if not np.array_equal(np.isnan(numbers[0]), np.isnan(numbers[1])):
        return np.full((), np.inf)
    step = np.asarray(
        spread(from_bits(jnp.asarray(wanted.scales)).astype(np.float32), wanted.scheme.channels, wanted.head_size, -1)
    )
    return np.nan_to_num(np.abs(numbers[0] - numbers[1]) / (step * (32 if wanted.scheme.kind == "fp8" else 1)))


def differing() -> list[str]:
    """The cases that lie more than a step apart: a scale may be rounded otherwise, and a number with it."""
    found = []
    for name, (dtype, scheme) in CASES.items():
        cache = paged_cache.PagedKVCache.create(
            PAGES, PAGE, HEADS, SIZE, dtype=dtype, key_scheme=scheme, value_scheme=scheme
        )
        rng = np.random.default_rng(3)
        new = [rng.standard_normal((len(WHERE.slots), HEADS, SIZE)).astype(jnp.dtype(dtype)) for _ in range(2)]
        pages = cache.key_pages, cache.value_pages
        wanted = jax.jit(paged_cache.scattered)(pages, *new, WHERE)
        got = paged_cache.write_in_place(pages, *new, WHERE)  # the pages are gone then
        if any(steps_apart(a, b).max() > 1.05 for a, b in zip(got, wanted)):
            found.append(name)
    return found
