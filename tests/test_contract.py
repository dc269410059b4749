"""Values and gradients of every feature against the oracle, for each implementation."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from attention_cases import BY_NAME, CASES, Case
from harness import (
    IMPLEMENTATIONS,
    arrays,
    assert_allclose,
    assert_close,
    assert_matches_oracle,
    check_case,
    cotangents,
    evaluate,
    own,
    qkv,
    quick_jit,
    terms_of,
    types_of,
)

import jax_mfa
from jax_mfa import BlockMask

pytestmark = pytest.mark.first_tier

named = lambda case: case.name


@pytest.mark.share(4)
@pytest.mark.parametrize("case", CASES, ids=named)
def test_values_and_gradients_are_right(implementation, case):
    check_case(implementation, case, jit=jax.jit if implementation.own_rules else quick_jit)


ROUNDED = ("minilm", "llama", "gpt_oss", "swin_shifted_window", "everything")


@pytest.mark.share(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ROUNDED)
def test_16_bit_inputs_are_accumulated_in_32_bits_and_rounded_once(implementation, name, dtype):
    check_case(implementation, BY_NAME[name], dtype)


@pytest.mark.parametrize("name", ["llama_prefill_chunk", "packed_documents", "everything"])
def test_float64_is_accumulated_in_float64(implementation, name):
    check_case(implementation, BY_NAME[name], "float64")


# --- combinations: every pair of features meets, both on, both off, and each alone

FEATURES = {
    "bias": {"bias": "NTS"},
    "mask": {"mask": "BNTS"},
    "scale": {"traced_scale": True},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (5, 4)},
    "offset": {"query_offset": (3, -2)},
    "query_lengths": {"query_seq_lengths": (11, 7)},
    "key_lengths": {"key_value_seq_lengths": (6, 13)},
    "cap": {"logits_soft_cap": 2.0},
    "alibi": {"alibi_slopes": True},
    "sinks": {"sinks": True},
    "documents": {"documents": 2},
    "ranges": {"key_value_ranges": True},
    "block": {"block_mask": (4, 3)},
    "dropout": {"dropout_rate": 0.3},
    "group": {"K": 1},
    "wide_values": {"V": 11},
}


def _covering_combinations():
    """Few subsets of the features so that any two of them meet in all four ways, chosen greedily."""
    names, rng = list(FEATURES), np.random.default_rng(0)
    missing = {(*pair, *states) for pair in itertools.combinations(range(len(names)), 2) for states in
               itertools.product((False, True), repeat=2)}  # fmt: skip
    chosen = []
    covers = lambda row: {(i, j, row[i], row[j]) for i, j in itertools.combinations(range(len(names)), 2)}
    while missing:
        rows = [tuple(bool(x) for x in rng.integers(0, 2, len(names))) for _ in range(200)]
        best = max(rows, key=lambda row: len(covers(row) & missing))
        missing -= covers(best)
        chosen.append(best)
    cases = []
    for i, row in enumerate(chosen):
        fields = {}
        for name, on in zip(names, row):
            fields |= FEATURES[name] if on else {}
        cases.append(Case(f"combination_{i}", T=11, S=13, N=4, **{"K": 4, "H": 8, **fields}))
    return cases


@pytest.mark.slow
@pytest.mark.share(4)
@pytest.mark.parametrize("case", _covering_combinations(), ids=named)
def test_any_two_features_work_together(implementation, case):
    check_case(implementation, case)


# --- bias

PATTERNS = ["".join(axes) for n in range(5) for axes in itertools.combinations("BNTS", n)]


@pytest.mark.slow
@pytest.mark.share(2)
@own
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: p or "none")
def test_the_gradient_of_a_broadcast_bias_is_summed_over_the_broadcast_axes(implementation, pattern):
    check_case(implementation, Case(f"bias_{pattern}", T=5, S=7, N=4, K=2, H=4, bias=pattern, is_causal=True))


@pytest.mark.parametrize("shape", [(7,), (1,), (5, 7), (5, 1), (4, 1, 7), ()], ids=str)
def test_a_bias_of_lower_rank_broadcasts_from_the_right(implementation, shape):
    q, k, v = qkv(T=5, S=7, H=4)
    assert_matches_oracle(implementation, {"query": q, "key": k, "value": v, "bias": arrays(shape, seed=5)[0]})


@pytest.mark.parametrize("shape", [(9,), (7, 1), (4, 1, 1), (2, 1, 7, 1), ()], ids=str)
def test_a_mask_broadcasts_from_the_right(implementation, shape):
    q, k, v = qkv()
    mask = np.random.default_rng(3).random(shape) < 0.6
    assert_matches_oracle(implementation, {"query": q, "key": k, "value": v, "mask": np.asarray(mask)})


def test_a_bias_of_minus_infinity_hides_a_column(implementation):
    q, k, v = qkv()
    bias = np.where(np.random.default_rng(0).random((2, 1, 7, 9)) < 0.5, 0, -np.inf).astype("float32")
    bias[0, 0, 3] = -np.inf
    arguments = {"query": q, "key": k, "value": v}
    d_out, d_lse = cotangents(arguments)
    hidden = evaluate(implementation, {**arguments, "bias": bias}, d_out, d_lse)
    masked = evaluate(implementation, {**arguments, "mask": bias == 0}, d_out, d_lse)
    for name in ("query", "key", "value"):
        assert_close(hidden[2][name], masked[2][name], "float32", terms=16, gradient=True, what=name)
    assert_close(hidden[0], masked[0], "float32", terms=16)
    assert_close(hidden[1], masked[1], "float32", terms=16)


# --- rows that see nothing

BLIND = {
    "mask": {"mask": np.arange(7)[:, None] > np.full(9, 2)},
    "key_lengths": {"key_value_seq_lengths": np.array([0, 9])},
    "query_lengths": {"query_seq_lengths": np.array([4, 0])},
    "causal": {"is_causal": True, "query_offset": -3},
    "causal_array": {"is_causal": True, "query_offset": np.array([-3, -100], np.int32)},
    "window": {"local_window_size": (1, 1), "query_offset": 6},
    "segments": {
        "query_segment_ids": np.array([[0, 0, 1, 1, 2, 2, 3]] * 2),
        "key_value_segment_ids": np.array([[1] * 9, [2] * 9]),
    },
    "ranges": {"key_value_ranges": np.stack([np.full((2, 7), 4), np.arange(14).reshape(2, 7)], -1)},
    "blocks": {"block_mask": BlockMask(np.array([[True, False, True], [False, False, False]]), (4, 4))},
    "bias": {"bias": np.full((7, 9), -np.inf, np.float32)},
}


@pytest.mark.slow
@pytest.mark.share(2)
@pytest.mark.parametrize(
    "reason,sinks,dtype",
    [(reason, sinks, "float32") for reason in BLIND for sinks in (False, True)]
    + [("mask", False, "bfloat16"), ("causal", True, "float16")],
)
def test_a_row_that_sees_nothing_gives_zeros_and_no_gradient(implementation, reason, sinks, dtype):
    q, k, v = qkv(dtype=dtype)
    arguments = {"query": q, "key": k, "value": v, **BLIND[reason]}
    if sinks:
        arguments["sinks"] = arrays((4,), dtype=dtype, seed=9)[0]
    d_out, d_lse = cotangents(arguments)
    answer = oracle.attention(**arguments, d_out=d_out, d_lse=d_lse)
    blind = answer.lse == -np.inf
    assert blind.any(), "the example must have rows that see nothing"
    out, lse, gradients = evaluate(implementation, arguments, d_out, d_lse)
    np.testing.assert_array_equal(out[blind], 0)
    np.testing.assert_array_equal(lse[blind], -np.inf)
    np.testing.assert_array_equal(gradients["query"][blind], 0)
    gradients.pop("bias", None) if reason == "bias" else None
    assert_matches_oracle(implementation, arguments, d_out=d_out, d_lse=d_lse, answer=answer)


ONLY_COLUMN = {
    "mask": {"mask": np.array([True, False]).reshape(2, 1, 1, 1)},
    "key_lengths": {"key_value_seq_lengths": np.array([1, 0])},
    "causal": {"is_causal": True, "query_offset": -2},
}


@pytest.mark.parametrize("reason", ONLY_COLUMN)
def test_rows_may_not_see_the_only_column(implementation, reason):
    q, k, v = qkv(T=3, S=1)
    arguments = {"query": q, "key": k, "value": v, **ONLY_COLUMN[reason]}
    out, lse, _ = evaluate(implementation, arguments, *cotangents(arguments))
    blind = lse == -np.inf
    assert blind.any() and not blind.all()
    np.testing.assert_array_equal(out[blind], 0)
    assert_matches_oracle(implementation, arguments)


@pytest.mark.parametrize("reason", ["mask", "causal", "key_lengths", "bias"])
def test_the_cotangent_of_a_row_that_sees_nothing_may_be_nan(implementation, reason):
    q, k, v = qkv()
    arguments = {"query": q, "key": k, "value": v, **BLIND[reason], "sinks": arrays((4,), seed=9)[0]}
    if reason == "bias":  # head 3 sees nothing at all, and has a slope and a sink that are no numbers
        seen = (np.arange(7)[:, None] > 2) & (np.arange(4) < 3)[:, None, None]
        arguments["bias"] = np.where(seen, arrays((4, 7, 9), seed=4)[0], -np.inf).astype(np.float32)
        arguments["alibi_slopes"] = np.float32([0.5, 0.25, 0.125, np.nan])
        arguments["sinks"][3] = np.inf
    d_out, d_lse = cotangents(arguments)
    blind = oracle.attention(**arguments).lse == -np.inf
    wanted = evaluate(implementation, arguments, d_out, d_lse)[2]
    assert all(np.isfinite(x).all() for x in wanted.values())
    d_out[blind], d_lse[blind] = np.nan, np.nan
    for name, got in evaluate(implementation, arguments, d_out, d_lse)[2].items():
        np.testing.assert_array_equal(got, wanted[name], err_msg=name)


# --- what nobody sees may be anything

HIDDEN = {  # arguments that hide some columns of batch entry 0 from every row, and which
    "key_lengths": ({"key_value_seq_lengths": np.array([5, 9])}, slice(5, 9)),
    "mask": ({"mask": np.broadcast_to(np.arange(9) != 4, (2, 1, 1, 9))}, slice(4, 5)),
    "causal": ({"is_causal": True}, slice(7, 9)),
    "window": ({"local_window_size": (1, 0), "query_offset": 2}, slice(0, 1)),
    "segments": (
        {
            "query_segment_ids": np.array([[0] * 7, [1] * 7]),
            "key_value_segment_ids": np.array([[0] * 6 + [1] * 3, [0] * 2 + [1] * 7]),
        },
        slice(6, 9),
    ),
    "ranges": ({"key_value_ranges": np.broadcast_to(np.array([2, 9]), (2, 7, 2))}, slice(0, 2)),
    "blocks": ({"block_mask": BlockMask(np.array([[True, True, False]] * 2), (4, 3))}, slice(6, 9)),
}
SPOILS = {"nan": np.nan, "inf": np.inf, "minus_inf": -np.inf, "largest": np.finfo(np.float32).max}


# masks and values with no other feature, and other features with two masks and two values
CROSSED = [(by, spoil, "plain") for by in HIDDEN for spoil in SPOILS]
CROSSED += itertools.product(
    ("key_lengths", "segments"), ("nan", "largest"), ("cap", "dropout", "scale", "sinks_alibi_bias")
)


@pytest.mark.slow
@pytest.mark.share(2)
@pytest.mark.parametrize("by,spoil,extra", CROSSED)
def test_what_a_mask_hides_reaches_neither_output_nor_gradient(implementation, by, spoil, extra):
    keywords, columns = HIDDEN[by]
    q, k, v = qkv()
    arguments = {"query": q, "key": k, "value": v, **keywords}
    if extra == "cap":
        arguments["logits_soft_cap"] = 3.0
    elif extra == "dropout":
        arguments |= {"dropout_rate": 0.25, "dropout_seed": np.array([3, 4], np.uint32)}
    elif extra == "scale":
        arguments["scale"] = np.float32(0.3)
    elif extra == "sinks_alibi_bias":
        sinks, bias = arrays((4,), (4, 7, 9), seed=8)
        arguments |= {"sinks": sinks, "bias": bias, "alibi_slopes": np.array([0.5, 0.25, 0.125, 0.0625], np.float32)}
    d_out, d_lse = cotangents(arguments)
    clean = evaluate(implementation, arguments, d_out, d_lse)
    largest_score = oracle.attention(**arguments).largest_score
    for name in ("key", "value"):
        spoilt = {**arguments, name: arguments[name].copy()}
        spoilt[name][0, columns] = SPOILS[spoil]
        got = evaluate(implementation, spoilt, d_out, d_lse)
        # not to the bit: the loop for what is not finite is another program, and a compiler may fuse it otherwise
        near = functools.partial(assert_close, dtype=np.float32, terms=terms_of(arguments), largest_score=largest_score)
        near(got[0], clean[0], what=f"{name}: out")
        near(got[1], clean[1], what=f"{name}: lse")
        for which, gradient in got[2].items():
            near(gradient, clean[2][which], gradient=True, what=f"{name}: d{which}")


def test_gradients_keep_their_digits_where_the_soft_cap_is_nearly_reached(implementation):
    """1 − tanh² would have three of them left. One key, so that nothing larger stands beside."""
    q, k, v = qkv(B=4, T=1, S=1, K=4)
    score = np.einsum("btnh,bsnh->bn", q, k)
    q = q * (np.linspace(1.5, 2.5, 16, dtype="float32").reshape(score.shape) / score)[:, None, :, None]
    # small values: the cotangent of the log-sum-exp, which alone counts where one key is seen, keeps its own digits
    arguments = {"query": q, "key": k, "value": v / 1024, "scale": 1.0, "logits_soft_cap": 0.5}
    d_out, d_lse = cotangents(arguments)
    got = evaluate(implementation, arguments, d_out, d_lse)[2]
    expected = oracle.attention(**arguments, d_out=d_out, d_lse=d_lse)
    for name in ("query", "key"):
        assert_allclose(got[name], expected.gradients[name], rtol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("spoil", ["nan", "inf"])
@pytest.mark.parametrize("where", ["query", "key", "value", "all"])
def test_a_document_that_is_not_finite_does_not_touch_its_neighbour(implementation, where, spoil):
    case = Case("documents", B=1, T=12, S=12, N=4, K=2, H=8)
    ids = np.repeat([[0, 1]], 6, axis=1)
    arguments = {**case.arguments(), "query_segment_ids": ids, "key_value_segment_ids": ids, "is_causal": True}
    d_out, d_lse = cotangents(arguments)
    clean = evaluate(implementation, arguments, d_out, d_lse)
    spoilt = dict(arguments)
    for name in ("query", "key", "value") if where == "all" else (where,):
        spoilt[name] = arguments[name].copy()
        spoilt[name][0, 2] = SPOILS[spoil]
    out, lse, gradients = evaluate(implementation, spoilt, d_out, d_lse)
    np.testing.assert_array_equal(out[:, 6:], clean[0][:, 6:])
    np.testing.assert_array_equal(lse[:, 6:], clean[1][:, 6:])
    for name in ("query", "key", "value"):
        np.testing.assert_array_equal(gradients[name][:, 6:], clean[2][name][:, 6:], err_msg=name)
    # within the document, rows from there on see it, and say so
    assert not np.isfinite(out[:, 2]).all()


def test_queries_that_are_not_finite_do_not_touch_keys_that_none_of_them_sees(implementation):
    """Also where the softmax of no row is defined."""
    q, k, v = qkv(T=6, S=9)
    arguments = {"query": np.full_like(q, np.nan), "key": k, "value": v, "key_value_seq_lengths": np.array([6, 4])}
    out, _, gradients = evaluate(implementation, arguments, *cotangents(arguments))
    assert np.isnan(out).all()
    for name in ("key", "value"):
        for row, length in enumerate(arguments["key_value_seq_lengths"]):
            assert np.isnan(gradients[name][row, :length]).all()
            np.testing.assert_array_equal(gradients[name][row, length:], 0)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_a_nan_that_is_seen_is_not_swallowed(implementation, where, masked):
    q, k, v = (x.copy() for x in qkv(T=6, S=6))
    arguments = {"query": q, "key": k, "value": v, "is_causal": masked}
    arguments[where][0, 3, 0] = np.nan
    d_out, d_lse = cotangents(arguments)
    out, _, gradients = evaluate(implementation, arguments, d_out, d_lse)
    rows = np.isnan(out).any((-1, -2))[0]
    expected = np.arange(6) == 3 if where == "query" else (np.arange(6) >= 3 if masked else np.ones(6, bool))
    np.testing.assert_array_equal(rows, expected)
    assert not np.isnan(out[1]).any()
    np.testing.assert_array_equal(np.isnan(gradients["query"]).any((-1, -2))[0], expected)
    assert np.isnan(gradients["key"][0]).any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["query", "key", "value", "bias", "scale", "sinks", "alibi_slopes"])
@pytest.mark.parametrize("seen", [np.inf, -np.inf, np.nan])
def test_what_is_seen_and_not_finite_does_what_plain_arithmetic_does(implementation, name, seen):
    q, k, v = qkv(T=6, S=6)
    bias, sinks = arrays((4, 6, 6), (4,), seed=3)
    arguments = {"query": q, "key": k, "value": v, "bias": bias, "is_causal": True, "sinks": sinks}
    arguments |= {"alibi_slopes": np.float32([0.5, 0.25, 0.125, 0.0625]), "query_seq_lengths": np.array([6, 4])}
    at = {"query": (0, 3, 1, 2), "key": (0, 3, 0, 2), "value": (0, 3, 0, 2), "bias": (1, 4, 2)}.get(name, (1,))
    arguments[name] = np.full((), seen, np.float32) if name == "scale" else arguments[name].copy()
    if name != "scale":
        arguments[name][at] = seen
    with np.errstate(invalid="ignore"):
        if name != "scale":
            return assert_matches_oracle(implementation, arguments)
        # gradients are 0 · ∞ throughout then
        answer, (out, lse, _) = (
            oracle.attention(**arguments),
            evaluate(implementation, arguments, *cotangents(arguments)),
        )
    assert_close(out, answer.out, "float32", terms=20)
    assert_close(lse, answer.lse, "float32", terms=20)


MINUS_INFINITY_BESIDE = {
    "nothing": {},
    "causal": {"is_causal": True},
    "lengths": {"query_seq_lengths": np.array([4, 5]), "key_value_seq_lengths": np.array([5, 6])},
    "mask": {"mask": np.arange(6) != 4},
}


@pytest.mark.parametrize("beside", MINUS_INFINITY_BESIDE)
@pytest.mark.parametrize("sinks", [False, True])
def test_a_row_whose_scores_are_all_minus_infinity_has_no_softmax(implementation, beside, sinks):
    """Not by a mask nor by a bias: such a row sees something. A sink beside them takes all of it."""
    q, k, v = qkv(T=5, S=6)
    arguments = {"query": q.copy(), "key": np.abs(k) + 1, "value": v, **MINUS_INFINITY_BESIDE[beside]}
    arguments["query"][0, 2] = -1e38
    arguments["key"][0] *= 30
    if sinks:
        arguments["sinks"] = arrays((4,))[0]
    with np.errstate(over="ignore"):
        answer = oracle.attention(**arguments)
    sees = np.arange(5) < np.reshape(arguments.get("query_seq_lengths", [5, 5]), (2, 1))
    assert np.isfinite(answer.lse[sees]).all(), "in float64 none of them overflows"
    out, lse, _ = evaluate(implementation, arguments, *cotangents(arguments))
    if sinks:
        np.testing.assert_array_equal(out[0, 2], 0)
        np.testing.assert_array_equal(lse[0, 2], arguments["sinks"])
    else:
        assert np.isnan(out[0, 2]).all() and np.isnan(lse[0, 2]).all()
    assert np.isfinite(out[0, [0, 1, 3, 4]]).all() and np.isfinite(out[1]).all()


@pytest.mark.parametrize("masked", [False, True])
def test_a_row_of_nan_has_the_log_sum_exp_nan(implementation, masked):
    q, k, v = qkv()
    q[0, 2, 1] = np.nan
    arguments = {"query": q, "key": k, "value": v, "is_causal": masked}
    out, lse, _ = evaluate(implementation, arguments, *cotangents(arguments))
    rows = np.zeros(lse.shape, bool)
    rows[0, 2, 1] = True
    np.testing.assert_array_equal(np.isnan(lse), rows)
    np.testing.assert_array_equal(np.isnan(out).all(-1), rows)


# --- scores near the ends of float32


@pytest.mark.parametrize("sink", [2.4e38, 3.4e38, -3.4e38])
def test_a_sink_may_be_any_number(implementation, sink):
    q, k, v = qkv()
    arguments = {"query": q, "key": k, "value": v, "sinks": np.float32([sink, 1.0, -sink, 0.0])}
    out, lse, gradients = evaluate(implementation, arguments, *cotangents(arguments))
    answer = oracle.attention(**arguments)
    assert_close(out, answer.out, "float32", terms=17)
    assert_allclose(lse, answer.lse, rtol=1e-6)
    assert all(np.isfinite(x).all() for x in gradients.values())


@pytest.mark.parametrize("bias", [3.4e38, -3.4e38, float(np.finfo(np.float32).min)])
def test_a_bias_may_be_any_number(implementation, bias):
    """Over a whole row, it absorbs the scores: the softmax is uniform and the log-sum-exp the bias itself."""
    q, k, v = qkv()
    rows = np.zeros((7, 9), np.float32)
    rows[2] = bias
    arguments = {"query": q, "key": k, "value": v, "bias": rows}
    out, lse, gradients = evaluate(implementation, arguments, *cotangents(arguments))
    np.testing.assert_array_equal(lse[:, 2], np.float32(bias))
    assert_allclose(out[:, 2], np.repeat(v.mean(1), 2, 1), atol=1e-6)
    assert all(np.isfinite(x).all() for x in gradients.values())


@pytest.mark.parametrize("everywhere", [True, False])
def test_gradients_of_rows_whose_scores_are_all_huge_are_right(implementation, everywhere):
    """A finite mask over all of a row leaves it uniform, in both passes: as if its scores were nothing."""
    q, k, v = qkv(T=5, S=70)
    hidden = np.ones(5, bool) if everywhere else np.arange(5) % 2 == 0
    bias = np.where(hidden[:, None], np.float32(-1e9), arrays((5, 70), seed=2)[0])
    arguments = {"query": q, "key": k, "value": v, "bias": bias}
    small = np.where(hidden[:, None, None], np.float32(2.0**-60), 1) * q
    same = {**arguments, "query": small, "bias": np.where(hidden[:, None], 0, bias)}
    d_out, d_lse = cotangents(arguments)
    answer = oracle.attention(**same, d_out=d_out, d_lse=d_lse)
    _, _, gradients = evaluate(implementation, arguments, d_out, d_lse)
    for name in ("query", "value", "bias"):
        assert_close(gradients[name], answer.gradients[name], "float32", terms=80, gradient=True, what=name)


@pytest.mark.parametrize("slope", [1.0, 8.0])
def test_alibi_far_away_is_never_nan(implementation, slope):
    """Scores beyond 1e9, whose units in the last place are large powers of e, with XLA's optimisations off as on."""
    q, k, v = qkv(S=40)
    arguments = {"query": q, "key": k, "value": v, "alibi_slopes": np.float32([slope, 0.5, 3, 0.7]) * 1.1}
    arguments["query_offset"] = np.array([1 << 30, 2_000_000_011], np.int32)
    for jit in (quick_jit, jax.jit):
        out, lse, gradients = evaluate(implementation, arguments, *cotangents(arguments), jit=jit)
        for x in (out, lse, *gradients.values()):
            assert np.isfinite(x).all()
        assert np.abs(out).max() <= np.abs(v).max() * (1 + 1e-6)


