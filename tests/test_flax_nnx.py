"""jax_mfa in flax.nnx: `attention_fn` against flax's own function, `FlashMultiHeadAttention` against plain numpy."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from harness import assert_allclose
from test_flax_shared import OF_THE_WRONG_KIND, RAGGED, SETTINGS, causal, normal, numpy_module, perturbed, tolerance

import jax_mfa
from jax_mfa.flax import linen as mfa_linen
from jax_mfa.flax import nnx as mfa
from jax_mfa.flax import rotary_embedding

B, T, S, N, H, FEATURES = 2, 7, 9, 6, 4, 24
KEY = jax.random.key(7)
STOCK_KNOWS = inspect.signature(nnx.dot_product_attention).parameters


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


def qkv(t=T, s=S, heads=N):
    shapes = (B, t, N, H), (B, s, heads, H), (B, s, heads, H)
    return tuple(jnp.asarray(normal(i, shape)) for i, shape in enumerate(shapes))


def get(variable):
    return np.asarray(variable.get_value() if hasattr(variable, "get_value") else variable.value)


def set_random(module, seed=0):
    """Random values in every parameter, also where initialisers put zeros and ones; the module."""
    state = nnx.state(module, nnx.Param)
    nnx.update(module, perturbed(state, seed))
    return module


def params_of(module):
    """The parameters as linen names them."""
    named = {}
    for name in ("query", "key", "value", "out", "query_ln", "key_ln"):
        layer = getattr(module, name, None)
        if layer is not None:
            fields = ("kernel", "bias", "scale")
            values = {field: getattr(layer, field, None) for field in fields}
            named[name] = {field: get(x) for field, x in values.items() if x is not None}
    if getattr(module, "sinks", None) is not None:
        named["sinks"] = get(module.sinks)
    return named


def stock(**settings):
    """Flax's module, twice with the same parameters: with our attention function and with its own."""
    make = lambda **attention: set_random(
        nnx.MultiHeadAttention(
            num_heads=N, in_features=FEATURES, rngs=nnx.Rngs(0), **{"decode": False, **settings, **attention}
        )
    )
    return make(attention_fn=mfa.attention_fn), make()


MASKS = {
    "none": lambda s: None,
    "causal of flax": lambda s: nnx.make_causal_mask(jnp.ones((B, T))) if s == T else causal(T, s)[None, None],
    "bool per head": lambda s: random_mask((B, N, T, s)),
    "float per head": lambda s: random_mask((B, N, T, s)).astype(np.float32),
    "integer": lambda s: random_mask((B, 1, T, s)).astype(np.int32),
}


# --- attention_fn


def test_every_argument_of_flax_is_named():
    ours = inspect.signature(mfa.attention_fn).parameters
    assert [name for name in ours if name in STOCK_KNOWS] == list(STOCK_KNOWS)
    assert not any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in ours.values())


@pytest.mark.share(8)
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_module_equals_stock(mask, cross, no_stock):
    mask = MASKS[mask](S if cross else T)
    mask = None if mask is None else jnp.asarray(mask)
    x = normal(0, (B, T, FEATURES))
    others = (normal(1, (B, S, FEATURES)),) if cross else ()
    module, reference = stock(normalize_qk=cross)
    assert_allclose(module(x, *others, mask=mask), reference(x, *others, mask=mask), **tolerance())


@pytest.mark.parametrize("mask", [None, "float per head"])
def test_is_causal(mask, no_stock):
    see = causal(T, S)
    mask = None if mask is None else MASKS[mask](S)
    want = nnx.dot_product_attention(*qkv(), mask=jnp.asarray(see if mask is None else (mask * see)))
    assert_allclose(mfa.attention_fn(*qkv(), mask=mask, is_causal=True), want, **tolerance())


