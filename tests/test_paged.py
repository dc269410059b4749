"""Attention through pages, against the oracle over the tokens laid out in a row."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from harness import arrays, assert_allclose, assert_close, own, quick_jit, types_of
from test_quantization import stored_numbers

from jax_mfa import Scheme, paged_attention, quantize
from jax_mfa.kv_cache import paged

B, N, K, H, V = 3, 4, 2, 11, 7
FEATURES = {
    "plain": {},
    "window": {"local_window_size": (9, None), "scale": "traced"},
    "everything": {"local_window_size": (20, 0), "logits_soft_cap": 2.0, "alibi_slopes": "N", "sinks": "BN"},
    "not causal": {"is_causal": False, "sinks": "N"},
}
SCHEMES = {
    "plain": (None, None),
    "int8": (Scheme("int8", channels=8), Scheme("int8", True, channels=None)),
    "int4-fp8": (Scheme("int4", tokens=3, channels=4, center=5), Scheme("fp8", True, None, None)),
}


class Problem:
    """Pages, tables and rows of B sequences; lengths that are no multiple of a page, one of nothing."""

    def __init__(self, page=8, lengths=(61, 3, 34), rows=(5, 1, 20), schemes="plain", dtype="float32", seed=0):
        rng = np.random.default_rng(seed)
        self.page, self.lengths, self.rows = page, np.array(lengths, np.int32), np.array(rows, np.int32)
        self.width = -(-max(lengths) // page) + 2
        self.used = -(-self.lengths // page)
        self.count = int(self.used.sum()) + 3
        self.tables = rng.integers(-(10**9), 10**9, (B, self.width)).astype(np.int32)  # whatever lies behind a length
        free = iter(rng.permutation(self.count))
        for row, used in zip(self.tables, self.used):
            row[:used] = [next(free) for _ in range(used)]
        pages = [rng.standard_normal((self.count, page, K, size)).astype(dtype) for size in (H, V)]
        for row, used, length in zip(self.tables, self.used, self.lengths):
            if length % page and schemes == "plain":
                for x in pages:
                    x[row[used - 1], length % page :] = np.nan
        for unused in free:
            pages[0][unused], pages[1][unused] = np.nan, np.inf
        self.key, self.value = (
            x if s is None else quick_jit(functools.partial(quantize, scheme=s))(x)
            for x, s in zip(pages, SCHEMES[schemes])
        )
        self.starts = np.concatenate([[0], np.cumsum(self.rows)]).astype(np.int32)
        self.query = rng.standard_normal((self.starts[-1] + 2, N, H)).astype(dtype)  # and two of nobody
        self.dtype = dtype

    def features(self, name):
        per_head = np.abs(arrays((B, N), seed=5)[0]).astype(self.dtype)
        made = {"N": per_head[0], "BN": per_head, "traced": np.float32(0.4)}
        return {k: made.get(x, x) if isinstance(x, str) else x for k, x in FEATURES[name].items()}

    def wanted(self, features, d_out=None):
        """For each sequence its rows and the oracle's answer."""
        laid_out = [x if isinstance(x, np.ndarray) else stored_numbers(x) for x in (self.key, self.value)]
        for b in range(B):
            at = slice(self.starts[b], self.starts[b + 1])
            tokens = [x[self.tables[b, : max(self.used[b], 1)] % self.count] for x in laid_out]
            own = {n: x[b] if getattr(x, "ndim", 0) == 2 else x for n, x in features.items()}
            own.setdefault("is_causal", True)
            yield (
                at,
                oracle.attention(
                    self.query[None, at],
                    *(np.nan_to_num(x).reshape(1, -1, *x.shape[2:]) for x in tokens),
                    key_value_seq_lengths=self.lengths[b],
                    query_offset=int(self.lengths[b] - self.rows[b]),
                    d_out=None if d_out is None else d_out[None, at],
                    **own,
                ),
            )


