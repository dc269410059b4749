"""Quantised arrays: what is stored, how far it is from what was given, and what cannot be."""

import dataclasses
import functools
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quantization_error as simulation
from harness import arrays, assert_allclose, quick_jit, types_of

import jax_mfa
from jax_mfa import QuantizedArray, Scheme, quantize
from jax_mfa.kv_cache import quantized as quantization
from jax_mfa.kv_cache.storage import LEVELS, SYMMETRIC_LEVELS

KINDS = ("int8", "int4", "fp8")
SCHEMES = [Scheme(kind, symmetric) for kind in KINDS for symmetric in (False, True)]
named = lambda x: f"{x.kind}-{'symmetric' if x.symmetric else 'asymmetric'}"


def stored_numbers(x: QuantizedArray):
    """What a quantised array stands for, in float64 and numpy, from what it stores."""
    wide = lambda a: np.asarray(a).astype(np.float64)
    s, h, scheme = x.shape[-3], x.head_size, x.scheme
    data = np.asarray(x.data)
    if scheme.kind == "int4":
        nibbles = np.empty((*data.shape[:-1], 2 * data.shape[-1]), np.int64)
        nibbles[..., ::2], nibbles[..., 1::2] = data % 16, data // 16
        data = nibbles[..., :h]
        data = np.where(data > 7, data - 16, data) if scheme.symmetric else data
    elif scheme.kind == "fp8":
        sign, exponent, fraction = data // 128, data // 8 % 16, data % 8
        data = np.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent - 10.0))
        data = np.where(sign == 1, -data, data)
    per_token = lambda a, per: a if a.shape[-3] == 1 else np.repeat(a, per or s, -3)[..., :s, :, :]
    per_number = lambda a: a if a.shape[-1] == 1 else np.repeat(a, scheme.channels, -1)[..., :h]
    out = data * per_number(per_token(wide(x.scales), scheme.tokens))
    if x.zeros is not None:
        out = out + per_number(per_token(wide(x.zeros), scheme.tokens))
    return out if x.means is None else out + per_token(wide(x.means), scheme.center)


# --- how far it is from what was given


@functools.cache
def errors(scheme: simulation.Simulated):
    """Of the package, for each distribution: round trip of the keys, and the output."""
    run = quick_jit(lambda x: quantize(x, Scheme(**dataclasses.asdict(scheme))).dequantize())

    def of(distribution):
        q, k, v = simulation.numbers(distribution)
        key, value = np.asarray(run(np.stack([k, v])[:, :, None].astype(np.float32)))[:, :, 0]
        out, wanted = simulation.attention(q, key, value), simulation.attention(q, k, v)
        return simulation.error(key, k), simulation.error(out, wanted)

    return [of(x) for x in simulation.DISTRIBUTIONS]


@pytest.mark.share(8)
@pytest.mark.parametrize("scheme", simulation.SCHEMES, ids=lambda x: x.label)
def test_the_error_is_that_of_a_plain_simulation(scheme):
    for distribution, found in zip(simulation.DISTRIBUTIONS, errors(scheme)):
        assert_allclose(found, simulation.errors(scheme, distribution), rtol=0.02, err_msg=distribution)


def test_the_error_of_groups_of_32_is_what_theory_says():
    # √12 levels of the range of 32 normal numbers, whose ends are exact
    for kind, round_trip in (("int8", 0.0046), ("int4", 0.078)):
        assert_allclose(errors(simulation.Simulated(kind))[0][0], round_trip, rtol=0.02)


def test_the_error_of_the_output_is_that_of_the_numbers_and_of_nothing_else():
    scheme, numbers = simulation.Simulated("int4"), simulation.numbers("gaussian")
    q, k, v = (x[None, :, None].astype(np.float32) for x in numbers)

    @jax.jit
    def run(q, k, v):
        keys, values = (quantize(x, Scheme(**dataclasses.asdict(scheme))) for x in (k, v))
        return jax_mfa.dot_product_attention(q, keys, values, implementation="blockwise")

    found = simulation.error(np.asarray(run(q, k, v))[0, :, 0], simulation.attention(*numbers))
    assert_allclose(found, errors(scheme)[0][1], rtol=1e-3)


