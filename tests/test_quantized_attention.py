"""Attention over quantised keys and values: exact over what they stand for, with gradients, and in a tile's memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from harness import arrays, assert_allclose, assert_close, own, quick_jit, terms_of, types_of
from test_quantization import stored_numbers

import jax_mfa
from jax_mfa import Scheme, primitives, quantize

# of keys and of values; blocks and runs that divide neither lengths nor tiles nor heads
SCHEMES = {
    "int8": (Scheme("int8"), Scheme("int8", True)),
    "int4-int8": (Scheme("int4", channels=8), Scheme("int8", False, None, None)),
    "fp8-int4": (Scheme("fp8", True, channels=None), Scheme("int4", True, 3, 5)),
    "blocks": (Scheme("int4", True, 7, 9, center=5), Scheme("int4", False, 16, 1, center=10**6)),
    "int8-plain": (Scheme("int8", tokens=None, channels=4, center=64), None),
    "plain-fp8": (None, Scheme("fp8", tokens=2, channels=3)),
}
FEATURES = {
    "dense": {},
    "causal": {"is_causal": True, "query_offset": np.array([-2, 5])},
    "everything": {
        "is_causal": True,
        "query_offset": np.array([30, 4]),
        "local_window_size": (9, None),
        "key_value_seq_lengths": np.array([31, 0]),
        "logits_soft_cap": 2.0,
        "sinks": "N",
        "alibi_slopes": "N",
        "bias": "S",
    },
}


def problem(T=5, S=37, N=4, K=2, H=11, V=7, dtype="float32", features=()):
    """Query, key, value and the features of a problem, of B = 2."""
    q, k, v, heads, bias = arrays((2, T, N, H), (2, S, K, H), (2, S, K, V), (N,), (S,), dtype=dtype)
    of = {"N": np.abs(heads), "S": bias}
    return q, k, v, {name: of[x] if isinstance(x, str) else x for name, x in dict(features).items()}


def check(implementation, schemes, q, k, v, features, jit=quick_jit):
    """Values and gradients against the oracle over what is stored; those of keys and values go straight through."""
    d_out, d_lse = arrays((*q.shape[:3], v.shape[-1]), q.shape[:3], seed=1)
    d_out = d_out.astype(q.dtype)
    static = {n: x for n, x in features.items() if isinstance(x, (bool, int, float, tuple))}
    moving = {n: x for n, x in features.items() if n not in static}

    @jit
    def run(q, k, v, moving, d_out, d_lse):
        store = lambda x, scheme: x if scheme is None else quantize(x, scheme, straight_through=True)

        def attend(q, k, v):
            keys, values = store(k, schemes[0]), store(v, schemes[1])
            return implementation.flash(q, keys, values, **moving, **static), (keys, values)

        (out, lse), pullback, kept = jax.vjp(attend, q, k, v, has_aux=True)
        return out, lse, pullback((d_out, d_lse.astype(lse.dtype))), kept

    out, lse, gradients, kept = run(q, k, v, moving, d_out, d_lse)
    key, value = (stored_numbers(x) if scheme else x for x, scheme in zip(kept, schemes))
    wanted = oracle.attention(q, key, value, **features, d_out=d_out, d_lse=d_lse)
    common = {"terms": terms_of({"query": q, "value": v}), "largest_score": wanted.largest_score}
    assert_close(out, wanted.out, q.dtype, what="out", **common)
    assert_close(lse, wanted.lse, lse.dtype, what="lse", **common)
    for name, x in zip(("query", "key", "value"), gradients):
        assert x.dtype == q.dtype
        assert_close(x, wanted.gradients[name], q.dtype, what=f"d{name}", gradient=True, **common)


PAIRS = [*((x, "everything") for x in SCHEMES), ("int8", "dense"), ("blocks", "causal"), ("fp8-int4", "dense")]


@pytest.mark.share(4)
@pytest.mark.parametrize(("schemes", "features"), PAIRS)
def test_values_and_gradients_are_those_over_what_is_stored(implementation, schemes, features):
    if not implementation.own_rules and features != "causal":
        pytest.skip("the definition dequantises and goes on as with any array")
    check(implementation, SCHEMES[schemes], *problem(features=FEATURES[features]))


@own
@pytest.mark.parametrize("schemes", ["int4-int8", "blocks"])
def test_in_tiles_too(implementation, schemes):
    # two tiles of columns that overlap, and two of rows
    q, k, v, _ = problem(T=520, S=1043, N=2, K=1, H=8, V=6)
    check(implementation, SCHEMES[schemes], q[:, ::40], k, v, {})
    if schemes == "blocks":
        check(implementation, SCHEMES[schemes], q, k, v, {"is_causal": True, "query_offset": 500})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_in_other_dtypes(implementation, dtype):
    if (implementation.name, dtype) == ("metal", "float64"):
        pytest.skip("Metal has no float64")
    with types_of(dtype):
        check(implementation, SCHEMES["int4-int8"], *problem(dtype=dtype, features=FEATURES["causal"]))


def test_a_gradient_of_one_head_is_found_out(implementation, monkeypatch):
    if implementation.name != "blockwise":
        pytest.skip("its backward pass is the one that is changed")
    given = problem(S=38)
    whole = primitives.blockwise.backward

    def one_head(*args):
        return tuple(x.at[:, :, 1:].set(0) if x.ndim == 4 else x for x in whole(*args))

    monkeypatch.setattr(primitives.blockwise, "backward", one_head)
    with pytest.raises(AssertionError, match="dquery"):
        check(implementation, SCHEMES["int8"], *given)
    jax.clear_caches()


def test_queries_may_be_quantised(implementation):
    q, k, v, _ = problem()
    stored = quantize(q, "int8")
    out = implementation.attend(stored, quantize(k), quantize(v))
    wanted = implementation.attend(stored.dequantize(), quantize(k), quantize(v))
    np.testing.assert_array_equal(out, wanted)


@own
def test_decoding_and_vmap(implementation):
    q, k, v, _ = problem(T=1, S=40)
    lengths = np.array([33, 7])
    keys, values = quantize(k, "int4"), quantize(v, Scheme("int8", tokens=4))
    wanted = oracle.attention(q, stored_numbers(keys), stored_numbers(values), is_causal=True, query_offset=lengths - 1)
    decode = functools.partial(jax_mfa.decode_attention, implementation=implementation.name)
    rows = jax.jit(jax.vmap(decode))(q, keys, values, lengths)
    shared = jax.jit(jax.vmap(decode, in_axes=(0, None, None, None)))(np.stack([q, 2 * q]), keys, values, lengths)
    for out in (decode(q, keys, values, lengths), rows, shared[0]):
        assert_close(out, wanted.out, "float32", terms=60, largest_score=wanted.largest_score)


def test_forward_mode_and_second_derivatives(implementation):
    if implementation.name == "metal":
        pytest.skip("refused, as for any array: see test_transformations.py")
    q, k, v, _ = problem(T=3, S=9)
    t = arrays(q.shape, k.shape, v.shape, seed=3)
    store = functools.partial(quantize, scheme="int8", straight_through=True)
    fun = lambda q, k, v: jnp.sin(implementation.attend(q, store(k), store(v))).sum()
    moved = quick_jit(lambda *x: jax.jvp(fun, x, t)[1])(q, k, v)
    gradients = quick_jit(jax.grad(fun, (0, 1, 2)))(q, k, v)
    assert_allclose(moved, sum((a * b).sum() for a, b in zip(gradients, t)), rtol=1e-4, atol=1e-4)
    # stored numbers are constants of a second derivative
    plain = lambda q: jnp.sin(implementation.attend(q, store(k).dequantize(), store(v).dequantize())).sum()
    functions = plain, lambda q: fun(q, k, v)
    products = [quick_jit(lambda q, f=f: jax.jvp(jax.grad(f), (q,), t[:1])[1])(q) for f in functions]
    assert_allclose(*products, rtol=1e-4, atol=1e-4)


def test_mapped_second_derivatives_through_what_is_stored():
    q, k, v, _ = problem(T=3, S=9)

    def fun(s):
        stored = quantize(k * s.sum(), "int8", straight_through=True)
        return (jax_mfa.flash_attention(q, stored, v)[0] ** 2).sum((1, 2, 3))

    kinds = jax.jacfwd, jax.jacrev
    first, *others = [quick_jit(outer(inner(fun)))(jnp.ones(2)) for outer in kinds for inner in kinds]
    for other in others:
        assert_allclose(other, first, rtol=1e-3, atol=1e-3 * np.abs(first).max())


# --- centring


def test_the_softmax_does_not_see_a_mean_of_all_tokens_but_cap_sink_and_log_sum_exp_do(implementation):
    """Why `center` is added back: see `jax_mfa.kv_cache.storage`."""
    q, k, v, features = problem(features={"sinks": "N", "alibi_slopes": "N"})
    masks = {"is_causal": True, "query_offset": 33, "alibi_slopes": features["alibi_slopes"]}
    keys = quantize(k + 3, Scheme("int8", center=10**6))
    without = dataclasses.replace(keys, means=0 * keys.means)
    attend = lambda keys, **features: [np.asarray(x) for x in implementation.flash(q, keys, v, **masks, **features)]
    (out, lse), (moved, moved_lse) = attend(keys), attend(without)
    assert_allclose(moved, out, atol=2e-6)
    mean = np.repeat(np.asarray(keys.means)[:, 0], 2, axis=1)
    assert_allclose(lse - moved_lse, np.einsum("btnh,bnh->btn", q, mean) / 11**0.5, atol=2e-5)
    for feature in ({"sinks": features["sinks"]}, {"logits_soft_cap": 1.0}):
        assert np.abs(attend(keys, **feature)[0] - attend(without, **feature)[0]).max() > 0.01
    several = quantize(k + np.arange(37, dtype=np.float32)[:, None, None], Scheme("int8", center=5))
    without = dataclasses.replace(several, means=0 * several.means)
    assert np.abs(attend(several)[0] - attend(without)[0]).max() > 0.01


# --- memory

abstract = jax.ShapeDtypeStruct


def memory(fun, *args) -> int:
    return quick_jit(fun).lower(*args).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.share(2)
@pytest.mark.parametrize(("schemes", "T", "gradient"), [("int8", 1, False), ("int4-int8", 600, True)])
def test_temporary_memory_does_not_depend_on_the_context(schemes, T, gradient):
    def temporary(s):
        store = lambda scheme: jax.eval_shape(lambda x: quantize(x, scheme), abstract((2, s, 4, 64), jnp.bfloat16))
        attend = functools.partial(jax_mfa.decode_attention, implementation="blockwise")
        run = (lambda q, *x: jax.vjp(lambda q: attend(q, *x), q)[1](q)) if gradient else attend
        lengths = abstract((2,), jnp.int32)
        return memory(run, abstract((2, T, 8, 64), jnp.bfloat16), *(store(x) for x in SCHEMES[schemes]), lengths)

    small, large = temporary(8192), temporary(32768)
    assert large <= small + 2**16
    assert large < 2 * 32768 * 4 * 64  # not even a byte for each key


def training_step(scheme, T=128, layers=4, N=4, H=32):
    """Bytes of temporary memory of a step of a few layers of attention, whose residuals are what is named."""

    def layer(x, weights):
        q, k, v = jnp.moveaxis((x @ weights).reshape(1, T, 3, N, H), 2, 0)
        if scheme is None:
            k, v = (jax.ad_checkpoint.checkpoint_name(x, "jax_mfa_quantized") for x in (k, v))
        else:
            k, v = (quantize(x, scheme, straight_through=True) for x in (k, v))
        out = jax_mfa.dot_product_attention(q, k, v, is_causal=True, implementation="blockwise")
        return x + out.reshape(1, T, N * H)

    names = "jax_mfa_quantized", "jax_mfa_out", "jax_mfa_lse"
    kept = jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(*names))
    loss = lambda weights, x: jax.lax.scan(lambda x, w: (kept(x, w), None), x, weights)[0].sum()
    weights = abstract((layers, N * H, 3 * N * H), jnp.float32)
    return memory(jax.grad(loss), weights, abstract((1, T, N * H), jnp.float32))


def test_int8_residuals_take_a_quarter_of_the_memory_of_plain_ones():
    # by how much memory grows with each layer: input, output and statistics are kept either way
    per_layer = lambda scheme: (training_step(scheme, layers=12) - training_step(scheme, layers=4)) / 8
    numbers = 2 * 128 * 4 * 32  # of keys and values
    saved = per_layer(None) - per_layer(Scheme("int8", True, channels=32))
    assert 0.98 <= saved / (numbers * (4 - 1 - 4 / 32)) <= 1.1


def test_sharded_quantised_keys_are_not_gathered():
    if jax.device_count() < 4:
        pytest.skip("needs 4 devices")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("b", "n"))
    place = lambda x: jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("b", None, "n")))
    q, k, v = (jnp.asarray(x) for x in problem(T=6, S=40)[:3])
    keys, values = quantize(k, Scheme("int4", channels=4)), quantize(v, Scheme("int8", tokens=2))
    run = jax.jit(functools.partial(jax_mfa.dot_product_attention, implementation="blockwise"))
    arguments = jax.tree.map(place, (q, keys, values))
    assert "all-gather" not in run.lower(*arguments).compile().as_text()
    assert_allclose(run(*arguments), run(q, keys, values), atol=1e-6)
