"""Random problems against the oracle: shapes, dtypes and features drawn together. The long sweep is marked `sweep`."""

import functools

import numpy as np
import pytest
from attention_cases import Case
from harness import assert_close, check_case, qkv, quick_jit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

maybe = lambda strategy: st.none() | strategy
axes = st.lists(st.sampled_from("BNTS"), unique=True).map(lambda xs: "".join(sorted(xs)))


@st.composite
def cases(draw, longest):
    """A `Case`; small numbers come first when an example shrinks."""
    b, t, s = draw(st.integers(1, 3)), draw(st.integers(1, longest)), draw(st.integers(1, longest))
    k, g = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    each = lambda low, high: st.tuples(*[st.integers(low, high)] * b)
    side = maybe(st.integers(0, longest))
    return Case(
        "drawn",
        B=b,
        T=t,
        S=s,
        N=k * g,
        K=k,
        H=draw(st.integers(1, 20)),
        V=draw(maybe(st.integers(1, 20))),
        bias=draw(maybe(axes)),
        mask=draw(maybe(axes)),
        traced_scale=draw(st.booleans()),
        is_causal=draw(st.booleans()),
        local_window_size=draw(maybe(st.tuples(side, side))),
        query_offset=draw(st.integers(-longest, longest) | each(-longest, longest)),
        query_seq_lengths=draw(maybe(each(0, t))),
        key_value_seq_lengths=draw(maybe(each(0, s))),
        logits_soft_cap=draw(maybe(st.floats(0.5, 50))),
        alibi_slopes=draw(st.booleans()),
        sinks=draw(st.booleans()),
        documents=draw(st.integers(0, 3)),
        block_mask=draw(maybe(st.tuples(st.integers(1, longest), st.integers(1, longest)))),
        dropout_rate=draw(st.sampled_from([0.0, 0.0, 0.1, 0.5])),
    )


quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
common = {"derandomize": True, "deadline": None, "database": None, "suppress_health_check": quiet}


@settings(max_examples=5, **common)
@given(case=cases(12), dtype=st.sampled_from(["float32", "float32", "bfloat16", "float16"]))
def test_any_problem_is_answered_as_the_oracle_does(implementation, case, dtype):
    check_case(implementation, case, dtype, cancelled=True)


@pytest.mark.sweep
@settings(max_examples=300, **common)
@given(
    case=cases(40),
    dtype=st.sampled_from(["float32", "bfloat16", "float16", "float64"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_problem_is_answered_as_the_oracle_does_sweep(implementation, case, dtype, seed):
    check_case(implementation, case, dtype, seed, cancelled=True)


@settings(max_examples=6, **common)
@given(order=st.permutations(range(9)), seed=st.integers(0, 2**16))
def test_the_order_of_keys_does_not_matter(implementation, order, seed):
    q, k, v = qkv(seed=seed)
    order = np.array(order)
    out = implementation.attend(q, k[:, order], v[:, order])
    wanted = np.asarray(implementation.attend(q, k, v), np.float64)
    assert_close(out, wanted, "float32", terms=17, largest_score=8)


@settings(max_examples=6, **common)
@given(seed=st.integers(0, 2**16), split=st.integers(1, 8))
def test_two_halves_merge_by_their_log_sum_exp(implementation, seed, split):
    q, k, v = qkv(seed=seed)
    whole, whole_lse = (np.asarray(x, np.float64) for x in implementation.flash(q, k, v))
    parts = [implementation.flash(q, k[:, part], v[:, part]) for part in (slice(0, split), slice(split, 9))]
    outs, lses = (np.stack([np.asarray(p[i], np.float64) for p in parts]) for i in (0, 1))
    lse = np.logaddexp(*lses)
    merged = (outs * np.exp(lses - lse)[..., None]).sum(0)
    assert_close(merged, whole, "float32", terms=17, largest_score=8)
    assert_close(lse, whole_lse, "float32", terms=17, largest_score=8)


@settings(max_examples=6, **common)
@given(seed=st.integers(0, 2**16), split=st.integers(1, 6))
def test_rows_are_independent_of_each_other(implementation, seed, split):
    q, k, v = qkv(seed=seed)
    attend = quick_jit(functools.partial(implementation.attend, is_causal=True))
    whole = np.asarray(attend(q, k, v), np.float64)
    head = attend(q[:, :split], k, v)
    tail = attend(q[:, split:], k, v, query_offset=split)
    assert_close(np.concatenate([head, tail], 1), whole, "float32", terms=17, largest_score=8)
