"""jax_mfa in flax.linen: `attention_fn` against flax's own function, `FlashMultiHeadAttention` against plain numpy."""

import functools
import inspect
import logging
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from harness import assert_allclose
from test_flax_shared import OF_THE_WRONG_KIND, RAGGED, SETTINGS, causal, normal, numpy_module, perturbed, tolerance

import jax_mfa
from jax_mfa.flax import _drop_in
from jax_mfa.flax import linen as mfa

B, T, S, N, H, FEATURES = 2, 7, 9, 6, 4, 24
KEY = jax.random.key(7)


@pytest.fixture
def no_stock(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("flax's own attention ran")

    monkeypatch.setattr(mfa, "_stock_attention", refuse)


@pytest.fixture
def stock_calls(monkeypatch):
    calls, stock = [], mfa._stock_attention

    def spy(*args, **kwargs):
        calls.append(kwargs)
        return stock(*args, **kwargs)

    monkeypatch.setattr(mfa, "_stock_attention", spy)
    return calls


def random_mask(shape, seed=3):
    """Bool; every row sees something."""
    mask = np.random.default_rng(seed).random(shape) < 0.6
    mask[..., 0] = True
    return mask


def qkv(t=T, s=S, dtype=np.float32):
    return tuple(jnp.asarray(normal(i, (B, length, N, H), dtype)) for i, length in enumerate((t, s, s)))


MASKS = {
    "none": lambda s: None,
    "causal of flax": lambda s: nn.make_causal_mask(np.zeros((B, T))) if s == T else causal(T, s)[None, None],
    "padding of flax": lambda s: nn.make_attention_mask(np.ones((B, T)), np.arange(s) < np.array([[s - 2], [3]])),
    "bool per head": lambda s: random_mask((B, N, T, s)),
    "float per head": lambda s: random_mask((B, N, T, s)).astype(np.float32),
    "integer": lambda s: random_mask((1, 1, T, s)).astype(np.int32),
}


# --- attention_fn


def test_every_argument_of_flax_is_named():
    stock = list(inspect.signature(nn.dot_product_attention).parameters)
    ours = inspect.signature(mfa.attention_fn).parameters
    assert list(ours)[: len(stock)] == stock
    assert not any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in ours.values())


@pytest.mark.share(4)
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_module_equals_stock(mask, cross, no_stock):
    mask = MASKS[mask](S if cross else T)
    x = normal(0, (B, T, FEATURES))
    others = (normal(1, (B, S, FEATURES)),) if cross else ()
    stock = nn.MultiHeadDotProductAttention(num_heads=N)
    params = perturbed(stock.init(KEY, x, *others))
    apply = lambda module: jax.jit(lambda p: module.apply(p, x, *others, mask=mask))(params)
    assert_allclose(apply(stock.clone(attention_fn=mfa.attention_fn)), apply(stock), **tolerance())


@pytest.mark.parametrize("module", [nn.MultiHeadAttention, nn.SelfAttention])
def test_other_modules_equal_stock(module, no_stock):
    x, mask = normal(0, (B, 3, T, FEATURES)), random_mask((B, 3, 1, T, T))
    stock = module(num_heads=N, qkv_features=36, out_features=5, normalize_qk=True, force_fp32_for_softmax=True)
    params = perturbed(stock.init(KEY, x))
    out = stock.clone(attention_fn=mfa.attention_fn).apply(params, x, mask=mask)
    assert_allclose(out, stock.apply(params, x, mask=mask), **tolerance())


@pytest.mark.parametrize("bias", [(B, N, T, S), (1, N, T, S), (T, S), (N, 1, S)])
@pytest.mark.parametrize("mask", [None, "float per head"])
def test_function_equals_stock_with_bias(bias, mask, no_stock):
    bias = normal(5, bias)
    mask = None if mask is None else MASKS[mask](S)
    # as positional arguments, in flax's order
    assert_allclose(mfa.attention_fn(*qkv(), bias, mask), nn.dot_product_attention(*qkv(), bias, mask), **tolerance())


