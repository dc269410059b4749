"""Functions of scores where something else calls attention: caches, pages, flax. Judged by equal biases and masks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from harness import assert_within, tolerance

import jax_mfa
from jax_mfa.flax import linen as mfa_linen
from jax_mfa.flax import nnx as mfa_nnx

B, S, N, K, H = 3, 32, 4, 2, 8


def arrays(t: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(t), 4)
    shapes = (B, t, N, H), (B, S, K, H), (B, S, K, H), (B, N, 2 * S)
    return tuple(jax.random.normal(k, shape) for k, shape in zip(keys, shapes))


def functions(table):
    """A relative bias of each head and batch entry, and a mask of positions."""
    score_mod = lambda score, b, n, t, s: score + table[b, n, t - s + S]
    mask_mod = lambda b, n, t, s: (s % 3 != 1) | (s == t)
    return {"score_mod": score_mod, "mask_mod": mask_mod}


def equivalent(table, positions):
    """The same as a bias and a mask, for queries at these positions [B, T]."""
    t, s = positions[:, None, :, None], np.arange(S)
    bias = table[np.arange(B).reshape(-1, 1, 1, 1), np.arange(N).reshape(1, -1, 1, 1), t - s + S]
    return {"bias": bias, "mask": (s % 3 != 1) | (s == t)}


def assert_same(found, expected, terms=S + H, gradient=False):
    """Both are rounded, hence twice the tolerance."""
    assert_within(found, expected, 2 * tolerance(expected, np.float32, terms=terms, largest_score=6, gradient=gradient))


@pytest.mark.share(4)
@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
@pytest.mark.parametrize("ragged", [False, True])
def test_in_caches_and_pages_positions_are_logical(implementation, ragged):
    """And in ragged batches b is the sequence, of which several blocks of rows may come."""
    query, key, value, table = arrays(3)
    lengths = jnp.array([5, 20, 32])
    positions = np.asarray(lengths)[:, None] - 3 + np.arange(3)
    expected = jax_mfa.decode_attention(query, key, value, lengths, **equivalent(table, positions))
    keywords = functions(table) | {"implementation": implementation}
    assert_same(jax_mfa.decode_attention(query, key, value, lengths, **keywords), expected)
    tables = jnp.asarray(np.random.default_rng(0).permutation(B * S // 8).reshape(B, S // 8))
    pages = [jnp.zeros((B * S // 8, 8, K, H)).at[tables].set(x.reshape(B, -1, 8, K, H)) for x in (key, value)]
    if ragged:
        rows = query.reshape(-1, N, H)
        keywords |= {"query_start_locs": jnp.arange(B + 1) * 3}
        found = jax_mfa.paged_attention(rows, *pages, tables, lengths, **keywords).reshape(query.shape)
    else:
        found = jax_mfa.paged_attention(query, *pages, tables, lengths, **keywords)
    assert_same(found, expected)


def test_pages_give_captured_arrays_a_gradient():
    query, key, value, table = arrays(2)
    lengths, tables = jnp.array([5, 20, 32]), jnp.arange(B * S // 8).reshape(B, -1)
    pages = [x.reshape(-1, 8, K, H) for x in (key, value)]
    cotangent = jax.random.normal(jax.random.key(9), query.shape)

    def of_pages(table):
        return (jax_mfa.paged_attention(query, *pages, tables, lengths, **functions(table)) * cotangent).sum()

    def of_cache(table):
        positions = np.asarray(lengths)[:, None] - 2 + np.arange(2)
        found = jax_mfa.decode_attention(query, key, value, lengths, **equivalent(table, positions))
        return (found * cotangent).sum()

    assert_same(jax.grad(of_pages)(table), jax.grad(of_cache)(table), gradient=True)


@pytest.mark.parametrize("attention_fn", [mfa_linen.attention_fn, mfa_nnx.attention_fn], ids=["linen", "nnx"])
def test_attention_fn_takes_functions(attention_fn):
    query, key, value, table = arrays(7)
    positions = np.broadcast_to(np.arange(7), (B, 7))
    expected = jax_mfa.dot_product_attention(query, key, value, **equivalent(table, positions))
    assert_same(attention_fn(query, key, value, **functions(table)), expected)
    with pytest.raises(NotImplementedError, match="score_mod cannot be given with sequence_axis"):
        attention_fn(query, key, value, **functions(table), sequence_axis=jax_mfa.SequenceSharding("x"))
    with pytest.raises(NotImplementedError, match="score_mod cannot run this call, only flax's own attention can"):
        attention_fn(query, key, value, **functions(table), dropout_rate=0.5, dropout_rng=jax.random.key(0))


def test_a_linen_module_learns_the_table_that_its_function_reads():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            table = self.param("table", nn.initializers.normal(), (N, 2 * S))
            function = lambda score, b, n, t, s: score + table[n, t - s + S]
            return mfa_linen.FlashMultiHeadAttention(num_heads=N)(x, score_mod=function)

    x = jax.random.normal(jax.random.key(0), (B, 9, N * H))
    parameters = Model().init(jax.random.key(1), x)
    gradient = jax.grad(lambda p: (Model().apply(p, x) ** 2).sum())(parameters)["params"]["table"]
    distances = np.arange(9)[:, None] - np.arange(9) + S
    assert np.isin(np.flatnonzero(np.abs(gradient).sum(0)), distances).all()
    assert (np.abs(gradient)[:, np.unique(distances)] > 0).all()


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_functions_of_a_module_are_those_of_its_calls(kind):
    x, table = jax.random.normal(jax.random.key(0), (B, 9, N * H)), jax.random.normal(jax.random.key(3), (B, N, 2 * S))
    given = functions(table)
    if kind == "linen":
        made = lambda **of_module: mfa_linen.FlashMultiHeadAttention(num_heads=N, **of_module)
        parameters = made().init(jax.random.key(1), x)
        run = lambda module, **of_call: module.apply(parameters, x, **of_call)
    else:
        made = lambda **of_module: mfa_nnx.FlashMultiHeadAttention(N, N * H, **of_module, rngs=nnx.Rngs(0))
        run = lambda module, **of_call: module(x, **of_call)
    other = {"score_mod": lambda x, b, n, t, s: 2 * x, "mask_mod": lambda b, n, t, s: t >= s}
    assert_same(run(made(**given)), run(made(), **given), N * H)
    assert_same(run(made(**other), **given), run(made(), **given), N * H)
    assert np.abs(run(made(**given)) - run(made())).max() > 0.01


def test_a_decoding_module_takes_functions_of_logical_positions():
    """Tokens one by one give what the whole sequence gives; a ring, whose columns are no positions, refuses."""
    table = jax.random.normal(jax.random.key(3), (B, N, 2 * S))
    module = mfa_nnx.FlashMultiHeadAttention(N, N * H, num_kv_heads=K, is_causal=True, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (B, 6, N * H))
    whole = module(x, **functions(table))
    module.init_cache((B, S, N * H))
    parts = [module(x[:, i : i + 2], **functions(table), decode=True) for i in range(0, 6, 2)]
    assert_same(jnp.concatenate(parts, 1), whole, N * H)
    ring = mfa_nnx.FlashMultiHeadAttention(
        N, N * H, is_causal=True, local_window_size=(3, 0), ring_cache=True, rngs=nnx.Rngs(0)
    )
    ring.init_cache((B, S, N * H))
    with pytest.raises(ValueError, match="score_mod must not be given with a ring cache"):
        ring(x[:, :1], score_mod=functions(table)["score_mod"], decode=True)
