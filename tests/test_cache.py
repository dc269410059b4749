"""Caches of keys and values: what `append` writes, and that attention through any cache is that over all tokens."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import arrays, assert_allclose, assert_close, own, quick_jit
from oracle import attention

import jax_mfa
from jax_mfa.kv_cache import contiguous as cache

B, L, N, K, H, V, LEFT = 3, 20, 4, 2, 8, 6, 3
WINDOW = (LEFT, 0)
# one call after another: how many tokens come for each batch entry, and how many of them count
CALLS = ((7, (7, 2, 0)), (1, (1, 0, 1)), (3, (3, 3, 1)), (1, (1, 1, 1)), (3, (2, 0, 3)), (1, (0, 1, 1)))


def tokens(dtype=np.float32):
    return tuple(x.astype(dtype) for x in arrays((B, L, N, H), (B, L, K, H), (B, L, K, V)))


def empty(columns, lead=(B,), fill=np.nan):
    return jnp.full((*lead, columns, K, H), fill), jnp.full((*lead, columns, K, V), fill), jnp.zeros(lead, jnp.int32)


def padded(x, start, count, length):
    """Of each batch entry the `count` tokens from `start` on, and NaN behind them."""
    rows = [np.full((length, *x.shape[2:]), np.nan, x.dtype) for _ in x]
    for row, whole, first, n in zip(rows, x, start, count):
        row[:n] = whole[first : first + n]
    return np.stack(rows)


@pytest.mark.share(2)
@own
@pytest.mark.parametrize(
    "feature", [{}, {"logits_soft_cap": 2.0, "sinks": True, "alibi_slopes": True}], ids=["", "all"]
)
@pytest.mark.parametrize("ring", [False, True], ids=["plain", "ring"])
def test_ragged_tokens_see_what_they_would_without_a_cache(implementation, ring, feature):
    per_head = np.abs(arrays((N,))[0])
    feature = {name: per_head if x is True else x for name, x in feature.items()}
    query, key, value = tokens()
    wanted = attention(query, key, value, is_causal=True, local_window_size=WINDOW, **feature)
    step = quick_jit(
        functools.partial(
            cache.attend, ring=ring, local_window_size=WINDOW, implementation=implementation.name, **feature
        )
    )
    state, start = empty(LEFT + 1 if ring else L), np.zeros(B, int)
    for length, count in CALLS:
        new = (padded(x, start, count, length) for x in (query, key, value))
        out, *state = step(*new, *state, np.array(count))
        for row in range(B):
            now = slice(start[row], start[row] + count[row])
            assert_close(
                out[row, : count[row]], wanted.out[row, now], "float32", terms=L, largest_score=wanted.largest_score
            )
            assert not out[row, count[row] :].any()
        start += count
        np.testing.assert_array_equal(state[2], start)


@pytest.mark.parametrize("ring", [False, True], ids=["plain", "ring"])
@pytest.mark.parametrize("lead", [(), (2, 3)], ids=str)
def test_append_writes_each_batch_row_at_its_own_place(lead, ring):
    columns, length = 5, 4
    rng = np.random.default_rng(0)
    lengths, counts = rng.integers(0, 7 if ring else columns - 1, lead), rng.integers(0, length + 1, lead)
    caches = arrays((*lead, columns, K, H), (*lead, columns, K, V))
    new = arrays((*lead, length, K, H), (*lead, length, K, V))
    wanted = tuple(x.copy() for x in caches)
    for row in np.ndindex(*lead):
        for t in range(counts[row]):
            column = lengths[row] + t
            if ring or column < columns:
                for whole, part in zip(wanted, new):
                    whole[row][column % columns] = part[row][t]
    got = jax.jit(functools.partial(cache.append, ring=ring))(*caches, lengths, *new, counts)
    for x, y in zip(got, (*wanted, lengths + counts)):
        np.testing.assert_array_equal(x, y)
    assert got[2].dtype == np.int32


def test_append_serves_decode_attention(implementation):
    query, key, value = tokens()
    lengths = np.array([5, 19, 1], np.int32)
    key_cache, value_cache = (np.where(np.arange(L)[:, None, None] < lengths[:, None, None, None], x, np.nan)
                              for x in (key, value))  # fmt: skip
    at = np.arange(B), lengths
    new = (x[at][:, None] for x in (key, value))
    key_cache, value_cache, after = cache.append(key_cache, value_cache, lengths, *new)
    out = jax_mfa.decode_attention(
        query[at][:, None], key_cache, value_cache, after, implementation=implementation.name
    )
    wanted = attention(query, key, value, is_causal=True)
    assert_close(out[:, 0], wanted.out[at], "float32", terms=L, largest_score=wanted.largest_score)


def test_more_tokens_than_a_plain_cache_holds():
    query, key, value = tokens()
    columns, lengths = 6, np.array([6, 4, 5], np.int32)
    caches = tuple(x[:, :columns] for x in (key, value))
    new = key[:, 7:9], value[:, 7:9]
    with pytest.raises(
        ValueError, match=r"^key_cache holds 6 tokens; 6 known to be written, by lengths, it cannot take 2 more of key$"
    ):
        cache.append(*caches, lengths, *new)
    with pytest.raises(
        ValueError,
        match=r"^key_cache holds 6 tokens; 0 known to be written, by lengths, it cannot take 7 more of key\b",
    ):
        jax.jit(cache.append)(*caches, lengths, key[:, :7], value[:, :7])
    cache.append(*caches, lengths, *new, [0, 2, 1])
    # traced, they are dropped, but counted, so that whoever looks knows
    keys, values, after = jax.jit(cache.append)(*caches, lengths, *new)
    np.testing.assert_array_equal(after, lengths + 2)
    for got, old, added in zip((keys, values), caches, new):
        np.testing.assert_array_equal(got[0], old[0])
        np.testing.assert_array_equal(got[1], np.concatenate([old[1, :4], added[1]]))
        np.testing.assert_array_equal(got[2], np.concatenate([old[2, :5], added[2, :1]]))
    out, *_ = jax.jit(cache.attend)(query[:, 7:9], *new, *caches, lengths)
    np.testing.assert_array_equal(np.isnan(out).all((1, 2, 3)), [True, False, True])
    np.testing.assert_array_equal(np.isfinite(out).all((1, 2, 3)), [False, True, False])
    with pytest.raises(ValueError, match=r"lengths must lie in 0\.\.6, got 8"):
        cache.append(keys, values, after, *new)


@pytest.mark.parametrize("ring", [False, True], ids=["plain", "ring"])
def test_a_donated_cache_is_written_in_place(ring):
    columns = 4096
    key_cache, value_cache, lengths = empty(columns)
    new = jnp.ones((B, 2, K, H)), jnp.ones((B, 2, K, V))
    append = jax.jit(functools.partial(cache.append, ring=ring), donate_argnums=(0, 1))
    memory = append.lower(key_cache, value_cache, lengths, *new).compile().memory_analysis()
    both = 4 * B * columns * K * (H + V)
    assert memory.alias_size_in_bytes == both
    assert memory.temp_size_in_bytes < both / 100


def test_sharded_caches_are_not_gathered():
    if jax.device_count() < 4:
        pytest.skip("needs 4 devices")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), "b")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("b"))
    key, value, lengths = empty(16, (4,))
    new = jnp.ones((4, 2, K, H)), jnp.ones((4, 2, K, V))
    arguments = jax.device_put((key, value, lengths, *new), sharding)
    for ring in (False, True):
        compiled = jax.jit(functools.partial(cache.append, ring=ring)).lower(*arguments).compile()
        assert not re.search("all-gather|all-reduce|all-to-all|collective-permute", compiled.as_text())
        assert all(x.is_equivalent_to(sharding, 1) for x in compiled.output_shardings)


@pytest.mark.share(2)
@pytest.mark.parametrize("ring", [False, True], ids=["plain", "ring"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_reach_the_tokens_and_the_cache(ring, dtype):
    query, key, value = (jnp.asarray(x, dtype) for x in tokens())
    weights = arrays((B, 4, N, V))[0]

    def loss(query, key, value, cached):
        first = LEFT + 1
        whole = jax_mfa.dot_product_attention(query, key, value, is_causal=True, local_window_size=WINDOW)
        caches = key[:, :first], value[:, :first]
        out, *_ = cache.attend(
            *(x[:, first : first + 4] for x in (query, key, value)),
            *(caches if ring else (jnp.pad(x, ((0, 0), (0, 4), (0, 0), (0, 0))) for x in caches)),
            jnp.full(B, first),
            ring=ring,
            local_window_size=WINDOW,
        )
        return (weights * (out if cached else whole[:, first : first + 4]).astype(jnp.float32)).sum()

    gradients = lambda cached: quick_jit(jax.grad(functools.partial(loss, cached=cached), (0, 1, 2)))
    got, wanted = (gradients(cached)(query, key, value) for cached in (True, False))
    for x, y in zip(got, wanted):
        assert np.abs(y).max() > 0.01
        rounding = 0 if dtype == "float32" else 2 * float(jnp.finfo(dtype).eps)
        assert_allclose(
            x.astype(jnp.float32), y.astype(jnp.float32), rtol=rounding, atol=1e-5 + rounding * np.abs(y).max()
        )


@pytest.mark.parametrize(("batch", "length", "columns"), [(0, 2, 4), (2, 0, 4), (2, 0, 0)])
def test_nothing_to_append(batch, length, columns):
    caches = empty(columns, (batch,))
    new = (jnp.ones((batch, length, heads, size)) for heads, size in ((N, H), (K, H), (K, V)))
    out, *after = cache.attend(*new, *caches, ring=columns == LEFT + 1, local_window_size=WINDOW)
    assert out.shape == (batch, length, N, V) and not out.any()
    for x, y in zip(after, caches):
        np.testing.assert_array_equal(x, y)


STORED = jax_mfa.quantize(np.ones((B, 5, K, H), np.float32))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"key": None}, TypeError, "key must be an array (floating [..., T, K, H]), got NoneType"),
        (
            {"key_cache": np.ones((B, 5, K, H), np.int32)},
            TypeError,
            "key_cache must be floating [..., S, K, H], got int32",
        ),
        (
            {"value_cache": np.ones((K, V), np.float32)},
            ValueError,
            "value_cache must have shape [..., S, K, V], got [2, 6]",
        ),
        (
            {"value_cache": np.ones((B, 6, K, V), np.float32)},
            ValueError,
            "value_cache must have the shape of key_cache",
        ),
        (
            {"key": np.ones((B, 1, K, H + 1), np.float32)},
            ValueError,
            "key must have the shape of key_cache, [3, 5, 2, 8]",
        ),
        ({"value": np.ones((1, 1, K, V), np.float32)}, ValueError, "value must have the shape of value_cache"),
        ({"value": np.ones((B, 2, K, V), np.float32)}, ValueError, "value must have the length T = 1 of key"),
        ({"query": np.ones((B, 2, N, H), np.float32)}, ValueError, "query must be as long as key"),
        ({"lengths": None}, TypeError, "lengths must be an array (integers [B]), got NoneType"),
        ({"lengths": np.zeros(2, int)}, ValueError, "lengths must have shape [B] = [3], got [2]"),
        ({"lengths": 6}, ValueError, "lengths must lie in 0..5, got 6"),
        ({"new_lengths": 2}, ValueError, "new_lengths must lie in 0..1, got 2"),
        ({"new_lengths": [1.0, 1.0, 1.0]}, TypeError, "new_lengths must be integers [B], got float64[3]"),
        ({"query_seq_lengths": 2}, ValueError, "query_seq_lengths must lie in 0..1, got 2"),
        ({"key": STORED}, TypeError, "key must be floating [..., T, K, H], got a QuantizedArray"),
        (
            {"key_cache": STORED},
            TypeError,
            "key_cache must be floating [..., S, K, H], got a QuantizedArray: tokens are",
        ),
        (
            {"value_cache": STORED, "ring": True, "local_window_size": 4},
            TypeError,
            "value_cache must be floating [..., S, K, V], got a QuantizedArray: tokens are",
        ),
        ({"query": STORED}, TypeError, "query must be floating [..., T, N, H], got a QuantizedArray"),
        ({"bias": STORED}, TypeError, "bias must be an array (floating, broadcastable"),
        (
            {"key": jax.ShapeDtypeStruct((B, 1, K, H), np.float32)},
            TypeError,
            "key must be an array (floating [..., T, K",
        ),
        ({"ring": 1}, TypeError, "ring must be a Python bool (it is static), got 1"),
        ({"ring": True, "local_window_size": ()}, TypeError, "local_window_size must be an int or a pair"),
        ({"ring": True}, ValueError, "a ring cache needs a local_window_size with a limit on the left, got None"),
        ({"ring": True, "local_window_size": (None, 0)}, ValueError, "a ring cache needs a local_window_size"),
        (
            {"ring": True, "local_window_size": 3},
            ValueError,
            "a ring cache for local_window_size = 3 must have 4 columns, got key_cache of shape [3, 5, 2, 8]",
        ),
        (
            {"ring": True, "local_window_size": 2.0},
            TypeError,
            "local_window_size must be an int or a pair (left, right), got 2.0",
        ),
        (
            {"ring": True, "local_window_size": 4, "mask": np.ones((1, 5), bool)},
            ValueError,
            "mask must not be given with a ring cache",
        ),
    ],
    ids=str,
)
def test_errors_name_the_argument(changed, error, message):
    arguments = dict(zip(("key_cache", "value_cache", "lengths"), empty(5)))
    arguments |= dict(zip(("query", "key", "value"), (x[:, :1] for x in tokens())))
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        cache.attend(**(arguments | changed))