@pytest.mark.skipif("is_causal" not in STOCK_KNOWS, reason="this flax has no is_causal")
def test_module_passes_is_causal(no_stock):
    x = normal(0, (B, T, FEATURES))
    module, reference = stock()
    assert_allclose(module(x, is_causal=True), reference(x, is_causal=True), **tolerance())


@pytest.mark.skipif("is_causal" not in STOCK_KNOWS, reason="this flax has no num_kv_heads")
def test_grouped_heads_of_flax(no_stock):
    x = normal(0, (B, T, FEATURES))
    module, reference = stock(num_kv_heads=2)
    assert_allclose(module(x), reference(x), **tolerance())


@pytest.mark.skipif(not hasattr(nnx, "RoPE"), reason="this flax has no nnx.RoPE")
@pytest.mark.parametrize("positions", [None, (T,), (B, T)], ids=str)
def test_rotary_embedding_of_flax(positions, no_stock):
    x = normal(0, (B, T, FEATURES))
    rope = nnx.RoPE(theta=100.0)
    layer = functools.partial(nnx.MultiHeadAttention, N, FEATURES, num_kv_heads=2, decode=False)
    module = layer(attention_fn=functools.partial(mfa.attention_fn, rope=rope), rngs=nnx.Rngs(0))
    if positions is not None:
        positions = np.random.default_rng(0).integers(0, 50, positions)
    out = module(x, is_causal=True, input_positions=positions)
    own = flash(num_kv_heads=2)
    nnx.update(own, nnx.state(module, nnx.Param))
    q, k = (
        rotary_embedding(project(x), np.arange(T) if positions is None else positions, base=100.0)
        for project in (own.query, own.key)
    )
    want = own.out(jax_mfa.dot_product_attention(q, k, own.value(x), is_causal=True))
    assert_allclose(out, want, **tolerance(terms=1024))


def test_positions_without_a_rotary_embedding_are_an_error():
    with pytest.raises(ValueError, match=r"^input_positions must be given with rope"):
        mfa.attention_fn(*qkv(), input_positions=np.arange(T))


@pytest.mark.parametrize("bias", [(B, N, T, S), (1, N, T, S)])
def test_function_equals_stock_with_bias(bias, no_stock):
    bias, mask = jnp.asarray(normal(5, bias)), jnp.asarray(MASKS["float per head"](S))
    # as positional arguments, in flax's order
    assert_allclose(mfa.attention_fn(*qkv(), bias, mask), nnx.dot_product_attention(*qkv(), bias, mask), **tolerance())


def test_gradients_equal_stock(no_stock):
    x, mask = normal(0, (B, T, FEATURES)), jnp.asarray(MASKS["float per head"](T))
    weights = normal(6, (B, T, FEATURES))
    gradients = [nnx.grad(lambda m: (weights * m(x, mask=mask)).sum())(module) for module in stock()]
    for ours, reference in zip(*map(jax.tree.leaves, gradients)):
        assert_allclose(ours, reference, **tolerance(terms=1024))
    assert max(np.abs(g).max() for g in jax.tree.leaves(gradients[0])) > 0.1


def test_bfloat16(no_stock):
    x = normal(0, (B, T, FEATURES))
    module = nnx.MultiHeadAttention(
        N, FEATURES, dtype=jnp.bfloat16, attention_fn=mfa.attention_fn, decode=False, rngs=nnx.Rngs(0)
    )
    out = module(x, mask=nnx.make_causal_mask(x[..., 0]))
    assert out.dtype == jnp.bfloat16
    want = numpy_module(params_of(module), x, see=causal(T))
    assert_allclose(np.asarray(out, np.float64), want, **tolerance(jnp.bfloat16))


def test_promote_dtype_is_the_callers(no_stock):
    seen = []

    def promote(args, *, dtype):
        seen.append(dtype)
        return tuple(x.astype(jnp.float16) for x in args)

    assert mfa.attention_fn(*qkv(), promote_dtype=promote, dtype=jnp.float32).dtype == jnp.float16
    assert seen == [jnp.float32]