def test_centring_and_finer_groups_help_where_they_do():
    of = lambda *a, **k: dict(zip(simulation.DISTRIBUTIONS, errors(simulation.Simulated(*a, **k))))
    fine, coarse, centred = of("int4"), of("int4", channels=64), of("int4", center=64)
    for distribution in simulation.DISTRIBUTIONS:
        assert fine[distribution] < coarse[distribution]
    assert centred["outliers"][0] < 0.6 * fine["outliers"][0] and centred["outliers"][1] < 0.7 * fine["outliers"][1]
    assert centred["gaussian"][1] < 1.05 * fine["gaussian"][1]


# --- what is exact


def flat(dtype):
    """Every token and head has one number, far from 0 or 0 itself."""
    values = np.concatenate([[0, 1e4, -1e4, 1e-3], np.random.default_rng(0).uniform(-9, 9, 76)])
    return np.broadcast_to(values.reshape(1, 40, 2, 1), (2, 40, 2, 7)).astype(dtype)


def flat_blocks_are_exact(scheme, dtype):
    x = flat(dtype)
    got = quick_jit(lambda x: quantize(x, scheme).dequantize())(x)
    np.testing.assert_array_equal(np.asarray(got), x)


@pytest.mark.share(2)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=named)
def test_a_block_of_one_number_is_exact(scheme, dtype):
    flat_blocks_are_exact(dataclasses.replace(scheme, channels=3), dtype)


def test_a_constant_array_is_exact_centred_or_not():
    x = np.full((1, 5, 2, 6), 0.3, np.float32)
    for scheme in (Scheme("int4", center=2), Scheme("int8", True, None, None, 3)):
        np.testing.assert_array_equal(quantize(x, scheme).dequantize(), x)


def far_blocks_keep_their_digits(kind):
    x = 1000 + arrays((1, 5, 2, 64))[0]
    got = np.asarray(quick_jit(lambda x: quantize(x, Scheme(kind)).dequantize())(x))
    step = (x.max(-1, keepdims=True) - x.min(-1, keepdims=True)) / {"int8": 255, "int4": 15}[kind]
    assert (np.abs(got - x) <= 0.5 * step + 2e-4).all()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_block_far_from_zero_keeps_its_digits(kind):
    far_blocks_keep_their_digits(kind)


@pytest.mark.parametrize("mistake", ["integer_zero", "no_flat_blocks"])
def test_the_mistakes_of_others_are_found(monkeypatch, mistake):
    def integer_zero(scheme, low, high, dtype):  # in a byte, as a multiple of the scale
        scales = (high - low) / 255
        return scales, -scales * jnp.round(-low / scales).astype(np.int8).astype(low.dtype)

    def no_flat_blocks(scheme, low, high, dtype):
        return jnp.maximum(high, -low) / 127, None

    check = {
        "integer_zero": lambda: far_blocks_keep_their_digits("int8"),
        "no_flat_blocks": lambda: flat_blocks_are_exact(Scheme("int8", True), "float32"),
    }[mistake]
    check()
    monkeypatch.setattr(quantization, "_scales", locals()[mistake])
    monkeypatch.setattr(quantization, "_stored", quantization._stored.__wrapped__)  # not what was traced before
    with pytest.raises(AssertionError):
        check()


@pytest.mark.parametrize("scheme", SCHEMES, ids=named)
def test_what_is_stored_is_what_it_is_said_to_be(scheme):
    x = arrays((2, 5, 2, 7))[0]
    got = quantize(x, dataclasses.replace(scheme, channels=4, tokens=2, center=3))
    bits = {"int8": np.int8 if scheme.symmetric else np.uint8}.get(scheme.kind, np.uint8)
    assert got.data.dtype == bits and got.data.shape == (2, 5, 2, 4 if scheme.kind == "int4" else 7)
    assert got.scales.shape == (2, 3, 2, 2) and got.means.shape == (2, 2, 2, 7)
    assert (got.zeros is None) == scheme.symmetric
    assert got.shape == x.shape and got.ndim == 4 and got.dtype == np.float32
    assert got.nbytes == sum(
        np.asarray(a).nbytes for a in (got.data, got.scales, got.zeros, got.means) if a is not None
    )
    assert_allclose(got.dequantize(), stored_numbers(got), rtol=1e-6, atol=1e-6)
    assert np.abs(stored_numbers(got) - x).max() < {"int8": 0.02, "int4": 0.3, "fp8": 0.15}[scheme.kind]