# --- dropout


def _dropped(implementation, seed, rate=0.3, **shape):
    """Which probabilities are zero: with V = S and one-hot values the output holds the probabilities."""
    q, k, _ = qkv(**shape)
    s = k.shape[1]
    v = np.broadcast_to(np.eye(s, dtype=k.dtype)[None, :, None], (*k.shape[:3], s))
    return (
        np.asarray(quick_jit(lambda *x: implementation.attend(*x, dropout_rate=rate, dropout_seed=seed))(q, k, v)) == 0
    )


@pytest.mark.parametrize(
    "shape", [{"T": 7, "S": 9}, {"T": 33, "S": 70}, {"T": 3, "S": 5, "dtype": "bfloat16"}], ids=str
)
def test_dropout_drops_exactly_the_documented_scores(implementation, shape):
    seed = np.array([7, 11], np.uint32)
    got = _dropped(implementation, seed, **shape)
    b, t, n, s = got.shape
    for i in np.ndindex(b, t, n):
        np.testing.assert_array_equal(got[i], ~oracle.kept(0.3, (7, 11), i[0], i[2], i[1], s))


def test_forms_of_one_seed_drop_the_same_scores(implementation):
    wanted = _dropped(implementation, 7 + (11 << 32))
    for seed in (np.array([7, 11], np.uint32), jnp.array([7, 11], jnp.uint32), jax.random.wrap_key_data(
        jnp.array([7, 11], jnp.uint32), impl="threefry2x32")):  # fmt: skip
        np.testing.assert_array_equal(_dropped(implementation, seed), wanted)
    np.testing.assert_array_equal(_dropped(implementation, 5), _dropped(implementation, jnp.int32(5)))
    assert (_dropped(implementation, 8) != wanted).mean() > 0.2