def test_decode_mode_of_flax(no_stock):
    x = normal(0, (B, T, FEATURES))
    module, reference = stock()
    want = reference(x, mask=nnx.make_causal_mask(x[..., 0]))
    module.init_cache(x.shape)
    for t in range(T):
        assert_allclose(module(x[:, t : t + 1], decode=True), want[:, t : t + 1], **tolerance())


def test_row_that_sees_nothing_is_zero_on_either_route():
    mask = random_mask((B, 1, T, S))
    mask[:, :, 2] = False
    ours = mfa.attention_fn(*qkv(), mask=mask)
    dropped = mfa.attention_fn(*qkv(), mask=jnp.asarray(mask), dropout_rate=1e-6, dropout_rng=KEY)
    assert not ours[:, 2].any() and np.abs(ours[:, 3]).min() > 0
    assert_allclose(ours, dropped, **tolerance())


def test_broadcast_dropout_is_that_of_flax(stock_calls):
    keywords = {"dropout_rate": 0.5, "dropout_rng": KEY}
    out = mfa.attention_fn(*qkv(), **keywords)
    assert len(stock_calls) == 1
    np.testing.assert_array_equal(out, nnx.dot_product_attention(*qkv(), **keywords))
    with pytest.raises(NotImplementedError, match=r"reference.*broadcast_dropout"):
        mfa.attention_fn(*qkv(), **keywords, implementation="reference")


def test_dropout_without_broadcast(no_stock):
    x = normal(0, (B, T, FEATURES))
    module, reference = stock(dropout_rate=0.5, broadcast_dropout=False)
    one, other = module(x, deterministic=False), module(x, deterministic=False)
    assert np.abs(one - other).max() > 0.01
    assert_allclose(module(x, deterministic=True), reference(x, deterministic=True), **tolerance())
    for broadcast in (False, True):
        with pytest.raises(ValueError, match=r"^dropout_rng is required .*, got None"):
            mfa.attention_fn(*qkv(), dropout_rate=0.5, broadcast_dropout=broadcast)


def test_sown_weights_are_those_of_flax(stock_calls):
    x, mask = normal(0, (B, T, FEATURES)), jnp.asarray(MASKS["float per head"](T))
    module, reference = stock()
    sown = []
    for m in (module, reference):
        assert_allclose(m(x, mask=mask, sow_weights=True), module(x, mask=mask), **tolerance())
        sown.append(jax.tree.leaves(nnx.pop(m, nnx.Intermediate)))
    assert len(stock_calls) == 1
    assert sown[0][0].shape == (B, N, T, T)
    np.testing.assert_array_equal(sown[0][0], sown[1][0])


def test_causal_reaches_stock(stock_calls):
    mask = jnp.asarray(random_mask((B, 1, 1, S)))
    keywords = {"dropout_rate": 0.5, "dropout_rng": KEY}
    out = mfa.attention_fn(*qkv(), mask=mask, is_causal=True, **keywords)
    assert len(stock_calls) == 1
    want = nnx.dot_product_attention(*qkv(), mask=mask & causal(T, S), **keywords)
    np.testing.assert_array_equal(out, want)


def test_named_implementation_through_partial(no_stock):
    x = normal(0, (B, T, FEATURES))
    reference = stock()[1]
    module = set_random(
        nnx.MultiHeadAttention(
            N,
            FEATURES,
            attention_fn=functools.partial(mfa.attention_fn, implementation="reference"),
            decode=False,
            rngs=nnx.Rngs(0),
        )
    )
    assert_allclose(module(x), reference(x), **tolerance())
    with pytest.raises(NotImplementedError, match=r"reference.*module"):
        module(x, sow_weights=True)


# --- FlashMultiHeadAttention


def flash(**settings):
    return set_random(
        mfa.FlashMultiHeadAttention(**{"num_heads": N, "in_features": FEATURES, "rngs": nnx.Rngs(0), **settings})
    )