def test_the_even_channel_is_in_the_low_four_bits():
    x = np.array([0, 15, 2, 7, 9], np.float32).reshape(1, 1, 5)
    got = quantize(x, Scheme("int4", channels=None))
    np.testing.assert_array_equal(np.asarray(got.data)[0, 0], [0 + 15 * 16, 2 + 7 * 16, 9])
    got = quantize(x - 7, Scheme("int4", True, channels=None))  # −7 … 8 in steps of 8/7
    np.testing.assert_array_equal(np.asarray(got.data)[0, 0], [10 + 7 * 16, 12 + 0 * 16, 2])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=named)
def test_no_number_is_clipped_though_scales_are_rounded(scheme, dtype):
    x = arrays((1, 200, 1, 32))[0].astype(dtype)
    got = quick_jit(lambda x: quantize(x, scheme))(x)
    ends = np.abs(stored_numbers(got) - x.astype(np.float64)).max(-1, keepdims=True)
    half = {"int8": 0.5, "int4": 0.5, "fp8": 16}[scheme.kind]
    assert (ends <= 1.001 * half * np.asarray(got.scales).astype(np.float64)).all()


def test_a_block_that_is_not_finite_is_nan_and_no_other():
    x = arrays((1, 4, 1, 64))[0]
    x[0, 1, 0, 3], x[0, 2, 0, 40] = np.nan, np.inf
    for scheme in SCHEMES:
        got = np.isnan(quantize(x, dataclasses.replace(scheme, channels=32)).dequantize())[0, :, 0]
        wanted = np.zeros((4, 64), bool)
        wanted[1, :32], wanted[2, 32:] = True, True
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.share(2)
@pytest.mark.parametrize("scheme", SCHEMES, ids=named)
def test_a_block_that_is_not_finite_is_nan_at_any_length(scheme):
    # arrays of this length XLA reduces by a kernel whose minima and maxima pass over NaN
    x = arrays((2, 64, 2, 64))[0]
    run = jax.jit(quantize, static_argnums=1)
    for center, at, spoil in ((None, (0, 5, 1, 3), np.nan), (None, (1, 63, 0, 63), -np.inf), (4, (0, 9, 1, 3), np.nan)):
        spoilt = x.copy()
        spoilt[at] = spoil
        wanted = np.zeros(x.shape, bool)
        wanted[at[0], at[1], at[2], at[3] // 32 * 32 : at[3] // 32 * 32 + 32] = True
        got = run(spoilt, dataclasses.replace(scheme, channels=32, center=center)).dequantize()
        np.testing.assert_array_equal(np.isnan(got), wanted)
        assert not np.isinf(got).any()


def spans(dtype):
    """Blocks of each kind of range that a dtype has: `[tokens, 1, channels]`, of finite numbers."""
    info, rng = jnp.finfo(dtype), np.random.default_rng(0)
    most, least = float(info.max), float(info.tiny)
    u = rng.uniform(-1, 1, (13, 12, 16))
    u[1:3] = most * np.where(rng.random((2, 12, 16)) < 0.3, np.sign(u[1:3]), u[1:3])  # both ends of the dtype
    u[3] = most * (0.9 + 0.1 * np.abs(u[3]))
    u[4] = -most * np.abs(u[4])
    u[5] = most * np.sign(u[5])
    u[6:10] *= least * np.array([3, 9, 300, 1e5]).reshape(-1, 1, 1)
    u[10] = least * (20 + u[10])
    u[11] = np.sign(u[11]) * np.exp(rng.uniform(np.log(least), np.log(most), u[11].shape))
    u[12] = most * rng.uniform(-1, 1, (12, 1)) * (1 + 0.01 * u[12])  # far from 0
    u = np.clip(u, -most, most).astype(dtype)
    return np.where(np.abs(u.astype(np.float64)) < least, u.dtype.type(0), u).reshape(-1, 1, 16)


@pytest.mark.share(4)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=named)
def test_every_number_comes_back_within_half_a_step_whatever_the_range(scheme, dtype):
    with types_of(dtype):
        x = spans(dtype)
        levels = (SYMMETRIC_LEVELS if scheme.symmetric or scheme.kind == "fp8" else LEVELS)[scheme.kind]
        info, acc = jnp.finfo(dtype), np.promote_types(dtype, np.float32)
        run = quick_jit(lambda x: [quantize(x, each) for each in (scheme, dataclasses.replace(scheme, center=4))])
        for got in run(x):
            wide = lambda x: np.asarray(x).astype(np.float64 if dtype != "float64" else np.longdouble)
            mean = 0 if got.means is None else np.repeat(wide(got.means), 4, -3)
            numbers = wide(x) - mean
            low, high = numbers.min(-1, keepdims=True), numbers.max(-1, keepdims=True)
            reach = np.maximum(np.abs(low), np.abs(high))
            span = reach if scheme.symmetric else (high - low) / (2 if scheme.kind == "fp8" else 1)
            smallest = float(info.smallest_subnormal if dtype == "float16" else info.tiny)
            # scales are rounded up to the dtype, and zeros down; docs/caches.md
            eps = float(info.eps)
            step = np.maximum(
                (span + (0 if scheme.symmetric else eps * reach)) / levels * (1 + eps) + smallest, smallest
            )
            # to fp8 older XLA rounds by way of float16
            half = (16 * (1 + 2.0**-7) if scheme.kind == "fp8" else 0.5) * step
            rounded = eps * np.abs(wide(x)) + 4 * float(jnp.finfo(acc).eps) * (reach + np.abs(mean))
            error = np.abs(wide(got.dequantize()) - wide(x))
            allowed = half + rounded + 2.5 * smallest
            assert (error <= allowed).all(), (error / allowed).max()


