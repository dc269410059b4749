"""Appending to a paged cache on Metal: what `blockwise` writes, in the place of the pool."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runners
from runners import needs_core, planted

from jax_mfa import PagedKVCache, Scheme
from jax_mfa.cli import check_writes
from jax_mfa.kv_cache import pool as paged_cache
from jax_mfa.kv_cache.page_book import Write
from jax_mfa.metal import append
from jax_mfa.metal.problem import shape_of
from jax_mfa.problem import Storage

PAGE, PAGES, K, H, V = 8, 5, 2, 24, 11
# padding, both ends of the pool, pages begun and full; a page copied before it is written, and padding
WHERE = Write(np.int32([3, 39, -1, 0, 17, 18, 8]), np.int32([1, 4, 2]), np.int32([2, 0, -1]))
CASES = {
    "plain": ("float16", None, None),
    "int8": ("float32", Scheme("int8", channels=8), Scheme("int8", True, channels=4)),
    "int4": ("bfloat16", Scheme("int4", channels=5), Scheme("int4", True, channels=None)),
    "fp8": ("float16", Scheme("fp8"), Scheme("fp8", True, channels=3)),
}


def pools(dtype, key_scheme, value_scheme):
    """Pages that hold something, and new tokens: ordinary ones, all alike, all zero, tiny, huge and not finite."""
    cache = PagedKVCache.create(PAGES, PAGE, K, H, V, dtype=dtype, key_scheme=key_scheme, value_scheme=value_scheme)
    rng = np.random.default_rng(3)
    every = Write(np.arange(PAGES * PAGE, dtype=np.int32), np.zeros(0, np.int32), np.zeros(0, np.int32))
    many = [rng.standard_normal((PAGES * PAGE, K, size)).astype(dtype) for size in (H, V)]
    filled = jax.jit(paged_cache.scattered)((cache.key_pages, cache.value_pages), *many, every)
    new = [rng.standard_normal((len(WHERE.slots), K, size)) + 3 for size in (H, V)]
    for x in new:
        x[1, 0], x[1, 1], x[3, 0], x[3, 1] = 5.0, 0.0, x[3, 0] * 1e-6, x[3, 1] * 1e3
        x[4, 0, 3], x[4, 1, 4] = np.nan, -np.inf
        # as wide as the dtype is, and as small as it may be
        x[0] *= float(jnp.finfo(dtype).max) / np.abs(x[0]).max()
        x[0, 0, ::2] *= -1
        x[5, 0] = float(jnp.finfo(dtype).tiny) * np.clip(99 * (x[5, 0] - 3), -300, 300)
        x[6] = float(jnp.finfo(dtype).max) * np.sign(x[6] - 3)
    return filled, [x.astype(dtype) for x in new]


def ran(case, **how):
    """What the kernels report, and the pool as they leave it and as `blockwise` does: pages of keys and of values."""
    dtype, *schemes = CASES[case]
    pages, new = pools(dtype, *schemes)
    parts = {name: append.parts_of(whole) for name, whole in zip(("key", "value"), pages)}
    arrays = dict(zip(("key", "value"), new)) | WHERE._asdict()
    arrays |= {f"{name}_{part}": np.array(x) for name, found in parts.items() for part, x in found.items()}
    storages = tuple(s and Storage(s, size) for s, size in zip(schemes, (H, V)))
    plan = append.plan(tuple((name, shape_of(x)) for name, x in arrays.items()), storages)
    found = runners.run(plan, arrays, **how)
    wanted = jax.jit(paged_cache.scattered)(pages, *new, WHERE)
    taken = [{part: found.arrays[f"{name}_{part}"] for part in x} for name, x in parts.items()]
    got = [x["data"] if s is None else dataclasses.replace(w, **x) for x, s, w in zip(taken, schemes, wanted)]
    return found.reports, got, wanted


def assert_same(reports, got, wanted):
    """Plain pages bit for bit. A scale may be rounded otherwise, and then seldom a number: by a step."""
    assert not reports, reports[:3]
    for a, b in zip(got, wanted):
        error = check_writes.steps_apart(a, b)
        assert error.max() <= 1.06, error.max()
        assert np.mean(error > 0.1) < 0.01


@pytest.mark.share(4)
@pytest.mark.parametrize("case", CASES)
def test_pages_hold_what_blockwise_writes(case):
    assert_same(*ran(case))


MISTAKES = {
    "a flat block without a scale": ("max(found, least)", "found", "fp8"),
    "tokens in the order of the pool": ("slots[token] : -1", "token : -1", "plain"),
    "pages that are shared not copied": ("target < 0 ||", "true ||", "plain"),
    "nibbles in the other order": ("<< (4 * e);", "<< (4 * (together - 1 - e));", "int4"),
}


def test_every_mistake_can_be_planted():
    for old, new, *_ in MISTAKES.values():
        planted(old, new)


@pytest.mark.share(4)
@needs_core
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found_out(mistake):
    old, new, case = MISTAKES[mistake]
    text = planted(old, new)
    with pytest.raises(AssertionError):
        assert_same(*ran(case, text=text))
