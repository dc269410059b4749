"""Wherever a shape holds a zero, results are empty or zeros, and so are gradients, whatever operands come along."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import DIFFERENTIABLE, arrays, assert_allclose, quick_jit

import jax_mfa
from jax_mfa import BlockMask, PagedKVCache, Scheme, quantize

SIZES = {"B": 2, "T": 3, "S": 5, "N": 4, "K": 2, "H": 8, "V": 6}
NOTHING_SEEN = {
    "B": {"B": 0},
    "T": {"T": 0},
    "S": {"S": 0},
    "N": {"N": 0},
    "N and K": {"N": 0, "K": 0},
    "B and S": {"B": 0, "S": 0},
    "T and S": {"T": 0, "S": 0},
    "all": dict.fromkeys(SIZES, 0),
}


def operands(B, T, S, N, K, H, V) -> dict:
    """Random arrays for every argument, each with the full batch."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    integers = lambda high, *shape: rng.integers(0, high + 1, shape).astype(np.int32)
    return {
        "bias": {"bias": normal(B, N, T, S)},
        "mask": {"mask": rng.random((B, N, T, S)) < 0.7},
        "scale": {"scale": np.float32(rng.random())},
        "offset": {"query_offset": integers(3, B), "is_causal": True, "local_window_size": 2},
        "query lengths": {"query_seq_lengths": integers(T, B)},
        "key lengths": {"key_value_seq_lengths": integers(S, B)},
        "segments": {"query_segment_ids": integers(1, B, T), "key_value_segment_ids": integers(1, B, S)},
        "ranges": {"key_value_ranges": integers(S, B, T, 2)},
        "blocks": {"block_mask": BlockMask(rng.random((B, N, -(-T // 2), -(-S // 2))) < 0.7, (2, 2))},
        "slopes": {"alibi_slopes": abs(normal(B, N))},
        "sinks": {"sinks": normal(B, N)},
        "dropout": {"dropout_rate": 0.5, "dropout_seed": 3},
        "cap": {"logits_soft_cap": 2.0},
    }


def problem(B, T, S, N, K, H, V) -> dict:
    query, key, value = arrays((B, T, N, H), (B, S, K, H), (B, S, K, V))
    return {"query": query, "key": key, "value": value}


def results(implementation, arguments):
    """Output, log-sum-exp, and gradients by name."""
    arguments = {**arguments, **{name: jnp.asarray(x) for name, x in arguments.items() if name in DIFFERENTIABLE}}
    moving = {name: x for name, x in arguments.items() if name in DIFFERENTIABLE}
    (out, lse), pullback = jax.vjp(lambda moving: implementation.flash(**{**arguments, **moving}), moving)
    return out, lse, pullback((jnp.ones_like(out), jnp.ones_like(lse)))[0]


@pytest.mark.parametrize("zero", NOTHING_SEEN)
def test_results_and_gradients_are_empty_or_zeros(implementation, zero):
    sizes = SIZES | NOTHING_SEEN[zero]
    base, features = problem(**sizes), operands(**sizes)
    features["everything"] = {name: x for feature in features.values() for name, x in feature.items()}
    calls = {name: {**base, **feature} for name, feature in features.items()}
    found = jax.jit(lambda: {name: results(implementation, arguments) for name, arguments in calls.items()})()
    for name, (out, lse, gradients) in found.items():
        np.testing.assert_array_equal(out, np.zeros([sizes[x] for x in "BTNV"]), err_msg=name)
        np.testing.assert_array_equal(lse, np.full([sizes[x] for x in "BTN"], -np.inf), err_msg=name)
        for which, gradient in gradients.items():
            np.testing.assert_array_equal(gradient, np.zeros_like(calls[name][which]), err_msg=f"{name}: d{which}")


@pytest.mark.share(2)
@pytest.mark.parametrize("letter", "HV")
def test_a_head_of_no_size_adds_nothing_to_scores_or_output(implementation, letter):
    sizes = SIZES | {letter: 0}
    features = operands(**sizes)
    shared = features["scale"] | features["bias"] | features["sinks"] | features["key lengths"]
    arguments = problem(**sizes)
    # the same scores, and as much of the output, as with heads that hold zeros only
    widen = lambda x: np.pad(x, [(0, 0)] * 3 + [(0, 5 if x.shape[-1] == 0 else 0)])
    wide = {name: widen(x) for name, x in arguments.items()}
    run = jax.jit(lambda x: results(implementation, {**x, **shared}))
    (out, lse, gradients), (wanted, wanted_lse, wanted_gradients) = run(arguments), run(wide)
    assert_allclose(out, wanted[..., : sizes["V"]], rtol=1e-6, atol=1e-6)
    assert_allclose(lse, wanted_lse, rtol=1e-6, atol=1e-6)
    for name, gradient in gradients.items():
        wanted = wanted_gradients[name][..., : gradient.shape[-1]] if gradient.ndim else wanted_gradients[name]
        assert_allclose(gradient, wanted, rtol=1e-5, atol=1e-5, err_msg=name)
    assert implementation.attend(**arguments).shape == tuple(sizes[x] for x in "BTNV")


@pytest.mark.parametrize("sizes", [(0,), (0, 3), (3, 0)], ids=str)
@pytest.mark.parametrize("lengths", [{}, {"T": 0}], ids=str)
def test_a_mapped_axis_may_be_empty_also_under_another(implementation, sizes, lengths):
    inside = SIZES | lengths
    base = {name: x[0] for name, x in problem(**inside).items()}
    features = operands(**inside)
    row = lambda name: next(iter(features[name].values()))[0]
    base |= {"bias": row("bias"), "sinks": row("sinks"), "key_value_ranges": row("ranges"), "dropout_seed": np.int32(3)}
    # each axis maps other arguments; what it does not map serves all of its elements
    mapped = [{"query", "bias", "key_value_ranges"}, {"key", "value", "sinks", "dropout_seed"}][: len(sizes)]
    axes = [{name: 0 if name in names else None for name in base} for names in mapped]
    own = lambda name: tuple(size for size, names in zip(sizes, mapped) if name in names)
    whole = {name: np.broadcast_to(x, own(name) + x.shape) for name, x in base.items()}

    def loss(arguments):
        run = lambda arguments: implementation.flash(**arguments, dropout_rate=0.5)
        for axis in reversed(axes):
            run = jax.vmap(run, in_axes=(axis,))
        out, lse = run(arguments)
        return out.sum(), (out, lse)

    def both(moving):
        return jax.value_and_grad(lambda moving: loss({**whole, **moving}), has_aux=True)(moving)

    moving = {name: jnp.asarray(whole[name]) for name in DIFFERENTIABLE if name in whole}
    (_, (out, lse)), gradients = quick_jit(both)(moving)
    T, N, V = (inside[x] for x in "TNV")
    assert out.shape == (*sizes, T, N, V) and lse.shape == (*sizes, T, N)
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(gradient, np.zeros_like(whole[name]), err_msg=name)


@pytest.mark.parametrize("zero", ["B", "T", "S"])
def test_decoding_nothing_or_from_nothing(implementation, zero):
    sizes = SIZES | {zero: 0}
    lengths = np.minimum(np.arange(sizes["B"]), sizes["S"]).astype(np.int32)
    for filled in (lengths, jnp.asarray(lengths), 0):
        out, lse = jax_mfa.decode_attention(
            *problem(**sizes).values(), filled, implementation=implementation.name, return_residual=True
        )
        np.testing.assert_array_equal(out, np.zeros([sizes[x] for x in "BTNV"]))
        np.testing.assert_array_equal(lse, np.full([sizes[x] for x in "BTN"], -np.inf))


@pytest.mark.parametrize("zero", NOTHING_SEEN)
def test_explain_takes_what_is_empty(zero):
    sizes = SIZES | NOTHING_SEEN[zero]
    assert jax_mfa.explain(**problem(**sizes), **operands(**sizes)["bias"]).reasons


# --- quantised arrays, pages and caches

SCHEMES = [
    Scheme(kind, symmetric, *blocks)
    for kind in ("int8", "int4", "fp8")
    for symmetric in (False, True)
    for blocks in ((), (None, None), (2, 3, 2))
]


@pytest.mark.share(4)
@pytest.mark.parametrize("shape", [(4, 0, 16), (0, 4, 2, 16), (2, 0, 3, 5), (3, 0, 0, 2, 1)], ids=str)
def test_nothing_is_quantised_cut_and_dequantised(shape):
    x = jnp.ones(shape)

    def run(x):
        def of(x, scheme):
            whole = quantize(x, scheme, straight_through=True)
            end = shape[-3]
            return whole.dequantize(), whole.tokens(0, 0).dequantize(), whole.tokens(end, end)

        return [(of(x, scheme), jax.grad(lambda x, s=scheme: of(x, s)[0].sum())(x)) for scheme in SCHEMES]

    cut = (*shape[:-3], 0, *shape[-2:])
    for (whole, start, end), gradient in jax.jit(run)(x):
        assert whole.shape == gradient.shape == shape and whole.dtype == x.dtype
        assert start.shape == end.shape == end.dequantize().shape == cut
    assert quantize(x, "int4").dequantize().shape == shape  # eagerly too


PAGED = {"B": 2, "T": 3, "P": 4, "W": 2, "N": 4, "K": 2, "H": 16, "V": 6}
NO_PAGES = {
    **{letter: {letter: 0} for letter in "BTPWNHV"},
    "N and K": {"N": 0, "K": 0},
    "B and T": {"B": 0, "T": 0},
    "P and W": {"P": 0, "W": 0},
    "all": dict.fromkeys(PAGED, 0),
}


@pytest.mark.share(2)
@pytest.mark.parametrize("zero", NO_PAGES)
def test_paged_attention_to_nothing_or_of_nothing(implementation, zero):
    B, T, P, W, N, K, H, V = (PAGED | NO_PAGES[zero]).values()
    tables, lengths = np.zeros((B, W), np.int32), np.full(B, min(W, P, 1), np.int32)
    starts = np.minimum(np.arange(B + 1), T)
    per_head = {"sinks": np.ones(N, np.float32), "alibi_slopes": np.ones((B, N), np.float32)}

    def attend(query, stored, ragged, traced):
        pages = jnp.ones((P, 8, K, H)), jnp.ones((P, 8, K, V))
        if stored:
            pages = quantize(pages[0], "int4"), quantize(pages[1], "int8")
        keywords = {**per_head, "query_start_locs": starts if ragged else None}
        return jax_mfa.paged_attention(
            query, *pages, *traced, return_residual=True, implementation=implementation.name, **keywords
        )

    def run(traced):
        found = []
        for stored in (False, True)[: 2 if H * V else 1]:
            for ragged in (False, True):
                query = jnp.ones((T, N, H) if ragged else (B, T, N, H))
                call = lambda query, s=stored, r=ragged: attend(query, s, r, traced)
                found.append((query, *call(query), jax.grad(lambda q, f=call: f(q)[0].sum())(query)))
        return found

    for query, out, lse, gradient in jax.jit(run)((tables, lengths)):
        assert out.shape == (*query.shape[:-1], V) and lse.shape == query.shape[:-1] and gradient.shape == query.shape
        assert out.dtype == query.dtype and not np.isnan(out).any() and not np.isnan(lse).any()
        if zero in ("P", "W", "P and W"):
            assert not out.any() and (lse == -np.inf).all() and not gradient.any()


@pytest.mark.share(2)
@pytest.mark.parametrize("scheme", [None, "int4"])
def test_a_step_of_a_scheduler_may_be_empty(scheme):
    cache = PagedKVCache.create(4, 8, 2, 16, key_scheme=scheme, value_scheme=scheme)
    book, none = cache.book, jnp.ones((0, 2, 16))
    own = book.allocate([])
    for sequences, counts in (([], []), ([own], [0])):
        cache = cache.append(sequences, none, none, counts).write(book.reserve(sequences, counts), none, none)
        out = jax_mfa.paged_attention(
            jnp.ones((0, 4, 16)),
            cache.key_pages,
            cache.value_pages,
            *book.tables(sequences),
            query_start_locs=[0] * (len(sequences) + 1),
        )
        assert out.shape == (0, 4, 16)
    assert jax_mfa.paged_attention(jnp.ones((0, 1, 4, 16)), cache.key_pages, cache.value_pages, [], []).shape[0] == 0
    assert book.length(own) == 0 and book.free_pages == 4


@pytest.mark.share(2)
@pytest.mark.parametrize("zero", ["B", "T", "S", "N"])
def test_a_split_cache_of_nothing(zero):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    sizes = SIZES | {zero: 0}
    arguments = {**problem(**sizes), "lengths": np.zeros(sizes["B"], np.int32), "axis_name": "x", "mesh": mesh}
    out, lse = jax_mfa.sharded_decode_attention(**arguments, return_residual=True)
    np.testing.assert_array_equal(out, np.zeros([sizes[x] for x in "BTNV"]))
    np.testing.assert_array_equal(lse, np.full([sizes[x] for x in "BTN"], -np.inf))