# --- slices


BLOCKS = [Scheme("int4", tokens=4, channels=3, center=8), Scheme("int8", True), Scheme("fp8", True, 2, None)]


@pytest.mark.parametrize("scheme", BLOCKS, ids=named)
def test_slices_put_together_are_the_whole(scheme):
    x = quantize(arrays((2, 21, 2, 6))[0], scheme, straight_through=True)
    parts = [x.tokens(0, 8), x.tokens(8, 16), x.tokens(16, 21)]
    assert [p.shape[1] for p in parts] == [8, 8, 5]
    np.testing.assert_array_equal(parts[1].dequantize(), x.dequantize()[:, 8:16])
    assert {jax.tree.structure(p) for p in parts} == {jax.tree.structure(x)}
    for whole, *leaves in zip(*map(jax.tree.leaves, (x, *parts))):
        np.testing.assert_array_equal(whole, np.concatenate(leaves, axis=-3))


def test_the_whole_may_share_one_scale():
    x = quantize(arrays((2, 5, 2, 6))[0], Scheme("int8", tokens=None, channels=None))
    assert x.scales.shape == (2, 1, 1, 1)
    np.testing.assert_array_equal(x.tokens(1, 3).dequantize(), x.dequantize()[:, 1:3])


def test_a_quantised_array_goes_through_jit_vmap_and_trees():
    x = arrays((3, 5, 2, 6))[0]
    whole = quantize(x, "int4")
    mapped = jax.jit(jax.vmap(lambda x: quantize(x, "int4")))(x)
    assert_allclose(mapped.dequantize(), whole.dequantize(), rtol=1e-5)
    assert jax.tree.structure(mapped) == jax.tree.structure(whole)
    assert quantize(x[:, :0]).dequantize().shape == (3, 0, 2, 6)


def test_it_has_an_arrays_attributes_and_a_short_name_traced_or_not():
    x = arrays((3, 5, 2, 6))[0]
    whole = quantize(x, "int4")
    assert (whole.shape, whole.ndim, whole.size, whole.head_size) == (x.shape, x.ndim, x.size, 6)
    assert repr(whole) == f"QuantizedArray(float32[3, 5, 2, 6], {Scheme('int4')})" and repr(whole).isascii()
    names = []
    jax.jit(lambda x: names.append(repr(x)))(whole)
    jax.vmap(lambda x: names.append(repr(x)))(whole)
    assert names == [repr(whole), repr(whole).replace("[3, ", "[")]
    assert "QuantizedArray(" in str(jax.tree.map(lambda _: None, whole))  # in trees of anything
    again = pickle.loads(pickle.dumps(whole))
    assert again.head_size == 6 and jax.tree.structure(again) == jax.tree.structure(whole)
    np.testing.assert_array_equal(again.dequantize(), whole.dequantize())
    assert whole.dequantize("float16").dtype == np.float16
    cache = jax_mfa.PagedKVCache.create(3, 8, 2, 6, key_scheme="int8")
    assert repr(cache).isascii() and len(repr(cache)) < 200


