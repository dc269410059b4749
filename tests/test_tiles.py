"""The cut into tiles changes no result: small problems across many tiles, by making tiles small.

The only tests that reach into `blockwise`: its tile sizes are module constants.
"""

import math

import jax
import numpy as np
import oracle
import pytest
from attention_cases import CASES, Case
from harness import BY_NAME_OF_IMPLEMENTATION, assert_close, check_case, cotangents, evaluate, qkv, terms_of

import jax_mfa
from jax_mfa.blockwise import tiles as rule

BLOCKWISE = BY_NAME_OF_IMPLEMENTATION["blockwise"]


@pytest.fixture
def sizes(monkeypatch):
    """Sets constants of `blockwise.tiles`, for programs that are traced after."""

    def cut(**constants):
        for name, value in constants.items():
            monkeypatch.setattr(rule, name, value)
        jax.clear_caches()

    yield cut
    monkeypatch.undo()
    jax.clear_caches()


@pytest.fixture
def tiles(sizes):
    """Sets queries, keys and elements of a tile."""

    def cut(block_q, block_kv, elements):
        usual = lambda spec, operands, differentiated: rule.step_of(spec, operands, block_q, block_kv)
        sizes(usual=usual, ALIGNMENT=1, LARGEST=elements)

    return cut


# one case at least of what asks for the place of a row or column, or changes what is kept from tile to tile
TOLD_BY_PLACE = (
    "bert_padding_mask",
    "block_sparse",
    "bloom",
    "decode",
    "everything",
    "gemma2",
    "gpt_oss",
    "mla_wide_keys",
    "negative_offset",
    "packed_documents",
    "ranges",
    "swin_shifted_window",
    "t5_relative_bias",
    "window_left_only",
)


@pytest.mark.share(8)
@pytest.mark.parametrize(
    "case",
    [pytest.param(x, id=x.name, marks=() if x.name in TOLD_BY_PLACE else pytest.mark.sweep) for x in CASES],
)
def test_many_tiles_give_the_same_answer(tiles, case):
    tiles(4, 5, 4 * 5)
    check_case(BLOCKWISE, case)


def test_lengths_of_queries_leave_out_tiles_of_float64_too(tiles):
    """Where numbers have 64 bits, positions that are known while tracing have them too."""
    tiles(4, 5, 4 * 5)
    check_case(BLOCKWISE, Case("lengths", B=2, T=11, S=9, N=2, K=1, H=4, dtype="float64", query_seq_lengths=(7, 3)))


RAGGED = Case(
    "ragged",
    B=4,
    T=13,
    S=17,
    N=6,
    K=2,
    H=5,
    V=7,
    bias="BNTS",
    mask="NTS",
    is_causal=True,
    query_offset=(4, 0, -2, 9),
    key_value_seq_lengths=(17, 9, 3, 0),
    query_seq_lengths=(13, 13, 5, 13),
    documents=2,
    block_mask=(3, 4),
    sinks=True,
    alibi_slopes=True,
    logits_soft_cap=3.0,
    dropout_rate=0.3,
)
SIZES = [(1, 1, 1), (6, 17, 300), (4, 4, 10**6), (39, 2, 80), (9, 6, 500)]


@pytest.mark.share(8)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_tiles_of_any_size_give_the_same_answer(tiles, size):
    tiles(*size)
    check_case(BLOCKWISE, RAGGED)


def test_dropout_drops_the_same_scores_in_any_tiling(tiles):
    case = Case("drop", B=2, T=14, S=19, N=4, K=2, H=8, V=19, dropout_rate=0.4)
    arguments = case.arguments()
    arguments["value"] = np.broadcast_to(np.eye(19, dtype=np.float32)[None, :, None], (2, 19, 2, 19))
    d_out, d_lse = cotangents(arguments)
    seen = []
    for size in ((3, 4, 12), (14, 19, 10**6), (5, 7, 70)):
        tiles(*size)
        seen.append(evaluate(BLOCKWISE, arguments, d_out, d_lse)[0] == 0)
    np.testing.assert_array_equal(seen[0], seen[1])
    np.testing.assert_array_equal(seen[0], seen[2])


@pytest.mark.share(2)
@pytest.mark.parametrize("spoil", [np.nan, np.inf, np.finfo(np.float32).max])
def test_what_a_mask_hides_stays_hidden_across_tiles(tiles, spoil):
    tiles(4, 5, 20)
    case = Case(
        "hidden", B=2, T=13, S=17, N=4, K=2, H=8, key_value_seq_lengths=(11, 17), is_causal=True, query_offset=2
    )
    arguments = case.arguments()
    d_out, d_lse = cotangents(arguments)
    clean = evaluate(BLOCKWISE, arguments, d_out, d_lse)
    for name in ("key", "value"):
        arguments[name][0, 11:] = spoil
        arguments[name][1, 15:] = spoil
    got = evaluate(BLOCKWISE, arguments, d_out, d_lse)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(clean)):
        np.testing.assert_array_equal(a, b)