@pytest.mark.parametrize("rate", [0.0, 1e-9])
def test_a_rate_of_nothing_drops_nothing(implementation, rate):
    assert not _dropped(implementation, 1, rate=rate).any()


# --- the log-sum-exp


def test_the_log_sum_exp_alone_has_gradients(implementation):
    arguments = BY_NAME["gpt_oss"].arguments()
    d_out, d_lse = cotangents(arguments)
    assert_matches_oracle(implementation, arguments, d_out=np.zeros_like(d_out), d_lse=d_lse)


def test_the_residual_is_the_log_sum_exp(implementation):
    q, k, v = qkv()
    out, lse = implementation.attend(q, k, v, return_residual=True)
    wanted, wanted_lse = implementation.flash(q, k, v)
    np.testing.assert_array_equal(out, wanted)
    np.testing.assert_array_equal(lse, wanted_lse)
    assert lse.shape == (2, 7, 4) and lse.dtype == jnp.float32


# --- shapes


@pytest.mark.share(2)
@pytest.mark.parametrize("lead", [(), (2, 3), (1, 2, 1)], ids=str)
def test_leading_axes_may_be_missing_or_more(implementation, lead):
    T, S, N, K, H = 6, 8, 4, 2, 8
    q, k, v, bias = arrays((*lead, T, N, H), (*lead, S, K, H), (*lead, S, K, H), (*lead, N, T, S))
    arguments = {"query": q, "key": k, "value": v, "bias": bias, "is_causal": True, "dropout_rate": 0.2}
    arguments["dropout_seed"] = np.array([1, 2], np.uint32)
    if lead:
        arguments["key_value_seq_lengths"] = np.random.default_rng(0).integers(1, S, lead)
    assert_matches_oracle(implementation, arguments)