@pytest.mark.share(4)
@pytest.mark.parametrize("name", SETTINGS)
def test_flash_module_equals_numpy_and_linen(name):
    settings, arguments = SETTINGS[name]
    x = normal(0, (B, T, FEATURES))
    module = flash(**settings)
    params = params_of(module)
    out = nnx.jit(lambda m, x: m(x))(module, x)
    assert_allclose(out, numpy_module(params, x, **arguments(T)), **tolerance())
    linen = mfa_linen.FlashMultiHeadAttention(num_heads=N, **settings)
    shapes = jax.eval_shape(linen.init, KEY, x)["params"]
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, dict(shapes))
    assert_allclose(out, linen.apply({"params": params}, x), **tolerance())


def test_flash_module_takes_the_parameters_of_flax():
    x = normal(0, (B, T, FEATURES))
    reference = stock()[1]
    module = flash()
    nnx.update(module, nnx.state(reference, nnx.Param))
    mask = jnp.asarray(MASKS["float per head"](T))
    assert_allclose(module(x, mask=mask), reference(x, mask=mask), **tolerance())


def test_flash_cross_attention_with_masks_lengths_segments_and_bias():
    x, y = normal(0, (B, T, FEATURES)), normal(1, (B, S, 5))
    module = flash(num_key_value_heads=3, in_kv_features=5, rotary_base=100.0)
    mask, bias = random_mask((B, N, T, S)), normal(2, (N, T, S))
    rows, columns = np.array([T, 5]), np.array([6, S])
    query_segments = np.random.default_rng(0).integers(0, 2, (B, T))
    key_segments = np.random.default_rng(1).integers(0, 2, (B, S))
    out = module(
        x,
        y,
        bias=bias,
        mask=mask.astype(np.float32),
        query_seq_lengths=rows,
        key_value_seq_lengths=columns,
        query_segment_ids=query_segments,
        key_value_segment_ids=key_segments,
        query_offset=3,
    )
    see = mask & (np.arange(T) < rows[:, None])[:, None, :, None] & (np.arange(S) < columns[:, None])[:, None, None]
    see = see & (query_segments[:, None, :, None] == key_segments[:, None, None, :])
    want = numpy_module(params_of(module), x, y, see=see, bias=bias, base=100.0, offset=3)
    assert_allclose(out, want, **tolerance())


def test_flash_gradients_equal_those_of_the_reference():
    x, weights = normal(0, (B, T, FEATURES)), normal(3, (B, T, FEATURES))
    settings = {"num_key_value_heads": 2, "rotary_base": 50.0, "is_causal": True, "use_sinks": True}
    gradients = [
        nnx.grad(lambda m: (weights * m(x)).sum())(flash(**settings, implementation=implementation))
        for implementation in ("blockwise", "reference")
    ]
    ours, reference = map(jax.tree.leaves, gradients)
    assert len(ours) == 9
    for a, b in zip(ours, reference):
        assert_allclose(a, b, **tolerance(terms=1024))
        assert np.abs(a).max() > 1e-4


def test_flash_bfloat16():
    x = normal(0, (B, T, FEATURES))
    module = mfa.FlashMultiHeadAttention(
        N, FEATURES, dtype=jnp.bfloat16, num_key_value_heads=2, rotary_base=1e4, is_causal=True, rngs=nnx.Rngs(0)
    )
    out = module(x)
    assert out.dtype == jnp.bfloat16 and get(module.query.kernel).dtype == np.float32
    want = numpy_module(params_of(module), x, see=causal(T), base=1e4)
    assert_allclose(np.asarray(out, np.float64), want, **tolerance(jnp.bfloat16))