def test_integer_bias_equals_stock(no_stock):
    bias = np.random.default_rng(0).integers(-3, 3, (N, T, S))
    assert_allclose(mfa.attention_fn(*qkv(), bias), nn.dot_product_attention(*qkv(), jnp.asarray(bias)), **tolerance())


def test_causal_keyword_through_partial(no_stock):
    x = normal(0, (B, T, FEATURES))
    module = nn.MultiHeadDotProductAttention(
        num_heads=N, attention_fn=functools.partial(mfa.attention_fn, is_causal=True, implementation="reference")
    )
    params = perturbed(module.init(KEY, x))
    want = nn.MultiHeadDotProductAttention(num_heads=N).apply(params, x, mask=nn.make_causal_mask(x[..., 0]))
    assert_allclose(module.apply(params, x), want, **tolerance())


def test_gradients_equal_stock(no_stock):
    mask, weights = MASKS["float per head"](S), normal(6, (B, T, N, H))
    arguments = (*qkv(), jnp.asarray(normal(5, (1, N, T, S))))

    def gradients(attention):
        return jax.grad(lambda *a: (weights * attention(*a, mask)).sum(), (0, 1, 2, 3))(*arguments)

    for ours, stock in zip(gradients(mfa.attention_fn), gradients(nn.dot_product_attention)):
        assert np.abs(stock).max() > 0.1
        assert_allclose(ours, stock, **tolerance())


@pytest.mark.share(2)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_dtypes(dtype, no_stock):
    x = normal(0, (B, T, FEATURES))
    module = nn.MultiHeadDotProductAttention(num_heads=N, dtype=dtype, attention_fn=mfa.attention_fn)
    params = module.init(KEY, x)
    out = module.apply(params, x, mask=nn.make_causal_mask(x[..., 0]))
    assert out.dtype == dtype
    want = numpy_module(params["params"], x, see=causal(T))
    assert_allclose(np.asarray(out, np.float64), want, **tolerance(dtype))


def test_dtypes_are_promoted_as_in_flax(no_stock):
    q, k, v = qkv()
    q, k = q.astype(jnp.bfloat16), k.astype(jnp.float16)
    for dtype in (None, jnp.float16, jnp.float32):
        out = mfa.attention_fn(q, k, v, dtype=dtype)
        stock = nn.dot_product_attention(q, k, v, dtype=dtype)
        assert out.dtype == stock.dtype
        assert_allclose(np.asarray(out, np.float32), stock, **tolerance(out.dtype))


@pytest.mark.parametrize("precision", [None, "highest", jax.lax.Precision.HIGH])
def test_precision_needs_no_stock_on_cpu(precision, no_stock):
    if jax.default_backend() != "cpu":
        pytest.skip("elsewhere precision is more than a wish")
    out = mfa.attention_fn(*qkv(), precision=precision)
    assert_allclose(out, nn.dot_product_attention(*qkv(), precision=precision), **tolerance())


def test_decode_mode_of_flax(no_stock):
    x = normal(0, (B, T, FEATURES))
    decoder = nn.MultiHeadDotProductAttention(num_heads=N, decode=True, attention_fn=mfa.attention_fn)
    variables = decoder.init(KEY, x)
    params, cache = perturbed(variables["params"]), variables["cache"]
    stock = nn.MultiHeadDotProductAttention(num_heads=N)
    want = stock.apply({"params": params}, x, mask=nn.make_causal_mask(x[..., 0]))
    for t in range(T):
        out, updated = decoder.apply({"params": params, "cache": cache}, x[:, t : t + 1], mutable=["cache"])
        cache = updated["cache"]
        assert_allclose(out, want[:, t : t + 1], **tolerance())


def test_row_that_sees_nothing_is_zero_on_either_route():
    mask = random_mask((B, 1, T, S))
    mask[:, :, 2] = False
    ours = mfa.attention_fn(*qkv(), mask=mask)
    stock = mfa.attention_fn(*qkv(), mask=mask, einsum_dot_general=jax.lax.dot_general)
    assert not ours[:, 2].any() and np.abs(ours[:, 3]).min() > 0
    assert_allclose(ours, stock, **tolerance())