@pytest.mark.parametrize("zero", ["B", "T", "S"])
def test_a_length_of_zero_is_a_length(implementation, zero):
    q, k, v = qkv(**{zero: 0})
    arguments = {"query": q, "key": k, "value": v, "sinks": arrays((4,))[0], "bias": arrays((4, 1, 1))[0]}
    out, lse, gradients = evaluate(implementation, arguments, *cotangents(arguments))
    assert out.shape == q.shape and lse.shape == q.shape[:-1]
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)
    for name, gradient in gradients.items():
        assert gradient.shape == arguments[name].shape
        np.testing.assert_array_equal(gradient, 0)


@own
@pytest.mark.parametrize("h,v", [(1, 1), (7, 3), (33, 80), (512, 512), (1, 512)])
def test_any_head_size_from_1_to_512(implementation, h, v):
    check_case(implementation, Case(f"heads_{h}_{v}", B=1, T=5, S=6, N=2, K=1, H=h, V=v, is_causal=True))


@own
@pytest.mark.parametrize("t,s", [(1, 1), (1, 37), (37, 1), (2, 3), (61, 67), (130, 131)])
def test_any_lengths(implementation, t, s):
    check_case(implementation, Case(f"lengths_{t}_{s}", B=1, T=t, S=s, N=2, K=2, H=8))


