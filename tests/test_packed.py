"""Packed sequences of any lengths: each as if it were alone."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from harness import DIFFERENTIABLE, assert_close, cotangents, own, qkv, quick_jit

import jax_mfa

LENGTHS = np.array([3, 0, 5, 1, 4])
KEY_LENGTHS = np.array([2, 4, 7, 0, 9])
bounds = lambda lengths, first=0: np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32) + np.int32(first)

CALLS = {
    "dense": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (2, 1)},
    "left only": {"local_window_size": (1, None)},
    "causal window": {"is_causal": True, "local_window_size": 3},
    "bottom right": {"is_causal": True, "query_offset": (KEY_LENGTHS - LENGTHS).astype(np.int32)},
    "one offset": {"is_causal": True, "local_window_size": (1, 1), "query_offset": -1},
    "soft cap, sinks, scale": {"logits_soft_cap": 2.0, "sinks": np.array([0.5, -1, 2, 0], np.float32), "scale": 0.4},
}


def packed(slack=0, same=False):
    """A pack of random arrays, with `slack` rows and columns on either side of the sequences."""
    q, k, v = qkv(B=1, T=LENGTHS.sum() + 2 * slack, S=(LENGTHS if same else KEY_LENGTHS).sum() + 2 * slack, H=8, V=6)
    return {"query": q[0], "key": k[0], "value": v[0]}


def one_by_one(inputs, lengths, key_lengths, slack, d_out, d_lse, query_offset=0, **keywords):
    """Output, log-sum-exp and gradients by the oracle, sequence after sequence; zeros where there is none."""
    out = np.zeros((*inputs["query"].shape[:2], inputs["value"].shape[-1]))
    lse = np.full(inputs["query"].shape[:2], -np.inf)
    gradients = {name: np.zeros(np.shape(x)) for name, x in {**inputs, **keywords}.items() if name in DIFFERENTIABLE}
    rows, columns = bounds(lengths, slack), bounds(key_lengths, slack)
    offsets = np.broadcast_to(query_offset, len(lengths))
    for r, (length, key_length) in enumerate(zip(lengths, key_lengths)):
        if length == 0 or key_length == 0:
            continue
        t, s = slice(rows[r], rows[r + 1]), slice(columns[r], columns[r + 1])
        own = {"query": inputs["query"][t], "key": inputs["key"][s], "value": inputs["value"][s]}
        cotangents = {"d_out": d_out[t], "d_lse": d_lse[t]}
        answer = oracle.attention(**own, query_offset=offsets[r], **keywords, **cotangents)
        out[t], lse[t] = answer.out, answer.lse
        for name, gradient in answer.gradients.items():
            at = t if name == "query" else s if name in ("key", "value") else ...
            gradients[name][at] += gradient
    return out, lse, gradients


@pytest.mark.share(2)
@pytest.mark.parametrize("name", CALLS)
def test_each_sequence_is_as_if_it_were_alone(implementation, name):
    slack, keywords = 2, CALLS[name]
    inputs = packed(slack)
    d_out, d_lse = cotangents(inputs)
    out, lse, wanted = one_by_one(inputs, LENGTHS, KEY_LENGTHS, slack, d_out, d_lse, **keywords)

    static = {x: y for x, y in keywords.items() if x not in DIFFERENTIABLE}
    moving = {**inputs, **{x: jnp.asarray(y) for x, y in keywords.items() if x in DIFFERENTIABLE}}

    @quick_jit
    def run(moving, rows, columns):
        attend = lambda moving: jax_mfa.flash_attention_varlen(
            **moving, **static, cu_seqlens_q=rows, cu_seqlens_k=columns, implementation=implementation.name
        )
        results, pullback = jax.vjp(attend, moving)
        return *results, pullback((jnp.asarray(d_out), jnp.asarray(d_lse)))[0]

    got, got_lse, gradients = run(moving, bounds(LENGTHS, slack), bounds(KEY_LENGTHS, slack))
    assert_close(got, out, "float32", terms=32, largest_score=4)
    assert_close(got_lse, lse, "float32", terms=32, largest_score=4)
    for which, gradient in gradients.items():
        assert_close(gradient, wanted[which], "float32", terms=64, largest_score=4, gradient=True, what=which)


@pytest.mark.parametrize("alibi", [False, True])
def test_self_attention_needs_one_row_of_bounds(implementation, alibi):
    inputs = packed(same=True)
    slopes = {"alibi_slopes": np.array([0.5, 0.25, 0.125, 0.0625], np.float32)} if alibi else {}
    zeros = np.zeros((*inputs["query"].shape[:2], 6)), np.zeros(inputs["query"].shape[:2])
    out, lse, _ = one_by_one(inputs, LENGTHS, LENGTHS, 0, *zeros, is_causal=True, **slopes)
    for given in ((bounds(LENGTHS),), (bounds(LENGTHS).tolist(), None), (x := bounds(LENGTHS), x)):
        got, got_lse = jax_mfa.flash_attention_varlen(
            *inputs.values(), *given, is_causal=True, implementation=implementation.name, **slopes
        )
        assert_close(got, out, "float32", terms=32, largest_score=4)
        assert_close(got_lse, lse, "float32", terms=32, largest_score=4)


def test_distances_that_would_be_those_of_the_pack_are_refused():
    inputs, slopes = packed(same=True), np.ones(4, np.float32)
    for change in ({"cu_seqlens_k": bounds(LENGTHS)}, {"query_offset": 1}, {"query_offset": np.zeros(5, np.int32)}):
        with pytest.raises(ValueError, match="alibi_slopes must be None where cu_seqlens_k or query_offset is given"):
            jax_mfa.flash_attention_varlen(**inputs, cu_seqlens_q=bounds(LENGTHS), alibi_slopes=slopes, **change)


@own
@pytest.mark.parametrize("offset", [2**30 - 40, -(2**30 - 40)])
@pytest.mark.parametrize("window", [2**31 - 3, 2**30 - 40, 0, None])
def test_positions_far_away_do_not_overflow(implementation, offset, window):
    inputs = packed()
    run = lambda name: jax_mfa.flash_attention_varlen(
        **inputs,
        cu_seqlens_q=bounds(LENGTHS),
        cu_seqlens_k=bounds(KEY_LENGTHS),
        query_offset=offset,
        local_window_size=window,
        implementation=name,
    )
    _, lse = run(implementation.name)
    position = (np.arange(5) + offset)[:, None]
    near = np.arange(7)[None, :]
    sees = np.ones((5, 7), bool) if window is None else abs(near - position) <= window
    np.testing.assert_array_equal(np.asarray(lse)[3:8, 0] != -np.inf, sees.any(1))


def test_traced_bounds_are_clipped_to_what_is_there(implementation):
    inputs = packed()
    run = jax.jit(lambda *cu: jax_mfa.flash_attention_varlen(*inputs.values(), *cu, implementation=implementation.name))
    wanted = run(np.array([0, 13], np.int32), np.array([0, 22], np.int32))
    got = run(np.array([-5, 1000], np.int32), np.array([-1, 99], np.int32))
    np.testing.assert_array_equal(got[0], wanted[0])
    # no sequence sees another where bounds fall
    _, lse = run(np.array([0, 13], np.int32), np.array([9, 3], np.int32))
    assert (np.asarray(lse) == -np.inf).all()


def test_quantised_arrays_may_be_packed(implementation):
    inputs = packed()
    stored = {name: jax_mfa.quantize(x, "int8") for name, x in inputs.items()}
    run = lambda inputs: jax_mfa.flash_attention_varlen(
        **inputs,
        cu_seqlens_q=bounds(LENGTHS),
        cu_seqlens_k=bounds(KEY_LENGTHS),
        is_causal=True,
        implementation=implementation.name,
    )
    plain = {name: x.dequantize() for name, x in stored.items()}
    for got, wanted in zip(quick_jit(run)(stored), quick_jit(run)(plain)):
        assert_close(got, wanted, "float32", terms=9, largest_score=9)


@pytest.mark.parametrize("zero", ["T", "S", "R"])
def test_nothing_may_be_packed(implementation, zero):
    q, k, v = qkv(B=1, T=0 if zero == "T" else 7, S=0 if zero == "S" else 9)
    none = np.zeros(1 if zero == "R" else 4, np.int32)
    keywords = {"query_offset": np.zeros(none.size - 1, np.int32), "implementation": implementation.name}
    out, lse = jax_mfa.flash_attention_varlen(q[0], k[0], v[0], none, none, **keywords)
    np.testing.assert_array_equal(out, np.zeros(q[0].shape))
    np.testing.assert_array_equal(lse, np.full(q[0].shape[:2], -np.inf))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": None}, TypeError, "query must be an array .* got NoneType"),
        ({"query": np.zeros((1, 3, 4, 8), np.float32)}, ValueError, r"query must have shape \[T, N, H\], got \[1, 3"),
        ({"key": np.zeros((22, 8), np.float32)}, ValueError, r"key must have shape \[S, K, H\], got \[22, 8\]"),
        ({"value": np.zeros((3, 2, 8), np.float32)}, ValueError, "value must have the S, K"),
        ({"cu_seqlens_q": [0.0, 13.0]}, TypeError, r"cu_seqlens_q must be integers \[R \+ 1\], got float64"),
        ({"cu_seqlens_q": [0, 9, 3, 4, 5, 13]}, ValueError, r"cu_seqlens_q must not fall .* got \[0, 9, 3"),
        ({"cu_seqlens_q": [0, 1, 2, 3, 4, 14]}, ValueError, r"cu_seqlens_q must lie in 0\.\.13, got 14"),
        ({"cu_seqlens_k": [0, 22]}, ValueError, r"cu_seqlens_k must have the shape of cu_seqlens_q, \[6\], got \[2\]"),
        ({"cu_seqlens_k": 3}, ValueError, r"cu_seqlens_k must have shape \[R \+ 1\], got \[\]"),
        ({"cu_seqlens_k": None, "key": np.zeros((9, 2, 8), np.float32)}, ValueError, "cu_seqlens_k must lie in 0..9"),
        ({"query_offset": [1, 2]}, ValueError, r"query_offset must have shape \[\] or \[R\] = \[5\], got \[2\]"),
        ({"query_offset": 2**30}, ValueError, "query_offset must lie in"),
        ({"is_causal": 1}, TypeError, "is_causal must be a Python bool"),
        ({"local_window_size": -1}, ValueError, "local_window_size must not be negative"),
    ],
    ids=str,
)
def test_bad_input_is_named(change, error, message):
    good = {**packed(), "cu_seqlens_q": bounds(LENGTHS), "cu_seqlens_k": bounds(KEY_LENGTHS)}
    with pytest.raises(error, match=message):
        jax_mfa.flash_attention_varlen(**{**good, **change})