def test_a_nan_that_is_seen_taints_the_rows_that_see_it_across_tiles(tiles):
    tiles(4, 5, 20)
    arguments = Case("seen", B=2, T=13, S=13, N=4, K=2, H=8, is_causal=True).arguments()
    arguments["value"][0, 7, 1, 2] = np.nan
    out, _, gradients = evaluate(BLOCKWISE, arguments, *cotangents(arguments))
    bad = np.zeros((2, 13, 4), bool)
    bad[0, 7:, 2:] = True
    np.testing.assert_array_equal(np.isnan(out).any(-1), bad)
    np.testing.assert_array_equal(np.isnan(gradients["query"]).any(-1), bad)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("spoil", [np.nan, np.inf])
@pytest.mark.parametrize("heads", [4, 1])
def test_what_few_rows_see_of_one_head_stays_there(spoil, dtype, heads):
    """What of one head or behind a length is not finite stays there; without a gradient, which goes another way."""
    q, k, v = qkv(B=2, T=2, S=400, N=2 * heads, K=heads, dtype=dtype)
    arguments = {"key_value_seq_lengths": np.array([390, 400], np.int32), "logits_soft_cap": 2.0}
    wanted = oracle.attention(q, k, v, **arguments)
    for x in (k, v):
        x[0, 390:] = spoil
    v[1, 7, -1] = spoil
    out, lse = jax.jit(lambda *x: BLOCKWISE.flash(*x, **arguments))(q, k, v)
    out, expected = np.asarray(out).astype(np.float64), wanted.out.copy()
    expected[1, :, -2:] = spoil  # by the heads of one group, in every element of its own
    common = {"terms": terms_of({"query": q, "key": k, "value": v}), "largest_score": wanted.largest_score}
    assert_close(out, expected, dtype, what="out", **common)
    assert_close(lse, wanted.lse, "float32", what="lse", **common)