@own
def test_long_rows_keep_their_precision(implementation):
    check_case(implementation, Case("long_row", B=1, T=3, S=5003, N=2, K=1, H=8, key_value_seq_lengths=(4999,)))


LONG = Case("long", B=1, T=700, S=1100, N=1, K=1, H=8)
LONG_FEATURES = {
    "dense": {},
    "query_lengths": {"query_seq_lengths": (400,)},
    "key_lengths": {"key_value_seq_lengths": (513,)},
    "causal": {"is_causal": True, "query_offset": 400},
    "window": {"local_window_size": (150, 20), "query_offset": (300,)},
    "documents": {"documents": 5},
    "blocks": {"block_mask": (128, 256), "N": 2, "K": 1},
    "bias": {"bias": "TS", "mask": "S"},
    "dropout": {"dropout_rate": 0.1},
}


@pytest.mark.slow
@pytest.mark.share(2)
@own
@pytest.mark.parametrize("name", LONG_FEATURES)
def test_lengths_of_more_than_one_tile(implementation, name):
    check_case(implementation, dataclasses.replace(LONG, name=f"long_{name}", **LONG_FEATURES[name]))


@own
@pytest.mark.parametrize("g", [1, 3, 8])
def test_query_head_n_uses_key_head_n_over_group(implementation, g):
    check_case(implementation, Case(f"group_{g}", B=3, T=9, S=7, N=2 * g, K=2, H=8, key_value_seq_lengths=(7, 2, 5)))