def test_gradients_go_straight_through_or_nowhere():
    x, ct = arrays((1, 5, 2, 6), (1, 5, 2, 6))
    gradient = lambda through: jax.grad(
        lambda x: (ct * quantize(x, Scheme("int4", center=2), straight_through=through).dequantize()).sum()
    )(x)
    np.testing.assert_array_equal(gradient(True), ct)
    np.testing.assert_array_equal(gradient(False), 0 * ct)


def test_second_derivatives_go_straight_through_too():
    x, t = arrays((1, 5, 2, 6), (1, 5, 2, 6))
    stored = quantize(x).dequantize()
    cubed = lambda x: (quantize(x, straight_through=True).dequantize() ** 3).sum()
    np.testing.assert_allclose(jax.jvp(jax.grad(cubed), (x,), (t,))[1], 6 * stored * t, rtol=1e-5, atol=1e-6)


# --- bad input

X = np.ones((1, 4, 2, 6), np.float32)
ONE_OF = "a jax_mfa.Scheme or one of ('int8', 'int4', 'fp8')"
pairs = Scheme("int8", tokens=2)
BAD = [
    (lambda: quantize(X.astype(np.int32)), TypeError, "x must be floating [..., S, K, H], got int32[1, 4, 2, 6]"),
    (lambda: quantize(X[0, 0]), ValueError, "x must have shape [..., S, K, H] with H > 0, got [2, 6]"),
    (lambda: quantize(X[..., :0]), ValueError, "x must have shape [..., S, K, H] with H > 0, got [1, 4, 2, 0]"),
    (lambda: quantize(X, "int3"), ValueError, f"scheme must be {ONE_OF}, got 'int3'"),
    (lambda: quantize(X, 8), TypeError, f"scheme must be {ONE_OF}, got int"),
    (
        lambda: quantize(X, straight_through=1),
        TypeError,
        "straight_through must be a Python bool (it is static)",
    ),
    (
        lambda: quantize(quantize(X)),
        TypeError,
        "x must be an array (floating [..., S, K, H]), got a QuantizedArray: see",
    ),
    (lambda: quantize(X).dequantize("foo"), TypeError, "dtype must be a floating dtype, got 'foo'"),
    (lambda: quantize(X).dequantize(np.int8), TypeError, "dtype must be a floating dtype, got <class 'numpy.int8'>"),
    (lambda: quantize(X).dequantize(X), TypeError, "dtype must be a floating dtype, got ndarray float32[1, 4, 2, 6]"),
    (lambda: quantize(X).tokens(1.0, 3), TypeError, "start must be an integer, got 1.0"),
    (lambda: Scheme(X), ValueError, "kind must be one of ('int8', 'int4', 'fp8'), got ndarray float32[1, 4, 2, 6]"),
    (lambda: Scheme("int8", tokens=2**31), ValueError, "tokens must be at most 2147483647, got 2147483648"),
    (lambda: Scheme("nf4"), ValueError, "kind must be one of ('int8', 'int4', 'fp8'), got 'nf4'"),
    (lambda: Scheme("int8", 0), TypeError, "symmetric must be a Python bool (it is static), got 0"),
    (lambda: Scheme("int8", tokens=0), ValueError, "tokens must be at least 1, got 0"),
    (lambda: Scheme("int8", channels=2.0), TypeError, "channels must be an integer, got 2.0"),
    (lambda: Scheme("int8", center=-1), ValueError, "center must be at least 1, got -1"),
    (lambda: quantize(X, pairs).tokens(1, 3), ValueError, "start must be a multiple of the 2 tokens of a block, got 1"),
    (lambda: quantize(X).tokens(2, 5), ValueError, "start and stop must be a range within the 4 tokens, got 2 and 5"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD, ids=lambda x: x if isinstance(x, str) else "")
def test_what_cannot_be_is_named(call, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        call()