def test_flash_dropout():
    x = normal(0, (B, T, FEATURES))
    module = flash(dropout_rate=0.5)
    with pytest.raises(ValueError, match="deterministic"):
        module(x)
    module.train()
    run = nnx.jit(lambda m, x: m(x))
    assert np.abs(run(module, x) - run(module, x)).max() > 0.01
    given = [module(x, deterministic=False, rngs=nnx.Rngs(dropout=3)) for _ in range(2)]
    np.testing.assert_array_equal(*given)
    assert_allclose(module(x, deterministic=True), flash()(x), **tolerance())
    keyless = flash(dropout_rate=0.5, keep_rngs=False, deterministic=False)
    with pytest.raises(ValueError, match="rngs must be given"):
        keyless(x)
    assert keyless(x, rngs=nnx.Rngs(dropout=3)).shape == x.shape


@pytest.mark.skipif(not hasattr(nnx, "view"), reason="this flax has no nnx.view")
def test_flash_view():
    x = normal(0, (B, T, FEATURES))
    module = flash(dropout_rate=0.5, deterministic=False)
    module.init_cache(x.shape)
    view = nnx.view(module, deterministic=True, decode=True)
    want = flash(is_causal=True)(x)
    assert_allclose(view(x), want, **tolerance())
    assert not module.decode and not module.deterministic


# --- decoding

DECODERS = {
    "plain": {},
    "gqa rotary": {"num_key_value_heads": 2, "rotary_base": 100.0},
    "window and sinks": {"local_window_size": (2, None), "use_sinks": True, "rotary_base": 1e4},
    "normalised": {"normalize_qk": True, "num_key_value_heads": 1},
}


def decode(module, x, lengths, **keywords):
    """Outputs for chunks of `x` of these lengths, one after another, each under jit."""
    step = nnx.jit(lambda m, x: m(x, decode=True, **keywords))
    outs, start = [], 0
    for length in lengths:
        outs.append(step(module, x[:, start : start + length]))
        start += length
    return np.concatenate(outs, 1)


@pytest.mark.share(4)
@pytest.mark.parametrize("name", DECODERS)
def test_prefill_and_steps_equal_the_causal_run(name):
    x = normal(0, (B, S, FEATURES))
    module = flash(**DECODERS[name])
    want = flash(**DECODERS[name], is_causal=True)(x)
    for lengths in ((5, 1, 1, 1, 1), (S,)):
        module.init_cache(x.shape)
        assert get(module.cached_key).shape == (B, S, DECODERS[name].get("num_key_value_heads", N), H)
        assert_allclose(decode(module, x, lengths), want, **tolerance())
        np.testing.assert_array_equal(get(module.cache_index), [S] * B)
    assert isinstance(module.cached_value, nnx.Cache)


@pytest.mark.parametrize("name", RAGGED)
def test_prompts_of_different_lengths_go_on_where_each_ended(name):
    x, prompts = normal(0, (B, S, FEATURES)), np.array([5, 2])
    want = flash(**RAGGED[name], is_causal=True)(x)
    module = flash(**RAGGED[name])
    module.init_cache(x.shape)
    step = nnx.jit(lambda m, *a, **k: m(*a, **k, decode=True))
    padded = np.where(np.arange(5)[:, None] < prompts[:, None, None], x[:, :5], np.nan)
    out = step(module, padded, key_value_seq_lengths=prompts)
    for row, length in enumerate(prompts):
        assert_allclose(out[row, :length], want[row, :length], **tolerance())
    for i in range(4):
        at = np.arange(B), prompts + i
        assert_allclose(step(module, x[at][:, None])[:, 0], want[at], **tolerance())
    np.testing.assert_array_equal(get(module.cache_index), prompts + 4)
    assert get(module.cached_key).shape == (B, 3 if module.ring_cache else S, 2, H)