def test_strided_and_transposed_inputs(implementation):
    base_q, base_k, base_v = arrays((4, 8, 2, 14), (4, 8, 2, 9), (9, 2, 2, 8))
    q, k, v = base_q.transpose(2, 3, 0, 1)[:, ::2], base_k.transpose(2, 3, 0, 1)[:, ::-1, ::2], base_v.swapaxes(0, 1)
    k, v = k[:, :, :2], v[:, :, :2]
    assert not (q.flags.c_contiguous or k.flags.c_contiguous or v.flags.c_contiguous)
    contiguous = [np.ascontiguousarray(x) for x in (q, k, v)]
    assert_matches_oracle(implementation, {"query": q, "key": k, "value": v})
    inside = jax.jit(lambda q, k, v: implementation.attend(
        q.transpose(2, 3, 0, 1)[:, ::2], k.transpose(2, 3, 0, 1)[:, ::-1, ::2], v.swapaxes(0, 1)
    ))(base_q, base_k, base_v)  # fmt: skip
    wanted = oracle.attention(*contiguous)
    assert_close(inside, wanted.out, "float32", terms=17, largest_score=wanted.largest_score)


# --- scale, offset, window


def test_scale_defaults_to_one_over_root_h_and_may_be_traced(implementation):
    q, k, v = qkv(H=8)
    wanted = oracle.attention(q, k, v)
    close = lambda got: assert_close(got, wanted.out, "float32", terms=17, largest_score=wanted.largest_score)
    close(implementation.attend(q, k, v))
    close(implementation.attend(q, k, v, scale=8**-0.5))
    close(implementation.attend(q, k, v, scale=np.float32(8**-0.5)))
    close(jax.jit(lambda scale: implementation.attend(q, k, v, scale=scale))(8**-0.5))


@pytest.mark.share(2)
@pytest.mark.parametrize("offset", [0, 2, -2, 9, 100, -100, 2**30 - 8, -(2**30 - 8)])
def test_a_static_offset_and_an_array_of_it_agree(implementation, offset):
    q, k, v = qkv()
    keywords = {"is_causal": True, "local_window_size": (3, None)}
    wanted = oracle.attention(q, k, v, query_offset=offset, **keywords).out
    traced = quick_jit(lambda x: implementation.attend(q, k, v, query_offset=x, **keywords))
    for form in (offset, np.int64(offset), jnp.int32(offset), np.full(2, offset, np.int32)):
        got = quick_jit(lambda *x, form=form: implementation.attend(*x, query_offset=form, **keywords))(q, k, v)
        assert_close(got, wanted, "float32", terms=17, largest_score=4)
    assert_close(traced(np.full(2, offset, np.int32)), wanted, "float32", terms=17, largest_score=4)


@pytest.mark.parametrize("t,s", [(5, 9), (9, 5)])
def test_an_offset_of_s_minus_t_aligns_bottom_right(implementation, t, s):
    q, k, v = qkv(T=t, S=s)
    out, lse = implementation.flash(q, k, v, is_causal=True, query_offset=s - t)
    by_mask = oracle.attention(q, k, v, mask=np.tri(t, s, s - t, dtype=bool))
    assert_close(out, by_mask.out, "float32", terms=17, largest_score=by_mask.largest_score)
    assert_close(lse, by_mask.lse, "float32", terms=17, largest_score=by_mask.largest_score)


WINDOWS = [3, 0, (2, None), (None, 1), (None, None), (0, 3), (100, 0), (2**31, 2**40), (1, 2**31)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_a_window_is_inclusive_and_one_sided_with_none(implementation, window, causal):
    q, k, v = qkv(T=12, S=10)
    wanted = oracle.attention(q, k, v, local_window_size=window, is_causal=causal)
    run = quick_jit(lambda *x: implementation.attend(*x, local_window_size=window, is_causal=causal))
    got = run(q, k, v)
    assert_close(got, wanted.out, "float32", terms=18, largest_score=wanted.largest_score)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "uint32", "int64", "uint64"])
