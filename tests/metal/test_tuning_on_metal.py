"""Tiles that `jax_mfa.tune` tries on Metal: what a plan may have, of kernels that give the same result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import assert_allclose

import jax_mfa
from jax_mfa import metal, tuned
from jax_mfa.arguments import specify_abstract
from jax_mfa.metal import tiles

SHAPE = jax.ShapeDtypeStruct((1, 40, 2, 16), jnp.float32)


@pytest.fixture(autouse=True)
def no_file(monkeypatch):
    monkeypatch.setenv(tuned.FILE, "none")


def test_a_plan_takes_the_tiles_of_a_trial_and_gives_the_same_result(on_device):
    spec, operands = specify_abstract(query=SHAPE, key=SHAPE, value=SHAPE)
    usual, *others = metal.candidates(spec, operands, "forward")
    other = next(x for x in others if x[2] != usual[2])  # another number of columns
    x = jnp.asarray(np.random.default_rng(0).standard_normal(SHAPE.shape), jnp.float32)
    results = []
    for each in (usual, other):
        jax.clear_caches()
        with tuned.trial("metal forward", each), jax_mfa.record() as seen:
            results.append(jax.jit(lambda x: jax_mfa.dot_product_attention(x, x, x, implementation="metal"))(x))
        (kernel,) = seen.as_dict()["metal"]["kernels"]
        assert kernel.endswith("_".join(map(str, each)))
    assert_allclose(*results, rtol=0, atol=1e-5)


def test_candidates_keep_to_registers_and_threadgroup_memory():
    for table in tiles.VARIANTS.values():
        for (head, item), entry in table.items():
            for usual in (entry.forward, entry.d_query, entry.d_key_value):
                found = tiles.candidates(usual, head, head, item)
                assert found[0] == usual and len(found) == len(set(found)) > 1
                for x in found[1:]:
                    assert x.fragment_bytes(head, head, item) <= tiles.FRAGMENT_BUDGET
                    assert x.threadgroup_memory(head, head, item) <= tiles.THREADGROUP_BYTES
                    assert x.slices == usual.slices


def test_decoding_has_no_tiles_to_try(on_device):
    query = jax.ShapeDtypeStruct((1, 1, 2, 16), jnp.float32)
    keys = jax.ShapeDtypeStruct((1, 1024, 2, 16), jnp.float32)
    assert metal.candidates(*specify_abstract(query=query, key=keys, value=keys), "forward") == []
