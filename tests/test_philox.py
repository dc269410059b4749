"""The generator of dropout bits: known answers, statistics, and independence of how the scores are cut in tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from harness import qkv, types_of

from jax_mfa.arguments import specify
from jax_mfa.philox import keep_mask, philox

pytestmark = pytest.mark.first_tier

# Philox4×32-10 from the known-answer file of Random123 (Salmon et al., SC 2011): key, counter, words
KNOWN = {
    "zeros": ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    "ones": ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    "digits_of_pi": (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
}


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", KNOWN)
def test_known_answers(name, jit):
    key, counter, words = KNOWN[name]
    fun = jax.jit(philox) if jit else philox
    got = fun(*(tuple(jnp.uint32(x) for x in xs) for xs in (key, counter)))
    assert tuple(int(x) for x in got) == words
    assert tuple(int(x) for x in oracle.philox(key, counter)) == words


def test_agrees_with_64_bit_arithmetic_on_random_counters():
    rng = np.random.default_rng(0)
    key = tuple(int(x) for x in rng.integers(0, 2**32, 2))
    counter = rng.integers(0, 2**32, (4, 1000), dtype=np.uint32)
    got = philox(tuple(jnp.uint32(x) for x in key), tuple(jnp.asarray(x) for x in counter))
    np.testing.assert_array_equal(np.stack(got), np.stack(oracle.philox(key, counter)))


def _mask(rate, seed, b, n, t, first, columns):
    """A mask of `[t, columns]` for one batch entry and head."""
    word = lambda x: jnp.full((1, 1), x, jnp.uint32)
    rows = jnp.asarray(t, jnp.uint32).reshape(-1, 1)
    return np.asarray(keep_mask(rate, (word(seed[0]), word(seed[1])), word(b), word(n), rows, first, columns))


@pytest.mark.share(4)
@pytest.mark.parametrize("first,columns", [(0, 1), (0, 4), (1, 4), (3, 2), (5, 11), (8, 8), (60, 4), (63, 1)])
def test_a_tile_anywhere_holds_the_same_bits(first, columns):
    rows = np.arange(9)
    whole = _mask(0.4, (1, 2), 3, 4, rows, 0, 64)
    np.testing.assert_array_equal(_mask(0.4, (1, 2), 3, 4, rows, first, columns), whole[:, first : first + columns])
    np.testing.assert_array_equal(
        _mask(0.4, (1, 2), 3, 4, rows[5:], first, columns), whole[5:, first : first + columns]
    )
    traced = jax.jit(lambda f: keep_mask(0.4, *_words((1, 2), 3, 4, rows), f, columns))(first)
    np.testing.assert_array_equal(traced, whole[:, first : first + columns])


def _words(seed, b, n, rows):
    word = lambda x: jnp.full((1, 1), x, jnp.uint32)
    return (word(seed[0]), word(seed[1])), word(b), word(n), jnp.asarray(rows, jnp.uint32).reshape(-1, 1)


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.5, 0.9])
def test_the_rate_of_kept_scores_is_one_minus_the_rate(rate):
    n = 400 * 500
    kept = _mask(rate, (12, 34), 0, 1, np.arange(400), 0, 500)
    sigma = (rate * (1 - rate) / n) ** 0.5
    assert abs(kept.mean() - (1 - rate)) < 5 * sigma
    # by column and by row as well, which a counter that repeats would break
    for axis, count in ((0, 400), (1, 500)):
        means = kept.mean(axis)
        assert np.abs(means - (1 - rate)).max() < 6 * (rate * (1 - rate) / count) ** 0.5
        assert 0.5 < means.std() / (rate * (1 - rate) / count) ** 0.5 < 2


@pytest.mark.parametrize("other", [((1, 3), 0, 0), ((2, 2), 0, 0), ((1, 2), 1, 0), ((1, 2), 0, 1)], ids=str)
def test_seed_batch_row_and_head_each_give_independent_bits(other):
    a = _mask(0.5, (1, 2), 0, 0, np.arange(100), 0, 100)
    b = _mask(0.5, *other, np.arange(100), 0, 100)
    assert abs((a == b).mean() - 0.5) < 5 * 0.5 / 100


@pytest.mark.share(2)
@pytest.mark.parametrize("wide", [False, True], ids=["32_bits", "64_bits"])
@pytest.mark.parametrize("seed", [0, 5, -1, -7, 2**31 + 3, 2**32 - 1, 2**40 + 7, -(2**40), 2**63 + 1])
def test_the_words_of_a_seed_do_not_depend_on_its_form(seed, wide):
    q, k, v = qkv(B=1, T=1, S=1, N=1, K=1, H=1)
    wanted = oracle.seed_words(seed)
    words = lambda x: specify(q, k, v, dropout_rate=0.5, dropout_seed=x)[1].dropout[0, :2]
    dtypes = (np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64)
    dtypes = [t for t in dtypes if np.iinfo(t).min <= seed <= np.iinfo(t).max]
    with types_of("float64" if wide else "float32"):
        arrays = [jnp.asarray(seed, t) for t in dtypes if wide or np.iinfo(t).bits <= 32]
        arrays.append(jnp.asarray(wanted, jnp.uint32))
        for x in (seed, list(wanted), *(t(seed) for t in dtypes), *(np.asarray(seed, t) for t in dtypes), *arrays):
            assert tuple(int(word) for word in words(x)) == wanted, repr(x)
        for x in arrays:
            assert tuple(int(word) for word in jax.jit(words)(x)) == wanted, repr(x)