def test_lengths_offsets_segments_and_ranges_may_have_any_integer_dtype(implementation, dtype):
    s = 300  # more than 8 bits hold
    q, k, v = qkv(S=s)
    rng = np.random.default_rng(0)
    arguments = {"query": q, "key": k, "value": v, "is_causal": True}
    arguments["query_offset"] = np.array([100, 120], dtype)
    arguments["query_seq_lengths"], arguments["key_value_seq_lengths"] = (
        np.array([7, 4], dtype),
        np.array([93, 127], dtype),
    )
    arguments["query_segment_ids"], arguments["key_value_segment_ids"] = np.ones((2, 7), dtype), np.ones((1, s), dtype)
    arguments["key_value_ranges"] = rng.integers([0, 60], [50, 128], (2, 7, 2)).astype(dtype)
    assert_matches_oracle(implementation, arguments)


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "uint64"])
def test_lengths_and_ranges_as_far_as_their_dtype_goes_are_all_there_is(implementation, dtype):
    q, k, v = qkv()
    limits = np.iinfo(dtype)
    wanted = oracle.attention(q, k, v).out
    ranges = np.broadcast_to(np.array([limits.min, limits.max], dtype), (2, 7, 2))
    assert_close(implementation.attend(q, k, v, key_value_ranges=ranges), wanted, "float32", terms=17, largest_score=4)
    with types_of("float64" if limits.bits == 64 else "float32"):  # traced values, which are not refused
        run = quick_jit(lambda x: implementation.attend(q, k, v, key_value_seq_lengths=x))
        assert_close(run(np.full(2, limits.max, dtype)), wanted, "float32", terms=17, largest_score=4)


@pytest.mark.parametrize("shape", [(4,), (1, 4), (2, 4)], ids=str)
def test_slopes_and_sinks_may_differ_by_batch_row(implementation, shape):
    q, k, v = qkv()
    slopes, sinks = arrays(shape, shape)
    assert_matches_oracle(
        implementation, {"query": q, "key": k, "value": v, "alibi_slopes": np.abs(slopes), "sinks": sinks}
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_large_scores_neither_overflow_nor_lose_the_largest(implementation, dtype):
    with types_of(dtype):
        q, k, v = qkv(dtype=dtype)
        q, k = (q * 100).astype(dtype), (k * 100).astype(dtype)
        out, lse = implementation.flash(q, k, v)
        wanted = oracle.attention(q, k, v)
        assert_close(lse, wanted.lse, "float32", terms=17, largest_score=0)
        near = np.asarray(out, np.float64) - wanted.out
        # a score of size x is known to x ulps, so that a probability is
        assert np.abs(near).max() <= np.abs(wanted.out).max() * wanted.largest_score * 2**-22 + 2**-7 * (
            dtype != "float32"
        )


def test_a_uniform_shift_of_the_bias_changes_nothing_but_the_log_sum_exp(implementation):
    q, k, v = qkv()
    out, lse = implementation.flash(q, k, v)
    for shift in (-1e4, 1e4):
        moved, moved_lse = implementation.flash(q, k, v, bias=np.full((1,), shift, np.float32))
        assert_close(moved, out, "float32", terms=17, largest_score=1e4)
        assert_close(moved_lse - shift, lse, "float32", terms=17, largest_score=1e4)


# --- implementations by name


@pytest.mark.parametrize("name", [x.name for x in IMPLEMENTATIONS if not x.available])
def test_a_named_implementation_that_cannot_run_refuses_by_name(name):
    q, k, v = qkv()
    for call in (jax_mfa.dot_product_attention, jax_mfa.flash_attention, jax_mfa.explain):
        with pytest.raises(NotImplementedError, match=name):
            call(q, k, v, implementation=name)


def test_explain_names_what_a_call_takes_and_computes_nothing():
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in qkv(T=10**6, S=10**6)]
    chosen = jax_mfa.explain(*shapes, is_causal=True)
    assert chosen.implementation in chosen.reasons and chosen.implementation in str(chosen)
    assert set(chosen.reasons) == {"metal", "blockwise", "reference"}
    assert jax_mfa.explain(*shapes, implementation="reference").implementation == "reference"
    with pytest.raises(ValueError, match="key"):
        jax_mfa.explain(shapes[0], jax.ShapeDtypeStruct((2, 3, 5, 8), jnp.float32), shapes[2])


def test_none_takes_what_explain_says():
    q, k, v = qkv()
    name = jax_mfa.explain(q, k, v).implementation
    np.testing.assert_array_equal(
        jax_mfa.dot_product_attention(q, k, v), jax_mfa.dot_product_attention(q, k, v, implementation=name)
    )


# --- mistakes that other implementations made: right here, and the wrong variant would be noticed