def test_deterministic_turns_dropout_off(no_stock):
    out = mfa.attention_fn(*qkv(), dropout_rate=0.5, deterministic=True)
    assert_allclose(out, nn.dot_product_attention(*qkv()), **tolerance())


def test_dropout_drops_and_rescales(no_stock):
    s, rate = 64, 0.25
    q, k = (jnp.asarray(normal(i, (B, s, N, H))) for i in range(2))
    v = jnp.broadcast_to(jnp.eye(s)[:, None], (B, s, N, s))  # the output is the weights
    drop = functools.partial(
        mfa.attention_fn, q, k, v, dropout_rate=rate, broadcast_dropout=False, dropout_rng=jax.random.key(3)
    )
    weights, dropped = mfa.attention_fn(q, k, v), drop()
    kept = np.asarray(dropped != 0)
    assert_allclose(np.asarray(dropped)[kept], np.asarray(weights / (1 - rate))[kept], **tolerance())
    # five standard deviations of the mean of as many coins
    assert abs(kept.mean() - (1 - rate)) < 5 * np.sqrt(rate * (1 - rate) / kept.size)
    assert (kept[0] != kept[1]).any() and (kept[:, :, 0] != kept[:, :, 1]).any()
    np.testing.assert_array_equal(dropped, drop())
    assert (dropped != drop(dropout_rng=jax.random.key(4))).any()
    assert (dropped != drop(dropout_rng=jax.random.PRNGKey(5))).any()


def test_dropout_of_module_trains_without_stock(no_stock):
    x = normal(0, (B, T, FEATURES))
    module = nn.MultiHeadDotProductAttention(
        num_heads=N, dropout_rate=0.4, broadcast_dropout=False, deterministic=False, attention_fn=mfa.attention_fn
    )
    params = module.init({"params": KEY, "dropout": KEY}, x)
    apply = jax.jit(lambda p, rng: module.apply(p, x, rngs={"dropout": rng}))
    assert np.abs(apply(params, jax.random.key(0)) - apply(params, jax.random.key(1))).max() > 0.01
    gradient = jax.grad(lambda p: apply(p, KEY).sum())(params)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))


@pytest.mark.parametrize("rate", [-0.5, 1.0, float("nan")])
def test_dropout_rates_out_of_range_are_errors(rate):
    with pytest.raises(ValueError, match=rf"^dropout_rate must be in the range \[0, 1\), got {rate}"):
        mfa.attention_fn(*qkv(), dropout_rate=rate, dropout_rng=KEY)


@pytest.mark.parametrize("broadcast", [False, True])
def test_dropout_without_rng_is_an_error(broadcast):
    with pytest.raises(ValueError, match=r"^dropout_rng is required .*, got None"):
        mfa.attention_fn(*qkv(), dropout_rate=0.5, broadcast_dropout=broadcast)


STOCK_ONLY = {
    "broadcast_dropout": {"dropout_rate": 0.5, "dropout_rng": KEY},
    "einsum_dot_general": {"einsum_dot_general": jax.lax.dot_general},
    "qk_attn_weights_einsum": {"qk_attn_weights_einsum": jnp.einsum, "attn_weights_value_einsum": jnp.einsum},
    "precision": {"precision": "a made-up algorithm"},
    "mask": {"mask": random_mask((3, B, 1, T, S))},
    "bias": {"bias": normal(0, (3, 1, 1, 1, S))},
}


@pytest.mark.parametrize("argument", [a for a in STOCK_ONLY if a != "precision"])
def test_what_only_flax_can_do_flax_does(argument, stock_calls, caplog):
    keywords = STOCK_ONLY[argument]
    with caplog.at_level(logging.INFO, "jax_mfa.flax"):
        out = mfa.attention_fn(*qkv(), **keywords)
    assert len(stock_calls) == 1
    assert argument in caplog.text
    np.testing.assert_array_equal(out, nn.dot_product_attention(*qkv(), **keywords))