def check(implementation, problem, features, jit=quick_jit, **changed):
    """Output, log-sum-exp and the query's gradient of a ragged batch."""
    static = {n: x for n, x in features.items() if not isinstance(x, (np.ndarray, np.float32))}
    moving = {n: x for n, x in features.items() if n not in static}
    static |= {"implementation": implementation.name, "return_residual": True}
    d_out = arrays((*problem.query.shape[:-1], V), seed=2)[0].astype(problem.dtype)

    @jit
    def run(query, key, value, tables, lengths, starts, moving):
        attend = lambda query: paged_attention(
            query, key, value, tables, lengths, query_start_locs=starts, **moving, **static
        )
        (out, lse), pullback = jax.vjp(attend, query)
        return out, lse, pullback((d_out, jnp.zeros_like(lse)))[0]

    p = problem
    out, lse, d_query = run(p.query, p.key, p.value, p.tables, p.lengths, p.starts, moving)
    assert out.dtype == p.dtype and lse.dtype == np.promote_types(p.dtype, np.float32)
    for at, wanted in p.wanted(features, d_out):
        common = {"terms": 90, "largest_score": wanted.largest_score}
        assert_close(out[at], wanted.out[0], p.dtype, what="out", **common)
        assert_close(lse[at], wanted.lse[0], lse.dtype, what="lse", **common)
        assert_close(d_query[at], wanted.gradients["query"][0], p.dtype, what="dquery", gradient=True, **common)
    nobody = slice(p.starts[-1], None)
    assert not np.asarray(out[nobody]).any() and (np.asarray(lse[nobody]) == -np.inf).all()
    assert not np.asarray(d_query[nobody]).any()


PAIRS = [
    ("plain", "everything", 8),
    ("plain", "not causal", 16),
    ("int8", "window", 8),
    ("int8", "everything", 32),
    ("int4-fp8", "everything", 8),
    ("int4-fp8", "plain", 64),
]


@pytest.mark.share(4)
@pytest.mark.parametrize(("schemes", "features", "page"), PAIRS)
def test_ragged_batches_are_right_whatever_lies_behind_a_length(implementation, schemes, features, page):
    if not implementation.own_rules and features != "window":
        pytest.skip("the definition gathers the pages and goes on as with any array")
    problem = Problem(page, schemes=schemes)
    check(implementation, problem, problem.features(features))


@pytest.mark.parametrize("page", [128, 256])
def test_large_pages(page):
    problem = Problem(page, lengths=(700, 0, 129), rows=(1, 1, 1))
    check(_named("blockwise"), problem, problem.features("window"))


def test_tiles_of_several_pages_overlap():
    # 130 pages of 8: no tile of 64 of them divides that
    problem = Problem(8, lengths=(1024, 513, 1030), rows=(3, 1, 2), schemes="int8")
    check(_named("blockwise"), problem, problem.features("everything"))


@pytest.mark.share(4)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_in_other_dtypes(dtype):
    with types_of(dtype):
        problem = Problem(schemes="int4-fp8", dtype=dtype)
        check(_named("blockwise"), problem, problem.features("window"))


def test_rows_of_equal_numbers_and_bits_of_bfloat16(implementation):
    with types_of("bfloat16"):
        p = Problem(rows=(3, 3, 3), lengths=(40, 3, 33), dtype=jnp.bfloat16)
        query = p.query[:9].reshape(B, 3, N, H)
        bits = [x.view(np.uint16) for x in (p.key, p.value)]
        run = quick_jit(functools.partial(paged_attention, implementation=implementation.name))
        out = run(query, *bits, p.tables, p.lengths)
        for (_, wanted), got in zip(p.wanted({}), out):
            assert_close(got, wanted.out[0], p.dtype, terms=60, largest_score=wanted.largest_score)


def test_second_derivatives_by_queries_of_bits_of_bfloat16():
    with types_of("bfloat16"):
        p = Problem(rows=(3, 3, 3), lengths=(40, 3, 33), dtype=jnp.bfloat16)
        query = jnp.asarray(p.query[:9].reshape(B, 3, N, H))
        (t,) = arrays(query.shape, dtype=jnp.bfloat16)

        def product(*pages):
            run = lambda q: (paged_attention(q, *pages, p.tables, p.lengths).astype(jnp.float32) ** 2).sum()
            return quick_jit(lambda q: jax.jvp(jax.grad(run), (q,), (t,))[1])(query)

        numbers, bits = product(p.key, p.value), product(*(x.view(np.uint16) for x in (p.key, p.value)))
        assert np.abs(numbers).max() > 0
        np.testing.assert_array_equal(bits, numbers)