def _mistakes():
    q, k, v = qkv(B=2, T=6, S=8, N=4, K=2, seed=4)
    (bias,) = arrays((4, 6, 8), seed=5)
    base = {"query": q, "key": k, "value": v}
    slopes = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
    swapped = {**base, "key": k[:, :, [0, 1, 0, 1]], "value": v[:, :, [0, 1, 0, 1]]}
    lengths = {"key_value_seq_lengths": np.array([2, 7])}
    packed = lambda q_ids, k_ids: {"query_segment_ids": q_ids, "key_value_segment_ids": k_ids}
    ids = np.array([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]]), np.array([[0] * 4 + [1] * 4, [0] * 2 + [1] * 6])
    first = lambda x: np.broadcast_to(x[:1], x.shape)
    return {
        "bias_added_before_the_scale": ({**base, "bias": bias}, {**base, "bias": bias / np.sqrt(8).astype("float32")}),
        "causal_ignores_the_offset": ({**base, "is_causal": True, "query_offset": 2}, {**base, "is_causal": True}),
        "causal_aligned_bottom_right": (
            {**base, "is_causal": True},
            {**base, "is_causal": True, "query_offset": 2},
        ),
        "alibi_with_the_wrong_sign": ({**base, "alibi_slopes": slopes}, {**base, "alibi_slopes": -slopes}),
        "alibi_ignores_the_offset": (
            # a shift of all distances changes only the log-sum-exp, unless a sink stands beside them
            {**base, "alibi_slopes": slopes, "query_offset": 3, "sinks": slopes},
            {**base, "alibi_slopes": slopes, "sinks": slopes},
        ),
        "head_modulo_key_heads": (base, swapped),
        "batch_index_ignored_in_lengths": (
            {**base, **lengths},
            {**base, "key_value_seq_lengths": np.array([2, 2])},
        ),
        "batch_index_ignored_in_keys": (base, {**base, "key": first(k), "value": first(v)}),
        "batch_index_ignored_in_segments": ({**base, **packed(*ids)}, {**base, **packed(first(ids[0]), first(ids[1]))}),
        "positions_in_16_bits": (
            {**base, "is_causal": True, "query_offset": 2 - 2**16},
            {**base, "is_causal": True, "query_offset": 2},
        ),
        "window_in_16_bits": (
            {**base, "local_window_size": (2**16 + 1, 0)},
            {**base, "local_window_size": (1, 0)},
        ),
        "soft_cap_before_the_bias": (
            {**base, "bias": 4 * bias, "logits_soft_cap": 1.0},
            {**base, "bias": bias, "logits_soft_cap": 1.0},
        ),
        "sink_counted_as_a_value": (
            {**base, "sinks": slopes},
            base,
        ),
    }


MISTAKES = _mistakes()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_known_mistake_is_not_made(implementation, mistake):
    right, wrong = MISTAKES[mistake]
    answer, other = oracle.attention(**right), oracle.attention(**wrong)
    out, lse = implementation.flash(**right)
    assert_close(out, answer.out, "float32", terms=16, largest_score=answer.largest_score)
    assert_close(lse, answer.lse, "float32", terms=16, largest_score=answer.largest_score)
    with pytest.raises(AssertionError):
        assert_close(out, other.out, "float32", terms=16, largest_score=answer.largest_score)


def test_a_fully_masked_row_is_not_the_mean_of_the_values_nor_nan(implementation):
    q, k, v = qkv()
    out = np.asarray(implementation.attend(q, k, v, mask=np.zeros((1, 1, 1, 1), bool)))
    np.testing.assert_array_equal(out, 0)
    mean = v.mean(1, keepdims=True).repeat(2, axis=2)
    assert np.abs(mean).max() > 0.1


def test_rows_before_the_end_of_a_causal_range_are_normalised(implementation):
    # keys far longer than queries: the tiles beyond the diagonal go, the division by the sum stays
    q, k, _ = qkv(T=4, S=40)
    ones = np.ones((*k.shape[:3], 8), np.float32)
    causal = quick_jit(lambda *x: implementation.attend(*x, is_causal=True))
    assert_allclose(causal(q, k, ones), 1, rtol=2**-20)
    assert_allclose(implementation.attend(q, k, ones, key_value_seq_lengths=np.array([1, 40])), 1, rtol=2**-20)


# --- numbers at the ends of their ranges

FAR = 2**30 - 1000
WIDE = {
    "right, almost without limit": {"local_window_size": (None, 2**31 - 4)},
    "left from afar": {"local_window_size": (2 * FAR, None), "query_offset": FAR},
    "left from before": {"local_window_size": (2 * FAR, None), "query_offset": -5},
    "right from afar": {"local_window_size": (None, 2 * FAR), "query_offset": FAR},
    "right from before": {"local_window_size": (3, FAR + 4), "query_offset": -FAR},
    "both": {"local_window_size": (2 * FAR, 2 * FAR), "query_offset": 200_000_000},
    "none reached": {"local_window_size": (FAR - 100, None), "query_offset": FAR},
}


@pytest.mark.share(2)
@pytest.mark.parametrize("each", [False, True], ids=["one offset", "offsets"])
@pytest.mark.parametrize("name", WIDE)
def test_positions_and_windows_may_be_huge_together(implementation, name, each):
    q, k, v = qkv(T=40, S=36, N=2, K=2)
    arguments = {"query": q, "key": k, "value": v, **WIDE[name]}
    if each:
        arguments["query_offset"] = np.array([arguments.get("query_offset", 0), 0], np.int32)
    assert_matches_oracle(implementation, arguments)


@pytest.mark.parametrize("lowest", [-1e30, -2.5e38, float(np.finfo(np.float32).min)])
def test_a_huge_negative_bias_everywhere_hides_nothing(implementation, lowest):
    """Rows that are masked by a finite number see all columns alike, as they do in `jax.nn`."""
    q, k, v = qkv()
    (bias,) = arrays((2, 1, 7, 9))
    bias[0, :, 3:] = lowest
    bias[1, :, :, 5:] = lowest
    d_out, _ = cotangents({"query": q, "value": v})
    d_out[0, 3:] = 0
    run = lambda *x: jax.vjp(lambda *x: implementation.flash(*x), *x)
    (out, lse), pullback = quick_jit(run)(q, k, v, bias)
    wanted = oracle.attention(q, k, v, bias, d_out=d_out, d_lse=np.zeros(lse.shape, np.float32))
    assert_close(out, wanted.out, "float32", terms=17, largest_score=20)
    assert np.isfinite(lse).all()
    got = pullback((jnp.asarray(d_out), jnp.zeros_like(lse)))
    for x, name in zip(got, ("query", "key", "value", "bias")):
        assert_close(x, wanted.gradients[name], "float32", terms=17, largest_score=20, gradient=True, what=name)