def test_causal_reaches_stock(stock_calls):
    mask = random_mask((B, 1, 1, S))
    out = mfa.attention_fn(*qkv(), mask=mask, is_causal=True, einsum_dot_general=jax.lax.dot_general)
    want = nn.dot_product_attention(*qkv(), mask=mask & causal(T, S))
    assert len(stock_calls) == 1
    assert_allclose(out, want, **tolerance())


@pytest.mark.parametrize("argument", STOCK_ONLY)
def test_named_implementation_never_gives_way(argument):
    with pytest.raises(NotImplementedError, match=rf"blockwise.*{argument}"):
        mfa.attention_fn(*qkv(), **STOCK_ONLY[argument], implementation="blockwise")


def test_complex_goes_to_stock(stock_calls):
    q, k, v = (x + 1j * x[::-1] for x in qkv())
    out = mfa.attention_fn(q, k, v)
    assert len(stock_calls) == 1 and out.dtype == jnp.complex64


def test_sown_weights_are_those_of_flax(stock_calls):
    x = normal(0, (B, T, FEATURES))
    stock = nn.MultiHeadDotProductAttention(num_heads=N)
    params = stock.init(KEY, x)
    run = lambda module: module.apply(params, x, sow_weights=True, mutable=["intermediates"])
    out, sown = run(stock.clone(attention_fn=mfa.attention_fn))
    want, stock_sown = run(stock)
    assert len(stock_calls) == 1
    (weights,), (stock_weights,) = (s["intermediates"]["attention_weights"] for s in (sown, stock_sown))
    np.testing.assert_array_equal(weights, stock_weights)
    np.testing.assert_array_equal(out, want)


def test_broadcast_dropout_warns_once_of_what_it_costs():
    _drop_in._warn_of_broadcast_dropout.cache_clear()
    run = lambda **keywords: mfa.attention_fn(*qkv(), **{"dropout_rate": 0.5, "dropout_rng": KEY, **keywords})
    with warnings.catch_warnings(action="error"):
        run(broadcast_dropout=False), run(deterministic=True), run(dropout_rate=0.0)
    with pytest.warns(UserWarning, match=r"O\(T \* S\) memory: pass broadcast_dropout=False") as caught:
        run()
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings(action="error"):
        run()


@pytest.mark.share(4)
@pytest.mark.parametrize("shape", [(0, T, FEATURES), (B, 0, FEATURES)], ids=str)
@pytest.mark.parametrize("ours", [False, True], ids=["module of flax", "flash"])
def test_modules_of_nothing(ours, shape, no_stock):
    x = jnp.zeros(shape)
    module = nn.MultiHeadDotProductAttention(num_heads=N, attention_fn=mfa.attention_fn)
    if ours:
        module = flash(rotary_base=100.0, num_key_value_heads=2, use_sinks=True)
    params = module.init(KEY, normal(0, (B, T, FEATURES)))
    assert module.apply(params, x).shape == shape
    gradient = jax.grad(lambda p: module.apply(p, x).sum())(params)
    assert not any(g.any() for g in jax.tree.leaves(gradient))


@pytest.mark.parametrize(("batch", "length"), [(0, 1), (B, 0)])
def test_decoding_nothing(batch, length):
    x = normal(0, (batch, T, FEATURES))
    module, params, cache = decoder(x, rotary_base=100.0)
    out, after = decode(module, params, cache, x, (length,))
    assert out.shape == (batch, length, FEATURES)
    np.testing.assert_array_equal(after["cache_index"], [length] * batch)


def test_bad_shapes_name_the_argument():
    q, k, v = qkv()
    with pytest.raises(ValueError, match="mask"):
        mfa.attention_fn(q, k, v, mask=random_mask((B, 1, T, S + 1)))
    with pytest.raises(ValueError, match="value"):
        mfa.attention_fn(q, k, v[:, 1:])


# --- FlashMultiHeadAttention


def flash(**settings):
    return mfa.FlashMultiHeadAttention(**{"num_heads": N, **settings})