@own
def test_under_vmap_pools_and_tables_may_be_mapped_or_not(implementation):
    a, b = Problem(schemes="int8"), Problem(schemes="int8", seed=1)
    run = quick_jit(functools.partial(paged_attention, implementation=implementation.name))
    both = lambda get: jax.tree.map(lambda *x: np.stack(x), *(get(p) for p in (a, b)))
    queries = np.stack([p.query[: B * 2].reshape(B, 2, N, H) for p in (a, b)])
    alone = [run(q, p.key, p.value, p.tables, p.lengths) for q, p in zip(queries, (a, b))]
    arguments = [both(lambda p, name=name: getattr(p, name)) for name in ("key", "value", "tables", "lengths")]
    mapped = jax.vmap(run)(queries, *arguments)
    assert_allclose(mapped, alone, atol=1e-6)
    shared = jax.vmap(run, in_axes=(0, None, None, None, None))(queries, a.key, a.value, a.tables, a.lengths)
    assert_allclose(shared[0], alone[0], atol=1e-6)
    one_pool = jax.vmap(run, in_axes=(0, None, 0, None, None))
    mixed = one_pool(queries, a.key, arguments[1], a.tables, a.lengths)
    assert_allclose(mixed[0], alone[0], atol=1e-6)


# --- the mistakes of others


def _named(name):
    from harness import BY_NAME_OF_IMPLEMENTATION

    return BY_NAME_OF_IMPLEMENTATION[name]


def test_a_table_strided_by_the_number_of_pages_is_found_out(monkeypatch):
    problem, right = Problem(page=16), paged._read_tables

    def wrong(tables, lengths, count, page):
        at = jnp.arange(tables.shape[0])[:, None] * count + jnp.arange(tables.shape[1])
        return right(jnp.take(tables.reshape(-1), at, mode="clip"), lengths, count, page)

    monkeypatch.setattr(paged, "_read_tables", wrong)
    with pytest.raises(AssertionError, match="out"):
        check(_named("blockwise"), problem, {})


def test_causality_by_the_row_of_a_table_is_found_out(monkeypatch):
    problem, right = Problem(page=16), paged.attend_by_name

    def wrong(arguments, *rest):
        return right({**arguments, "query_offset": jnp.arange(arguments["query"].shape[0])}, *rest)

    monkeypatch.setattr(paged, "attend_by_name", wrong)
    with pytest.raises(AssertionError, match="out"):
        check(_named("blockwise"), problem, {})


# --- tables that are wrong


def test_entries_outside_of_the_pool_are_refused_clamped_or_reported(implementation):
    p = Problem(lengths=(30, 3, 20))
    query, bad, near = p.query[:3].reshape(B, 1, N, H), p.tables.copy(), p.tables.copy()
    bad[0, 2], near[0, 2] = p.count + 5, p.count - 1
    bad[2, 0], near[2, 0] = -7, 0
    run = functools.partial(paged_attention, query, implementation=implementation.name)
    jit = lambda **keywords: quick_jit(functools.partial(run, **keywords))
    message = rf"^block_tables must hold pages 0\.\.{p.count - 1} within context_lens, got {p.count + 5} at \[0, 2\]$"
    with pytest.raises(ValueError, match=message):
        run(p.key, p.value, bad, p.lengths)
    finite = [np.nan_to_num(x, posinf=1) for x in (p.key, p.value)]
    silent, watched = jit(), jit(check_tables=True)
    clamped = silent(*finite, bad, p.lengths)
    np.testing.assert_array_equal(clamped, silent(*finite, near, p.lengths))
    with pytest.warns(
        RuntimeWarning, match=rf"block_tables: 2 entries outside of the pool's {p.count} pages.*\[0, 2\]"
    ):
        jax.block_until_ready(jax.jit(functools.partial(run, check_tables=True))(*finite, bad, p.lengths))
        jax.effects_barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.block_until_ready(watched(*finite, p.tables, p.lengths))
        jax.effects_barrier()


