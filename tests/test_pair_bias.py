"""A bias of pairs that the rows of a matrix share, as in protein models: [1, N, T, T] for B = T rows of short heads."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_mfa
from jax_mfa import blockwise, metal
from jax_mfa.arguments import specify_abstract


def arguments(length, heads, size, dtype, batch=None):
    shaped = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
    x = shaped(batch or length, length, heads, size)
    return {"query": x, "key": x, "value": x, "bias": shaped(1, heads, length, length)}


def gradient(query, key, value, bias):
    loss = lambda *x: jnp.sin(jax_mfa.dot_product_attention(*x, implementation="blockwise")).sum()
    return jax.grad(loss, argnums=(0, 1, 2, 3))(query, key, value, bias)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_blockwise_needs_megabytes_where_scores_take_hundreds(dtype):
    compiled = jax.jit(gradient).lower(**arguments(256, 4, 32, dtype, batch=128)).compile()
    assert (
        compiled.memory_analysis().temp_size_in_bytes < 64 * 2**20
    )  # scores in float32 are 128 MiB, and there are two


def test_the_memory_does_not_know_how_many_rows_share_the_bias():
    """But for what is of the rows' own size: queries, keys, values, and what the forward pass keeps."""
    few, many = (
        jax.jit(gradient).lower(**arguments(128, 4, 32, jnp.float32, batch=b)).compile().memory_analysis()
        for b in (32, 256)
    )
    of_rows = 128 * 4 * 32 * 4 * (256 - 32)  # bytes of one array of the rows more
    assert many.temp_size_in_bytes - few.temp_size_in_bytes < 3 * of_rows


def selections(jaxpr, elements):
    """Choices among so many elements, outside of loops."""
    within = lambda e: [x for x in e.params.values() if hasattr(x, "jaxpr")] if e.primitive.name != "while" else []
    found = sum(e.primitive.name == "select_n" and e.outvars[0].aval.size >= elements for e in jaxpr.eqns)
    return found + sum(selections(x.jaxpr, elements) for e in jaxpr.eqns for x in within(e))


def test_a_bias_costs_no_mask_unless_a_result_is_not_finite():
    """Its −∞ hides by itself; the loops that mend results are where it is a mask."""
    inputs = arguments(64, 2, 16, jnp.float32, batch=3)
    spec, operands = specify_abstract(**inputs)
    forward = lambda operands: blockwise.forward(spec, operands)
    results = jax.eval_shape(forward, operands)
    wrt, cotangents = ("query", "key", "value", "bias"), results[:2]
    backward = lambda *x: blockwise.backward(spec, x[0], x[1], wrt, x[2])
    masked = dict(inputs, mask=jax.ShapeDtypeStruct((1, 1, 64, 64), bool))
    with_mask, its_operands = specify_abstract(**masked)
    elements = 3 * 2 * 64 * 64
    assert selections(jax.make_jaxpr(forward)(operands).jaxpr, elements) == 0
    assert selections(jax.make_jaxpr(backward)(operands, results, cotangents).jaxpr, elements) <= 1  # of p's rounding
    assert selections(jax.make_jaxpr(lambda o: blockwise.forward(with_mask, o))(its_operands).jaxpr, elements) > 0


@pytest.mark.parametrize("variant", ["staged", "direct", "portable"])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("size", [8, 16, 24, 32])
def test_kernels_hold_nothing_of_the_size_of_all_scores(size, dtype, variant):
    heads = 4
    for length, of_pass in itertools.product((256, 1024, 2048), ("forward", "backward")):
        spec, operands = specify_abstract(**arguments(length, heads, size, dtype))
        plan = metal.plan_of(spec, operands, of_pass, variant)
        held = [math.prod(b.shape) for b in plan.buffers]
        assert max(held) <= max(length * length * heads * size, heads * length * length)
        scratch = sum(math.prod(b.shape) for b in plan.buffers if b.role == "scratch")
        assert scratch <= 4 * length * length * heads  # a few numbers of each row
        assert any("d_bias" in d.kernel.name for d in plan.dispatches) == (of_pass == "backward")


def test_a_mapped_bias_is_not_repeated_for_the_rows_that_share_it():
    """Two chains: `vmap` folds them into the batch, and each bias stays one."""
    x = np.zeros((2, 6, 6, 2, 8), np.float32)
    attend = jax.vmap(lambda q, bias: jax_mfa.dot_product_attention(q, q, q, bias))
    jaxpr = jax.make_jaxpr(attend)(x, np.zeros((2, 1, 2, 6, 6), np.float32))
    shapes = [v.aval.shape for eqn in jaxpr.eqns for v in eqn.outvars]
    assert (12, 6, 2, 8) in [v.aval.shape for eqn in jaxpr.eqns for v in eqn.invars]
    assert (12, 2, 6, 6) not in shapes