@pytest.mark.share(2)
@pytest.mark.parametrize("name", SETTINGS)
def test_flash_module_equals_numpy(name):
    settings, arguments = SETTINGS[name]
    x = normal(0, (B, T, FEATURES))
    module = flash(**settings)
    params = perturbed(module.init(KEY, x))
    out = jax.jit(module.apply)(params, x)
    assert_allclose(out, numpy_module(params["params"], x, **arguments(T)), **tolerance())


def test_flash_module_takes_the_parameters_of_flax():
    x, y = normal(0, (B, T, FEATURES)), normal(1, (B, S, FEATURES))
    stock = nn.MultiHeadDotProductAttention(num_heads=N, normalize_qk=True)
    params = perturbed(stock.init(KEY, x, y))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, flash(normalize_qk=True).init(KEY, x, y))
    mask = MASKS["float per head"](S)
    out = flash(normalize_qk=True).apply(params, x, y, mask=mask)
    assert_allclose(out, stock.apply(params, x, y, mask=mask), **tolerance())


def test_flash_masks_lengths_segments_and_bias():
    x, y = normal(0, (B, T, FEATURES)), normal(1, (B, S, FEATURES))
    module = flash(num_key_value_heads=3)
    params = perturbed(module.init(KEY, x, y))
    mask, bias = random_mask((B, N, T, S)), normal(2, (N, T, S))
    rows, columns = np.array([T, 5]), np.array([6, S])
    query_segments = np.random.default_rng(0).integers(0, 2, (B, T))
    key_segments = np.random.default_rng(1).integers(0, 2, (B, S))
    out = module.apply(
        params,
        x,
        y,
        bias=bias,
        mask=mask.astype(np.float32),
        query_seq_lengths=rows,
        key_value_seq_lengths=columns,
        query_segment_ids=query_segments,
        key_value_segment_ids=key_segments,
    )
    see = mask & (np.arange(T) < rows[:, None])[:, None, :, None] & (np.arange(S) < columns[:, None])[:, None, None]
    see = see & (query_segments[:, None, :, None] == key_segments[:, None, None, :])
    assert_allclose(out, numpy_module(params["params"], x, y, see=see, bias=bias), **tolerance())


def test_flash_query_offset_places_the_queries():
    x = normal(0, (B, S, FEATURES))
    module = flash(rotary_base=100.0, is_causal=True, local_window_size=(4, None))
    params = perturbed(module.init(KEY, x))
    whole = module.apply(params, x)
    assert_allclose(module.apply(params, x[:, 5:7], x, query_offset=5), whole[:, 5:7], **tolerance())
    rows = np.stack([x[0, 5:7], x[1, 2:4]])
    out = module.apply(params, rows, x, query_offset=np.array([5, 2]))
    assert_allclose(out, np.stack([whole[0, 5:7], whole[1, 2:4]]), **tolerance())


def test_flash_gradients_equal_those_of_the_reference():
    x = normal(0, (B, T, FEATURES))
    settings = {"num_key_value_heads": 2, "rotary_base": 50.0, "is_causal": True, "use_sinks": True}
    module = flash(**settings, logits_soft_cap=2.0)
    params = perturbed(module.init(KEY, x))
    weights = normal(3, (B, T, FEATURES))
    gradients = lambda m: jax.grad(lambda p, x: (weights * m.apply(p, x)).sum(), (0, 1))(params, x)
    ours, reference = gradients(module), gradients(module.clone(implementation="reference"))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(reference)):
        assert_allclose(a, b, **tolerance(terms=1024))
    assert np.abs(ours[0]["params"]["sinks"]).max() > 1e-3


def test_flash_bfloat16():
    x = normal(0, (B, T, FEATURES))
    module = flash(dtype=jnp.bfloat16, num_key_value_heads=2, rotary_base=1e4, is_causal=True, use_sinks=True)
    params = module.init(KEY, x)
    assert all(p.dtype == jnp.float32 for p in jax.tree.leaves(params))
    out = module.apply(params, x)
    assert out.dtype == jnp.bfloat16
    want = numpy_module(params["params"], x, see=causal(T), base=1e4)
    assert_allclose(np.asarray(out, np.float64), want, **tolerance(jnp.bfloat16))


