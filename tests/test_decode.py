"""Decoding: a few queries at the end of a padded cache, each batch entry with a length of its own."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import arrays, assert_allclose, assert_close, qkv
from oracle import attention

import jax_mfa

LENGTHS = np.array([700, 3, 513], np.int32)


def problem(T=2, S=720, N=6, K=2, H=24, V=40, dtype="float32"):
    query, key, value = qkv(B=3, T=T, S=S, N=N, K=K, H=H, V=V)
    return tuple(np.asarray(x).astype(jnp.dtype(dtype)) for x in (query, key, value))


def decode(implementation, *args, **keywords):
    return jax_mfa.decode_attention(*args, implementation=implementation.name, return_residual=True, **keywords)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("T", [1, 2, 16])
def test_equals_the_oracle_whatever_lies_beyond_a_length(implementation, T, dtype):
    query, key, value = problem(T=T, dtype=dtype)
    bad_key, bad_value = key.copy(), value.copy()
    for row, length in enumerate(LENGTHS):
        bad_key[row, length:], bad_value[row, length:] = np.nan, np.inf
    wanted = attention(query, key, value, is_causal=True, query_offset=LENGTHS - T, key_value_seq_lengths=LENGTHS)
    out, lse = jax.jit(lambda *x: decode(implementation, *x))(query, bad_key, bad_value, LENGTHS)
    assert_close(out, wanted.out, dtype, terms=740, largest_score=wanted.largest_score)
    assert_close(lse, wanted.lse, "float32", terms=740, largest_score=wanted.largest_score)


def test_with_window_cap_slopes_and_sinks(implementation):
    query, key, value = problem()
    sinks, slopes = arrays((6,), (6,))
    features = {"sinks": sinks, "alibi_slopes": abs(slopes), "logits_soft_cap": 3.0, "local_window_size": (100, 0)}
    position = {"is_causal": True, "query_offset": LENGTHS - 2, "key_value_seq_lengths": LENGTHS}
    wanted = attention(query, key, value, **position, **features)
    out, _ = decode(implementation, query, key, value, LENGTHS, **features)
    assert_close(out, wanted.out, "float32", terms=740, largest_score=wanted.largest_score)


def test_one_length_serves_all_and_leading_axes_may_be_missing(implementation):
    query, key, value = problem()
    all_alike, _ = decode(implementation, query, key, value, 600)
    for row in range(3):
        one, _ = decode(implementation, query[row], key[row], value[row], np.int32(600))
        assert_allclose(all_alike[row], one, atol=1e-6)


def test_bad_lengths_are_named():
    query, key, value = problem()
    with pytest.raises(TypeError, match=r"lengths must be integers \[B\], got float32"):
        jax_mfa.decode_attention(query, key, value, np.ones(3, np.float32))
    with pytest.raises(ValueError, match=r"lengths must have shape \[B\] = \[3\], got \[2\]"):
        jax_mfa.decode_attention(query, key, value, np.ones(2, np.int32))
    with pytest.raises(ValueError, match="is_causal must not be given"):
        jax_mfa.decode_attention(query, key, value, LENGTHS, is_causal=False)


@pytest.mark.parametrize("S", [16384, 16640, 20011])
def test_each_key_of_a_long_cache_counts_once(implementation, S):
    query, key, value = qkv(B=1, T=1, S=S, N=2, K=1, H=8, V=8)
    wanted = attention(query, key, value)
    out, lse = jax.jit(lambda *x: decode(implementation, *x, S))(query, key, value)
    assert_close(out, wanted.out, "float32", terms=S, largest_score=wanted.largest_score)
    assert_close(lse, wanted.lse, "float32", terms=S, largest_score=wanted.largest_score)


def test_a_visible_infinite_value_shows_however_small_its_weight(implementation):
    query, key, value = problem(T=1)
    key[:, 600:650] += 400 * query[:, :, :1] / np.linalg.norm(query[:, :, :1], axis=-1, keepdims=True)
    value[:, 5] = np.inf
    out, _ = decode(implementation, query, key, value, 720)
    wanted = jax_mfa.dot_product_attention(query, key, value, implementation="reference")
    np.testing.assert_array_equal(np.isfinite(out), np.isfinite(wanted))
    assert not np.isfinite(out).all()


@pytest.mark.parametrize(
    ("lengths", "error", "message"),
    [
        (None, TypeError, "lengths must be an array (integers [B]), got NoneType"),
        (True, TypeError, "lengths must be integers [B], got bool[]"),
        ([1, 2.5, 3], TypeError, "lengths must be integers [B], got float64[3]"),
        ([[1], [2, 3], [4]], ValueError, "lengths must be an array (integers [B]), got a list"),
        ([1, 721, 3], ValueError, "lengths must lie in 0..720, got 721"),
        (jnp.array([1, -1, 3]), ValueError, "lengths must lie in 0..720, got -1"),
        (2**40, ValueError, f"lengths must lie in 0..720, got {2**40}"),
    ],
    ids=str,
)
def test_lengths_that_cannot_be_are_named_with_what_was_seen(lengths, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}(: .*)?$"):
        jax_mfa.decode_attention(*problem(), lengths)


@pytest.mark.parametrize("name", ["query", "key"])
@pytest.mark.parametrize(("bad", "error"), [(None, TypeError), (np.ones((6, 24), np.float32), ValueError)])
def test_bad_arrays_are_named_before_lengths(name, bad, error):
    arguments = {**dict(zip(("query", "key", "value"), problem())), name: bad}
    with pytest.raises(error, match=f"^{name} must"):
        jax_mfa.decode_attention(**arguments, lengths=LENGTHS)


def test_lengths_may_be_a_list_of_what_is_traced():
    query, key, value = problem()
    wanted = jax_mfa.decode_attention(query, key, value, LENGTHS)
    out = jax.jit(lambda a, b: jax_mfa.decode_attention(query, key, value, [a, 3, b]))(*LENGTHS[::2])
    assert_allclose(out, wanted, atol=1e-6)
