"""Attention over parts of the columns, merged, is attention over all of them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import arrays, assert_allclose, assert_close, cotangents, qkv, quick_jit, types_of, x64
from jax.test_util import check_grads

import jax_mfa

T, N, V = 3, 2, 4


def parts(dtype="float32", seed=0):
    """Random partial results."""
    out_a, out_b, lse_a, lse_b = arrays((T, N, V), (T, N, V), (T, N), (T, N), seed=seed)
    wide = np.promote_types(dtype, np.float32)
    return out_a.astype(dtype), lse_a.astype(wide), out_b.astype(dtype), lse_b.astype(wide)


@pytest.mark.share(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_equals_attention_over_all_columns_with_its_gradients(implementation, dtype):
    if dtype not in implementation.dtypes:
        pytest.skip(f"{implementation.name} has no {dtype}")
    with types_of(dtype):
        inputs = dict(zip(("query", "key", "value"), map(jnp.asarray, qkv(dtype=dtype))))
        ranges = np.random.default_rng(0).integers(0, 10, (2, 7, 2))
        d_out, d_lse = cotangents(inputs)

        def whole(query, key, value):
            return implementation.flash(query, key, value, key_value_ranges=ranges)

        def merged(query, key, value, cut=4):
            # rows of the parts see less, or nothing
            a = implementation.flash(query, key[:, :cut], value[:, :cut], key_value_ranges=ranges)
            b = implementation.flash(query, key[:, cut:], value[:, cut:], key_value_ranges=ranges - cut)
            return jax_mfa.merge(*a, *b)

        def both(attend):
            run = lambda inputs: attend(**inputs)
            results, pullback = jax.vjp(run, inputs)
            return *results, pullback((jnp.asarray(d_out), jnp.asarray(d_lse)))[0]

        got, wanted = (jax.tree.map(np.asarray, quick_jit(lambda f=f: both(f))()) for f in (merged, whole))
    (out, lse, gradients), (wanted, wanted_lse, wanted_gradients) = got, wanted
    assert (wanted_lse == -np.inf).any() and np.isfinite(wanted_lse).any()
    assert out.dtype == dtype and lse.dtype == wanted_lse.dtype
    assert_close(out, wanted, dtype, terms=32, gradient=True)
    assert_close(lse, wanted_lse, wanted_lse.dtype, terms=32, largest_score=4)
    for name, gradient in gradients.items():
        assert_close(gradient, wanted_gradients[name], dtype, terms=32, gradient=True, what=name)


def test_derivatives_of_all_four_by_finite_differences():
    with x64():
        check_grads(jax.jit(jax_mfa.merge), parts("float64"), order=2)


@pytest.mark.parametrize("unseen", ["a", "b", "ab"])
def test_what_saw_nothing_neither_counts_nor_gets_a_gradient(unseen):
    out_a, lse_a, out_b, lse_b = parts()
    row = 1
    for letter, out, lse in (("a", out_a, lse_a), ("b", out_b, lse_b)):
        if letter in unseen:
            out[row], lse[row] = np.nan, -np.inf
    (out, lse), pullback = jax.vjp(jax_mfa.merge, out_a, lse_a, out_b, lse_b)
    if unseen == "ab":
        np.testing.assert_array_equal(out[row], 0)
        np.testing.assert_array_equal(lse[row], -np.inf)
    else:
        left = (out_b, lse_b) if unseen == "a" else (out_a, lse_a)
        np.testing.assert_array_equal(out[row], left[0][row])
        assert_allclose(lse[row], left[1][row], rtol=1e-6)
    for poison in (1.0, np.nan):
        gradients = pullback(tuple(jnp.ones_like(x).at[row].set(poison) for x in (out, lse)))
        for letter, gradient in zip("aabb", gradients):
            gradient = np.asarray(gradient)
            assert np.isfinite(np.delete(gradient, row, 0)).all()
            if letter in unseen:
                np.testing.assert_array_equal(gradient[row], 0)
            elif poison == 1:
                assert np.isfinite(gradient[row]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_without_a_softmax_in_one_part_has_none(bad):
    for side, other in itertools.product((1, 3), (0.5, -np.inf)):
        given = list(parts())
        given[side][1], given[4 - side][1] = bad, other
        out, lse = jax_mfa.merge(*given)
        assert np.isnan(out[1]).all() and np.isnan(lse[1]).all()
        assert np.isfinite(np.delete(out, 1, 0)).all() and np.isfinite(np.delete(lse, 1, 0)).all()


def test_parts_of_very_different_weight_stay_finite():
    out_a, lse_a, out_b, lse_b = parts()
    (out, lse), pullback = jax.vjp(jax_mfa.merge, out_a, lse_a + 3e38, out_b, lse_b - 3e38)
    np.testing.assert_array_equal(out, out_a)
    np.testing.assert_array_equal(lse, lse_a + np.float32(3e38))
    assert all(np.isfinite(x).all() for x in pullback((jnp.ones_like(out), jnp.ones_like(lse))))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_parts_merge_in_any_order(order):
    results = [(out, lse) for seed in range(3) for out, lse in [parts(seed=seed)[:2]]]
    first, second, third = (results[i] for i in order)
    out, lse = jax_mfa.merge(*jax_mfa.merge(*first, *second), *third)
    outs, lses = (np.stack(x).astype(np.float64) for x in zip(*results))
    total = np.log(np.exp(lses).sum(0))
    assert_allclose(lse, total, rtol=1e-5, atol=1e-6)
    assert_allclose(out, (np.exp(lses - total)[..., None] * outs).sum(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({0: None}, TypeError, "out_a must be an array .* got NoneType"),
        ({1: np.zeros((T, N), np.int32)}, TypeError, "lse_a must be floating, got int32"),
        ({1: np.zeros((N, T), np.float32)}, ValueError, r"lse_a must have shape \[3, 2\] beside out_a .* got \[2, 3\]"),
        ({2: np.zeros((T, N, 5), np.float32)}, ValueError, r"out_b must have shape \[3, 2, 4\] .* got \[3, 2, 5\]"),
        ({2: np.zeros((T, N, V), np.float16)}, TypeError, "out_b must have the dtype of out_a, float32, got float16"),
        ({3: np.zeros((1, N), np.float32)}, ValueError, r"lse_b must have shape .* got \[1, 2\]"),
        ({0: np.zeros(V, np.float32)}, ValueError, r"out_a must have shape \[..., T, N, V\], got \[4\]"),
    ],
    ids=str,
)
def test_bad_input_is_named(change, error, message):
    given = [change.get(i, x) for i, x in enumerate(parts())]
    with pytest.raises(error, match=message):
        jax_mfa.merge(*given)