def test_flash_dropout():
    x = normal(0, (B, T, FEATURES))
    module = flash(dropout_rate=0.5)
    params = module.init({"params": KEY}, x, deterministic=True)
    with pytest.raises(ValueError, match="deterministic"):
        module.apply(params, x)
    apply = jax.jit(lambda rng: module.apply(params, x, deterministic=False, rngs={"dropout": rng}))
    one, other = apply(jax.random.key(0)), apply(jax.random.key(1))
    assert np.abs(one - other).max() > 0.01
    np.testing.assert_array_equal(one, apply(jax.random.key(0)))
    assert_allclose(
        module.apply(params, x, deterministic=False, dropout_rng=KEY),
        module.clone(implementation="reference").apply(params, x, deterministic=False, dropout_rng=KEY),
        atol=1e-5,
    )
    np.testing.assert_array_equal(module.apply(params, x, deterministic=True), flash().apply(params, x))


# --- decoding

DECODERS = {
    "plain": {},
    "gqa rotary": {"num_key_value_heads": 2, "rotary_base": 100.0},
    "window and sinks": {"local_window_size": (2, None), "use_sinks": True, "rotary_base": 1e4},
    "normalised": {"normalize_qk": True, "num_key_value_heads": 1},
}


def decode(module, params, cache, x, lengths, **keywords):
    """Outputs for chunks of `x` of these lengths, one after another, each under jit; and the last cache."""
    step = jax.jit(lambda c, x: module.apply({**params, "cache": c}, x, mutable=["cache"], **keywords))
    outs, start = [], 0
    for length in lengths:
        out, updated = step(cache, x[:, start : start + length])
        cache, start = updated["cache"], start + length
        outs.append(out)
    return np.concatenate(outs, 1), cache


def decoder(x, **settings):
    """A decoding module, its parameters and an empty cache as long as `x`."""
    module = flash(**settings, decode=True)
    variables = module.init(KEY, x)
    params = perturbed({"params": variables["params"]})
    return module, params, variables["cache"]


@pytest.mark.share(4)
@pytest.mark.parametrize("name", DECODERS)
def test_prefill_and_steps_equal_the_causal_run(name):
    x = normal(0, (B, S, FEATURES))
    module, params, cache = decoder(x, **DECODERS[name])
    want = module.clone(decode=False, is_causal=True).apply(params, x)
    for lengths in ((5, 1, 1, 1, 1), (S,)):
        out, after = decode(module, params, cache, x, lengths)
        assert_allclose(out, want, **tolerance())
        np.testing.assert_array_equal(after["cache_index"], [S] * B)
    assert cache["cached_key"].shape == (B, S, DECODERS[name].get("num_key_value_heads", N), H)


@pytest.mark.parametrize("name", RAGGED)
def test_prompts_of_different_lengths_go_on_where_each_ended(name):
    x, prompts = normal(0, (B, S, FEATURES)), np.array([5, 2])
    module, params, cache = decoder(x, **RAGGED[name])
    want = module.clone(decode=False, is_causal=True).apply(params, x)
    step = jax.jit(lambda c, *a, **k: module.apply({**params, "cache": c}, *a, **k, mutable=["cache"]))
    padded = np.where(np.arange(5)[:, None] < prompts[:, None, None], x[:, :5], np.nan)
    out, updated = step(cache, padded, key_value_seq_lengths=prompts)
    for row, length in enumerate(prompts):
        assert_allclose(out[row, :length], want[row, :length], **tolerance())
    for i in range(4):
        at = np.arange(B), prompts + i
        out, updated = step(updated["cache"], x[at][:, None])
        assert_allclose(out[:, 0], want[at], **tolerance())
    np.testing.assert_array_equal(updated["cache"]["cache_index"], prompts + 4)
    assert cache["cached_key"].shape == (B, 3 if module.ring_cache else S, 2, H)


