"""Values that are the first channels of the keys (`value_size`): one array is stored, read, and given the gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from harness import arrays, assert_allclose, assert_close, evaluate, mesh_of, quick_jit, terms_of
from jax.sharding import NamedSharding, PartitionSpec
from test_quantization import stored_numbers

import jax_mfa
from jax_mfa import Scheme, metal, quantize
from jax_mfa.arguments import specify_abstract

H, V = 96, 64
FEATURES = {
    "dense": {},
    "everything": {
        "is_causal": True,
        "query_offset": np.array([17, 4]),
        "local_window_size": (30, None),
        "key_value_seq_lengths": np.array([51, 40]),
        "logits_soft_cap": 2.0,
    },
}


def latent(T=37, S=53, N=4, K=2, H=H, V=V, dtype="float32"):
    """Query, keys and the cotangents of output and log-sum-exp; B = 2."""
    q, k, d_out, d_lse = arrays((2, T, N, H), (2, S, K, H), (2, T, N, V), (2, T, N), dtype=dtype)
    return q, k, d_out, d_lse


def expected(q, k, d_out, d_lse, **features):
    """Values, and the gradient of the keys with that of the values in it, by the oracle."""
    wanted = oracle.attention(q, k, k[..., :V], **features, d_out=d_out, d_lse=d_lse)
    wanted.gradients["key"][..., :V] += wanted.gradients["value"]
    return wanted


@pytest.mark.parametrize(("features", "dtype"), [("dense", "float16"), ("everything", "float32")])
def test_values_and_gradients(implementation, features, dtype):
    q, k, d_out, d_lse = latent(dtype=dtype)
    arguments = {"query": q, "key": k, "value": None, "value_size": V, **FEATURES[features]}
    out, lse, gradients = evaluate(implementation, arguments, d_out, d_lse)
    wanted = expected(q, k, d_out, d_lse, **FEATURES[features])
    common = {"terms": terms_of({"query": q, "value": k}), "largest_score": wanted.largest_score}
    assert_close(out, wanted.out, q.dtype, what="out", **common)
    assert_close(lse, wanted.lse, lse.dtype, what="lse", **common)
    assert set(gradients) == {"query", "key"}
    for name, x in gradients.items():
        assert_close(x, wanted.gradients[name], q.dtype, what=f"d{name}", gradient=True, **common)


@pytest.mark.parametrize("heads", [(8, 1), (4, 2)], ids=str)  # many queries of a key head, and few
@pytest.mark.parametrize("scheme", [None, Scheme("int8"), Scheme("int4", center=16)], ids=["plain", "int8", "int4"])
def test_decoding(implementation, scheme, heads):
    q, k, *_ = latent(T=1, S=300, N=heads[0], K=heads[1], dtype="float16")
    lengths = np.array([40, 300])
    key = k if scheme is None else quantize(k, scheme)
    decode = lambda q, key: jax_mfa.decode_attention(
        q, key, None, lengths, value_size=V, implementation=implementation.name
    )
    out = quick_jit(decode)(q, key)
    stored = k if scheme is None else stored_numbers(key)
    features = {"is_causal": True, "query_offset": lengths - 1, "key_value_seq_lengths": lengths}
    wanted = oracle.attention(q, stored, stored[..., :V], **features)
    terms = terms_of({"query": q, "value": k})
    assert_close(out, wanted.out, q.dtype, terms=terms, largest_score=wanted.largest_score, what="out")


@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "int8"])
def test_pages(implementation, quantized):
    q, pages = arrays((2, 1, 8, H), (30, 16, 1, H), dtype="float16")
    tables = np.random.default_rng(0).permutation(30)[:24].reshape(2, 12)
    pages = quantize(pages, Scheme("int8")) if quantized else jnp.asarray(pages)
    values = pages.dequantize()[..., :V] if quantized else pages[..., :V]
    attend = lambda values, **size: quick_jit(
        lambda q: jax_mfa.paged_attention(
            q, pages, values, tables, [100, 190], implementation=implementation.name, **size
        )
    )(q)
    assert_allclose(attend(None, value_size=V), attend(values), rtol=2e-3, atol=1e-3)


def test_forward_mode_and_second_derivatives():
    q, k, d_out, d_lse = latent(T=19, S=23)
    t = arrays(q.shape, k.shape, seed=2)

    def loss(q, k, implementation, **size):
        value = None if size else k[..., :V]
        out, lse = jax_mfa.flash_attention(q, k, value, implementation=implementation, is_causal=True, **size)
        return (out * d_out).sum() + (lse * d_lse).sum()

    def derivatives(*how, **size):
        gradient = jax.grad(lambda q, k: loss(q, k, *how, **size), (0, 1))
        return jax.jvp(lambda q, k: loss(q, k, *how, **size), (q, k), t)[1], *jax.jvp(gradient, (q, k), t)[1]

    for got, wanted in zip(derivatives("blockwise", value_size=V), derivatives("reference")):
        assert_allclose(got, wanted, rtol=1e-4, atol=2e-4)

    def in_reverse(*how, **size):  # of either derivative
        fun = lambda k: loss(q, k, *how, **size)
        along = lambda k: jax.jvp(fun, (k,), t[1:])[1]
        return (
            jax.grad(along)(k),
            jax.grad(lambda k: (jax.grad(fun)(k) * t[1]).sum())(k),
            jax.jvp(along, (k,), t[1:])[1],
        )

    for got, wanted in zip(in_reverse("blockwise", value_size=V), in_reverse("reference")):
        assert_allclose(got, wanted, rtol=1e-4, atol=2e-4 * np.abs(wanted).max())


@pytest.mark.share(4)
@pytest.mark.parametrize("mapped", [(0, 0), (0, None), (None, 0)])
def test_vmap(mapped):
    q, k, d_out, _ = latent(T=5, S=9)
    loss = lambda q, k, value, **size: (jax_mfa.flash_attention(q, k, value, **size)[0] * d_out).sum()
    several = lambda x, dim: jnp.stack([x, 2 * x, x - 1]) if dim == 0 else jnp.asarray(x)
    given = [several(x, dim) for x, dim in zip((q, k), mapped)]
    run = lambda fun: jax.vmap(jax.value_and_grad(fun, (0, 1)), mapped)(*given)
    (out, grads), (wanted, wanted_grads) = (
        run(lambda q, k: loss(q, k, None, value_size=V)),
        run(lambda q, k: loss(q, k, k[..., :V])),
    )
    for x, y in zip((out, *grads), (wanted, *wanted_grads)):
        assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_sharded_batch_entries_and_heads_stay_where_they_are():
    q, k, d_out, _ = latent(T=8, S=8)
    split = NamedSharding(mesh_of(2, 2, names=("data", "heads")), PartitionSpec("data", None, "heads"))
    sharded = [jax.device_put(x, split) for x in (q, k)]
    loss = lambda q, k, value, **size: (jax_mfa.flash_attention(q, k, value, **size)[0] * d_out).sum()
    step = jax.jit(jax.grad(lambda q, k: loss(q, k, None, value_size=V), (0, 1)))
    assert "all-gather" not in step.lower(*sharded).compile().as_text()
    for x, y in zip(step(*sharded), jax.grad(lambda q, k: loss(q, k, k[..., :V]), (0, 1))(q, k)):
        assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_decoding_makes_no_second_cache():
    q = jax.ShapeDtypeStruct((1, 1, 16, 576), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, 2**16, 1, 576), jnp.bfloat16)
    decode = lambda q, k: jax_mfa.decode_attention(q, k, None, 60000, value_size=512, implementation="blockwise")
    temporaries = jax.jit(decode).lower(q, k).compile().memory_analysis().temp_size_in_bytes
    assert temporaries < k.size * 2 / 3  # the values alone would be 8/9 of the cache


def test_the_kernel_reads_the_values_from_the_keys():
    shaped = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float16)
    spec, o = specify_abstract(query=shaped(1, 64, 16, 576), key=shaped(1, 64, 1, 576), value=None, value_size=512)
    for of_pass in ("forward", "backward"):
        plan = metal.plan_of(spec, o, of_pass, "staged")
        assert "value" not in {buffer.name for buffer in plan.buffers}
        reads = [x for d in plan.dispatches for _, x in d.arguments if x == "key"]
        assert len(reads) > len(plan.dispatches) / 2


def test_where_kernels_take_them_says_explain():
    q, k, *_ = latent(H=40, V=24)
    assert "value_size" in metal_refusal(q, k, 24)
    assert "value_size" not in metal_refusal(*latent()[:2], V)


def metal_refusal(q, k, size):
    return jax_mfa.explain(q, k, None, value_size=size).reasons["metal"]


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"value": None}, TypeError, "value must be an array"),
        ({"value": "key", "value_size": 8}, ValueError, "value must then be None"),
        ({"value": None, "value_size": 0}, ValueError, "value_size must be at least 1"),
        ({"value": None, "value_size": H + 1}, ValueError, f"value_size must be at most {H}"),
        ({"value": None, "value_size": 2.0}, TypeError, "value_size must be an integer"),
    ],
)
def test_bad_input(given, error, words):
    q, k, *_ = latent()
    given = {name: k if x == "key" else x for name, x in given.items()}
    with pytest.raises(error, match=words):
        jax_mfa.dot_product_attention(q, k, **given)


def test_rings_say_what_they_take():
    q, k, *_ = latent()
    with pytest.raises(NotImplementedError, match="ring_attention takes no value_size"):
        jax_mfa.ring_attention(q, k, None, value_size=V, axis_name="x")
