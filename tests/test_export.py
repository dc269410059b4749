"""Programs for export: custom calls that are let through, and a batch of any size."""

import jax
import numpy as np
import pytest
from harness import AVAILABLE, assert_allclose, qkv
from jax import export

import jax_mfa

PROBLEM = dict(zip(("query", "key", "value"), qkv(B=3)))


def exported(run, arguments):
    return export.export(jax.jit(run), disabled_checks=jax_mfa.DISABLE_EXPORT_CHECKS)(arguments)


def test_custom_calls_pass_with_the_checks_that_the_package_names(implementation):
    def run(arguments):
        return jax.value_and_grad(lambda x: implementation.attend(**x).sum())(arguments)

    got = exported(run, PROBLEM).call(PROBLEM)
    for x, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(jax.jit(run)(PROBLEM))):
        np.testing.assert_array_equal(x, wanted)
    if not implementation.in_jnp:
        with pytest.raises(ValueError, match="jax_mfa_attention_forward"):
            export.export(jax.jit(run))(PROBLEM)


@pytest.mark.parametrize(
    "implementation", [x for x in AVAILABLE if x.in_jnp], ids=lambda implementation: implementation.name
)
def test_one_program_serves_a_batch_of_any_size(implementation):
    rng = np.random.default_rng(0)
    arguments = PROBLEM | {
        "bias": rng.standard_normal((3, 1, 7, 9)).astype(np.float32),
        "mask": rng.random((3, 4, 1, 9)) < 0.8,
        "query_offset": np.array([0, 2, -1], np.int32),
        "key_value_seq_lengths": np.array([9, 5, 0], np.int32),
        "key_value_ranges": rng.integers(0, 10, (3, 7, 2)).astype(np.int32),
        "sinks": rng.standard_normal((3, 4)).astype(np.float32),
    }
    moving = ("query", "key", "value", "bias", "sinks")

    def run(arguments):
        def loss(varying):
            keywords = {"is_causal": True, "dropout_rate": 0.2, "dropout_seed": 1}
            out, lse = implementation.flash(**{**arguments, **varying}, **keywords)
            return out.sum(), (out, lse)

        return jax.value_and_grad(loss, has_aux=True)({name: arguments[name] for name in moving})

    (batch,) = export.symbolic_shape("batch")
    shapes = {name: jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for name, x in arguments.items()}
    program = exported(run, shapes)
    for size in (1, 3):
        rows = {name: x[:size] for name, x in arguments.items()}
        for got, wanted in zip(jax.tree.leaves(program.call(rows)), jax.tree.leaves(jax.jit(run)(rows))):
            assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length, is_causal", [(1500, False), (1500, True)], ids=["all tiles", "tiles that are seen"])
def test_programs_for_gpus_count_the_turns_of_loops_without_barriers(length, is_causal):
    """XLA evaluates the indices of such loops when it compiles for GPUs, which it cannot do through a barrier."""
    x = jax.ShapeDtypeStruct((1, length, 8, 32), np.float32)
    attend = lambda *x: jax_mfa.dot_product_attention(*x, is_causal=is_causal, implementation="blockwise")
    text = jax.jit(attend).trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.while" in text
    assert not [line for line in text.splitlines() if "optimization_barrier" in line and "tensor<i32>" in line]