def test_a_ring_cache_takes_any_number_of_tokens():
    x = normal(0, (B, 20, FEATURES))
    module, params, cache = decoder(x[:, :1], rotary_base=100.0, local_window_size=(2, 0), ring_cache=True)
    out, after = decode(module, params, cache, x, (2, 7, 7, 1, 1, 1, 1))
    want = module.clone(decode=False, is_causal=True).apply(params, x)
    assert_allclose(out, want, **tolerance())
    with pytest.raises(ValueError, match=r"^mask must not be given with a ring cache"):
        decode(module, params, after, x[:, :1], (1,), mask=np.ones((1, 1), bool))
    with pytest.raises(ValueError, match=r"^a ring cache needs a local_window_size with .*, got None"):
        decoder(x, ring_cache=True)


def test_a_scalar_index_is_taken_for_all_rows():
    # the cache of flax's own modules
    x = normal(0, (B, T, FEATURES))
    module, params, cache = decoder(x, rotary_base=100.0)
    _, cache = decode(module, params, cache, x, (4,))
    want, after = decode(module, params, cache, x[:, 4:], (1,))
    scalar = {**cache, "cache_index": jnp.int32(4)}
    out, from_scalar = decode(module, params, scalar, x[:, 4:], (1,))
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(from_scalar["cache_index"], after["cache_index"])
    with pytest.raises(ValueError, match=r"^the index of the cache must have the leading axes \[2\] .*, got \[3\]"):
        decode(module, params, {**cache, "cache_index": jnp.zeros(3, jnp.int32)}, x, (1,))


def test_unwritten_entries_are_never_seen():
    x = normal(0, (B, S, FEATURES))
    module, params, cache = decoder(x)
    poisoned = {k: jnp.full_like(v, jnp.nan) if k != "cache_index" else v for k, v in cache.items()}
    out, _ = decode(module, params, poisoned, x, (3, 1, 2))
    want, _ = decode(module, params, cache, x, (3, 1, 2))
    np.testing.assert_array_equal(out, want)
    assert np.isfinite(out).all()


def test_decoding_inside_scan():
    x = normal(0, (B, T, FEATURES))
    module, params, cache = decoder(x, rotary_base=100.0)

    def step(cache, x):
        out, updated = module.apply({**params, "cache": cache}, x[:, None], mutable=["cache"])
        return updated["cache"], out[:, 0]

    _, outs = jax.lax.scan(step, cache, jnp.asarray(x).swapaxes(0, 1))
    want = module.clone(decode=False, is_causal=True).apply(params, x)
    assert_allclose(outs.swapaxes(0, 1), want, **tolerance())


def test_decoding_left_padded_prompts():
    x = normal(0, (B, S, FEATURES))
    module, params, cache = decoder(x, rotary_base=100.0)
    start = np.array([0, 3])
    out, _ = decode(module, params, cache, x, (6, 1, 1, 1), mask=(np.arange(S) >= start[:, None])[:, None, None])
    alone = module.clone(decode=False, is_causal=True).apply(params, x[1:, 3:])
    assert_allclose(out[1:, 3:], alone, **tolerance())


def test_cache_of_the_computation_dtype():
    x = normal(0, (B, S, FEATURES))
    module, params, cache = decoder(x, dtype=jnp.bfloat16)
    assert cache["cached_key"].dtype == cache["cached_value"].dtype == jnp.bfloat16
    out, after = decode(module, params, cache, x, (4, 1, 4))
    assert out.dtype == after["cached_key"].dtype == jnp.bfloat16
    want = module.clone(decode=False, is_causal=True).apply(params, x)
    assert_allclose(out.astype(np.float32), np.asarray(want, np.float32), **tolerance(jnp.bfloat16))


def test_more_tokens_than_the_cache_holds():
    x = normal(0, (B, T, FEATURES))
    module, params, cache = decoder(x)
    long = normal(1, (B, T + 1, FEATURES))
    with pytest.raises(ValueError, match=rf"holds {T} tokens"):
        decode(module, params, cache, long, (T + 1,))
    out, cache = decode(module, params, cache, x, (T - 1,))
    assert np.isfinite(out).all()
    # not traced: the count is known
    with pytest.raises(ValueError, match=rf"holds {T} tokens; {T - 1} known"):
        module.apply({**params, "cache": cache}, x[:, :2], mutable=["cache"])
    # traced: the answer cannot be taken for a right one
    out, _ = decode(module, params, cache, x, (2,))
    assert np.isnan(out).all()