def test_unwritten_entries_are_never_seen():
    x = normal(0, (B, S, FEATURES))
    module = flash()
    outs = []
    for fill in (0.0, np.nan):
        module.init_cache(x.shape)
        for cached in (module.cached_key, module.cached_value):
            mfa._set(cached, jnp.full(get(cached).shape, fill, jnp.float32))
        outs.append(decode(module, x, (3, 1, 2)))
    np.testing.assert_array_equal(*outs)
    assert np.isfinite(outs[0]).all()


def test_cache_dtype_is_the_callers():
    x = normal(0, (B, S, FEATURES))
    module = flash()
    module.init_cache(x.shape, dtype=jnp.bfloat16)
    out = decode(module, x, (4, 1, 4))
    assert out.dtype == np.float32 and get(module.cached_key).dtype == jnp.bfloat16
    want = flash(is_causal=True)(x)
    assert_allclose(out, want, **tolerance(jnp.bfloat16))
    assert np.abs(out - want).max() > 1e-4
    bfloat16 = flash(dtype=jnp.bfloat16)
    bfloat16.init_cache(x.shape)
    assert get(bfloat16.cached_key).dtype == jnp.bfloat16


def test_decoding_left_padded_prompts():
    x = normal(0, (B, S, FEATURES))
    module = flash(rotary_base=100.0)
    module.init_cache(x.shape)
    start = np.array([0, 3])
    out = decode(module, x, (6, 1, 1, 1), mask=(np.arange(S) >= start[:, None])[:, None, None])
    alone = flash(rotary_base=100.0, is_causal=True)(x[1:, 3:])
    assert_allclose(out[1:, 3:], alone, **tolerance())


def test_more_tokens_than_the_cache_holds():
    x = normal(0, (B, T, FEATURES))
    module = flash()
    module.init_cache(x.shape)
    with pytest.raises(ValueError, match=rf"holds {T} tokens"):
        decode(module, normal(1, (B, T + 1, FEATURES)), (T + 1,))
    assert np.isfinite(decode(module, x, (T - 1,))).all()
    # not traced: the count is known
    with pytest.raises(ValueError, match=rf"holds {T} tokens; {T - 1} known"):
        module(x[:, :2], decode=True)
    # traced: the answer cannot be taken for a right one
    assert np.isnan(decode(module, x, (2,))).all()


def test_flash_errors(monkeypatch):
    x = normal(0, (B, T, FEATURES))
    module = flash()
    with pytest.raises(ValueError, match="init_cache"):
        module(x[:, :1], decode=True)
    with pytest.raises(ValueError, match="input_shape"):
        module.init_cache((3,))
    module.init_cache(x.shape)
    with pytest.raises(ValueError, match="query_offset"):
        module(x[:, :1], decode=True, query_offset=1)
    with pytest.raises(ValueError, match="inputs_k"):
        module(x[:, :1], x[:, :2], decode=True)
    with pytest.raises(ValueError, match="cache, of shape"):
        module(x[:1, :1], decode=True)
    with pytest.raises(ValueError, match=r"inputs_q must have 24 features"):
        module(x[..., :-1])
    with pytest.raises(ValueError, match="inputs_k"):
        module(x, None, x)
    monkeypatch.setattr(jax_mfa.metal.runtime, "get", lambda: jax_mfa.metal.runtime.Runtime(reason="none here"))
    with pytest.raises(NotImplementedError, match=r"metal.*none here"):
        flash(implementation="metal")(x)
    for settings, match in (
        ({"num_key_value_heads": 4}, "num_key_value_heads, got 6 and 4"),
        ({"num_heads": 5}, "num_heads = 5 must divide"),
        ({"head_dim": 4, "qkv_features": 25}, "head_dim"),
    ):
        with pytest.raises(ValueError, match=match):
            flash(**settings)


@pytest.mark.parametrize(("settings", "error", "match"), OF_THE_WRONG_KIND)
def test_flash_settings_of_the_wrong_kind(settings, error, match):
    with pytest.raises(error, match=match):
        flash(**settings)(normal(0, (B, T, FEATURES)))