@pytest.mark.parametrize("heads", [4, 1])
@pytest.mark.parametrize("size", [None, 100], ids=["one tile", "tiles"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_infinities_that_few_rows_see_keep_their_sign(dtype, size, heads, sizes):
    if size:
        sizes(LARGEST=size * heads * 16)
    q, k, v = qkv(B=2, T=2, S=400, N=2 * heads, K=heads, H=16, dtype=dtype)
    expected = oracle.attention(q, k, v).out
    for place, infinity in ((3, np.inf), (5, -np.inf)):
        v[1, 7, -1, place] = infinity
        expected[1, :, -2:, place] = infinity
    v[1, 8, -1, 6], v[1, 9, -1, 6], expected[1, :, -2:, 6] = np.inf, -np.inf, np.nan
    out = jax.jit(lambda *x: BLOCKWISE.flash(*x)[0])(q, k, v)
    assert_close(np.asarray(out).astype(np.float64), expected, dtype, what="out", terms=400)


def test_few_rows_meet_pages_of_bfloat16():
    rng = np.random.default_rng(0)
    lengths, page = np.array([100, 77], np.int32), 8
    tables = rng.permutation(26).astype(np.int32).reshape(2, 13)
    query, keys, values = qkv(B=26, T=1, S=page, N=4, K=2, H=16, dtype="bfloat16")
    query = query[:2]
    attend = lambda *x: jax_mfa.paged_attention(*x, tables, lengths, implementation="blockwise")
    k, v = (x[tables].reshape(2, 13 * page, 2, 16) for x in (keys, values))
    expected = oracle.attention(query, k, v, key_value_seq_lengths=lengths).out
    values[tables[1, 10], 3] = np.nan  # behind the length
    assert_close(
        np.asarray(attend(query, keys, values)).astype(np.float64), expected, "bfloat16", what="out", terms=120
    )


@pytest.mark.share(2)
@pytest.mark.parametrize("size", [(4, 5), (14, 4)], ids=["tiles", "one row of tiles"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_scale_that_is_a_power_of_two_changes_no_digit(dtype, size, tiles):
    """Whether it multiplies queries, here by hand, or is an argument."""
    tiles(*size, math.prod(size))
    q, k, v = qkv(B=2, T=7, S=9, N=4, K=2, H=8, dtype=dtype)
    run = lambda q, scale: BLOCKWISE.flash(q, k, v, is_causal=True, scale=scale)
    for a, b in zip(run(q, 0.25), run(q * q.dtype.type(0.25), 1.0)):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.share(16)
@pytest.mark.parametrize("spoil", [np.nan, np.inf])
@pytest.mark.parametrize("offset", [0, 3, -2])
@pytest.mark.parametrize("name", ["query", "key", "value", "d_out"])
@pytest.mark.parametrize("size", [None, (4, 5), (14, 4)], ids=["one tile", "tiles", "one row of tiles"])
def test_what_is_not_finite_anywhere_taints_only_what_sees_it(size, name, offset, spoil, tiles):
    """Of the products of one tile only one row or column is asked whether it is finite."""
    t, s, group = 7, 9, 2
    if size:
        tiles(*size, math.prod(size))
    arguments = Case("one", B=2, T=t, S=s, N=4, K=2, H=8, is_causal=True, query_offset=offset).arguments()
    d_out, d_lse = cotangents(arguments)
    clean = evaluate(BLOCKWISE, arguments, d_out, d_lse)
    sees = np.arange(s) <= np.arange(t)[:, None] + offset
    for place in range(s if name in ("key", "value") else t):
        spoilt = {**arguments, "d_out": d_out}
        spoilt[name] = spoilt[name].copy()
        spoilt[name][0, place, -1, 3] = spoil  # of the last head, and its group
        out, lse, gradients = evaluate(BLOCKWISE, {x: spoilt[x] for x in arguments}, spoilt["d_out"], d_lse)
        rows = sees[:, place] if name in ("key", "value") else (np.arange(t) == place) & sees.any(1)
        columns = sees[rows].any(0)
        kept = lambda x, tainted, heads: (x[0, ~tainted], x[0, :, :-heads], x[1])
        pairs = [(out, clean[0], rows, group), (lse, clean[1], rows, group)]
        pairs += [(gradients[x], clean[2][x], rows if x == "query" else columns, 1 + (x == "query")) for x in gradients]
        for got, wanted, tainted, heads in pairs:
            for a, b in zip(kept(got, tainted, heads), kept(wanted, tainted, heads)):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        # what is seen is not hidden: the output follows a value, as the gradients do a cotangent
        if rows.any():
            shown = gradients["query"] if name == "d_out" else out
            assert not np.isfinite(shown[0, rows]).all()


@pytest.mark.parametrize("spoilt", ["key", "value", "row"])
def test_what_a_bias_of_minus_infinity_hides_is_hidden_in_many_tiles(spoilt, tiles):
    tiles(16, 8, 16 * 8)
    arguments = dict(zip(("query", "key", "value"), map(np.array, qkv(B=2, T=35, S=35, N=4, K=4, H=8))))
    bias = np.random.default_rng(5).standard_normal((1, 4, 35, 35)).astype(np.float32)
    bias[..., 20] = -np.inf
    if spoilt == "row":
        bias[:, :, 3] = -np.inf
    else:
        arguments[spoilt][:, 20] = [np.nan, np.inf, -np.inf, np.nan, 1, 2, 3, 4]
    arguments["bias"] = bias
    d_out, d_lse = cotangents(arguments)
    (out, _, gradients), (its_out, _, its_gradients) = (
        evaluate(BY_NAME_OF_IMPLEMENTATION[name], arguments, d_out, d_lse) for name in ("blockwise", "reference")
    )
    for got, expected in [(out, its_out), *((gradients[x], its_gradients[x]) for x in gradients)]:
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("size", [None, (4, 5), (14, 4)], ids=["one tile", "tiles", "one row of tiles"])
def test_infinities_keep_their_sign_and_cancel_across_tiles(size, tiles):
    if size:
        tiles(*size, math.prod(size))
    arguments = Case("one", B=1, T=16, S=16, N=2, K=2, H=8, is_causal=True).arguments()
    value, (d_out, d_lse) = arguments["value"].copy(), cotangents(arguments)
    value[0, 3, 0, 2], value[0, 11, 0, 2], value[0, 5, 1, 7] = np.inf, -np.inf, -np.inf
    out, _, _ = evaluate(BLOCKWISE, {**arguments, "value": value}, d_out, d_lse)
    clean, _, _ = evaluate(BLOCKWISE, arguments, d_out, d_lse)
    wanted = clean.copy()
    wanted[0, 3:11, 0, 2], wanted[0, 11:, 0, 2], wanted[0, 5:, 1, 7] = np.inf, np.nan, -np.inf
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-6)

    d_out = d_out.copy()  # rows that see the first columns, and those that see all
    d_out[0, 4, 0, 1], d_out[0, 15, 0, 1] = -np.inf, np.inf
    gradient = evaluate(BLOCKWISE, arguments, d_out, d_lse)[2]["value"]
    assert np.isnan(gradient[0, :5, 0, 1]).all() and (gradient[0, 5:, 0, 1] == np.inf).all()
    assert np.isfinite(gradient[0, :, 0, 2:]).all() and np.isfinite(gradient[0, :, 1]).all()