def test_decoding_errors():
    x = normal(0, (B, T, FEATURES))
    module, params, cache = decoder(x)
    with pytest.raises(ValueError, match="collection 'cache'"):
        module.apply(params, x[:, :1], mutable=["cache"])
    apply = functools.partial(module.apply, {**params, "cache": cache}, mutable=["cache"])
    with pytest.raises(ValueError, match="query_offset"):
        apply(x[:, :1], query_offset=2)
    with pytest.raises(ValueError, match="inputs_k"):
        apply(x[:, :1], x[:, :2])
    with pytest.raises(ValueError, match=r"^key_value_seq_lengths must lie in 0\.\.1, got 5"):
        apply(x[:, :1], key_value_seq_lengths=np.array([1, 5]))
    with pytest.raises(ValueError, match=r"^key_value_seq_lengths must have shape \[...\] = \[2\], got \[3\]"):
        apply(x[:, :1], key_value_seq_lengths=np.ones(3, int))
    with pytest.raises(ValueError, match="cache, of shape"):
        apply(x[:1, :1])


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"num_key_value_heads": 4}, "num_key_value_heads, got 6 and 4"),
        ({"num_kv_heads": 4}, "num_kv_heads, got 6 and 4"),
        ({"num_key_value_heads": 2, "num_kv_heads": 3}, "two names of one number, got 2 and 3"),
        ({"num_heads": 5}, "num_heads = 5 must divide"),
        ({"head_dim": 4, "qkv_features": 25}, "head_dim"),
        ({"rotary_base": 1e4, "head_dim": 5}, "rotary_fraction"),
        ({"rotary_base": 0.0}, "rotary_base"),
        ({"logits_soft_cap": -1.0}, "logits_soft_cap"),
        ({"local_window_size": -1}, "local_window_size"),
    ],
)
def test_flash_settings_errors(settings, match):
    with pytest.raises(ValueError, match=match):
        flash(**settings).init(KEY, normal(0, (B, T, FEATURES)))


@pytest.mark.parametrize(("settings", "error", "match"), OF_THE_WRONG_KIND)
def test_flash_settings_of_the_wrong_kind(settings, error, match):
    with pytest.raises(error, match=match):
        flash(**settings).init(KEY, normal(0, (B, T, FEATURES)))


def test_flash_call_errors(monkeypatch):
    x = normal(0, (B, T, FEATURES))
    params = flash().init(KEY, x)
    with pytest.raises(ValueError, match="inputs_k"):
        flash().apply(params, x, None, x)
    with pytest.raises(ValueError, match="inputs_q"):
        flash().apply(params, x[0, 0])
    with pytest.raises(ValueError, match="mask"):
        flash().apply(params, x, mask=random_mask((T, T + 1)))
    monkeypatch.setattr(jax_mfa.metal.runtime, "get", lambda: jax_mfa.metal.runtime.Runtime(reason="none here"))
    with pytest.raises(NotImplementedError, match=r"metal.*none here"):
        flash(implementation="metal").apply(params, x)


def test_flash_is_jax_mfa_under_strict_rank_promotion():
    x = normal(0, (B, T, FEATURES))
    module, params, cache = decoder(x, num_key_value_heads=2, rotary_base=100.0, use_bias=False, use_sinks=True)
    with jax.numpy_rank_promotion("raise"):
        out, _ = decode(module, params, cache, x, (4, 3))
    want = module.clone(decode=False, is_causal=True).apply(params, x)
    assert_allclose(out, want, **tolerance())


def test_drop_in_seed_is_that_of_the_key():
    q, k, v = qkv()
    out = mfa.attention_fn(q, k, v, dropout_rate=0.5, broadcast_dropout=False, dropout_rng=KEY)
    seed = jax.random.bits(KEY, (2,), jnp.uint32)
    want = jax_mfa.dot_product_attention(q, k, v, dropout_rate=0.5, dropout_seed=seed, implementation="reference")
    assert_allclose(out, want, **tolerance())