GOOD = Problem()
CALL = {
    "query": GOOD.query[:3].reshape(B, 1, N, H),
    "key_pages": GOOD.key,
    "value_pages": GOOD.value,
    "block_tables": GOOD.tables,
    "context_lens": GOOD.lengths,
}
f32 = lambda *shape: np.ones(shape, np.float32)
BAD = [
    (
        {"query": f32(3, N, H)},
        ValueError,
        "query must have shape [B, T, N, H] without query_start_locs",
    ),
    (
        {"query": f32(B, 1, 3, H)},
        ValueError,
        "the heads of query must be a multiple of those of key_pages",
    ),
    (
        {"key_pages": f32(5, 8, K)},
        ValueError,
        "key_pages must have shape [P, page, K, H], got [5, 8, 2]",
    ),
    ({"key_pages": f32(5, 12, K, H)}, ValueError, "key_pages must have pages of 8, 16, 32, 64, 128, 256 tokens, got"),
    (
        {"key_pages": GOOD.key.astype(np.float16)},
        TypeError,
        "key_pages must have the dtype of query, float32",
    ),
    ({"key_pages": GOOD.value}, ValueError, "key_pages must have the head size of query, H = 11"),
    ({"key_pages": None}, TypeError, "key_pages must be an array"),
    ({"value_pages": f32(5, 8, K, V)}, ValueError, "value_pages must have the shape of key_pages"),
    ({"value_pages": np.ones((5, 8, K, V), np.int32)}, TypeError, "value_pages must be floating"),
    ({"block_tables": GOOD.tables[0]}, ValueError, "block_tables must have shape [B, pages] with B = 3, got"),
    ({"block_tables": GOOD.tables * 1.0}, TypeError, "block_tables must be integers [B, pages], got float64"),
    ({"context_lens": GOOD.lengths[:2]}, ValueError, "context_lens must have shape [B] = [3], got [2]"),
    ({"context_lens": GOOD.lengths + 1000}, ValueError, "context_lens must lie in 0..80, got 1061"),
    ({"sinks": f32(2)}, ValueError, "sinks must have shape [N] = [4] or [B, N], B = 3, got [2]"),
    ({"check_tables": 1}, TypeError, "check_tables must be a Python bool"),
    ({"query_start_locs": [0, 1, 2, 3]}, ValueError, "query must have shape [T, N, H] with query_start_locs, got"),
    ({"query": f32(3, N, H), "query_start_locs": [0, 3]}, ValueError, "query_start_locs must have shape [B + 1] = [4]"),
    ({"query": f32(3, N, H), "query_start_locs": [0, 2, 1, 3]}, ValueError, "query_start_locs must not fall"),
    ({"query": f32(3, N, H), "query_start_locs": [0, 1, 2, 4]}, ValueError, "query_start_locs must lie in 0..3, got 4"),
]


@pytest.mark.parametrize(
    ("changed", "error", "message"), BAD, ids=lambda x: next(iter(x)) if isinstance(x, dict) else ""
)
def test_what_cannot_be_is_named(changed, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        paged_attention(**{**CALL, **changed})


def test_pages_have_no_derivative_and_say_so():
    attend = lambda key: paged_attention(**{**CALL, "key_pages": key}).sum()
    with pytest.raises(NotImplementedError, match="key_pages"):
        jax.grad(attend)(jnp.asarray(GOOD.key))


# --- memory

abstract = jax.ShapeDtypeStruct
integers = lambda *shape: abstract(shape, jnp.int32)


QUARTER = Scheme("int4", True, center=16)


@pytest.mark.share(2)
@pytest.mark.parametrize(
    ("scheme", "rows", "ragged", "implementation"),
    [(None, 1, False, "blockwise"), (QUARTER, 900, True, "blockwise"), (QUARTER, 900, True, "metal")],
)
def test_temporary_memory_is_that_of_tables_not_of_contexts(scheme, rows, ragged, implementation):
    if not _named(implementation).available:
        pytest.skip(f"{implementation} cannot run here")
    page, size, batch = 16, 64, 4

    def temporary(width):
        pages = abstract((batch * width, page, K, size), jnp.bfloat16)
        pages = pages if scheme is None else jax.eval_shape(lambda x: quantize(x, scheme), pages)
        query = abstract((rows, N, size) if ragged else (batch, rows, N, size), jnp.bfloat16)
        run = functools.partial(paged_attention, implementation=implementation)
        of_ragged = lambda *x: run(*x[:-1], query_start_locs=x[-1])
        arguments = query, pages, pages, integers(batch, width), integers(batch), *([integers(batch + 1)] * ragged)
        compiled = quick_jit(of_ragged if ragged else run).lower(*arguments).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small, large = temporary(512), temporary(2048)
    lots = 900 // 256 + batch if ragged else batch
    assert large - small <= 3 * 4 * 2048 * lots  # a few tables
    assert large < batch * 2048 * page * K * size  # less than a byte for each key


def test_a_sequence_is_put_together_nowhere():
    p = Problem(8, lengths=(1024, 513, 1030), rows=(3, 1, 2))
    compiled = jax.jit(functools.partial(paged_attention, implementation="blockwise")).lower(
        CALL["query"], p.key, p.value, p.tables, p.lengths
    )
    shapes = re.findall(r"f32\[([\d,]+)\]", compiled.compile().as_text())
    whole = {"1056", "3168"}  # tokens of a table, and of all
    assert not any(whole & {*shape.split(",")} for shape in shapes)
